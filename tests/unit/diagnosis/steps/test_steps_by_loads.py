"""The steps that offer loads, on loads of known tokens: to the block."""

from collections.abc import Callable

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import CONCURRENT, LONG_CONTEXT, SINGLE_REQUEST, Step
from kvdiag.model import Facts, StepResult
from tests.builders.answers import ANY_TEXT, containing
from tests.builders.runs import step_result
from tests.builders.values import OOM, pool
from tests.builders.worlds import SMALL_POOL, World
from tests.unit.diagnosis.steps.successive_loads import Offered, timeline

KNOWN = Facts(pools=(pool(max_concurrency=None),))


def single(*offered: Offered) -> StepResult:
    """The result of the step of single requests."""
    return SINGLE_REQUEST.judge(timeline("single_request", offered), KNOWN, DEFAULT_LIMITS)


def long(*offered: Offered) -> StepResult:
    """The result of the step of the long context."""
    return LONG_CONTEXT.judge(timeline("long_context", offered), KNOWN, DEFAULT_LIMITS)


FITS = Offered(held=10)
"""160 tokens in ten blocks of 16."""


def test_a_single_cycle_is_judged_itself() -> None:
    """There is none after the first, and the first says more than nothing."""
    actual = single(Offered(held=10, notes=("once",)))
    assert ("ok", ANY_TEXT, ("once",)) == (actual.status, actual.summary, actual.notes)
    assert (1, 1.0) == (actual.measured.cycles_judged, actual.measured.smallest_detectable_leak)
    assert containing("4 each") == single(Offered(held=10, after=4)).summary
    assert containing("2 each") == single(FITS, FITS, Offered(held=10, after=4)).summary


def test_the_first_of_several_cycles_is_left_out() -> None:
    """What stays behind of it, and what it held too much, is first touch."""
    actual = single(Offered(held=30, after=5), Offered(held=15, before=5, after=5), Offered(held=15, before=5, after=5))
    found = actual.measured
    assert ("ok", 0, 2, 0.5) == (actual.status, found.blocks_kept, found.cycles_judged, found.smallest_detectable_leak)


def test_of_two_cycles_the_second_is_judged() -> None:
    """What the first held too much is first touch."""
    actual = single(Offered(held=30), FITS)
    assert ("ok", 1) == (actual.status, actual.measured.cycles_judged)


def test_a_pool_that_does_not_settle_after_the_last_load_is_unknown() -> None:
    """Blocks still being freed when the samples end make the step unknown, with the last load's notes."""
    actual = single(
        FITS, FITS, Offered(held=10, notes=("third",)), Offered(held=10, after=4, settles=False, notes=("last",))
    )
    assert ("unknown", ("last",)) == (actual.status, actual.notes)


@pytest.mark.parametrize(("after", "status"), [(6, "fault"), (5, "ok"), (4, "ok")])
def test_what_is_kept_is_counted_from_before_the_first_judged_load(after: int, status: str) -> None:
    """With five blocks held before the first judged load, six after the last are one too many; five or four are ok."""
    middle = Offered(held=15, before=5, after=5)
    actual = single(FITS, middle, middle, Offered(held=15, before=5, after=after))
    assert (status, after - 5) == (actual.status, actual.measured.blocks_kept)
    assert 0 == actual.expected.blocks_kept


@pytest.mark.parametrize(("held", "worst"), [((12, 7), 7), ((7, 12), 7), ((13, 8), 13), ((8, 13), 13)])
def test_the_cycle_that_is_furthest_off_is_reported(held: tuple[int, int], worst: int) -> None:
    """Of two too many and three too few the latter, of three too many and two too few the former."""
    actual = single(FITS, *(Offered(held=blocks) for blocks in held))
    assert (worst, 10) == (actual.measured.blocks, actual.expected.blocks)


def test_cycles_that_were_not_observed_count_between_those_that_were() -> None:
    """Unobserved cycles count for the detection limit if they lie between observed ones, and not otherwise."""
    unseen = Offered(held=10, seen=1)
    actual = single(FITS, unseen, FITS, unseen, Offered(held=10, after=2), unseen)
    assert (2, 0.333) == (actual.measured.cycles_judged, actual.measured.smallest_detectable_leak)


def test_cycles_of_which_none_was_observed_tell_the_first_reason() -> None:
    """A failed and an unobserved cycle make the step unknown, with the notes of the last."""
    actual = single(FITS, Offered(held=10, failed=1), Offered(held=10, seen=0, notes=("last",)))
    assert ("unknown", ("last",)) == (actual.status, actual.notes)
    assert ("single_request", ()) == (single().id, single().notes)


