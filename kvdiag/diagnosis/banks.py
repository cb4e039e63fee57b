"""Whether a series of bytes keeps growing over an hour, six hours, a day. Watched, not provoked: no step is needed.

A test on one window is not enough, whatever its significance: load, an allocator's high-water mark, warm-up, garbage
collection, level steps and bounded caches all grow for a while. Each window has to pass a slope under autocorrelation
beside the load, a drift test, and gates on the growth's form; and several windows in a row have to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Literal

from kvdiag import stats
from kvdiag.diagnosis.limits import Bank, Limits

MINUTE_SECONDS = 60.0
HOUR_SECONDS = 3600.0

VISIBLE_ERRORS = 2.9
"""Errors of a slope from which it is significant at 1 %: Student's t with 8 degrees of freedom, those of 60 blocks."""

Shape = Literal["grows", "steps", "ended", "event", "unsteady", "flat"]
"""Grows: steadily, all gates passed. Steps: too many jumps up for chance. Ended: it grew, and does no more.
Event: one level step. Unsteady: a slope, but not one of these. Flat: no slope that would count."""


LEAKS: tuple[Shape, ...] = ("grows", "steps")


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
class Trend:
    """What one bank says: the newest window's figures, and the shape that all its evaluations agree on.

    `gain_bytes` is what the lowest readings of the window's last third hold beyond those of its first.
    """

    bank: Bank
    shape: Shape
    idle_only: bool
    bytes_per_second: float
    error_bytes_per_second: float
    later_bytes_per_second: float
    gain_bytes: float
    p_rising: float
    p_drift: float
    jumps_up: int
    jumps_down: int

    @property
    def visible_bytes_per_second(self) -> float:
        """The slowest growth that this bank would have called, given the noise that it stood in."""
        return max(self.bank.least_bytes_per_hour / HOUR_SECONDS, VISIBLE_ERRORS * self.error_bytes_per_second)

    def exhaustion_seconds(self, room_bytes: float, limits: Limits) -> stats.Interval | None:
        """How long the room lasts. The later half's rate bounds it too: it knows of a leak that began late."""
        spread = stats.exhaustion_seconds(
            room_bytes, self.bytes_per_second, self.error_bytes_per_second, limits.exhaustion_errors
        )
        if spread is None:
            return None
        fastest = max(self.later_bytes_per_second, self.bytes_per_second)
        return stats.Interval(
            low=min(spread.low, max(room_bytes, 0.0) / fastest), middle=spread.middle, high=spread.high
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A series on every bank that its readings reach, the shortest first; and how long the readings are."""

    seconds: float
    trends: tuple[Trend, ...]

    @property
    def decides(self) -> Trend | None:
        """The shortest bank on which it keeps growing, else the longest; `None` where no bank is reached.

        A shorter bank that stays open is answered by a longer one: garbage rises for minutes and not for hours.
        """
        leaks = (trend for trend in self.trends if trend.shape in LEAKS)
        return next(leaks, self.trends[-1] if self.trends else None)


def watch(series: Series, limits: Limits) -> Watched:
    """A series on every bank."""
    if not series.times_seconds:
        return Watched(seconds=0.0, trends=())
    minutes = _minutes(series, limits)
    trends = [_on_bank(minutes, bank, limits) for bank in limits.banks]
    return Watched(
        seconds=series.times_seconds[-1] - series.times_seconds[0],
        trends=tuple(trend for trend in trends if trend is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minutes:
    """Medians, minima and mean load by minute, the newest last; `None` where there is no reading."""

    middles: list[float | None]
    lows: list[float | None]
    idle_middles: list[float | None]
    idle_lows: list[float | None]
    load: list[float | None] | None


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
    )


def _on_bank(minutes: _Minutes, bank: Bank, limits: Limits) -> Trend | None:
    """The bank's verdict over its evaluations in a row; `None` where the readings do not reach its window."""
    count = len(minutes.middles)
    if count < bank.window_minutes:
        return None
    trends = []
    for turn in range(bank.persistence):
        end = count - turn * bank.evaluate_minutes
        # Earlier evaluations may begin where the readings do: a trace of just a window's length is worth judging.
        trend = _in_window(minutes, max(end - bank.window_minutes, 0), end, bank, limits)
        if trend is None:
            return None
        trends.append(trend)
    newest = replace(trends[0], p_drift=max(trend.p_drift for trend in trends))
    if newest.shape in LEAKS and any(trend.shape not in LEAKS for trend in trends):
        return replace(newest, shape="unsteady")
    return newest


def _in_window(minutes: _Minutes, start: int, end: int, bank: Bank, limits: Limits) -> Trend | None:
    middles = _blocks(minutes.idle_middles[start:end], bank.block_minutes, limits)
    lows = _blocks(minutes.idle_lows[start:end], bank.block_minutes, limits, lowest=True)
    beside: list[list[float]] = []
    idle_only = middles is not None
    if middles is None:
        # Never idle for long: then the load, and the highest that it has been, may explain what rises.
        middles = _blocks(minutes.middles[start:end], bank.block_minutes, limits)
        lows = _blocks(minutes.lows[start:end], bank.block_minutes, limits, lowest=True)
        load = None if minutes.load is None else _blocks(minutes.load[start:end], bank.block_minutes, limits)
        beside = [] if load is None else [load, list(accumulate(load, max))]
    if middles is None or lows is None:
        return None
    return _judge(middles, lows, beside, bank, limits, idle_only=idle_only)


def _blocks(minutes: Sequence[float | None], size: int, limits: Limits, *, lowest: bool = False) -> list[float] | None:
    """Blocks of so many minutes, a missing one between its neighbours; `None` where too many are missing."""
    cells = [
        [value for value in minutes[start : start + size] if value is not None]
        for start in range(len(minutes) % size, len(minutes), size)
    ]
    return filled(
        [(min(cell) if lowest else median(cell)) if cell else None for cell in cells], limits.bank_filled_ratio
    )


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


def _judge(
    middles: list[float], lows: list[float], beside: list[list[float]], bank: Bank, limits: Limits, *, idle_only: bool
) -> Trend | None:
    block_seconds = bank.block_minutes * MINUTE_SECONDS
    beside = [series for series in beside if stats.steps_share(middles, series) >= limits.load_share_ratio]
    smooth = stats.without_jumps(middles, limits.jump_deviations, limits.jump_least_bytes, beside)
    slope = stats.slope(smooth.values, beside)
    if slope is None:
        return None
    level = stats.beside_load(smooth.values, beside)
    if beside:
        # The lowest readings of a block are those of its lowest load, which is not the one beside the block.
        lows = list(stats.beside_load(middles, beside))
    third = len(level) // 3
    rate = stats.theil_sen(level)
    halves = _halves(level)
    # The load may explain how growth came to an end, by chance; without it the end has to be missing, too.
    alone = _halves(stats.beside_load(smooth.values, [each for each in beside if each != list(accumulate(each, max))]))
    floors = stats.running_minima(range(len(lows)), lows, third - 1)
    floor_gain = floors[-1] - floors[third - 1]
    claim = rate * len(level)
    # Thirds are two thirds of a window apart, from lowest to lowest.
    risen = floor_gain >= limits.growth_floor_ratio * claim * 2.0 / 3.0
    tail = stats.drift_tail(level, limits.drift_pieces)
    drift = 1.0 if tail is None else tail
    matters = rate * HOUR_SECONDS / block_seconds >= bank.least_bytes_per_hour and claim >= bank.least_growth_bytes
    shape: Shape = "flat"
    if matters and slope.p_rising < limits.growth_significance:
        steady = _steady(level, limits) and drift < limits.drift_significance
        if any(later < limits.growth_deceleration_ratio * earlier for earlier, later in (halves, alone)):
            shape = "ended"
        elif floor_gain < limits.growth_floor_ratio * claim / 3.0:
            shape = "flat"
        else:
            shape = "grows" if steady and risen else "unsteady"
    elif floor_gain >= bank.least_growth_bytes and (smooth.ups or not beside):
        by_chance = stats.binomial_tail(smooth.ups, smooth.ups + smooth.downs)
        # Its floor rose, and neither a slope nor a jump explains it: too noisy to tell.
        otherwise: Shape = "event" if smooth.ups else "unsteady"
        shape = "steps" if by_chance < limits.staircase_significance else otherwise
        earlier = floors[-third - 1] - floors[third - 1]
        if smooth.ups and floor_gain - earlier < limits.growth_deceleration_ratio * earlier:
            shape = "ended" if shape == "steps" else shape
    return Trend(
        bank=bank,
        shape=shape,
        idle_only=idle_only,
        bytes_per_second=(rate if shape != "steps" else floor_gain / (len(level) - third)) / block_seconds,
        error_bytes_per_second=slope.error_per_step / block_seconds,
        later_bytes_per_second=halves[1] / block_seconds,
        gain_bytes=floor_gain,
        p_rising=slope.p_rising,
        p_drift=drift,
        jumps_up=smooth.ups,
        jumps_down=smooth.downs,
    )


def _halves(level: Sequence[float]) -> tuple[float, float]:
    """The slopes of a window's earlier and later half."""
    half = len(level) // 2
    return stats.theil_sen(level[:half]), stats.theil_sen(level[-half:])


def _steady(level: Sequence[float], limits: Limits) -> bool:
    """Whether every quarter of a window lies above the one before, no step of them is all, and the last one counts."""
    count = len(level)
    quarters = [median(level[count * part // 4 : count * (part + 1) // 4]) for part in range(4)]
    steps = [later - earlier for earlier, later in pairwise(quarters)]
    whole = sum(steps)
    return (
        min(steps) > 0.0
        and max(steps) <= limits.growth_largest_quarter_ratio * whole
        and steps[-1] >= limits.growth_last_quarter_ratio * whole
    )
