"""What nobody vouches for is never the only ground of a fault: a diagnosis is made again without it, and compared.

A process that cannot be seen from here may be anybody's invention: so may what is published of it. It is shown, and
told as such; that a fault stands without it, a second look decides, whatever the rule is and however it came to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvdiag.diagnosis.rule import number
from kvdiag.model import INSIDE, Finding, Sample, StepResult, Timeline, cuda_uuid

SOURCES = ("torch", "black box", "agent")
"""Of evidence that agents publish."""

MARK = number("publications", "unverified", "", "agent")
WHY = "unverified: it rests on publications of processes that cannot be seen from here"

Judged = tuple[tuple[StepResult, ...], tuple[Finding, ...]]


def weighed(timeline: Timeline, judged: Judged, again: Callable[[Timeline], Judged]) -> Judged:
    """Steps and findings, none of them a fault that unverified publications alone would make one.

    `again` judges another timeline in the same way.
    """
    if not any(each.unverified for sample in timeline.samples for each in sample.allocators or ()):
        return judged
    steps, findings = judged
    if _faults(judged):
        kept = _faults(again(replace(timeline, samples=tuple(verified(sample) for sample in timeline.samples))))
        steps = tuple(one if one.status != "fault" or one.id in kept else _doubted_step(one) for one in steps)
        findings = tuple(one if one.status != "fault" or one.id in kept else _doubted(one) for one in findings)
    return steps, tuple(_marked(one) for one in findings)


def _faults(judged: Judged) -> set[str]:
    """The ids of steps and findings that are faults."""
    steps, findings = judged
    return {step.id for step in steps if step.status == "fault"} | {
        finding.id for finding in findings if finding.status == "fault"
    }


def verified(sample: Sample) -> Sample:
    """A sample without what is unverified: the allocators, and the GPUs that they alone tell of."""
    doubted = {each.device_uuid.lower() for each in sample.allocators or () if each.unverified}
    if not doubted:
        return sample
    devices = tuple(each for each in sample.devices or () if each.name != INSIDE or cuda_uuid(each.uuid) not in doubted)
    allocators = tuple(each for each in sample.allocators or () if not each.unverified)
    return replace(sample, allocators=allocators or None, devices=devices or None)


def _doubted(finding: Finding) -> Finding:
    return replace(finding, status="suspect", summary=f"{finding.summary} ({WHY})", evidence=(*finding.evidence, MARK))


def _doubted_step(step: StepResult) -> StepResult:
    return replace(step, status="suspect", notes=(*step.notes, WHY))


def _marked(finding: Finding) -> Finding:
    rests = any(one.source in SOURCES for one in finding.evidence) and MARK not in finding.evidence
    return replace(finding, evidence=(*finding.evidence, MARK)) if rests else finding
