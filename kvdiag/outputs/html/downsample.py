"""Thins samples until they are few enough to draw, without losing a spike or bridging a gap. Pure.

Of each column of a plot the first, lowest, highest and last sample are kept, which draws the same picture as all of
them (M4: Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import sub
from statistics import median

PAUSE_RATIO = 5.0
"""Two samples so many times further apart than those around them have a gap between them."""

AROUND = 4
"""Samples on each side that give the local sampling interval: older ones may be thinned to minutes."""

PAUSE_SECONDS = 3.0
"""A sample that is a little late at 10 Hz leaves no gap."""

Run = tuple[Sequence[float], Sequence[float]]
"""Times and values of samples without a gap."""


def pauses(times: Sequence[float], least_seconds: float = PAUSE_SECONDS) -> tuple[int, ...]:
    """The indices of samples that follow a gap: an interval far above those around it, and longer than the least."""
    if len(times) < 3:  # noqa: PLR2004 - one step between two samples is as long as itself
        return ()
    steps = list(map(sub, times[1:], times))
    least = max(PAUSE_RATIO * sorted(steps)[len(steps) // 10], least_seconds)
    found = []
    for place, step in enumerate(steps):
        if step > least and step > PAUSE_RATIO * median(steps[max(place - AROUND, 0) : place + AROUND + 1]):
            found.append(place + 1)
    return tuple(found)


def runs(times: Sequence[float], values: Sequence[float | None], breaks: Sequence[int] = ()) -> tuple[Run, ...]:
    """Samples in ascending time, cut where one is `None` and before the indices in `breaks`."""
    edges = [0, *breaks, len(times)]
    found: list[Run] = []
    for start, end in pairwise(edges):
        part = values[start:end]
        if None not in part:
            found += [(times[start:end], part)] if part else []  # type: ignore[list-item]
            continue
        place = start
        for unseen, group in groupby(part, key=lambda value: value is None):
            length = len(list(group))
            if not unseen:
                found.append((times[place : place + length], values[place : place + length]))  # type: ignore[arg-type]
            place += length
    return tuple(found)


def thinned(whole: Sequence[Run], start_seconds: float, end_seconds: float, columns: int) -> list[Run]:
    """At most about twelve samples a column: every run's first, lowest, highest and last sample in each."""
    width = max(end_seconds - start_seconds, 1e-9) / columns
    few = whole if len(whole) <= columns else list(_one_a_column(whole, start_seconds, width))
    return [_thinned(times, values, start_seconds, width) for times, values in few]


def _thinned(times: Sequence[float], values: Sequence[float], start_seconds: float, width: float) -> Run:
    kept_times: list[float] = []
    kept_values: list[float] = []
    place = 0
    while place < len(times):
        column = int((times[place] - start_seconds) / width)
        end = max(bisect_left(times, start_seconds + (column + 1) * width, place), place + 1)
        for one in _telling(values, place, end):
            kept_times.append(times[one])
            kept_values.append(values[one])
        place = end
    return kept_times, kept_values


def _telling(values: Sequence[float], start: int, end: int) -> Sequence[int]:
    if end - start <= 4:  # noqa: PLR2004 - first, lowest, highest, last
        return range(start, end)
    part = values[start:end]
    low, high = min(part), max(part)
    if low == high:
        return (start, end - 1)
    return sorted({start, start + part.index(low), start + part.index(high), end - 1})


def _one_a_column(whole: Sequence[Run], start_seconds: float, width: float) -> Iterator[Run]:
    """One run for all runs that lie within one column: faster changes cannot be drawn."""
    for column, group in groupby(whole, key=lambda run: _column(run, start_seconds, width)):
        members = list(group)
        if column is None or len(members) == 1:
            yield from members
            continue
        yield [time for times, _ in members for time in times], [value for _, values in members for value in values]


def _column(run: Run, start_seconds: float, width: float) -> int | None:
    first, last = (int((time - start_seconds) / width) for time in (run[0][0], run[0][-1]))
    return first if first == last else None
