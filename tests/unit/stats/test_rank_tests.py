"""Tests by ranks: known answers, all orders counted out, and false alarms at their nominal rate."""

import math
from itertools import combinations, permutations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.stats.rank_tests import (
    EXACT_TREND,
    discovery_ratios,
    median_interval,
    rank_sum_tail,
    rising,
    shift_interval,
    signed_rank_tail,
)
from tests.builders.series import seeded

few = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=7)


def ranks(values: list[float]) -> list[float]:
    """Ranks by their definition: those below, and half of those alike."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


@given(few)
def test_signed_ranks_are_counted_out(values: list[float]) -> None:
    """The tail is the share of all choices of signs whose positive ranks reach as high."""
    told = [value for value in values if value]
    sizes = ranks([abs(value) for value in told])
    reached = sum(rank for rank, value in zip(sizes, told, strict=True) if value > 0)
    sums = [
        sum(rank for rank, up in zip(sizes, signs, strict=True) if up) for signs in product((0, 1), repeat=len(told))
    ]
    assert pytest.approx(sum(total >= reached for total in sums) / len(sums)) == signed_rank_tail(values)


@given(few.filter(lambda values: len(values) <= 5), few.filter(lambda values: len(values) <= 5))
def test_rank_sums_are_counted_out(higher: list[float], lower: list[float]) -> None:
    """The tail is the share of all groups of that size whose ranks reach as high."""
    both = ranks([*higher, *lower])
    reached = sum(both[: len(higher)])
    sums = [sum(chosen) for chosen in combinations(both, len(higher))]
    assert pytest.approx(sum(total >= reached for total in sums) / len(sums)) == rank_sum_tail(higher, lower)


def test_six_that_all_rise_are_one_in_sixty_four() -> None:
    """The published table's lowest p-value of six figures; five cannot reach 2 %; missing figures are no evidence."""
    assert [1 / 64, 1 / 32, 1.0, 1.0] == [
        signed_rank_tail([5.0, 1.0, 2.0, 3.0, 9.0, 4.0]),
        signed_rank_tail([1.0, 2.0, 3.0, 4.0, 5.0]),
        signed_rank_tail([0.0, 0.0]),
        signed_rank_tail([]),
    ]


@pytest.mark.parametrize("count", [30, 31], ids=["counted out", "normal"])
def test_many_figures_meet_the_tail_that_shuffling_finds(count: int) -> None:
    """Beyond exact counting the normal distribution is used: both match 1,500 shuffles, with ties among the figures."""
    # Figures that lean a little upwards
    random = seeded(f"shuffles {count}")
    values = [float(round(random.gauss(2.0, 6.0))) for _ in range(count)]
    higher, lower = values[::2], values[1::2]
    sizes, both = ranks([abs(value) for value in values if value]), ranks([*higher, *lower])

    signed = summed = 0
    for _ in range(1500):
        signed += sum(size for size in sizes if random.random() < 0.5) >= sum(
            size for size, value in zip(sizes, [value for value in values if value], strict=True) if value > 0
        )
        summed += sum(random.sample(both, len(higher))) >= sum(both[: len(higher)])

    assert pytest.approx(signed / 1500, abs=0.03) == signed_rank_tail(values)
    assert pytest.approx(summed / 1500, abs=0.04) == rank_sum_tail(higher, lower)


