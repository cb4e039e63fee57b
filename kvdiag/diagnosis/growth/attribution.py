"""Say whose the growth of device memory is: torch's, the process's outside torch, another process's, or undecidable.

Where agents in the server's processes publish torch's figures, each component is judged by itself. Where NVML alone
shows growth, it is called what it mostly is with that engine, and the other verdict is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.estimator import Assessment
from kvdiag.diagnosis.growth.growth_verdicts import Decisive, decisive, excluded, finding, too_short
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.reserved_memory import releasable_bytes, stranded_bytes
from kvdiag.formatting import format_bytes
from kvdiag.model import Allocator, Evidence, Facts, Finding, Timeline, cuda_uuid

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"

TORCH_ENGINES = ("vllm", "sglang")
"""Engines whose device memory torch allocates, but for context, graphs and NCCL: of six reported leaks of theirs that
NVML alone saw, four were torch's."""

UNDECIDED = "NVML does not separate torch's memory from the rest; install the kvdiag agent in the server"

SERVER_PROCESS, UNSEEN_PROCESS = "the server's process", "process not visible"

MANY = 2

Part = MemoryComponent


def likely_and_other(engine_name: str | None) -> tuple[str, str]:
    """The verdict that growth of an engine's process is, as far as NVML can tell, and the one that it may be."""
    return (TORCH, NON_TORCH) if engine_name in TORCH_ENGINES else (NON_TORCH, TORCH)


