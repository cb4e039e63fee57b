"""Say whose the growth of device memory is: torch's, the process's outside torch, another process's, or undecidable.

In this order: where agents in the server's processes publish torch's figures, torch's memory and the memory outside it
are judged apart (without a process's own bytes, the device's growth is undecided if torch's reserved bytes grow, too).
Where NVML alone shows growth, it stands under the verdict that it mostly is with that engine, names the other one as
well, and its culprit is unknown; it is only suspect if the processes are hidden and nothing shows that the device is
the server's. The finding names how many other ranks grow as well.
"""

import math
from dataclasses import replace

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS, MINUTE_SECONDS
from kvdiag.diagnosis.growth.growth_verdicts import Decisive, decisive, finding, too_short
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.reserved_memory import releasable_bytes, stranded_bytes
from kvdiag.diagnosis.timeline_queries import assigned_uuids, server_devices
from kvdiag.engine_memory import allocates_by_torch, runs_torch
from kvdiag.formatting import format_bytes, format_duration, plural
from kvdiag.model import Device, Evidence, Facts, Finding, GrowthFigures, Memory, Timeline, cuda_uuid
from kvdiag.stats import clear_rate

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"

UNDECIDED = "NVML does not separate torch's memory from the rest; run the server with the agent (`kvdiag agent`)"
CULPRIT = f"unknown: {UNDECIDED}"
AGENT_FIRST = (
    "Install the agent (`kvdiag agent install`) and restart the server before memory runs out: the agent shows whether "
    "torch's allocator or something else holds the memory. A smaller pool leaves more headroom until it is found."
)

NO_TORCH = Finding(TORCH, "ok", "this engine allocates without torch")

SERVER_PROCESS, HIDDEN_PROCESS = "the server's process", "process not visible"


def likely_and_other(engine_name: str | None) -> tuple[str, str]:
    """The verdict that growth of an engine's process is, as far as NVML shows, and the one that it may be."""
    return (TORCH, NON_TORCH) if allocates_by_torch(engine_name) else (NON_TORCH, TORCH)


def undecided(growth: Finding, facts: Facts) -> tuple[Finding, Finding]:
    """Growth that NVML alone shows, as findings of torch and of the rest: under the likelier id, without a culprit."""
    if not runs_torch(facts.engine_name):
        return NO_TORCH, replace(growth, id=NON_TORCH)
    likely, other = likely_and_other(facts.engine_name)
    called = replace(
        growth,
        id=likely,
        or_id=other,
        summary=f"{growth.summary}; culprit {CULPRIT}",
        likely_cause=CULPRIT,
        remedy=AGENT_FIRST,
    )
    found = {likely: called, other: Finding(other, "unknown", UNDECIDED)}
    return found[TORCH], found[NON_TORCH]


