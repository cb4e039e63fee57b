"""A whole diagnosis: the verdict on each kind of server, its steps and findings, and which is the worst."""

import pytest
from hypothesis import given

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.rules import RULES
from kvdiag.diagnosis.steps import STEPS
from kvdiag.model import Facts, Status, Timeline
from tests.builders.answers import statuses
from tests.builders.runs import judged, run
from tests.builders.worlds import WORLDS, World, facts
from tests.unit.diagnosis.any_worlds import few, worlds

VERDICTS: dict[str, Status] = {
    "healthy": "ok",
    "two GPUs, tensor parallel": "ok",
    "two engines, data parallel": "ok",
    "sliding window": "ok",
    "pool without bytes": "ok",
    "no pool": "unknown",
    "no GPU": "ok",
    "GPU lost": "unknown",
    "memory not told": "ok",
    "processes not told": "ok",
    "server not seen": "ok",
    "usage not told": "unknown",
    "blocks leak": "fault",
    "blocks held at start": "fault",
    "device memory leaks": "fault",
    "torch leaks": "fault",
    "leak beside torch": "fault",
    "agents on two GPUs": "ok",
    "ranks uneven": "suspect",
    "warm-up": "ok",
    "foreign process": "fault",
    "foreign process of unknown size": "unknown",
    "zombie": "suspect",
    "blocks wasted": "fault",
    "requests wait": "suspect",
    "requests are preempted": "fault",
    "one request runs out of memory": "fault",
    "ten requests find no hole": "fault",
    "requests fail": "unknown",
    "other traffic": "unknown",
    "other prompts": "unknown",
    "loads not seen": "unknown",
    "cut short": "unknown",
    "server lost": "unknown",
}

FAULTS: dict[str, set[str]] = {
    "torch leaks": {"leak.device_torch"},
    "ranks uneven": {"imbalance.rank"},
    "leak beside torch": {"leak.device_non_torch"},
    "blocks leak": {"leak.kv_blocks"},
    "blocks held at start": {"leak.kv_blocks"},
    "device memory leaks": {"leak.device_torch"},
    "foreign process": {"baseline.foreign_memory"},
    "zombie": {"baseline.foreign_memory"},
    "blocks wasted": {"fragmentation.kv_waste"},
    "requests wait": {"capacity.concurrency"},
    "requests are preempted": {"capacity.concurrency"},
    "one request runs out of memory": {"capacity.long_context"},
    "ten requests find no hole": {"fragmentation.allocator"},
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_gets_its_verdict(name: str) -> None:
    """The worst of each kind of server, and the findings that accuse: those and no other."""
    actual = judged(WORLDS[name])
    accused = {one.id for one in actual.findings if one.status in {"fault", "suspect"}}
    assert (VERDICTS[name], FAULTS.get(name, set())) == (actual.worst, accused)


def test_every_world_is_judged() -> None:
    """No world is left out of the table."""
    assert list(WORLDS) == list(VERDICTS)


def test_steps_come_in_their_order() -> None:
    """A run that loses the server has a result for each step, in order."""
    assert tuple(one.id for one in STEPS) == tuple(one.id for one in judged(World(lost_in="single_request")).steps)


def test_every_verdict_is_known() -> None:
    """Each id that a rule answers with has its entry, with every part and a runbook of its own name."""
    ids = [one.id for one in judged().findings]
    # None comes twice, and all are known
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(KNOWLEDGE)
    for verdict, entry in KNOWLEDGE.items():
        assert f"alerts/runbooks/{verdict}.md" == entry.runbook
        assert all((entry.symptom, entry.likely_cause, entry.confirm, entry.remedy))


def test_findings_bring_cause_check_and_remedy() -> None:
    """What is known of a verdict comes with each finding."""
    for one in judged(World(leaked_blocks_per_request=4)).findings:
        entry = KNOWLEDGE[one.id]
        assert (entry.likely_cause, entry.confirm, entry.remedy, entry.runbook) == (
            one.likely_cause,
            one.confirm,
            one.remedy,
            one.runbook,
        )


@few
@given(worlds())
def test_every_rule_answers_every_id_each_time(world: World) -> None:
    """In any world each verdict occurs once, in the same order, and has a summary."""
    actual = judged(world)
    assert list(statuses(judged().findings)) == [one.id for one in actual.findings]
    assert all(summary for summary in (one.summary for one in actual.findings))
    assert all(summary for summary in (one.summary for one in actual.steps))


@few
@given(worlds())
def test_the_worst_is_what_was_found(world: World) -> None:
    """Fault before suspect before unknown before ok; unknown findings alone are no reason for unknown."""
    actual = judged(world)
    found = {one.status for one in actual.steps} | {one.status for one in actual.findings}

    if "fault" in found:
        assert "fault" == actual.worst
    elif "suspect" in found:
        assert "suspect" == actual.worst
    else:
        assert actual.worst in {"ok", "unknown"}
        assert ("ok" == actual.worst) <= ({"ok"} == {one.status for one in actual.steps})


def test_limits_are_taken_from_their_one_value() -> None:
    """A caller's own limits are the ones that count."""
    world = World(extra_blocks_per_request=2)
    # A wider tolerance is all it takes
    assert "suspect" == diagnose(run(world), facts(world)).worst
    assert "ok" == diagnose(run(world), facts(world), Limits(blocks_per_request_tolerance=2)).worst


def test_a_rule_is_a_function_of_what_it_is_given() -> None:
    """Each rule answers with a tuple of findings for nothing at all."""
    for rule in RULES:
        found = rule(Timeline(samples=()), Facts(), DEFAULT_LIMITS)
        assert {"unknown"} == {one.status for one in found}
