from dataclasses import replace
from functools import partial

from kvdiag.diagnosis.steps import BASELINE, SINGLE_REQUEST
from kvdiag.diagnosis.timeline_queries import is_idle
from kvdiag.model import MeasuredFigures, Sample, StepFigures, StepResult, Timeline
from tests.builders.answers import ANY_TEXT
from tests.builders.runs import run, step_result
from tests.builders.soak_timeline import Seen, soak
from tests.builders.values import MIB, pool
from tests.builders.worlds import World

result = partial(step_result, SINGLE_REQUEST)


def test_blocks_that_match_and_come_back_are_ok() -> None:
    """Seven cycles are judged: 39 blocks for 624 tokens, none kept, and a detection limit of 0.143 blocks."""
    actual = result(World())
    same = {"requests": 1, "tokens": 624, "blocks": 39, "bytes": 39 * 2 * MIB}

    assert actual == StepResult(
        id="single_request",
        status="ok",
        summary=ANY_TEXT,
        expected=StepFigures(**same, blocks_kept=0),
        measured=MeasuredFigures(
            **same, blocks_kept=0, filled_ratio=1.0, cycles_judged=7, smallest_detectable_leak=0.143
        ),
    )


def test_blocks_that_stay_behind_are_a_fault() -> None:
    """Four blocks kept by each of seven requests are counted."""
    actual = result(World(leaked_blocks_per_request=4))
    assert ("fault", 28) == (actual.status, actual.measured.blocks_kept)


def with_slots(timeline: Timeline, kept_each: int, before: int = 0) -> Timeline:
    """The timeline of a hybrid model, each of whose requests left so many state slots in use, by idle samples alone."""
    ends = [mark.at_seconds for mark in timeline.marks if mark.phase == "release" and mark.step == "single_request"]

    def slots(sample: Sample) -> int | None:
        kept = sum(end <= sample.at_seconds for end in ends) * kept_each
        return before + kept if is_idle(sample) else None

    samples = (
        replace(one, engines=tuple(replace(each, state_slots_used=slots(one)) for each in one.engines))
        if one.engines
        else one
        for one in timeline.samples
    )
    return replace(timeline, samples=tuple(samples))


def test_state_slots_that_stay_behind_are_a_fault() -> None:
    """Two slots of each request stay in use, and all blocks are released; those before it are the baseline's."""
    timeline = run(World())
    for kept_each, before, status, at_start in ((2, 0, "fault", "ok"), (0, 3, "ok", "fault"), (0, 0, "ok", "ok")):
        slots = with_slots(timeline, kept_each, before)
        actual = result(World(), slots)
        assert (status, 0) == (actual.status, actual.measured.blocks_kept)
        assert at_start == step_result(BASELINE, World(), slots).status


def test_device_memory_that_grows_is_a_fault_and_not_where_a_soak_saw_it_stop() -> None:
    """By the judgement of the leak rules: six MiB of each request stay, and all blocks are released."""
    actual = result(World(device_growth_bytes=6 * MIB))
    assert ("fault", 0) == (actual.status, actual.measured.blocks_kept)
    grows, later = run(World(device_growth_bytes=6 * MIB)), soak(Seen())
    samples = tuple(replace(one, at_seconds=one.at_seconds + 1000.0) for one in later.samples)
    marks = tuple(replace(one, at_seconds=one.at_seconds + 1000.0) for one in later.marks)
    both = Timeline(samples=grows.samples + samples, marks=grows.marks + marks)
    assert result(World(), both).status == "ok"


def test_first_touch_in_the_first_cycle_is_not_judged() -> None:
    """Blocks that the first cycle leaves in use are first touch, and no leak."""
    world = World(late_blocks=(0, 0, 5))
    actual = result(world)
    assert ("ok", 0) == (actual.status, actual.measured.blocks_kept)


def test_blocks_held_before_that_come_back_are_no_credit_and_no_fault() -> None:
    """Late blocks of earlier requests that are freed meanwhile are no fault, and are reported as -5."""
    actual = result(World(late_blocks=(5, 5, 5, 5, 5, 5, 0)))
    assert ("ok", -5) == (actual.status, actual.measured.blocks_kept)


def test_one_cycle_that_went_wrong_is_left_out() -> None:
    """A single failed request leaves out its own cycle; the other six are judged."""
    whole = run()
    marks = tuple(
        replace(mark, outcome=replace(mark.outcome, completed=0, failed=1, errors=("HTTP 500",)))
        if (mark.step, mark.cycle) == ("single_request", 3) and mark.outcome is not None
        else mark
        for mark in whole.marks
    )
    actual = result(World(), Timeline(samples=whole.samples, marks=marks))

    assert ("ok", 6) == (actual.status, actual.measured.cycles_judged)


def test_what_the_plan_changed_is_reported() -> None:
    """Notes of the plan, such as fewer cycles, come with the result."""
    notes = ("6 cycles instead of 8",)
    # Once, and not once for each cycle
    assert notes == result(World(notes=notes)).notes


def test_two_engines_take_turns() -> None:
    """Data parallel: whichever engine takes the request, blocks are counted over both."""
    both = (pool("0"), pool("1"))
    assert ["ok", "fault"] == [
        result(World(pools=both, gpus=2, leaked_blocks_per_request=leaked)).status for leaked in (0, 1)
    ]


def test_an_engine_that_does_not_report_its_bytes_is_judged_in_blocks() -> None:
    """Sized by memory fraction on a GPU, vLLM reports no bytes: blocks are enough, bytes stay unknown."""
    actual = result(World(pools=(pool(pool_bytes=None),)))
    assert ("ok", 39, None) == (actual.status, actual.measured.blocks, actual.measured.bytes)
