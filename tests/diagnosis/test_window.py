"""One window of blocks whose form is known: a line, a stair, a level, what comes to its end. Sizes are in MB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest

from kvdiag.diagnosis.bank import Bank
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import HOUR_SECONDS, Blocks, Shape, Trend, certain, judged_window, lasting
from kvdiag.stats import Interval
from tests.builders.values import MIB

MB = 10**6
FAST, MID, _, _ = DEFAULT_LIMITS.banks
COUNT = 60
NOISE = (1.0, -1.0, -1.0, 1.0)
"""Without a trend, and without a bend."""


def noisy(values: Sequence[float], deviation: float = 1.0) -> list[float]:
    """The values in MB as bytes, with noise around them."""
    return [(1000.0 + value + deviation * NOISE[step % 4]) * MB for step, value in enumerate(values)]


def rising(*rates: float) -> list[float]:
    """Pieces of equal length, each rising by so much in a block."""
    length = COUNT // len(rates)
    return list(accumulate((rate for rate in rates for _ in range(length)), initial=0.0))[:COUNT]


def stairs(places: Sequence[int], height: float = 60.0) -> list[float]:
    """A level that changes by `height` before each of these blocks."""
    return [sum(height * (step >= abs(place)) * (1 if place > 0 else -1) for place in places) for step in range(COUNT)]


def judge(
    middles: Sequence[float],
    bank: Bank = FAST,
    *,
    lows: Sequence[float] | None = None,
    load: Sequence[float] | None = None,
    beside: bool = False,
    minutes: int = 1,
) -> Trend:
    """A window of such blocks, with the load where it is told, and beside it where it may explain the bytes."""
    blocks = Blocks(
        middles=middles,
        lows=middles if lows is None else lows,
        beside=[load, list(accumulate(load, max))] if beside and load is not None else [],
        work=None if load is None else list(accumulate(load)),
        highest=None if load is None else list(accumulate(load, max)),
        minutes=minutes,
        idle_only=not beside,
    )
    found = judged_window(blocks, bank, DEFAULT_LIMITS)
    assert found is not None
    return found


def trend(**changes: object) -> Trend:
    """Growth by a byte a second, that nothing else explains."""
    usual = Trend(
        bank=FAST,
        shape="grows",
        idle_only=True,
        bytes_per_second=1.0,
        error_bytes_per_second=0.0,
        later_bytes_per_second=1.0,
        gain_bytes=1.0,
        p_rising=0.0,
        p_drift=0.0,
        p_steady=0.5,
        wanders=9.0,
        hours=1.0,
        jumps_up=0,
        jumps_down=0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


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
    ("places", "shape"),
    [
        ((10, 24, 38, 52), "event"),  # 1 in 16 by chance
        ((6, 17, 28, 39, 50), "unsteady"),  # 1 in 32
        ((6, 15, 24, 33, 42, 51), "unsteady"),  # 1 in 64
        ((4, 12, 20, 28, 36, 44, 52), "steps"),  # 1 in 128
        ((4, 12, 20, -24, 28, 36, 44, 52), "unsteady"),  # 7 of 8 and more: 9 in 256
        ((4, 8, 12, 16, 20, 24, 28), "ended"),  # none of seven in the later half
        ((4, 8, 12, 16, 20, 24, 52), "steps"),  # one of seven: 8 in 128
        ((4, 8, 12, 16, 20, 24, 30), "steps"),  # in the first block of that half
    ],
)
def test_steps_are_a_leak_where_chance_would_not_make_so_many(places: Sequence[int], shape: Shape) -> None:
    """Seven up and none down; fewer are open or events, and early ones alone have ended."""
    # GIVEN a level of which one part is not told by a slope
    actual = judge(noisy(stairs(places)))

    # THEN
    assert shape == actual.shape
    ups = sum(place > 0 for place in places)
    assert (ups, len(places) - ups) == (actual.jumps_up, actual.jumps_down)


def test_rate_of_steps_is_that_of_the_floor() -> None:
    """Seven steps of 60 MB: the floor of the first third has one of them, that of the last five, 40 blocks later."""
    # GIVEN steps before blocks 4, 12, … 52: the lowest of blocks 0 to 19 is 0, of 40 to 59 five steps
    actual = judge(noisy(stairs((4, 12, 20, 28, 36, 44, 52))))

    # THEN
    assert pytest.approx(300.0 * MB, abs=3.0 * MB) == actual.gain_bytes
    assert pytest.approx(actual.gain_bytes / 40 / 60) == actual.bytes_per_second == actual.later_bytes_per_second
    # Nobody says that it was not the load that did it.
    assert 1.0 == actual.p_drift
    # At least four of seven come in the earlier half: 64 in 128.
    assert pytest.approx(0.5) == actual.p_steady


@pytest.mark.parametrize(
    ("highest", "p_drift"),
    [
        ((), 1.0 / 128.0),
        ((4, 12, 20), 1.0 / 128.0),  # three of seven came with a load that was higher than ever
        ((4, 12, 20, 28), 1.0),  # four: an allocator that keeps the most it ever needed
        ((3, 11, 19, 27), 1.0),  # one block before
        ((2, 10, 18, 26), 1.0 / 128.0),  # two blocks before
        ((5, 13, 21, 29), 1.0 / 128.0),  # after it
    ],
)
def test_steps_that_come_with_the_highest_load_are_no_leak(highest: Sequence[int], p_drift: float) -> None:
    """Where most steps come as the load is higher than ever, they are not the leak's."""
    # GIVEN a load that is higher than ever at these blocks and low otherwise
    load = [1.0 + highest.index(step) if step in highest else 0.5 for step in range(COUNT)]

    # WHEN
    actual = judge(noisy(stairs((4, 12, 20, 28, 36, 44, 52))), load=load)

    # THEN
    assert "steps" == actual.shape
    assert pytest.approx(p_drift) == actual.p_drift


