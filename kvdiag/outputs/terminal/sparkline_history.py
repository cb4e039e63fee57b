"""The usage of every GPU and pool in the last ten minutes of a live view, and how fast each is filling.

A rate is a figure, not a verdict: whether growth is a leak is decided by the diagnosis alone, from hours of samples. It
computes the same rate, and is unknown while a device is filling too fast for that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvdiag.diagnosis.growth.growth_evidence import MINUTE_SECONDS
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Sample
from kvdiag.stats import clear_rate

LIMITS = DEFAULT_LIMITS.growth

HISTORY_SECONDS = 600.0
"""How far back the view shows usage."""

POINT_SECONDS = 5.0
"""Between points: 120 of them cost 2 ms for eight GPUs at each frame, one for each second would cost 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One moment: the share in use by an engine's label or a device's UUID, and whether it is of a pool."""

    at_seconds: float
    shares: Mapping[tuple[str, bool], float]


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


def history_samples(samples: Iterable[Sample], now_seconds: float) -> tuple[Sample, ...]:
    """A daemon's samples as a view keeps them: every part at each moment, without what is not shown."""
    found: list[Sample] = []
    engines = devices = None
    for sample in samples:
        if sample.at_seconds < now_seconds - HISTORY_SECONDS:
            continue
        engines, devices = sample.engines or engines, sample.devices or devices
        if not found or sample.at_seconds - found[-1].at_seconds >= POINT_SECONDS:
            shown = tuple(replace(device, processes=None) for device in devices or ())
            found.append(Sample(at_seconds=sample.at_seconds, engines=engines, devices=shown))
    return tuple(found)


def point(newest: Sample) -> Point | None:
    """The point that a sample of every part adds; `None` if nothing has been read yet."""
    if not newest.at_seconds:
        return None
    engines, devices = newest.engines or (), newest.devices or ()
    shares = {(one.engine, True): one.kv_usage_ratio for one in engines if one.kv_usage_ratio is not None}
    shares |= {(one.uuid, False): one.memory.occupied_ratio for one in devices if one.memory is not None}
    return Point(at_seconds=newest.at_seconds, shares=shares)


def longer(points: Sequence[Point], found: Point | None) -> tuple[Point, ...]:
    """The points with a new one at the end, without points that are too old; restarted if time ran backwards.

    The newest point is replaced while it is closer than `POINT_SECONDS` to the one before it.
    """
    if found is None:
        return tuple(points)
    since = found.at_seconds - HISTORY_SECONDS
    kept = [one for one in points if since <= one.at_seconds < found.at_seconds]
    if len(kept) > 1 and kept[-1].at_seconds - kept[-2].at_seconds < POINT_SECONDS:
        kept.pop()
    return (*kept, found)


def trends(points: Sequence[Point]) -> tuple[Trend, ...]:
    """The trends of everything in the newest point: pools first, then devices."""
    return tuple(_trend(of, points, is_pool=is_pool) for of, is_pool in points[-1].shares) if points else ()


def _trend(name: str, points: Sequence[Point], *, is_pool: bool) -> Trend:
    seen = [(one.at_seconds, one.shares[name, is_pool]) for one in points if (name, is_pool) in one.shares]
    times, values = [at_seconds for at_seconds, _ in seen], tuple(ratio for _, ratio in seen)
    watched = times[-1] - times[0]
    known = Trend(of=name, is_pool=is_pool, recent=values, watched_seconds=watched)
    per_second = clear_rate(times, values, max_p=LIMITS.recent_p, min_seconds=LIMITS.recent_min_seconds)
    if per_second is None:
        return known
    left_seconds = (1.0 - values[-1]) / per_second if per_second > 0.0 else None
    return replace(known, per_minute_ratio=per_second * MINUTE_SECONDS, full_in_seconds=left_seconds)
