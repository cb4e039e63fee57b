"""spike.activation: for a moment, a step needs more device memory than the headroom has.

Decided in this order:

1. Allocations that torch reports as failed; the agent's black box has the newest. Where allocated bytes had grown by
   more than was missing, that growth is the cause, not a spike.
2. Requests of our own that failed with an out-of-memory message, unless another verdict explains each of them: a single
   long request is capacity.long_context, and enough memory in too small pieces is fragmentation.allocator.
3. A server that exited while serving: what it requested stands in its log or the black box, so it is unknown here.
4. If nothing failed: a device with almost nothing free while requests run, and free again afterwards. Most transients
   are shorter than the time between two samples, but torch keeps what they took, so the minimum of free bytes shows it.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import compress

from kvdiag.diagnosis.engine_columns import engine_columns
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions import smaller_pool, with_room_for
from kvdiag.diagnosis.request_failures import holes_in_message, memory_failures, shortage_evidence
from kvdiag.diagnosis.reserved_memory import confirmed, room_bytes
from kvdiag.diagnosis.rule import worst
from kvdiag.diagnosis.server_exits import server_exits
from kvdiag.diagnosis.timeline_queries import (
    NO_DEVICES,
    assigned_uuids,
    gap_reason,
    server_bytes,
    server_devices,
    torch_readings,
)
from kvdiag.formatting import format_bytes, format_holder, plural
from kvdiag.model import Allocator, Device, Evidence, Facts, FailedAllocation, Finding, Span, Status, Timeline
from kvdiag.oom.message import Shortage

ID = "spike.activation"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at allocations that torch failed, at failed requests, at exits under load, and at devices under load."""
    counted = [pair for pair in torch_readings(timeline, facts) if None not in (pair[0].ooms_total, pair[1].ooms_total)]
    failed = [(first, last) for first, last in counted if (last.ooms_total or 0) > (first.ooms_total or 0)]
    failed.sort(key=lambda pair: (pair[1].title or "", pair[1].pid, pair[1].device_uuid))
    judged = [
        _prescribed(replace(_of_torch(first, last), holder=last.who), last.failure, timeline, facts, limits)
        for first, last in failed
    ]
    if judged:
        return (worst(judged),)
    if failures := memory_failures(timeline):
        return (
            worst(
                _prescribed(_of_request(span, shortage, limits), shortage, timeline, facts, limits)
                for span, shortage in failures
            ),
        )
    ended = [one for one in server_exits(timeline, facts, limits) if one.answered_before]
    if ended:
        last = ended[-1]
        times = "once" if len(ended) == 1 else f"{len(ended)} times"
        summary = (
            f"the server exited {times} while serving; before that, at least {format_bytes(last.free_before_bytes)} "
            f"of GPU {last.gpu} was free; pass its log or the agent's black box to `kvdiag diagnose --postmortem`"
        )
        evidence = (
            Evidence("exits_while_serving", len(ended), "times", "engine"),
            Evidence("gpu", last.gpu, "index", "nvml"),
            Evidence("min_free_before_exit", last.free_before_bytes, "bytes", "nvml"),
        )
        return (Finding(ID, "unknown", summary, evidence),)
    return (_of_devices(timeline, facts, limits),)


def _prescribed(
    found: Finding, failure: Shortage | FailedAllocation | None, timeline: Timeline, facts: Facts, limits: Limits
) -> Finding:
    """The finding with the pool that leaves room for what failed."""
    if found.status not in ("suspect", "fault"):
        return found
    asked, free = (None, None) if failure is None else (failure.asked_bytes, failure.free_bytes)
    return replace(found, prescription=with_room_for(timeline, facts, limits, asked, free))


