"""leak.kv_blocks: blocks in use while idle, late frees, and a cache behind the pool that lost its blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, finding, rows
from tests.builders.runs import judged, run
from tests.builders.values import MIB, NO_ANSWER, engine, holding, pool, seen
from tests.builders.worlds import World, facts

ONE_POOL = Facts(pools=(pool(),))


def verdict(timeline: Timeline, of: Facts = ONE_POOL) -> Finding:
    """The rule's one finding."""
    (found,) = judge(timeline, of, DEFAULT_LIMITS)
    return found


def test_blocks_that_every_request_leaves_behind_are_a_fault() -> None:
    """Each of 21 requests keeps four blocks: the finding counts them, prices them, and says when the pool is gone."""
    world = World(leaked_blocks_per_request=4)
    actual = verdict(run(world), facts(world))
    # Every figure follows from 21 requests, 84 blocks and a pool of 6,144
    assert ("leak.kv_blocks", "fault") == (actual.id, actual.status)
    assert [
        ("idle_intervals", 12, "intervals", "engine"),
        ("blocks_at_first_idle", 0, "blocks", "engine"),
        ("blocks_at_last_idle", 84, "blocks", "engine"),
        ("requests_between", 21, "requests", "kvdiag"),
        ("leaked", 168 * MIB, "bytes", "engine"),
        ("leaked_ratio", 84 / 6144, "ratio", "engine"),
        ("requests_until_pool_full", 1515, "requests", "computed"),
    ] == rows(actual)


def test_a_server_that_gets_everything_back_is_ok() -> None:
    """No block is held in any idle stretch after the loads."""
    actual = verdict(run(), facts(World()))
    # It is said to be so, on the numbers
    assert "ok" == actual.status
    assert 0 == evidence(actual)["blocks_at_last_idle"]


@pytest.mark.parametrize(
    "world",
    [
        World(pools=()),
        World(usage_told=False),
        World(busy=True),
    ],
    ids=["no pool", "no usage", "never idle"],
)
def test_what_was_not_seen_idle_is_unknown(world: World) -> None:
    """Without a pool, a usage gauge or an idle moment there is no verdict, and the finding says which it was."""
    actual = verdict(run(world), facts(world))
    assert Finding(id="leak.kv_blocks", status="unknown", summary=ANY_TEXT) == actual


def test_a_lost_server_gives_its_own_reason() -> None:
    """Where the engine never answered, the reason is the engine's, not that it was busy."""
    verdict(seen(NO_ANSWER, NO_ANSWER, NO_ANSWER))


def test_blocks_held_from_the_start_are_a_fault_without_a_rate() -> None:
    """Fifty blocks that stay held all along are a fault although the run's requests add none."""
    world = World(held_at_start_blocks=50)
    actual = verdict(run(world), facts(world))
    # No rate is made up
    assert "fault" == actual.status
    assert evidence(actual)["requests_until_pool_full"] is None


def test_without_a_size_of_the_pool_blocks_alone_are_told() -> None:
    """An engine that reports no bytes still shows the leak, in blocks."""
    world = World(pools=(pool(pool_bytes=None),), leaked_blocks_per_request=1)
    actual = verdict(run(world), facts(world))
    assert evidence(actual)["leaked"] is None


def test_the_null_block_of_older_versions_is_not_a_leak() -> None:
    """Before 0.10.2 the gauge counts the null block: an idle pool shows one block used, and holds none."""
    world = World(pools=(pool(usage_blocks=6145),))
    assert "ok" == verdict(run(world), facts(world)).status


def test_a_leak_in_one_of_two_engines_is_found() -> None:
    """Blocks of all engines are added up: one engine's leak is not hidden by the other's empty pool."""
    both = Facts(pools=(pool("0"), pool("1")))
    idle = engine()
    leaking = engine(label="1", usage=3 / 6144)
    actual = verdict(seen((idle, leaking), (idle, leaking)), both)
    # It counts against both pools together
    assert "fault" == actual.status


def test_an_engine_without_a_pool_of_its_own_is_unknown() -> None:
    """A second engine whose pool is not reported leaves the sum unknown."""
    page = (engine(), engine(label="1"))
    assert "unknown" == verdict(seen(page, page, page)).status


