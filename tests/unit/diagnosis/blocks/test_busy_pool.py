"""A pool that is never idle, judged by its lowest samples: bounded, flat, rising or open."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.blocks.busy_pool import BusyFloor, Says, busy_floor
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Capabilities, Engine, Facts, Finding, Mark, Sample, Timeline
from tests.builders.answers import evidence, only, rows
from tests.builders.values import engine, every_half_minute, holding, pool

KNOWN = Facts(pools=(pool(usable_blocks=10_000),))
SIX_HOURS = 6 * 3600.0
NOISE = (0, 7, 3, 9, 1, 5)


def busy(
    blocks: Callable[[float], float],
    *,
    seconds: float = SIX_HOURS,
    tick: float = 60.0,
    running: Sequence[int] = (2, 5, 3),
) -> list[Sample]:
    """Samples with this many blocks in use at each share of the time, and a hundred more for each request."""
    count = int(seconds / tick)
    samples = []
    for number in range(count + 1):
        runs = running[number % len(running)]
        held = round(blocks(number / count)) + 100 * runs + NOISE[number % 6]
        samples.append(
            Sample(at_seconds=100.0 + tick * number, engines=(holding(held, of=KNOWN.pools[0], running=runs),))
        )
    return samples


def floor(samples: Sequence[Sample], limits: Limits = DEFAULT_LIMITS) -> BusyFloor | None:
    """The busy floor of these samples."""
    return busy_floor(Timeline(samples=tuple(samples)), KNOWN, limits)


@pytest.mark.parametrize(
    ("blocks", "says", "lowest"),
    [
        (lambda share: 0.0, "bounded", 200),  # 2 % of 10,000
        (lambda share: 1.0, "flat", 201),
        (lambda share: 2000.0, "flat", 2200),
        (lambda share: 2000.0 + 1500.0 * share, "rising", 3200),
        (lambda share: 3500.0 - 1500.0 * share, "flat", 2200),
        # What comes and goes over hours hides more than 5 % of 10,000; from 2,000 to 3,600 it is lowest at the end.
        (lambda share: 2800.0 + 800.0 * math.cos(3.0 * math.pi * share), "open", 2200),
    ],
)
def test_lowest_readings_tell_what_can_have_stayed(blocks: Callable[[float], float], says: str, lowest: int) -> None:
    """A minimum of at most 2 % of the pool bounds the leak; otherwise the minima at equal requests decide."""
    actual = floor(busy(blocks))
    # The lowest has two requests
    assert actual is not None
    assert says in get_args(Says)
    assert (says, 6.0, 2) == (actual.says, actual.hours, actual.running)
    assert lowest == pytest.approx(actual.lowest_blocks, abs=12)


def test_rate_of_the_lowest_readings_is_in_blocks_an_hour() -> None:
    """1,500 blocks in six hours are 250 an hour; the detection limit of a flat pool is a block in all."""
    flat = floor(
        busy(lambda share: 2000.0), replace(DEFAULT_LIMITS, busy=replace(DEFAULT_LIMITS.busy, floor_ratio=1 / 10_000))
    )
    rising = floor(busy(lambda share: 2000.0 + 1500.0 * share))

    assert rising is not None
    assert flat is not None
    assert "flat" == flat.says
    assert pytest.approx(250.0, rel=0.03) == rising.growth_per_hour
    assert abs(flat.growth_per_hour) < 2.0
    # A block in all: the lowest samples of a tenth of an hour are the same each time.
    assert pytest.approx(1.0 / 6.0, rel=0.01) == flat.visible_per_hour
    assert rising.visible_per_hour > rising.growth_per_hour


def test_six_hours_are_needed() -> None:
    """A minute less is too little."""
    whole = busy(lambda share: 2000.0)
    assert floor(whole) is not None
    assert floor(whole[:-1]) is None
    assert floor([]) is None


def test_readings_that_tell_nothing_are_left_out() -> None:
    """Of engines asleep, without requests counted, without usage; a quarter of the hours may be missing."""
    whole = busy(lambda share: 2000.0)
    asleep = [replace(one, engines=(replace((one.engines or ())[0], asleep=True),)) for one in whole]
    uncounted = [replace(one, engines=(replace((one.engines or ())[0], requests_running=None),)) for one in whole]
    unused = [replace(one, engines=(engine(usage=None, running=2),)) for one in whole]
    unread = [replace(one, engines=None) for one in whole]

    for blind in (asleep, uncounted, unused, unread):
        assert floor(blind) is None
        assert floor([*whole[:130], *blind[130:214], *whole[214:]]) is not None
        assert floor([*whole[:130], *blind[130:230], *whole[230:]]) is None


def test_readings_closer_than_a_quarter_minute_are_left_out() -> None:
    """Of one every 10 s the second within 14.5 s is not taken, though it were the lowest."""
    # A pool read each 10 s, of which every second reading is low
    samples = busy(lambda share: 2000.0, tick=10.0, running=(9, 0))
    actual = floor(samples)
    assert actual is not None
    assert 9 == actual.running
    assert pytest.approx(2900, abs=12) == actual.lowest_blocks


@pytest.mark.parametrize(("grown", "says"), [(0.9, "flat"), (1.2, "rising")])
def test_less_than_a_block_in_all_is_not_rising(grown: float, says: str) -> None:
    """However sure the slope of it is: what is lost is lost in whole blocks."""

    # Lowest samples that differ from cell to cell, and rise by this much on the mean
    def blocks(share: float) -> int:
        cell = round(share * 360) // 6
        return 2000 + math.floor(grown * cell / 60 + cell * 7 % 10 / 10)

    actual = floor(busy(blocks))

    assert actual is not None
    assert pytest.approx(grown / 6.0, rel=0.1) == actual.growth_per_hour
    assert says == actual.says


ONE_POOL = Facts(pools=(pool(),))
TICK_SECONDS = 30.0


def verdict(timeline: Timeline) -> Finding:
    """The rule's one finding."""
    return only(judge, timeline, ONE_POOL)


