"""Memory after each of several equal test cycles: how much came with the first ones, and whether it keeps growing.

A step of a run offers the same load several times and reads the idle floor after each. These few samples are all there
is, so no statistics are used: the first cycles are first touch and left out; of the others three in four must rise by
more than a sample's resolution, and the later ones by half as much as the earlier. Devices are judged by NVML,
processes by what their agents publish of torch. Too few cycles, or a sample that is missing, is no judgement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import IdleFloor, floor_within, server_bytes, server_devices, server_uuids
from kvdiag.model import Allocator, Device, Facts, Timeline

BASELINE, CYCLES = "baseline", "single_request"
"""The steps of a run in which nothing is offered, and the same load several times."""

Owner = Literal["server", "another process", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """Bytes after each of several equal cycles, the first ones apart: whether they rose, and whether they still do."""

    judged_cycles: int
    rising_cycles: int
    warmup_bytes: int
    judged_bytes: int
    rose: bool
    leaking: bool

    @property
    def bytes_per_cycle(self) -> float:
        """Growth per judged cycle."""
        return self.judged_bytes / self.judged_cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrowth(Climb):
    """One device over equal cycles. `owner` is whose bytes these are: the server's, another process's, or unknown.

    `idle_bytes` is what the device grew by while nothing ran, `None` where that was not observed.
    """

    gpu: int
    uuid: str
    owner: Owner
    idle_bytes: int | None


def device_growths(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[DeviceGrowth, ...]:
    """Each of the server's devices over the equal cycles; empty where there are too few cycles or samples."""
    own = server_uuids(timeline, facts)
    floors = floors_after_cycles(timeline, facts, limits)
    readings = [server_devices(floor.devices, own) for floor in floors if floor.devices is not None]
    warmup = warmup_cycles(len(readings) - 1, limits)
    if warmup is None:
        return ()
    seen = [{device.uuid for device in devices if device.memory} for devices in readings]
    uuids = own.union(*seen)
    if any(each != uuids for each in seen):
        return ()
    series = {
        uuid: [device for devices in readings for device in devices if device.uuid == uuid] for uuid in sorted(uuids)
    }
    return tuple(_growth(each, warmup, facts, _idle_bytes(timeline, uuid), limits) for uuid, each in series.items())


def warmup_cycles(cycles: int, limits: Limits) -> int | None:
    """How many of so many equal cycles are first touch; `None` where too few would be left to judge."""
    warmup = max(limits.cycles.warmup_cycles, round(cycles * limits.cycles.warmup_ratio))
    return warmup if cycles - warmup >= limits.cycles.judged_cycles else None


def floors_after_cycles(timeline: Timeline, facts: Facts, limits: Limits) -> list[IdleFloor]:
    """The idle floors before the first cycle and after each whose requests worked, of those that settled."""
    spans = [
        span
        for span in timeline.spans(CYCLES)
        if span.outcome is not None and span.outcome.completed and not span.outcome.failed
    ]
    windows: list[tuple[float | None, float | None]] = [(span.begin_seconds, span.offer_seconds) for span in spans[:1]]
    windows += [(span.release_seconds, span.end_seconds) for span in spans]
    floors = [floor_within(timeline, start, end, facts, limits) for start, end in windows]
    return [floor for floor in floors if floor is not None]


def _idle_bytes(timeline: Timeline, uuid: str) -> int | None:
    """How much a device grew over the baseline, in which nothing is offered: the control of what requests do."""
    span = next(iter(timeline.spans(BASELINE)), None)
    if span is None or span.end_seconds is None:
        return None
    used = [
        device.memory.used_bytes
        for sample in timeline.between(span.begin_seconds, span.end_seconds)
        for device in sample.devices or ()
        if device.uuid == uuid and device.memory is not None
    ]
    return used[-1] - used[0] if len(used) > 1 else None


def _growth(
    series: Sequence[Device], warmup: int, facts: Facts, idle_bytes: int | None, limits: Limits
) -> DeviceGrowth:
    """The server's own bytes where every sample reports them; else the device's, whichever process uses them."""

    def over_cycles(used: Sequence[int], owner: Owner) -> DeviceGrowth:
        climb = climb_of(used, warmup, limits.device_quantum_bytes, limits)
        return DeviceGrowth(
            gpu=series[0].index,
            uuid=series[0].uuid,
            owner=owner,
            idle_bytes=idle_bytes,
            **{each.name: getattr(climb, each.name) for each in fields(climb)},
        )

    totals = [device.memory.used_bytes for device in series if device.memory is not None]
    own = [size for device in series if (size := server_bytes(device, facts.server_pids)) is not None]
    if len(own) < len(series):
        return over_cycles(totals, "unknown")
    growth, whole = over_cycles(own, "server"), over_cycles(totals, "another process")
    return whole if whole.rose and not growth.rose else growth


def climb_of(used: Sequence[int], warmup: int, quantum_bytes: int, limits: Limits) -> Climb:
    """Judge a series of which less than `quantum_bytes` is not visible or not meant."""
    rises = [later - earlier for earlier, later in pairwise(used)]
    judged = rises[warmup:]
    total = sum(judged)
    rising = sum(rise >= quantum_bytes for rise in judged)
    half = len(judged) // 2
    early, late = sum(judged[:half]), sum(judged[-half:])
    rose = total >= quantum_bytes
    return Climb(
        judged_cycles=len(judged),
        rising_cycles=rising,
        warmup_bytes=sum(rises[:warmup]),
        judged_bytes=total,
        rose=rose,
        leaking=rose
        and rising >= limits.cycles.rising_ratio * len(judged)
        and late >= limits.cycles.deceleration_ratio * early,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorGrowth:
    """One process on one device over equal cycles. `outside` is its memory outside torch, `None` if not reported."""

    device_uuid: str
    who: str
    live: Climb
    reserved: Climb
    outside: Climb | None


def allocator_growths(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[AllocatorGrowth, ...]:
    """Each process that published after every cycle; empty where there are too few cycles that they did."""
    floors = floors_after_cycles(timeline, facts, limits)
    readings = [
        {each.identity: each for each in floor.allocators if each.may_be_of(facts.server_pids)}
        for floor in floors
        if floor.allocators
    ]
    warmup = warmup_cycles(len(readings) - 1, limits)
    if warmup is None:
        return ()
    # A process that ended or began meanwhile was not there for every cycle.
    lasting = set.intersection(*(set(reading) for reading in readings))
    return tuple(_torch_growth([reading[key] for reading in readings], warmup, limits) for key in sorted(lasting))


def _torch_growth(series: list[Allocator], warmup: int, limits: Limits) -> AllocatorGrowth:
    outside = [size for each in series if (size := each.outside_torch_bytes) is not None]
    page = limits.device_quantum_bytes
    return AllocatorGrowth(
        device_uuid=series[0].device_uuid,
        who=series[0].who,
        live=climb_of([each.allocated_bytes for each in series], warmup, limits.torch_quantum_bytes, limits),
        reserved=climb_of([each.reserved_bytes for each in series], warmup, page, limits),
        outside=climb_of(outside, warmup, page, limits) if len(outside) == len(series) else None,
    )
