"""The banks on growth of a known shape: with the work, to its end, in steps, again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.banks import Series, watch
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import LEAKS, Trend
from tests.builders.series import seeded


def test_what_grows_with_the_work_is_a_leak_though_it_rests_with_it() -> None:
    """Two GiB an hour while requests run and nothing while none do: straight by the work, and not by the time."""
    # GIVEN traffic in two of each four quarters of an hour
    random = seeded("work")
    times, sizes, load, size = [], [], [], 2.0**34
    for minute in range(180):
        busy = 0.0 if (minute // 15) % 4 in {1, 2} else 0.5 + 0.3 * random.random()
        size += busy * 2.0**31 / 60.0
        times.append(60.0 * minute)
        sizes.append(round(size))
        load.append(busy)
    series = Series(times_seconds=tuple(times), sizes_bytes=tuple(sizes), idle=(False,) * len(times), load=tuple(load))

    # WHEN
    with_work = watch(series, DEFAULT_LIMITS).decides
    without = watch(replace(series, load=None), DEFAULT_LIMITS).trends[0]

    # THEN
    assert with_work is not None
    assert ("grows", True) == (with_work.shape, with_work.certain)
    assert without.shape not in LEAKS


def test_beginning_that_levels_off_is_never_certain() -> None:
    """Twenty GiB that come with a time constant of an hour are no fault at any half hour of their first eight."""
    # GIVEN
    times = tuple(60.0 * minute for minute in range(8 * 60))
    sizes = tuple(round(20 * 2**30 * (1.0 - math.exp(-minute / 60.0))) for minute in range(8 * 60))

    # WHEN
    trends = [
        trend
        for end in range(60, 8 * 60, 30)
        for trend in watch(
            Series(times_seconds=times[:end], sizes_bytes=sizes[:end], idle=(False,) * end), DEFAULT_LIMITS
        ).trends
    ]

    # THEN
    assert [] == [trend for trend in trends if trend.certain]


def test_five_jumps_and_no_fall_are_neither_a_leak_nor_events() -> None:
    """What jumped up five times and never down may be chance once in 32: it stays open."""
    # GIVEN
    times = tuple(60.0 * minute for minute in range(60))
    sizes = tuple(2**34 + 500 * 2**20 * sum(minute >= at for at in (8, 21, 30, 44, 53)) for minute in range(60))

    # WHEN
    (fast,) = watch(Series(times_seconds=times, sizes_bytes=sizes, idle=(False,) * 60), DEFAULT_LIMITS).trends

    # THEN
    assert ("unsteady", 5, 0) == (fast.shape, fast.jumps_up, fast.jumps_down)


def test_staircase_is_a_leak_in_steps() -> None:
    """Twelve steps up and none down in a day are no chance, though no slope is left between them."""
    # GIVEN a hundred MiB every two hours
    times = tuple(60.0 * minute for minute in range(28 * 60))
    sizes = tuple(2**34 + 100 * 2**20 * (minute // 120) for minute in range(28 * 60))

    # WHEN
    trends = watch(Series(times_seconds=times, sizes_bytes=sizes, idle=(False,) * len(times)), DEFAULT_LIMITS).trends

    # THEN
    slow = trends[-1]
    assert ("slow", "steps", 0) == (slow.bank.name, slow.shape, slow.jumps_down)
    assert slow.jumps_up >= 10


def stairs(minutes: Sequence[int], *, hours: int, load: Sequence[float] | None, size: int = 100) -> Series:
    """Steps of so many MiB at those minutes, beside a load."""
    times = tuple(60.0 * minute for minute in range(hours * 60))
    sizes = tuple(2**34 + size * 2**20 * sum(minute >= at for at in minutes) for minute in range(hours * 60))
    told = None if load is None else tuple(load)
    return Series(times_seconds=times, sizes_bytes=sizes, idle=(False,) * len(times), load=told)


EVERY_TWO_HOURS = tuple(range(60, 28 * 60, 118))
UNSTEADY_LOAD = tuple(0.5 + 0.4 * math.sin(minute / 40.0) for minute in range(28 * 60))


@pytest.mark.parametrize(
    ("minutes", "load", "expected"),
    [
        (EVERY_TWO_HOURS, UNSTEADY_LOAD, ("steps", True)),
        (EVERY_TWO_HOURS, None, ("steps", False)),
        (EVERY_TWO_HOURS, [minute // 118 / 15.0 for minute in range(58, 28 * 60 + 58)], ("flat", False)),
        (tuple(range(250, 960, 55)), UNSTEADY_LOAD, ("ended", False)),
        (EVERY_TWO_HOURS[4:12], UNSTEADY_LOAD, ("steps", False)),
    ],
    ids=["steps go on", "load not told", "each step a record of the load", "no more of them", "too few"],
)
def test_staircase_is_certain_where_nothing_else_climbs_so(
    minutes: Sequence[int], load: Sequence[float] | None, expected: tuple[str, bool]
) -> None:
    """Ten steps and more, none down, as many late as early, and not those of an allocator that follows its load."""
    # WHEN
    slow = watch(stairs(minutes, hours=28, load=load), DEFAULT_LIMITS).trends[-1]

    # THEN
    assert expected == (slow.shape, slow.certain)


def test_steps_that_become_smaller_are_not_certain() -> None:
    """As many steps as before, each a little smaller than the one before: it comes to its end."""
    # GIVEN
    times = tuple(60.0 * minute for minute in range(28 * 60))
    gone = [sum(minute >= at for at in EVERY_TWO_HOURS) for minute in range(28 * 60)]
    sizes = tuple(round(2**34 + 4 * 2**30 * (1.0 - 0.75**count)) for count in gone)
    series = Series(times_seconds=times, sizes_bytes=sizes, idle=(False,) * len(times), load=UNSTEADY_LOAD)

    # THEN
    assert not watch(series, DEFAULT_LIMITS).trends[-1].certain


def test_growth_that_slows_with_the_work_is_certain() -> None:
    """Of a leak with each request less comes in the evening: by the time it bends, by the work it is straight."""
    # GIVEN three GiB an hour at full load, which falls to a half over the hours
    random = seeded("evening")
    times, sizes, load, size = [], [], [], 2.0**34
    for minute in range(300):
        busy = 1.0 - 0.5 * minute / 300.0 + 0.05 * random.random()
        size += busy * 3.0 * 2**30 / 60.0
        times.append(60.0 * minute)
        sizes.append(round(size + random.gauss(0.0, 2.0**20)))
        load.append(busy)
    series = Series(times_seconds=tuple(times), sizes_bytes=tuple(sizes), idle=(False,) * len(times), load=tuple(load))

    # WHEN
    mid, alone = (watch(one, DEFAULT_LIMITS).trends[1] for one in (series, replace(series, load=None)))

    # THEN
    assert ("grows", True) == (mid.shape, mid.certain)
    assert not alone.certain


def test_growth_that_came_back_twice_before_is_no_certain_leak() -> None:
    """Garbage that is collected each twelve hours rises like a leak for nine: the day shows that it comes back."""
    # GIVEN 900 MB in twelve hours, the last fall nine hours ago
    random = seeded("collected")
    times = tuple(60.0 * minute for minute in range(28 * 60))
    rises = (((minute / 60.0 + 5.0) % 12.0) / 12.0 for minute in range(28 * 60))
    sizes = tuple(round(6e9 + 900e6 * rise + random.gauss(0.0, 5e6)) for rise in rises)

    def decides(first: int) -> Trend | None:
        some = Series(times_seconds=times[first:], sizes_bytes=sizes[first:], idle=(True,) * (len(times) - first))
        return watch(some, DEFAULT_LIMITS).decides

    # WHEN
    whole, since_the_fall = decides(0), decides(19 * 60 + 5)

    # THEN without the day before, nothing tells it from a leak
    assert whole is not None
    assert since_the_fall is not None
    assert ("grows", False) == (whole.shape, whole.certain)
    assert ("grows", True) == (since_the_fall.shape, since_the_fall.certain)


def test_longer_bank_is_certain_of_what_a_shorter_one_leaves_open() -> None:
    """A leak beneath garbage of two hours: the last hour alone is the garbage's, half a day proves the leak."""
    # GIVEN 900 MB of garbage collected each 2.3 hours, and 120 MB/h
    random = seeded("beneath garbage")
    times = tuple(60.0 * minute for minute in range(1480))
    above = (900e6 * ((minute / 60.0) % 2.3) / 2.3 + 120e6 * minute / 60.0 for minute in range(1480))
    sizes = tuple(round(6e9 + size + random.gauss(0.0, 15e6)) for size in above)

    # WHEN
    seen = watch(Series(times_seconds=times, sizes_bytes=sizes, idle=(True,) * len(times)), DEFAULT_LIMITS)

    # THEN
    fast, decides = seen.trends[0], seen.decides
    assert decides is not None
    assert ("grows", False) == (fast.shape, fast.certain)
    assert decides.certain
    assert decides.bank.window_minutes > fast.bank.window_minutes
    assert pytest.approx(120e6, rel=0.2) == decides.bytes_per_second * 3600.0
