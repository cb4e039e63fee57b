"""A bank's evaluations in a row, minute by minute: what agrees, what is missing, which bank decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.banks import Series, Watched, filled, watch
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import Trend
from tests.unit.diagnosis.windows import trend

MB = 10**6
FAST, MID, HALF, SLOW = DEFAULT_LIMITS.banks
NOISE = (1.0, -1.0, -1.0, 1.0)


def series(
    megabytes: Callable[[float], float],
    minutes: int,
    *,
    tick: float = 60.0,
    idle: bool = True,
    noise: float = 1.0,
) -> Series:
    """So many MB at each minute of so many, read up to the last minute's end."""
    times = [tick * step for step in range(int(minutes * 60 / tick))]
    sizes = [
        round((5000.0 + megabytes(seconds / 60.0) + noise * NOISE[step % 4]) * MB) for step, seconds in enumerate(times)
    ]
    return Series(times_seconds=tuple(times), sizes_bytes=tuple(sizes), idle=(idle,) * len(times))


@pytest.mark.parametrize(
    ("blocks", "ratio", "whole"),
    [
        ([], 0.75, None),
        ([None, None], 0.0, None),
        ([1.0, None, 3.0, 4.0], 0.75, [1.0, 2.0, 3.0, 4.0]),
        ([1.0, None, 3.0, 4.0], 0.76, None),
        ([None, 2.0, None, None, 8.0, None], 0.1, [2.0, 2.0, 4.0, 6.0, 8.0, 8.0]),
        ([5.0], 1.0, [5.0]),
    ],
)
def test_missing_blocks_lie_between_their_neighbours(
    blocks: Sequence[float | None], ratio: float, whole: list[float] | None
) -> None:
    """By straight line, at the ends as the nearest; not where too many are missing."""
    assert whole == filled(blocks, ratio)


def test_shortest_bank_that_is_certain_decides() -> None:
    """Else the shortest that grows, else the longest."""
    flat, growing, sure, steps = trend(shape="flat"), trend(), trend(certain=True), trend(shape="steps")

    def decides(*trends: Trend) -> Trend | None:
        return Watched(seconds=0.0, trends=trends).decides

    assert sure == decides(flat, growing, sure, flat)
    assert growing == decides(flat, growing, steps, flat)
    assert steps == decides(flat, steps, growing)
    assert flat == decides(trend(shape="ended"), flat)
    assert decides() is None


def shapes(watched: Watched) -> list[tuple[str, str, bool]]:
    """Each bank's name, form and certainty."""
    return [(one.bank.name, one.shape, one.certain) for one in watched.trends]


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        (59, []),
        (60, [("fast", "grows", False)]),
        (79, [("fast", "grows", False)]),
        (80, [("fast", "grows", True)]),
    ],
)
def test_growth_is_certain_when_three_evaluations_agree(minutes: int, expected: list[tuple[str, str, bool]]) -> None:
    """Ten minutes apart, each of a whole hour: from 80 minutes on."""
    assert expected == shapes(watch(series(lambda minute: 12.0 * minute, minutes), DEFAULT_LIMITS))


@pytest.mark.parametrize(("begins", "expected"), [(40, "unsteady"), (25, "grows")])
def test_growth_counts_when_two_evaluations_agree(begins: int, expected: str) -> None:
    """What the evaluation ten minutes before did not see is not steady yet."""
    # GIVEN a level that begins to rise by 20 MB a minute
    seen = watch(series(lambda minute: 20.0 * max(minute - begins, 0.0), 80), DEFAULT_LIMITS)

    # THEN
    assert [("fast", expected, False)] == shapes(seen)


def test_readings_are_watched_from_first_to_last() -> None:
    """How long they are, in seconds; an empty series has no length."""
    assert 59 * 60.0 == watch(series(lambda minute: 0.0, 60), DEFAULT_LIMITS).seconds
    assert Watched(seconds=0.0, trends=()) == watch(
        Series(times_seconds=(), sizes_bytes=(), idle=()), DEFAULT_LIMITS, served_since_seconds=0.0
    )


