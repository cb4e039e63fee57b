"""leak.kv_blocks of engines whose idle figures show no leak: by what a run's loads fill, or only in a run."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.capacity_concurrency import judge as queued
from kvdiag.diagnosis.rules.capacity_long_context import judge as longest
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.diagnosis.steps import LONG_CONTEXT
from kvdiag.model import Capabilities, Finding, Status, Workload
from tests.builders.answers import evidence, only
from tests.builders.runs import run, step_result
from tests.builders.values import holding, pool, seen
from tests.builders.worlds import World, facts

CELLS = Capabilities(unit="cell", returns=False)
FULL = "Context size has been exceeded."
POOL_TOKENS = 16_384


def world(prompt_tokens: int = POOL_TOKENS - 128, **knobs: object) -> World:
    """A server with a pool of 16,384 cells, and a fourth step with a prompt of this length."""
    cells = pool(
        block_tokens=1, usable_blocks=POOL_TOKENS, pool_bytes=2**31, capacity_tokens=None, max_concurrency=None
    )
    filling = replace(LONG_CONTEXT.workload, prompt_tokens=prompt_tokens)
    few = {"concurrent": Workload(requests=4, prompt_tokens=256, max_tokens=128)}
    return World(pools=(cells,), workloads={LONG_CONTEXT.id: filling, **few}, **knobs)  # type: ignore[arg-type]


def verdict(of: World) -> Finding:
    """The rule's finding on a run against a world whose ended requests keep their cells."""
    return only(judge, run(of), replace(facts(of), capabilities=CELLS))


@pytest.mark.parametrize(
    ("of", "status", "filled", "refused"),
    [
        pytest.param(world(), "ok", POOL_TOKENS - 1, None, id="filled"),
        pytest.param(world(POOL_TOKENS - 1765), "ok", POOL_TOKENS - 1638, None, id="all but a tenth"),
        pytest.param(world(POOL_TOKENS - 1766), "unknown", POOL_TOKENS - 1639, None, id="less"),
        pytest.param(world(failing={"long_context": FULL}), "fault", 1532, POOL_TOKENS - 1, id="refused"),
        pytest.param(world(failing={"long_context": FULL}, forced=True), "unknown", 1532, POOL_TOKENS - 1, id="forced"),
        pytest.param(world(failing={"long_context": "timed out"}), "unknown", 1532, None, id="failed"),
    ],
)
def test_cells_that_are_a_cache_are_tested_by_filling_them(
    of: World, status: Status, filled: int, refused: int | None
) -> None:
    """Nothing is lost where the pool can be filled again; a load that fits and is refused proves what is lost."""
    actual = verdict(of)
    assert (status, filled, refused) == (
        actual.status,
        evidence(actual)["tokens_filled"],
        evidence(actual)["tokens_refused"],
    )


def test_requests_that_wait_though_they_fit_prove_what_is_lost() -> None:
    """As many ran at the same time before: what keeps them waiting is room, which is not released."""
    cells = pool(
        block_tokens=1, usable_blocks=POOL_TOKENS, pool_bytes=2**31, capacity_tokens=None, max_concurrency=None
    )
    loads = {
        "concurrent": Workload(requests=4, prompt_tokens=256, max_tokens=128),
        "long_context": Workload(requests=4, prompt_tokens=3968, max_tokens=128),
    }
    of = World(pools=(cells,), workloads=loads)
    waiting = run(replace(of, resident_at_once=3))
    ran, waited = (
        evidence(only(judge, timeline, replace(facts(of), capabilities=CELLS))) for timeline in (run(of), waiting)
    )
    assert (4 * 4095, None) == (ran["tokens_filled"], ran["tokens_refused"])
    assert waited["tokens_refused"] is None  # four never ran at the same time: it may be a limit of requests
    first = [sample for sample in run(of).samples if sample.at_seconds < waiting.spans("long_context")[0].begin_seconds]
    rest = [sample for sample in waiting.samples if sample.at_seconds >= waiting.spans("long_context")[0].begin_seconds]
    mixed = replace(waiting, samples=(*first, *rest))
    assert "fault" == only(judge, mixed, replace(facts(of), capabilities=CELLS)).status


@pytest.mark.parametrize("waits", [True, False])
def test_lost_cells_leave_no_line_that_says_otherwise(waits: bool) -> None:
    """The step that found no room is a fault, and whether requests beyond the pool wait is open until it is fixed."""
    of = world(failing={"long_context": FULL})
    known = replace(facts(of), capabilities=replace(CELLS, waits=waits))
    timeline = run(of)
    step = LONG_CONTEXT.judge(timeline, known, DEFAULT_LIMITS)
    assert ("fault", "unknown") == (step.status, only(queued, timeline, known).status)


def test_long_requests_that_completed_are_observed_one_by_one() -> None:
    """Those that fill a pool need not all have run at the same time."""
    of = replace(world(), resident_at_once=3)
    of = replace(of, workloads={"long_context": Workload(requests=4, prompt_tokens=3968, max_tokens=128)})
    known = replace(facts(of), capabilities=CELLS)
    assert "ok" == only(longest, run(of), known).status


def test_nothing_is_known_of_an_idle_pool_that_hides_or_delays() -> None:
    """Idle slots hide what is lost, and an old step's figures are no idle pool's: without a run both are unknown."""
    idle = seen(*(holding(blocks) for blocks in (0, 5, 9)))
    known = facts(world())
    for capabilities in (CELLS, Capabilities(on_completion=True)):
        assert "unknown" == only(judge, idle, replace(known, capabilities=capabilities)).status


def test_the_fourth_step_gives_what_it_leaves_unproven() -> None:
    """Its summary has the detection limit where lost cells are hidden, and nowhere else."""
    of = world()
    known = replace(facts(of), capabilities=CELLS)
    result = LONG_CONTEXT.judge(run(of), known, DEFAULT_LIMITS)
    assert ("ok", True) == (result.status, "1 cell" in result.summary)
    assert "cell" not in step_result(LONG_CONTEXT, of).summary


def test_a_run_allows_the_request_that_moved_the_gauges() -> None:
    """Figures of the last step before a request's end may show its blocks: these are no leak, more are."""
    late = Capabilities(on_completion=True)
    of = World()
    for blocks, status in ((2, "ok"), (3, "fault")):
        left = World(held_at_start_blocks=blocks)
        found = only(judge, run(left), replace(facts(of), capabilities=late))
        assert status == found.status


def test_prompts_that_are_sent_alone_leave_their_blocks_in_late_gauges() -> None:
    """The isolation probe sends nothing that moves the gauges after each prompt: what they show is no leak."""
    done = run(World(held_at_start_blocks=60))
    probed = replace(done, marks=tuple(replace(mark, step="isolation") for mark in done.marks))
    late = replace(facts(World()), capabilities=Capabilities(on_completion=True))
    assert "unknown" == only(judge, probed, late).status
