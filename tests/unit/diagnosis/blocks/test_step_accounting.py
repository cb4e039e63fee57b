"""A load's blocks against what its tokens need, and when a load cannot be judged."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.blocks.expected import ExpectedBlocks
from kvdiag.diagnosis.blocks.step_accounting import (
    LoadPeak,
    blind_spot,
    compare,
    floor_after,
    floor_before,
    highest_blocks,
    judge_load,
    kept_by_requests,
    last_span,
    load_figures,
    measure,
    other_tokens,
    refused,
    tolerated_blocks,
)
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import (
    Capabilities,
    Engine,
    Facts,
    Gap,
    MeasuredFigures,
    Outcome,
    Sample,
    Span,
    Status,
    StepFigures,
    Timeline,
)
from tests.builders.answers import containing
from tests.builders.values import MIB, pool
from tests.unit.diagnosis.loads import KNOWN, OUTCOME, SPAN, WHOLE, WORKLOAD, idle, marks, seen, under_load


def growth(held: int, need: int, *, requests: int = 2, least: int | None = None) -> LoadPeak:
    """So many blocks held where so many are needed."""
    return LoadPeak(
        samples=2,
        requests=requests,
        tokens=1024,
        expected=ExpectedBlocks(least_blocks=need if least is None else least, most_blocks=need),
        held_blocks=held,
        filled_ratio=None,
    )


@pytest.mark.parametrize(("held", "excess"), [(59, -1), (60, 0), (64, 0), (65, 1), (100, 36), (0, -60)])
def test_excess_is_counted_from_the_nearer_end_of_the_need(held: int, excess: int) -> None:
    """Blocks between the least and the most that tokens need are neither too many nor too few."""
    assert excess == growth(held, 64, least=60).excess_blocks


@pytest.mark.parametrize(
    ("held", "need", "requests", "status"),
    [
        (66, 64, 2, "ok"),  # a block for each request is the tolerance
        (67, 64, 2, "suspect"),
        (62, 64, 2, "ok"),
        (61, 64, 2, "suspect"),
        (65, 64, 1, "ok"),
        (66, 64, 1, "suspect"),
        (96, 64, 2, "suspect"),  # 1.5 times
        (97, 64, 2, "fault"),
        (0, 64, 2, "unknown"),
        (-5, 64, 2, "unknown"),
        (1, 64, 2, "suspect"),
        (3, 0, 2, "fault"),
    ],
)
def test_blocks_beyond_one_a_request_count(held: int, need: int, requests: int, status: Status) -> None:
    """One block per request is the tolerance, half as much again a fault; without blocks in use it is unknown."""
    assert status == compare(growth(held, need, requests=requests), KNOWN, DEFAULT_LIMITS)[0]


@pytest.mark.parametrize(
    ("block_tokens", "on_completion", "tolerated"), [(16, False, 2), (1, False, 32), (32, True, 8), (256, True, 2)]
)
def test_usage_and_streams_are_read_some_tokens_apart(block_tokens: int, on_completion: bool, tolerated: int) -> None:
    """Sixteen tokens of each request, more where the gauge shows the end of another one; a block at least."""
    facts = replace(
        KNOWN,
        pools=(pool(block_tokens=block_tokens),),
        capabilities=Capabilities(on_completion=on_completion),
    )
    assert tolerated == tolerated_blocks(2, 64, facts, DEFAULT_LIMITS)


def test_late_engine_may_be_ahead_of_a_busy_client() -> None:
    """Up to the tokens of the next look, or of the load's end; an engine that counts live is held to its counters."""
    samples = (under_load(25.0, 66, (512, 512)), under_load(26.0, 70, (540, 540)))
    late = replace(KNOWN, capabilities=Capabilities(late_tokens=16))
    for timeline, blocks in (
        (seen(*samples[:1]), 72),
        (seen(*samples), 72),
        (seen(*samples, under_load(27.0, 60)), 64),
    ):
        peak = measure(timeline, late, SPAN, 0, DEFAULT_LIMITS)
        assert peak is not None
        assert peak.ahead_blocks == blocks
        assert peak.excess_blocks == max(peak.held_blocks - max(blocks, peak.expected.most_blocks), 0)
    assert 0 == getattr(measure(seen(*samples), KNOWN, SPAN, 0, DEFAULT_LIMITS), "ahead_blocks", None)