def _of_request(span: Span, shortage: Shortage, limits: Limits) -> Finding:
    asked = format_bytes(shortage.asked_bytes or 0)
    free = "" if shortage.free_bytes is None else f" with {format_bytes(shortage.free_bytes)} free"
    evidence = (*shortage_evidence(shortage), Evidence("step", span.step, "", "kvdiag"))
    found = holes_in_message(shortage, limits)
    if found.explain_it:
        summary = f"free plus unallocated memory was enough for {asked}, but in no single block"
        return Finding(ID, "ok", summary, evidence)
    if span.workload is not None and span.workload.requests == 1:
        summary = f"the failed allocation of {asked} was for a request that ran alone: a context limit, not a spike"
        return Finding(ID, "ok", summary, evidence)
    if found.state == "unknown":
        summary = f"an allocation of {asked} failed{free}; run the agent in the server to see why (`kvdiag agent`)"
        return Finding(ID, "unknown", summary, evidence)
    return Finding(ID, "fault", f"{asked} requested at once{free} under concurrent requests", evidence)


def _of_torch(first: Allocator, last: Allocator) -> Finding:
    who = format_holder(last.who)
    times = (last.ooms_total or 0) - (first.ooms_total or 0)
    grown = last.allocated_bytes - first.allocated_bytes
    failure = last.failure
    evidence: tuple[Evidence, ...] = (
        Evidence("process", last.who, "holder", "torch"),
        Evidence("failed_allocations", times, "times", "torch"),
        Evidence("allocated_growth", grown, "bytes", "torch"),
    )
    if failure is None:
        summary = f"{who}: {plural(times, 'torch allocation')} failed; read their sizes from the agent's black box"
        return Finding(ID, "suspect", summary, evidence)
    room = room_bytes(failure)
    short = failure.asked_bytes - room
    evidence += (
        Evidence("requested", failure.asked_bytes, "bytes", "black box"),
        Evidence("free_on_device", failure.free_bytes, "bytes", "black box"),
        Evidence("available_with_unused", room, "bytes", "black box"),
    )
    if confirmed(failure):
        summary = f"{who}: free plus unallocated memory was enough for the failed allocation, but in no single block"
        return Finding(ID, "ok", summary, evidence)
    if short > 0 and grown >= short:
        growth = f"torch's allocated bytes had grown by {format_bytes(grown)}"
        summary = f"{who}: {growth}; without that growth it would have fit"
        return Finding(ID, "ok", summary, evidence)
    summary = (
        f"{who}: {format_bytes(failure.asked_bytes)} requested at once with {format_bytes(room)} left on the device "
        f"and in torch's cache; allocated bytes had grown by only {format_bytes(max(grown, 0))}"
    )
    return Finding(ID, "fault" if short > 0 else "suspect", summary, evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dip:
    """A device at its fullest while requests ran, and the idle samples next to it where there are any."""

    fullest: Device
    idle_before: Device | None
    idle_after: Device | None = None


def _of_devices(timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    dips = _dips(timeline, facts, limits)
    if not dips:
        known = assigned_uuids(timeline, facts)
        how = "run the test steps (`kvdiag run`)" if known else "run kvdiag in the server's PID namespace"
        unread = f"no GPU of the server was sampled while requests ran; {how}"
        if timeline.samples and all(sample.devices is None for sample in timeline.samples):
            return Finding(ID, "unknown", gap_reason(timeline, facts, "nvml") or NO_DEVICES)
        if timeline.samples and not any(sample.engines_idle is False for sample in timeline.samples):
            return Finding(ID, "unknown", "no request ran while the GPUs were sampled; sample the server under load")
        return Finding(ID, "unknown", gap_reason(timeline, facts, "nvml") or unread)
    deepest = min(dips, key=lambda dip: (_free(dip.fullest), dip.fullest.index))
    gpu, least = deepest.fullest.index, _free(deepest.fullest)
    before, after = (None if one is None else _free(one) for one in (deepest.idle_before, deepest.idle_after))
    held, held_before = (_others(one, facts) for one in (deepest.fullest, deepest.idle_before))
    by_others = None if held is None or held_before is None else max(held - held_before, 0)
    evidence = (
        Evidence("gpu", gpu, "index", "nvml"),
        Evidence("min_free_under_load", least, "bytes", "nvml"),
        Evidence("free_before_load", before, "bytes", "nvml"),
        Evidence("free_after_load", after, "bytes", "nvml"),
        Evidence("taken_by_other_processes", by_others, "bytes", "nvml"),
    )
    status, summary = _judged(f"GPU {gpu}", least, before, after, limits)
    if status == "suspect" and (by_others or 0) >= limits.foreign_suspect_bytes:
        status, summary = "ok", f"GPU {gpu}: other processes caused the shortage under load"
    if status != "suspect":
        return Finding(ID, status, summary, evidence)
    gain = f"at least {format_bytes(limits.headroom_bytes)} of GPU {gpu} stay free under load"
    fix = smaller_pool(timeline, facts, limits, needed_bytes=limits.headroom_bytes - least, gain=gain)
    return Finding(ID, status, summary, evidence, prescription=fix)


def _judged(gpu: str, least: int, before: int | None, after: int | None, limits: Limits) -> tuple[Status, str]:
    free = f"{gpu}: at least {format_bytes(least)} free under load"
    if least >= limits.headroom_bytes:
        return "ok", free
    if before is None:
        return "unknown", f"{free}, but it was not observed idle before; sample the idle server first"
    if before < limits.headroom_bytes:
        return "ok", f"{free} and {format_bytes(before)} before it: full even without a spike"
    if after is None or after - least < limits.foreign_suspect_bytes:
        kept = "torch's cache or a leak; install the kvdiag agent in the server to separate them"
        return "unknown", f"{free}, {format_bytes(before)} before it, and no memory was released since: {kept}"
    return "suspect", f"{free}; {format_bytes(after - least)} were released after it, so a larger step may not fit"


def _dips(timeline: Timeline, facts: Facts, limits: Limits) -> list[_Dip]:
    own = assigned_uuids(timeline, facts)
    columns = engine_columns(timeline)
    answered = [bool(one.engines) for one in columns.samples]
    times, states = list(compress(columns.times_seconds, answered)), list(compress(columns.idle, answered))
    if not times:
        return []
    first, last, most_seconds = times[0], times[-1], limits.growth.engine_age_seconds
    apart = limits.growth.reading_seconds if last - first > limits.metrics_window_seconds else 0.0
    dips: dict[str, _Dip] = {}
    idle: dict[str, Device] = {}
    due = first
    before: tuple[Device, ...] | None = None
    before_state: bool | None = None
    for sample in timeline.samples:
        # A day of eight GPUs has 700,000 samples, and torch keeps what the most needed of them took.
        if sample.devices is None or (at_seconds := sample.at_seconds) < due:
            continue
        place = bisect_right(times, at_seconds) - 1
        state = states[place]
        if state is None or at_seconds - times[place] > most_seconds:
            continue
        due = at_seconds + apart
        # The same object in the same state says nothing new.
        if sample.devices is before and state is before_state:
            continue
        before, before_state = sample.devices, state
        devices = server_devices(sample.devices, own)
        if not own and len(devices) > 1:
            return []
        for device in devices:
            if device.memory is None:
                continue
            dip = dips.get(device.uuid)
            if state:
                idle[device.uuid] = device
                if dip is not None and dip.idle_after is None:
                    dips[device.uuid] = replace(dip, idle_after=device)
            elif dip is None or _free(device) < _free(dip.fullest):
                dips[device.uuid] = _Dip(fullest=device, idle_before=idle.get(device.uuid))
    return list(dips.values())


def _free(device: Device) -> int:
    return 0 if device.memory is None else device.memory.free_bytes


def _others(device: Device | None, facts: Facts) -> int | None:
    server = None if device is None else server_bytes(device, facts.server_pids)
    return None if device is None or server is None or device.memory is None else device.memory.used_bytes - server
