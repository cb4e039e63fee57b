"""The isolation probe judged: which tenants share a cache, by counters and by timing, and when neither decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Facts, Timeline
from tests.builders.answers import evidence, finding, step
from tests.builders.isolation_timeline import APART, BY_DESIGN, REQUESTS, SALTLESS, Server, facts_of, probe
from tests.builders.runs import run as steps_run

ID = "isolation.prefix_cache"
FIRST, SAME, OTHER = 0, 1, 2
"""The first round's requests."""


def judged(server: Server) -> Diagnosis:
    """The diagnosis of a server's probe."""
    return diagnose(probe(server), facts_of(server))


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(Server(hits=SALTLESS), id="salt dropped"),
        pytest.param(Server(hits=BY_DESIGN, other_key=True), id="two keys"),
        pytest.param(Server(hits={"other_salt"}), id="without a hit of its own"),
        pytest.param(
            Server(hits=SALTLESS, other_prompts=(*range(OTHER), *range(OTHER + 1, 30))),
            id="one clean request is enough",
        ),
    ],
)
def test_cache_that_answers_another_tenant_is_a_fault(server: Server) -> None:
    """A hit that can only be another tenant's request is the failure that was looked for."""
    actual = judged(server)
    result = step(actual, "isolation")
    assert ("fault", "fault") == (actual.worst, result.status)
    assert "fault" == finding(actual, ID).status


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(Server(), id="no salts"),
        pytest.param(Server(hits=APART, fast=SALTLESS), id="a router"),
        pytest.param(Server(hits=SALTLESS, counts=False), id="V0"),
        pytest.param(Server(hits=(), fast=BY_DESIGN), id="a cache elsewhere"),
        pytest.param(Server(shows=False), id="a gateway"),
    ],
)
def test_cache_that_may_answer_another_tenant_is_suspect(server: Server) -> None:
    """Sharing by design, or shown by timing alone, is a suspect."""
    actual = judged(server)
    assert ("suspect", "suspect") == (actual.worst, finding(actual, ID).status)


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(Server(hits=APART), id="kept apart"),
        pytest.param(Server(hits=APART, other_key=True), id="by key"),
        pytest.param(Server(hits=(), caching=False), id="caching off"),
        pytest.param(Server(hits=(), caching=False, counts=False), id="off, and not counted"),
        pytest.param(Server(hits=APART, counts=False), id="by the clock"),
        pytest.param(Server(hits=APART, late_page=(1, 2, 7)), id="late pages"),
    ],
)
def test_cache_that_keeps_tenants_apart_is_ok(server: Server) -> None:
    """Where a tenant's own repeat hits and another's request does not, or nothing is cached, all is well."""
    actual = judged(server)
    assert ("ok", "ok") == (step(actual, "isolation").status, finding(actual, ID).status), finding(actual, ID).summary


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(Server(hits=()), id="no control"),
        pytest.param(Server(hits=("first", *BY_DESIGN)), id="hits of somebody else"),
        pytest.param(Server(other_prompts=range(30)), id="other prompts"),
        pytest.param(Server(other_running=range(30)), id="other requests"),
        pytest.param(Server(failing=range(2, 30)), id="failed"),
        pytest.param(Server(uncounted=range(30)), id="not counted"),
        pytest.param(Server(counts=False, hit_seconds=0.04), id="noise"),
        pytest.param(Server(counts=False, hits=APART, half_fast={"other_salt"}), id="some as fast"),
    ],
)
def test_what_cannot_be_reported_is_unknown(server: Server) -> None:
    """Without a control, exclusive use of the server, or enough requests, the verdict is unknown."""
    actual = judged(server)
    assert ("unknown", "unknown") == (actual.worst, finding(actual, ID).status)


def test_restart_in_the_middle_leaves_out_one_request() -> None:
    """A restart leaves out the request in which the counters fall; the other 29 are judged."""
    actual = judged(Server(hits=APART, restarts_before=7))
    assert ("ok", 29) == (finding(actual, ID).status, step(actual, "isolation").measured.requests)


def test_probe_that_was_cut_short_is_unknown() -> None:
    """A server that exits after four requests leaves the verdict unknown."""
    whole = probe(Server(hits=APART))
    marks = whole.marks[:14]
    cut = Timeline(samples=whole.between(0.0, marks[-1].at_seconds), marks=marks)
    actual = diagnose(cut, facts_of(Server()))
    assert "unknown" == actual.worst
    assert "unknown" == finding(actual, ID).status


def test_other_runs_say_that_nothing_was_compared() -> None:
    """The four steps alone leave isolation unknown and name the option; the probe is judged without them."""
    steps, alone = diagnose(steps_run(), Facts()), judged(Server())
    assert ("unknown", True) == (
        finding(steps, ID).status,
        "run --isolation" in finding(steps, ID).summary,
    )
    assert ["isolation"] == [one.id for one in alone.steps]


def test_evidence_has_both_sides() -> None:
    """Shares of the cache and times to first token, for who asked again and who was another."""
    actual = judged(Server())

    told = evidence(finding(actual, ID))
    assert (0.0, 0.9922, 0.0, 0.9922) == tuple(
        told[f"{name}_hit_ratio"] for name in ("new", "own", "other_salt", "unsalted")
    )
    assert told["p_same_timing"] == pytest.approx(1 / 18_564)
    (note,) = step(actual, "isolation").notes
    assert "4 times as fast" in note


@given(st.sets(st.integers(0, len(REQUESTS) - 1)), st.sets(st.integers(0, len(REQUESTS) - 1)))
def test_another_tenant_never_makes_a_fault(prompts: set[int], running: set[int]) -> None:
    """Hits of other clients' requests never make the verdict a suspect or a fault."""
    server = Server(hits=APART, other_prompts=prompts, other_running=running)
    actual = finding(judged(server), ID)
    assert actual.status in ("ok", "unknown"), actual.summary


@given(st.integers(0, 10**9))
def test_diagnosis_does_not_know_what_time_it_is(later_seconds: int) -> None:
    """The same probe at another time is judged the same."""
    whole = probe(Server(hits=SALTLESS))
    moved = Timeline(
        samples=tuple(replace(one, at_seconds=one.at_seconds + later_seconds) for one in whole.samples),
        marks=tuple(replace(one, at_seconds=one.at_seconds + later_seconds) for one in whole.marks),
    )
    before, after = (finding(diagnose(one, facts_of(Server())), ID) for one in (whole, moved))
    assert replace(before, last_seen_seconds=after.last_seen_seconds) == after
