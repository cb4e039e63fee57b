"""capacity.concurrency: queues, the work behind them, and the room for requests, at the thresholds."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules.capacity_concurrency import judge
from kvdiag.model import Capabilities, Engine, Facts, Finding, KvPool, Mark, Outcome, Timeline, Workload
from tests.builders.answers import evidence, only, rows
from tests.builders.runs import run
from tests.builders.values import NO_ANSWER, engine, holding, pool, seen
from tests.builders.worlds import SMALL_POOL, World, facts

ONE_POOL = Facts(pools=(pool(),))
FULL = World(pools=(SMALL_POOL,), max_model_len_tokens=17_600, resident_at_once=7)


def verdict(timeline: Timeline, of: Facts = ONE_POOL) -> Finding:
    """The rule's one finding."""
    return only(judge, timeline, of)


def test_requests_that_push_one_another_out_are_a_fault() -> None:
    """Preemptions are counted, and set against how many of the step's requests the pool holds."""
    world = replace(FULL, preemptions=5)
    actual = verdict(run(world), facts(world))
    assert ("capacity.concurrency", "fault") == (actual.id, actual.status)
    assert [
        ("preemptions", 5, "times", "engine"),
        ("max_waiting", 3, "requests", "engine"),
        ("max_running", 7, "requests", "engine"),
        ("max_usage", 1099 / 1100, "ratio", "engine"),
        ("capacity", 17_584, "tokens", "engine"),
    ] == rows(actual)


HUNDRED = Facts(pools=(pool(usable_blocks=100),))
BOTH = Facts(pools=(pool("0"), pool("1")))
FULL_AND_EMPTY = Facts(pools=(pool("0", usable_blocks=100), pool("1")))
BEHIND_A_PREFILL = Facts(pools=(pool(usable_blocks=159),))
"""A pool in which requests queue for their turn to be computed (observed on 0.32)."""
LONG = Facts(pools=(pool(usable_blocks=2048),))
"""32,768 tokens, of which three of eight 8K requests take 80 %."""


def held(of: Facts, blocks: int, *, running: int = 3, waiting: int = 0) -> Engine:
    """An engine with so many of its first pool's blocks in use."""
    return holding(blocks, of=of.pools[0], running=running, waiting=waiting)


def preempted(*counts: int) -> Timeline:
    """Two requests that use 0.9 of the pool, with these preemption counts."""
    return seen(*(engine(usage=0.9, running=2, preemptions=count) for count in counts))


ONE, SHORT = held(HUNDRED, 99, running=4), held(HUNDRED, 99, waiting=1)
IN_PREFILL = replace(held(BEHIND_A_PREFILL, 49, waiting=7), requests_waiting_for_capacity=7)
OTHER = engine(label="9", running=1)
"""Another engine's request, so that two run at the same time."""


