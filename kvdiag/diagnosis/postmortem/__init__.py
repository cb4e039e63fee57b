"""`postmortem`: why a server ran out of memory, from its crash artifacts. Pure: no clock, no I/O.

Only the first failure is judged: later ones are its consequences. The rules see it through a `Case`, in the order of
`RULES`: causes come before what they lead to, so the first fault is the headline. A trace of the time before is judged
by the usual rules (`diagnose`) and fills in every finding that the failure alone leaves unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvdiag.diagnosis import diagnose, informed
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.postmortem import fragmented_memory, pool_capacity, prior_growth, startup, transients
from kvdiag.diagnosis.postmortem.case import Case
from kvdiag.model import Diagnosis, Facts, Finding, Status
from kvdiag.oom.account import Account
from kvdiag.oom.message import parse_shortage

__all__ = ["RULES", "Case", "postmortem"]

RULES: tuple[Callable[[Case, Limits], tuple[Finding, ...]], ...] = (
    startup.judge_foreign,
    pool_capacity.judge,
    fragmented_memory.judge,
    transients.judge_capture,
    transients.judge_activation,
    startup.judge_misconfigured,
    prior_growth.judge_torch,
    prior_growth.judge_host,
)
"""Causes before their consequences: the first fault is the headline."""


def postmortem(case: Case, limits: Limits = DEFAULT_LIMITS) -> Diagnosis:
    """Judge one failure by every rule; `worst` is unknown, never ok, where no cause was found."""
    if case.timeline is not None:
        case = replace(case, before=diagnose(case.timeline, case.facts, limits))
        case = replace(case, accounts=(*case.accounts, *_accounts_of_steps(case, limits)))
    own = tuple(informed(finding) for rule in RULES for finding in rule(case, limits))
    findings = _with_the_time_before(own, case)
    seen = {finding.status for finding in findings}
    worst: Status = next((status for status in ("fault", "suspect") if status in seen), "unknown")
    if not case.accounts and case.before is not None:
        worst = case.before.worst if case.before.worst != "ok" else "unknown"
    before, times = case.before, [one.at_seconds for one in case.accounts if one.at_seconds is not None]
    return Diagnosis(
        worst=worst,
        facts=_facts(case),
        start_seconds=before.start_seconds if before is not None and before.samples else min(times, default=0.0),
        end_seconds=before.end_seconds if before is not None and before.samples else min(times, default=0.0),
        samples=0 if before is None else before.samples,
        steps=() if before is None else before.steps,
        findings=findings,
        ledger=() if before is None else before.ledger,
        gaps=tuple(dict.fromkeys((*case.gaps, *case.contradictions, *(before.gaps if before is not None else ())))),
    )


def _accounts_of_steps(case: Case, limits: Limits) -> tuple[Account, ...]:
    """Out-of-memory messages in responses to kvdiag's own requests, in the last minutes of the trace."""
    timeline = case.timeline
    if timeline is None or not timeline.samples:
        return ()
    last = timeline.samples[-1].at_seconds - limits.last_seconds
    errors = [
        error
        for span in timeline.spans()
        if span.begin_seconds >= last and span.outcome is not None
        for error in span.outcome.errors
        if "out of memory" in error.lower()
    ]
    return tuple(
        Account(origin="the trace", shortage=parse_shortage("torch", error), phase="request", phase_told_by="the trace")
        for error in errors[:1]
    )


def _with_the_time_before(own: tuple[Finding, ...], case: Case) -> tuple[Finding, ...]:
    """The findings of the failure; those of the timeline where the failure alone leaves them unknown or has none."""
    before = {} if case.before is None else {finding.id: finding for finding in case.before.findings}
    merged = []
    for finding in own:
        other = before.pop(finding.id, None)
        # That no sample shows a spike is no evidence against the one that may have crashed it.
        tells = other is not None and (other.status != "ok" or finding.id != transients.ACTIVATION)
        merged.append(other if tells and other is not None and finding.status == "unknown" != other.status else finding)
    return (*merged, *before.values())


def _facts(case: Case) -> Facts:
    if case.facts != Facts() or case.report is None:
        return case.facts
    told = case.report.settings
    return Facts(
        engine_name="vllm",
        engine_version=told.version,
        model=told.model,
        max_model_len_tokens=told.max_model_len_tokens,
        tensor_parallel=told.tensor_parallel,
        pipeline_parallel=told.pipeline_parallel,
    )
