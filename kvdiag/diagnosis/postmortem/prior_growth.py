"""leak.*: whether what ran out had been growing. One moment shows no growth, unless the start's figures stand by."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, evidence, serving
from kvdiag.diagnosis.postmortem.headroom import OUT
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.model import Finding

TORCH = "leak.device_torch"
HOST = "leak.host"


def judge_torch(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Compare what torch held with weights, pool and peak activation of the start."""
    chief, rank = case.chief, case.rank
    if chief is None or chief.shortage.kind not in OUT or (chief.phase is not None and not serving(case)):
        return ()
    allocated = chief.shortage.allocated_bytes
    if allocated is None or rank is None or rank.weights is None or rank.pool is None:
        return unseen(TORCH, "what torch held at start is not told; the log of the start, or a trace of hours, would")
    total = case.total_bytes or 0
    peak = round(limits.activation_ratio * total) if rank.activation is None else rank.activation.nominal_bytes
    graphs = 0 if rank.graphs_actual is None else rank.graphs_actual.nominal_bytes
    planned = rank.weights.nominal_bytes + rank.pool.nominal_bytes + peak + graphs
    over = allocated - planned
    told = f"torch held {readable_bytes(allocated)}, and {readable_bytes(planned)} by the figures of its start"
    if over > max(limits.reserved_gap_bytes, round(limits.over_budget_ratio * total)):
        summary = f"{told}: {readable_bytes(over)} more, which either grew or belong to this one step"
        return (Finding(id=TORCH, status="suspect", summary=summary, evidence=evidence(case)),)
    return (Finding(id=TORCH, status="ok", summary=told, evidence=evidence(case)),)


def judge_host(case: Case, limits: Limits) -> tuple[Finding, ...]:  # noqa: ARG001 - every rule is called alike
    """A kill by the kernel says how much was held, and not whether it grew."""
    chief = case.chief
    if chief is None or chief.shortage.kind != "host":
        return ()
    held = chief.shortage.process_bytes
    who = "the process" if held is None else f"the process, which held {readable_bytes(held)},"
    return (
        Finding(
            id=HOST,
            status="unknown",
            summary=f"cannot tell: {who} ended for want of the host's memory, not the GPU's; whether that had grown, a "
            "trace or the container's memory over the hours before would tell",
            evidence=evidence(case),
        ),
    )
