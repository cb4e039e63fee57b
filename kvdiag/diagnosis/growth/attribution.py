"""Say whose the growth of device memory is: torch's, the process's outside torch, another process's, or undecidable.

Where agents in the server's processes publish torch's figures, each component is judged by itself. Where NVML alone
shows growth, it is called what it mostly is with that engine, and the other verdict is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.estimator import HOUR_SECONDS, Assessment
from kvdiag.diagnosis.growth.growth_verdicts import Decisive, decisive, finding, too_short
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.reserved_memory import releasable_bytes, stranded_bytes
from kvdiag.engine_memory import allocates_by_torch
from kvdiag.formatting import format_bytes
from kvdiag.model import Allocator, Evidence, Facts, Finding, Timeline, cuda_uuid

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"

UNDECIDED = "NVML does not separate torch's memory from the rest; install the kvdiag agent in the server"

SERVER_PROCESS, HIDDEN_PROCESS = "the server's process", "process not visible"


def likely_and_other(engine_name: str | None) -> tuple[str, str]:
    """The verdict that growth of an engine's process is, as far as NVML can tell, and the one that it may be."""
    return (TORCH, NON_TORCH) if allocates_by_torch(engine_name) else (NON_TORCH, TORCH)


class _DeviceMemory:
    """The components of the server's devices over hours, and what is free beside them."""

    def __init__(self, timeline: Timeline, facts: Facts, limits: Limits) -> None:
        self._timeline, self._limits = timeline, limits.growth
        self._series = memory_series(timeline, facts, limits)
        # The server's own bytes on its devices where NVML shows its processes, else the devices'.
        self.whole = Part.SERVER if self._series.points[Part.SERVER] else Part.DEVICE

    def assessed(self, part: Part) -> Mapping[MemoryOwner, Assessment]:
        return self._series.assessed(part, self._limits)

    def decisive(self, part: Part) -> Decisive | None:
        return decisive(self.assessed(part), self._limits, self._room_bytes)

    def excluded(self, name: str, part: Part, owner: MemoryOwner) -> Evidence:
        """What another component grew by meanwhile: the figure that tells the verdict from the nearest other one."""
        assessed = self.assessed(part).get(owner)
        growth = None if assessed is None else assessed.decides
        return Evidence(name, None if growth is None else growth.bytes_per_second * HOUR_SECONDS, "bytes", part.source)

    def finding(self, verdict: str, found: Decisive, part: Part, *extra: Evidence, who: str | None = None) -> Finding:
        return finding(verdict, found, part, self._room_bytes(found[0]), self._limits, who=who, extra=extra)

    def of_device(self, verdict: str, found: Decisive) -> Finding:
        """The finding of a device, or of the server on it, with what the others on it grow by."""
        others: tuple[Evidence, ...] = ()
        if found[1].grows:
            others = (self.excluded("growth_of_others_per_hour", Part.OTHERS, found[0]),)
        whose = SERVER_PROCESS if self.whole is Part.SERVER else HIDDEN_PROCESS
        return self.finding(verdict, found, self.whole, *others, who=f"{found[0].who} ({whose})")

    def among_ranks(self, judged: Finding, found: Decisive, part: Part) -> Finding:
        """The finding of growth with how many of the other ranks grow as well: one alone is a leak of what it does."""
        assessed = self.assessed(part)
        if not found[1].grows or len(assessed) == 1:
            return judged
        others = [one.decides for owner, one in assessed.items() if owner != found[0] and one.decides is not None]
        growing = sum(growth.grows for growth in others)
        shown = (
            Evidence("other_ranks", len(others), "ranks", "kvdiag"),
            Evidence("other_ranks_that_grow", growing, "ranks", "kvdiag"),
        )
        verb = "grow" if growing > 1 else "grows"
        alone = f"; of the {len(others)} other ranks {growing or 'none'} {verb}" if others else ""
        return replace(judged, summary=f"{judged.summary}{alone}", evidence=(*judged.evidence, *shown))

    def _room_bytes(self, owner: MemoryOwner) -> int | None:
        """What is free on an owner's device, as newest read by NVML here or inside a process."""
        for sample in reversed(self._timeline.samples):
            read = [device.memory for device in sample.devices or () if cuda_uuid(device.uuid) == owner.device_uuid]
            read += [each.memory for each in sample.allocators or () if each.device_uuid.lower() == owner.device_uuid]
            free = [memory.free_bytes for memory in read if memory is not None]
            if free:
                return min(free)
        return None


