"""Steps of one loop, alternating with a disturbance and without in one run: how much slower, how many delayed.

Also by time: whether the steps during a publication are longer than those around them. A long step is more likely to
contain any given moment, so the same is counted for moments without a publication.
"""

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HELD_UP_RATIO = 1.5
"""A step that takes half as long again as usual has been held up."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Durations in nanoseconds."""

    nanoseconds: tuple[int, ...]

    def held_up(self, usual_nanoseconds: float) -> float:
        """The share that took half as long again as usual."""
        limit = HELD_UP_RATIO * usual_nanoseconds
        return sum(each > limit for each in self.nanoseconds) / len(self.nanoseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """`slower_ratio` is by the median, 0.001 for a thousandth; `held_up_ratio` is the share of delayed steps in excess
    of the share without the disturbance, which is `held_up_anyway_ratio`. Neither is below zero: a disturbance does not
    make a loop faster.
    """

    count: int
    usual_seconds: float
    slower_ratio: float
    held_up_ratio: float
    held_up_anyway_ratio: float


def compared(beside: Steps, alone: Steps) -> Compared:
    """Compare the steps with a disturbance with those without.

    Raises:
        ValueError: there are none of one kind.

    """
    if not beside.nanoseconds or not alone.nanoseconds:
        raise ValueError("no steps to compare")
    usual = statistics.median(alone.nanoseconds)
    anyway = alone.held_up(usual)
    return Compared(
        count=len(beside.nanoseconds) + len(alone.nanoseconds),
        usual_seconds=usual / 1e9,
        slower_ratio=max(statistics.median(beside.nanoseconds) / usual - 1, 0.0),
        held_up_ratio=max(beside.held_up(usual) - anyway, 0.0),
        held_up_anyway_ratio=anyway,
    )


USUAL_RATIO = 0.999
"""A step longer than so many of those that nothing fell into is affected."""

NEIGHBOURS = 4
"""Steps before and after one that it is compared with."""

SETTLING = 3
"""The first steps of an interval, which process the prompt."""

SURE = 1.96
"""Standard deviations within which 95 of 100 are."""

SHIFTS_NANOSECONDS = tuple(number * 97_000_000 for number in range(1, 10))
"""From each publication to moments when there is none: agents publish once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One generation: when each step began, and from when to when each publication was made; in nanoseconds."""

    begun: Sequence[int]
    publications: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Of `steps` those that a publication fell into, how much longer these are than those around, and how many are
    `affected`: each beyond what is so at other moments, which is `by_chance` for the last.
    """

    steps: int
    touched: int
    affected: int
    by_chance: float
    longer_seconds: float
    longer_error_seconds: float

    @property
    def unaffected_ratio(self) -> float:
        """The share of all steps that are not affected by a publication."""
        return 1 - max(self.affected - self.by_chance, 0.0) / self.steps

    @property
    def least_unaffected_ratio(self) -> float:
        """The same, as low as it may be with so few counted: each count varies by its root, and none counted by one."""
        error = SURE * math.sqrt(max(self.affected, 1) + self.by_chance / len(SHIFTS_NANOSECONDS))
        return 1 - (max(self.affected - self.by_chance, 0.0) + error) / self.steps


def touched(stretches: Iterable[Stretch]) -> Touched:
    """Which steps publications fell into, and what became of them.

    Raises:
        ValueError: no publication fell into a step, or into all of them.

    """
    hit, chance, alone = _Hits(), _Hits(), list[int]()
    for stretch in stretches:
        begun = stretch.begun[SETTLING:]
        steps = [after - before for before, after in itertools.pairwise(begun)]
        fallen = _fallen_into(begun, stretch.publications)
        hit.add(steps, fallen, fallen)
        for shift in SHIFTS_NANOSECONDS:
            others = _fallen_into(begun, [(began + shift, ended + shift) for began, ended in stretch.publications])
            chance.add(steps, others, fallen)
        alone += [step for number, step in enumerate(steps) if number not in fallen]
    if not alone or len(hit.longer) < 2:
        raise ValueError("too few steps to compare")
    limit = sorted(alone)[min(int(USUAL_RATIO * len(alone)), len(alone) - 1)]
    return Touched(
        steps=len(alone) + len(hit.steps),
        touched=len(hit.steps),
        affected=sum(step > limit for step in hit.steps),
        # For as many moments as there were publications.
        by_chance=sum(step > limit for step in chance.steps) * len(hit.steps) / max(len(chance.steps), 1),
        longer_seconds=(statistics.fmean(hit.longer) - statistics.fmean(chance.longer or [0.0])) / 1e9,
        longer_error_seconds=math.hypot(_error(hit.longer), _error(chance.longer)) / 1e9,
    )


class _Hits:
    """Steps that something fell into, and what each is longer by than the median of those around it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.longer: list[float] = []

    def add(self, steps: Sequence[int], numbers: set[int], never: set[int]) -> None:
        """Add these of the steps; `never` are those that none may be compared with."""
        for number in sorted(numbers & set(range(len(steps)))):
            self.steps.append(steps[number])
            around = range(max(number - NEIGHBOURS, 0), min(number + NEIGHBOURS + 1, len(steps)))
            beside = [steps[other] for other in around if other != number and other not in never]
            if beside:
                self.longer.append(steps[number] - statistics.median(beside))


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _fallen_into(begun: Sequence[int], publications: Iterable[tuple[int, int]]) -> set[int]:
    """The numbers of the steps that have a publication, or a part of one, between their begin and the next."""
    found: set[int] = set()
    for began, ended in publications:
        first, last = bisect_left(begun, began) - 1, bisect_left(begun, ended) - 1
        found.update(range(max(first, 0), last + 1))
    return found
