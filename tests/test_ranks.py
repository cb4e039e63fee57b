from __future__ import annotations

import math
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.ranks import discovery_ratios, median_interval, rank_sum_tail, shift_interval, signed_rank_tail
from tests.series import seeded

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
    """The published table's lowest chance of six figures; five cannot reach 2 %; nothing told is no evidence."""
    assert [1 / 64, 1 / 32, 1.0, 1.0] == [
        signed_rank_tail([5.0, 1.0, 2.0, 3.0, 9.0, 4.0]),
        signed_rank_tail([1.0, 2.0, 3.0, 4.0, 5.0]),
        signed_rank_tail([0.0, 0.0]),
        signed_rank_tail([]),
    ]


@pytest.mark.parametrize("count", [30, 31], ids=["counted out", "normal"])
def test_many_figures_meet_the_tail_that_shuffling_finds(count: int) -> None:
    """Where the counting ends the normal distribution goes on: both give what 1,500 shuffles give, ties among them."""
    # GIVEN figures that lean a little upwards
    random = seeded(f"shuffles {count}")
    values = [float(round(random.gauss(2.0, 6.0))) for _ in range(count)]
    higher, lower = values[::2], values[1::2]
    sizes, both = ranks([abs(value) for value in values if value]), ranks([*higher, *lower])

    # WHEN
    signed = summed = 0
    for _ in range(1500):
        signed += sum(size for size in sizes if random.random() < 0.5) >= sum(
            size for size, value in zip(sizes, [value for value in values if value], strict=True) if value > 0
        )
        summed += sum(random.sample(both, len(higher))) >= sum(both[: len(higher)])

    # THEN
    assert pytest.approx(signed / 1500, abs=0.03) == signed_rank_tail(values)
    assert pytest.approx(summed / 1500, abs=0.04) == rank_sum_tail(higher, lower)


@pytest.mark.parametrize("count", [8, 40])
def test_tails_are_what_they_say(count: int) -> None:
    """Of 400 draws without any difference no more are below 5 % than chance allows."""
    # GIVEN
    random = seeded(f"ranks {count}")

    def draw(size: int, random: Random = random) -> list[float]:
        return [random.gauss(0.0, 1.0) for _ in range(size)]

    # WHEN
    signed = sum(signed_rank_tail(draw(count)) < 0.05 for _ in range(400))
    summed = sum(rank_sum_tail(draw(count // 2), draw(count - count // 2)) < 0.05 for _ in range(400))

    # THEN 20 are expected, 34 are three deviations more
    assert max(signed, summed) <= 34
    assert min(signed, summed) >= 4


def test_intervals_hold_the_truth() -> None:
    """The median's and the difference's bounds hold the truth in nine of ten draws or more."""
    # GIVEN
    random = seeded("intervals")

    # WHEN
    of_median = of_shift = 0
    for _ in range(200):
        one = [random.gauss(3.0, 1.0) for _ in range(12)]
        other = [random.gauss(1.0, 1.0) for _ in range(9)]
        middle, shift = median_interval(one, 0.9), shift_interval(one, other, 0.9)
        of_median += middle.low <= 3.0 <= middle.high
        of_shift += shift.low <= 2.0 <= shift.high

    # THEN
    assert 174 <= of_median
    assert 170 <= of_shift <= 195


def test_too_few_figures_bound_nothing() -> None:
    """Four figures cannot bound a median at 90 %, and two against two no difference."""
    middle, shift = median_interval([1.0, 2.0, 3.0, 4.0], 0.9), shift_interval([1.0, 2.0], [0.0, 0.0], 0.9)
    assert (-math.inf, 2.5, math.inf) == (middle.low, middle.middle, middle.high)
    assert (-math.inf, 1.5, math.inf) == (shift.low, shift.middle, shift.high)
    five = median_interval([5.0, 1.0, 2.0, 3.0, 4.0], 0.9)
    assert (1.0, 3.0, 5.0) == (five.low, five.middle, five.high)


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