@pytest.mark.parametrize(("height", "ups"), [(25.2, 12), (25.1, 0)])
def test_jumps_are_more_than_allocators_round_to(height: float, ups: int) -> None:
    """From 24 MiB on, which are 25.17 MB."""
    assert ups == judge(noisy(stairs(range(3, 51, 4), height), 0.0)).jumps_up


@pytest.mark.parametrize(("height", "ups"), [(170.0, 0), (190.0, 1)])
def test_jumps_stand_out_of_the_noise(height: float, ups: int) -> None:
    """By six deviations of the series' own steps: within noise of 10 MB either way, which steps by 20 and by none."""
    assert ups == judge(noisy(stairs([30], height), 10.0)).jumps_up


def test_half_of_the_steps_may_not_come_with_the_load() -> None:
    """Of eight four are too many, though as many do not."""
    places = (4, 11, 18, 25, 32, 39, 46, 53)
    for count, p_drift in ((3, 1.0 / 256.0), (4, 1.0)):
        load = [1.0 + places.index(step) if step in places[:count] else 0.5 for step in range(COUNT)]
        assert pytest.approx(p_drift) == judge(noisy(stairs(places)), load=load).p_drift


@pytest.mark.parametrize(("height", "p_drift"), [(31.0, 1.0 / 256.0), (30.0, 1.0 / 256.0), (29.0, 1.0)])
def test_steps_have_to_go_on_as_high(height: float, p_drift: float) -> None:
    """Four of 60 MB before the middle, and four after it of half as much at least."""
    # GIVEN
    early, late = stairs((3, 11, 18, 25), 60.0), stairs((33, 39, 46, 52), height)
    values = [one + other for one, other in zip(early, late, strict=True)]

    # WHEN
    actual = judge(noisy(values, 0.0), load=[0.5] * COUNT)

    # THEN
    assert "steps" == actual.shape
    assert pytest.approx(p_drift) == actual.p_drift