def test_a_sample_between_two_tokens_is_measured_where_the_fullest_was_not() -> None:
    """The engine is ahead of a busy client in the fullest sample, not in the one before; what is too much stays."""
    late = replace(KNOWN, capabilities=Capabilities(late_tokens=16))
    exact, ahead = under_load(25.0, 64), under_load(26.0, 66)
    for samples, blocks in (((exact, ahead), 64), ((ahead,), 66), ((exact, under_load(26.0, 90)), 90)):
        peak = measure(seen(*samples), late, SPAN, 0, DEFAULT_LIMITS)
        assert peak is not None
        assert blocks == peak.held_blocks


def test_blocks_that_small_requests_left_are_not_of_the_load() -> None:
    """They end during the load: what they can have left of the blocks in use after it is allowed, and no more."""
    timeline = seen(*(under_load(at, 80) for at in (21.0, 22.0)), *(idle(at, 13) for at in (31.0, 32.0, 33.0)))
    late = replace(KNOWN, capabilities=Capabilities(on_completion=True))
    whole = Timeline(samples=(idle(10.0, 3), idle(11.0, 3), *timeline.samples))
    for small, excess in ((0, 13), (3, 7), (9, 3)):
        span = replace(SPAN, outcome=replace(OUTCOME, refreshes=small))
        peak = measure(timeline, late, span, 1, DEFAULT_LIMITS)
        assert peak is not None
        assert (excess, 64 + excess) == (peak.excess_blocks, highest_blocks(whole, late, span, DEFAULT_LIMITS))


def test_fullest_whole_sample_is_measured() -> None:
    """Blocks are those beyond the floor, at the fullest of the samples that saw every request."""
    timeline = seen(under_load(20.0, 64), under_load(25.0, 90), under_load(26.0, 80), under_load(27.0, 200, (512,)))
    actual = measure(timeline, KNOWN, SPAN, 3, DEFAULT_LIMITS)
    need = ExpectedBlocks(least_blocks=64, most_blocks=64)
    assert actual == LoadPeak(
        samples=3, requests=2, tokens=1024, expected=need, held_blocks=87, filled_ratio=1024 / (87 * 16)
    )


def test_nothing_is_measured_of_an_engine_that_tells_no_usage() -> None:
    """Without usage there is no figure; one sample that reports usage is enough."""
    blind = under_load(21.0, 64, usage=False)
    assert measure(seen(blind), KNOWN, SPAN, 0, DEFAULT_LIMITS) is None
    told = measure(seen(blind, under_load(22.0, 64)), KNOWN, SPAN, 0, DEFAULT_LIMITS)
    assert told is not None
    assert (2, 64) == (told.samples, told.held_blocks)
    assert measure(seen(under_load(21.0, 64)), Facts(), SPAN, 0, DEFAULT_LIMITS) is None


def test_need_reaches_from_the_look_before_the_page_to_the_one_after() -> None:
    """A page was rendered somewhere between the two looks at our streams: from 30 + 32 blocks to 32 + 33."""
    # 480 and 512 tokens before, 512 and 513 after
    actual = measure(seen(under_load(21.0, 63, (512, 513), before=(480, 512))), KNOWN, SPAN, 0, DEFAULT_LIMITS)
    assert actual is not None
    assert ExpectedBlocks(least_blocks=62, most_blocks=65) == actual.expected


@pytest.mark.parametrize(
    ("counted", "tokens"),
    [
        (None, 1024),
        (1026, 1024),  # each request's last token is not stored yet
        (1027, 1026),  # one token behind: either request may have it
        (1028, 1026),
        (1029, 1028),
        (900, 1024),  # a counter behind our own streams takes nothing away
    ],
)
def test_tokens_that_our_streams_lag_behind_are_needed_as_well(counted: int | None, tokens: int) -> None:
    """What the engines counted beyond what our streams have brought is shared out, rounded up."""
    # Counters that stood at 0 when the span began
    first = idle(10.0, counted=None if counted is None else 0)
    actual = measure(seen(first, under_load(21.0, 64, counted=counted)), KNOWN, SPAN, 0, DEFAULT_LIMITS)
    assert actual is not None
    assert tokens == actual.tokens


