"""fragmentation.allocator: memory is there, but no block of it fits.

Decided by an allocation that failed although free plus reserved-but-unallocated bytes were enough for it. What lies
idle in the allocator without such a failure is reusable cache as often as not (CUDA graph pools, activation
workspaces), so nothing is guessed from device memory alone.
"""

from __future__ import annotations

from kvdiag.diagnosis.failures import MemoryFailure, memory_failures
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import readable_bytes
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Evidence, Facts, Finding, Timeline

ID = "fragmentation.allocator"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:  # noqa: ARG001 - every rule's form
    """Look at the figures of every out-of-memory message that our own requests met."""
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
    return unseen(
        ID,
        "no allocation failed, and the allocator's holes are only visible inside the server's process "
        "(torch.cuda.memory_stats)",
    )


def _evidence(failure: MemoryFailure) -> tuple[Evidence, ...]:
    oom = failure.oom
    return (
        number("asked", oom.asked_bytes, "bytes", "torch's message"),
        number("free_on_device", oom.free_bytes, "bytes", "torch's message"),
        number("reserved_but_unallocated", oom.unallocated_bytes, "bytes", "torch's message"),
        number("failed_requests", failure.failed, "requests", f"step {failure.span.step}"),
    )
