"""Which loads can be judged: seen whole, without other traffic, from floor to floor; and what their judgement is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.blocks.step_accounting import (
    blind_spot,
    floor_after,
    floor_before,
    judge_load,
    last_span,
    other_tokens,
    refused,
)
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Engine, Facts, Gap, Quantity, Sample, Span, Timeline
from tests.builders.values import MIB
from tests.unit.diagnosis.loads import KNOWN, OUTCOME, SPAN, WHOLE, idle, marks, seen, under_load


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
        (SPAN, WHOLE[:3], "1 sample"),
        (
            SPAN,
            (under_load(21.0, 9, (512,), running=1, waiting=1), under_load(22.0, 9, (512,), running=1, waiting=1)),
            "up to 1 waited",
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
def test_what_was_not_seen_whole_is_not_judged(
    span: Span | None, samples: Sequence[Sample], reason: str | None
) -> None:
    """Each reason that a span cannot be judged is told, and there is none where all is well."""
    actual = blind_spot(seen(*samples), KNOWN, span, DEFAULT_LIMITS)
    assert (actual is None) == (reason is None)
    assert (reason or "") in (actual or "")


def test_a_span_that_did_not_run_says_why_the_engine_was_not_read() -> None:
    """The gap of the page is the reason; a pool that nobody tells of is another."""
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
    assert 400 == other_tokens(seen(counting(10.0, 0, None), counting(40.0, 1424, None)), SPAN)
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
            "3 of 4 requests failed: CUDA Out of memory.",
        ),
        (replace(SPAN, outcome=replace(OUTCOME, errors=("CUDA out of memory.",))), None),
    ],
)
def test_only_memory_that_ran_out_refuses(span: Span | None, said: str | None) -> None:
    """Requests that failed for want of memory are the server's answer; any other failure is none."""
    assert said == refused(span)


def test_a_load_is_judged_by_its_last_offer() -> None:
    """A load that was not seen whole is offered once more: the second one counts, with its floor."""
    # Two cycles, of which the first held twice what its tokens need
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
    assert (
        Quantity(name="blocks", value=64, unit="blocks"),
        Quantity(name="bytes", value=64 * 2 * MIB, unit="bytes"),
        Quantity(name="filled_ratio", value=1.0, unit="ratio"),
        Quantity(name="samples_of_whole_load", value=2, unit="samples"),
    ) == actual.measured[2:]
    assert [2, 1024, 64, 64 * 2 * MIB] == [one.value for one in actual.expected]
    assert last_span(timeline, "other") is None


def test_a_load_that_cannot_be_judged_says_so() -> None:
    """Out of memory is a fault, a step that did not run or has no floor is unknown."""
    failed = replace(SPAN, outcome=replace(OUTCOME, completed=1, failed=1, errors=("out of memory",)), notes=("n",))

    refusal = judge_load("load", Timeline(samples=WHOLE, marks=marks(failed)), KNOWN, DEFAULT_LIMITS)
    absent = judge_load("other", seen(*WHOLE), KNOWN, DEFAULT_LIMITS)
    judge_load("load", seen(*WHOLE[2:]), KNOWN, DEFAULT_LIMITS)

    assert ("fault", ("n",)) == (refusal.status, refusal.notes)
    assert ("unknown", ()) == (absent.status, absent.notes)
