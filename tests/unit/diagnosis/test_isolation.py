"""The isolation probe judged: whose cache answers whom, by counters and by the clock, and when neither can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Facts, Timeline
from tests.builders.answers import evidence, finding, measured, step
from tests.builders.isolation_timeline import APART, BY_DESIGN, REQUESTS, SALTLESS, Server, facts_of, probe
from tests.builders.runs import run as steps_run

ID = "isolation.prefix_cache"
FIRST, SAME, OTHER = 0, 1, 2
"""The first round's requests."""


def judged(server: Server) -> Diagnosis:
    """What is said of a server's probe."""
    return diagnose(probe(server), facts_of(server))


@pytest.mark.parametrize(
    ("server", "summary"),
    [
        pytest.param(
            Server(hits=SALTLESS),
            "another tenant's salt is not honoured: prompt tokens from the cache 12,192 of 12,288 in 6 of 6 requests",
            id="salt dropped",
        ),
        pytest.param(
            Server(hits=BY_DESIGN, other_key=True),
            "another tenant's request without a salt, with a key of its own, was answered from the cache: prompt "
            "tokens from it 12,192 of 12,288 in 6 of 6 requests",
            id="two keys",
        ),
        pytest.param(
            Server(hits={"other_salt"}),
            "another tenant's salt is not honoured: prompt tokens from the cache 12,192 of 12,288 in 6 of 6 requests",
            id="without a hit of its own",
        ),
        pytest.param(
            Server(hits=SALTLESS, other_prompts=(*range(OTHER), *range(OTHER + 1, 30))),
            "another tenant's salt is not honoured: prompt tokens from the cache 2,032 of 2,048 in 1 of 1 requests",
            id="one clean request is enough",
        ),
    ],
)
def test_cache_that_answers_another_tenant_is_a_fault(server: Server, summary: str) -> None:
    """A hit that can only be another tenant's request is the failure that was looked for."""
    # WHEN
    actual = judged(server)

    # THEN
    result = step(actual, "isolation")
    assert ("fault", "fault", summary) == (actual.worst, result.status, result.summary)
    assert ("fault", summary) == (finding(actual, ID).status, finding(actual, ID).summary)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        pytest.param(Server(), "requests without a salt share the cache, as vLLM does by design", id="no salts"),
        pytest.param(
            Server(hits=APART, fast=SALTLESS), "its first token came as fast as with one: another cache", id="a router"
        ),
        pytest.param(
            Server(hits=SALTLESS, counts=False), "by time to first token another tenant's salt is not", id="V0"
        ),
        pytest.param(
            Server(hits=(), fast=BY_DESIGN), "the engine counted no hit; by time to first token", id="a cache elsewhere"
        ),
        pytest.param(
            Server(shows=False), "by time to first token requests without a salt share a cache", id="a gateway"
        ),
    ],
)
def test_cache_that_may_answer_another_tenant_is_suspect(server: Server, words: str) -> None:
    """What is shared by design, or told by the clock alone, is suspect."""
    # WHEN
    actual = judged(server)

    # THEN
    assert ("suspect", "suspect") == (actual.worst, finding(actual, ID).status)
    assert words in finding(actual, ID).summary


@pytest.mark.parametrize(
    ("server", "words"),
    [
        pytest.param(Server(hits=APART), "no prompt token came from another tenant's cache", id="kept apart"),
        pytest.param(Server(hits=APART, other_key=True), "no prompt token came from another", id="by key"),
        pytest.param(Server(hits=(), caching=False), "prefix caching is off", id="caching off"),
        pytest.param(Server(hits=(), caching=False, counts=False), "prefix caching is off", id="off, and not counted"),
        pytest.param(
            Server(hits=APART, counts=False), "by time to first token no request was answered", id="by the clock"
        ),
        pytest.param(Server(hits=APART, late_page=(1, 2, 7)), "0 of 12,288 with another salt", id="late pages"),
    ],
)
def test_cache_that_keeps_tenants_apart_is_ok(server: Server, words: str) -> None:
    """Where a tenant's own repeat hits and another's request does not, or nothing is cached, all is well."""
    # WHEN
    actual = judged(server)

    # THEN
    assert ("ok", "ok") == (step(actual, "isolation").status, finding(actual, ID).status), finding(actual, ID).summary
    assert words in finding(actual, ID).summary


