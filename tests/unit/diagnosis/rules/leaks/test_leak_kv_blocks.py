"""leak.kv_blocks: blocks in use while idle, and late frees. Pools that are never idle: blocks/test_busy_pool.py."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.lives import lifetimes
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.diagnosis.timeline_queries import NO_POOL, idle_floors, open_sessions
from kvdiag.model import Engine, Facts, Finding, Mark, Outcome, Sample, Timeline
from tests.builders.answers import containing, evidence, finding, only, rows
from tests.builders.runs import judged, run
from tests.builders.values import MIB, NO_ANSWER, engine, every_half_minute, holding, pool, seen
from tests.builders.worlds import World, facts

ONE_POOL = Facts(pools=(pool(),))


def verdict(timeline: Timeline, of: Facts = ONE_POOL) -> Finding:
    """The rule's one finding on the last life."""
    life = lifetimes(timeline, of, DEFAULT_LIMITS)[-1]
    return only(judge, life.timeline, life.facts)


def test_blocks_that_every_request_leaves_behind_are_a_fault() -> None:
    """21 requests that leak four blocks each are a fault, with count, bytes and requests until the pool is full."""
    world = World(leaked_blocks_per_request=4)
    actual = verdict(run(world), facts(world))
    # Every figure follows from 21 requests, 84 blocks and a pool of 6,144
    assert ("leak.kv_blocks", "fault") == (actual.id, actual.status)
    assert [
        ("idle_intervals", 12, "intervals", "engine"),
        ("blocks_at_first_idle", 0, "blocks", "engine"),
        ("blocks_at_last_idle", 84, "blocks", "engine"),
        ("requests_between", 21, "requests including warm-up", "kvdiag"),
        ("leaked", 168 * MIB, "bytes", "engine"),
        ("leaked_ratio", 84 / 6144, "ratio", "engine"),
        ("requests_until_pool_full", 1515, "requests", "computed"),
    ] == rows(actual)
    assert "(168 MiB)" in actual.summary


def test_the_rate_is_that_of_what_came_after_the_first_idle_interval() -> None:
    """Of 49 blocks 7 were there before: 21 requests kept 2 each, and 6,095 more blocks last 3,048 requests."""
    kept, stood = (World(held_at_start_blocks=7, leaked_blocks_per_request=each) for each in (2, 0))
    actual = verdict(run(kept), facts(kept))
    assert 3048 == evidence(actual)["requests_until_pool_full"]
    assert "+2 per request" in actual.summary
    assert "per request" not in verdict(run(stood), facts(stood)).summary


def test_requests_between_end_after_the_first_idle_interval() -> None:
    """Of loads that end at the last sample of either idle interval the second counts."""
    timeline, served = seen(*PROVEN), Outcome(completed=1, failed=1, prompt_tokens=1, generated_tokens=1)
    ends = enumerate(sample.at_seconds for sample in timeline.samples[1::7])
    marks = (Mark(at_seconds=at, step="soak", cycle=cycle, phase="release", outcome=served) for cycle, at in ends)
    assert 2 == evidence(verdict(replace(timeline, marks=tuple(marks))))["requests_between"]


def test_why_nothing_is_known_is_said() -> None:
    """A pool that is not reported, a gap's own reason, or a server without a pause."""
    silent = Timeline(samples=(Sample(at_seconds=1.0, gaps=(NO_ANSWER,)),))
    awake = Timeline(samples=(*silent.samples, Sample(at_seconds=2.0, engines=(holding(9, running=1),))))
    assert [NO_ANSWER.reason] * 2 == [verdict(silent, of).summary for of in (ONE_POOL, Facts())]
    assert NO_POOL == verdict(Timeline(samples=()), Facts()).summary
    assert containing("never idle") == verdict(awake).summary


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(), "ok", id="all released"),
        pytest.param(World(pools=()), "unknown", id="no pool"),
        pytest.param(World(usage_reported=False), "unknown", id="no usage"),
        pytest.param(World(busy=True), "unknown", id="never idle"),
        pytest.param(World(pools=(pool(usage_blocks=6145),)), "ok", id="the null block of versions before 0.10.2"),
        pytest.param(World(late_blocks=(0,) * 17 + (40, 10, 10, 10)), "fault", id="fell, then stood still at the end"),
        pytest.param(World(late_blocks=(0, 90, 60, 60)), "fault", id="fell, then stood still early"),
        pytest.param(World(late_blocks=(0,) * 17 + (40, 30, 20, 10)), "unknown", id="still falling"),
        pytest.param(World(late_blocks=(0,) * 15 + (40, 40, 20, 20, 0, 0)), "ok", id="fell to 0"),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """A connector releases blocks some seconds after the request: while the idle floor falls it is no leak yet."""
    assert status == verdict(run(world), facts(world)).status


