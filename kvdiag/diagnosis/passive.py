"""What a long timeline without test steps shows of each process and device, as series; and what their banks say."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvdiag.diagnosis.banks import Series, Watched, watch
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import readable_bytes
from kvdiag.diagnosis.rule import number
from kvdiag.diagnosis.window import HOUR_SECONDS, LEAKS, Trend
from kvdiag.model import Evidence, Sample, Status, Timeline
from kvdiag.stats import Interval

MB = 10**6

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What the engines did beside every other reading: since when they have been idle, and how full they were.

    `began_seconds` is the first reading after the engines' newest restart, `None` where they never restarted.
    """

    times_seconds: tuple[float, ...]
    idle_since_seconds: tuple[float, ...]
    load: tuple[float, ...]
    began_seconds: float | None

    def at(self, seconds: float, limits: Limits) -> tuple[bool, float | None]:
        """Whether a reading at that moment is an idle one, and the load beside it."""
        place = bisect_right(self.times_seconds, seconds) - 1
        if place < 0 or seconds - self.times_seconds[place] > limits.engine_age_seconds:
            return False, None
        return seconds - self.idle_since_seconds[place] >= limits.idle_settle_seconds, self.load[place]


def company(timeline: Timeline) -> Company:
    """The engines over a whole timeline, in one pass."""
    times: list[float] = []
    idle_since: list[float] = []
    load: list[float] = []
    began: float | None = None
    tokens: dict[str, int] = {}
    since = math.inf
    for sample in timeline.samples:
        if sample.engines is None:
            continue
        since = min(since, sample.at_seconds) if sample.engines_idle else math.inf
        times.append(sample.at_seconds)
        idle_since.append(since)
        load.append(sum(_busy(sample)))
        for engine in sample.engines:
            count = engine.prompt_tokens_total
            # Counters begin at 0 with the process: memory of the one before is nothing to compare with.
            if count is not None:
                began = sample.at_seconds if count < tokens.get(engine.engine, 0) else began
                tokens[engine.engine] = count
    return Company(
        times_seconds=tuple(times), idle_since_seconds=tuple(idle_since), load=tuple(load), began_seconds=began
    )


def _busy(sample: Sample) -> Iterable[float]:
    """How much each engine holds for requests: of its pool where it tells, else how many run."""
    for engine in sample.engines or ():
        usage = engine.kv_usage_ratio
        yield float(engine.requests_running or 0) if usage is None else usage


Readings = dict[Key, list[tuple[float, int]]]
"""Times and bytes of each component, by whatever names it."""


def keep(readings: Readings[Key], key: Key, seconds: float, size_bytes: int, limits: Limits) -> None:
    """Add a reading, unless the one before is so near that a minute's median gains nothing by it."""
    series = readings.setdefault(key, [])
    if not series or seconds - series[-1][0] >= limits.watched_seconds:
        series.append((seconds, size_bytes))


def watch_all(readings: Readings[Key], beside: Company, limits: Limits) -> dict[Key, Watched]:
    """Every component that was there to the end, on every bank that its readings reach, `beside` the engines."""
    first = min((series[0][0] for series in readings.values()), default=0.0)
    last = max((series[-1][0] for series in readings.values()), default=0.0)
    watched = {}
    for key, series in readings.items():
        if last - series[-1][0] > limits.reading_age_seconds:
            continue
        # Where its beginning was seen, what comes with a beginning is left out; elsewhere the banks' gates have to do.
        born = max(series[0][0], beside.began_seconds or series[0][0])
        start = born if born - first <= limits.reading_age_seconds else born + limits.warmup_seconds
        watched[key] = watch(_series([one for one in series if one[0] >= start], beside, limits), limits)
    return watched


def _series(readings: list[tuple[float, int]], beside: Company, limits: Limits) -> Series:
    times = tuple(seconds for seconds, _ in readings)
    states = [beside.at(seconds, limits) for seconds in times]
    known = any(load is not None for _, load in states)
    return Series(
        times_seconds=times,
        sizes_bytes=tuple(size for _, size in readings),
        idle=tuple(idle for idle, _ in states),
        load=tuple(load or 0.0 for _, load in states) if known else None,
    )


def longest_seconds(watched: Iterable[Watched]) -> float:
    """How long the longest series is."""
    return max((one.seconds for one in watched), default=0.0)


def too_short(watched: Iterable[Watched], what: str, limits: Limits) -> str:
    """What is missing for any bank, and what would decide."""
    shortest = limits.banks[0]
    minutes = longest_seconds(watched) / 60.0
    return (
        f"{what} was read over {minutes:.0f} min; {shortest.title} of readings without long gaps shows growth of "
        f"{shortest.least_bytes_per_hour / MB:.0f} MB/h, {limits.banks[-1].title} of "
        f"{limits.banks[-1].least_bytes_per_hour / MB:.0f} MB/h"
    )


