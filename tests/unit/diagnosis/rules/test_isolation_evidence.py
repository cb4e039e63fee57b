"""The isolation probe's answers by hand: whose counts they are, and what counts and times say."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.isolation_prefix_cache import Answer, Arm, Isolation, isolation_of, probed, timing, verdict
from kvdiag.model import Engine, Facts, Mark, Outcome, Probe, ProbeKind, Sample, Timeline, Workload
from tests.builders.answers import ANY_TEXT
from tests.builders.values import engine, pool

KINDS: tuple[ProbeKind, ...] = ("first", "same_salt", "other_salt", "first_unsalted", "other_unsalted")
SLOW, FAST = 0.04, 0.01


def page(counts: tuple[int | None, int | None, int | None], *, running: int = 0, waiting: int = 0) -> Engine:
    """An engine that has counted so many prompt tokens, prefix queries and hits."""
    prompts, queries, hits = counts
    return replace(
        engine(prompt_tokens=prompts, running=running, waiting=waiting),
        prefix_queries_total=queries,
        prefix_hits_total=hits,
    )


def answer(
    before: tuple[Engine, ...] = (page((100, 100, 0)),),
    after: tuple[Engine, ...] = (page((148, 148, 32)),),
    *,
    during: tuple[Engine, ...] = (),
    outcome: Outcome | None = None,
    phases: Sequence[str] = ("begin", "offer", "release", "end"),
) -> Answer:
    """The answer to a request of 48 tokens, from 10 s to 40 s, by the samples before and after it."""
    told = outcome or Outcome(completed=1, failed=0, prompt_tokens=48, generated_tokens=1, first_token_seconds=0.25)
    probe = Workload(requests=1, prompt_tokens=48, max_tokens=1, probe=Probe(kind="same_salt", other_key=True))
    at = {"begin": 10.0, "offer": 20.0, "release": 30.0, "end": 40.0}
    marks = tuple(
        Mark(
            at_seconds=at[phase],
            step="isolation",
            cycle=0,
            phase=phase,  # type: ignore[arg-type]
            workload=probe if phase == "begin" else None,
            outcome=told if phase == "release" else None,
        )
        for phase in phases
    )
    pages = (
        (5.0, (page((1, 1, 1)),)),
        (15.0, before),
        (25.0, during or before),
        (35.0, after),
        (45.0, (page((9, 9, 9)),)),
    )
    samples = tuple(Sample(at_seconds=seconds, engines=engines) for seconds, engines in pages)
    found = probed(Timeline(samples=samples, marks=marks), Facts())
    assert found is not None
    return found.answers[0]


def test_answer_has_what_the_engines_counted_of_it() -> None:
    """Between the page before and the page after it; of all engines together."""
    expected = Answer(kind="same_salt", other_key=True, problem=None, queries=48, hits=32, first_token_seconds=0.25)
    still = replace(page((7, 7, 7)), engine="1")
    assert expected == answer()
    assert expected == answer((page((100, 100, 0)), still), (page((148, 148, 32)), still))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"after": (page((149, 148, 32)),)}, ANY_TEXT),
        ({"after": (page((148, 149, 32)),)}, ANY_TEXT),
        ({"after": (page((147, 148, 32)),)}, ANY_TEXT),
        ({"after": (page((148, 120, 32)),)}, ANY_TEXT),  # more hits than queries
        ({"after": (page((148, 132, 32)),)}, None),
        ({"after": (page((48, 48, 0)),)}, ANY_TEXT),
        ({"before": (page((100, 100, 5)),), "after": (page((148, 148, 4)),)}, ANY_TEXT),
        ({"before": (page((100, 200, 0)),)}, ANY_TEXT),
        ({"after": (page((148, None, 48)),)}, None),
        ({"after": (page((148, None, 49)),)}, ANY_TEXT),  # more hits than the prompt has
        ({"after": (page((148, None, None)),)}, None),
        ({"after": (page((None, 148, 32)),)}, None),
        ({"during": (page((100, 100, 0), running=1),)}, None),
        ({"during": (page((100, 100, 0), running=1, waiting=1),)}, ANY_TEXT),
        (
            {"during": (page((100, 100, 0), running=1), replace(page((1, 1, 1), running=1), engine="1"))},
            ANY_TEXT,
        ),
        (
            {"outcome": Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=0)},
            ANY_TEXT,
        ),
        (
            {"outcome": Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=0, errors=("a", "b"))},
            ANY_TEXT,
        ),
        ({"phases": ("begin", "offer", "release")}, ANY_TEXT),
        ({"phases": ("begin", "offer", "end")}, ANY_TEXT),
        ({"phases": ("begin", "release", "end")}, ANY_TEXT),
    ],
)
def test_counts_are_the_requests_own_or_nobodys(changes: dict[str, Any], problem: str | None) -> None:
    """Another request's tokens, a late count, or a counter that restarts makes the answer unusable."""
    assert problem == answer(**changes).problem