@pytest.mark.parametrize(
    ("served", "minutes", "expected"),
    [
        (0.0, 26, True),
        (5 * 60.0, 26, True),
        (5 * 60.0 + 1.0, 26, False),  # what loads a model answers no request
        (None, 26, False),
        (0.0, 21, True),
        (0.0, 20, False),  # 19 minutes lie between the first reading and the last
    ],
)
def test_a_burst_is_seen_where_the_engines_answered_all_the_while(
    served: float | None, minutes: int, *, expected: bool
) -> None:
    """Six GB an hour over the last 20 minutes."""
    # GIVEN
    seen = watch(series(lambda minute: 100.0 * minute, minutes), DEFAULT_LIMITS, served)

    # THEN
    assert expected == (seen.burst is not None)


def test_slower_growth_is_no_burst() -> None:
    """Three GB an hour are not enough; nor is what does not grow."""
    assert watch(series(lambda minute: 50.0 * minute, 40), DEFAULT_LIMITS, 0.0).burst is None
    assert watch(series(lambda minute: 0.0, 40), DEFAULT_LIMITS, 0.0).burst is None


@pytest.mark.parametrize(("before", "at_record"), [(1.0, True), (2.0, True), (9000.0, False)])
def test_a_record_is_above_everything_before_the_burst(before: float, *, at_record: bool) -> None:
    """What has been higher before its 20 minutes comes back; without anything before it nothing is told."""
    # GIVEN 60 minutes, the fifth of which held so much
    seen = watch(
        series(lambda minute: before if minute == 5.0 else 100.0 * max(minute - 30.0, 0.0), 60), DEFAULT_LIMITS, 0.0
    )

    # THEN
    assert at_record == seen.at_record
    assert not watch(series(lambda minute: 100.0 * minute, 20), DEFAULT_LIMITS, 0.0).at_record


def test_idle_readings_are_judged_alone_where_there_are_enough() -> None:
    """Three quarters of the blocks; with fewer all readings are, those under load among them."""

    # GIVEN an hour in which so many minutes are idle, and one GB more is held under load
    def seen(idle_minutes: int) -> Trend:
        idle = [minute % 60 < idle_minutes for minute in range(60)]
        whole = series(lambda minute: 0.0 if idle[int(minute)] else 1000.0, 60)
        (fast,) = watch(replace(whole, idle=tuple(idle)), DEFAULT_LIMITS).trends
        return fast

    # THEN
    assert (True, "flat") == (seen(45).idle_only, seen(45).shape)
    assert not seen(44).idle_only