class _DeviceMemory:
    """The components of the server's devices over hours, and what is free on them."""

    def __init__(self, timeline: Timeline, facts: Facts, limits: Limits) -> None:
        self._timeline, self._limits = timeline, limits.growth
        series = memory_series(timeline, facts, limits)
        self.assessed = series.assessed
        # The server's own bytes on its devices where NVML shows its processes, else the devices'.
        self.whole = Part.SERVER if series.points[Part.SERVER] else Part.DEVICE

    def decisive(self, part: Part) -> Decisive | None:
        return decisive(self.assessed(part), self._limits, self._room_bytes)

    def excluded(self, name: str, part: Part, owner: MemoryOwner) -> Evidence:
        """What another component grew by meanwhile: the figure that excludes the nearest other verdict."""
        assessed = self.assessed(part).get(owner)
        growth = None if assessed is None else assessed.decides
        rate = None if growth is None else growth.bytes_per_second * HOUR_SECONDS
        return Evidence(name, rate, "bytes per hour", part.source)

    def finding(self, verdict: str, found: Decisive, part: Part, *extra: Evidence, who: str | None = None) -> Finding:
        return finding(verdict, found, part, self._room_bytes(found[0]), self._limits, who=who, extra=extra)

    def of_device(self, found: Decisive) -> Finding:
        """The finding of a device, or of the server on it, with what the others on it grow by."""
        others: tuple[Evidence, ...] = ()
        if found[1].grows:
            others = (self.excluded("growth_of_others_per_hour", Part.OTHERS, found[0]),)
        whose = SERVER_PROCESS if self.whole is Part.SERVER else HIDDEN_PROCESS
        return self.finding(NON_TORCH, found, self.whole, *others, who=f"{found[0].who} ({whose})")

    def among_ranks(self, judged: Finding, found: Decisive, part: Part) -> Finding:
        """The finding of growth with how many of the other ranks grow as well: one alone is a leak of what it does."""
        assessed = self.assessed(part)
        if not found[1].grows or len(assessed) == 1:
            return judged
        assessments = [one.decides or one.burst for owner, one in assessed.items() if owner != found[0]]
        others = [growth for growth in assessments if growth is not None]
        if not others:
            return judged
        growing = sum(growth.grows for growth in others)
        shown = (
            Evidence("other_ranks", len(others), "ranks", "kvdiag"),
            Evidence("other_ranks_that_grow", growing, "ranks", "kvdiag"),
        )
        verb = "grow" if growing > 1 else "grows"
        which = f"of the {len(others)} other ranks {growing or 'none'} {verb}"
        if len(others) == 1:
            which = "the other rank grows too" if growing else "the other rank does not grow"
        summary = f"{judged.summary}; {which}"
        return replace(judged, summary=summary, evidence=(*judged.evidence, *shown))

    def confirmed(self, live: Decisive, outside: Decisive) -> tuple[Decisive, Decisive]:
        """Torch's growth and that outside it: the suspect of the two is a fault where the server's growth is one.

        The server's bytes on the device are their sum, with less noise than either; what does not grow has no part.
        A whole device may grow by other processes; a fault that is only held may be of growth that has stopped.
        """
        whole = self.decisive(Part.SERVER) if self.whole is Part.SERVER else None
        if whole is None or whole[1].status != "fault" or whole[1].reason == "held":
            return live, outside

        def sure(one: Decisive, other: Decisive) -> Decisive:
            is_it = one[1].status == "suspect" and not other[1].grows
            mostly = one[1].bytes_per_second >= self._limits.part_ratio * whole[1].bytes_per_second
            same = one[0].device_uuid in ("", whole[0].device_uuid)
            return (one[0], replace(one[1], status="fault", reason="grows")) if is_it and mostly and same else one

        return sure(live, outside), sure(outside, live)

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

    def judged(verdict: str, found: Decisive, part: Part) -> Finding:
        shown = memory.excluded("reserved_growth_per_hour", Part.TORCH_RESERVED, found[0])
        return memory.finding(verdict, found, part, shown)

    if live is None or reserved is None:
        # Next to a gap in the samples a fault may hold where another part is not judged.
        if outside is None or not outside[1].grows:
            return ()
        missing = too_short(memory.assessed(Part.TORCH_LIVE).values(), "torch's memory", limits.growth)
        return Finding(TORCH, "unknown", missing), judged(NON_TORCH, outside, Part.OUTSIDE_TORCH)
    if outside is not None:
        live, outside = memory.confirmed(live, outside)
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
    return torch, memory.of_device(device)


