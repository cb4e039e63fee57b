"""The banks on all that a healthy server's memory does, on leaks in the middle of it, and on what was not read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvdiag.diagnosis.banks import Series, watch
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import LEAKS, Trend
from tests.builders.series import MB_PER_HOUR, MODELS, memory, report, seeded

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


def test_nothing_that_falls_is_exhausted() -> None:
    """A flat series leaves its room for ever."""
    flat = watched("pool", 1, hours=1.5)[0]
    assert flat.exhaustion_seconds(ROOM_BYTES, DEFAULT_LIMITS) is None
    assert math.isinf(
        (replace(flat, bytes_per_second=1.0, error_bytes_per_second=1.0).exhaustion_seconds(1, DEFAULT_LIMITS)).high  # type: ignore[union-attr]
    )