def test_one_request_has_all_that_its_stream_lags_behind() -> None:
    """Of one request every token that was counted and not yet read is its own."""
    # 512 tokens read of a request that had brought 522 to the page
    alone = under_load(21.0, 33, (512,), running=1, counted=523)
    span = replace(SPAN, workload=replace(WORKLOAD, requests=1))
    actual = measure(seen(idle(10.0, counted=0), alone), KNOWN, span, 0, DEFAULT_LIMITS)
    assert actual is not None
    assert 522 == actual.tokens


def test_a_model_that_slides_is_measured_once_it_decodes() -> None:
    """Windowed layers hold the last chunk of a prompt until three tokens after it: 515 of a prompt of 512."""
    sliding = Facts(pools=(pool(sliding_window_tokens=1024),))
    early, late = under_load(21.0, 99, (514, 600)), under_load(22.0, 66, (515, 600))
    behind = under_load(23.0, 99, (515, 600), before=(514, 599))

    actual = measure(seen(early, late, behind), sliding, SPAN, 0, DEFAULT_LIMITS)

    # One that keeps every token is measured at any time
    assert actual is not None
    assert (1, 66) == (actual.samples, actual.held_blocks)
    everything = measure(seen(early, late, behind), KNOWN, SPAN, 0, DEFAULT_LIMITS)
    assert everything is not None
    assert (3, 99) == (everything.samples, everything.held_blocks)


def test_bytes_are_those_of_the_blocks() -> None:
    """40 blocks of 2 MiB are 80 MiB; without a block's size they are unknown."""
    one = replace(growth(40, 39), filled_ratio=0.12345678)
    assert load_figures(KNOWN, one) == (
        StepFigures(requests=2, tokens=1024, blocks=39, bytes=78 * MIB),
        MeasuredFigures(requests=2, tokens=1024, blocks=40, bytes=80 * MIB, filled_ratio=0.1235),
    )
    assert load_figures(Facts(), growth(40, 39)) == (
        StepFigures(requests=2, tokens=1024, blocks=39),
        MeasuredFigures(requests=2, tokens=1024, blocks=40),
    )


