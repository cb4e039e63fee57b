"""fragmentation.allocator: enough memory was free, but not in one block.

Blocks decide where a black box has them, else torch's message (`holes`). torch's advice about fragmentation is always
printed and is no evidence. cudaMallocAsync has no blocks: only a large rest that torch does not count is suspect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import OUT, Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.remedies import joined, lower_fraction
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding, ReservedSplit
from kvdiag.oom.account import Account
from kvdiag.oom.message import SEGMENT_BYTES

ID = "fragmentation.allocator"

SNAPSHOT = "the agent's black box has the largest free block (`kvdiag agent install --help`)"


@dataclass(frozen=True, slots=True)
class Holes:
    """Whether fragmentation explains the failure, and the figures; `slight` where the device was almost full."""

    state: Literal["confirmed", "slight", "none", "unknown"]
    reason: str
    figures: str = ""


def judge(case: Case, limits: Limits) -> Finding:
    """Look at the blocks where they are known, else at the unused bytes in torch's message."""
    failure = case.failure
    shortage = failure.shortage
    if shortage.kind not in OUT - {"library", "workspace"}:
        return Finding(ID, "ok", "no torch allocation failed for lack of memory")
    if shortage.kind == "async":
        return _async(case, limits)
    found = holes(failure, limits)
    if found.state in ("unknown", "none"):
        summary = f"{found.figures}: {found.reason}" if found.figures else found.reason
        return Finding(ID, "unknown" if found.state == "unknown" else "ok", summary, evidence(case))
    expandable = failure.allocator is not None and failure.allocator.expandable_segments is True
    remedy = joined(
        None
        if expandable
        else "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF from torch 2.10); "
        "restart now, which frees the fragmented memory",
        lower_fraction(case, shortage.short_bytes),
    )
    full = ", but they are a tiny share of a full device" if found.state == "slight" else ""
    summary = f"{asked_for(case)}: {found.reason}{full}"
    return Finding(ID, "suspect" if full else "fault", summary, evidence(case), remedy=remedy)


def _async(case: Case, limits: Limits) -> Finding:
    """Bytes that torch does not count are kept by cudaMallocAsync's pool, or belong to other processes."""
    shortage = case.failure.shortage
    if shortage.total_bytes is None or shortage.free_bytes is None or shortage.allocated_bytes is None:
        missing = "cudaMallocAsync reports no blocks, and the message no figures; use torch's own allocator"
        return Finding(ID, "unknown", missing)
    rest = shortage.total_bytes - shortage.free_bytes - shortage.allocated_bytes
    if rest <= limits.async_rest_ratio * shortage.total_bytes:
        return Finding(ID, "unknown", "cudaMallocAsync reports no blocks; use torch's own allocator")
    summary = (
        f"{asked_for(case)}: {format_bytes(rest)} are in use beyond the {format_bytes(shortage.allocated_bytes)} that "
        "torch counts: cached by cudaMallocAsync, or used by other processes (see nvidia-smi)"
    )
    remedy = "Use torch's own allocator: leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF."
    return Finding(ID, "suspect", summary, evidence(case), remedy=remedy)


def holes(account: Account, limits: Limits) -> Holes:
    """Judge by the blocks where a black box has looked at them, else by the message.

    Before torch gives up it has released every whole free segment, so what its message calls unallocated lay between
    live blocks, or waited for another stream. Free and unallocated bytes do not join to one block: only unallocated
    bytes that alone would have been enough speak for holes.
    """
    shortage = account.shortage
    if shortage.kind == "async":
        return Holes("unknown", "cudaMallocAsync reports no blocks")
    if shortage.kind != "torch" or shortage.asked_bytes is None:
        return Holes("unknown", f"the failure has no torch figures; {SNAPSHOT}")
    asked = shortage.asked_bytes
    if account.split is not None:
        return _by_blocks(account.split, asked, shortage.free_bytes or 0)
    free, unallocated = shortage.free_bytes, shortage.unallocated_bytes
    if unallocated is None or free is None:
        return Holes("unknown", f"the message has no figure of unused bytes; {SNAPSHOT}")
    figures = (
        f"{format_bytes(asked)} requested, {format_bytes(free)} free, {format_bytes(unallocated)} reserved but "
        "unallocated"
    )
    if free >= asked:
        late = "other processes released memory before the message was written, or another limit refused it"
        return Holes("unknown", f"the free bytes alone are enough, so {late}; look for a limit on the process", figures)
    if unallocated >= asked == SEGMENT_BYTES:
        # What torch prints is the segment that it wanted, and small blocks have segments of their own.
        return Holes("unknown", f"a small block, which torch does not take from large free ones; {SNAPSHOT}", figures)
    if unallocated >= asked:
        slight = shortage.total_bytes is not None and unallocated < limits.holes_ratio * shortage.total_bytes
        reason = "the unallocated bytes alone would have been enough"
        return Holes("slight" if slight else "confirmed", reason, figures)
    if free + unallocated < asked:
        return Holes("none", "not enough in total, so memory ran out; it is not fragmentation", figures)
    return Holes("unknown", f"enough in total, but not in one piece; {SNAPSHOT}", figures)


def _by_blocks(split: ReservedSplit, asked: int, free: int) -> Holes:
    stranded, largest = format_bytes(split.stranded_bytes), format_bytes(split.largest_free_block_bytes)
    figures = f"{format_bytes(asked)} requested, {format_bytes(free)} free, {stranded} stranded between live blocks"
    if free + split.stranded_bytes + split.releasable_bytes < asked:
        if split.pending_bytes < asked:
            return Holes("none", "not enough in total", figures)
        waits = f"{format_bytes(split.pending_bytes)} wait for another stream, so a retry may work"
        return Holes("unknown", f"not enough in total; {waits}", figures)
    if split.largest_free_block_bytes >= asked:
        reason = f"a free block of {largest} was in another pool or stream; retry with one stream"
        return Holes("unknown", reason, figures)
    return Holes("confirmed", f"enough in total, but the largest free block has {largest}", figures)
