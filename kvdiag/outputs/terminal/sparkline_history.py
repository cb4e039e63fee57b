"""The usage of every GPU and pool in the last ten minutes of a live view, and the rate at which each fills.

A rate is a figure, not a verdict: whether growth is a leak is decided by the diagnosis alone, from hours of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvdiag.model import Snapshot
from kvdiag.stats import evenly, slope

TRAIL_SECONDS = 600.0
"""How far back the view remembers."""

POINT_SECONDS = 5.0
"""Between points: 120 of them cost 2 ms for eight GPUs at each frame, one for each second would cost 16."""

MIN_SECONDS = 30.0
"""Least time watched before a rate is shown: requests come and go within seconds."""

CLEAR_RATIO = 0.01
"""A rate is shown if its trend has at most this p-value."""

MINUTE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One moment: the share in use of each pool by its engine, and of each device by its UUID."""

    at_seconds: float
    pools: Mapping[str, float]
    devices: Mapping[str, float]


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
        pools={one.engine: one.kv_usage_ratio for one in newest.engines or () if one.kv_usage_ratio is not None},
        devices={uuid: memory.used_bytes / memory.total_bytes for uuid, memory in memories.items() if memory},
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
    pools, devices = ([(one.at_seconds, one.pools) for one in trail], [(one.at_seconds, one.devices) for one in trail])
    found = [_trend(name, pools, is_pool=True) for name in trail[-1].pools]
    return (*found, *(_trend(uuid, devices, is_pool=False) for uuid in trail[-1].devices))


def _trend(name: str, trail: Sequence[tuple[float, Mapping[str, float]]], *, is_pool: bool) -> Trend:
    times = [at_seconds for at_seconds, ratios in trail if name in ratios]
    values = tuple(ratios[name] for _, ratios in trail if name in ratios)
    watched = times[-1] - times[0]
    known = Trend(of=name, is_pool=is_pool, recent=values, watched_seconds=watched)
    even = evenly(times, values) if watched >= MIN_SECONDS else None
    found = None if even is None else slope(even)
    if found is None or CLEAR_RATIO < found.p_rising < 1.0 - CLEAR_RATIO:
        return known
    per_second = found.per_step * (len(values) - 1) / watched
    left_seconds = (1.0 - values[-1]) / per_second if per_second > 0.0 else None
    return replace(known, per_minute_ratio=per_second * MINUTE_SECONDS, full_in_seconds=left_seconds)
