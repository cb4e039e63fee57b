"""spike.activation: a step needs more device memory than the headroom has, for a moment.

Torch counts the allocations that it gave up on, and its black box has the newest; where more had grown since the first
reading than was short, that growth is the cause and no spike. Without agents a spike shows where a device has next to
nothing free while requests run, and has it again when they are over. Most transients are shorter than the time between
two readings, but torch keeps what they took: the device's least free bytes are their record.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.reserved_memory import confirmed
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.server_exits import deaths
from kvdiag.diagnosis.timeline_queries import (
    assigned_uuids,
    gap_reason,
    readable_bytes,
    server_bytes,
    server_devices,
    torch_readings,
)
from kvdiag.model import Allocator, Device, Evidence, Facts, FailedAllocation, Finding, Status, Timeline

ID = "spike.activation"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at what torch gave up on, at deaths under load, and at the devices while requests run."""
    failed = [(first, last) for first, last in torch_readings(timeline, facts) if _gave_up(first, last)]
    judged = [_of_torch(first, last) for first, last in sorted(failed, key=_named)]
    order: tuple[Status, ...] = ("fault", "suspect", "unknown", "ok")
    if judged:
        return (min(judged, key=lambda finding: order.index(finding.status)),)
    ended = [death for death in deaths(timeline, facts, limits) if death.answered_before]
    if ended:
        last_death = ended[-1]
        times = "once" if len(ended) == 1 else f"{len(ended)} times"
        summary = (
            f"cannot tell: the server ended {times} while it served, with at least "
            f"{readable_bytes(last_death.free_before_bytes)} of GPU {last_death.gpu} free before; what it asked for "
            "its log, or the agent's black box, tells (--postmortem)"
        )
        evidence = (
            number("deaths_while_serving", len(ended), "times", "engine"),
            number("gpu", last_death.gpu, "index", "nvml"),
            number("least_free_before", last_death.free_before_bytes, "bytes", "nvml"),
        )
        return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
    return (_of_devices(timeline, facts, limits),)


def _named(pair: tuple[Allocator, Allocator]) -> tuple[str, int, str]:
    return pair[1].title or "", pair[1].pid, pair[1].device_uuid


def _gave_up(first: Allocator, last: Allocator) -> bool:
    return None not in (first.ooms_total, last.ooms_total) and (last.ooms_total or 0) > (first.ooms_total or 0)


def _of_torch(first: Allocator, last: Allocator) -> Finding:
    """One process that torch had to refuse an allocation since the first reading."""
    who = last.who
    times = (last.ooms_total or 0) - (first.ooms_total or 0)
    grown = last.allocated_bytes - first.allocated_bytes
    failure = last.failure
    evidence: tuple[Evidence, ...] = (
        number("process", who, "", "torch"),
        number("allocations_given_up", times, "times", "torch"),
        number("live_grown_since_first_reading", grown, "bytes", "torch"),
    )
    if failure is None:
        summary = f"{who}: torch gave up on {times} allocations; how much they asked for its black box would tell"
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    room = _room_bytes(failure)
    short = failure.asked_bytes - room
    evidence = (
        *evidence,
        number("asked", failure.asked_bytes, "bytes", "black box"),
        number("free_on_device", failure.free_bytes, "bytes", "black box"),
        number("room_with_unused", room, "bytes", "black box"),
    )
    if confirmed(failure):
        summary = f"{who}: there was room for what torch gave up on, in pieces"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    if short > 0 and grown >= short:
        summary = f"{who}: torch's live bytes had grown by {readable_bytes(grown)}, without which there was room"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    summary = (
        f"{who}: {readable_bytes(failure.asked_bytes)} were asked for at once, {readable_bytes(room)} were left of the "
        f"device and of torch's cache, and what lives in it had grown by {readable_bytes(max(grown, 0))} only"
    )
    return Finding(id=ID, status="fault" if short > 0 else "suspect", summary=summary, evidence=evidence)