def torch_growth(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What the agents publish, over hours; empty where they do not, or not for long enough."""
    seen, room = memory_series(timeline, facts, limits), partial(_room_bytes, timeline)
    live, reserved = (seen.assessed(part, limits.growth) for part in (Part.TORCH_LIVE, Part.TORCH_RESERVED))
    found, cache = decisive(live, limits.growth, room), decisive(reserved, limits.growth, room)
    if found is None or cache is None:
        return ()
    outside = seen.assessed(Part.OUTSIDE_TORCH, limits.growth)
    rest = decisive(outside, limits.growth, room)

    def judged(verdict: str, one: Decisive, part: MemoryComponent) -> Finding:
        extra = (excluded("reserved_growth_per_hour", reserved.get(one[0]), Part.TORCH_RESERVED),)
        return finding(verdict, one, part, room(one[0]), limits.growth, extra=extra)

    return (
        _among_ranks(judged(TORCH, found, Part.TORCH_LIVE), found, live),
        _outside_by_device(cache, timeline, facts, limits)
        if rest is None or set(outside) < set(live)
        else judged(NON_TORCH, rest, Part.OUTSIDE_TORCH),
    )


def _among_ranks(judged: Finding, found: Decisive, assessed: Mapping[MemoryOwner, Assessment]) -> Finding:
    """The finding of growth with how many of the other ranks grow as well: one alone is a leak of what it does."""
    if not found[1].grows or len(assessed) == 1:
        return judged
    others = [one.decides for owner, one in assessed.items() if owner != found[0] and one.decides is not None]
    growing = sum(growth.grows for growth in others)
    shown = (
        Evidence("other_ranks", len(others), "ranks", "kvdiag"),
        Evidence("other_ranks_that_grow", growing, "ranks", "kvdiag"),
    )
    verb = "grows" if growing < MANY else "grow"
    alone = f"; of the {len(others)} other ranks {growing or 'none'} {verb}" if others else ""
    return replace(judged, summary=f"{judged.summary}{alone}", evidence=(*judged.evidence, *shown))


def unused_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What torch has reserved and does not use, where that keeps growing over hours; `None` where it does not.

    What lies between live blocks stays there: holes that nothing fits in again. What is releasable is a cache, which
    torch gives back before an allocation fails.
    """
    seen, room = memory_series(timeline, facts, limits), partial(_room_bytes, timeline)
    found = decisive(seen.assessed(Part.TORCH_UNUSED, limits.growth), limits.growth, room)
    if found is None or not found[1].grows:
        return None
    last = _newest(timeline, found[0])
    stranded = None if last is None else stranded_bytes(last)
    releasable = None if last is None else releasable_bytes(last)
    if releasable is not None and stranded is not None and releasable >= stranded:
        return None
    live = seen.assessed(Part.TORCH_LIVE, limits.growth).get(found[0])
    growing = finding(
        verdict,
        found,
        Part.TORCH_UNUSED,
        room(found[0]),
        limits.growth,
        extra=(
            excluded("live_growth_per_hour", live, Part.TORCH_LIVE),
            Evidence(
                "reserved_but_unallocated",
                None if last is None else last.reserved_bytes - last.allocated_bytes,
                "bytes",
                "torch",
            ),
            Evidence("stranded", stranded, "bytes", "torch"),
            Evidence("releasable", releasable, "bytes", "torch"),
        ),
    )
    parts = "how much lies between live blocks is not reported"
    if stranded is not None and releasable is not None:
        parts = f"{format_bytes(stranded)} lie between live blocks, {format_bytes(releasable)} are releasable"
    # Holes are no cache: nothing gives them back. Whether they are holes only the blocks tell.
    status = growing.status if stranded is not None and releasable is not None else "suspect"
    return replace(growing, status=status, summary=f"{growing.summary}, while allocated memory does not grow; {parts}")


def device_growth(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What NVML tells of the server's processes, else of its devices, over hours; empty where not for long enough."""
    assessed, part, whose = _device_series(timeline, facts, limits)
    found = decisive(assessed, limits.growth, partial(_room_bytes, timeline))
    if found is None:
        return ()
    one = _among_ranks(_of_device(NON_TORCH, found, part, whose, timeline, facts, limits), found, assessed)
    if not found[1].grows:
        return replace(one, id=TORCH), one
    # Growth of a device whose processes are not visible may be another process's; beside an engine that took its pool
    # at its start there is seldom room for one.
    status = "suspect" if whose == UNSEEN_PROCESS and not (facts.pools or facts.device_uuids) else one.status
    likely, other = likely_and_other(facts.engine_name)
    called = replace(one, id=likely, status=status, summary=f"{one.summary}; {UNDECIDED}")
    uncalled = Finding(id=other, status="unknown", summary=UNDECIDED)
    return (called, uncalled) if likely == TORCH else (uncalled, called)


def others_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What is on the server's devices and not the server's, where it keeps growing; `None` where it does not."""
    seen, room = memory_series(timeline, facts, limits), partial(_room_bytes, timeline)
    found = decisive(seen.assessed(Part.OTHERS, limits.growth), limits.growth, room)
    if found is None or not found[1].grows:
        return None
    server = seen.assessed(Part.SERVER, limits.growth).get(found[0])
    extra = (excluded("server_growth_per_hour", server, Part.SERVER),)
    return finding(verdict, found, Part.OTHERS, room(found[0]), limits.growth, extra=extra)


def _outside_by_device(cache: Decisive, timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    """Where no process's bytes are told inside it: the server's on the device, as long as torch's stand still."""
    assessed, part, whose = _device_series(timeline, facts, limits)
    found = decisive(assessed, limits.growth, partial(_room_bytes, timeline))
    if found is None:
        missing = too_short(assessed.values(), "device memory of the server", limits.growth)
        return Finding(id=NON_TORCH, status="unknown", summary=missing)
    if found[1].grows and cache[1].grows:
        summary = (
            "torch's reserved memory and the device both grow; memory outside torch is only visible to NVML "
            "inside the process"
        )
        return Finding(id=NON_TORCH, status="unknown", summary=summary)
    return _of_device(NON_TORCH, found, part, whose, timeline, facts, limits)


def _device_series(
    timeline: Timeline, facts: Facts, limits: Limits
) -> tuple[Mapping[MemoryOwner, Assessment], MemoryComponent, str]:
    """The server's own bytes on its devices, else the devices'; which of the two, and whose they are."""
    seen = memory_series(timeline, facts, limits)
    part = Part.SERVER if seen.points[Part.SERVER] else Part.DEVICE
    return seen.assessed(part, limits.growth), part, SERVER_PROCESS if part is Part.SERVER else UNSEEN_PROCESS


def _of_device(
    verdict: str,
    found: Decisive,
    part: MemoryComponent,
    whose: str,
    timeline: Timeline,
    facts: Facts,
    limits: Limits,
) -> Finding:
    extra: tuple[Evidence, ...] = ()
    if found[1].grows:
        others = memory_series(timeline, facts, limits).assessed(Part.OTHERS, limits.growth).get(found[0])
        extra = (excluded("growth_of_others_per_hour", others, Part.OTHERS),)
    who = f"{found[0].who} ({whose})"
    room = _room_bytes(timeline, found[0])
    return finding(verdict, found, part, room, limits.growth, who=who, extra=extra)


def _newest(timeline: Timeline, owner: MemoryOwner) -> Allocator | None:
    """The newest publication of a process, which may be on several devices."""
    for sample in reversed(timeline.samples):
        for each in sample.allocators or ():
            if each.device_uuid.lower() == owner.device_uuid and each.who == owner.who:
                return each
    return None


def _room_bytes(timeline: Timeline, owner: MemoryOwner) -> int | None:
    """What is free on an owner's device, as newest read by NVML here or inside a process."""
    for sample in reversed(timeline.samples):
        seen = [device.memory for device in sample.devices or () if cuda_uuid(device.uuid) == owner.device_uuid]
        seen += [each.memory for each in sample.allocators or () if each.device_uuid.lower() == owner.device_uuid]
        free = [memory.free_bytes for memory in seen if memory is not None]
        if free:
            return min(free)
    return None
