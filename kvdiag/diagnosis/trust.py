"""Unverified agent files never cause a fault alone.

If kvdiag cannot see a process, anybody could have written the file that describes it. A diagnosis with such files and a
fault is made a second time without them: a fault that disappears becomes a suspect. This holds for every rule and step,
however it uses the files. Evidence from agents is marked either way.
"""

from collections.abc import Callable
from dataclasses import replace

from kvdiag.model import INSIDE, Evidence, Finding, Sample, StepResult, Timeline, cuda_uuid

SOURCES = ("torch", "black box", "agent")
"""Sources of evidence that agents publish."""

MARK = Evidence("publications", "unverified", "", "agent")
WHY = "unverified: based only on agent files of processes that kvdiag cannot see"

Judged = tuple[tuple[StepResult, ...], tuple[Finding, ...]]


def weighed(timeline: Timeline, judged: Judged, again: Callable[[Timeline], Judged]) -> Judged:
    """Return the steps and findings with faults that rest on unverified files alone lowered to suspect.

    `again` judges another timeline in the same way.
    """
    published = (sample for sample in timeline.samples if sample.allocators or sample.block_owners)
    if all(verified(sample) is sample for sample in published):
        return judged
    if not _faults(judged):
        return lowered(judged, judged)
    return lowered(judged, again(replace(timeline, samples=tuple(verified(sample) for sample in timeline.samples))))


def lowered(judged: Judged, sure: Judged) -> Judged:
    """Return steps and findings with the faults that are none in `sure`, without unverified files, as suspects."""
    steps, findings = judged
    kept = _faults(sure)
    steps = tuple(one if one.status != "fault" or one.id in kept else _doubted_step(one) for one in steps)
    findings = tuple(one if one.status != "fault" or one.id in kept else _doubted(one) for one in findings)
    return steps, tuple(_marked(one) for one in findings)


def _faults(judged: Judged) -> set[str]:
    """The ids of faults; growth that may be torch's or not has both, and agents only say which."""
    steps, findings = judged
    found = {name for one in findings if one.status == "fault" for name in (one.id, one.or_id or one.id)}
    return found | {step.id for step in steps if step.status == "fault"}


def verified(sample: Sample) -> Sample:
    """Return the sample without unverified allocators and owners, and without GPUs that only they report."""
    if any(each.unverified for each in sample.block_owners or ()):
        counted = tuple(each for each in sample.block_owners or () if not each.unverified)
        sample = replace(sample, block_owners=counted or None)
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
