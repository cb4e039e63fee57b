"""Robust summaries of series: quantiles, deviations, bins, resampling, and the time until room is exhausted."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

MAD_TO_SD_RATIO = 1.4826
"""Standard deviation of a normal sample over its median absolute deviation."""

FEWEST_FOR_CHANGE = 4
"""Two values on each side: below that a step and a line explain a series equally well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure between two bounds; `high` is infinite if there is no upper bound."""

    low: float
    estimate: float
    high: float


def quantile(values: Sequence[float], ratio: float) -> float:
    """The quantile, with linear interpolation."""
    ordered = sorted(values)
    place = ratio * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def deviation(values: Sequence[float]) -> float:
    """The standard deviation, estimated from the median absolute deviation: outliers do not count."""
    estimate = median(values)
    return MAD_TO_SD_RATIO * median([abs(value - estimate) for value in values])


def theil_sen(values: Sequence[float]) -> float:
    """The median slope over all pairs, per step: up to 29 % of the values may be outliers (Sen 1968)."""
    if values and min(values) == max(values):
        return 0.0
    return median(
        [
            (later - earlier) / (second - first)
            for first, earlier in enumerate(values)
            for second, later in enumerate(values[first + 1 :], start=first + 1)
        ]
    )


def evenly(clock: Sequence[float], values: Sequence[float]) -> tuple[float, ...] | None:
    """The values resampled at equal steps of a clock, such as work done; `None` if it stands still.

    The clock never runs backwards.
    """
    count, whole = len(values), clock[-1] - clock[0] if clock else 0.0
    if count < FEWEST_FOR_CHANGE or whole <= 0.0:
        return None
    found, place = [values[0]], 0
    for step in range(1, count):
        mark = clock[0] + whole * step / (count - 1)
        while place < count - 2 and clock[place + 1] < mark:
            place += 1
        width = clock[place + 1] - clock[place]
        share = min((mark - clock[place]) / width, 1.0) if width > 0.0 else 1.0
        found.append(values[place] + share * (values[place + 1] - values[place]))
    return tuple(found)


def binned(
    times: Sequence[float], values: Sequence[float], end_seconds: float, bin_seconds: float, count: int
) -> tuple[tuple[float, ...], ...]:
    """The samples in each of `count` equal bins that end at `end_seconds`, oldest first; a bin may be empty."""
    ends = bin_ends(times, end_seconds, bin_seconds, count)
    return tuple(tuple(values[lower:upper]) for lower, upper in pairwise(ends))


def bin_ends(times: Sequence[float], end_seconds: float, bin_seconds: float, count: int) -> list[int]:
    """The places where each of `count` equal bins begins, and where the last one ends, at `end_seconds`."""
    start = end_seconds - count * bin_seconds
    # Counted back from the end, so that the newest sample is always in the last bin.
    edges = [bisect_left(times, start + number * bin_seconds) for number in range(1, count)]
    return [bisect_left(times, start), *edges, bisect_right(times, end_seconds)]


def interpolated(bins: Sequence[float | None], ratio: float) -> list[float] | None:
    """The bins, missing ones interpolated; `None` if fewer than this share of them are known."""
    known = [(place, value) for place, value in enumerate(bins) if value is not None]
    if not known or len(known) < ratio * len(bins):
        return None
    if len(known) == len(bins):
        # As below, at a third of the time.
        return [*(float(value) for _, value in known[:-1]), known[-1][1]]
    whole = [known[0][1]] * known[0][0]
    for (place, value), (next_place, next_value) in pairwise(known):
        width = next_place - place
        whole += [value + (next_value - value) * step / width for step in range(width)]
    return whole + [known[-1][1]] * (len(bins) - known[-1][0])


def exhaustion_seconds(room: float, rate_per_second: float, error_per_second: float, errors: float) -> Interval | None:
    """How long `room` lasts at a rate with so many standard errors on either side; `None` if it does not shrink."""
    if rate_per_second <= 0.0:
        return None
    fast, slow = rate_per_second + errors * error_per_second, rate_per_second - errors * error_per_second
    left = max(room, 0.0)
    return Interval(low=left / fast, estimate=left / rate_per_second, high=left / slow if slow > 0.0 else math.inf)