@pytest.mark.parametrize(
    ("server", "words"),
    [
        pytest.param(Server(hits=()), "a tenant's own prompt sent again was no hit either", id="no control"),
        pytest.param(
            Server(hits=("first", *BY_DESIGN)), "new prompts were counted as hits", id="hits of somebody else"
        ),
        pytest.param(Server(other_prompts=range(30)), "are needed: other traffic (in 30 of 30", id="other prompts"),
        pytest.param(Server(other_running=range(30)), "are needed: other traffic (in 30 of 30", id="other requests"),
        pytest.param(Server(failing=range(2, 30)), "it failed: HTTP 401: who are you?", id="failed"),
        pytest.param(Server(uncounted=range(30)), "the server did not count it in time", id="not counted"),
        pytest.param(
            Server(counts=False, hit_seconds=0.04), "times to first token do not tell 6 repeats from 12", id="noise"
        ),
        pytest.param(
            Server(counts=False, hits=APART, half_fast={"other_salt"}),
            "another tenant's times lie between hits and misses",
            id="some as fast",
        ),
    ],
)
def test_what_cannot_be_told_is_unknown(server: Server, words: str) -> None:
    """Without a control, alone time, or enough requests, nothing is said of the cache, and why."""
    # WHEN
    actual = judged(server)

    # THEN
    assert ("unknown", "unknown") == (actual.worst, finding(actual, ID).status)
    assert words in finding(actual, ID).summary


def test_restart_in_the_middle_spoils_one_request() -> None:
    """Counters that begin anew are no hits of anybody's."""
    # WHEN
    actual = judged(Server(hits=APART, restarts_before=7))

    # THEN
    assert ("ok", 29) == (finding(actual, ID).status, measured(step(actual, "isolation"))["requests"])


def test_probe_that_was_cut_short_is_unknown() -> None:
    """A server that went away after four requests has said too little."""
    # GIVEN
    whole = probe(Server(hits=APART))
    marks = whole.marks[:14]
    cut = Timeline(samples=whole.between(0.0, marks[-1].at_seconds), marks=marks)

    # WHEN
    actual = diagnose(cut, facts_of(Server()))

    # THEN
    assert "unknown" == actual.worst
    assert "0 requests of a kind can be judged" not in finding(actual, ID).summary
    assert "1 request of a kind can be judged, 3 are needed" in finding(actual, ID).summary


def test_other_runs_say_that_nothing_was_compared() -> None:
    """The four steps alone tell nothing of tenants, and the probe is judged without them."""
    # WHEN
    steps, alone = diagnose(steps_run(), Facts()), judged(Server())

    # THEN
    assert ("unknown", True) == (
        finding(steps, ID).status,
        "run --isolation" in finding(steps, ID).summary,
    )
    assert ["isolation"] == [one.id for one in alone.steps]


def test_evidence_has_both_sides() -> None:
    """Shares of the cache and times to first token, for who asked again and who was another."""
    # WHEN
    actual = judged(Server())

    # THEN
    told = evidence(finding(actual, ID))
    assert (0.0, 0.9922, 0.0, 0.9922) == tuple(
        told[f"{name}_hit"] for name in ("new_prompts", "own_prompts", "other_salt", "other_unsalted")
    )
    assert told["chance_that_times_are_alike"] == pytest.approx(1 / 18_564)
    (note,) = step(actual, "isolation").notes
    assert "a hit is 4.0 times as fast to its first token" in note


@given(st.sets(st.integers(0, len(REQUESTS) - 1)), st.sets(st.integers(0, len(REQUESTS) - 1)))
def test_somebody_else_never_makes_a_fault(prompts: set[int], running: set[int]) -> None:
    """Whatever else the server does meanwhile, hits of others' requests are not called one tenant's on another."""
    # GIVEN
    server = Server(hits=APART, other_prompts=prompts, other_running=running)

    # WHEN
    actual = finding(judged(server), ID)

    # THEN
    assert actual.status in ("ok", "unknown"), actual.summary


@given(st.integers(0, 10**9))
def test_diagnosis_does_not_know_what_time_it_is(later_seconds: int) -> None:
    """The same probe at another time is judged the same."""
    # GIVEN
    whole = probe(Server(hits=SALTLESS))
    moved = Timeline(
        samples=tuple(replace(one, at_seconds=one.at_seconds + later_seconds) for one in whole.samples),
        marks=tuple(replace(one, at_seconds=one.at_seconds + later_seconds) for one in whole.marks),
    )

    # WHEN
    before, after = (finding(diagnose(one, facts_of(Server())), ID) for one in (whole, moved))

    # THEN
    assert before == after
