from dataclasses import replace
from functools import partial

from kvdiag.diagnosis.steps import SINGLE_REQUEST
from kvdiag.model import Quantity, StepResult, Timeline
from tests.builders.answers import ANY_TEXT, measured
from tests.builders.runs import run, step_result
from tests.builders.values import MIB, pool
from tests.builders.worlds import World

result = partial(step_result, SINGLE_REQUEST)


def test_blocks_that_match_and_come_back_are_ok() -> None:
    """Seven cycles after the first: 39 blocks for 624 tokens, none kept, and the smallest leak that would show."""
    actual = result(World())
    requests = Quantity(name="requests", value=1, unit="requests")
    tokens = Quantity(name="tokens", value=624, unit="tokens")
    blocks = Quantity(name="blocks", value=39, unit="blocks")
    size = Quantity(name="bytes", value=39 * 2 * MIB, unit="bytes")
    kept = Quantity(name="blocks_kept", value=0, unit="blocks")

    assert actual == StepResult(
        id="single_request",
        status="ok",
        summary=ANY_TEXT,
        expected=(requests, tokens, blocks, size, kept),
        measured=(
            requests,
            tokens,
            blocks,
            size,
            kept,
            Quantity(name="filled_ratio", value=1.0, unit="ratio"),
            Quantity(name="cycles_judged", value=7, unit="cycles"),
            Quantity(name="smallest_detectable_leak", value=0.143, unit="blocks per request"),
        ),
    )


def test_blocks_that_stay_behind_are_a_fault() -> None:
    """Four blocks kept by each of seven requests are counted."""
    actual = result(World(leaked_blocks_per_request=4))
    assert ("fault", 28) == (actual.status, measured(actual)["blocks_kept"])


def test_first_touch_in_the_first_cycle_is_not_judged() -> None:
    """What the first cycle leaves behind never comes back, and is no leak."""
    world = World(late_blocks=(0, 0, 5))
    actual = result(world)
    assert ("ok", 0) == (actual.status, measured(actual)["blocks_kept"])


def test_blocks_held_before_that_come_back_are_no_credit_and_no_fault() -> None:
    """Somebody's late blocks that are freed meanwhile make nothing wrong, and are told."""
    actual = result(World(late_blocks=(5, 5, 5, 5, 5, 5, 0)))
    assert ("ok", -5) == (actual.status, measured(actual)["blocks_kept"])


def test_one_cycle_that_went_wrong_is_left_out() -> None:
    """A single failed request does not spoil the cycles that were seen."""
    whole = run()
    marks = tuple(
        replace(mark, outcome=replace(mark.outcome, completed=0, failed=1, errors=("HTTP 500",)))
        if (mark.step, mark.cycle) == ("single_request", 3) and mark.outcome is not None
        else mark
        for mark in whole.marks
    )
    actual = result(World(), Timeline(samples=whole.samples, marks=marks))

    assert ("ok", 6) == (actual.status, measured(actual)["cycles_judged"])


def test_what_the_plan_changed_is_reported() -> None:
    """Notes of the plan, such as fewer cycles, come with the result."""
    notes = ("6 cycles instead of 8: a cycle takes longer on this server",)
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
    assert ("ok", 39, None) == (actual.status, measured(actual)["blocks"], measured(actual)["bytes"])


def test_requests_whose_load_was_not_observed_count_too() -> None:
    """Between the first judged cycle and the last each request may have left blocks, seen or not."""
    world = World(leaked_blocks_per_request=4)
    timeline = run(world)
    unseen = timeline.spans("single_request")[3:5]
    samples = tuple(
        sample
        for sample in timeline.samples
        if not any((span.offer_seconds or 0) <= sample.at_seconds <= (span.release_seconds or 0) for span in unseen)
    )

    actual = result(world, Timeline(samples=samples, marks=timeline.marks))

    assert (5, 0.143) == (measured(actual)["cycles_judged"], measured(actual)["smallest_detectable_leak"])