def working(hours: float, *, base: float = 200.0, each: float = 150.0, lost_per_hour: float = 0.0) -> list[Engine]:
    """A server that is never idle: 4 to 20 requests by the time of day, each with so many blocks, and blocks lost."""
    pages = []
    for number in range(round(hours * 3600.0 / TICK_SECONDS)):
        passed = number * TICK_SECONDS / 3600.0
        running = 12 + round(7.5 * math.sin(passed * math.pi / 6.0)) + number % 2
        blocks = base + each * running + 40.0 * (number % 5) + lost_per_hour * passed
        pages.append(holding(round(blocks), running=running))
    return pages


@pytest.mark.parametrize(
    ("readings", "status", "figures"),
    [
        (working(12.0, base=0.0, each=10.0), "ok", True),
        (working(12.0), "ok", True),
        (working(12.0, lost_per_hour=50.0), "unknown", True),
        (working(3.0), "unknown", False),
        ([*working(3.0), *working(3.0, base=1000.0)] * 4, "unknown", False),
    ],
    ids=["hardly used", "used", "rising", "a few hours", "uneven"],
)
def test_a_server_that_is_never_idle_is_judged_by_its_lowest_readings(
    readings: list[Engine], status: str, figures: bool
) -> None:
    """What cannot be held, or does not grow, is no leak; what may be one needs an idle moment."""
    actual = verdict(every_half_minute(*readings))
    assert status == actual.status
    assert figures == bool(actual.evidence)


def test_a_busy_server_that_is_well_is_ok() -> None:
    """That it had no idle minute is no reason to doubt it."""
    timeline = every_half_minute(*working(12.0))
    assert "ok" == diagnose(timeline, ONE_POOL).worst
    assert "unknown" == diagnose(Timeline(samples=timeline.samples[:200]), ONE_POOL).worst


def never_idle(held: Callable[[float, int], float]) -> Finding:
    """The finding on six hours of 4 to 6 running requests, from the blocks in use by hour and running requests."""
    samples = []
    for number in range(241):
        running = 4 + number // 4 % 3
        blocks = round(held(number / 40, running)) + 30 * (number % 4)
        samples.append(Sample(at_seconds=90.0 * number, engines=(holding(blocks, running=running),)))
    return verdict(Timeline(samples=tuple(samples)))


@pytest.mark.parametrize("each", [15, 50], ids=["bounded", "flat"])
def test_a_busy_server_that_is_well_has_its_figures(each: int) -> None:
    """The evidence has the minimum, at four running requests, and a detection limit of 1 block in 6 hours."""
    actual = never_idle(lambda _, running: each * running)

    assert "ok" == actual.status
    assert ("6 h" in actual.summary) == (each == 50)
    assert [
        ("window", 6.0, "hours", "kvdiag"),
        ("min_blocks_under_load", 4 * each, "blocks", "engine"),
        ("running_at_min", 4, "requests", "engine"),
        ("min_blocks_growth_per_hour", pytest.approx(0.0, abs=0.001), "blocks", "engine"),
        ("detection_limit_per_hour", pytest.approx(1 / 6, abs=0.001), "blocks", "computed"),
    ] == rows(actual)


