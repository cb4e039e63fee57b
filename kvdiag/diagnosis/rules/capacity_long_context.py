"""capacity.long_context: one request's context needs more memory than there is."""

from __future__ import annotations

from kvdiag.diagnosis.failures import memory_failures
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import readable_bytes, whole_load
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Facts, Finding, Timeline

ID = "capacity.long_context"
STEP = "long_context"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at single requests that ran out of memory, at the pool's size, and at the longest request that worked."""
    alone = [
        failure
        for failure in memory_failures(timeline)
        if failure.span.workload is not None
        and failure.span.workload.requests == 1
        and failure.oom.room_left is not True
    ]
    if alone:
        failure = alone[0]
        tokens = failure.span.workload.prompt_tokens if failure.span.workload is not None else 0
        oom = failure.oom
        free = "" if oom.free_bytes is None else f", {readable_bytes(oom.free_bytes)} were free"
        return (
            Finding(
                id=ID,
                status="fault",
                summary=f"one request of {tokens:,} tokens ran out of memory: it asked for "
                f"{readable_bytes(oom.asked_bytes)} at once{free}",
                evidence=(
                    number("prompt", tokens, "tokens", "kvdiag"),
                    number("asked", oom.asked_bytes, "bytes", "torch's message"),
                    number("free_on_device", oom.free_bytes, "bytes", "torch's message"),
                    number("reserved_but_unallocated", oom.unallocated_bytes, "bytes", "torch's message"),
                ),
            ),
        )
    # Any engine may get the request: the smallest pool decides.
    capacity = min((pool.capacity_tokens for pool in facts.pools if pool.capacity_tokens is not None), default=None)
    longest = facts.max_model_len_tokens
    if capacity is not None and longest and capacity < longest:
        return (
            Finding(
                id=ID,
                status="fault",
                summary=f"the pool holds {capacity:,} tokens, a request may have {longest:,}: it cannot be",
                evidence=(
                    number("capacity", capacity, "tokens", "vllm"),
                    number("max_model_len", longest, "tokens", "vllm"),
                ),
            ),
        )
    worked = [
        span
        for span in timeline.spans(STEP)
        if span.complete
        and span.outcome is not None
        and span.outcome.completed
        and not span.outcome.failed
        and len(whole_load(timeline, span)) >= limits.load_samples
    ]
    if not worked or worked[0].workload is None:
        return unseen(ID, "no long request was seen to run to its end")
    tokens = worked[0].workload.prompt_tokens
    evidence = (
        number("prompt", tokens, "tokens", "kvdiag"),
        number("max_model_len", longest, "tokens", "vllm"),
        number("capacity", capacity, "tokens", "vllm"),
    )
    return (Finding(id=ID, status="ok", summary=f"a request of {tokens:,} tokens ran to its end", evidence=evidence),)