def test_garbage_that_is_collected_again_and_again_does_not_climb() -> None:
    """Four falls and no such rise are its own; two could be anything that was freed once, and leave what climbs."""
    # GIVEN 240 MB of garbage in 12 blocks, and in 20
    four = judge(noisy([20.0 * (step % 12) for step in range(COUNT)]))
    three = judge(noisy([20.0 * (step % 15) for step in range(COUNT)]))
    two = judge(noisy([20.0 * (step % 20) for step in range(COUNT)]))

    # THEN
    assert (("flat", 0, 4), ("flat", 0, 2)) == (
        (four.shape, four.jumps_up, four.jumps_down),
        (two.shape, two.jumps_up, two.jumps_down),
    )
    assert abs(four.bytes_per_second) < 2.0 * MB / 60.0
    assert (("flat", 3), True) == ((three.shape, three.jumps_down), abs(three.bytes_per_second) < 2.0 * MB / 60.0)
    assert pytest.approx(20.0 * MB / 60.0, rel=0.1) == two.bytes_per_second


def test_what_the_load_explains_is_no_growth() -> None:
    """Bytes that follow the load step by step are level beside it, and rise without it."""
    # GIVEN a load that rises, with steps of its own
    load = [step / 60.0 + 0.2 * ((step * 7) % 5) for step in range(COUNT)]
    values = noisy([600.0 * each for each in load])

    # THEN
    alone, beside = judge(values), judge(values, load=load, beside=True)
    assert ("flat", False) == (beside.shape, beside.idle_only)
    assert abs(beside.bytes_per_second) < 1.0 * MB / 60.0
    assert pytest.approx(10.0 * MB / 60.0, rel=0.2) == alone.bytes_per_second


def test_end_that_the_highest_load_explains_is_an_end() -> None:
    """What levels off as the highest load so far does has ended, though beside that load it looks straight."""
    # GIVEN a load that rises ever more slowly to its height, 400 MB with it, and 6 MB a block besides
    load = [10.0 * (1.0 - math.exp(-step / 12.0)) for step in range(COUNT)]
    values = noisy([40.0 * each + 6.0 * step for step, each in enumerate(load)], 0.2)

    # THEN
    assert "ended" == judge(values, load=load, beside=True).shape


def test_growth_beside_a_load_is_called() -> None:
    """Beside 200 MB that come and go with the load 10 MB a block are growth."""
    # GIVEN
    load = [0.2 * ((step * 7) % 5) for step in range(COUNT)]
    values = noisy([200.0 * each + 10.0 * step for step, each in enumerate(load)])

    # WHEN
    actual = judge(values, load=load, beside=True)

    # THEN
    assert "grows" == actual.shape
    assert pytest.approx(10.0 * MB / 60.0, rel=0.03) == actual.bytes_per_second


def test_growth_with_the_work_done_is_a_line_by_that_clock() -> None:
    """Two bursts of work, and memory that grows with nothing else: unsteady by the time, growth by the work."""
    # GIVEN 400 requests a block in blocks 10 to 19 and 40 to 49, 20 otherwise
    load = [20.0 if step % 30 < 10 or step % 30 >= 20 else 400.0 for step in range(COUNT)]
    values = noisy([0.05 * each for each in accumulate(load)])

    # WHEN
    by_time, by_work = judge(values), judge(values, load=load)

    # THEN all of it is 440 MB in an hour
    assert "grows" != by_time.shape
    assert "grows" == by_work.shape
    assert pytest.approx(440.0 * MB / HOUR_SECONDS, rel=0.05) == by_work.bytes_per_second
    assert certain(by_work, DEFAULT_LIMITS)


def test_growth_that_ended_has_ended_by_any_clock() -> None:
    """What comes to its end with the work is called by its end, and not by the work."""
    # GIVEN 12 MB a block for 30 blocks and 5 for 30, a request for each
    values = rising(12.0, 5.0)
    assert "ended" == judge(noisy(values)).shape
    assert "ended" == judge(noisy(values), load=[12.0] * 30 + [5.0] * 30).shape


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
