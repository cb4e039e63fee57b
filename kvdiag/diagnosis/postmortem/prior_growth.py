"""leak.*: whether the memory that ran out had been growing.

One failure shows no growth by itself: torch's bytes are compared with the figures of the start in the log, and a kill
for host memory stays unknown without a history.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, evidence, serving
from kvdiag.diagnosis.postmortem.headroom import OUT
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding

TORCH = "leak.device_torch"
HOST = "leak.host"


def judge_torch(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Compare torch's allocated bytes with weights, pool and peak activation at start."""
    chief, rank = case.chief, case.rank
    if chief is None or chief.shortage.kind not in OUT or (chief.phase is not None and not serving(case)):
        return ()
    allocated = chief.shortage.allocated_bytes
    if allocated is None or rank is None or rank.weights is None or rank.pool is None:
        return unknown(
            TORCH, "torch's allocated bytes at start are missing; add the startup log or an hours-long trace"
        )
    total = case.total_bytes or 0
    peak = round(limits.activation_ratio * total) if rank.activation is None else rank.activation.nominal_bytes
    graphs = 0 if rank.graphs_actual is None else rank.graphs_actual.nominal_bytes
    planned = rank.weights.nominal_bytes + rank.pool.nominal_bytes + peak + graphs
    over = allocated - planned
    told = f"torch had allocated {format_bytes(allocated)}; by its figures at start {format_bytes(planned)}"
    if over > max(limits.reserved_gap_bytes, round(limits.over_budget_ratio * total)):
        summary = f"{told}: {format_bytes(over)} more, which grew or belong to this one step"
        return (Finding(TORCH, "suspect", summary, evidence(case)),)
    return (Finding(TORCH, "ok", told, evidence(case)),)


def judge_host(case: Case, limits: Limits) -> tuple[Finding, ...]:  # noqa: ARG001 - every rule is called alike
    """A kill by the kernel reports how much was in use, not whether it grew."""
    chief = case.chief
    if chief is None or chief.shortage.kind != "host":
        return ()
    held = chief.shortage.process_bytes
    who = "the process" if held is None else f"the process, using {format_bytes(held)},"
    summary = (
        f"{who} was killed for lack of host memory, not GPU memory; check a trace or the container's memory history "
        "for growth"
    )
    return (Finding(HOST, "unknown", summary, evidence(case)),)
