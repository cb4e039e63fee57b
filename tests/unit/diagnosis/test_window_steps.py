"""One window of blocks that jump: which steps are a leak's, which are the load's, and which are no steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvdiag.diagnosis.window import Shape
from tests.unit.diagnosis.windows import COUNT, MB, judge, noisy, stairs


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