def test_one_idle_sample_is_not_enough() -> None:
    """A single sample may fall between two engine steps: one that shows held blocks accuses nobody."""
    timeline = seen(holding(40, running=1), holding(40), holding(40, running=1))
    assert "unknown" == verdict(timeline).status


def test_blocks_of_requests_that_still_run_are_not_a_leak() -> None:
    """Blocks are only missed while nothing runs and nothing waits."""
    timeline = seen(holding(0), holding(0), *(holding(40, running=1) for _ in range(9)))
    assert "ok" == verdict(timeline).status


@pytest.mark.parametrize("late", [(0,) * 17 + (40, 10, 10, 10), (0, 90, 60, 60)], ids=["at the end", "early"])
def test_blocks_that_stopped_coming_back_are_a_leak(late: tuple[int, ...]) -> None:
    """A floor that fell once and then stands still above nothing is held, not late."""
    world = World(late_blocks=late)
    assert "fault" == verdict(run(world), facts(world)).status


def test_blocks_that_come_back_late_are_not_yet_a_leak() -> None:
    """A connector frees some seconds after the request: while the idle floor is falling it cannot be called a leak."""
    world = World(late_blocks=(0,) * 17 + (40, 30, 20, 10))
    actual = verdict(run(world), facts(world))
    assert "unknown" == actual.status


def test_a_floor_that_falls_to_nothing_is_ok() -> None:
    """Blocks that were late and came back leave no complaint."""
    # A floor that rose and fell to 0
    world = World(late_blocks=(0,) * 15 + (40, 40, 20, 20, 0, 0))
    assert "ok" == verdict(run(world), facts(world)).status


def test_a_last_stretch_that_has_not_settled_is_unknown() -> None:
    """Usage that still falls when the readings end shows neither that all came back nor that it did not."""
    timeline = seen(holding(0), holding(0), holding(40, running=1), holding(30), holding(20), holding(10))
    # The idle start is no evidence for the end
    assert "unknown" == verdict(timeline).status


def test_blocks_that_become_more_while_nothing_runs_are_a_fault() -> None:
    """What returns falls: blocks that rise between two idle readings do not, and the fewest of them are counted."""
    timeline = seen(holding(0), holding(0), holding(40, running=1), holding(30), holding(34))
    assert ("fault", 30) == (verdict(timeline).status, evidence(verdict(timeline))["blocks_at_last_idle"])


def test_first_blocks_of_an_idle_pool_are_unknown() -> None:
    """A pool that was empty a reading ago has not shown that anything stays."""
    assert "unknown" == verdict(seen(holding(40, running=1), holding(0), holding(4))).status


def test_a_leak_after_a_restart_is_found() -> None:
    """The floor before a restart, which emptied the pool, does not make a new leak look like blocks coming back."""

    # A floor of 500 blocks, a restart, and a floor that rises from 0 to 40
    def stretch(blocks: int) -> tuple[object, ...]:
        return holding(blocks), holding(blocks), holding(blocks + 9, running=1)

    timeline = seen(*(reading for blocks in (500, 0, 20, 40) for reading in stretch(blocks)))  # type: ignore[arg-type]
    assert "fault" == verdict(timeline).status


def idle(blocks: int) -> tuple[Engine, ...]:
    """An idle moment, in which so many blocks are held."""
    return holding(blocks), holding(blocks)


def busy(blocks: int = 900, readings: int = 5) -> tuple[Engine, ...]:
    """Work that holds so many."""
    return (holding(blocks, running=9),) * readings


PROVEN = (*idle(0), *busy(), *idle(40))


@pytest.mark.parametrize(
    ("later", "status"),
    [
        ((), "fault"),
        (busy(readings=60), "fault"),
        ((*busy(), holding(90), holding(70)), "fault"),
        ((*busy(), *idle(52), *busy(), *idle(47)), "fault"),
        ((*busy(), holding(70), holding(20)), "unknown"),
        ((*busy(), *idle(12)), "unknown"),
        ((*busy(), *idle(0), *busy()), "ok"),
    ],
    ids=[
        "then it was seen",
        "work since",
        "idle for too short a moment",
        "some of what came after returned",
        "fewer, not settled",
        "fewer",
        "none",
    ],
)
def test_what_an_idle_moment_proved_stays_until_another_one_refutes_it(later: tuple[Engine, ...], status: str) -> None:
    """Forty blocks held at idle are a fault under the traffic that follows: it gives nobody a reason to doubt them."""
    assert status == verdict(seen(*PROVEN, *later)).status