def _room_bytes(failure: FailedAllocation) -> int:
    split = failure.split
    return failure.free_bytes + (0 if split is None else split.stranded_bytes + split.releasable_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dip:
    """A device at its fullest while requests ran, and the idle readings next to it where there are any."""

    fullest: Device
    idle_before: Device | None
    idle_after: Device | None = None

    @property
    def gpu(self) -> int:
        """The GPU, as it is counted."""
        return self.fullest.index


def _of_devices(timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    dips = _dips(timeline, facts, limits)
    if not dips:
        missing = gap_reason(timeline, facts, "nvml") or "no GPU that is known to be the server's was read under load"
        return unseen(ID, missing)[0]
    worst = min(dips, key=lambda dip: (_free(dip.fullest), dip.gpu))
    least = _free(worst.fullest)
    before, after = (None if one is None else _free(one) for one in (worst.idle_before, worst.idle_after))
    evidence = (
        number("gpu", worst.gpu, "index", "nvml"),
        number("least_free_while_running", least, "bytes", "nvml"),
        number("free_at_idle_before", before, "bytes", "nvml"),
        number("free_at_idle_after", after, "bytes", "nvml"),
        number("taken_by_others", _taken_by_others(worst, facts), "bytes", "nvml"),
    )
    status, summary = _told(f"GPU {worst.gpu}", least, before, after, limits)
    if status == "suspect" and (_taken_by_others(worst, facts) or 0) >= limits.foreign_suspect_bytes:
        status, summary = "ok", f"GPU {worst.gpu}: what was short while requests ran, others had taken"
    return Finding(id=ID, status=status, summary=summary, evidence=evidence)


def _told(gpu: str, least: int, before: int | None, after: int | None, limits: Limits) -> tuple[Status, str]:
    """Status and sentence of a device by its free bytes under load, and at idle before and after."""
    free = f"{gpu} had {readable_bytes(least)} free at its fullest while requests ran"
    if least >= limits.headroom_bytes:
        return "ok", free
    if before is None:
        return "unknown", f"cannot tell: {free}, and no reading shows it idle before"
    if before < limits.headroom_bytes:
        return "ok", f"{free}, and {readable_bytes(before)} before any ran: it is full without a spike"
    if after is None or after - least < limits.foreign_suspect_bytes:
        kept = "torch keeps what a step took as a leak does; its statistics would tell"
        return "unknown", f"cannot tell: {free}, {readable_bytes(before)} before, and it has not come back: {kept}"
    came = f"{readable_bytes(after - least)} came back when they were over: the next larger step does not fit"
    return "suspect", f"{free}, and {came}"


def _dips(timeline: Timeline, facts: Facts, limits: Limits) -> list[_Dip]:
    """Each of the server's devices at its fullest under load."""
    own = assigned_uuids(timeline, facts)
    pages = [sample for sample in timeline.samples if sample.engines]
    times = [page.at_seconds for page in pages]
    long = bool(times) and times[-1] - times[0] > limits.page_window_seconds
    apart = limits.watched_seconds if long else 0.0
    dips: dict[str, _Dip] = {}
    idle: dict[str, Device] = {}
    due = times[0] if times else 0.0
    for sample in timeline.samples if times else ():
        # A day of eight GPUs has 700,000 readings, and torch keeps what the most needed of them took.
        if sample.devices is None or sample.at_seconds < due:
            continue
        place = bisect_right(times, sample.at_seconds) - 1
        state = pages[place].engines_idle
        devices = server_devices(sample.devices, own)
        if state is None or sample.at_seconds - times[place] > limits.engine_age_seconds:
            continue
        if not own and len(devices) > 1:
            return []
        due = sample.at_seconds + apart
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


def _taken_by_others(dip: _Dip, facts: Facts) -> int | None:
    """What others than the server took between the idle reading and the fullest; `None` where it is not told."""
    held = [_others(one, facts) for one in (dip.fullest, dip.idle_before) if one is not None]
    known = [one for one in held if one is not None]
    return max(known[0] - known[1], 0) if len(known) == 2 else None  # noqa: PLR2004 - both of them


def _others(device: Device, facts: Facts) -> int | None:
    server = server_bytes(device, facts.server_pids)
    return None if server is None or device.memory is None else device.memory.used_bytes - server
