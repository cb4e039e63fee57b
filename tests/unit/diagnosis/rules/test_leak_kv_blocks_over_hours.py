"""leak.kv_blocks over hours: blocks that came back late, and a cache behind the pool that is hit no more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.values import engine, holding, pool

ONE_POOL = Facts(pools=(pool(),))
TICK_SECONDS = 30.0


def verdict(*engines: Engine, tick_seconds: float = TICK_SECONDS) -> Finding:
    """The rule's one finding on so many readings of one engine."""
    samples = tuple(
        Sample(at_seconds=number * tick_seconds, engines=(reading,)) for number, reading in enumerate(engines)
    )
    (found,) = judge(Timeline(samples=samples), ONE_POOL, DEFAULT_LIMITS)
    return found


def cancelled(blocks: int, readings: int) -> list[Engine]:
    """Work, then nothing running for a quarter of an hour, with so many blocks held in the first readings of it."""
    return [*[holding(900, running=9)] * 4, *[holding(blocks)] * readings, *[engine()] * (30 - readings)]


def test_blocks_that_a_timeout_gives_back_again_and_again_are_a_fault() -> None:
    """After each of two mass cancels half of the pool is held for eight minutes, and is there again afterwards."""
    actual = verdict(*cancelled(3072, 17), *cancelled(3072, 17))

    sentence = ANY_TEXT
    assert ("fault", sentence) == (actual.status, actual.summary)
    figures = {"late_frees": 2, "longest_late_free": 480.0, "max_blocks_freed_late": 3072, "blocks_at_last_idle": 0}
    assert figures.items() <= evidence(actual).items()


@pytest.mark.parametrize("blocks", [[3072], [1000, 1000]], ids=["once", "less than a quarter of the pool"])
def test_less_than_that_is_suspect(blocks: list[int]) -> None:
    """What happened once may not happen again, and a sixth of the pool is noticed by nobody else."""
    assert "suspect" == verdict(*[reading for held in blocks for reading in cancelled(held, 17)]).status


@pytest.mark.parametrize(
    ("blocks", "readings"), [(3072, 2), (60, 17)], ids=["for half a minute", "a hundredth of the pool"]
)
def test_blocks_that_come_back_soon_or_are_few_are_ok(blocks: int, readings: int) -> None:
    """A transfer to another instance takes seconds, and a few blocks cost nobody anything."""
    assert "ok" == verdict(*cancelled(blocks, readings)).status


def test_blocks_held_under_load_are_no_late_ones() -> None:
    """What requests hold while they run is theirs."""
    assert "ok" == verdict(*[holding(3072, running=9)] * 30, engine(), engine(), engine()).status


def asked(shares: list[float], *, usage: float = 0.3, readings: int = 60, tokens: int = 20_000) -> list[Engine]:
    """Readings of a server whose prompts hit by these shares, one after the other; idle at its end."""
    pages: list[Engine] = []
    queries = hits = 0
    for share in shares:
        for _ in range(readings):
            queries, hits = queries + tokens, hits + round(share * tokens)
            pages.append(
                replace(
                    engine(usage=usage, running=5, prompt_tokens=queries),
                    prefix_queries_total=queries,
                    prefix_hits_total=hits,
                )
            )
    idle = replace(pages[-1], kv_usage_ratio=0.0, requests_running=0)
    return [*pages, idle, idle, idle]


FALLING = [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.04, 0.01]


def test_hits_that_dwindle_to_nothing_are_unknown() -> None:
    """A cache tier that lost its blocks looks like traffic that changed: the finding says what would decide."""
    actual = verdict(*asked(FALLING))

    assert "unknown" == actual.status
    assert evidence(actual)["last_hit_ratio"] == pytest.approx(0.01, abs=0.001)


@pytest.mark.parametrize(
    ("readings", "why"),
    [
        (asked([0.3] * 8), "even"),
        (asked([0.6, 0.1, 0.5, 0.2, 0.6, 0.1, 0.05, 0.01]), "up and down"),
        (asked(FALLING, usage=0.95), "a full pool drops what it keeps"),
        (asked(FALLING, tokens=100), "next to no traffic"),
        (asked(FALLING, readings=20), "within an hour and a half"),
        (asked([share / 10 for share in FALLING]), "few hits at any time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hits_that_traffic_explains_are_ok(readings: list[Engine], why: str) -> None:
    """Prompts differ from hour to hour: only a fall without an end and without another reason is told."""
    assert "ok" == verdict(*readings).status, why


@pytest.mark.parametrize("restart", [1, 100, 240, 470])
def test_a_restart_neither_makes_nor_hides_a_fall(restart: int) -> None:
    """Counters that begin anew are another life of the same server, whose hits go on from where they were."""
    # A server with even hits that is restarted once
    even = asked([0.3] * 8)
    before = even[restart - 1]
    again = [
        replace(
            one,
            prefix_queries_total=(one.prefix_queries_total or 0) - (before.prefix_queries_total or 0),
            prefix_hits_total=(one.prefix_hits_total or 0) - (before.prefix_hits_total or 0),
        )
        for one in even[restart:]
    ]

    assert "ok" == verdict(*even[:restart], *again).status


def working(hours: float, *, base: float = 200.0, each: float = 150.0, lost_per_hour: float = 0.0) -> list[Engine]:
    """A server that is never idle: 4 to 20 requests by the time of day, each with so many blocks, and blocks lost."""
    pages = []
    for number in range(round(hours * 3600.0 / TICK_SECONDS)):
        passed = number * TICK_SECONDS / 3600.0
        running = 12 + round(7.5 * math.sin(passed * math.pi / 6.0)) + number % 2
        pages.append(
            holding(round(base + each * running + 40.0 * (number % 5) + lost_per_hour * passed), running=running)
        )
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
    actual = verdict(*readings)

    assert status == actual.status
    assert figures == bool(actual.evidence)


def test_a_busy_server_that_is_well_is_ok() -> None:
    """That it had no idle minute is no reason to doubt it."""
    pages = working(12.0)
    timeline = Timeline(
        samples=tuple(Sample(at_seconds=number * TICK_SECONDS, engines=(one,)) for number, one in enumerate(pages))
    )

    assert "ok" == diagnose(timeline, ONE_POOL).worst
    assert "unknown" == diagnose(Timeline(samples=timeline.samples[:200]), ONE_POOL).worst


def test_the_life_before_a_restart_bounds_nothing() -> None:
    """The lowest readings of the engine that is there now count, from its first one on."""
    # Twelve hours, and two more since the counters began anew
    before = [replace(one, prompt_tokens_total=9_000 + number) for number, one in enumerate(working(12.0))]
    after = [replace(one, prompt_tokens_total=number) for number, one in enumerate(working(2.0))]

    assert "unknown" == verdict(*before, *after).status
