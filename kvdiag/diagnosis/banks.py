"""Whether a series of bytes keeps growing over an hour, six hours, a day. Watched, not provoked: no step is needed.

A test on one window is not enough, whatever its significance: load, an allocator's high-water mark, warm-up, garbage
collection, level steps and bounded caches all grow for a while. Each window has to pass a slope under autocorrelation
beside the load, a drift test, and gates on the growth's form; and several windows in a row have to.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from statistics import fmean, median

from kvdiag import stats
from kvdiag.diagnosis.bank import Bank
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.window import HOUR_SECONDS, LEAKS, MINUTE_SECONDS, Blocks, Trend, certain, judged_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Readings of one component in ascending time, in bytes; `idle` and `load` (any unit) are the engines' beside each.

    `load` is `None` where the engines' load was not told.
    """

    times_seconds: tuple[float, ...]
    sizes_bytes: tuple[int, ...]
    idle: tuple[bool, ...]
    load: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A series on every bank that its readings reach, the shortest first; and how long the readings are.

    `burst` is growth so fast that the room may be gone before any bank is filled; `at_record` says that it has brought
    the series higher than all readings before it.
    """

    seconds: float
    trends: tuple[Trend, ...]
    burst: Trend | None = None
    at_record: bool = False

    @property
    def decides(self) -> Trend | None:
        """The shortest bank that is certain of growth, else the shortest on which it keeps growing, else the longest.

        A shorter bank that stays open is answered by a longer one: garbage rises for minutes and not for hours, and
        what an hour's noise leaves open a day may prove. `None` where no bank is reached.
        """
        leaks = [trend for trend in self.trends if trend.shape in LEAKS]
        sure = (trend for trend in leaks if trend.certain)
        return next(chain(sure, leaks, self.trends[-1:]), None)


def watch(series: Series, limits: Limits, served_since_seconds: float | None = None) -> Watched:
    """A series on every bank, and on the burst's where it was read and the engines answered all the while.

    What loads a model takes memory faster than any leak, and answers no request.
    """
    if not series.times_seconds:
        return Watched(seconds=0.0, trends=())
    minutes = _minutes(series, limits)
    trends = [trend for bank in limits.banks if (trend := _on_bank(minutes, bank, limits)) is not None]
    burst = None
    begin = series.times_seconds[-1] - limits.burst.window_minutes * MINUTE_SECONDS
    if served_since_seconds is not None and served_since_seconds <= begin:
        burst = _on_bank(minutes, limits.burst, limits)
    earlier = series.sizes_bytes[: bisect_left(series.times_seconds, begin)]
    return Watched(
        burst=burst if burst is not None and burst.shape in LEAKS else None,
        at_record=bool(earlier) and series.sizes_bytes[-1] > max(earlier),
        seconds=series.times_seconds[-1] - series.times_seconds[0],
        trends=tuple(
            replace(trend, certain=trend.certain and not _was_collected(trends[place + 1 :], limits))
            for place, trend in enumerate(trends)
        ),
    )


def _was_collected(longer: Sequence[Trend], limits: Limits) -> bool:
    """Whether longer banks have seen growth come back: falls, no such rise, and a floor that stays where it was."""
    return any(
        trend.shape == "flat" and trend.jumps_up == 0 and trend.jumps_down >= limits.seen_collections
        for trend in longer
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minutes:
    """Medians, minima and mean load by minute, the newest last; `None` where there is no reading."""

    middles: list[float | None]
    lows: list[float | None]
    idle_middles: list[float | None]
    idle_lows: list[float | None]
    load: list[float | None] | None
    spacing_seconds: float


def _minutes(series: Series, limits: Limits) -> _Minutes:
    longest = max((bank.window_minutes + bank.persistence * bank.evaluate_minutes for bank in limits.banks), default=0)
    end = series.times_seconds[-1]
    start = bisect_left(series.times_seconds, end - longest * MINUTE_SECONDS)
    times, sizes = series.times_seconds[start:], series.sizes_bytes[start:]
    # A reading on the edge belongs to the minute that it ends; the first one needs a minute too.
    count = min(int((end - times[0]) / MINUTE_SECONDS) + 1, longest)
    after = end + MINUTE_SECONDS / 60.0

    def cells(moments: Sequence[float], values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return stats.blocks(moments, values, after, MINUTE_SECONDS, count)

    every = cells(times, sizes)
    quiet = [place for place, idle in enumerate(series.idle[start:]) if idle]
    resting = cells([times[place] for place in quiet], [sizes[place] for place in quiet])
    load = None if series.load is None else cells(times, series.load[start:])
    return _Minutes(
        middles=[median(cell) if cell else None for cell in every],
        lows=[min(cell) if cell else None for cell in every],
        idle_middles=[median(cell) if cell else None for cell in resting],
        idle_lows=[min(cell) if cell else None for cell in resting],
        load=None if load is None else [fmean(cell) if cell else None for cell in load],
        spacing_seconds=median([later - earlier for earlier, later in pairwise(times)]) if len(times) > 1 else 0.0,
    )


def _on_bank(minutes: _Minutes, bank: Bank, limits: Limits) -> Trend | None:
    """The bank's verdict over its evaluations in a row; `None` where the readings do not reach its least window."""
    count = len(minutes.middles)
    if count < bank.least_minutes:
        return None
    # Blocks of two readings at least: a scrape comes late now and then, and a block without any is a hole.
    spaced = math.ceil(limits.block_readings * minutes.spacing_seconds / MINUTE_SECONDS)
    size = max(bank.block_minutes, spaced if minutes.spacing_seconds > limits.dense_seconds else 1)
    trends: list[Trend] = []
    pace = bank.evaluate_minutes
    for turn in range(bank.certain_persistence):
        end = count - turn * pace
        # Earlier evaluations may begin where the readings do: a trace of just a window's length is worth judging.
        trend = _in_window(minutes, max(end - bank.window_minutes, 0), end, size, bank, limits)
        if trend is not None:
            trends.append(trend)
        if trend is None or trend.shape not in LEAKS:
            break
        if not turn and trend.bytes_per_second * HOUR_SECONDS >= limits.banks[0].least_bytes_per_hour:
            # What is fast enough for the shortest bank has to last no longer than on that.
            pace = min(pace, limits.banks[0].evaluate_minutes)
    if not trends or trends[0].shape not in LEAKS:
        return trends[0] if trends else None
    agreed = [trend for trend in trends if trend.shape in LEAKS]
    if len(agreed) < bank.persistence:
        return replace(trends[0], shape="unsteady")
    whole = replace(
        trends[0],
        p_drift=max(trend.p_drift for trend in agreed),
        wanders=min(trend.wanders for trend in agreed),
    )
    sure = len(agreed) == bank.certain_persistence and len({trend.shape for trend in agreed}) == 1
    # A beginning that comes to its end has bent in some of the windows, whatever noise does to the newest.
    sure = sure and min(trend.p_steady for trend in agreed) >= limits.slowed_significance
    # What began with the readings may be a beginning: the first evaluations have to see as much as the last.
    seen = count - (bank.certain_persistence - 1) * pace >= bank.least_minutes
    return replace(whole, certain=sure and seen and certain(whole, limits))


