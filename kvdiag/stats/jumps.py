"""Events in a series: the one step that explains it best, and its jumps, which are counted and not extrapolated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean as mean
from statistics import median

from kvdiag.stats.series import FEWEST_FOR_CHANGE, deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The one step that explains a series best: it comes before `index`, and moves the mean by `step`.

    `step_share` and `line_share` are the shares (0..1) of the variance that the step and a straight line leave
    unexplained: a lower `step_share` is an event, a lower `line_share` a trend.
    """

    index: int
    step: float
    step_share: float
    line_share: float


def change(values: Sequence[float]) -> Change | None:
    """The one level step that explains a series best, beside how well a straight line does; `None` where it is flat."""
    count = len(values)
    middle = mean(values) if values else 0.0
    centred = [value - middle for value in values]
    whole = sum(value * value for value in centred)
    if count < FEWEST_FOR_CHANGE or whole <= (1e-12 * max(abs(value) for value in values)) ** 2 * count:
        return None
    sums = list(accumulate(centred))
    # What a step before `index` explains: n a b / (a + b) times the squared difference of means, here in sums.
    explained = [sums[index - 1] ** 2 * count / (index * (count - index)) for index in range(1, count)]
    index = max(range(1, count), key=lambda place: explained[place - 1])
    step = -sums[index - 1] * count / (index * (count - index))
    offset = (count - 1) / 2.0
    product = sum((place - offset) * value for place, value in enumerate(centred))
    line = product * product / (count * (count * count - 1) / 12.0)
    return Change(
        index=index,
        step=step,
        step_share=max(1.0 - explained[index - 1] / whole, 0.0),
        line_share=max(1.0 - line / whole, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Levelled:
    """A series without its jumps, and how many of them went up and down."""

    values: tuple[float, ...]
    ups: int
    downs: int


def without_jumps(
    values: Sequence[float], deviations: float, least: float, beside: Sequence[Sequence[float]] = ()
) -> Levelled:
    """The series without its jumps: steps of more than so many deviations of its steps, and more than `least`.

    What follows `beside` step by step (the load) is no jump. Fitted on the steps, since a level that changes once
    would pull a fit on the levels with it.
    """
    rises = [later - earlier for earlier, later in pairwise(values)]
    if not rises:
        return Levelled(values=tuple(values), ups=0, downs=0)
    beside_rises = [[later - earlier for earlier, later in pairwise(series)] for series in beside]
    # The jumps of a first fit are left out of the second.
    first = _jumps(_beside_steps(rises, beside_rises, [True] * len(rises)), deviations, least)
    jumps = _jumps(_beside_steps(rises, beside_rises, [jump == 0.0 for jump in first]), deviations, least)
    smooth = [rise - jump for rise, jump in zip(rises, jumps, strict=True)]
    # What takes several steps is one jump.
    return Levelled(
        values=tuple(accumulate(smooth, initial=values[0])),
        ups=sum(jump > 0.0 >= before for before, jump in pairwise([0.0, *jumps])),
        downs=sum(jump < 0.0 and before >= 0.0 for before, jump in pairwise([0.0, *jumps])),
    )


def _jumps(rises: Sequence[float], deviations: float, least: float) -> list[float]:
    """By how much each step is beyond the usual one, 0 where it is not."""
    usual = median(rises)
    bound = max(deviations * deviation(rises), least)
    return [rise - usual if abs(rise - usual) > bound else 0.0 for rise in rises]


def _beside_steps(rises: list[float], beside: Sequence[Sequence[float]], keep: Sequence[bool]) -> list[float]:
    """The steps less what those of `beside` explain of the kept ones."""
    for column in beside:
        # One at a time, each on what the ones before left: enough to find jumps by, and never singular.
        weight = sum(each * each for each, kept in zip(column, keep, strict=True) if kept)
        if weight > 0.0:
            product = sum(each * rise for each, rise, kept in zip(column, rises, keep, strict=True) if kept)
            rises = [rise - product / weight * each for rise, each in zip(rises, column, strict=True)]
    return rises


def sensitivities(
    values: Sequence[float], columns: Sequence[Sequence[float]], least_correlation: float
) -> tuple[float, ...]:
    """How much a series changes with each of several others, by differences; 0 for one that it does not follow.

    Levels that both rise and level off fit one another whatever they are; differences carry no trend. One is taken out
    after the other, the one that correlates best first. Enough is `least_correlation`, and twice the standard error of
    a correlation that is none.
    """
    rises = [later - earlier for earlier, later in pairwise(values)]
    others = [[later - earlier for earlier, later in pairwise(column)] for column in columns]
    least = max(least_correlation, 2.0 / math.sqrt(max(len(rises), 1)))
    found = [0.0] * len(others)
    for place in sorted(range(len(others)), key=lambda one: -_correlation(*_moments(rises, others[one]))):
        product, whole, weight = _moments(rises, others[place])
        if _correlation(product, whole, weight) >= least:
            found[place] = product / weight
            rises = [rise - found[place] * each for rise, each in zip(rises, others[place], strict=True)]
    return tuple(found)


def _correlation(product: float, whole: float, weight: float) -> float:
    return product / math.sqrt(whole * weight) if whole > 0.0 and weight > 0.0 else 0.0


def _moments(rises: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The covariance of two series and their variances, each times their number."""
    if not rises:
        return 0.0, 0.0, 0.0
    middle, other = mean(rises), mean(others)
    return (
        sum((rise - middle) * (each - other) for rise, each in zip(rises, others, strict=True)),
        sum((rise - middle) ** 2 for rise in rises),
        sum((each - other) ** 2 for each in others),
    )
