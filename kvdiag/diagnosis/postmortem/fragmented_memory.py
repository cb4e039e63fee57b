"""fragmentation.allocator: enough was there in pieces. torch's advice on it, always printed, is no evidence."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.headroom import OUT, holes
from kvdiag.diagnosis.postmortem.remedies import joined, lower_fraction
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.model import Finding

ID = "fragmentation.allocator"
_ASYNC_RATIO = 0.5


def judge(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Look at the blocks where they are known, else at what torch's message says lay unused."""
    chief = case.chief
    if chief is None:
        return unseen(ID, "no failure is told")
    shortage = chief.shortage
    if shortage.kind not in OUT - {"library", "workspace"}:
        return (Finding(id=ID, status="ok", summary="no allocation of torch failed for want of memory"),)
    if shortage.kind == "async":
        return _async(case)
    found = holes(chief, limits)
    if found.state == "unknown":
        return (Finding(id=ID, status="unknown", summary=f"cannot tell: {found.reason}", evidence=evidence(case)),)
    if found.state == "none":
        return (Finding(id=ID, status="ok", summary=found.reason, evidence=evidence(case)),)
    on = chief.allocator is not None and chief.allocator.expandable_segments is True
    remedy = joined(
        None
        if on
        else "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF from torch "
        "2.10); restart now: the holes go with the process",
        lower_fraction(case, shortage.short_bytes),
    )
    full = "; they are next to nothing of the device, which was full" if found.state == "slight" else ""
    summary = f"{asked_for(case)}: {found.reason.rpartition(': ')[2]}{full}"
    return (
        Finding(id=ID, status="suspect" if full else "fault", summary=summary, evidence=evidence(case), remedy=remedy),
    )


def _async(case: Case) -> tuple[Finding, ...]:
    """What the driver's pool keeps and torch does not count is its slack, or other processes' memory."""
    chief = case.chief
    told = None if chief is None else chief.shortage
    if told is None or told.total_bytes is None or told.free_bytes is None or told.allocated_bytes is None:
        return unseen(ID, "cudaMallocAsync has no blocks to look at, and the message no figures")
    rest = told.total_bytes - told.free_bytes - told.allocated_bytes
    if rest <= _ASYNC_RATIO * told.total_bytes:
        return unseen(ID, "cudaMallocAsync has no blocks to look at")
    summary = (
        f"{asked_for(case)}: {readable_bytes(rest)} are taken, and not by what torch counts "
        f"({readable_bytes(told.allocated_bytes)}): kept by cudaMallocAsync's pool, or others' (nvidia-smi tells)"
    )
    remedy = "Use torch's own allocator: leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF."
    return (Finding(id=ID, status="suspect", summary=summary, evidence=evidence(case), remedy=remedy),)