def _in_window(minutes: _Minutes, start: int, end: int, size: int, bank: Bank, limits: Limits) -> Trend | None:
    ratio = limits.bank_filled_ratio
    middles = filled(_blocks(minutes.idle_middles[start:end], size, median), ratio)
    lows = filled(_blocks(minutes.idle_lows[start:end], size, min), ratio)
    load = None if minutes.load is None else filled(_blocks(minutes.load[start:end], size, fmean), ratio)
    beside: list[list[float]] = []
    idle_only = middles is not None
    if middles is None:
        # Never idle for long: then the load, and the highest that it has been, may explain what rises.
        middles = filled(_blocks(minutes.middles[start:end], size, median), ratio)
        lows = filled(_blocks(minutes.lows[start:end], size, min), ratio)
        beside = [] if load is None else [load, list(accumulate(load, max))]
    if middles is None or lows is None:
        return None
    work = None if load is None else list(accumulate(load))
    highest = None if load is None else list(accumulate(load, max))
    blocks = Blocks(
        middles=middles, lows=lows, beside=beside, work=work, highest=highest, minutes=size, idle_only=idle_only
    )
    return judged_window(blocks, bank, limits)


def _blocks(minutes: Sequence[float | None], size: int, of: Callable[[Sequence[float]], float]) -> list[float | None]:
    """Blocks of so many minutes, the newest whole."""
    cells = (
        [value for value in minutes[start : start + size] if value is not None]
        for start in range(len(minutes) % size, len(minutes), size)
    )
    return [of(cell) if cell else None for cell in cells]


def filled(blocks: Sequence[float | None], ratio: float) -> list[float] | None:
    """The blocks, a missing one between its neighbours; `None` where fewer than this share of them are known."""
    known = [(place, value) for place, value in enumerate(blocks) if value is not None]
    if not known or len(known) < ratio * len(blocks):
        return None
    whole = [known[0][1]] * known[0][0]
    for (place, value), (next_place, next_value) in pairwise(known):
        width = next_place - place
        whole += [value + (next_value - value) * step / width for step in range(width)]
    return whole + [known[-1][1]] * (len(blocks) - known[-1][0])
