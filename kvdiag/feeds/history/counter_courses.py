"""Whether a counter that falls again and again is of one server that restarts, or of several behind one address. Pure.

A counter only rises while its server runs. Behind one address each of several servers continues its own course whenever
it answers: however often the counter falls, as few courses as there are servers hold all samples, each of them rising.
Servers that restart have no such courses: what one life counts is more or less than what the life before did, so that
the courses grow with the square root of the restarts, in whichever order lives come (the longest falling subsequence of
n random numbers has about 2 * sqrt(n)). Lives that are all alike would fit a few courses, which do not rise on then.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import gt, itemgetter, ne

from kvdiag.feeds.history.columns import Column

MIN_FALLS, FALLS_RATIO = 10, 0.25
"""How often a counter falls, of how many samples, that is unexplained: a server that crashes at once is up for some
scrapes."""

COURSES_PER_ROOT = 0.5
"""Courses for the square root of the falls, up to which they are of servers: a quarter of those of random lives. Two
servers show after 16 falls; as many random lives have two courses once in half a million."""

MISSED_RATIO = 1.5
"""Of the usual interval, beyond which a scrape is missing: a restart may have been there, and explains the fall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Falls:
    """How often a counter falls, in so many samples; `servers` is 0 where no courses show any."""

    count: int
    samples: int
    servers: int


def falls_of(column: Column, started_seconds: float) -> Falls | None:
    """The falls of a counter that no restart explains; `None` where they are few.

    `started_seconds` is when the newest process began, 0 where that is not reported: what was before it may have been
    restarts, but for courses that continue.
    """
    values = column.values.tolist()
    if values == sorted(values):
        return None
    count = _in_turn(column.times, values)
    if count >= MIN_FALLS:
        most = int(COURSES_PER_ROOT * count**0.5)
        courses, rises = _courses(values, most)
        if courses <= most and rises * 2 >= count:
            # Behind one address, too, a server may have begun just now.
            return Falls(count=count, samples=len(values), servers=courses)
    values = values[bisect_right(column.times, started_seconds) :]
    count = sum(map(gt, values, values[1:]))
    if count < MIN_FALLS or count <= FALLS_RATIO * len(values):
        return None
    return Falls(count=count, samples=len(values), servers=0)


def _in_turn(times: Sequence[float], values: Sequence[float]) -> int:
    """How often the value falls from one scrape to the next, where none is missing between them."""
    intervals = [after - before for before, after in pairwise(times)]
    # A server that crashes after two scrapes misses one as often.
    most = MISSED_RATIO * sorted(intervals)[len(intervals) // 4]
    return sum(
        less < more and interval <= most for interval, (more, less) in zip(intervals, pairwise(values), strict=True)
    )


def _courses(values: Sequence[float], most: int) -> tuple[int, int]:
    """The fewest rising courses that hold all values, up to one more than `most`, and how often any of them rose."""
    newest: list[float] = []
    rises = 0
    for value in values:
        # The course that is nearest below continues, which leaves the others for what is lower.
        place = bisect_right(newest, value)
        if place:
            rises += value > newest[place - 1]
            newest[place - 1] = value
        else:
            newest.insert(0, value)
            if len(newest) > most:
                break
    return len(newest), rises


def turns(moments: Mapping[Hashable, Iterable[float]]) -> int:
    """How often the next moment is another one's; what several have at the same moment is of none."""
    at: dict[float, Hashable] = {}
    for holder, times in moments.items():
        for moment in times:
            at[moment] = holder if at.get(moment, holder) == holder else None
    holders = [holder for _, holder in sorted(at.items(), key=itemgetter(0)) if holder is not None]
    return sum(map(ne, holders, holders[1:]))
