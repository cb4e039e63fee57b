"""What torch holds after each of several equal cycles, process by process: live, reserved, and beside torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.diagnosis.device_growth import Climb, climb_of, floors_after_cycles, warmup_cycles
from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Allocator, Facts, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorGrowth:
    """One process on one device over equal cycles. `outside` is what it holds beside torch, `None` where not told."""

    device_uuid: str
    who: str
    live: Climb
    reserved: Climb
    outside: Climb | None


def allocator_growths(timeline: Timeline, facts: Facts, limits: Limits, *, step: str) -> tuple[AllocatorGrowth, ...]:
    """Each process that published after every cycle; empty where there are too few cycles that they did."""
    floors = floors_after_cycles(timeline, facts, limits, step)
    readings = [
        {each.identity: each for each in floor.allocators if each.may_be_of(facts.server_pids)}
        for floor in floors
        if floor.allocators
    ]
    warmup = warmup_cycles(len(readings) - 1, limits)
    if warmup is None:
        return ()
    # A process that ended or began meanwhile was not there for every cycle.
    lasting = set(readings[0]).intersection(*readings[1:])
    return tuple(_growth([reading[key] for reading in readings], warmup, limits) for key in sorted(lasting))


def _growth(series: list[Allocator], warmup: int, limits: Limits) -> AllocatorGrowth:
    outside = [size for each in series if (size := each.outside_torch_bytes) is not None]
    page = limits.device_quantum_bytes
    return AllocatorGrowth(
        device_uuid=series[0].device_uuid,
        who=series[0].who,
        live=climb_of([each.allocated_bytes for each in series], warmup, limits.torch_quantum_bytes, limits),
        reserved=climb_of([each.reserved_bytes for each in series], warmup, page, limits),
        outside=climb_of(outside, warmup, page, limits) if len(outside) == len(series) else None,
    )
