"""Open requests for which the engine does nothing: how long, what they hold, and what is no stall."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.blocks.stall import Stall, stalled
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules import capacity_concurrency, leak_kv_blocks
from kvdiag.model import Capabilities, Engine, Facts, Sample, Timeline
from tests.builders.answers import evidence, only
from tests.builders.values import NO_ANSWER, holding, pool

SERVED = Facts(pools=(pool(),))
LIMIT = DEFAULT_LIMITS.stalled_seconds
IDLE, WORKS, STUCK = holding(0), holding(5, running=1), holding(9, running=1, waiting=2)


def over_time(*engines: Engine | None, tick_seconds: float = LIMIT / 4) -> Timeline:
    """Samples at equal intervals; `None` is one that failed."""
    samples = [
        Sample(at_seconds=tick_seconds * number, engines=(one,)) if one else Sample(
            at_seconds=tick_seconds * number, gaps=(NO_ANSWER,)
        )
        for number, one in enumerate(engines)
    ]  # fmt: skip
    return Timeline(samples=tuple(samples))


def found(engines: Sequence[Engine | None], facts: Facts = SERVED) -> Stall | None:
    """The stall of these samples."""
    return stalled(over_time(*engines), facts, DEFAULT_LIMITS)


def test_requests_without_progress_are_a_stall() -> None:
    """The requests, their blocks and the time since the last step; waiting clients may come and go meanwhile."""
    actual = found([IDLE, WORKS, *[replace(STUCK, requests_waiting=each) for each in (0, 1, 2, 3, 2)]])
    assert Stall(since_seconds=LIMIT / 2, seconds=LIMIT, running=1, waiting=2, blocks=9) == actual


@pytest.mark.parametrize(
    ("spare", "stuck", "longest", "tokens"),
    [(1, 0, 131_072, 6143 * 16), (0, 0, 131_072, None), (1, 3, 131_072, None), (1, 0, 8192, None)],
)
def test_a_request_that_is_never_admitted_is_named(spare: int, stuck: int, longest: int, tokens: int | None) -> None:
    """SGLang accepts a prompt that leaves less than a page free, and never runs it: nothing else is in the pool."""
    facts = replace(SERVED, capabilities=Capabilities(spare_blocks=spare), max_model_len_tokens=longest)
    actual = found([replace(holding(stuck), requests_waiting=1)] * 6, facts)
    assert actual is not None
    assert tokens == actual.admitted_tokens
    finding = actual.finding(capacity_concurrency.ID, "waits")
    assert (tokens is not None) == (f"{6143 * 16:,}" in finding.summary and "--max-model-len" in (finding.remedy or ""))


def test_a_read_that_failed_meanwhile_changes_nothing() -> None:
    """A tick without an answer is no step."""
    actual = found([STUCK, STUCK, None, STUCK, STUCK])
    assert actual is not None
    assert actual.seconds == LIMIT


@pytest.mark.parametrize(
    "engines",
    [
        [STUCK] * 4,
        [replace(STUCK, generation_tokens_total=number) for number in range(9)],
        [holding(9 + number, running=1) for number in range(9)],
        [holding(9)] * 9,
        [STUCK, IDLE, STUCK],
        [replace(STUCK, prompt_tokens_total=None)] * 9,
        [replace(STUCK, kv_usage_ratio=None)] * 9,
        [replace(STUCK, kv_usage_ratio=1.0)] * 9,
        [None] * 9,
    ],
    ids=["short", "tokens", "usage", "nothing open", "idle meanwhile", "no counters", "no usage", "full", "no answer"],
)
def test_no_stall(engines: Sequence[Engine | None]) -> None:
    """Less than the limit, a token or a block, an idle engine, or figures that are not reported."""
    assert found(engines) is None


def test_a_slot_that_stays_busy_is_a_stall_by_its_own_tokens() -> None:
    """llama.cpp's counters are missing in most samples: a slot's output tokens, and those counters there are, stand."""
    slot = replace(STUCK, prompt_tokens_total=None, generation_tokens_total=None, running_output_tokens=7)
    counted = replace(STUCK, running_output_tokens=7)
    assert found([slot] * 9) is not None
    assert found([counted, slot, slot, slot, counted, slot, slot]) is not None
    assert found([replace(slot, running_output_tokens=number) for number in range(9)]) is None
    moved = replace(counted, prompt_tokens_total=(counted.prompt_tokens_total or 0) + 1)
    assert found([slot, slot, slot, moved, slot, counted, slot]) is None


def several(*engines: Sequence[Engine]) -> Stall | None:
    """The stall of samples of several engines, whose labels are their places."""
    samples = [
        Sample(
            at_seconds=LIMIT / 4 * number,
            engines=tuple(replace(one, engine=str(place)) for place, one in enumerate(each)),
        )
        for number, each in enumerate(zip(*engines, strict=True))
    ]
    facts = Facts(pools=tuple(pool(engine=str(place)) for place in range(len(engines))))
    return stalled(Timeline(samples=tuple(samples)), facts, DEFAULT_LIMITS)


MOVING = [replace(STUCK, generation_tokens_total=number) for number in range(6)]
UNCOUNTED = replace(STUCK, prompt_tokens_total=None, generation_tokens_total=None)
GROWING = [holding(number, running=1) for number in range(6)]


@pytest.mark.parametrize("stuck", [STUCK, UNCOUNTED], ids=["own counters", "counters of the first engine"])
def test_one_of_several_engines_that_hangs_is_a_stall(stuck: Engine) -> None:
    """The others' tokens are no work of its own."""
    actual = several(GROWING, [stuck] * 6)
    assert Stall(since_seconds=0.0, seconds=LIMIT * 5 / 4, running=1, waiting=2, blocks=9, engine="1") == actual