@pytest.mark.parametrize(
    ("timeline", "of", "status"),
    [
        pytest.param(run(FULL), facts(FULL), "suspect", id="three wait for seven"),
        pytest.param(seen(NO_ANSWER, NO_ANSWER), ONE_POOL, "unknown", id="no answer"),
        pytest.param(seen(engine(preemptions=None), engine(preemptions=None)), ONE_POOL, "unknown", id="no counter"),
        pytest.param(seen(*[engine()] * 9), ONE_POOL, "unknown", id="idle"),
        pytest.param(seen(*[holding(40, running=1)] * 9), ONE_POOL, "unknown", id="one request"),
        pytest.param(run(World(cut_short_in="single_request")), ONE_POOL, "unknown", id="stopped before the step"),
        pytest.param(seen(*[IN_PREFILL] * 20), BEHIND_A_PREFILL, "ok", id="room, whatever the engine's reason says"),
        pytest.param(seen(*[held(LONG, 1638, waiting=5)] * 3), LONG, "suspect", id="full at a usage of 80 %"),
        pytest.param(seen(SHORT, SHORT, ONE, SHORT, SHORT, ONE), HUNDRED, "ok", id="waits of two samples"),
        pytest.param(
            seen(*[(held(FULL_AND_EMPTY, 99, waiting=2), engine(label="1"))] * 3),
            FULL_AND_EMPTY,
            "suspect",
            id="one full engine beside an empty one",
        ),
        pytest.param(seen(*[engine(usage=None, running=2, waiting=4)] * 3), Facts(), "unknown", id="no pool, no usage"),
        pytest.param(seen(*[engine(usage=1.0, running=0, waiting=4)] * 3), ONE_POOL, "unknown", id="none runs"),
        *(
            pytest.param(
                seen(*[(held(HUNDRED, blocks, running=running, waiting=2), OTHER)] * 3),
                HUNDRED,
                status,
                id=f"{blocks} blocks of {running}",
            )
            for blocks, running, status in ((75, 3, "ok"), (76, 3, "suspect"), (50, 1, "ok"), (51, 1, "suspect"))
        ),
        pytest.param(preempted(0), ONE_POOL, "unknown", id="one page"),
        pytest.param(preempted(0, 0), ONE_POOL, "ok", id="two pages"),
        pytest.param(seen(engine(running=2), NO_ANSWER, NO_ANSWER), ONE_POOL, "unknown", id="one page and gaps"),
        pytest.param(
            seen(engine(running=1), engine(running=2, preemptions=None), engine(running=1)),
            ONE_POOL,
            "ok",
            id="one uncounted",
        ),
        pytest.param(seen(*[engine(running=1)] * 2), ONE_POOL, "unknown", id="one runs"),
        pytest.param(seen(*[(engine(running=1), engine(running=1, label="1"))] * 2), ONE_POOL, "ok", id="on two"),
        pytest.param(
            seen(*[(engine(running=9), engine(running=1, label="1", preemptions=None))] * 9),
            ONE_POOL,
            "unknown",
            id="one of two uncounted",
        ),
    ],
)
def test_samples_get_their_status(timeline: Timeline, of: Facts, status: str) -> None:
    """A wait counts only where one more request of the mean size has no room: with 75 of 100 blocks held by three it
    has, with 76 it has not. Two samples that count, and two requests at once, are needed to call it well.
    """
    assert status == verdict(timeline, of).status


SECOND = engine(usage=0.9, label="1", running=2, preemptions=50)
FIRST = engine(usage=0.9, running=2, preemptions=3)


@pytest.mark.parametrize(
    ("timeline", "of", "expected"),
    [
        pytest.param(preempted(50, 50, 0, 0, 0), ONE_POOL, ("ok", 0), id="a restart"),
        pytest.param(preempted(50, 50, 0, 1, 2), ONE_POOL, ("fault", 2), id="after a restart"),
        pytest.param(seen((FIRST, SECOND), (FIRST,), (FIRST, SECOND)), BOTH, ("ok", 0), id="missing from one page"),
        pytest.param(
            seen((FIRST, SECOND), *[tuple(replace(one, preemptions_total=51) for one in (FIRST, SECOND))] * 2),
            BOTH,
            ("fault", 49),
            id="of both engines",
        ),
        pytest.param(run(), facts(World()), ("ok", 0), id="room for all ten"),
    ],
)
def test_preemptions_are_counted_by_engine_and_from_0_after_a_restart(
    timeline: Timeline, of: Facts, expected: tuple[str, int]
) -> None:
    """Each engine's counter is compared with its own; all of them are added up."""
    actual = verdict(timeline, of)
    assert expected == (actual.status, evidence(actual)["preemptions"])


def stopped(*usages: float, running: int = 4, of: Facts = ONE_POOL) -> Finding:
    """Requests that stay as they are, but that each sample counts four more preemptions."""
    pages = [engine(usage=usage, running=running, preemptions=4 * at) for at, usage in enumerate(usages)]
    return verdict(seen(*pages), of)


