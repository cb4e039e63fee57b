"""Device memory over hours without test steps, on the same banks as everything: torch's, and what is beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdiag.diagnosis.banks import Watched
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import server_bytes, server_devices, server_uuids
from kvdiag.diagnosis.passive import Readings, company, decisive, evidence, judged, keep, too_short, watch_all
from kvdiag.diagnosis.window import LEAKS, Trend
from kvdiag.model import Facts, Finding, Timeline, cuda_uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whose bytes: the device as CUDA names it, the process in words, and when it began where that is told."""

    device_uuid: str
    who: str
    start_ticks: int = 0


Found = tuple[Holder, Trend]

UNDECIDED = "torch's allocator statistics would tell its allocations from others of the process"
SERVER, UNSEEN = "the server's process", "whoever holds it"


def watched_torch(timeline: Timeline, facts: Facts, limits: Limits, torch: str, beside: str) -> tuple[Finding, ...]:
    """What the agents publish, over hours; empty where they do not, or not for long enough.

    `torch` and `beside` are the ids of the findings for what lives in torch and what the process holds beside it.
    """
    live: Readings[Holder] = {}
    reserved: Readings[Holder] = {}
    outside: Readings[Holder] = {}
    for sample in timeline.samples:
        for each in sample.allocators or ():
            if not each.may_be_of(facts.server_pids):
                continue
            who = f"{each.title or 'process'} {each.pid}"
            key = Holder(device_uuid=each.device_uuid.lower(), who=who, start_ticks=each.start_ticks)
            at_seconds = sample.at_seconds
            keep(live, key, at_seconds, each.allocated_bytes, limits)
            keep(reserved, key, at_seconds, each.reserved_bytes, limits)
            if each.outside_torch_bytes is not None:
                keep(outside, key, at_seconds, each.outside_torch_bytes, limits)
    if not live:
        return ()
    engines = company(timeline)
    of_live, of_reserved = (watch_all(readings, engines, limits) for readings in (live, reserved))
    found, cache = decisive(of_live), decisive(of_reserved)
    if found is None or cache is None:
        return ()
    of_outside = watch_all(outside, engines, limits)
    rest = decisive(of_outside)
    return (
        _of_torch(found, cache, timeline, torch, limits),
        _beside_by_device(cache, timeline, facts, beside, limits)
        if rest is None or set(of_outside) < set(of_live)
        else _finding(beside, rest, "bytes beside torch", timeline, "torch", limits),
    )


def watched_devices(timeline: Timeline, facts: Facts, limits: Limits, torch: str, beside: str) -> tuple[Finding, ...]:
    """What NVML tells of the server's processes, else of its devices, over hours; empty where not for long enough."""
    found = decisive(_device_series(timeline, facts, limits))
    if found is None:
        return ()
    finding = _finding(beside, found, "device bytes", timeline, "nvml", limits)
    if found[1].shape not in LEAKS:
        return replace(finding, id=torch), finding
    # Growth of a device whose holder is not seen may be a neighbour's.
    status = "suspect" if found[0].who.endswith(UNSEEN) else finding.status
    return (
        Finding(id=torch, status="unknown", summary=f"cannot tell: {UNDECIDED}"),
        replace(finding, status=status, summary=f"{finding.summary}; {UNDECIDED}"),
    )


def _of_torch(found: Found, cache: Found, timeline: Timeline, verdict: str, limits: Limits) -> Finding:
    finding = _finding(verdict, found, "torch's live bytes", timeline, "torch", limits)
    if finding.status != "ok" or cache[1].shape not in LEAKS:
        return finding
    # Torch's cache grows over what lives in it: holes that nothing fits in again.
    growing = _finding(verdict, cache, "torch's reserved bytes", timeline, "torch", limits)
    return replace(growing, status="suspect", summary=f"{growing.summary}, while what lives in them does not grow")


def _beside_by_device(cache: Found, timeline: Timeline, facts: Facts, verdict: str, limits: Limits) -> Finding:
    """Where no process's bytes are told inside it: the server's on the device, as long as torch's stand still."""
    watched = _device_series(timeline, facts, limits)
    found = decisive(watched)
    if found is None:
        missing = too_short(watched.values(), "what the processes hold of the device", limits)
        return Finding(id=verdict, status="unknown", summary=f"cannot tell: {missing}")
    if found[1].shape in LEAKS and cache[1].shape in LEAKS:
        grows = "torch's reserved bytes grow, and so does the device"
        summary = f"cannot tell: {grows}; NVML inside the process would tell what is beside torch"
        return Finding(id=verdict, status="unknown", summary=summary)
    return _finding(verdict, found, "device bytes", timeline, "nvml", limits)


def _device_series(timeline: Timeline, facts: Facts, limits: Limits) -> dict[Holder, Watched]:
    own = server_uuids(timeline, facts)
    server: Readings[tuple[str, int]] = {}
    whole: Readings[tuple[str, int]] = {}
    for sample in timeline.samples:
        # Of readings at each second every fifth lists processes: a day of the others need not be looked through.
        if sample.devices is None or (own and all(device.processes is None for device in sample.devices)):
            continue
        for device in server_devices(sample.devices, own):
            key = (device.uuid, device.index)
            size = server_bytes(device, facts.server_pids)
            if size is not None:
                keep(server, key, sample.at_seconds, size, limits)
            elif device.memory is not None and not own:
                # Of devices that are known to be shared the whole says nothing of the server.
                keep(whole, key, sample.at_seconds, device.memory.used_bytes, limits)
    whose = SERVER if server else UNSEEN
    watched = watch_all(server or whole, company(timeline), limits)
    return {
        Holder(device_uuid=cuda_uuid(uuid), who=f"GPU {index}, {whose}"): one for (uuid, index), one in watched.items()
    }


def _finding(verdict: str, found: Found, what: str, timeline: Timeline, source: str, limits: Limits) -> Finding:
    """The finding of the component that decides."""
    holder, trend = found
    room = _room_bytes(timeline, holder.device_uuid)
    status, summary = judged(trend, f"{holder.who}: {what}", room, limits)
    return Finding(
        id=verdict, status=status, summary=summary, evidence=evidence(trend, holder.who, room, source, limits)
    )


def _room_bytes(timeline: Timeline, uuid: str) -> int | None:
    """What is free on a device, as newest read by NVML here or inside a process."""
    for sample in reversed(timeline.samples):
        told = [device.memory for device in sample.devices or () if cuda_uuid(device.uuid) == uuid]
        told += [each.memory for each in sample.allocators or () if each.device_uuid.lower() == uuid]
        free = [memory.free_bytes for memory in told if memory is not None]
        if free:
            return min(free)
    return None