@pytest.mark.parametrize("count", [8, 40])
def test_tails_are_what_they_say(count: int) -> None:
    """Of 400 draws without any difference about 5 % at most have a p-value below 5 %."""
    random = seeded(f"ranks {count}")

    def draw(size: int, random: Random = random) -> list[float]:
        return [random.gauss(0.0, 1.0) for _ in range(size)]

    signed = sum(signed_rank_tail(draw(count)) < 0.05 for _ in range(400))
    summed = sum(rank_sum_tail(draw(count // 2), draw(count - count // 2)) < 0.05 for _ in range(400))

    assert max(signed, summed) <= 34
    assert min(signed, summed) >= 4


def test_intervals_hold_the_truth() -> None:
    """The median's and the difference's bounds hold the truth in nine of ten draws or more."""
    random = seeded("intervals")

    of_median = of_shift = 0
    for _ in range(200):
        one = [random.gauss(3.0, 1.0) for _ in range(12)]
        other = [random.gauss(1.0, 1.0) for _ in range(9)]
        bounds, shift = median_interval(one, 0.9), shift_interval(one, other, 0.9)
        of_median += bounds.low <= 3.0 <= bounds.high
        of_shift += shift.low <= 2.0 <= shift.high

    assert 174 <= of_median
    assert 170 <= of_shift <= 195


def test_large_groups_are_bounded_too() -> None:
    """Five thousand figures have narrow bounds, whose middle the thinning does not move."""
    random = seeded("many")
    one = [random.gauss(3.0, 1.0) for _ in range(5000)]
    other = [random.gauss(1.0, 1.0) for _ in range(3000)]

    bounds, shift = median_interval(one, 0.9), shift_interval(one, other, 0.9)

    assert bounds.low < 3.0 < bounds.high < bounds.low + 0.1
    assert shift.low < 2.0 < shift.high < shift.low + 0.12
    assert pytest.approx(2.0, abs=0.06) == shift.estimate
    assert max(signed_rank_tail(one), rank_sum_tail(one, other)) < 1e-9


def test_too_few_figures_bound_nothing() -> None:
    """Four figures cannot bound a median at 90 %, and two against two no difference."""
    bounds, shift = median_interval([1.0, 2.0, 3.0, 4.0], 0.9), shift_interval([1.0, 2.0], [0.0, 0.0], 0.9)
    assert (-math.inf, 2.5, math.inf) == (bounds.low, bounds.estimate, bounds.high)
    assert (-math.inf, 1.5, math.inf) == (shift.low, shift.estimate, shift.high)
    five = median_interval([5.0, 1.0, 2.0, 3.0, 4.0], 0.9)
    assert (1.0, 3.0, 5.0) == (five.low, five.estimate, five.high)


def test_discoveries_by_the_published_example() -> None:
    """Benjamini and Hochberg's own fifteen tests: four are called at 5 %."""
    chances = [
        *(0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344),
        *(0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0),
    ]
    ratios = discovery_ratios(chances)
    assert 4 == sum(ratio <= 0.05 for ratio in ratios)
    assert pytest.approx(0.0095 * 15 / 4) == ratios[3]
    assert sorted(ratios) == list(ratios)
    assert () == discovery_ratios([])


def score(series: tuple[int, ...]) -> int:
    """Rising pairs less falling ones."""
    return sum((later > earlier) - (later < earlier) for earlier, later in combinations(series, 2))


@pytest.mark.parametrize(
    "series", [(1, 2, 3, 4, 5), (1, 2, 3, 5, 4), (2, 1, 4, 3, 5), (3, 1, 5, 2, 4), (5, 4, 3, 2, 1)]
)
def test_short_trend_is_counted_out(series: tuple[int, ...]) -> None:
    """The probability is the share of all 120 orders that rise as much."""
    orders = list(permutations(series))
    assert pytest.approx(sum(score(order) >= score(series) for order in orders) / len(orders)) == rising(series)


def test_kendall_s_table_is_met() -> None:
    """At 10 values a score of 27 has a probability of 0.0083 (Kendall 1975, table 1)."""
    # 9 inversions of 45 pairs
    series = (3, 2, 1, 4, 7, 6, 5, 10, 9, 8)
    assert 27 == score(series)
    assert pytest.approx(0.0083, abs=5e-5) == rising(series)


def test_ties_are_no_evidence() -> None:
    """What does not move does not rise, and a single step among ties is nearly nothing."""
    assert (1.0, True) == (rising([7.0] * 20), rising([0.0] * 10 + [1.0]) > 0.05)


def test_exact_and_normal_meet() -> None:
    """One value more than the exact test takes changes the answer by little."""
    # The same share of inversions on either side of the switch
    short = [float(place + 3 * (place % 2)) for place in range(EXACT_TREND)]
    assert 0.3 < rising([float(place + 3 * (place % 2)) for place in range(EXACT_TREND + 1)]) / rising(short) < 1.5


@pytest.mark.parametrize("count", [9, 19])
def test_false_alarms_of_trends_are_nominal(count: int) -> None:
    """Of 1,000 series without a trend some 10 are called at 1 %."""
    random = seeded(f"trends {count}")
    series = [[random.gauss(0.0, 1.0) for _ in range(count)] for _ in range(1000)]
    assert sum(rising(each) < 0.01 for each in series) <= 18


@given(few, few, st.integers(-100, 100))
def test_a_shift_of_everything_changes_nothing(one: list[float], other: list[float], shift: int) -> None:
    """Only the order counts."""
    assert rank_sum_tail(one, other) == rank_sum_tail([each + shift for each in one], [each + shift for each in other])
    assert rising(one) == rising([each + shift for each in one])
