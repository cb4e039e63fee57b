"""Unverified publications are marked as such, and are never the only ground of a fault."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.trust import MARK, verified, weighed
from kvdiag.model import Allocator, Diagnosis, Evidence, Finding, Memory, Sample, StepResult, Timeline
from kvdiag.sources.agents.agent_publication import devices_inside
from tests.builders.answers import rows, step
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, NO_NVML, engine
from tests.builders.worlds import World, facts
from tests.unit.diagnosis.failures import FIRST, REFUSED, SERVER


def doubted(each: Allocator) -> Allocator:
    """The same publication, from a process that is not visible."""
    return replace(each, pid_seen=False, unverified=True)


def of(diagnosis: Diagnosis, finding_id: str) -> Finding:
    """The finding of this id."""
    (found,) = (one for one in diagnosis.findings if one.id == finding_id)
    return found


def failing(*changed: tuple[Allocator, Allocator]) -> Diagnosis:
    """A server whose processes publish this first and last."""
    first, last = zip(*changed, strict=True)
    samples = (
        Sample(at_seconds=0.0, engines=(engine(),), allocators=first),
        Sample(at_seconds=15.0, engines=(engine(),), allocators=last),
    )
    return diagnose(Timeline(samples=samples), SERVER)


def test_an_unverified_publication_makes_no_fault() -> None:
    """A fault becomes a suspect if its process is unverified: the summary says so, and the worst status follows."""
    seen, unseen = failing((FIRST, REFUSED)), failing((doubted(FIRST), doubted(REFUSED)))
    known, found = of(seen, "spike.activation"), of(unseen, "spike.activation")
    assert ("fault", "fault") == (seen.worst, known.status)
    assert ("suspect", "suspect") == (unseen.worst, found.status)
    assert "unverified" in found.summary
    assert (*known.evidence, MARK) == found.evidence
    assert ("publications", "unverified", "", "agent") == rows(found)[-1]
    assert MARK not in known.evidence


def test_a_fault_that_stands_without_it_stays_one() -> None:
    """A fault of a verified process remains one next to an unverified process, which the evidence marks."""
    other = doubted(replace(FIRST, pid=999, title="VLLM::Worker_TP1"))
    found = of(failing((FIRST, REFUSED), (other, other)), "spike.activation")
    assert "fault" == found.status
    assert MARK in found.evidence


def test_findings_that_rest_on_it_in_part_say_so() -> None:
    """One figure of an agent among others is enough; without any the finding stays as it is."""
    figures = tuple(Evidence(source, 1, "bytes", source) for source in ("nvml", "torch", "computed"))
    findings = (Finding("leak.host", "ok", "", figures), Finding("leak.kv_blocks", "ok", "", figures[:1]))
    timeline = Timeline(samples=(Sample(at_seconds=0.0, allocators=(doubted(FIRST),)),))
    _, actual = weighed(timeline, ((), findings), lambda _: ((), ()))
    assert (replace(findings[0], evidence=(*figures, MARK)), findings[1]) == actual


def test_only_steps_that_fail_without_it_stay_faults() -> None:
    """Judged again without the agent's figures, a step that is no fault any more is a suspect, with the reason."""
    steps = (StepResult("baseline", "fault", ""), StepResult("concurrent", "fault", ""), StepResult("soak", "ok", ""))
    timeline = Timeline(samples=(Sample(at_seconds=0.0, allocators=(doubted(FIRST),)),))
    actual, _ = weighed(timeline, (steps, ()), lambda _: (steps[:1], ()))
    assert [("fault", 0), ("suspect", 1), ("ok", 0)] == [(one.status, len(one.notes)) for one in actual]


def unverified(timeline: Timeline) -> Timeline:
    """The same with agents of processes that kvdiag cannot see."""
    samples = timeline.samples
    return replace(
        timeline, samples=tuple(replace(one, allocators=tuple(map(doubted, one.allocators or ()))) for one in samples)
    )


def test_growth_that_nvml_shows_as_well_is_a_fault() -> None:
    """Without the agents it is a fault under either id: they only say which."""
    world = World(agents=True, device_growth_bytes=6 * MIB)
    found = diagnose(unverified(run(world)), facts(world))
    assert "fault" == of(found, "leak.device_non_torch").status == step(found, "single_request").status


@pytest.mark.parametrize("finding_id", ["leak.device_torch", "leak.device_non_torch"])
def test_steps_with_unverified_publications_alone_make_no_fault(finding_id: str) -> None:
    """Growth that only unverified agents report is a suspect, and no step is a fault."""
    torch = finding_id == "leak.device_torch"
    world = World(
        agents=True,
        nvml=None if torch else NO_NVML,
        torch_growth_bytes=MIB // 10 if torch else 0,
        device_growth_bytes=0 if torch else 6 * MIB,
    )
    timeline = run(world)
    known, found = (diagnose(one, facts(world)) for one in (timeline, unverified(timeline)))

    assert "fault" == of(known, finding_id).status
    assert "suspect" == of(found, finding_id).status
    assert "fault" not in {finding.status for finding in found.findings}
    assert "fault" not in {step.status for step in found.steps}
    assert MARK in of(found, finding_id).evidence


def test_gpus_that_only_agents_tell_of_go_with_them() -> None:
    """A device that was made of an unverified publication is no second witness."""
    memory = Memory(total_bytes=80 * GIB, free_bytes=1 * GIB)
    inside = replace(FIRST, memory=memory, process_bytes=9 * GIB)
    sample = Sample(at_seconds=0.0, allocators=(doubted(inside),), devices=devices_inside((inside,)))
    assert Sample(at_seconds=0.0) == verified(sample)
    assert replace(sample, allocators=(inside,)) == verified(replace(sample, allocators=(inside,)))
