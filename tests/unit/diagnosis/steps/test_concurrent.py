from functools import partial

from kvdiag.diagnosis.steps import CONCURRENT
from kvdiag.model import MeasuredFigures, StepFigures, StepResult, Timeline, Workload
from tests.builders.answers import ANY_TEXT
from tests.builders.runs import run, step_result
from tests.builders.values import MIB, pool
from tests.builders.worlds import World

result = partial(step_result, CONCURRENT)


def test_growth_that_matches_the_tokens_is_ok() -> None:
    """Ten requests with 22,880 tokens resident hold the 1,430 blocks that these need."""
    actual = result(World())
    same = {"requests": 10, "tokens": 22_880, "blocks": 1_430, "bytes": 1_430 * 2 * MIB}

    assert actual == StepResult(
        id="concurrent",
        status="ok",
        summary=ANY_TEXT,
        expected=StepFigures(**same),
        measured=MeasuredFigures(**same, filled_ratio=1.0, samples_of_whole_load=16),
    )


def test_a_leak_before_the_load_is_part_of_its_floor() -> None:
    """What earlier requests left behind is not counted against this load."""
    actual = result(World(leaked_blocks_per_request=4))
    assert ("ok", 1_430) == (actual.status, actual.measured.blocks)


def test_a_lead_in_that_did_not_settle_is_unknown() -> None:
    """Blocks released while the load begins would be subtracted from it, so the step is unknown."""
    world = World()
    whole = run(world)
    begin = next(mark.at_seconds for mark in whole.marks if mark.step == "concurrent")
    samples = tuple(
        sample for sample in whole.samples if sample.engines is None or not begin - 1 < sample.at_seconds < begin + 0.3
    )
    assert "unknown" == result(world, Timeline(samples=samples, marks=whole.marks)).status


def test_two_engines_hold_five_requests_each() -> None:
    """Data parallel: blocks and tokens of both engines are added up."""
    actual = result(World(pools=(pool("0"), pool("1")), gpus=2))
    assert ("ok", 1_430) == (actual.status, actual.measured.blocks)


def test_a_load_that_was_scaled_down_says_so() -> None:
    """What was changed to fit the server comes with the result."""
    # A server that admits 1,024 tokens
    note = "prompt scaled down to 768"
    small = Workload(requests=10, prompt_tokens=768, max_tokens=256)
    actual = result(World(workloads={"concurrent": small}, notes=(note,)))
    assert ("ok", (note,), 10_080) == (actual.status, actual.notes, actual.measured.tokens)


def test_a_load_that_was_offered_again_is_judged_where_it_was_observed() -> None:
    """The first load fell between two samples: the second, which lasts longer, counts."""
    fine, wasteful = (result(World(again=("concurrent",), extra_blocks_per_request=extra)) for extra in (0, 100))
    assert ("ok", "fault") == (fine.status, wasteful.status)