def test_a_busy_server_whose_lowest_readings_rise_is_unknown_with_its_figures() -> None:
    """Twenty blocks an hour more at equal requests are unknown: a leak, or longer requests."""
    actual = never_idle(lambda hour, running: 50 * running + 20 * hour)
    # In the newest third, from the fourth hour on, 200 and 80 blocks are the lowest
    assert "unknown" == actual.status
    assert pytest.approx(20.0, rel=0.02) == evidence(actual)["min_blocks_growth_per_hour"]
    assert pytest.approx(280, abs=9) == evidence(actual)["min_blocks_under_load"]


def test_a_busy_server_in_steps_of_ours_is_not_judged_by_its_lowest_readings() -> None:
    """Minima of a busy server are ok without steps, and unknown in a run of steps, which has idle intervals itself."""
    working = [replace(holding(9, running=1), generation_tokens_total=number) for number in range(241)]
    busy = [Sample(at_seconds=90.0 * number, engines=(one,)) for number, one in enumerate(working)]
    mark = Mark(at_seconds=1.0, step="baseline", cycle=0, phase="begin")
    assert ["unknown", "ok"] == [verdict(Timeline(samples=tuple(busy), marks=marks)).status for marks in ((mark,), ())]


LATE = replace(KNOWN, capabilities=Capabilities(on_completion=True))


def late(
    kept: float = 0.0,
    *,
    hours: float = 12.0,
    blocks: Callable[[float], float] = lambda share: 20.0,
    counted: bool = True,
    idle_minutes: int = 0,
) -> Finding:
    """The finding of gauges that moved when requests ended, two a minute, each of which keeps some blocks."""
    count = int(hours * 60)
    samples = []
    for number in range(count + idle_minutes):
        minute = min(number, count - 1)
        running, ended, size = 1 + minute % 3, 2 * minute, blocks(minute / count)
        held = round(running * size * (0.5 + 0.1 * (minute % 6)) + kept * ended)
        one = replace(
            holding(held, of=KNOWN.pools[0], running=running if number == minute else 0),
            requests_finished_total=ended if counted else None,
            prompt_tokens_total=round(16 * size * ended),
            generation_tokens_total=0,
        )
        samples.append(Sample(at_seconds=100.0 + 60.0 * number, engines=(one,)))
    return only(judge, Timeline(samples=tuple(samples)), LATE)


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (late(), "ok"),
        (late(1.0), "suspect"),
        (late(1.0, idle_minutes=120), "suspect"),
        (late(1.0, counted=False), "unknown"),
        (late(blocks=lambda share: 20.0 + 600.0 * share), "unknown"),
        (late(blocks=lambda share: 400.0), "ok"),
        (late(1.0, hours=5.9), "unknown"),
    ],
    ids=[
        "few blocks at the ends of requests",
        "each request keeps one",
        "idle since",
        "requests are not counted",
        "requests become longer",
        "large requests",
        "too short",
    ],
)
def test_gauges_that_move_when_requests_end_are_bounded(finding: Finding, status: str) -> None:
    """Their lowest values bound a leak; a rise is suspect where neither requests nor their lengths explain it."""
    assert status == finding.status


def test_a_slow_leak_is_within_what_is_said_to_be_possible() -> None:
    """Below 2 % of the pool the lowest blocks are named as the most that is leaked."""
    found = late(0.1)
    assert "ok" == found.status
    least = evidence(found)["min_blocks_under_load"]
    assert isinstance(least, int | float)
    assert least >= 0.1 * 2 * 720 * 2 / 3


@pytest.mark.parametrize(("grows", "status"), [(600.0, "unknown"), (0.0, "ok")])
def test_an_idle_interval_says_nothing_of_what_came_later(grows: float, status: str) -> None:
    """Two hours later the lowest samples at equal requests have risen: the empty pool was before that."""
    idle = [Sample(at_seconds=30.0 * place, engines=(holding(0, of=KNOWN.pools[0], running=0),)) for place in range(3)]
    later = busy(lambda share: 1000.0 + grows * share, seconds=7200.0)
    actual = only(judge, Timeline(samples=(*idle, *later)), KNOWN)
    assert status == actual.status
    figures = evidence(actual)
    assert figures["blocks_at_last_idle"] == 0
    rises = figures.get("min_blocks_growth_per_hour")
    assert rises is None if not grows else pytest.approx(300.0, rel=0.1) == rises