@pytest.mark.parametrize(
    ("after", "queries", "hits"),
    [
        ((page((None, 148, 32)),), None, None),
        ((page((148, None, 32)),), None, None),
        ((page((148, 148, None)),), 48, None),
        ((page((148, 148, 32)), replace(page((0, 0, 0)), engine="1")), None, None),
    ],
    ids=["no prompts", "no queries", "no hits", "another engine came"],
)
def test_hits_without_their_lookups_are_not_counted(
    after: tuple[Engine, ...], queries: int | None, hits: int | None
) -> None:
    """Whether a hit is this request's is known by its prompt alone."""
    actual = answer(after=after)
    assert (queries, hits) == (actual.queries, actual.hits)


@pytest.mark.parametrize(
    ("caching", "expected"),
    [((True,), True), ((False,), False), ((True, False), True), ((None,), None), ((True, None), None), ((), None)],
)
def test_caching_is_on_by_the_engines_own_word(caching: tuple[bool | None, ...], expected: bool | None) -> None:
    """Of several engines one is enough, and one that does not say leaves it open."""
    pools = tuple(replace(pool(str(place)), prefix_caching=one) for place, one in enumerate(caching))
    probe = Workload(requests=1, prompt_tokens=48, max_tokens=1, probe=Probe(kind="first", other_key=False))
    mark = Mark(at_seconds=1.0, step="isolation", cycle=0, phase="begin", workload=probe)
    found = probed(Timeline(samples=(), marks=(mark,)), Facts(pools=pools))
    assert found is not None
    assert expected == found.caching
    assert probed(Timeline(samples=(), marks=(replace(mark, workload=None),)), Facts()) is None


def made(
    hits: Sequence[ProbeKind] = ("same_salt",),
    *,
    fast: Sequence[ProbeKind] | None = None,
    rounds: int = 6,
    counted: bool = True,
    caching: bool | None = True,
    other_key: bool = False,
    seconds: dict[str, float] | None = None,
) -> Isolation:
    """A probe of so many rounds, in which some kinds are hits of 32 of 48 tokens, and some are fast."""
    quick = hits if fast is None else fast
    return isolation_of(
        tuple(
            Answer(
                kind=kind,
                other_key=other_key,
                problem=None,
                queries=48 if counted else None,
                hits=(32 if kind in hits else 0) if counted else None,
                # No two times are equal.
                first_token_seconds=(seconds or {}).get(kind, FAST if kind in quick else SLOW) * (1.0 + place / 1000),
            )
            for place in range(rounds)
            for kind in KINDS
        ),
        caching,
    )