def test_engines_of_which_each_works_or_is_idle_do_not_stall() -> None:
    """A token, a block, or nothing open, in each of them."""
    assert several(MOVING, GROWING, [IDLE] * 6) is None
    assert several([UNCOUNTED] * 6, [UNCOUNTED] * 6) is None


def test_usage_that_stands_still_in_all_engines_does_not_show_which_hangs() -> None:
    """A recurrent model holds one slot for each request: tokens counted for all engines show that one works."""
    assert several(MOVING, [UNCOUNTED] * 6) is None


@pytest.mark.parametrize("late", [Capabilities(on_completion=True), Capabilities(reserved=True)])
def test_figures_that_do_not_move_with_each_step_show_no_stall(late: Capabilities) -> None:
    """Gauges that move only when requests begin or end stand still under a long request."""
    assert found([STUCK] * 9, replace(SERVED, capabilities=late)) is None


def test_a_stall_is_suspect_with_the_blocks_that_it_holds() -> None:
    """Nine blocks of a request that never ends, and what waits behind it although the pool has room."""
    timeline = over_time(IDLE, IDLE, WORKS, *[STUCK] * 5)
    held = only(leak_kv_blocks.judge, timeline, SERVED)
    assert (held.status, evidence(held)["blocks_without_progress"]) == ("suspect", 9)
    behind = only(capacity_concurrency.judge, timeline, SERVED)
    assert (behind.status, evidence(behind)["waiting"]) == ("suspect", 2)


def test_requests_that_only_wait_hold_nothing() -> None:
    """A scheduler that admits no request: the queue is suspect, the empty pool is ok."""
    timeline = over_time(IDLE, IDLE, *[holding(0, waiting=3)] * 5)
    assert only(leak_kv_blocks.judge, timeline, SERVED).status == "ok"
    assert only(capacity_concurrency.judge, timeline, SERVED).status == "suspect"


def test_a_leak_that_was_observed_before_stands() -> None:
    """Blocks that stayed in use while idle are a fault, also if the engine hangs after that."""
    timeline = over_time(holding(7), holding(7), *[STUCK] * 5)
    assert only(leak_kv_blocks.judge, timeline, SERVED).status == "fault"