def idle(blocks: int) -> tuple[Engine, ...]:
    """Two idle samples with so many blocks in use."""
    return (holding(blocks),) * 2


def busy(blocks: int = 900, readings: int = 5) -> tuple[Engine, ...]:
    """Work that uses so many."""
    return (holding(blocks, running=9),) * readings


def counted(engines: tuple[Engine, ...], tokens: int) -> tuple[Engine, ...]:
    """The same with so many prompt tokens more at each sample."""
    return tuple(replace(one, prompt_tokens_total=tokens + 100 * place) for place, one in enumerate(engines))


def floors(*blocks: int) -> tuple[Engine, ...]:
    """Idle intervals with so many blocks in use, and work between them."""
    return tuple(page for each in blocks for page in (*idle(each), *busy(readings=2)))


PROVEN = (*idle(0), *busy(), *idle(40))
BEFORE = counted(PROVEN, 50_000)


@pytest.mark.parametrize(
    ("pages", "status"),
    [
        pytest.param((holding(40, running=1), holding(40), holding(40, running=1)), "unknown", id="one idle sample"),
        pytest.param((*idle(0), *busy(40, 9)), "ok", id="requests that still run"),
        pytest.param((*idle(0), *busy(), holding(30), holding(20), holding(10)), "unknown", id="not settled"),
        pytest.param((*idle(0), *busy(), holding(30), holding(34)), "fault", id="rising while idle"),
        pytest.param((*busy(40), holding(0), holding(4)), "unknown", id="first blocks of an idle pool"),
        pytest.param(floors(500, 0, 20, 40), "fault", id="a new leak after the pool was empty"),
        pytest.param(PROVEN, "fault", id="in use at the end"),
        pytest.param((*PROVEN, *busy(readings=60)), "fault", id="work since"),
        pytest.param((*PROVEN, *busy(), holding(90), holding(70)), "fault", id="idle too short"),
        pytest.param((*PROVEN, *busy(), *idle(52), *busy(), *idle(47)), "fault", id="some of the later ones released"),
        pytest.param((*PROVEN, *busy(), holding(70), holding(20)), "unknown", id="fewer, not settled"),
        pytest.param((*PROVEN, *busy(), *idle(12)), "unknown", id="fewer"),
        pytest.param((*PROVEN, *busy(), *idle(0), *busy()), "ok", id="none"),
        pytest.param((*PROVEN, *busy(), holding(40)), "fault", id="one sample, as many"),
        pytest.param((*PROVEN, *busy(), holding(0)), "fault", id="one sample, none"),
        pytest.param((*PROVEN, *busy(), holding(90), holding(41), holding(40)), "fault", id="as many at the end"),
        pytest.param((*PROVEN, *busy(), holding(90), holding(40), holding(39)), "unknown", id="fewer at the end"),
        pytest.param((*floors(0, 1), *busy(), holding(2), holding(1)), "fault", id="one block at the end"),
        pytest.param((*idle(0), *busy(), holding(9), holding(0)), "unknown", id="empty, falls to 0"),
        pytest.param((*idle(0), *busy(), holding(9), holding(1)), "unknown", id="empty, falls to 1"),
        pytest.param((*idle(0), *busy(), holding(0), holding(9)), "unknown", id="empty, rises"),
        pytest.param((*idle(0), *busy()), "ok", id="empty, no later sample"),
        pytest.param((*BEFORE, *counted(busy(), 0)), "unknown", id="a restart, busy since"),
        pytest.param((*BEFORE, *counted((*busy(), *idle(0)), 0)), "ok", id="a restart, idle and empty"),
        pytest.param((*BEFORE, *counted((*busy(), *idle(3)), 0)), "fault", id="a restart, leaking again"),
        pytest.param(floors(40, 39), "unknown", id="falls"),
        pytest.param(floors(40, 40), "fault", id="stands"),
        pytest.param(floors(40, 41), "fault", id="rises"),
        pytest.param(floors(40, 30, 35), "fault", id="falls, then rises"),
        pytest.param(floors(40, 30, 29), "unknown", id="falls twice"),
        pytest.param(floors(40, 0, 20), "fault", id="empty, then rises"),
        pytest.param(floors(40, 0, 20, 19), "unknown", id="empty, rises, falls"),
        pytest.param(floors(0, 20), "fault", id="rises from empty"),
    ],
)
def test_idle_intervals_get_their_status(pages: tuple[Engine, ...], status: str) -> None:
    """What an idle interval proved stands until another one, or a restart, refutes it. A floor that only falls since
    the pool was empty is being released; one that stands, or rises again, is not.
    """
    assert status == verdict(seen(*pages)).status