def torch_growth(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What the agents publish, over hours; empty where they do not, or not for long enough."""
    memory = _DeviceMemory(timeline, facts, limits)
    live, reserved, outside = (
        memory.decisive(part) for part in (Part.TORCH_LIVE, Part.TORCH_RESERVED, Part.OUTSIDE_TORCH)
    )
    if live is None or reserved is None:
        return ()

    def judged(verdict: str, found: Decisive, part: Part) -> Finding:
        shown = memory.excluded("reserved_growth_per_hour", Part.TORCH_RESERVED, found[0])
        return memory.finding(verdict, found, part, shown)

    torch = memory.among_ranks(judged(TORCH, live, Part.TORCH_LIVE), live, Part.TORCH_LIVE)
    if outside is not None and set(memory.assessed(Part.OUTSIDE_TORCH)) >= set(memory.assessed(Part.TORCH_LIVE)):
        return torch, judged(NON_TORCH, outside, Part.OUTSIDE_TORCH)
    # No process reports its bytes: the server's on the device count, as long as torch's do not grow.
    device = memory.decisive(memory.whole)
    if device is None:
        missing = too_short(memory.assessed(memory.whole).values(), "device memory of the server", limits.growth)
        return torch, Finding(NON_TORCH, "unknown", missing)
    if device[1].grows and reserved[1].grows:
        both = "torch's reserved memory and the device both grow"
        missing = f"{both}; let the agent use NVML in the server's process to see memory outside torch"
        return torch, Finding(NON_TORCH, "unknown", missing)
    return torch, memory.of_device(NON_TORCH, device)


def unused_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What torch has reserved and does not use, where that keeps growing over hours; `None` where it does not.

    What lies between live blocks stays there: holes that nothing fits in again. What is releasable is a cache, which
    torch gives back before an allocation fails.
    """
    memory = _DeviceMemory(timeline, facts, limits)
    found = memory.decisive(Part.TORCH_UNUSED)
    if found is None or not found[1].grows:
        return None
    last = _newest(timeline, found[0])
    stranded = None if last is None else stranded_bytes(last)
    releasable = None if last is None else releasable_bytes(last)
    if releasable is not None and stranded is not None and releasable >= stranded:
        return None
    unallocated = None if last is None else last.reserved_bytes - last.allocated_bytes
    growing = memory.finding(
        verdict,
        found,
        Part.TORCH_UNUSED,
        memory.excluded("live_growth_per_hour", Part.TORCH_LIVE, found[0]),
        Evidence("reserved_but_unallocated", unallocated, "bytes", "torch"),
        Evidence("stranded", stranded, "bytes", "torch"),
        Evidence("releasable", releasable, "bytes", "torch"),
    )
    # Holes are no cache: nothing gives them back. Whether they are holes only the blocks tell.
    status, parts = growing.status, "how much lies between live blocks is not reported"
    if stranded is None or releasable is None:
        status = "suspect"
    else:
        parts = f"{format_bytes(stranded)} lie between live blocks, {format_bytes(releasable)} are releasable"
    return replace(growing, status=status, summary=f"{growing.summary}, while allocated memory does not grow; {parts}")


def device_growth(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What NVML shows of the server's processes, else of its devices, over hours; empty where not for long enough."""
    memory = _DeviceMemory(timeline, facts, limits)
    found = memory.decisive(memory.whole)
    if found is None:
        return ()
    one = memory.among_ranks(memory.of_device(NON_TORCH, found), found, memory.whole)
    if not found[1].grows:
        return replace(one, id=TORCH), one
    # Growth of a device whose processes are not visible may be another process's; beside an engine that took its pool
    # at its start there is seldom room for one.
    hidden = memory.whole is Part.DEVICE and not (facts.pools or facts.device_uuids)
    likely, other = likely_and_other(facts.engine_name)
    called = replace(one, id=likely, status="suspect" if hidden else one.status, summary=f"{one.summary}; {UNDECIDED}")
    uncalled = Finding(other, "unknown", UNDECIDED)
    return (called, uncalled) if likely == TORCH else (uncalled, called)


def others_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What is on the server's devices and not the server's, where it keeps growing; `None` where it does not."""
    memory = _DeviceMemory(timeline, facts, limits)
    found = memory.decisive(Part.OTHERS)
    if found is None or not found[1].grows:
        return None
    shown = memory.excluded("server_growth_per_hour", Part.SERVER, found[0])
    return memory.finding(verdict, found, Part.OTHERS, shown)


def _newest(timeline: Timeline, owner: MemoryOwner) -> Allocator | None:
    """The newest publication of a process, which may be on several devices."""
    for sample in reversed(timeline.samples):
        for each in sample.allocators or ():
            if each.device_uuid.lower() == owner.device_uuid and each.who == owner.who:
                return each
    return None
