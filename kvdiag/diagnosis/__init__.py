"""`diagnose`: the only place where a timeline is judged. Pure: no clock, no I/O, no torch.

In this order: the test steps that the timeline's marks name; every rule, for each life of the server by itself, and the
knowledge of each finding; faults that rest on unverified agent files alone are lowered to suspects (`trust`). The
status is the worst of steps and findings, in the order of `_status`; a fault or suspect of an earlier life remains the
worst, since a restart explains nothing. The memory ledger of the newest samples and all gaps are reported with it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from kvdiag.diagnosis.blocks.by_share import with_pool_by_share
from kvdiag.diagnosis.blocks.orphans import newest_owners
from kvdiag.diagnosis.confidence import with_confidence
from kvdiag.diagnosis.earlier_exits import with_earlier_exits
from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.diagnosis.growth.short_lives import with_short_lives
from kvdiag.diagnosis.growth.soak_memory import SOAK_WARMUP
from kvdiag.diagnosis.knowledge import entry_of, worded
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.lives import Lifetime, lifetimes
from kvdiag.diagnosis.prescriptions import with_known_reports
from kvdiag.diagnosis.rules import RULES
from kvdiag.diagnosis.steps import ISOLATION, SOAK, STEPS, Step
from kvdiag.diagnosis.timeline_queries import assigned_uuids, server_devices
from kvdiag.diagnosis.trust import Judged, weighed
from kvdiag.ledger import ledger
from kvdiag.model import Diagnosis, Facts, Finding, Life, Sample, Status, StepResult, Timeline

__all__ = ["diagnose", "informed"]

HISTORIES = ("prometheus", "recorder")
"""The sources that have samples of a time before now; a part that could not be read is lost."""


def diagnose(timeline: Timeline, facts: Facts, limits: Limits = DEFAULT_LIMITS) -> Diagnosis:
    """Judge a timeline by every test step in it and by every rule.

    Args:
        timeline: samples in ascending time, and the marks of test steps if there were any; from a live server, a
            recording or Prometheus.
        facts: what does not change over the timeline: the server, its pools, its processes.
        limits: the thresholds.

    Returns:
        A result for each step that the marks name, one finding for each verdict id (`unknown` where its evidence is
        missing), the memory ledger of the newest samples, all gaps, and the worst status, in the order of `_status`.

    It never raises for what a timeline holds: impossible values cannot be built (`Checked`).
    """
    facts = with_pool_by_share(timeline, facts)

    def judged(timeline: Timeline) -> Judged:
        stepped = bool(timeline.marks) or _cut_off(facts)
        steps = tuple(step.judge(timeline, facts, limits) for step in _marked(timeline)) if stepped else ()
        return steps, _findings(lifetimes(timeline, facts, limits)[-1], limits)

    steps, findings = weighed(timeline, judged(timeline), judged)
    *ended, present = lifetimes(timeline, facts, limits)
    with_gaps = [sample.gaps for sample in timeline.samples if sample.gaps]
    gaps = tuple(dict.fromkeys((*facts.gaps, *(gap for some in with_gaps for gap in some))))
    whole = not any(gap.source in HISTORIES and gap.kind == "failed" for gap in gaps)
    past = tuple(_life(one, limits, whole=whole) for one in ended)
    findings = with_short_lives(findings, (*ended, present), limits)
    findings = with_earlier_exits(findings, zip(ended, past, strict=True), limits)
    findings = tuple(with_confidence(informed(one, present.facts.engine_name)) for one in findings)
    # Of a server that is down, what was found until its last answer; of the present nothing is healthy then.
    last_worst = present_worst = _status(steps, findings, whole=whole)
    if present_worst == "ok" and _lost(timeline, facts, limits):
        present_worst = "unknown"
    if present.life.end_seconds is None:
        last_worst = present_worst
    lives = (*past, _lived(present, last_worst, findings))
    # A restart explains nothing away.
    worst = next((one for one in ("fault", "suspect") if one in {life.worst for life in lives}), present_worst)
    return Diagnosis(
        worst=worst,
        facts=facts,
        start_seconds=timeline.samples[0].at_seconds if timeline.samples else 0.0,
        end_seconds=timeline.samples[-1].at_seconds if timeline.samples else 0.0,
        samples=len(timeline.samples),
        steps=steps,
        findings=findings,
        ledger=ledger(_newest(timeline, limits), facts),
        gaps=gaps,
        lives=lives,
        profiles=tuple(conclude(one) for sample in timeline.samples for one in sample.profiles or ()),
        block_owners=newest_owners(timeline, limits),
    )


def _findings(one: Lifetime, limits: Limits) -> tuple[Finding, ...]:
    """What every rule finds in one life."""
    last = one.timeline.samples[-1].at_seconds if one.timeline.samples else None
    seen = last if one.life.end_seconds is None else one.life.end_seconds
    found = (finding for rule in RULES for finding in rule(one.timeline, one.facts, limits))
    if (unread := _unread(one)) is not None:
        found = (replace(finding, summary=unread) if finding.status == "unknown" else finding for finding in found)
    informs = (informed(replace(finding, last_seen_seconds=seen), one.facts.engine_name) for finding in found)
    return tuple(_with_reports(finding, one) for finding in informs)


def _unread(one: Lifetime) -> str | None:
    """Why a history has no sample at all, which is why anything is unknown then; `None` if it has some."""
    if one.timeline.samples:
        return None
    gaps = sorted(one.facts.gaps, key=lambda gap: gap.kind == "absent")
    return next((gap.reason for gap in gaps if gap.source in HISTORIES), None)


def _with_reports(finding: Finding, one: Lifetime) -> Finding:
    """A problem with the public reports that it matches; their data is read with the first problem."""
    is_problem = finding.status in ("fault", "suspect")
    return with_known_reports(finding, one.facts, one.timeline) if is_problem else finding


def _life(one: Lifetime, limits: Limits, *, whole: bool) -> Life:
    """The judgement of a life that is over: nothing in it is lost, for its server has exited."""

    def judged(timeline: Timeline) -> Judged:
        return (), _findings(one._replace(timeline=timeline), limits)

    _, findings = weighed(one.timeline, judged(one.timeline), judged)
    return _lived(one, _status((), findings, whole=whole), findings)


def _lived(one: Lifetime, worst: Status, findings: tuple[Finding, ...]) -> Life:
    problems = tuple(with_confidence(finding) for finding in findings if finding.status in ("fault", "suspect"))
    return replace(one.life, worst=worst, findings=problems)


def _marked(timeline: Timeline) -> tuple[Step, ...]:
    marked = {mark.step for mark in timeline.marks}
    if ISOLATION.id in marked:
        return (ISOLATION,)
    return (*STEPS, SOAK) if marked & {SOAK.id, SOAK_WARMUP} else STEPS


def informed(finding: Finding, engine_name: str | None = None) -> Finding:
    """The finding with the knowledge of its verdict, where the rule did not bring its own, in the engine's words."""
    entry = entry_of(finding.id, engine_name)
    return replace(
        finding,
        likely_cause=worded(finding.likely_cause, engine_name) if finding.likely_cause else entry.likely_cause,
        confirm=worded(finding.confirm, engine_name) if finding.confirm else entry.confirm,
        remedy=worded(finding.remedy, engine_name) if finding.remedy else entry.remedy,
        runbook=finding.runbook or entry.runbook,
    )


