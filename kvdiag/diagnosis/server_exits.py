"""When a server stopped answering, and how little of its devices was free just before. Judges nothing.

An exit is an engine that no longer answers together with a tenth of a device (`exit_freed_ratio`) that became free:
a metrics endpoint that fails for a moment is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import assigned_uuids, server_devices
from kvdiag.model import Device, Facts, Sample, Timeline


@dataclass(frozen=True, slots=True)
class ServerExit:
    """An exit of the server; `gpu` is the one that had had the least free bytes before it."""

    at_seconds: float
    gpu: int
    free_before_bytes: int
    came_free_bytes: int
    answered_before: bool


def server_exits(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[ServerExit, ...]:
    """Every time that no engine answered and much of a device of the server became free."""
    if not any(_fails(sample) for sample in timeline.samples):
        return ()
    own = assigned_uuids(timeline, facts)
    found: list[ServerExit] = []
    answered = silent = False
    least: dict[str, tuple[int, int]] = {}
    for sample in timeline.samples:
        if sample.engines:
            if silent:
                least = {}
            answered, silent = True, False
        elif _fails(sample):
            silent = True
        for uuid, index, free, total in _free(server_devices(sample.devices, own)):
            low = min(least.get(uuid, (free, index)), (free, index))
            least[uuid] = low
            if silent and free - low[0] >= limits.exit_freed_ratio * total:
                found.append(ServerExit(sample.at_seconds, low[1], low[0], free - low[0], answered))
                least, answered = {}, False
                break
    return tuple(found)


def _fails(sample: Sample) -> bool:
    return sample.engines is None and any(gap.source == "engine" and gap.kind == "failed" for gap in sample.gaps)


def _free(devices: Iterable[Device]) -> Iterable[tuple[str, int, int, int]]:
    for device in devices:
        if device.memory is not None:
            yield device.uuid, device.index, device.memory.free_bytes, device.memory.total_bytes
