"""Steps beside something against steps alone."""

from __future__ import annotations

import pytest

from tests.quality.bench.steps import SETTLING, Compared, Steps, Stretch, compared, touched

ALONE = Steps((1_000_000,) * 999 + (5_000_000,))


def test_what_is_no_slower_costs_nothing() -> None:
    """Noise that both have is nobody's fault."""
    assert Compared(
        count=2000, usual_seconds=0.001, slower_ratio=0.0, held_up_ratio=0.0, held_up_anyway_ratio=0.001
    ) == compared(ALONE, ALONE)


def test_slower_steps_are_told_by_the_median() -> None:
    """Every step a hundredth slower is 0.01, though none is held up."""
    actual = compared(Steps((1_010_000,) * 100), ALONE)
    assert (0.01, 0.0) == (round(actual.slower_ratio, 9), actual.held_up_ratio)


def test_held_up_steps_are_those_beyond_what_there_is_anyway() -> None:
    """Three of a thousand take long where one does without: two thousandths are held up."""
    actual = compared(Steps((1_000_000,) * 997 + (2_000_000,) * 3), ALONE)
    assert (0.0, 0.002) == (actual.slower_ratio, round(actual.held_up_ratio, 9))


@pytest.mark.parametrize(("beside", "alone"), [((), (1,)), ((1,), ())])
def test_nothing_cannot_be_compared(beside: tuple[int, ...], alone: tuple[int, ...]) -> None:
    """Steps of one kind alone say nothing."""
    with pytest.raises(ValueError, match="no steps"):
        compared(Steps(beside), Steps(alone))


def begun(durations: list[int]) -> list[int]:
    """When steps of these durations began, after those that do not count."""
    return [0] * SETTLING + [sum(durations[:number]) for number in range(len(durations) + 1)]


def test_steps_that_a_publication_falls_into_are_compared_with_those_around() -> None:
    """Two of a thousand are touched: one is longer than any other, one is not, whatever the level drifts to."""
    durations = [1000] * 500 + [3000] * 500
    durations[100], durations[700] = 1500, 9000
    at = [sum(durations[:100]) + 10, sum(durations[:700]) + 10]
    stretch = Stretch(begun=begun(durations), publications=[(start, start + 50) for start in at])
    actual = touched([stretch])
    assert (1000, 2, 1) == (actual.steps, actual.touched, actual.affected)
    assert (500 + 6000) / 2 / 1e9 == pytest.approx(actual.longer_seconds)
    assert 0.999 == actual.unaffected_ratio
    assert 0.996 < actual.least_unaffected_ratio < 0.9985


def test_long_step_that_anything_would_fall_into_is_nobodys_fault() -> None:
    """A machine that stands still for a second has a publication in it, and so it would have at any other moment."""
    # GIVEN a step of two seconds among those of ten milliseconds
    durations = [10_000_000] * 300
    durations[150] = 2_000_000_000
    publications = [(second * 10**9 + 5, second * 10**9 + 6) for second in (2, 3, 4)]
    actual = touched([Stretch(begun=begun(durations), publications=publications)])
    assert (300, 2, 1) == (actual.steps, actual.touched, actual.affected)
    assert 0.8 < actual.by_chance <= 1.0
    assert actual.unaffected_ratio > 0.999


def test_publication_that_lasts_touches_every_step_it_lasts_for() -> None:
    """One from within the second step to within the fourth touches three; those before and after are its measure."""
    stretch = Stretch(begun=begun([100] * 20), publications=[(150, 350)])
    actual = touched([stretch])
    assert (20, 3, 0, 0.0) == (actual.steps, actual.touched, actual.affected, actual.longer_seconds)


@pytest.mark.parametrize("publications", [(), ((0, 10_000),)], ids=["none", "all"])
def test_without_both_kinds_nothing_is_said(publications: tuple[tuple[int, int], ...]) -> None:
    """Steps that nothing fell into are the measure of the others."""
    with pytest.raises(ValueError, match="too few"):
        touched([Stretch(begun=begun([100] * 20), publications=publications)])
