"""What one window of equal blocks says of growth: its form, and the figures that decided.

A slope alone calls everything a leak. What rises has to go on rising in every part of the window, from its lowest
readings on, more steadily than a walk that has nowhere to go, and must not be one event, or growth that ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Literal

from kvdiag import stats
from kvdiag.diagnosis.bank import Bank
from kvdiag.diagnosis.limits import Limits

MINUTE_SECONDS = 60.0
HOUR_SECONDS = 3600.0

Shape = Literal["grows", "steps", "ended", "event", "unsteady", "flat"]
"""Grows: steadily, all gates passed. Steps: too many jumps up for chance. Ended: it grew, and does no more.
Event: one level step or few. Unsteady: a slope, but not one of these. Flat: no slope that would count."""


LEAKS: tuple[Shape, ...] = ("grows", "steps")

VISIBLE_ERRORS = 2.9
"""Errors of a slope from which it is significant at 1 %: Student's t with 8 degrees of freedom, those of 60 blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """What one bank says of growth. Rates are bytes per second; `gain_bytes` is the rise of the lowest readings.

    That rise is from the window's first third to its last. `p_rising` is the chance of the slope without growth,
    `p_drift` that of the drift where a series only wanders, by its own steps; of jumps it is the chance of so many up
    where either way is as likely. `wanders` is the gain in deviations of the widest wandering that a healthy server is
    known for. `p_steady` is the chance that steady growth looks as if it came to an end, in `steps` that so few of
    them come late. `certain` is growth that is none of these. `hours` are those of the window.
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
    p_steady: float
    wanders: float
    hours: float
    jumps_up: int
    jumps_down: int
    certain: bool = False

    @property
    def visible_bytes_per_second(self) -> float:
        """The slowest growth that this bank would have called, given the noise and the hours that it stood in.

        Growth is what lies between the first block of the window and its last.
        """
        apart_seconds = (self.hours - self.bank.block_minutes / 60.0) * HOUR_SECONDS
        return max(
            self.bank.least_bytes_per_hour / HOUR_SECONDS,
            self.bank.least_growth_bytes / apart_seconds,
            VISIBLE_ERRORS * self.error_bytes_per_second,
        )

    def exhaustion_seconds(self, room_bytes: float, limits: Limits) -> stats.Interval | None:
        """How long the room lasts. The later half counts twice where it is faster: a leak may have begun late."""
        fastest = max(self.later_bytes_per_second, self.bytes_per_second)
        spread = stats.exhaustion_seconds(
            room_bytes, (self.bytes_per_second + fastest) / 2.0, self.error_bytes_per_second, limits.exhaustion_errors
        )
        if spread is None:
            return None
        return stats.Interval(
            low=min(spread.low, max(room_bytes, 0.0) / fastest), middle=spread.middle, high=spread.high
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A window of equal blocks, the newest last: medians, lowest readings, what may explain them (the load) beside.

    `work` is the load summed up to each block, `highest` the highest load so far; both are `None` where it is not told.
    `minutes` are those of one block.
    """

    middles: Sequence[float]
    lows: Sequence[float]
    beside: Sequence[Sequence[float]]
    work: Sequence[float] | None
    highest: Sequence[float] | None
    minutes: int
    idle_only: bool


def judged_window(blocks: Blocks, bank: Bank, limits: Limits) -> Trend | None:
    """What a window says by the limits of its bank; `None` where too few blocks are left to tell a slope.

    What grows with the work that is done and not with the time is straight by that clock alone.
    """
    beside = [
        series for series in blocks.beside if stats.steps_share(blocks.middles, series) >= limits.load_share_ratio
    ]
    smooth = _without_jumps(blocks.middles, beside, limits)
    slope = stats.slope(smooth.values, beside)
    if slope is None:
        return None
    level = stats.beside_load(smooth.values, beside)
    # The lowest readings of a block are those of its lowest load, which is not the one beside the block.
    floor = stats.beside_load(blocks.middles, beside) if beside else blocks.lows
    figures = _Figures.of(level, floor, slope, smooth, beside, blocks)
    if max(level) - min(level) < bank.least_growth_bytes and figures.gain < bank.least_growth_bytes:
        return figures.trend("flat", slope.per_step, slope.per_step, bank, limits)
    trend = _formed(figures, bank, limits)
    told = trend.shape in ("steps", "ended") or (
        trend.shape == "grows" and trend.p_steady >= limits.slowing_significance
    )
    if told or blocks.work is None or figures.gain < bank.least_growth_bytes:
        return trend
    by_work = _by_work(blocks, level, bank, limits)
    return trend if by_work is None else by_work


def _by_work(blocks: Blocks, level: Sequence[float], bank: Bank, limits: Limits) -> Trend | None:
    """The same by the clock of the work done, where growth is much straighter by it, and certain; else `None`."""
    smooth = _without_jumps(blocks.middles, (), limits)
    worked, floor = stats.evenly(blocks.work or (), smooth.values), stats.evenly(blocks.work or (), blocks.lows)
    slope = None if worked is None else stats.slope(worked)
    if worked is None or floor is None or slope is None or not _straighter(worked, level, limits):
        return None
    trend = _formed(_Figures.of(worked, floor, slope, smooth, (), blocks), bank, limits)
    return trend if trend.shape == "grows" and certain(trend, limits) else None


def _straighter(worked: Sequence[float], level: Sequence[float], limits: Limits) -> bool:
    """Whether growth is a line by the work done, and much less so by the time."""
    by_work, by_time = stats.change(worked), stats.change(level)
    if by_work is None or by_time is None:
        return False
    return by_work.line_share < limits.work_share_ratio * by_time.line_share


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What the gates look at, per block of the window."""

    level: Sequence[float]
    floor: Sequence[float]
    gain: float
    slope: stats.Slope
    smooth: stats.Levelled
    beside: Sequence[Sequence[float]]
    blocks: Blocks

    @classmethod
    def of(
        cls,
        level: Sequence[float],
        floor: Sequence[float],
        slope: stats.Slope,
        smooth: stats.Levelled,
        beside: Sequence[Sequence[float]],
        blocks: Blocks,
    ) -> _Figures:
        """With the floors that the lowest readings stand on."""
        third = len(level) // 3
        floors = stats.running_minima(range(len(floor)), floor, third - 1)
        gain = floors[-1] - floors[third - 1]
        return cls(
            level=level,
            floor=floor,
            gain=gain,
            slope=slope,
            smooth=smooth,
            beside=beside,
            blocks=blocks,
        )

    def trend(
        self, shape: Shape, rate: float, later: float, bank: Bank, limits: Limits, *, p_drift: float = 1.0
    ) -> Trend:
        """The window in bytes per second."""
        block_seconds = self.blocks.minutes * MINUTE_SECONDS
        bend = stats.bend(self.level) if shape == "grows" else None
        hours = len(self.level) * block_seconds / HOUR_SECONDS
        return Trend(
            bank=bank,
            idle_only=self.blocks.idle_only,
            shape=shape,
            bytes_per_second=rate / block_seconds,
            error_bytes_per_second=self.slope.error_per_step / block_seconds,
            later_bytes_per_second=later / block_seconds,
            gain_bytes=self.gain,
            p_rising=self.slope.p_rising,
            p_drift=p_drift,
            # The floors' gain is between windows two thirds apart.
            wanders=max(self.gain, 0.0) / (limits.wander_bytes * math.sqrt(hours * 2.0 / 3.0)),
            hours=hours,
            p_steady=_p_lasting(self.smooth, len(self.level)) if bend is None else 1.0 - bend.p_rising,
            jumps_up=self.smooth.ups,
            jumps_down=self.smooth.downs,
        )


def _without_jumps(middles: Sequence[float], beside: Sequence[Sequence[float]], limits: Limits) -> stats.Levelled:
    smooth = stats.without_jumps(middles, limits.jump_deviations, limits.jump_least_bytes, beside)
    if smooth.downs >= limits.collections and smooth.ups == 0:
        # Garbage that is collected again and again falls and never jumps: without its falls it would climb for ever.
        return stats.Levelled(values=tuple(middles), ups=0, downs=smooth.downs)
    return smooth


def _formed(figures: _Figures, bank: Bank, limits: Limits) -> Trend:
    level, gain, smooth = figures.level, figures.gain, figures.smooth
    count, third = len(level), len(level) // 3
    rate = stats.theil_sen(level)
    claim = rate * count
    block_hours = figures.blocks.minutes * MINUTE_SECONDS / HOUR_SECONDS
    matters = rate / block_hours >= bank.least_bytes_per_hour and claim >= bank.least_growth_bytes
    halves = _halves(level)
    if matters and figures.slope.p_rising < limits.growth_significance:
        p_drift = _p_drift(figures, limits)
        trend = figures.trend(_rising(figures, claim, halves, limits), rate, halves[1], bank, limits, p_drift=p_drift)
        drifts = _drifts(p_drift, trend.wanders, limits.drift_significance, limits.wanders_suspect, limits)
        return trend if drifts or trend.shape != "grows" else replace(trend, shape="unsteady")
    shape: Shape = "flat"
    if gain >= bank.least_growth_bytes and (smooth.ups or not figures.beside):
        shape = _in_jumps(smooth, count, limits)
        if shape == "steps":
            rate = gain / (count - third)
            by_chance = stats.binomial_tail(smooth.ups, smooth.ups + smooth.downs)
            lasts = _lasts(figures, limits)
            return figures.trend(shape, rate, rate, bank, limits, p_drift=by_chance if lasts else 1.0)
    return figures.trend(shape, rate, halves[1], bank, limits)


def _in_jumps(smooth: stats.Levelled, count: int, limits: Limits) -> Shape:
    """The form of a window whose floor rose without a slope that would explain it: by its jumps."""
    by_chance = stats.binomial_tail(smooth.ups, smooth.ups + smooth.downs)
    if not smooth.ups or limits.staircase_significance <= by_chance < limits.staircase_open_significance:
        return "unsteady"  # too noisy to tell, or too few jumps
    if by_chance >= limits.staircase_significance:
        return "event"
    # What comes at random is not over because fewer came in one half.
    return "ended" if _p_lasting(smooth, count) < limits.staircase_open_significance else "steps"


def _p_lasting(smooth: stats.Levelled, count: int) -> float:
    """The chance that as few jumps up come in a window's later half where they come at random."""
    later = sum(place >= count // 2 for place in smooth.up_places)
    return stats.binomial_tail(smooth.ups - later, smooth.ups)


def _lasts(figures: _Figures, limits: Limits) -> bool:
    """Whether steps are as high later as before, and are not those of an allocator that keeps the most it ever needed.

    What it keeps rises with the highest load so far; where the load is not told, nothing says that it did not.
    """
    highest, places = figures.blocks.highest, figures.smooth.up_places
    if highest is None:
        return False
    with_load = sum(highest[place] > highest[max(place - 2, 0)] for place in places)
    lows, count = figures.blocks.lows, len(figures.blocks.lows)
    # What each part of the window never fell below again.
    first, middle, last = (min(lows[start:]) for start in (0, count // 2, -(count // 12)))
    earlier, later = middle - first, last - middle
    return with_load * 2 < len(places) and later >= limits.growth_deceleration_ratio * earlier


def _rising(figures: _Figures, claim: float, halves: tuple[float, float], limits: Limits) -> Shape:
    """The form of a window whose slope is there and counts."""
    level, beside = figures.level, figures.beside
    # The load may explain how growth came to an end, by chance; without it the end has to be missing, too.
    records = [each for each in beside if list(each) != list(accumulate(each, max))]
    alone = level if len(records) == len(beside) else stats.beside_load(figures.smooth.values, records)
    for series, (earlier, later) in ((level, halves), (alone, _halves(alone))):
        if later < limits.growth_deceleration_ratio * earlier:
            bend = stats.bend(series)
            if bend is None or 1.0 - bend.p_rising < limits.bend_significance:
                return "ended"
    if figures.gain < limits.growth_floor_ratio * claim / 3.0:
        return "flat"
    if figures.smooth.ups and _levelled_off(figures.blocks.lows, limits):
        return "ended"
    step = stats.change(level)
    if step is not None and step.step_share < step.line_share:
        return "event"
    # Thirds are two thirds of a window apart, from lowest to lowest.
    risen = figures.gain >= limits.growth_floor_ratio * claim * 2.0 / 3.0
    return "grows" if risen and _steady(level, figures.slope, limits) else "unsteady"


def certain(trend: Trend, limits: Limits) -> bool:
    """Whether growth cannot be wandering, nor coming to an end."""
    return trend.p_steady >= limits.slowing_significance and lasting(trend, limits)


def lasting(trend: Trend, limits: Limits) -> bool:
    """Whether growth cannot be wandering, though it may come to an end."""
    if trend.shape == "steps":
        return trend.p_drift < limits.staircase_certain_significance
    return _drifts(trend.p_drift, trend.wanders, limits.drift_certain_significance, limits.wanders_fault, limits)


def _drifts(p_drift: float, wanders: float, significance: float, deviations: float, limits: Limits) -> bool:
    return p_drift < significance or (wanders >= deviations and p_drift < limits.wander_significance)


def _levelled_off(lows: Sequence[float], limits: Limits) -> bool:
    """Whether the lowest readings, jumps and all, rose early in the window and hardly since: loaded, and done."""
    third = len(lows) // 3
    first, middle, last = min(lows[:third]), min(lows[third:-third]), min(lows[-third:])
    return last - middle < limits.levelled_off_ratio * (middle - first)


def _p_drift(figures: _Figures, limits: Limits) -> float:
    """The least chance of as much drift in a walk, by its medians and by its floors, in few pieces and in many.

    Garbage hides growth from the medians and not from the lowest readings; slow noise hides it from short pieces.
    """
    size = max(len(figures.level) // limits.drift_pieces, 1)
    lowest = [min(figures.floor[start : start + size]) for start in range(0, len(figures.floor) - size + 1, size)]
    tails = [
        stats.drift_tail(figures.level, limits.drift_pieces),
        stats.drift_tail(figures.level, limits.drift_long_pieces),
        stats.drift_tail(lowest, len(lowest) - 1),
    ]
    return min((tail for tail in tails if tail is not None), default=1.0)


def _halves(level: Sequence[float]) -> tuple[float, float]:
    """The slopes of a window's earlier and later half."""
    half = len(level) // 2
    return stats.theil_sen(level[:half]), stats.theil_sen(level[-half:])


def _steady(level: Sequence[float], slope: stats.Slope, limits: Limits) -> bool:
    """Whether every quarter of a window lies above the one before, no step of them is all, and the last one counts.

    As far as the noise lets that be seen: a slope's error is sqrt(12 / n) / n of the noise of a mean of all.
    """
    count = len(level)
    quarters = [median(level[count * part // 4 : count * (part + 1) // 4]) for part in range(4)]
    steps = [later - earlier for earlier, later in pairwise(quarters)]
    whole = sum(steps)
    error = slope.error_per_step * count * math.sqrt(8.0 / 12.0) * limits.steady_errors
    return (
        min(steps) > -error
        and max(steps) <= limits.growth_largest_quarter_ratio * whole + error
        and steps[-1] >= limits.growth_last_quarter_ratio * whole - error
    )