def test_most_blocks_of_a_load_are_those_beyond_the_floor() -> None:
    """The prefill's among them; outside the load they do not count."""
    timeline = seen(*WHOLE[:2], under_load(21.0, 70), under_load(30.0, 90, (512,)), idle(31.0, 500))
    assert 87 == highest_blocks(timeline, KNOWN, SPAN, DEFAULT_LIMITS)
    assert highest_blocks(timeline, KNOWN, replace(SPAN, release_seconds=None), DEFAULT_LIMITS) is None
    assert highest_blocks(timeline, KNOWN, replace(SPAN, offer_seconds=None), DEFAULT_LIMITS) is None
    assert highest_blocks(seen(*WHOLE[:2]), KNOWN, SPAN, DEFAULT_LIMITS) is None
    blind = under_load(22.0, 99, usage=False)
    assert 64 == highest_blocks(seen(*WHOLE[:3], blind), KNOWN, SPAN, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("span", "samples", "reason"),
    [
        (None, (), "did not run"),
        (SPAN, WHOLE, None),
        (replace(SPAN, end_seconds=None), WHOLE, "cut short"),
        (
            replace(SPAN, outcome=replace(OUTCOME, completed=1, failed=1, errors=("boom", "bang"))),
            WHOLE,
            "failed: boom",
        ),
        (
            replace(SPAN, outcome=replace(OUTCOME, completed=0, failed=2)),
            WHOLE,
            "no reason reported",
        ),
        (SPAN, WHOLE[:3], "1 of the 2 samples"),
        (
            SPAN,
            (under_load(21.0, 9, (512,), running=1, waiting=1), under_load(22.0, 9, (512,), running=1, waiting=1)),
            "at most 1 of 2",
        ),
        (
            SPAN,
            (under_load(21.0, 64, running=3), under_load(22.0, 64, running=3)),
            "up to 3 requests",
        ),
        (
            replace(SPAN, workload=None),
            (under_load(21.0, 64, running=1), under_load(22.0, 64, running=1)),
            "up to 1 requests",
        ),
        # A request that waited before two samples saw all of them changes nothing.
        (SPAN, (under_load(21.0, 64, (512,), running=1, waiting=1), under_load(22.0, 64), under_load(23.0, 64)), None),
        # One reading alone may catch a request twice.
        (SPAN, (under_load(21.0, 64, running=3), under_load(22.0, 64), under_load(23.0, 64)), None),
        (
            SPAN,
            (idle(10.0, counted=0), under_load(21.0, 64, counted=1025), under_load(22.0, 64, counted=1025)),
            "1 prompt token",
        ),
        (SPAN, (idle(10.0, counted=0), under_load(21.0, 64, counted=1024), under_load(22.0, 64, counted=1024)), None),
    ],
)
def test_what_was_not_observed_whole_is_not_judged(
    span: Span | None, samples: Sequence[Sample], reason: str | None
) -> None:
    """Each span that cannot be judged has its reason; one that was observed whole has none."""
    actual = blind_spot(seen(*samples), KNOWN, span, DEFAULT_LIMITS)
    assert (actual is None) == (reason is None)
    assert (reason or "") in (actual or "")


def test_a_span_that_did_not_run_says_why_the_engine_was_not_read() -> None:
    """The reason is the gap of the metrics endpoint, or that no KV pool is reported."""
    lost = Facts(gaps=(Gap(source="engine", kind="failed", reason="connection refused"),))
    assert "connection refused" in (blind_spot(seen(), lost, None, DEFAULT_LIMITS) or "")
    assert "KV pool" in (blind_spot(seen(*WHOLE), Facts(), SPAN, DEFAULT_LIMITS) or "")


def counting(at_seconds: float, *prompts: int | None) -> Sample:
    """Engines that have counted so many prompt tokens each."""
    engines = tuple(
        Engine(
            engine=str(number),
            kv_usage_ratio=0.0,
            requests_running=0,
            requests_waiting=0,
            preemptions_total=0,
            prompt_tokens_total=tokens,
            generation_tokens_total=0,
        )
        for number, tokens in enumerate(prompts)
    )
    return Sample(at_seconds=at_seconds, engines=engines)


def test_prompt_tokens_of_others_are_those_beyond_ours() -> None:
    """From the span's begin to its end, over all engines; 0 where they count fewer than ours, or not at all."""
    before, after = counting(9.0, 0, 0), counting(41.0, 90_000, 90_000)
    first, last = counting(10.0, 100, 200), counting(40.0, 700, 724)
    assert 100 == other_tokens(seen(before, first, last, after), SPAN)
    assert 0 == other_tokens(seen(first, counting(40.0, 600, 724)), SPAN)
    assert 0 == other_tokens(seen(first, counting(40.0, 599, 724)), SPAN)
    assert 0 == other_tokens(seen(counting(10.0, None), counting(40.0, None)), SPAN)
    assert 0 == other_tokens(seen(counting(10.0, 0, None), counting(40.0, 1424, None)), SPAN)
    assert 0 == other_tokens(seen(first, counting(40.0, 5000, 5000)), replace(SPAN, end_seconds=None))
    assert 0 == other_tokens(seen(first, counting(40.0, 5000, 5000)), replace(SPAN, outcome=None))


