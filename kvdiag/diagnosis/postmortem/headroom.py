"""What the figures of a failure leave room for: holes between live blocks, and memory that is somebody else's. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdiag.diagnosis.limits import GIB, Limits
from kvdiag.diagnosis.postmortem.case import Account, Case
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.oom.message import SEGMENT_BYTES, Kind

OUT: frozenset[Kind] = frozenset({"torch", "async", "driver", "library", "masked", "warmup", "workspace"})
"""Memory of the device ran out, whoever says so."""

SNAPSHOT = "the largest free block, which the agent's black box tells (`kvdiag agent install --help`)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holes:
    """Whether holes explain the failure, and by which figures; `slight` where they do, and the device was full."""

    state: Literal["confirmed", "slight", "none", "unknown"]
    reason: str


def holes(account: Account, limits: Limits) -> Holes:
    """Judge by the blocks where a black box has looked at them, else by the message.

    Before torch gives up it has released every whole free segment, so what its message calls unallocated lay between
    live blocks, or waited for another stream. Free and unallocated bytes do not join to one block: only unallocated
    bytes that alone would have been enough speak for holes.
    """
    shortage, split = account.shortage, account.split
    if shortage.kind == "async":
        return Holes(state="unknown", reason="cudaMallocAsync has no blocks to look at")
    if shortage.kind != "torch" or shortage.asked_bytes is None:
        return Holes(state="unknown", reason=f"the failure comes without torch's figures; {SNAPSHOT} would decide")
    asked = shortage.asked_bytes
    if split is not None:
        return _by_blocks(account, asked)
    free, unallocated = shortage.free_bytes, shortage.unallocated_bytes
    if unallocated is None or free is None:
        return Holes(state="unknown", reason=f"the message has no figure of unused bytes; {SNAPSHOT} would decide")
    told = f"{readable_bytes(asked)} asked for, {readable_bytes(free)} free, {readable_bytes(unallocated)} unallocated"
    if free >= asked:
        late = "others gave memory back before the message was made, or a limit stands before the device"
        return Holes(state="unknown", reason=f"{told}: what is free is enough by itself, so {late}")
    if unallocated >= asked == SEGMENT_BYTES:
        # What torch prints is the segment that it wanted, and small blocks have segments of their own.
        return Holes(state="unknown", reason=f"{told}: for a small block, which large ones are of no use to")
    if unallocated >= asked:
        reason = f"{told}: the unallocated bytes alone would have been enough"
        slight = shortage.total_bytes is not None and unallocated < limits.holes_ratio * shortage.total_bytes
        return Holes(state="slight" if slight else "confirmed", reason=reason)
    if free + unallocated < asked:
        return Holes(state="none", reason=f"{told}: all of it together is not enough, so it is exhaustion, not holes")
    return Holes(state="unknown", reason=f"{told}: enough together, and not apart; {SNAPSHOT} would decide")


def _by_blocks(account: Account, asked: int) -> Holes:
    split, free = account.split, account.shortage.free_bytes or 0
    assert split is not None  # noqa: S101 - for the type checker; the caller has looked
    stranded, largest = readable_bytes(split.stranded_bytes), readable_bytes(split.largest_free_block_bytes)
    told = f"{readable_bytes(asked)} asked for, {readable_bytes(free)} free, {stranded} between live blocks"
    if free + split.stranded_bytes + split.releasable_bytes < asked:
        pending = split.pending_bytes >= asked
        waits = (
            f", {readable_bytes(split.pending_bytes)} waiting for another stream: a retry may work" if pending else ""
        )
        return Holes(state="unknown" if pending else "none", reason=f"{told}{waits}: not enough together")
    if split.largest_free_block_bytes >= asked:
        return Holes(state="unknown", reason=f"{told}: a block of {largest} was there, in another pool or stream")
    return Holes(state="confirmed", reason=f"{told}: enough, but the largest free block has {largest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Memory of the device that is not the failed process's; `sure` where the processes are listed."""

    size_bytes: int
    sure: bool


LEAST_UNLISTED_BYTES = 2 * GIB
UNLISTED_RATIO = 0.1
"""Without a list of processes, what libraries take outside of torch (10 GiB was seen) is not told from others."""


def foreign(case: Case, limits: Limits) -> Foreign | None:
    """What others held when it failed, where that would have been enough; `None` where nothing speaks for it."""
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
    return Foreign(size_bytes=rest, sure=False) if rest > max(LEAST_UNLISTED_BYTES, UNLISTED_RATIO * total) else None