def unused_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What torch has reserved and does not use, where that keeps growing over hours; `None` where it does not.

    What lies between live blocks stays there: holes that nothing fits in again. What is releasable is a cache, which
    torch gives back before an allocation fails.
    """
    memory = _DeviceMemory(timeline, facts, limits)
    found = memory.decisive(Part.TORCH_UNUSED)
    if found is None or not found[1].grows:
        return None
    key = (found[0].device_uuid, found[0].who)
    # The newest publication of the process, which may be on several devices.
    published = (each for sample in reversed(timeline.samples) for each in sample.allocators or ())
    last = next(one for one in published if (one.device_uuid.lower(), one.who) == key)
    stranded, releasable = stranded_bytes(last), releasable_bytes(last)
    if releasable is not None and stranded is not None and releasable >= stranded:
        return None
    growing = memory.finding(
        verdict,
        found,
        Part.TORCH_UNUSED,
        memory.excluded("live_growth_per_hour", Part.TORCH_LIVE, found[0]),
        Evidence("reserved_but_unallocated", last.unallocated_bytes, "bytes", "torch"),
        Evidence("stranded", stranded, "bytes", "torch"),
        Evidence("releasable", releasable, "bytes", "torch"),
    )
    # Holes are no cache: nothing gives them back. Only the blocks show whether they are holes.
    status, parts = growing.status, "how much lies between live blocks is not reported"
    if stranded is None or releasable is None:
        status = "suspect"
    else:
        parts = f"{format_bytes(stranded)} is stranded between live blocks, {format_bytes(releasable)} is releasable"
    return replace(growing, status=status, summary=f"{growing.summary}, while allocated memory does not grow; {parts}")


def device_growth(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What NVML shows of the server's processes, else of its devices, over hours; empty where not for long enough."""
    memory = _DeviceMemory(timeline, facts, limits)
    found = memory.decisive(memory.whole)
    if found is None:
        return ()
    one = memory.among_ranks(memory.of_device(found), found, memory.whole)
    if not found[1].grows:
        return replace(one, id=TORCH), one
    # Growth of a device whose processes are not visible may be another process's; with an engine that took its pool
    # at its start there is seldom room for one.
    hidden = memory.whole is Part.DEVICE and not (facts.pools or facts.device_uuids)
    return undecided(replace(one, status="suspect") if hidden else one, facts)


def filling(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Growth that would exhaust a device of the server within the hour, too young to be judged; else empty.

    All memory on the device counts, of any process.
    """
    growth, own = limits.growth, assigned_uuids(timeline, facts)
    since = timeline.samples[-1].at_seconds - growth.recent_seconds if timeline.samples else 0.0
    readings: dict[str, list[tuple[float, Device, Memory]]] = {}
    for sample in timeline.between(since, math.inf):
        for device in server_devices(sample.devices, own):
            points = readings.setdefault(device.uuid, [])
            due = not points or sample.at_seconds - points[-1][0] >= growth.recent_spacing_seconds
            if due and device.memory is not None:
                points.append((sample.at_seconds, device, device.memory))
    found = []
    for points in (each for each in readings.values() if each):
        times, (_, device, memory) = [at_seconds for at_seconds, _, _ in points], points[-1]
        used = [each.used_bytes for _, _, each in points]
        rate = clear_rate(times, used, max_p=growth.recent_p, min_seconds=growth.recent_min_seconds) or 0.0
        if memory.free_bytes <= rate * growth.burst_exhaustion_seconds and rate > 0.0:
            found.append((memory.free_bytes / rate, rate, times[-1] - times[0], device.who, memory.free_bytes))
    if not found:
        return ()
    left, rate, seconds, who, room = min(found)
    more = math.ceil(60.0 * growth.burst_hours - seconds / MINUTE_SECONDS)
    summary = (
        f"{who}: memory grows {format_bytes(rate * MINUTE_SECONDS)}/min, full in {format_duration(left)}; "
        f"too young to judge after {format_duration(seconds)}: {plural(more, 'more minute')} of samples would decide"
    )
    shown = (
        Evidence("window", round(seconds / HOUR_SECONDS, 2), "hours", "kvdiag"),
        Evidence("growth_per_hour", rate * HOUR_SECONDS, "bytes per hour", "nvml"),
        Evidence("room", room, "bytes", "nvml"),
        Evidence("time_to_exhaustion", left, "seconds", "computed"),
    )
    figures = GrowthFigures(bytes_per_second=rate, room_bytes=room, exhaustion_seconds=left)
    one = Finding(TORCH, "unknown", summary, shown, holder=who, growth=figures)
    return one, replace(one, id=NON_TORCH)


def others_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What is on the server's devices and not the server's, where it keeps growing; `None` where it does not."""
    memory = _DeviceMemory(timeline, facts, limits)
    found = memory.decisive(Part.OTHERS)
    if found is None or not found[1].grows:
        return None
    shown = memory.excluded("server_growth_per_hour", Part.SERVER, found[0])
    return memory.finding(verdict, found, Part.OTHERS, shown)
