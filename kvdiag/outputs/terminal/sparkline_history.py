"""The usage of every GPU and pool in the last ten minutes of a live view, and the rate at which each fills.

A rate is a figure, not a verdict: whether growth is a leak is decided by the diagnosis alone, from hours of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvdiag.model import Snapshot
from kvdiag.stats import evenly, slope

TRAIL_SECONDS = 600.0
"""How far back the view remembers."""

POINT_SECONDS = 5.0
"""Between points: 120 of them cost 2 ms for eight GPUs at each frame, one for each second would cost 16."""

LEAST_SECONDS = 30.0
"""Least time watched before a rate is shown: requests come and go within seconds."""

CLEAR_RATIO = 0.01
"""A rate is shown if its trend has at most this p-value."""

MINUTE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One moment: the pool's share in use by engine, and a device's bytes in use and in all by UUID."""

    at_seconds: float
    usage_ratio: Mapping[str, float]
    memory_bytes: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The usage of one pool or device over time. `of` is an engine's label or a device's UUID.

    `recent` holds ratios of the whole, oldest first. `per_minute_ratio` is `None` if the usage neither rises nor falls
    clearly, or was watched too briefly; `full_in_seconds`, the time until full at that rate, if it does not rise.
    """

    of: str
    is_pool: bool
    recent: tuple[float, ...]
    watched_seconds: float
    per_minute_ratio: float | None = None
    full_in_seconds: float | None = None


def point(snapshot: Snapshot) -> Point | None:
    """The point that a snapshot adds; `None` if nothing has been read yet."""
    newest = snapshot.newest
    if not newest.at_seconds:
        return None
    memories = {device.uuid: device.memory for device in newest.devices or ()}
    return Point(
        at_seconds=newest.at_seconds,
        usage_ratio={one.engine: one.kv_usage_ratio for one in newest.engines or () if one.kv_usage_ratio is not None},
        memory_bytes={
            uuid: (memory.used_bytes, memory.total_bytes) for uuid, memory in memories.items() if memory is not None
        },
    )


def longer(trail: Sequence[Point], found: Point | None) -> tuple[Point, ...]:
    """The trail with a new point at its end, without points that are too old; restarted if time ran backwards.

    The newest point is replaced while it is closer than `POINT_SECONDS` to the one before it.
    """
    if found is None:
        return tuple(trail)
    since = found.at_seconds - TRAIL_SECONDS
    kept = [one for one in trail if since <= one.at_seconds < found.at_seconds]
    if len(kept) > 1 and kept[-1].at_seconds - kept[-2].at_seconds < POINT_SECONDS:
        kept.pop()
    return (*kept, found)


def trends(trail: Sequence[Point]) -> tuple[Trend, ...]:
    """The trends of everything in the newest point: pools first, then devices."""
    if not trail:
        return ()
    newest = trail[-1]
    pools = [_trend(name, _of_pool(trail, name), is_pool=True) for name in newest.usage_ratio]
    return (*pools, *(_trend(uuid, _of_device(trail, uuid), is_pool=False) for uuid in newest.memory_bytes))


def _of_pool(trail: Iterable[Point], engine: str) -> list[tuple[float, float]]:
    return [(one.at_seconds, one.usage_ratio[engine]) for one in trail if engine in one.usage_ratio]


def _of_device(trail: Iterable[Point], uuid: str) -> list[tuple[float, float]]:
    known = [(one.at_seconds, one.memory_bytes[uuid]) for one in trail if uuid in one.memory_bytes]
    return [(at_seconds, used / total) for at_seconds, (used, total) in known]


def _trend(name: str, series: list[tuple[float, float]], *, is_pool: bool) -> Trend:
    times = [at_seconds for at_seconds, _ in series]
    values = tuple(value for _, value in series)
    watched = times[-1] - times[0]
    known = Trend(of=name, is_pool=is_pool, recent=values, watched_seconds=watched)
    if watched < LEAST_SECONDS:
        return known
    even = evenly(times, values)
    found = None if even is None else slope(even)
    if found is None:
        return known
    per_second = found.per_step * (len(values) - 1) / watched
    if not (found.p_rising <= CLEAR_RATIO or found.p_rising >= 1.0 - CLEAR_RATIO):
        return known
    return Trend(
        of=name,
        is_pool=is_pool,
        recent=values,
        watched_seconds=watched,
        per_minute_ratio=per_second * MINUTE_SECONDS,
        full_in_seconds=(1.0 - values[-1]) / per_second if per_second > 0.0 else None,
    )
