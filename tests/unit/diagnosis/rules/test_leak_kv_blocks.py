from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Engine, Evidence, Facts, Finding, Timeline
from tests.builders.answers import ANY_TEXT, evidence, finding
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
    # A server whose requests leave four blocks each
    world = World(leaked_blocks_per_request=4)
    actual = verdict(run(world), facts(world))
    # Every figure follows from 21 requests, 84 blocks and a pool of 6,144
    expected = Finding(
        id="leak.kv_blocks",
        status="fault",
        summary=ANY_TEXT,
        evidence=(
            Evidence(name="idle_intervals", value=12, unit="intervals", source="engine"),
            Evidence(name="blocks_at_first_idle", value=0, unit="blocks", source="engine"),
            Evidence(name="blocks_at_last_idle", value=84, unit="blocks", source="engine"),
            Evidence(name="requests_between", value=21, unit="requests", source="kvdiag"),
            Evidence(name="leaked", value=168 * MIB, unit="bytes", source="engine"),
            Evidence(name="leaked_ratio", value=84 / 6144, unit="ratio", source="engine"),
            Evidence(name="requests_until_pool_full", value=1515, unit="requests", source="computed"),
        ),
    )

    assert expected == actual


def test_a_server_that_gets_everything_back_is_ok() -> None:
    """No block is held in any idle stretch after the loads."""
    # A healthy server
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
    # Readings that all failed
    verdict(seen(NO_ANSWER, NO_ANSWER, NO_ANSWER))


def test_blocks_held_from_the_start_are_a_fault_without_a_rate() -> None:
    """Fifty blocks that stay held all along are a fault although the run's requests add none."""
    # A pool of which fifty blocks are stuck
    world = World(held_at_start_blocks=50)
    actual = verdict(run(world), facts(world))

    # No rate is made up
    assert "fault" == actual.status
    assert evidence(actual)["requests_until_pool_full"] is None


def test_without_a_size_of_the_pool_blocks_alone_are_told() -> None:
    """An engine that reports no bytes still shows the leak, in blocks."""
    # A leaking server on an engine that does not tell its pool's bytes
    world = World(pools=(pool(pool_bytes=None),), leaked_blocks_per_request=1)
    actual = verdict(run(world), facts(world))

    assert evidence(actual)["leaked"] is None


def test_the_null_block_of_older_versions_is_not_a_leak() -> None:
    """Before 0.10.2 the gauge counts the null block: an idle pool shows one block used, and holds none."""
    # A gauge whose denominator holds the null block
    world = World(pools=(pool(usage_blocks=6145),))

    assert "ok" == verdict(run(world), facts(world)).status


def test_a_leak_in_one_of_two_engines_is_found() -> None:
    """Blocks of all engines are added up: one engine's leak is not hidden by the other's empty pool."""
    # Two engines, of which the second holds three blocks while nothing runs
    both = Facts(pools=(pool("0"), pool("1")))
    idle = engine()
    leaking = engine(label="1", usage=3 / 6144)

    actual = verdict(seen((idle, leaking), (idle, leaking)), both)

    # It counts against both pools together
    assert "fault" == actual.status


def test_an_engine_without_a_pool_of_its_own_is_unknown() -> None:
    """A second engine whose pool is not reported leaves the sum unknown."""
    # Two engines and one pool
    page = (engine(), engine(label="1"))

    assert "unknown" == verdict(seen(page, page, page)).status


def test_one_idle_sample_is_not_enough() -> None:
    """A single sample may fall between two engine steps: one that shows held blocks accuses nobody."""
    # One idle moment with blocks held, between running ones
    timeline = seen(holding(40, running=1), holding(40), holding(40, running=1))

    assert "unknown" == verdict(timeline).status


def test_blocks_of_requests_that_still_run_are_not_a_leak() -> None:
    """Blocks are only missed while nothing runs and nothing waits."""
    # An idle start and a request that runs to the end of what was seen
    timeline = seen(holding(0), holding(0), *(holding(40, running=1) for _ in range(9)))

    assert "ok" == verdict(timeline).status


@pytest.mark.parametrize("late", [(0,) * 17 + (40, 10, 10, 10), (0, 90, 60, 60)], ids=["at the end", "early"])
def test_blocks_that_stopped_coming_back_are_a_leak(late: tuple[int, ...]) -> None:
    """A floor that fell once and then stands still above nothing is held, not late."""
    # A floor that fell and has not moved since
    world = World(late_blocks=late)

    assert "fault" == verdict(run(world), facts(world)).status


def test_blocks_that_come_back_late_are_not_yet_a_leak() -> None:
    """A connector frees some seconds after the request: while the idle floor is falling it cannot be called a leak."""
    # A floor that rose with the load and has been falling since
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
    # An idle start, a load, and an end on which no two samples agree
    timeline = seen(holding(0), holding(0), holding(40, running=1), holding(30), holding(20), holding(10))

    # The idle start is no evidence for the end
    assert "unknown" == verdict(timeline).status


def test_blocks_that_become_more_while_nothing_runs_are_a_fault() -> None:
    """What returns falls: blocks that rise between two idle readings do not, and the fewest of them are counted."""
    # A leak so fast that no two idle readings agree
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
    # A run, whose device readings lie among the engines'
    found = finding(judged(), "leak.kv_blocks")

    # Each quiet time is one stretch: before the warm-up requests, and around each of ten loads
    assert 12 == evidence(found)["idle_intervals"]
