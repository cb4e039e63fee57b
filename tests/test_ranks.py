"""Tests by ranks: known answers, all orders counted out, and false alarms at their nominal rate."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.ranks import EXACT_PAIRS, EXACT_TREND, larger, rising
from tests.series import seeded

values = st.lists(st.integers(-5, 5), min_size=1, max_size=12)


def score(series: tuple[int, ...]) -> int:
    """Rising pairs less falling ones."""
    return sum((later > earlier) - (later < earlier) for earlier, later in combinations(series, 2))


@pytest.mark.parametrize(
    "series", [(1, 2, 3, 4, 5), (1, 2, 3, 5, 4), (2, 1, 4, 3, 5), (3, 1, 5, 2, 4), (5, 4, 3, 2, 1)]
)
def test_short_trend_is_counted_out(series: tuple[int, ...]) -> None:
    """The probability is the share of all 120 orders that rise as much."""
    # GIVEN
    orders = list(permutations(series))
    expected = sum(score(order) >= score(series) for order in orders) / len(orders)

    # WHEN
    actual = rising(series)

    # THEN
    assert pytest.approx(expected) == actual


def test_kendall_s_table_is_met() -> None:
    """At 10 values a score of 27 has a probability of 0.0083 (Kendall 1975, table 1)."""
    # GIVEN 9 inversions of 45 pairs
    series = (3, 2, 1, 4, 7, 6, 5, 10, 9, 8)
    assert 27 == score(series)

    # THEN
    assert pytest.approx(0.0083, abs=5e-5) == rising(series)


def test_ties_are_no_evidence() -> None:
    """What does not move does not rise, and a single step among ties is nearly nothing."""
    assert (1.0, True) == (rising([7.0] * 20), rising([0.0] * 10 + [1.0]) > 0.05)


def test_exact_and_normal_meet() -> None:
    """One value more than the exact test takes changes the answer by little."""
    # GIVEN the same share of inversions on either side of the switch
    short = [float(place + 3 * (place % 2)) for place in range(EXACT_TREND)]
    long = [float(place + 3 * (place % 2)) for place in range(EXACT_TREND + 1)]

    # THEN
    assert 0.3 < rising(long) / rising(short) < 1.5


@pytest.mark.parametrize(
    ("sample", "other", "expected"),
    [
        ((4, 5, 6), (1, 2, 3), 1 / 20),
        ((1, 2, 3), (4, 5, 6), 1.0),
        ((1, 1, 1), (1, 1, 1), 1.0),
        ((1, 1, 2), (1, 1, 1), 1 / 2),
        ((), (1,), 1.0),
    ],
)
def test_small_samples_are_counted_out(sample: tuple[int, ...], other: tuple[int, ...], expected: float) -> None:
    """Choices of ranks, ties by their midranks."""
    assert pytest.approx(expected) == larger(sample, other)


@settings(deadline=None)
@given(values, values)
def test_larger_counts_every_choice(sample: list[int], other: list[int]) -> None:
    """The probability of the rank sum is that of choosing as many of all values at random."""
    # GIVEN
    both = [*sample[:4], *other[:4]]
    ranks = [sum(one < value for one in both) + (sum(one == value for one in both) + 1) / 2 for value in both]
    size = len(sample[:4])
    sums = [sum(choice) for choice in combinations(ranks, size)]
    expected = sum(total >= sum(ranks[:size]) for total in sums) / len(sums)

    # THEN
    assert pytest.approx(expected) == larger(sample[:4], other[:4])


@settings(deadline=None)
@given(values, values, st.integers(-100, 100))
def test_a_shift_of_everything_changes_nothing(sample: list[int], other: list[int], shift: int) -> None:
    """Only the order counts."""
    assert larger(sample, other) == larger([one + shift for one in sample], [one + shift for one in other])
    assert rising(sample) == rising([one + shift for one in sample])


@pytest.mark.parametrize("count", [9, 19])
def test_false_alarms_are_nominal(count: int) -> None:
    """Of 1,000 series without a trend some 10 are called at 1 %, of as many equal samples some 50 at 5 %."""
    # GIVEN
    random = seeded(f"ranks {count}")
    series = [[random.gauss(0.0, 1.0) for _ in range(2 * count)] for _ in range(1000)]

    # WHEN
    trends = sum(rising(each[:count]) < 0.01 for each in series)
    samples = sum(larger(each[:count], each[count:]) < 0.05 for each in series)

    # THEN
    assert trends <= 18
    assert 30 <= samples <= 70


def test_both_ways_to_compare_samples_agree() -> None:
    """Where samples grow beyond the exact test's bound, the approximation gives the same within a tenth."""
    # GIVEN 11 and 10 values, counted out, and one more of each, approximated
    sample = [float(2 * place + 5) for place in range(11)]
    other = [float(2 * place) for place in range(10)]
    assert len(sample) * len(other) <= EXACT_PAIRS

    # THEN
    exact, normal = larger(sample, other), larger([*sample, 27.0], [*other, 20.0])
    assert 0.5 < normal / exact < 1.5