def test_a_long_request_must_never_hold_more_than_at_its_end() -> None:
    """A block more on the way is the next one; two are a suspect, as a duplicate or a leak that was released."""
    results = [long(Offered(held=10, on_the_way=blocks)) for blocks in (4, 11, 12)]
    assert ["ok", "ok", "suspect"] == [one.status for one in results]
    assert [10, 11, 12] == [one.measured.highest_blocks for one in results]
    assert [10, 10, 10] == [one.expected.highest_blocks for one in results]


def test_a_long_request_that_holds_far_too_much_is_a_fault_whatever_its_growth() -> None:
    """Sixteen blocks for ten, linear or not; its notes stay."""
    found = [long(Offered(held=16, on_the_way=blocks, notes=("longer",))) for blocks in (None, 30)]
    assert [("fault", ("longer",))] * 2 == [(one.status, one.notes) for one in found]


LOADS = (SINGLE_REQUEST, CONCURRENT, LONG_CONTEXT)


@pytest.mark.parametrize("step", LOADS, ids=lambda step: step.id)
@pytest.mark.parametrize(
    "world_of",
    [
        pytest.param(lambda step: World(unseen=(step,)), id="not observed"),
        pytest.param(lambda step: World(cut_short_in=step), id="cut short"),
        pytest.param(lambda step: World(lost_in=step), id="server lost"),
        pytest.param(lambda step: World(other_prompt_tokens={step: 1}), id="other prompts"),
        pytest.param(lambda step: World(passing=(step,)), id="a passing request"),
        pytest.param(lambda _: World(busy=True), id="other traffic"),
        pytest.param(lambda step: World(failing={step: "HTTP 503: full"}), id="requests failed"),
        pytest.param(lambda _: World(pools=()), id="no pool"),
        pytest.param(lambda _: World(pools=(pool(max_concurrency=9.0),)), id="curve not known"),
        pytest.param(lambda _: World(usage_reported=False), id="no usage"),
    ],
)
def test_a_load_that_cannot_be_judged_is_unknown(step: Step, world_of: Callable[[str], World]) -> None:
    """Never a fault, and with nothing but the reason."""
    world = world_of(step.id)
    actual = step_result(step, world)
    assert StepResult(id=step.id, status="unknown", summary=ANY_TEXT) == actual


WINDOW, BOTH = (pool(sliding_window_tokens=1024),), (pool("0"), pool("1"))


@pytest.mark.parametrize(
    ("step", "world", "status"),
    [
        *(
            pytest.param(step, World(extra_blocks_per_request=extra), status, id=f"{step.id}, {extra} more")
            for step, cases in zip(
                LOADS,
                (
                    {0: "ok", 1: "ok", 2: "suspect", 19: "suspect", 21: "fault", 100: "fault", -20: "suspect"},
                    {1: "ok", 2: "suspect", 71: "suspect", 72: "fault"},
                    {1: "ok", 2: "suspect", 600: "fault"},
                ),
                strict=True,
            )
            for extra, status in cases.items()
        ),
        pytest.param(SINGLE_REQUEST, World(failing={"single_request": OOM}), "unknown", id="single, out of memory"),
        pytest.param(CONCURRENT, World(failing={"concurrent": OOM}), "fault", id="concurrent, out of memory"),
        pytest.param(LONG_CONTEXT, World(failing={"long_context": OOM}), "fault", id="long, out of memory"),
        pytest.param(SINGLE_REQUEST, World(pools=(pool(sliding_window_tokens=256),)), "ok", id="single, a window"),
        pytest.param(CONCURRENT, World(pools=WINDOW), "ok", id="concurrent, a window"),
        pytest.param(LONG_CONTEXT, World(pools=BOTH, gpus=2), "ok", id="long, two engines"),
        pytest.param(
            CONCURRENT,
            World(pools=(SMALL_POOL,), max_model_len_tokens=17_600, resident_at_once=7),
            "unknown",
            id="concurrent, never together",
        ),
    ],
)
def test_loads_get_their_status(step: Step, world: World, status: str) -> None:
    """39, 143 and 1,031 blocks a request are needed: one more is the tolerance, half as much again a fault. Blocks
    outgrown by a window are freed a step late, so both counts are right.
    """
    assert status == step_result(step, world).status


@pytest.mark.parametrize(
    ("step", "identity", "offered"),
    [
        (SINGLE_REQUEST, ("single_request", 8), (1, 512, 128, 0.5)),
        (CONCURRENT, ("concurrent", 1), (10, 2_048, 256, 2.0)),
        (LONG_CONTEXT, ("long_context", 1), (1, 16_384, 128, 1.5)),
    ],
    ids=["single", "concurrent", "long"],
)
def test_what_the_steps_offer(step: Step, identity: tuple[str, int], offered: tuple[float, ...]) -> None:
    """The steps offer one request of 512 tokens eight times, ten of 2,048 at once, and one of 16,384."""
    workload = step.workload
    assert identity == (step.id, step.cycles)
    assert offered == (workload.requests, workload.prompt_tokens, workload.max_tokens, workload.hold_seconds)
