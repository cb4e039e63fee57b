"""Steps of one loop with something beside it and without, in turns in one run: how much slower, how many held up."""

from __future__ import annotations

import statistics
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
    """`slower_ratio` by the median, 0.001 for a thousandth; `held_up_ratio` is the share of steps held up beyond
    that share without, which is `held_up_anyway_ratio`. Neither is below zero: what is beside a loop does not make it
    faster.
    """

    count: int
    usual_seconds: float
    slower_ratio: float
    held_up_ratio: float
    held_up_anyway_ratio: float


def compared(beside: Steps, alone: Steps) -> Compared:
    """Set the steps with something beside them against those alone.

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
