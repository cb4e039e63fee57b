"""One window of blocks whose form is known: a line, a level, what comes to its end, and what its trend says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

import pytest

from kvdiag.diagnosis.bank import Bank
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import HOUR_SECONDS, Blocks, Shape, certain, judged_window, lasting
from kvdiag.stats import Interval
from tests.builders.values import MIB
from tests.unit.diagnosis.windows import COUNT, FAST, MB, MID, judge, noisy, rising, stairs, trend


@pytest.mark.parametrize(
    ("shape", "p_steady", "p_drift", "wanders", "lasts", "sure"),
    [
        ("grows", 0.05, 0.0029, 0.0, True, True),
        ("grows", 0.049, 0.0029, 0.0, True, False),  # it may come to an end
        ("grows", 0.5, 0.003, 3.9, False, False),  # it may wander by its own steps,
        ("grows", 0.5, 0.003, 4.0, True, True),  # but not by what is known of healthy servers
        ("grows", 0.5, 0.199, 4.0, True, True),
        ("grows", 0.5, 0.2, 9.0, False, False),  # one part of the window is all of it
        ("steps", 0.05, 0.00099, 0.0, True, True),
        ("steps", 0.049, 0.00099, 0.0, True, False),
        ("steps", 0.5, 0.001, 9.0, False, False),
    ],
)
def test_growth_is_certain_where_it_neither_wanders_nor_ends(
    shape: Shape, p_steady: float, p_drift: float, wanders: float, *, lasts: bool, sure: bool
) -> None:
    """Both have to be excluded; steps by their number alone."""
    found = trend(shape=shape, p_steady=p_steady, p_drift=p_drift, wanders=wanders)
    assert (lasts, sure) == (lasting(found, DEFAULT_LIMITS), certain(found, DEFAULT_LIMITS))


def test_room_lasts_by_the_faster_half() -> None:
    """60 bytes at 2 a second are 30 s, with an error of a quarter 24 to 40; at the later half's 3 no more than 20."""
    even = trend(bytes_per_second=2.0, later_bytes_per_second=1.0, error_bytes_per_second=0.25)
    assert Interval(low=24.0, middle=30.0, high=40.0) == even.exhaustion_seconds(60.0, DEFAULT_LIMITS)
    faster = trend(bytes_per_second=1.0, later_bytes_per_second=3.0, error_bytes_per_second=0.25)
    assert Interval(low=20.0, middle=30.0, high=40.0) == faster.exhaustion_seconds(60.0, DEFAULT_LIMITS)
    none = trend(bytes_per_second=0.0, later_bytes_per_second=0.0)
    assert none.exhaustion_seconds(60.0, DEFAULT_LIMITS) is None


def test_visible_growth_is_that_of_the_bank_of_its_hours_or_of_the_noise() -> None:
    """300 MB/h on the bank of an hour, 2.9 errors where that is more; of 150 MB in 5.9 or 2.9 h what that makes."""
    assert 300 * MB / HOUR_SECONDS == trend(error_bytes_per_second=1.0).visible_bytes_per_second
    assert 2.9 * MB == trend(error_bytes_per_second=1.0 * MB).visible_bytes_per_second
    mid = {one.name: one for one in DEFAULT_LIMITS.banks}["mid"]
    for hours, expected in ((6.0, 25.42), (3.0, 51.72)):
        found = trend(bank=mid, hours=hours, error_bytes_per_second=1.0).visible_bytes_per_second
        assert expected == round(found * HOUR_SECONDS / MB, 2)


def test_a_line_grows() -> None:
    """10 MB a minute are 600 MB/h; the lowest readings of the last third lie 40 blocks above those of the first."""
    # WHEN
    actual = judge(noisy(rising(10.0)))

    # THEN
    assert ("grows", 1.0, True, FAST) == (actual.shape, actual.hours, actual.idle_only, actual.bank)
    assert pytest.approx(10.0 * MB / 60.0, rel=0.01) == actual.bytes_per_second
    assert pytest.approx(10.0 * MB / 60.0, rel=0.02) == actual.later_bytes_per_second
    assert pytest.approx(400.0 * MB, abs=20.0 * MB) == actual.gain_bytes
    assert actual.p_rising < 0.001
    assert actual.p_drift < 0.001
    assert actual.p_steady > 0.05
    assert (0, 0) == (actual.jumps_up, actual.jumps_down)
    assert actual.error_bytes_per_second < 0.01 * actual.bytes_per_second
    # 60 MiB wander in an hour, sqrt(2/3) of that between thirds that are 40 min apart.
    assert pytest.approx(actual.gain_bytes / (60 * MIB * math.sqrt(2.0 / 3.0))) == actual.wanders
    assert not actual.certain


def test_edges_of_a_line_are_exact() -> None:
    """From 300 MB/h on the bank of an hour, and with a later half at half the rate, growth is growth."""
    assert ("grows", "grows") == (judge(noisy(rising(5.0), 0.0)).shape, judge(noisy(rising(12.0, 6.0), 0.0)).shape)
    assert 400.0 * MB == judge(noisy(rising(10.0), 0.0)).gain_bytes


def test_growth_that_bends_is_told_by_its_chance_to_be_steady() -> None:
    """Near 0 where it slows, near 1 where it becomes faster, and what falls has not wandered up."""
    slows, speeds = judge(noisy(rising(12.0, 6.6))), judge(noisy(rising(6.6, 12.0)))
    assert ("grows", "grows") == (slows.shape, speeds.shape)
    assert slows.p_steady < 0.05
    assert speeds.p_steady > 0.95
    assert 0.0 == judge(noisy(rising(-10.0))).wanders