@pytest.mark.parametrize(
    ("usages", "running", "status"),
    [
        pytest.param((0.1, 0.1), 4, "ok", id="paused and resumed"),
        pytest.param((0.74, 0.74), 20, "ok", id="three quarters in use"),
        pytest.param((0.75, 0.75), 20, "fault", id="a quarter is free"),
        pytest.param((0.5, 0.5), 2, "fault", id="no more than twice a request is free"),
        pytest.param((0.69, 0.75), 4, "ok", id="all that ran, with room for one more"),
        pytest.param((0.69, 0.75), 5, "fault", id="all but one"),
        pytest.param((0.69, 0.81), 4, "fault", id="all that ran, without room for one more"),
        pytest.param((0.9, 0.1), 4, "fault", id="full before"),
        pytest.param((0.1, 0.9), 4, "fault", id="full after"),
        pytest.param((0.0, 0.0), 0, "fault", id="a burst between two samples"),
    ],
)
def test_a_preemption_with_room_is_a_pause(usages: tuple[float, ...], running: int, status: str) -> None:
    """VLLM preempts all that runs when paused with `mode=keep` or at a cache reset, however empty its pool is."""
    actual = stopped(*usages, running=running)
    counts = (0, 4) if status == "ok" else (4, None)
    figures = evidence(actual)
    assert (status, *counts) == (actual.status, figures["preemptions"], figures.get("preemptions_with_room"))


@pytest.mark.parametrize(
    ("after", "status"),
    [
        pytest.param([(0.0, 0, 4)], "ok", id="all have ended since"),
        pytest.param([(0.56, 4, 3), (0.69, 4, 4), (0.21, 1, 4)], "ok", id="counted over two samples"),
        pytest.param([(0.69, 4, 3), (0.69, 4, 3), (0.69, 4, 4)], "fault", id="not at once"),
        pytest.param([(0.69, 4, 4), (0.69, 4, 8)], "fault", id="again and again"),
    ],
)
def test_a_reset_preempts_all_that_runs_at_once(after: list[tuple[float, int, int]], status: str) -> None:
    """The counter of a paused engine stands still until it runs again; measured on vLLM 0.32 at 69 % of its pool."""
    pages = [engine(usage=usage, running=running, preemptions=count) for usage, running, count in after]
    assert status == verdict(seen(engine(usage=0.69, running=4), *pages), ONE_POOL).status


def test_engine_that_answered_once_lacks_its_counter() -> None:
    """What the one answer lacks is the reason, not the gaps after it."""
    assert "report preemptions" in verdict(seen(engine(running=2), NO_ANSWER)).summary


def test_where_the_pool_is_unknown_every_preemption_counts() -> None:
    """Without its size nothing says that there was room."""
    assert "fault" == stopped(0.1, 0.1, of=Facts()).status


def test_a_step_of_ours_that_was_served_needs_no_reading_of_two_at_once() -> None:
    """Ten requests that were served are known to have been there, however few samples saw them."""
    workload = Workload(requests=10, prompt_tokens=2048, max_tokens=256)
    served, lost = (Outcome(completed=done, failed=10 - done, prompt_tokens=1, generated_tokens=1) for done in (10, 0))

    def of(outcome: Outcome | None, step: str = "concurrent") -> Finding:
        marks = (
            Mark(at_seconds=1_000.0, step=step, cycle=0, phase="offer", workload=workload),
            Mark(at_seconds=1_001.0, step=step, cycle=0, phase="release", outcome=outcome),
        )
        return verdict(replace(seen(*[engine()] * 4), marks=marks))

    assert ["ok", "unknown", "unknown", "unknown"] == [
        of(served).status,
        of(lost).status,
        of(None).status,
        of(served, step="long_context").status,
    ]


def test_what_a_waiting_queue_shows_is_reported_with_its_units() -> None:
    """Two engines: requests that run are added up, usage and queue are the highest, capacity is both pools'."""
    # 99 of 100 blocks held on one engine with 2 and then 5 waiting, and 10 on the other
    pools = (pool("0", usable_blocks=100), pool("1", usable_blocks=100))
    pages = [
        (holding(99, of=pools[0], running=3, waiting=waiting), replace(holding(10, of=pools[1], running=4), engine="1"))
        for waiting in (2, 5, 3)
    ]
    actual = verdict(seen(*pages), Facts(pools=pools))

    # 200 blocks of 16 tokens
    assert "suspect" == actual.status
    assert [
        ("preemptions", 0, "times", "engine"),
        ("max_waiting", 5, "requests", "engine"),
        ("max_running", 7, "requests", "engine"),
        ("max_usage", 0.99, "ratio", "engine"),
        ("capacity", 3_200, "tokens", "engine"),
        ("throughput_ratio_while_waiting", None, "ratio", "computed"),
    ] == rows(actual)