def test_without_requests_of_our_own_the_engines_counter_gives_rate_and_room() -> None:
    """40 requests of other clients between two floors, four blocks each: 1,496 more until the pool of 6,144 is full."""
    pages = [replace(page, requests_finished_total=100) for page in idle(0)]
    pages += [replace(page, requests_finished_total=120) for page in busy()]
    pages += [replace(page, requests_finished_total=140) for page in idle(160)]
    found = verdict(seen(*pages))
    between = next(one for one in found.evidence if one.name == "requests_between")
    assert ("fault", 40, "engine", 1496) == (
        found.status,
        between.value,
        between.source,
        evidence(found)["requests_until_pool_full"],
    )
    for uncounted in ([*pages[:-1], replace(pages[-1], requests_finished_total=None)], [*idle(0), *pages[2:]]):
        assert evidence(verdict(seen(*uncounted)))["requests_until_pool_full"] is None


def test_growth_is_that_since_the_pool_was_last_empty() -> None:
    """40 blocks of 2 MiB in 0.8 s, 30 of them in the first half; the 6,104 that are free last 122 s at that rate."""
    growth = verdict(seen(*floors(500, 0, 30, 40))).growth
    assert growth is not None
    rates = (growth.low_bytes_per_second, growth.bytes_per_second, growth.high_bytes_per_second)
    lasts = (growth.exhaustion_low_seconds, growth.exhaustion_seconds, growth.exhaustion_high_seconds)
    assert [50 * MIB, 100 * MIB, 150 * MIB] == pytest.approx(rates)
    assert [81.387, 122.08, 244.16] == pytest.approx(lasts, abs=0.01)
    assert "+352 GiB/h, full in 2 min" in verdict(seen(*floors(500, 0, 30, 40))).summary


def test_growth_that_went_back_has_no_slowest_rate() -> None:
    """So that nothing says when the pool is full at the latest; the fastest is that up to the third of five floors."""
    growth = verdict(seen(*floors(50, 40, 60, 40, 55))).growth
    assert growth is not None
    assert (0.0, None) == (growth.low_bytes_per_second, growth.exhaustion_high_seconds)
    assert pytest.approx(5 * 2 * MIB / 1.6) == growth.bytes_per_second
    assert pytest.approx(25 * MIB) == growth.high_bytes_per_second


@pytest.mark.parametrize(
    "timeline",
    [
        pytest.param(seen(*floors(0, 40)), id="two idle intervals"),
        pytest.param(seen(*floors(40, 30, 35)), id="fewer than at first"),
        pytest.param(seen(*floors(40, 40, 40, 40)), id="as many as at first"),
        pytest.param(run(World(leaked_blocks_per_request=4)), id="the load of test steps"),
    ],
)
def test_growth_that_is_not_known_is_left_out(timeline: Timeline) -> None:
    """The leak is a fault all the same."""
    actual = verdict(timeline)
    assert ("fault", None) == (actual.status, actual.growth)