@pytest.mark.parametrize(("jump", "shape"), [(600.0, "ended"), (200.0, "grows")])
def test_growth_behind_a_jump_has_to_be_a_part_of_all_that_came(jump: float, shape: Shape) -> None:
    """Loaded, and done: 6 MB a block after 600 at once are little, after 200 they are not.

    The lowest of the thirds are 0, 20 blocks' growth and the jump, and 20 blocks' more: 120 of 720 is less than a
    quarter, 120 of 320 is more.
    """
    values = [6.0 * step + (jump if step >= 10 else 0.0) for step in range(COUNT)]
    assert shape == judge(noisy(values)).shape


def test_longer_blocks_are_a_longer_window() -> None:
    """The same 10 MB in each of sixty blocks of 6 minutes: 100 MB/h over 6 hours."""
    # WHEN
    actual = judge(noisy(rising(10.0)), MID, minutes=6)

    # THEN
    assert ("grows", 6.0) == (actual.shape, actual.hours)
    assert pytest.approx(10.0 * MB / 360.0, rel=0.01) == actual.bytes_per_second
    assert pytest.approx(judge(noisy(rising(10.0))).wanders / math.sqrt(6.0)) == actual.wanders


@pytest.mark.parametrize(
    ("values", "bank", "shape"),
    [
        (rising(0.0), FAST, "flat"),
        (rising(-10.0), FAST, "flat"),
        (rising(2.4), FAST, "flat"),  # 144 MB in all
        (rising(5.2), FAST, "grows"),  # 312 MB/h
        (rising(4.8), FAST, "unsteady"),  # 288 MB/h: too slow for this bank, too much to call it flat
        (rising(12.0, 12.0, 6.6, 6.6), FAST, "grows"),
        (rising(12.0, 12.0, 5.0, 5.0), FAST, "ended"),
        (rising(5.0, 5.0, 12.0, 12.0), FAST, "grows"),  # ever faster is no end
        ([0.0] * 30 + [400.0] * 30, FAST, "event"),
        (stairs([30]), FAST, "flat"),
        ([0.0] * 22 + [24.0 * step for step in range(16)] + [360.0] * 22, FAST, "event"),  # too slow for a jump
    ],
)
def test_every_form_is_told(values: Sequence[float], bank: Bank, shape: Shape) -> None:
    """A line from the bank's rate on, a rise that goes on, one that ends, a level."""
    assert shape == judge(noisy(values), bank).shape


@pytest.mark.parametrize(
    ("rates", "shape"),
    [
        ((0.0, 0.0, 0.0, 30.0), "flat"),  # what began in the last quarter the floor of the last third has not seen
        ((10.0, 10.0, 10.0, 10.0), "grows"),
        ((10.0, 10.0, 10.0, 6.0), "grows"),
    ],
)
def test_every_quarter_has_its_part(rates: Sequence[float], shape: Shape) -> None:
    """A last quarter at less than the rate of the others is growth all the same; one quarter alone is none."""
    assert shape == judge(noisy(rising(*rates), 0.1)).shape


def test_too_few_blocks_tell_nothing() -> None:
    """Six are the fewest that a slope can be told of."""
    blocks = Blocks(
        middles=[float(MB)] * 5, lows=[float(MB)] * 5, beside=[], work=None, highest=None, minutes=1, idle_only=True
    )
    assert judged_window(blocks, FAST, DEFAULT_LIMITS) is None


def test_lows_that_do_not_rise_are_no_leak() -> None:
    """Medians that climb over a floor that stays are garbage or load; the floor's half has to come along."""
    # GIVEN 600 MB/h: two thirds of an hour's claim are 400 MB, of which the floor must bring a half
    middles = noisy(rising(10.0))

    # THEN
    shapes = [judge(middles, lows=noisy(rising(rate))).shape for rate in (0.0, 2.4, 2.7, 4.9, 5.2)]
    assert ["flat", "flat", "unsteady", "unsteady", "grows"] == shapes


@pytest.mark.parametrize(("rate", "shape"), [(2.49, "flat"), (2.5, "unsteady"), (4.99, "unsteady"), (5.0, "grows")])
def test_floor_that_brings_a_quarter_or_a_half_of_the_claim(rate: float, shape: Shape) -> None:
    """Of the 10 MB in each block that the medians claim; the share itself is enough."""
    # GIVEN no noise, so that the shares are exact
    actual = judge(noisy(rising(10.0), 0.0), lows=noisy(rising(rate), 0.0))

    # THEN
    assert shape == actual.shape


@pytest.mark.parametrize(
    ("seed", "p_drift", "wanders", "shape"),
    [
        (1468, 0.101, 2.47, "unsteady"),
        (1710, 0.068, 2.63, "unsteady"),
        (2904, 0.030, 2.92, "grows"),  # drifts by its own steps
        (559, 0.086, 3.91, "grows"),  # beyond what healthy servers wander
    ],
)
def test_a_walk_that_climbs_in_every_quarter_may_only_wander(
    seed: int, p_drift: float, wanders: float, shape: Shape
) -> None:
    """Growth is what 5 % of walks drift at most, or 20 % where three deviations of a healthy server are passed."""
    # GIVEN steps by chance, 6 MB on the mean and often down
    draw = Random(seed)  # noqa: S311  numbers for a series
    steps = accumulate(round(draw.gauss(6, 22)) for _ in range(COUNT))

    # WHEN
    actual = judge([(1000 + step) * MB for step in steps])

    # THEN
    assert (shape, p_drift, wanders) == (actual.shape, round(actual.p_drift, 3), round(actual.wanders, 2))
