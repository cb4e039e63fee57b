"""Two causes that the figures of a failure can show: free blocks that are too small, and other processes' memory. Pure.

Fragmentation is read from the blocks where a black box has them, else from torch's message (`holes`). Foreign memory is
read from the refusal to start, from the processes that the message lists, else from what nothing explains (`foreign`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case
from kvdiag.formatting import format_bytes
from kvdiag.oom.account import Account
from kvdiag.oom.message import SEGMENT_BYTES, Kind

OUT: frozenset[Kind] = frozenset({"torch", "async", "driver", "library", "masked", "warmup", "workspace"})
"""Kinds that mean that device memory ran out."""

SNAPSHOT = "the agent's black box has the largest free block (`kvdiag agent install --help`)"


@dataclass(frozen=True, slots=True)
class Holes:
    """Whether fragmentation explains the failure, and the figures; `slight` where the device was almost full."""

    state: Literal["confirmed", "slight", "none", "unknown"]
    reason: str
    figures: str = ""


def holes(account: Account, limits: Limits) -> Holes:
    """Judge by the blocks where a black box has looked at them, else by the message.

    Before torch gives up it has released every whole free segment, so what its message calls unallocated lay between
    live blocks, or waited for another stream. Free and unallocated bytes do not join to one block: only unallocated
    bytes that alone would have been enough speak for holes.
    """
    shortage, split = account.shortage, account.split
    if shortage.kind == "async":
        return Holes("unknown", "cudaMallocAsync reports no blocks")
    if shortage.kind != "torch" or shortage.asked_bytes is None:
        return Holes("unknown", f"the failure has no torch figures; {SNAPSHOT}")
    asked = shortage.asked_bytes
    if split is not None:
        return _by_blocks(account, asked)
    free, unallocated = shortage.free_bytes, shortage.unallocated_bytes
    if unallocated is None or free is None:
        return Holes("unknown", f"the message has no figure of unused bytes; {SNAPSHOT}")
    told = (
        f"{format_bytes(asked)} requested, {format_bytes(free)} free, {format_bytes(unallocated)} reserved but "
        "unallocated"
    )
    if free >= asked:
        late = "other processes released memory before the message was written, or another limit refused it"
        return Holes("unknown", f"the free bytes alone are enough, so {late}; look for a limit on the process", told)
    if unallocated >= asked == SEGMENT_BYTES:
        # What torch prints is the segment that it wanted, and small blocks have segments of their own.
        return Holes("unknown", f"a small block, which torch does not take from large free ones; {SNAPSHOT}", told)
    if unallocated >= asked:
        reason = "the unallocated bytes alone would have been enough"
        slight = shortage.total_bytes is not None and unallocated < limits.holes_ratio * shortage.total_bytes
        return Holes("slight" if slight else "confirmed", reason, told)
    if free + unallocated < asked:
        return Holes("none", "not enough in total, so memory ran out; it is not fragmentation", told)
    return Holes("unknown", f"enough in total, but not in one piece; {SNAPSHOT}", told)


def _by_blocks(account: Account, asked: int) -> Holes:
    split, free = account.split, account.shortage.free_bytes or 0
    assert split is not None  # noqa: S101 - for the type checker; the caller has looked
    stranded, largest = format_bytes(split.stranded_bytes), format_bytes(split.largest_free_block_bytes)
    told = f"{format_bytes(asked)} requested, {format_bytes(free)} free, {stranded} stranded between live blocks"
    if free + split.stranded_bytes + split.releasable_bytes < asked:
        pending = split.pending_bytes >= asked
        waits = f"; {format_bytes(split.pending_bytes)} wait for another stream, so a retry may work" if pending else ""
        return Holes("unknown" if pending else "none", f"not enough in total{waits}", told)
    if split.largest_free_block_bytes >= asked:
        return Holes("unknown", f"a free block of {largest} was in another pool or stream; retry with one stream", told)
    return Holes("confirmed", f"enough in total, but the largest free block has {largest}", told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Device memory of other processes; `sure` where those are listed."""

    size_bytes: int
    sure: bool


def foreign(case: Case, limits: Limits) -> Foreign | None:
    """Other processes' memory when it failed, where that would have been enough; `None` where nothing shows it."""
    chief = case.chief
    if chief is None:
        return None
    told = chief.shortage
    total = told.total_bytes
    if told.kind == "budget" and total is not None and told.free_bytes is not None:
        # Taken after the process's own context and NCCL buffers (v1/worker/gpu_worker.py::init_device).
        taken = total - told.free_bytes
        return Foreign(size_bytes=taken, sure=True) if taken > limits.context_bytes else None
    if told.other_bytes is not None:
        least = max(limits.foreign_suspect_bytes, limits.foreign_fault_ratio * (total or 0), told.short_bytes or 0)
        return Foreign(size_bytes=told.other_bytes, sure=True) if told.other_bytes >= least else None
    if total is None or told.free_bytes is None or told.reserved_bytes is None or told.process_bytes is not None:
        return None
    rest = total - told.free_bytes - told.reserved_bytes - limits.context_bytes
    return (
        Foreign(size_bytes=rest, sure=False)
        if rest > max(limits.unlisted_bytes, limits.unlisted_ratio * total)
        else None
    )
