"""Steps that only go up: their number, what they come with, and whether they continue."""

import pytest

from kvdiag import stats
from kvdiag.diagnosis.growth.step_growth import continues, p_steps, records
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from tests.builders.values import MIB

LIMITS = DEFAULT_LIMITS.growth
BINS = 30


def steps(*jumps: tuple[int, float]) -> stats.Levelled:
    """An hour of bins of two minutes, flat but for these jumps in MiB."""
    return stats.Levelled(values=(0.0,) * BINS, jumps=tuple((place, height * MIB) for place, height in jumps))


def p_of(levels: stats.Levelled, past: tuple[float, ...] = (), high_water: frozenset[int] = frozenset()) -> float:
    """The p-value of an hour's steps."""
    return p_steps(levels, past, high_water, 2, LIMITS)


def test_more_steps_within_the_hour_are_less_probable() -> None:
    """Two may be suspect, four are certain; of large ones three are."""
    small = [p_of(steps(*((place, 60.0) for place in range(4, 4 + 5 * count, 5)))) for count in (1, 2, 3, 4)]
    assert small == sorted(small, reverse=True)
    assert small[1] == pytest.approx(LIMITS.steps_p, rel=0.1)
    assert small[2] > LIMITS.certain_steps_p > small[3]
    assert LIMITS.certain_steps_p > p_of(steps((4, 200.0), (14, 200.0), (24, 200.0)))


def test_a_step_down_leaves_nothing_to_count() -> None:
    """A level that moves either way is no growth in steps."""
    assert p_of(steps((4, 60.0), (9, -60.0), (14, 60.0), (19, 60.0), (24, 60.0))) == 1.0


def test_the_past_says_how_often_the_level_moves() -> None:
    """Three steps after half a day without any are certain, and no news after as many each hour."""
    three = steps((4, 60.0), (14, 60.0), (24, 60.0))
    still = tuple(float(place % 2) * MIB for place in range(12 * BINS))
    moving = tuple(float(place // 10) * 60.0 * MIB + float(place % 2) * MIB for place in range(12 * BINS))
    assert p_of(three, still) < LIMITS.certain_steps_p < p_of(three) < LIMITS.steps_p < p_of(three, moving)


def test_high_water_marks_are_not_counted() -> None:
    """A step at which the load is the highest so far is the allocator's."""
    load = [1.0] * 20 + [2.0] * 20 + [3.0] * 20
    assert records(load, 0, 2, LIMITS) == {9, 10, 11, 19, 20, 21}
    assert records(load, 30, 2, LIMITS) == {4, 5, 6}
    assert records(None, 0, 2, LIMITS) == set()
    marks = steps((10, 200.0), (20, 200.0))
    assert p_of(marks, high_water=records(load, 0, 2, LIMITS)) == 1.0 > p_of(marks)


@pytest.mark.parametrize(
    ("jumps", "expected"),
    [
        (((4, 60.0), (14, 60.0), (24, 60.0)), True),
        (((4, 60.0), (24, 60.0)), False),
        (((4, 60.0), (14, -60.0), (24, 60.0)), False),
        (((4, 60.0), (14, 500.0), (24, 60.0)), False),
        (((2, 60.0), (4, 60.0), (6, 60.0)), False),
        (((2, 60.0), (4, 60.0), (24, 60.0)), False),
        (((4, 200.0), (14, 100.0), (24, 60.0)), False),
    ],
    ids=["even", "two", "down", "one of them", "ended", "rarer", "smaller"],
)
def test_steps_count_while_they_go_on(jumps: tuple[tuple[int, float], ...], expected: bool) -> None:
    """As many as count, all up, none most of the growth, and neither rarer nor smaller towards the end."""
    assert expected is continues(steps(*jumps), LIMITS)