def test_arm_adds_up_what_can_be_judged() -> None:
    """Requests, hits and times of its kinds; what was spoilt is left out, and nothing has no share and no middle."""
    found = made(rounds=2)
    spoilt = isolation_of((replace(found.answers[1], problem="other traffic"), *found.answers), caching=True)

    expected = Arm(requests=2, hit=2, queries=96, hits=64, seconds=(FAST, FAST * 1.001))
    assert expected == found.own == spoilt.own
    assert 0.6667 == expected.hit_ratio
    assert Arm(requests=0, hit=0, queries=0, hits=0, seconds=()).hit_ratio is None
    assert (4, 2, 2) == (found.new.requests, found.salted.requests, found.unsalted.requests)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (made(), "ok"),
        (made(("first",)), "unknown"),
        (made(("same_salt", "other_salt")), "fault"),
        (made(("same_salt", "other_unsalted")), "suspect"),
        (made(("same_salt", "other_unsalted"), other_key=True), "fault"),
        (made(rounds=2), "unknown"),
        (made(rounds=3), "ok"),
        (made(("other_salt",), rounds=1), "fault"),
        (made(("same_salt",), fast=("same_salt", "other_salt")), "suspect"),
        (made(()), "unknown"),
        (made((), caching=False), "ok"),
        (made((), fast=("same_salt",)), "ok"),
        (made((), fast=("same_salt", "other_salt")), "suspect"),
        (made(counted=False), "ok"),
        (made(counted=False, fast=("same_salt", "other_salt")), "suspect"),
        (made(counted=False, fast=("same_salt", "other_unsalted")), "suspect"),
        (made(counted=False, fast=()), "unknown"),
        (made(counted=False, fast=(), caching=False), "ok"),
        (made(counted=False, seconds={"other_salt": 0.02}), "suspect"),
        (made(counted=False, seconds={"first": 4.0, "first_unsalted": 4.0}), "suspect"),
        (made(counted=False, seconds={"other_salt": 0.03}), "ok"),
        (made(counted=False, seconds={"other_salt": 0.008}), "suspect"),
    ],
)
def test_verdict_is_by_counts_and_else_by_times(found: Isolation, status: str) -> None:
    """A counted hit decides; timing alone is at most a suspect; without a control the verdict is unknown."""
    actual, sentence = verdict(found, DEFAULT_LIMITS)
    assert status == actual, sentence


def test_a_verdict_by_times_says_why_no_count_decides() -> None:
    """An engine that counted no hit is another one than one that does not report them."""
    _, uncounted = verdict(made(counted=False, fast=("same_salt", "other_salt")), DEFAULT_LIMITS)
    _, without_hits = verdict(made((), fast=("same_salt", "other_salt")), DEFAULT_LIMITS)
    assert ("does not report" in uncounted, "does not report" in without_hits) == (True, False)


def test_times_between_hits_and_misses_leave_it_open() -> None:
    """Half of the requests fast and half slow may be another replica's cache."""
    found = made(counted=False)
    mixed = tuple(
        replace(one, first_token_seconds=FAST if place % 2 else 0.05) if one.kind == "other_salt" else one
        for place, one in enumerate(found.answers)
    )
    status, _ = verdict(isolation_of(mixed, caching=True), DEFAULT_LIMITS)
    assert "unknown" == status


def test_shortage_says_what_left_out_most() -> None:
    """The commonest reason, and in how many of all requests."""
    found = made(rounds=3)
    spoilt = [
        replace(one, problem="other traffic" if place < 10 else "cut short" if place == 10 else None)
        for place, one in enumerate(found.answers)
    ]

    actual = isolation_of(tuple(spoilt), caching=True).shortage(DEFAULT_LIMITS)
    assert actual is not None
    assert "other traffic (in 10 of 15 requests)" in actual
    assert found.shortage(DEFAULT_LIMITS) is None


def test_engine_counts_where_every_judged_request_has_hits() -> None:
    """The engine counts hits if every judged request reports them; it does not if no request could be judged."""
    answers = made(rounds=1).answers
    uncounted, keyed = replace(answers[0], hits=None), replace(answers[0], other_key=True)
    first = (answers[0], uncounted, replace(uncounted, problem="failed: x"), keyed)
    found = [isolation_of((one, *answers), caching=True) for one in first]
    assert [(True, False), (False, False), (True, False), (True, True)] == [
        (one.counted, one.other_key) for one in found
    ]
    assert not isolation_of((), caching=True).counted


@pytest.mark.parametrize(
    ("found", "noted"),
    [
        (made(), True),
        (made(("same_salt",), fast=()), True),
        (made(()), False),  # no hit that could be timed
        (isolation_of((), caching=True), False),
        (made(counted=False), True),
    ],
)
def test_clock_tells_what_others_have_requested(found: Isolation, noted: bool) -> None:
    """The verdict has a note on timing only if a hit could be timed."""
    note = timing(found, DEFAULT_LIMITS)
    assert noted == (note is not None)
    assert note is None or re.search(r"p-value (< 0\.001|0\.\d{3}|1\.000)\)", note)