def test_a_wait_in_single_samples_is_no_queue() -> None:
    """The summary still names the requests that waited."""
    actual = verdict(seen(ONE, SHORT, ONE, SHORT, ONE), HUNDRED)
    assert ("ok", 1) == (actual.status, evidence(actual)["max_waiting"])
    assert actual.summary.startswith("up to 1 request waited")


def test_the_first_preemption_counts() -> None:
    """A counter that goes from 0 to 1 is one preemption; unreported usage and running requests count as 0."""
    pages = (engine(running=None, usage=None), engine(running=None, usage=None, preemptions=1))
    actual = verdict(seen(*pages))
    assert "fault" == actual.status
    assert {"preemptions": 1, "max_running": 0, "max_usage": 0.0}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    ("pools", "capacity", "told"),
    [
        ((pool(usable_blocks=100),), 1_600, "2 of kvdiag's 4"),
        ((pool(usable_blocks=96),), 1_536, "2 of kvdiag's 4"),
        ((pool(usable_blocks=95),), 1_520, "1 of kvdiag's 4"),
        ((pool(usable_blocks=900),), 14_400, "all 4"),
        ((pool(usable_blocks=48), pool("1", usable_blocks=143)), 3_056, "3 of kvdiag's 4"),
        ((pool(usable_blocks=100, sliding_window_tokens=64),), None, None),
        ((pool(usable_blocks=100), pool("1", usable_blocks=100, sliding_window_tokens=64)), None, None),
        ((), None, None),
    ],
    ids=["hundred blocks", "to the block", "one less", "all", "two engines", "windowed", "one windowed", "no pool"],
)
def test_how_many_of_our_requests_the_pools_hold(pools: tuple[KvPool, ...], capacity: int | None, told: str) -> None:
    """A request of 512 and 256 tokens stores 767, which are 48 blocks of 16. The null block holds none."""
    workload = Workload(requests=4, prompt_tokens=512, max_tokens=256)
    mark = Mark(at_seconds=1_000.0, step="concurrent", cycle=0, phase="offer", workload=workload)
    timeline = replace(seen(engine(), engine(preemptions=1)), marks=(mark,))
    actual = verdict(timeline, Facts(pools=pools))
    assert capacity == evidence(actual)["capacity"]
    assert told in actual.summary if told else "at full length" not in actual.summary


FINE, QUEUE = (
    replace(held(HUNDRED, blocks, waiting=waiting), preemptions_total=0) for blocks, waiting in ((60, 0), (99, 9))
)


UNSIZED = Facts(capabilities=Capabilities(blocks=False))


@pytest.mark.parametrize(
    ("waiting", "paused", "usage", "status"),
    [(0, 0, 0.5, "unknown"), (4, None, 0.95, "suspect"), (4, None, 0.1, "unknown"), (0, 2, 0.5, "suspect")],
)
def test_engines_that_count_no_preemptions_show_a_queue(
    waiting: int, paused: int | None, usage: float, status: str
) -> None:
    """A queue at a full share, or requests paused for lack of blocks; without these a run must show them together."""
    shown = replace(
        engine(usage=usage, running=4, waiting=waiting, preemptions=None), requests_waiting_for_capacity=paused
    )
    assert status == verdict(seen(*[shown] * 10), UNSIZED).status


def test_a_load_that_ran_together_was_not_preempted() -> None:
    """Without a counter of preemptions the run's own requests are the proof."""
    done = run(World())
    uncounted = replace(
        done,
        samples=tuple(
            replace(one, engines=one.engines and tuple(replace(e, preemptions_total=None) for e in one.engines))
            for one in done.samples
        ),
    )
    found = verdict(uncounted, facts(World()))
    assert ("ok", None) == (found.status, evidence(found)["preemptions"])


@pytest.mark.parametrize(("most", "status"), [(3, "ok"), (4, "suspect"), (None, "suspect")])
def test_a_queue_at_the_engines_own_limit_is_not_for_the_pool(most: int | None, status: str) -> None:
    """Three run in a pool without room for a fourth and two wait: by --max-num-seqs 3 that is how it was set up."""
    limited = Facts(pools=(replace(HUNDRED.pools[0], max_requests=most),))
    assert status == verdict(seen(*[held(HUNDRED, 90, waiting=2)] * 5), limited).status
