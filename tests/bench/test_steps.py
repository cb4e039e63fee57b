"""Steps beside something against steps alone."""

from __future__ import annotations

import pytest

from tests.bench.steps import Compared, Steps, compared

ALONE = Steps((1_000_000,) * 999 + (5_000_000,))


def test_what_is_no_slower_costs_nothing() -> None:
    """Noise that both have is nobody's fault."""
    assert Compared(
        count=2000, usual_seconds=0.001, slower_ratio=0.0, held_up_ratio=0.0, held_up_anyway_ratio=0.001
    ) == compared(ALONE, ALONE)


def test_slower_steps_are_told_by_the_median() -> None:
    """Every step a hundredth slower is 0.01, though none is held up."""
    # WHEN
    actual = compared(Steps((1_010_000,) * 100), ALONE)

    # THEN
    assert (0.01, 0.0) == (round(actual.slower_ratio, 9), actual.held_up_ratio)


def test_held_up_steps_are_those_beyond_what_there_is_anyway() -> None:
    """Three of a thousand take long where one does without: two thousandths are held up."""
    # WHEN
    actual = compared(Steps((1_000_000,) * 997 + (2_000_000,) * 3), ALONE)

    # THEN
    assert (0.0, 0.002) == (actual.slower_ratio, round(actual.held_up_ratio, 9))


@pytest.mark.parametrize(("beside", "alone"), [((), (1,)), ((1,), ())])
def test_nothing_cannot_be_compared(beside: tuple[int, ...], alone: tuple[int, ...]) -> None:
    """Steps of one kind alone say nothing."""
    with pytest.raises(ValueError, match="no steps"):
        compared(Steps(beside), Steps(alone))
