"""The banks on everything that a healthy server's memory does, and on leaks in the middle of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.banks import Series, watch
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import LEAKS, Trend
from tests.series import MB_PER_HOUR, MODELS, memory, report, seeded

DRAWS = 12
"""Series of each kind: enough to see a bar of one in four broken, few enough for every run of the tests."""

ROOM_BYTES = 20 * 2**30


def watched(
    name: str,
    seed: int,
    *,
    hours: float,
    leak_mb_per_hour: float = 0.0,
    onset: float = 0.0,
    shift_seconds: float = 0.0,
    idle: bool = False,
) -> tuple[Trend, ...]:
    """The trends of one drawn series, under its load unless `idle`."""
    times, sizes, load = memory(name, seed, hours=hours, leak_mb_per_hour=leak_mb_per_hour, onset=onset)
    series = Series(
        times_seconds=tuple(at + shift_seconds for at in times),
        sizes_bytes=tuple(sizes),
        idle=(idle,) * len(times),
        load=tuple(load),
    )
    return watch(series, DEFAULT_LIMITS).trends


@pytest.mark.parametrize("name", MODELS)
def test_healthy_memory_is_no_leak(name: str) -> None:
    """On 26 hours of each kind no bank is certain of a leak; a walk, or ramps without end, are suspect now and then."""
    # WHEN
    trends = [watched(name, seed, hours=26.0) for seed in range(DRAWS)]

    # THEN
    faults = sum(any(trend.certain for trend in each) for each in trends)
    suspects = sum(any(trend.shape in LEAKS for trend in each) for each in trends) - faults
    report(f"{name}, 26 h: {faults} faults and {suspects} suspects in {DRAWS}")
    assert {4} == {len(each) for each in trends}
    assert 0 == faults
    assert suspects <= {"random walk": 4, "ramps": 2}.get(name, 0)


def test_warmup_is_no_leak_at_any_hour() -> None:
    """A server watched from its start on is not called while it warms up, whatever the load does meanwhile."""
    # WHEN six servers are judged at each hour of their first seven
    trends = [
        trend for seed in range(6) for hour in range(1, 8) for trend in watched("warm-up", 700 + seed, hours=hour)
    ]

    # THEN
    called = [trend for trend in trends if trend.shape in LEAKS]
    report(f"warm-up, at each of seven hours: {len(called)} of {len(trends)} called")
    assert [] == called


@pytest.mark.parametrize("name", MODELS)
def test_leak_of_a_day_is_seen_in_everything(name: str) -> None:
    """Fifty MB/h over 28 hours are called in three of four series of every kind; half of them among level steps."""
    # WHEN
    trends = [watched(name, seed, hours=28.0, leak_mb_per_hour=50.0) for seed in range(8)]

    # THEN
    found = sum(any(trend.shape in LEAKS for trend in each) for each in trends)
    report(f"{name}, 50 MB/h over 28 h: {found} of 8 called")
    assert found >= (4 if name == "level steps" else 6)


@pytest.mark.parametrize("name", MODELS)
def test_fast_leak_is_seen_within_an_hour_and_a_half(name: str) -> None:
    """Five hundred MB/h are called by the bank of an hour within an hour and a half, in all that memory does."""
    # WHEN judged 80, 85 and 90 minutes after they began
    called = [
        [watched(name, seed, hours=4.0 + later / 60.0, leak_mb_per_hour=500.0, onset=4.0)[0] for later in (80, 85, 90)]
        for seed in range(8)
    ]

    # THEN noise as slow as a third of the hour hides some
    found = sum(any(trend.shape in LEAKS for trend in each) for each in called)
    report(f"{name}, 500 MB/h for 1.5 h: {found} of 8 called")
    assert found >= (5 if name == "slow noise" else 7)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"random walk", "level steps"}])
def test_slow_leak_is_seen_within_ten_hours(name: str) -> None:
    """Fifty MB/h that began ten hours ago are called by some evaluation, each half hour, since then."""
    # WHEN
    called = 0
    for seed in range(6):
        trends = (
            trend
            for later in (6.5, 7.5, 8.5, 9.5, 10.0)
            for trend in watched(name, seed, hours=8.0 + later, leak_mb_per_hour=50.0, onset=8.0)
        )
        called += any(trend.shape in LEAKS for trend in trends)

    # THEN
    report(f"{name}, 50 MB/h for 10 h: {called} of 6 called")
    assert called >= (4 if name in {"slow noise", "ramps"} else 6)


def test_time_to_exhaustion_holds_the_truth() -> None:
    """Of leaks in noise the time that is really left lies in the interval mostly, and the middle near to it."""
    # WHEN
    ratios, inside = [], 0
    for seed in range(12):
        trend = watched("fast noise", seed, hours=2.0, leak_mb_per_hour=1000.0)[0]
        left = trend.exhaustion_seconds(ROOM_BYTES, DEFAULT_LIMITS)
        truth = ROOM_BYTES / (1000.0 * MB_PER_HOUR)
        assert left is not None
        ratios.append(left.middle / truth)
        inside += left.low <= truth <= left.high

    # THEN
    report(f"time to exhaustion over the truth: {min(ratios):.2f} to {max(ratios):.2f}, inside {inside} of 12")
    assert 0.7 <= min(ratios) <= max(ratios) <= 1.65
    assert inside >= 8


def test_time_shift_changes_nothing() -> None:
    """A series a million seconds later has the same trends."""
    assert watched("level steps", 3, hours=8.0) == watched("level steps", 3, hours=8.0, shift_seconds=1_000_000.0)


def test_larger_base_changes_nothing() -> None:
    """What was there before does not matter, to the last bit of the figures."""
    # GIVEN
    times, sizes, load = memory("fast noise", 1, hours=2.0, leak_mb_per_hour=500.0)
    series = Series(times_seconds=tuple(times), sizes_bytes=tuple(sizes), idle=(False,) * len(times), load=tuple(load))
    larger = replace(series, sizes_bytes=tuple(size + 2**35 for size in sizes))

    # WHEN
    (one,), (other,) = watch(series, DEFAULT_LIMITS).trends, watch(larger, DEFAULT_LIMITS).trends

    # THEN
    assert one.shape == other.shape
    assert pytest.approx(one.bytes_per_second, rel=1e-6) == other.bytes_per_second
    assert pytest.approx(one.p_rising, rel=1e-3) == other.p_rising


def test_idle_floors_do_without_the_load() -> None:
    """Where most blocks have idle readings they alone are judged."""
    idle, busy = watched("pool", 1, hours=1.5, idle=True), watched("pool", 1, hours=1.5)
    assert ([True], [False]) == ([trend.idle_only for trend in idle], [trend.idle_only for trend in busy])


@pytest.mark.parametrize(
    ("hours", "banks"),
    [
        (0.9, []),
        (1.0, ["fast"]),
        (3.0, ["fast", "mid"]),
        (8.1, ["fast", "mid", "half"]),
        (23.9, ["fast", "mid", "half"]),
        (24.1, ["fast", "mid", "half", "slow"]),
    ],
)
def test_banks_need_their_windows(hours: float, banks: list[str]) -> None:
    """A bank answers once its window is filled, and not before."""
    assert banks == [trend.bank.name for trend in watched("pool", 1, hours=hours)]


def test_holes_are_no_evidence() -> None:
    """A window of which more than a quarter has no readings is not judged; an empty series is no trend at all."""
    # GIVEN half an hour without readings
    times, sizes, _ = memory("pool", 1, hours=1.5)
    kept = [place for place, at in enumerate(times) if not 1_000.0 + 1_800.0 < at < 1_000.0 + 3_600.0]
    series = Series(
        times_seconds=tuple(times[place] for place in kept),
        sizes_bytes=tuple(sizes[place] for place in kept),
        idle=(False,) * len(kept),
    )

    # THEN
    assert () == watch(series, DEFAULT_LIMITS).trends
    empty = watch(Series(times_seconds=(), sizes_bytes=(), idle=()), DEFAULT_LIMITS)
    assert (0.0, (), None) == (empty.seconds, empty.trends, empty.decides)


@pytest.mark.parametrize("seed", range(4))
def test_late_and_lost_scrapes_are_no_holes(seed: int) -> None:
    """Read each 60 s, up to 12 s late and one in a hundred lost, a leak of an hour is seen all the same."""
    # GIVEN
    random = seeded(f"scrapes {seed}")
    times, sizes, load = memory("pool", seed, hours=2.0, leak_mb_per_hour=1000.0)
    kept = [place for place in range(len(times)) if random.random() > 0.01]
    late = sorted(times[place] + random.uniform(0.0, 12.0) for place in kept)
    series = Series(
        times_seconds=tuple(late),
        sizes_bytes=tuple(sizes[place] for place in kept),
        idle=(False,) * len(kept),
        load=tuple(load[place] for place in kept),
    )

    # WHEN
    (fast,) = watch(series, DEFAULT_LIMITS).trends

    # THEN
    assert ("fast", "grows", True) == (fast.bank.name, fast.shape, fast.certain)


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


def test_nothing_that_falls_is_exhausted() -> None:
    """A flat series leaves its room for ever."""
    flat = watched("pool", 1, hours=1.5)[0]
    assert flat.exhaustion_seconds(ROOM_BYTES, DEFAULT_LIMITS) is None
    assert math.isinf(
        (replace(flat, bytes_per_second=1.0, error_bytes_per_second=1.0).exhaustion_seconds(1, DEFAULT_LIMITS)).high  # type: ignore[union-attr]
    )