def _status(steps: tuple[StepResult, ...], findings: tuple[Finding, ...], *, whole: bool) -> Status:
    """The first of these that holds; `whole` is whether all that was recorded could be read.

    1. `fault`, then `suspect`: any step or finding has it.
    2. `unknown`: a part of the history was lost, a step could not be judged, growth, exits or bytes were observed that
       nothing explains (`Finding.is_unexplained`), or without steps leak.kv_blocks itself is unknown.
    3. `ok`, of the present only if no source is lost (`_lost`). A finding that is unknown because something does not
       exist here (no GPU, no allocator statistics) changes nothing: it is listed, and the outputs name what the verdict
       leaves out.
    """
    statuses = {step.status for step in steps} | {one.status for one in findings if one.status != "unknown"}
    for status in ("fault", "suspect"):
        if status in statuses:
            return status
    blocks = {finding.status for finding in findings if finding.id == "leak.kv_blocks"}
    undecided = any(one.is_unexplained for one in findings)
    undecided = undecided or "unknown" in statuses or (not steps and blocks == {"unknown"})
    return "unknown" if undecided or not whole else "ok"


def _cut_off(facts: Facts) -> bool:
    """Whether the timeline is a trace that ends before its recorder did."""
    return any(gap.source == "trace" for gap in facts.gaps)


def _lost(timeline: Timeline, facts: Facts, limits: Limits) -> bool:
    """Whether a source or one of the server's GPUs failed up to the end, or there is no sample."""
    newest = (_engine_failures(timeline), _device_failures(timeline, assigned_uuids(timeline, facts)))
    last = [list(islice(failures, limits.lost_readings)) for failures in newest]
    return _cut_off(facts) or not timeline.samples or any(failures and all(failures) for failures in last)


def _engine_failures(timeline: Timeline) -> Iterator[bool]:
    """Whether each read of the engines failed, the newest first."""
    first = next((place for place, one in enumerate(timeline.samples) if _was_read(one)), len(timeline.samples))
    for sample in reversed(timeline.samples[first:]):
        # A server that never answered is starting; one that answered before and is absent now is lost.
        if _was_read(sample) or any(gap.source == "engine" for gap in sample.gaps):
            yield sample.engines is None


def _was_read(sample: Sample) -> bool:
    return sample.engines is not None or any(gap.source == "engine" and gap.kind != "absent" for gap in sample.gaps)


def _device_failures(timeline: Timeline, own: frozenset[str]) -> Iterator[bool]:
    """Whether each read of the devices failed, the newest first."""
    for sample in reversed(timeline.samples):
        kinds = {gap.kind for gap in sample.gaps if gap.source == "nvml"}
        if sample.devices is None and not kinds:
            continue
        dark = any(device.memory is None for device in server_devices(sample.devices, own))
        # A source that was never there is not lost, even if a read of it once timed out.
        lost = sample.devices is None and "absent" not in kinds
        yield lost or (dark and bool(kinds - {"absent"}))


def _newest(timeline: Timeline, limits: Limits) -> Sample | None:
    """The newest of every part in one sample: parts are read at different rates, process lists most rarely."""
    if not timeline.samples:
        return None
    engines = next((sample.engines for sample in reversed(timeline.samples) if sample.engines), None)
    newest = next((sample for sample in reversed(timeline.samples) if sample.devices), None)
    since = math.inf if newest is None else newest.at_seconds - limits.process_lists_seconds
    recent = reversed(timeline.between(since, math.inf))
    listed = (one for one in recent if any(device.processes is not None for device in one.devices or ()))
    newest = next(listed, newest)
    devices = None if newest is None else newest.devices
    # The allocators' sample nearest to the devices', if it is near enough.
    at_seconds = math.inf if newest is None else newest.at_seconds
    published = [(abs(one.at_seconds - at_seconds), one.allocators) for one in timeline.samples if one.allocators]
    apart, allocators = min(published, key=lambda one: one[0], default=(math.inf, None))
    if apart > limits.process_lists_seconds:
        allocators = None
    return replace(timeline.samples[-1], engines=engines, devices=devices, allocators=allocators)