def test_floors_are_those_beside_the_load() -> None:
    """What was held idle before the offer, and after the release; without such moments there is none."""
    timeline = seen(*WHOLE)
    assert (3, 5) == (
        floor_before(timeline, KNOWN, SPAN, DEFAULT_LIMITS),
        floor_after(timeline, KNOWN, SPAN, DEFAULT_LIMITS),
    )
    assert floor_before(timeline, KNOWN, replace(SPAN, offer_seconds=None), DEFAULT_LIMITS) is None
    assert floor_before(timeline, KNOWN, replace(SPAN, offer_seconds=14.0), DEFAULT_LIMITS) is None
    assert floor_after(timeline, KNOWN, replace(SPAN, release_seconds=None), DEFAULT_LIMITS) is None
    assert floor_after(timeline, KNOWN, replace(SPAN, end_seconds=None), DEFAULT_LIMITS) is None
    assert floor_after(timeline, KNOWN, replace(SPAN, release_seconds=32.0), DEFAULT_LIMITS) is None


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (None, None),
        (replace(SPAN, outcome=None), None),
        (SPAN, None),
        (replace(SPAN, outcome=replace(OUTCOME, completed=1, failed=1, errors=("timeout",))), None),
        (
            replace(SPAN, outcome=replace(OUTCOME, completed=1, failed=3, errors=("timeout", "CUDA Out of memory."))),
            containing("3 of 4", "CUDA Out of memory."),
        ),
        (replace(SPAN, outcome=replace(OUTCOME, errors=("CUDA out of memory.",))), None),
    ],
)
def test_only_memory_that_ran_out_refuses(span: Span | None, said: str | None) -> None:
    """Requests that failed because memory ran out count as refused; any other failure does not."""
    assert said == refused(span)


def test_a_load_is_judged_by_its_last_offer() -> None:
    """A load that was not observed whole is offered once more: the second one counts, with its floor."""
    again = replace(
        SPAN, begin_seconds=50.0, offer_seconds=60.0, release_seconds=70.0, end_seconds=80.0, notes=("again",)
    )
    later = (idle(51.0, 5), idle(55.0, 5), under_load(61.0, 69), under_load(62.0, 69), idle(71.0, 5), idle(75.0, 5))
    timeline = Timeline(
        samples=(*WHOLE[:2], under_load(21.0, 131), under_load(22.0, 131), *later), marks=(*marks(), *marks(again, 1))
    )

    actual = judge_load("load", timeline, KNOWN, DEFAULT_LIMITS)

    last = last_span(timeline, "load")
    assert last is not None
    assert (1, ("again",)) == (last.cycle, actual.notes)
    assert "ok" == actual.status
    expected = {"requests": 2, "tokens": 1024, "blocks": 64, "bytes": 64 * 2 * MIB}
    assert StepFigures(**expected) == actual.expected
    assert MeasuredFigures(**expected, filled_ratio=1.0, samples_of_whole_load=2) == actual.measured
    assert last_span(timeline, "other") is None


def test_a_load_that_cannot_be_judged_says_so() -> None:
    """Out of memory is a fault, a step that did not run or has no floor is unknown."""
    failed = replace(SPAN, outcome=replace(OUTCOME, completed=1, failed=1, errors=("out of memory",)), notes=("n",))
    refusal = judge_load("load", Timeline(samples=WHOLE, marks=marks(failed)), KNOWN, DEFAULT_LIMITS)
    absent = judge_load("other", seen(*WHOLE), KNOWN, DEFAULT_LIMITS)
    judge_load("load", seen(*WHOLE[2:]), KNOWN, DEFAULT_LIMITS)
    assert ("fault", ("n",)) == (refusal.status, refusal.notes)
    assert ("unknown", ()) == (absent.status, absent.notes)


@pytest.mark.parametrize(
    ("small", "kept", "each", "at_least"),
    [
        (0, 28, 4.0, False),
        (35, 98, 4.0, True),
        (35, 70, None, True),
    ],
)
def test_small_ones_may_have_left_all_blocks(small: int, kept: int, each: float | None, at_least: bool) -> None:
    """Two blocks each of 16 tokens: the others left at least what remains, which may be nothing."""
    done = Outcome(completed=7, failed=0, prompt_tokens=0, generated_tokens=0, refreshes=small)
    found = kept_by_requests(kept, [done], KNOWN, DEFAULT_LIMITS)
    assert (each, at_least) == (found.each_blocks, bool(found.at_least))