@pytest.mark.parametrize(("tick", "blocks"), [(30.0, 60), (35.0, 60), (36.0, 30), (60.0, 30), (61.0, 20), (120.0, 15)])
def test_blocks_have_room_for_two_readings(tick: float, blocks: int) -> None:
    """Blocks of a minute up to a reading in 35 s; of two minutes at one in 60 s, of three beyond."""
    # GIVEN a stair: steps from block to block tell how many there are
    seen = watch(series(lambda minute: 12.0 * minute, 90, tick=tick), DEFAULT_LIMITS)

    # THEN the window is the same, but what is left of it for whole blocks
    fast = seen.trends[0]
    assert pytest.approx(1.0, abs=0.05) == fast.hours
    assert pytest.approx(12.0 * MB / 60.0, rel=0.05) == fast.bytes_per_second
    assert pytest.approx(blocks * (60 // blocks) / 60.0) == fast.hours


def test_weakest_of_the_evaluations_counts() -> None:
    """Growth that began after the first of them is as certain as the one that has seen least of it."""
    # GIVEN 20 MB a minute since minute 15 of 80: the window before the last but one has seen 45 of its 60 minutes
    late = watch(series(lambda minute: 20.0 * max(minute - 15.0, 0.0), 80), DEFAULT_LIMITS).trends[0]
    whole = watch(series(lambda minute: 20.0 * minute, 80), DEFAULT_LIMITS).trends[0]

    # THEN the newest window has seen the most of both
    assert late.wanders < 0.8 * whole.wanders
    assert late.p_drift >= whole.p_drift


def test_certain_growth_is_not_where_a_longer_bank_saw_it_come_back() -> None:
    """Falls, no rise like them, and a floor that stays: garbage of some hours. One fall may be anything."""

    # GIVEN 2 GB of garbage, collected each 100 minutes or once, and 20 MB a minute since the last fall
    def rises(period: float, first: float = 0.0) -> Callable[[float], float]:
        return lambda minute: 20.0 * ((minute - first) % period if minute >= first else 0.0)

    again = watch(series(rises(100.0), 398), DEFAULT_LIMITS)
    straight = watch(series(rises(1000.0, 299.0), 398), DEFAULT_LIMITS)

    # THEN
    assert ("grows", False, "flat") == (again.trends[0].shape, again.trends[0].certain, again.trends[1].shape)
    assert ("grows", True) == (straight.trends[0].shape, straight.trends[0].certain)


def test_floor_of_a_minute_is_its_lowest_reading() -> None:
    """Medians that climb over lows that stay are garbage, read four times a minute."""
    # GIVEN a level of which one reading in four never rises
    whole = series(lambda minute: 12.0 * minute, 80, tick=15.0)
    sizes = tuple(5000 * MB if place % 4 == 2 else size for place, size in enumerate(whole.sizes_bytes))

    # THEN
    fast = watch(replace(whole, sizes_bytes=sizes), DEFAULT_LIMITS).trends[0]
    assert "flat" == fast.shape
    assert abs(fast.gain_bytes) <= 2 * MB
    busy = watch(replace(whole, sizes_bytes=sizes, idle=(False,) * len(sizes)), DEFAULT_LIMITS).trends[0]
    assert "flat" == busy.shape


def test_growth_that_is_fast_on_a_long_bank_needs_no_longer_than_on_the_shortest() -> None:
    """Of 600 MB/h the bank of six hours is certain when it was seen three times, ten minutes apart."""
    # GIVEN three hours and 20 minutes, and ten minutes less
    fast, slow = (lambda minute: 10.0 * minute), (lambda minute: 3.0 * minute)

    # THEN growth of 180 MB/h needs its evaluations half an hour apart
    assert [True, True] == [one.certain for one in watch(series(fast, 200), DEFAULT_LIMITS).trends]
    assert [True, False] == [one.certain for one in watch(series(fast, 199), DEFAULT_LIMITS).trends]
    assert not watch(series(slow, 239), DEFAULT_LIMITS).trends[1].certain
    assert watch(series(slow, 240), DEFAULT_LIMITS).trends[1].certain


def of(name: str, seen: Watched) -> Trend:
    """What the bank of this name says."""
    return next(trend for trend in seen.trends if trend.bank.name == name)


@pytest.mark.parametrize(
    ("minutes", "banks"),
    [
        (179, ["fast"]),
        (180, ["fast", "mid"]),
        (479, ["fast", "mid"]),
        (480, ["fast", "mid", "half"]),
        (1439, ["fast", "mid", "half"]),
        (1440, ["fast", "mid", "half", "slow"]),
    ],
)
def test_a_bank_begins_with_its_least_window(minutes: int, banks: list[str]) -> None:
    """A half and a quarter of the longer windows are enough to begin with; a day has to be whole."""
    assert banks == [trend.bank.name for trend in watch(series(lambda minute: 0.0, minutes), DEFAULT_LIMITS).trends]


def test_banks_look_at_an_hour_at_six_at_twelve_and_at_a_day() -> None:
    """However long the series is, in whole blocks."""
    assert [1.0, 6.0, 12.0, 24.0] == [
        trend.hours for trend in watch(series(lambda minute: 0.0, 1500), DEFAULT_LIMITS).trends
    ]


@pytest.mark.parametrize(
    ("bank", "megabytes_per_hour", "grows"),
    [
        ("fast", 299.0, False),
        ("fast", 301.0, True),
        ("mid", 25.3, False),  # 149.3 MB from the first of 60 blocks to the last
        ("mid", 25.5, True),
        ("half", 19.9, False),
        ("half", 20.1, True),
        ("slow", 4.95, False),
        ("slow", 5.05, True),
    ],
)
def test_growth_counts_from_a_banks_own_rate(bank: str, megabytes_per_hour: float, *, grows: bool) -> None:
    """Longer windows see slower growth; in the one of six hours 150 MB have to come."""
    # GIVEN a line without noise, so that the edges are exact
    seen = watch(series(lambda minute: megabytes_per_hour * minute / 60.0, 1700, noise=0.0), DEFAULT_LIMITS)

    # THEN
    assert grows == (of(bank, seen).shape == "grows")


@pytest.mark.parametrize(("gigabytes_per_hour", "seen"), [(3.95, False), (4.05, True)])
def test_a_burst_counts_from_four_gigabytes_an_hour(gigabytes_per_hour: float, *, seen: bool) -> None:
    """Slower growth has time until the bank of an hour has seen it."""
    line = series(lambda minute: 1000.0 * gigabytes_per_hour * minute / 60.0, 40, noise=0.0)

    assert seen == (watch(line, DEFAULT_LIMITS, 0.0).burst is not None)


@pytest.mark.parametrize(
    ("bank", "megabytes", "shape"),
    [
        ("fast", 149.5, "flat"),
        ("fast", 150.5, "event"),
        ("mid", 149.5, "flat"),
        ("mid", 150.5, "event"),
        ("half", 149.5, "flat"),
        ("half", 150.5, "event"),
        ("slow", 99.5, "flat"),
        ("slow", 100.5, "event"),
    ],
)
def test_an_event_is_as_large_as_growth_has_to_be(bank: str, megabytes: float, shape: str) -> None:
    """One step in the middle of the window."""
    # GIVEN
    middle = 1500 - 30 * {"fast": 1, "mid": 6, "half": 12, "slow": 24}[bank]

    # WHEN
    seen = watch(series(lambda minute: megabytes * (minute >= middle), 1500, noise=0.0), DEFAULT_LIMITS)

    # THEN
    assert shape == of(bank, seen).shape


@pytest.mark.parametrize(
    ("bank", "minutes", "certain"),
    [
        ("mid", 239, False),
        ("mid", 240, True),
        ("half", 539, False),
        ("half", 540, True),
        ("slow", 1679, False),
        ("slow", 1680, True),
    ],
)
def test_certainty_takes_three_evaluations_at_a_banks_own_pace(bank: str, minutes: int, *, certain: bool) -> None:
    """The first of them has the least window: half an hour apart twice, and two hours apart on the longest bank."""
    # GIVEN 100 MB an hour, too slow for the bank of an hour
    seen = watch(series(lambda minute: 100.0 * minute / 60.0, minutes), DEFAULT_LIMITS)

    # THEN
    assert ("grows", certain) == (of(bank, seen).shape, of(bank, seen).certain)


@pytest.mark.parametrize(
    ("bank", "minutes", "begins", "megabytes_per_hour", "shape"),
    [
        ("mid", 480, 200, 200.0, "grows"),
        ("mid", 480, 230, 200.0, "unsteady"),  # two evaluations of three see it
        ("half", 800, 330, 100.0, "grows"),
        ("half", 800, 360, 100.0, "unsteady"),  # one of two
        ("slow", 1700, 690, 40.0, "grows"),
        ("slow", 1700, 810, 40.0, "unsteady"),
    ],
)
def test_growth_that_began_late_is_seen_by_too_few_evaluations(
    bank: str, minutes: int, begins: int, megabytes_per_hour: float, shape: str
) -> None:
    """Three in a row on the bank of six hours, two on the longer ones."""
    # GIVEN a level that begins to rise in the window
    seen = watch(series(lambda minute: megabytes_per_hour / 60.0 * max(minute - begins, 0.0), minutes), DEFAULT_LIMITS)

    # THEN
    assert shape == of(bank, seen).shape


@pytest.mark.parametrize(("minutes", "certain"), [(23, False), (24, True)])
def test_a_burst_is_certain_within_four_minutes_more(minutes: int, *, certain: bool) -> None:
    """Three evaluations two minutes apart, the first of them of 20 minutes."""
    burst = watch(series(lambda minute: 100.0 * minute, minutes), DEFAULT_LIMITS, 0.0).burst

    assert burst is not None
    assert certain == burst.certain