def test_blocks_of_all_engines_count_where_each_reports_its_pool() -> None:
    """One engine's leak is not hidden by the other's empty pool; without the second's pool the sum is unknown."""
    pages = ((engine(), engine(label="1", usage=3 / 6144)),) * 2
    found = [verdict(seen(*pages), of).status for of in (Facts(pools=(pool("0"), pool("1"))), ONE_POOL)]
    assert ["fault", "unknown"] == found
    assert 30 == evidence(verdict(seen(*idle(0), *busy(), holding(30), holding(34))))["blocks_at_last_idle"]


@pytest.mark.parametrize(
    ("tokens", "status"),
    [pytest.param(480, "ok", id="all"), pytest.param(464, "unknown", id="some"), pytest.param(None, "unknown", id="?")],
)
def test_blocks_that_open_sessions_hold_are_no_leak(tokens: int | None, status: str) -> None:
    """Of SGLang's streaming sessions; they also lock cached blocks, which nothing reports: no fault, but unknown."""
    held = replace(holding(30), open_sessions=1, session_held_tokens=tokens)
    assert status == verdict(seen(held, held)).status


def test_a_session_is_open_in_every_data_parallel_engine() -> None:
    """SGLang opens each in all of them, and one of them holds its tokens."""
    pages = [(replace(holding(30), open_sessions=4), replace(engine(label="1"), open_sessions=4))] * 2
    timeline, both = seen(*pages), Facts(pools=(pool("0"), pool("1")))
    (floor,) = idle_floors(timeline, both, DEFAULT_LIMITS)
    assert 4 == open_sessions(timeline, floor, both)[0]


@pytest.mark.parametrize(
    ("slots", "sessions", "status"), [(2, 0, "fault"), (2, 1, "unknown"), (0, 0, "ok"), (None, 0, "ok")]
)
def test_state_slots_that_stay_in_use_are_a_leak(slots: int | None, sessions: int, status: str) -> None:
    """The slots of recurrent layers are a pool of their own: the KV pool is empty meanwhile."""
    kept = replace(holding(0), state_slots_used=slots, open_sessions=sessions)
    assert status == verdict(seen(kept, kept)).status


@pytest.mark.parametrize(("slots", "status"), [(None, "unknown"), (0, "ok")])
def test_state_slots_of_an_earlier_idle_interval_are_not_still_in_use(slots: int | None, status: str) -> None:
    """The last interval counts: where it does not show the slots, the earlier count decides nothing."""
    kept, last = replace(holding(0), state_slots_used=2), replace(holding(0), state_slots_used=slots)
    assert status == verdict(seen(kept, kept, *busy(), last, last)).status


def test_figures_that_are_not_known_are_left_out() -> None:
    """Blocks in use from the start on have no rate; a pool whose bytes are not reported has its leak in blocks."""
    without_rate, without_size = (
        verdict(run(world), facts(world))
        for world in (
            World(held_at_start_blocks=50),
            World(pools=(pool(pool_bytes=None),), leaked_blocks_per_request=1),
        )
    )
    assert ("fault", "fault") == (without_rate.status, without_size.status)
    assert evidence(without_rate)["requests_until_pool_full"] is None
    assert evidence(without_size)["leaked"] is None


def test_the_servers_own_start_tells_of_a_restart() -> None:
    """Where no counter is read, the moment at which the process began does."""
    # Samples at seconds 1 to 11, of a process that started at 10
    timeline = seen(*PROVEN, *busy(readings=2))
    assert "unknown" == verdict(timeline, replace(ONE_POOL, started_seconds=timeline.samples[-2].at_seconds)).status


def test_readings_of_the_devices_end_no_idle_stretch() -> None:
    """Samples of devices between two of the engine do not split an idle interval."""
    found = finding(judged(), "leak.kv_blocks")
    # Each idle time is one interval: before the warm-up requests, and around each of ten loads
    assert 12 == evidence(found)["idle_intervals"]


