"""isolation.prefix_cache: its figures, each with its unit, and those of the step."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.isolation_prefix_cache import judge
from kvdiag.diagnosis.steps import ISOLATION
from kvdiag.model import Finding, MeasuredFigures, StepFigures, StepResult, Timeline
from tests.builders.answers import ANY_TEXT, only, rows
from tests.builders.isolation_timeline import REQUESTS, SALTLESS, Server, facts_of, probe

HIT = 0.9922
"""127 whole blocks of 2,048 tokens: 2,032 of them, to four places."""


def verdict(server: Server, timeline: Timeline | None = None) -> Finding:
    """The rule's one finding."""
    return only(judge, probe(server) if timeline is None else timeline, facts_of(server))


def result(server: Server, timeline: Timeline | None = None) -> StepResult:
    """The step's result."""
    return ISOLATION.judge(probe(server) if timeline is None else timeline, facts_of(server), DEFAULT_LIMITS)


@pytest.mark.parametrize(("other_key", "keys"), [(False, 1), (True, 2)])
def test_both_sides_are_reported_by_counters_and_by_the_clock(other_key: bool, keys: int) -> None:
    """Thirty requests of alternating kinds; a miss takes 40 ms and a hit 10, each a thousandth longer than the last."""
    # The middle place of new prompts is 14, as of own ones and another's salt, without one 16.5
    milliseconds = (40 * 1.014, 10 * 1.014, 40 * 1.014, 10 * 1.0165)

    actual = verdict(Server(other_key=other_key))

    # Six hits are all the fastest of 18 times: 1 way of 18,564
    assert [
        ("requests_judged", 30, "requests", "kvdiag"),
        ("new_hit_ratio", 0.0, "ratio", "engine"),
        ("own_hit_ratio", HIT, "ratio", "engine"),
        ("other_salt_hit_ratio", 0.0, "ratio", "engine"),
        ("unsalted_hit_ratio", HIT, "ratio", "engine"),
        ("keys", keys, "keys", "kvdiag"),
        *(
            (f"first_token_{name}", pytest.approx(value, abs=0.0051), "ms", "kvdiag")
            for name, value in zip(("new", "own", "other_salt", "other_unsalted"), milliseconds, strict=True)
        ),
        ("p_same_timing", pytest.approx(1 / 18_564), "p-value", "kvdiag"),
    ] == rows(actual)
    assert "isolation.prefix_cache" == actual.id


def test_times_are_reported_to_a_hundredth_of_a_millisecond() -> None:
    """A third of a millisecond, and 14 thousandths of it: 0.338."""
    actual = verdict(Server(hit_seconds=1 / 3000, miss_seconds=0.01))
    assert 0.34 == {one.name: one.value for one in actual.evidence}["first_token_own"]


def test_requests_that_failed_are_not_judged_and_have_no_time() -> None:
    """Where the tenant's own repetitions all failed, there is nothing to compare by the clock."""
    own = [place for place, one in enumerate(REQUESTS) if one.probe is not None and one.probe.kind == "same_salt"]

    actual = verdict(Server(failing=own))

    told = {one.name: one.value for one in actual.evidence}
    assert (24, None, None, None) == (
        told["requests_judged"],
        told["own_hit_ratio"],
        told["first_token_own"],
        told["p_same_timing"],
    )


def test_the_step_has_the_shares_that_must_be_nothing() -> None:
    """With another tenant's salt, and without one, the expected hit ratio is 0; the measured one stands next to it."""
    whole = probe(Server(hits=SALTLESS))
    marks = (replace(whole.marks[0], notes=("scaled",)), *whole.marks[1:])
    actual = result(Server(), Timeline(samples=whole.samples, marks=marks))

    assert ("isolation", "fault") == (actual.id, actual.status)
    assert StepFigures(other_salt_hit_ratio=0.0, other_unsalted_hit_ratio=0.0) == actual.expected
    hits = MeasuredFigures(own_hit_ratio=HIT, other_salt_hit_ratio=HIT, other_unsalted_hit_ratio=HIT)
    assert replace(hits, requests=30) == actual.measured
    assert "scaled" == actual.notes[0]


def test_requests_that_could_not_be_judged_are_not_counted() -> None:
    """Six of thirty requests overlap with another client's prompt, so 24 are counted."""
    actual = result(Server(other_prompts=range(6)))
    assert 24 == actual.measured.requests


def test_without_a_probe_nothing_is_said() -> None:
    """Neither by the rule nor by the step."""
    nothing = Timeline(samples=())
    assert Finding(id="isolation.prefix_cache", status="unknown", summary=ANY_TEXT) == verdict(Server(), nothing)
    assert ("isolation", "unknown", ()) == (
        result(Server(), nothing).id,
        result(Server(), nothing).status,
        result(Server(), nothing).notes,
    )


def test_what_the_probe_offers() -> None:
    """Thirty requests, one after the other: 2,048 tokens in, and the first token out."""
    offered = ISOLATION.workload
    assert ("isolation", 30, 1, 2_048, 1) == (
        ISOLATION.id,
        ISOLATION.cycles,
        offered.requests,
        offered.prompt_tokens,
        offered.max_tokens,
    )
    assert offered.probe is not None
    assert "first" == offered.probe.kind