def decisive(watched: Mapping[Key, Watched]) -> tuple[Key, Trend] | None:
    """The component that decides, and its trend: the fastest leak, else what is open, else the largest gain."""
    trends = [(key, trend) for key, one in watched.items() if (trend := one.decides) is not None]
    order = ("flat", "ended", "event", "unsteady", "steps", "grows")
    return max(
        trends,
        key=lambda one: (order.index(one[1].shape), one[1].bytes_per_second, one[1].gain_bytes),
        default=None,
    )


def judged(trend: Trend, subject: str, room_bytes: int | None, limits: Limits) -> tuple[Status, str]:
    """Status and sentence of a trend; `subject` is whose bytes, as the beginning of a sentence."""
    status, sentence = _judged(trend, subject, limits)
    left = _left(trend, room_bytes, limits)
    if left is None:
        return status, sentence
    latest = "unknown" if math.isinf(left.high) else f"{left.high / HOUR_SECONDS:,.1f}"
    return (
        status,
        f"{sentence}; room for {left.middle / HOUR_SECONDS:,.1f} h ({left.low / HOUR_SECONDS:,.1f} to {latest})",
    )


def _left(trend: Trend, room_bytes: int | None, limits: Limits) -> Interval | None:
    """How long the room lasts, of a trend that is called."""
    if room_bytes is None or trend.shape not in LEAKS:
        return None
    return trend.exhaustion_seconds(room_bytes, limits)


def _judged(trend: Trend, subject: str, limits: Limits) -> tuple[Status, str]:
    window, gain = f"{trend.hours:.3g} h", readable_bytes(trend.gain_bytes)
    rate = f"{readable_bytes(trend.bytes_per_second * HOUR_SECONDS)}/h"
    if trend.shape == "grows":
        if trend.certain:
            return "fault", f"{subject} keep growing, {rate} over {window}, and do not come back"
        return "suspect", f"{subject} grow {rate} over {window}; that they only wander is not excluded yet"
    if trend.shape == "steps":
        jumps = f"{trend.jumps_up} steps up and {trend.jumps_down} down"
        return "suspect", f"{subject} grow in {jumps} over {window}, {rate}"
    if trend.shape == "unsteady":
        return "unknown", f"cannot tell: {subject} rose {gain} over {window}, but not steadily; {_next(trend, limits)}"
    if trend.shape == "event":
        jumps = f"in {trend.jumps_up} jumps: events" if trend.jumps_up else "at once: an event"
        return "ok", f"{subject} rose {gain} over {window} {jumps}, not a leak"
    if trend.shape == "ended":
        return "ok", f"{subject} rose {gain} over {window}, ever more slowly: warm-up or a cache that fills, not a leak"
    visible = f"{readable_bytes(trend.visible_bytes_per_second * HOUR_SECONDS)}/h"
    return "ok", f"{subject} are flat over {window}; {visible} would show"


def _next(trend: Trend, limits: Limits) -> str:
    longer = [bank for bank in limits.banks if bank.window_minutes > trend.bank.window_minutes]
    return f"{longer[0].title} of readings would decide" if longer else "the same load on an idle replica would decide"


def evidence(trend: Trend, who: str, room_bytes: int | None, source: str, limits: Limits) -> tuple[Evidence, ...]:
    """The figures that decided, and how long the room lasts where it is known and used up."""
    left = _left(trend, room_bytes, limits)
    times = (None, None, None) if left is None else (left.low, left.middle, left.high)
    return (
        number("holder", who, "", source),
        number("window", round(trend.hours, 2), "hours", "kvdiag"),
        number("read_while_idle", "only" if trend.idle_only else "and under load", "", "vllm"),
        number("growth_per_hour", trend.bytes_per_second * HOUR_SECONDS, "bytes", source),
        number("growth_per_hour_of_later_half", trend.later_bytes_per_second * HOUR_SECONDS, "bytes", source),
        number("growth_of_the_floor", trend.gain_bytes, "bytes", source),
        number("chance_without_growth", trend.p_rising, "ratio", "computed"),
        number("chance_in_a_random_walk", trend.p_drift, "ratio", "computed"),
        number("jumps_up", trend.jumps_up, "jumps", source),
        number("jumps_down", trend.jumps_down, "jumps", source),
        number("smallest_visible_growth", trend.visible_bytes_per_second * HOUR_SECONDS, "bytes per hour", "computed"),
        number("room", room_bytes, "bytes", source),
        *(
            number(name, None if value is None or math.isinf(value) else value, "seconds", "computed")
            for name, value in zip(
                ("time_to_exhaustion_earliest", "time_to_exhaustion", "time_to_exhaustion_latest"), times, strict=True
            )
        ),
    )
