"""Events in a series: the one step that explains it best, its jumps, and what follows other series."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean as mean
from statistics import median
from typing import NamedTuple

from kvdiag.stats.series import FEWEST_FOR_CHANGE, deviation


def is_step(values: Sequence[float]) -> bool:
    """Whether one level step explains more of a series than a straight line; not if it is flat or too short."""
    count = len(values)
    average = mean(values) if values else 0.0
    centred = [value - average for value in values]
    whole = sum(value * value for value in centred)
    if count < FEWEST_FOR_CHANGE or whole <= (1e-12 * max(abs(value) for value in values)) ** 2 * count:
        return False
    sums = list(accumulate(centred))
    # What a step before `index` explains: n a b / (a + b) times the squared difference of means, here in sums.
    step = max(sums[index - 1] ** 2 * count / (index * (count - index)) for index in range(1, count))
    offset = (count - 1) / 2.0
    product = sum((place - offset) * value for place, value in enumerate(centred))
    return step > product * product / (count * (count * count - 1) / 12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levelled:
    """A series without its jumps, and these: the place of the first value after each, and its height."""

    values: tuple[float, ...]
    jumps: tuple[tuple[int, float], ...]

    @property
    def ups(self) -> int:
        """How many of them went up."""
        return sum(height > 0.0 for _, height in self.jumps)

    @property
    def downs(self) -> int:
        """How many of them went down."""
        return sum(height < 0.0 for _, height in self.jumps)


def without_jumps(values: Sequence[float], deviations: float, least: float) -> Levelled:
    """The series without its jumps: steps of more than so many deviations of its steps, and more than `least`."""
    rises = [later - earlier for earlier, later in pairwise(values)]
    if not rises:
        return Levelled(values=tuple(values), jumps=())
    usual, bound = median(rises), max(deviations * deviation(rises), least)
    jumps = [rise - usual if abs(rise - usual) > bound else 0.0 for rise in rises]
    smooth = [rise - jump for rise, jump in zip(rises, jumps, strict=True)]
    found = list[tuple[int, float]]()
    for place, (before, jump) in enumerate(pairwise([0.0, *jumps]), 1):
        # Consecutive steps in one direction are one jump.
        if before * jump > 0.0:
            found[-1] = place, found[-1][1] + jump
        elif jump:
            found.append((place, jump))
    return Levelled(values=tuple(accumulate(smooth, initial=values[0])), jumps=tuple(found))


def sensitivities(
    values: Sequence[float], columns: Sequence[Sequence[float]], least_correlation: float
) -> tuple[float, ...]:
    """How much a series changes with each of several others, by differences; 0 for one that it does not follow.

    Any two levels that rise and level off correlate; differences carry no trend. The others are removed one after the
    other, the one that correlates best first, if the correlation is at least `least_correlation` and twice the standard
    error of no correlation.
    """
    rises = [later - earlier for earlier, later in pairwise(values)]
    if not any(rises):
        return (0.0,) * len(columns)
    others = [[later - earlier for earlier, later in pairwise(column)] for column in columns]
    least = max(least_correlation, 2.0 / math.sqrt(len(rises)))
    found = [0.0] * len(others)
    own, centred = _centred(rises), [_centred(each) for each in others]
    for place in sorted(range(len(others)), key=lambda one: -_correlation(own, centred[one])):
        if _correlation(own, centred[place]) >= least:
            found[place] = _product(own, centred[place]) / centred[place].squares
            rises = [rise - found[place] * each for rise, each in zip(rises, others[place], strict=True)]
            own = _centred(rises)
    return tuple(found)


class _Centred(NamedTuple):
    """Values less their mean, and the sum of their squares."""

    values: list[float]
    squares: float


def _centred(values: Sequence[float]) -> _Centred:
    average = mean(values)
    centred = [value - average for value in values]
    return _Centred(centred, sum([value**2 for value in centred]))


def _product(one: _Centred, other: _Centred) -> float:
    product: float = sum(map(mul, one.values, other.values))
    return product


def _correlation(one: _Centred, other: _Centred) -> float:
    scale = math.sqrt(one.squares * other.squares)
    return _product(one, other) / scale if one.squares > 0.0 and other.squares > 0.0 else 0.0
