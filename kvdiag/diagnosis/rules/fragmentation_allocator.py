"""fragmentation.allocator: memory is there, but no block of it fits.

Confirmed by an allocation that failed although free plus reserved-but-unallocated bytes were enough for it; likely
where torch had to flush its cache to go on while holes lie between live blocks. "Reserved - allocated > 2 GB" alone is
neither: it is cache that the next request uses, CUDA graph pools, activation workspace. The agents in the server's
processes tell which; without them nothing is guessed from device memory.
"""

from __future__ import annotations

from kvdiag.diagnosis.failures import MemoryFailure, memory_failures
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import readable_bytes, torch_readings
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import NATIVE, Allocator, Evidence, Facts, Finding, Timeline

ID = "fragmentation.allocator"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at every out-of-memory message that our own requests met, then at what each process's torch tells."""
    failures = memory_failures(timeline)
    fragmented = [failure for failure in failures if failure.oom.room_left]
    if fragmented:
        worst = max(fragmented, key=lambda failure: failure.oom.unallocated_bytes or 0)
        oom = worst.oom
        summary = (
            f"{readable_bytes(oom.asked_bytes)} could not be allocated although {readable_bytes(oom.free_bytes or 0)} "
            f"were free and {readable_bytes(oom.unallocated_bytes or 0)} lay reserved but unused: no hole fits"
        )
        return (Finding(id=ID, status="fault", summary=summary, evidence=_evidence(worst)),)
    if failures and failures[-1].oom.room_left is False:
        summary = (
            "the allocation that failed was larger than all free and unused memory together: exhaustion, not holes"
        )
        return (Finding(id=ID, status="ok", summary=summary, evidence=_evidence(failures[-1])),)
    readings = torch_readings(timeline, facts)
    if not readings:
        return unseen(
            ID,
            "no allocation failed, and the allocator's holes are only visible inside the server's process "
            "(torch.cuda.memory_stats)",
        )
    judged = [_judge_process(first, last, limits) for first, last in readings]
    return (max(judged, key=lambda finding: ("ok", "unknown", "suspect").index(finding.status)),)


def _judge_process(first: Allocator, last: Allocator, limits: Limits) -> Finding:
    """One process, from its first reading to its last."""
    who = f"{last.title or 'process'} {last.pid}"
    if last.backend is not None and last.backend != NATIVE:
        return _unknown(f"{who} allocates by {last.backend}, which has no blocks to look at")
    if last.outside_driver:
        return _unknown(f"{who} is asleep, or allocates past torch: what torch counts is not what is on the device")
    split, evidence = last.split, _parts(who, first, last)
    gap = last.reserved_bytes - last.allocated_bytes
    stranded = _stranded_bytes(last)
    retries = (last.alloc_retries_total or 0) - (first.alloc_retries_total or 0)
    if retries > 0 and stranded is not None and stranded > limits.stranded_ratio * last.reserved_bytes:
        summary = (
            f"{who}: torch had to flush its cache {retries} times to go on, while {readable_bytes(stranded)} lie free "
            f"between live blocks"
        )
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    if gap <= limits.reserved_gap_bytes:
        summary = f"{who}: {readable_bytes(gap)} reserved by torch lie unused, which is normal"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    if split is None or split.fits is None:
        return _unknown(f"{who}: {readable_bytes(gap)} reserved by torch lie unused, and why is not told", evidence)
    parts = (
        f"{readable_bytes(split.releasable_bytes)} releasable, {readable_bytes(split.private_bytes)} in graph pools, "
        f"{readable_bytes(split.stranded_bytes)} between live blocks"
    )
    if not split.fits and split.stranded_bytes >= split.request_bytes:
        summary = (
            f"{who}: {readable_bytes(gap)} reserved by torch lie unused ({parts}), and "
            f"{readable_bytes(split.request_bytes)} would not fit"
        )
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    summary = f"{who}: {readable_bytes(gap)} reserved by torch lie unused, of use to the next request ({parts})"
    return Finding(id=ID, status="ok", summary=summary, evidence=evidence)


def _stranded_bytes(allocator: Allocator) -> int | None:
    """Free bytes beside live ones: by the blocks, or by torch's count, which leaves expandable segments out."""
    if allocator.split is not None:
        return allocator.split.stranded_bytes
    return allocator.inactive_split_bytes if allocator.expandable_segments is False else None


def _unknown(reason: str, evidence: tuple[Evidence, ...] = ()) -> Finding:
    return Finding(id=ID, status="unknown", summary=f"cannot tell: {reason}", evidence=evidence)


def _parts(who: str, first: Allocator, last: Allocator) -> tuple[Evidence, ...]:
    split = last.split
    retries = None
    if first.alloc_retries_total is not None and last.alloc_retries_total is not None:
        retries = last.alloc_retries_total - first.alloc_retries_total
    found = (
        number("process", who, "", "torch"),
        number("reserved", last.reserved_bytes, "bytes", "torch"),
        number("reserved_but_unallocated", last.reserved_bytes - last.allocated_bytes, "bytes", "torch"),
        number("alloc_retries", retries, "times", "torch"),
    )
    if split is None:
        return found
    return (
        *found,
        number("releasable", split.releasable_bytes, "bytes", "torch"),
        number("stranded", split.stranded_bytes, "bytes", "torch"),
        number("private_pools", split.private_bytes, "bytes", "torch"),
        number("pending", split.pending_bytes, "bytes", "torch"),
        number("largest_free_block", split.largest_free_block_bytes, "bytes", "torch"),
        number("unusable_for_request", split.unusable_ratio, "ratio", "computed"),
    )


def _evidence(failure: MemoryFailure) -> tuple[Evidence, ...]:
    oom = failure.oom
    return (
        number("asked", oom.asked_bytes, "bytes", "torch's message"),
        number("free_on_device", oom.free_bytes, "bytes", "torch's message"),
        number("reserved_but_unallocated", oom.unallocated_bytes, "bytes", "torch's message"),
        number("failed_requests", failure.failed, "requests", f"step {failure.span.step}"),
    )
