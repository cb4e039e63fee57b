"""When a server stopped answering, and how little of its devices was free just before. Judges nothing.

An exit is an engine that no longer answers together with a tenth of a device (`exit_freed_ratio`) that became free:
a metrics endpoint that fails for a moment is none. The least free bytes since the last start are kept, because an
allocation that fails is over before the next sample. `answered_before` separates a start that failed from a crash.
"""

from dataclasses import dataclass

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import assigned_uuids, server_devices
from kvdiag.model import Facts, Sample, Timeline


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
    if not any(_fails(sample) for sample in timeline.samples if sample.gaps):
        return ()
    own = assigned_uuids(timeline, facts)
    found: list[ServerExit] = []
    answered = silent = False
    freed: ServerExit | None = None  # since the last answer
    least: dict[str, tuple[int, int]] = {}
    for sample in timeline.samples:
        if sample.engines:
            if silent:
                least = {}
            answered, silent, freed = True, False, None
        silent = silent or _fails(sample)
        for device in server_devices(sample.devices, own):
            if device.memory is None:
                continue
            now = (device.memory.free_bytes, device.index)
            low = least[device.uuid] = min(least.get(device.uuid, now), now)
            came_free = now[0] - low[0] >= limits.exit_freed_ratio * device.memory.total_bytes
            if came_free and freed is None and not sample.engines:
                freed = ServerExit(sample.at_seconds, low[1], low[0], now[0] - low[0], answered)
        # A GPU may be scraped before the first request that fails.
        if silent and freed is not None:
            found.append(freed)
            least, answered, freed = {}, False, None
    return tuple(found)


def _fails(sample: Sample) -> bool:
    return sample.engines is None and any(gap.source == "engine" and gap.kind == "failed" for gap in sample.gaps)