def late(*holds: tuple[int, int]) -> list[Engine]:
    """Work, then so many blocks that stay in use for so many half minutes, again and again."""
    return [page for blocks, ticks in holds for page in (*busy(readings=2), *[holding(blocks)] * (ticks + 1), *idle(0))]


@pytest.mark.parametrize(
    ("holds", "status"),
    [
        (((1_536, 4), (1_536, 4)), "fault"),
        (((1_536, 4), (1_535, 4)), "suspect"),
        (((1_536, 4),), "suspect"),
        (((1_536, 4), (200, 4), (1_536, 4)), "fault"),
        (((3_072, 17), (3_072, 17)), "fault"),
        (((3_072, 1),), "ok"),
        (((60, 17),), "ok"),
    ],
    ids=["a quarter twice", "a block less", "once", "a small one between", "half twice", "for half a minute", "few"],
)
def test_a_quarter_of_the_pool_twice_is_how_the_server_works(holds: tuple[tuple[int, int], ...], status: str) -> None:
    """Once may be a peer that was lost; 1,536 of 6,144 blocks are a quarter. A transfer takes seconds."""
    assert status == of_readings(*late(*holds)).status


CONNECTED = replace(ONE_POOL, kv_connector="MooncakeConnector")


@pytest.mark.parametrize(
    ("holds", "status"),
    [
        (((3_072, 9), (3_072, 9)), "suspect"),
        (((3_072, 15), (3_072, 15)), "suspect"),
        (((3_072, 16), (3_072, 16)), "fault"),
    ],
    ids=["for 270 s", "a tick before the timeout", "by the timeout"],
)
def test_a_connector_may_hold_until_its_timeout(holds: tuple[tuple[int, int], ...], status: str) -> None:
    """A disaggregated prefill holds blocks until they are fetched; what the timeout of 480 s freed was not."""
    assert status == verdict(every_half_minute(*late(*holds)), CONNECTED).status


@pytest.mark.parametrize(
    ("ticks", "status", "without"), [(9, "suspect", "fault"), (15, "suspect", "fault"), (16, "fault", "fault")]
)
def test_blocks_that_a_connector_may_hold_are_suspect(ticks: int, status: str, without: str) -> None:
    """Until its timeout has passed on an idle server; without a connector nothing may hold them."""
    pages = (*idle(0), *busy(readings=2), *[holding(40)] * (ticks + 1))
    assert status == verdict(every_half_minute(*pages), CONNECTED).status
    assert without == verdict(every_half_minute(*pages), ONE_POOL).status


def test_a_connectors_timeout_counts_from_the_last_work() -> None:
    """The timeout counts from the last busy sample, or from the first sample if none is busy."""
    held = [holding(40)] * 9
    found = [every_half_minute(*each) for each in ([*held, *held[:8]], [*held, *held[:7]], [*held, *busy(), *held])]
    assert ["fault", "suspect", "suspect"] == [verdict(each, CONNECTED).status for each in found]


def test_late_frees_have_their_figures() -> None:
    """The longest and the most of them, which need not be the same; blocks under load are no late ones."""
    assert "ok" == of_readings(*busy(3072, 30), *idle(0), engine()).status
    actual = of_readings(*late((1_536, 4), (768, 10)))
    assert "suspect" == actual.status
    assert "idle, 2 times;" in actual.summary
    assert "idle, once;" in of_readings(*late((1_536, 4))).summary
    assert [
        ("idle_intervals", 2, "intervals", "engine"),
        ("blocks_at_first_idle", 0, "blocks", "engine"),
        ("blocks_at_last_idle", 0, "blocks", "engine"),
        ("requests_between", None, "requests", "engine"),
        ("late_frees", 2, "times", "engine"),
        ("longest_late_free", 300.0, "seconds", "engine"),
        ("max_blocks_freed_late", 1_536, "blocks", "engine"),
        ("max_late_ratio", 0.25, "ratio", "engine"),
    ] == rows(actual)


def of_readings(*pages: Engine) -> Finding:
    """The rule's one finding on them."""
    return verdict(every_half_minute(*pages))
