"""`postmortem`: why a server ran out of memory, from its crash artifacts. Pure: no clock, no I/O.

Only the first failure is judged: later ones are its consequences. The rules see it through a `Case`, in the order of
`RULES`: causes come before what they lead to, so the first fault is the headline. A trace of the time before is judged
by the usual rules (`diagnose`) and fills in every finding that the failure alone leaves unknown.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvdiag.diagnosis import diagnose, informed
from kvdiag.diagnosis.knowledge import with_assumption
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.postmortem import pool_exhaustion, startup, transients
from kvdiag.diagnosis.postmortem.case import OF_ANY_ENGINE, Case
from kvdiag.diagnosis.prescriptions import with_known_reports
from kvdiag.diagnosis.request_failures import oom_error
from kvdiag.diagnosis.trust import lowered
from kvdiag.formatting import format_bytes, format_duration, format_time
from kvdiag.model import Diagnosis, Facts, Finding, Status
from kvdiag.oom.account import Account
from kvdiag.oom.message import parse_shortage

__all__ = ["RULES", "Case", "postmortem"]

UNKNOWN_WITHOUT_FAILURE: Mapping[str, Callable[[Case, Limits], Finding]] = {
    startup.FOREIGN: startup.judge_foreign,
    startup.CONTEXT: startup.judge_context,
    transients.HOLES: transients.judge_fragmentation,
    transients.CAPTURE: transients.judge_capture,
    transients.ACTIVATION: transients.judge_activation,
    startup.MISCONFIGURED: startup.judge_misconfigured,
}
"""Causes before their consequences: the first fault is the headline. Each is unknown without a failure."""

RULES: tuple[Callable[[Case, Limits], Finding | None], ...] = (
    *UNKNOWN_WITHOUT_FAILURE.values(),
    pool_exhaustion.judge_lost_blocks,
    pool_exhaustion.judge_concurrency,
    transients.judge_torch_growth,
    transients.judge_host_growth,
)
"""Every rule. `None`: the verdict does not apply."""


def postmortem(case: Case, limits: Limits = DEFAULT_LIMITS) -> Diagnosis:
    """Judge one failure by every rule; `worst` is unknown, never ok, where no cause was found."""
    if case.timeline is not None:
        case = replace(case, before=diagnose(case.timeline, case.facts, limits))
        case = replace(case, accounts=(*case.accounts, *_accounts_of_steps(case, limits)))
    findings = _findings(case, limits)
    if any(one.unverified for one in case.accounts):
        sure = replace(case, accounts=tuple(one for one in case.accounts if not one.unverified))
        _, findings = lowered(((), findings), ((), _findings(sure, limits)))
    statuses = {finding.status for finding in findings}
    worst: Status = next((status for status in ("fault", "suspect") if status in statuses), "unknown")
    before, times = case.before, [one.at_seconds for one in case.accounts if one.at_seconds is not None]
    if not case.accounts and before is not None:
        worst = before.worst if before.worst != "ok" else "unknown"
    sampled = before is not None and before.samples
    return Diagnosis(
        worst=worst,
        facts=_facts(case),
        start_seconds=before.start_seconds if before is not None and sampled else min(times, default=0.0),
        end_seconds=before.end_seconds if before is not None and sampled else min(times, default=0.0),
        samples=0 if before is None else before.samples,
        steps=() if before is None else before.steps,
        findings=findings,
        ledger=() if before is None else before.ledger,
        gaps=tuple(dict.fromkeys((*case.gaps, *case.contradictions, *(before.gaps if before is not None else ())))),
    )


def _findings(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """What every rule finds, and what the trace of the time before shows."""
    if case.accounts:
        own = [finding for rule in RULES if (finding := rule(case, limits)) is not None]
    else:
        where = f"in {', '.join(case.clean_logs)}" if case.clean_logs else "found"
        missing = f"no out-of-memory failure {where}; pass the crashed run's log, a black box or torch's error message"
        missing += _observed(case)
        own = [Finding(verdict, "unknown", missing) for verdict in UNKNOWN_WITHOUT_FAILURE]
    name = case.engine_name or case.facts.engine_name
    explained = tuple(informed(finding, name) for finding in own)
    if name is None and not case.has_report and case.accounts and case.failure.shortage.kind in OF_ANY_ENGINE:
        explained = tuple(
            replace(one, remedy=with_assumption(one.remedy or "")) if one.status in ("fault", "suspect") else one
            for one in explained
        )
    facts = _facts(case)
    explained = tuple(with_known_reports(finding, facts, signs=case.signs) for finding in explained)
    return _with_the_time_before(explained, case)


def _observed(case: Case) -> str:
    """What a trace without a failure shows of the crash all the same: whether the server answered, and its peak."""
    samples = () if case.timeline is None else case.timeline.samples
    if not samples:
        return ""
    last = next((sample.at_seconds for sample in reversed(samples) if sample.engines is not None), None)
    seconds = format_duration(samples[-1].at_seconds - samples[0].at_seconds)
    known = f"the server never answered in {seconds}" if last is None else f"the last answer was at {format_time(last)}"
    read = [(one.memory.free_bytes, one.who) for sample in samples for one in sample.devices or () if one.memory]
    least = "".join(f", and {who} had at least {format_bytes(free)} free" for free, who in sorted(read)[:1])
    return f" (known: {known}{least})"


def _accounts_of_steps(case: Case, limits: Limits) -> tuple[Account, ...]:
    """The first out-of-memory message in responses to kvdiag's own requests, in the last minutes of the trace."""
    timeline = case.timeline
    if timeline is None or not timeline.samples:
        return ()
    last = timeline.samples[-1].at_seconds - limits.last_seconds
    errors = (oom_error(span.outcome) for span in timeline.spans() if span.begin_seconds >= last)
    error = next(filter(None, errors), None)
    if error is None:
        return ()
    shortage = parse_shortage("torch", error)
    return (Account(origin="the trace", shortage=shortage, phase="request", phase_source="the trace"),)


def _with_the_time_before(own: tuple[Finding, ...], case: Case) -> tuple[Finding, ...]:
    """The findings of the failure; those of the timeline where the failure alone leaves them unknown or has none."""
    before = {} if case.before is None else {finding.id: finding for finding in case.before.findings}
    merged = []
    for finding in own:
        other = before.pop(finding.id, finding)
        # That no sample shows a spike is no evidence against the one that may have crashed it.
        decides = other.status != "ok" or finding.id != transients.ACTIVATION
        merged.append(other if decides and finding.status == "unknown" != other.status else finding)
    return (*merged, *before.values())


def _facts(case: Case) -> Facts:
    connector, features = case.facts.kv_connector or case.kv_connector, case.facts.features
    features = case.features if features is None else features
    if case.facts != Facts() or not case.has_report:
        name = case.facts.engine_name or case.engine_name
        same = case.facts.engine_name in {None, case.engine_name}
        version = case.facts.engine_version or (case.report.settings.version if same else None)
        return replace(case.facts, engine_name=name, engine_version=version, kv_connector=connector, features=features)
    settings = case.report.settings
    return Facts(
        engine_name=case.engine_name,
        engine_version=settings.version,
        model=settings.model,
        max_model_len_tokens=settings.max_model_len_tokens,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        kv_connector=connector,
        features=features,
    )