def counted(engines: tuple[Engine, ...], tokens: int) -> tuple[Engine, ...]:
    """The same with so many prompt tokens more at each reading."""
    return tuple(replace(one, prompt_tokens_total=tokens + 100 * place) for place, one in enumerate(engines))


@pytest.mark.parametrize(
    ("since", "status"),
    [
        (busy(), "unknown"),
        ((*busy(), *idle(0)), "ok"),
        ((*busy(), *idle(3)), "fault"),
    ],
    ids=["busy since", "idle since, and empty", "idle since, and leaking again"],
)
def test_a_restart_ends_what_was_proven_before(since: tuple[Engine, ...], status: str) -> None:
    """The pool of the engine that is there now was empty when it began."""
    actual = verdict(seen(*counted(PROVEN, 50_000), *counted(since, 0)))
    assert status == actual.status


def test_the_servers_own_start_tells_of_a_restart() -> None:
    """Where no counter is read, the moment at which the process began does."""
    # Readings at seconds 1 to 11, of a process that began at 10
    timeline = seen(*PROVEN, *busy(readings=2))
    assert "unknown" == verdict(timeline, replace(ONE_POOL, started_seconds=timeline.samples[-2].at_seconds)).status


def test_readings_of_the_devices_end_no_idle_stretch() -> None:
    """Readings of devices between two of the engine do not part an idle stretch."""
    found = finding(judged(), "leak.kv_blocks")
    # Each quiet time is one stretch: before the warm-up requests, and around each of ten loads
    assert 12 == evidence(found)["idle_intervals"]


TICK_SECONDS = 30.0


def of_readings(*engines: Engine, tick_seconds: float = TICK_SECONDS) -> Finding:
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
    actual = of_readings(*cancelled(3072, 17), *cancelled(3072, 17))
    assert "fault" == actual.status
    figures = {"late_frees": 2, "longest_late_free": 480.0, "max_blocks_freed_late": 3072, "blocks_at_last_idle": 0}
    assert figures.items() <= evidence(actual).items()


@pytest.mark.parametrize("blocks", [[3072], [1000, 1000]], ids=["once", "less than a quarter of the pool"])
def test_less_than_that_is_suspect(blocks: list[int]) -> None:
    """What happened once may not happen again, and a sixth of the pool is noticed by nobody else."""
    assert "suspect" == of_readings(*[reading for held in blocks for reading in cancelled(held, 17)]).status


@pytest.mark.parametrize(
    ("blocks", "readings"), [(3072, 2), (60, 17)], ids=["for half a minute", "a hundredth of the pool"]
)
def test_blocks_that_come_back_soon_or_are_few_are_ok(blocks: int, readings: int) -> None:
    """A transfer to another instance takes seconds, and a few blocks cost nobody anything."""
    assert "ok" == of_readings(*cancelled(blocks, readings)).status


def test_blocks_held_under_load_are_no_late_ones() -> None:
    """What requests hold while they run is theirs."""
    assert "ok" == of_readings(*[holding(3072, running=9)] * 30, engine(), engine(), engine()).status


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
    actual = of_readings(*asked(FALLING))
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
    assert "ok" == of_readings(*readings).status, why


@pytest.mark.parametrize("restart", [1, 100, 240, 470])
def test_a_restart_neither_makes_nor_hides_a_fall(restart: int) -> None:
    """Counters that begin anew are another life of the same server, whose hits go on from where they were."""
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

    assert "ok" == of_readings(*even[:restart], *again).status


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
    actual = of_readings(*readings)
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
    before = [replace(one, prompt_tokens_total=9_000 + number) for number, one in enumerate(working(12.0))]
    after = [replace(one, prompt_tokens_total=number) for number, one in enumerate(working(2.0))]
    assert "unknown" == of_readings(*before, *after).status
