"""fragmentation.allocator: enough memory was free, but not in one block.

Blocks decide where a black box has them, else torch's message (`headroom.holes`). torch's advice about fragmentation
is always printed and is no evidence. cudaMallocAsync has no blocks: only a large rest that torch does not count is
suspect.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.headroom import OUT, Holes, holes
from kvdiag.diagnosis.postmortem.remedies import joined, lower_fraction
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding

ID = "fragmentation.allocator"


def judge(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Look at the blocks where they are known, else at the unused bytes in torch's message."""
    chief = case.chief
    if chief is None:
        return unknown(ID, "no failure is reported; pass a log, a black box or torch's message")
    shortage = chief.shortage
    if shortage.kind not in OUT - {"library", "workspace"}:
        return (Finding(ID, "ok", "no torch allocation failed for lack of memory"),)
    if shortage.kind == "async":
        return _async(case, limits)
    found = holes(chief, limits)
    if found.state == "unknown":
        return (Finding(ID, "unknown", _sentence(found), evidence(case)),)
    if found.state == "none":
        return (Finding(ID, "ok", _sentence(found), evidence(case)),)
    on = chief.allocator is not None and chief.allocator.expandable_segments is True
    remedy = joined(
        None
        if on
        else "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF from torch "
        "2.10); restart now, which frees the fragmented memory",
        lower_fraction(case, shortage.short_bytes),
    )
    full = ", but they are a tiny share of a full device" if found.state == "slight" else ""
    summary = f"{asked_for(case)}: {found.reason}{full}"
    return (Finding(ID, "suspect" if full else "fault", summary, evidence(case), remedy=remedy),)


def _sentence(found: Holes) -> str:
    return f"{found.figures}: {found.reason}" if found.figures else found.reason


def _async(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Bytes that torch does not count are kept by cudaMallocAsync's pool, or belong to other processes."""
    chief = case.chief
    told = None if chief is None else chief.shortage
    if told is None or told.total_bytes is None or told.free_bytes is None or told.allocated_bytes is None:
        return unknown(ID, "cudaMallocAsync reports no blocks, and the message no figures; use torch's own allocator")
    rest = told.total_bytes - told.free_bytes - told.allocated_bytes
    if rest <= limits.async_rest_ratio * told.total_bytes:
        return unknown(ID, "cudaMallocAsync reports no blocks; use torch's own allocator")
    summary = (
        f"{asked_for(case)}: {format_bytes(rest)} are in use beyond the {format_bytes(told.allocated_bytes)} that "
        "torch counts: cached by cudaMallocAsync, or used by other processes (see nvidia-smi)"
    )
    remedy = "Use torch's own allocator: leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF."
    return (Finding(ID, "suspect", summary, evidence(case), remedy=remedy),)
