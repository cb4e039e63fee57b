"""capacity.long_context: one request's context needs more memory than there is.

Decided in this order: a single request that ran out of memory, a pool smaller than max_model_len, and a request that
has the whole pool and makes no progress are faults; a queue behind one request that is so long that no second fits
is suspect; a long request that completed is ok.
"""

from collections.abc import Iterator, Sequence

from kvdiag.diagnosis.blocks.long_requests import LongRequests, one_fills_the_pool
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions import for_context, with_room_for
from kvdiag.diagnosis.request_failures import holes_in_message, memory_failures, shortage_evidence
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import (
    pool_tokens,
    readings_of,
    renewed,
    samples_needed,
    under_load,
    whole_load,
)
from kvdiag.formatting import format_bytes, format_count, format_duration, format_ratio
from kvdiag.model import Engine, Evidence, Facts, Finding, KvPool, Sample, Span, Timeline

ID = "capacity.long_context"
STEP = "long_context"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at single requests that ran out of memory, at the pool's size, and at the longest request that worked."""
    failed = [
        (span.workload.prompt_tokens, shortage)
        for span, shortage in memory_failures(timeline)
        if span.workload is not None and span.workload.requests == 1
    ]
    alone = [(tokens, shortage) for tokens, shortage in failed if not holes_in_message(shortage, limits).explain_it]
    if alone:
        tokens, shortage = alone[0]
        free = "" if shortage.free_bytes is None else f" with {format_bytes(shortage.free_bytes)} free"
        requested = f"{format_bytes(shortage.asked_bytes or 0)} requested at once{free}"
        summary = f"one request of {format_count(tokens)} tokens ran out of memory: {requested}"
        evidence = (Evidence("prompt", tokens, "tokens", "kvdiag"), *shortage_evidence(shortage))
        fix = with_room_for(timeline, facts, limits, shortage.asked_bytes, shortage.free_bytes)
        return (Finding(ID, "fault", summary, evidence, prescription=fix),)
    # Any engine may get the request: the smallest pool decides.
    sized = [pool for pool in facts.pools if pool.capacity_tokens is not None]
    pool = min(sized, key=lambda one: one.capacity_tokens or 0, default=None)
    capacity = None if pool is None else pool.capacity_tokens
    longest = facts.max_model_len_tokens
    if pool is not None and capacity is not None and longest and capacity < longest:
        summary = (
            f"the engine accepts requests of {longest:,} tokens but its KV pool holds only {capacity:,}: such a "
            "request can never run"
        )
        evidence = (
            Evidence("capacity", capacity, "tokens", "engine"),
            Evidence("max_model_len", longest, "tokens", "engine"),
        )
        remedy = (
            f"Lower --max-model-len to {capacity} or less, or enlarge the pool: raise --gpu-memory-utilization where "
            "the device has free memory, use an fp8 KV cache (twice the tokens), or more GPUs."
        )
        prescription = for_context(timeline, facts, limits, pool=pool, tokens=longest)
        return (Finding(ID, "fault", summary, evidence, remedy=remedy, prescription=prescription),)
    if (stuck := _stuck(timeline, facts, limits)) is not None:
        return (stuck,)
    if (long := one_fills_the_pool(timeline, facts, limits)) is not None:
        return (_queue_behind(long),)
    worked = [
        span
        for span in timeline.spans(STEP)
        if span.complete
        and span.outcome is not None
        and span.outcome.completed
        and not span.outcome.failed
        and len(_observed(timeline, span, facts)) >= samples_needed(facts, limits)
    ]
    if not worked or worked[0].workload is None:
        if failed:
            reason = f"the request of {format_count(failed[0][0])} tokens failed because free memory is fragmented"
            return unknown(ID, f"{reason}; remove the fragmentation and repeat `kvdiag run`")
        how = "see step 4" if timeline.spans(STEP) else "run the test steps (`kvdiag run`)"
        return unknown(ID, f"no long request was observed to complete; {how}")
    tokens = worked[0].workload.prompt_tokens
    evidence = (
        Evidence("prompt", tokens, "tokens", "kvdiag"),
        Evidence("max_model_len", longest, "tokens", "engine"),
        Evidence("capacity", capacity, "tokens", "engine"),
    )
    return (Finding(ID, "ok", f"a request with a prompt of {format_count(tokens)} tokens completed", evidence),)


def _queue_behind(long: LongRequests) -> Finding:
    """The finding of requests of which one at a time takes the pool."""
    share = long.mean_tokens / long.capacity_tokens
    evidence = (
        Evidence("capacity", long.capacity_tokens, "tokens", "engine"),
        Evidence("mean_request", round(long.mean_tokens), "tokens", "engine"),
        Evidence("running", 1, "requests", "engine"),
        Evidence("max_waiting", long.waiting, "requests", "engine"),
    )
    requests = (
        f"requests of {format_count(round(long.mean_tokens))} tokens take {format_ratio(share)} of the KV pool each"
    )
    summary = f"{requests}: one runs at a time, up to {long.waiting} wait"
    return Finding(ID, "suspect", summary, evidence)


def _observed(timeline: Timeline, span: Span, facts: Facts) -> Sequence[Sample]:
    """The samples in which the one request of a span ran, or any of several that fill the pool."""
    if span.workload is not None and span.workload.requests == 1:
        return whole_load(timeline, span, facts)
    return [one for one in renewed(under_load(timeline, span), facts) if one.load and one.load.resident_tokens]


def _stuck(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """One request that has the whole pool and makes no progress, while others wait behind it."""
    for pool in facts.pools:
        for stall in _stalls(timeline, pool):
            seconds = stall[-1][0] - stall[0][0]
            if len(stall) <= limits.waiting_samples or seconds < limits.stuck_seconds:
                continue
            waiting, capacity = max(engine.requests_waiting or 0 for _, engine in stall), pool_tokens(pool)
            evidence = (
                Evidence("capacity", capacity, "tokens", "engine"),
                Evidence("running", 1, "requests", "engine"),
                Evidence("max_waiting", waiting, "requests", "engine"),
                Evidence("stalled", seconds, "seconds", "engine"),
                Evidence("tokens_while_stalled", 0, "tokens", "engine"),
                Evidence("threshold", limits.stuck_seconds, "seconds", "kvdiag"),
            )
            stalled = f"generated no token for {format_duration(seconds)} with {waiting} waiting"
            summary = f"one request uses the whole pool ({capacity:,} tokens) and {stalled}: its context does not fit"
            return Finding(ID, "fault", summary, evidence)
    return None


def _stalls(timeline: Timeline, pool: KvPool) -> Iterator[list[tuple[float, Engine]]]:
    """Runs of samples in which one request has the whole pool and makes no progress since the first of them."""
    stall: list[tuple[float, Engine]] = []
    before: tuple[int | None, ...] = ()
    for at_seconds, engine in zip(*readings_of(timeline, pool.engine), strict=True):
        # Few servers have a queue at all.
        fills = bool(engine.requests_waiting) and _fills_alone(engine, pool)
        if not fills and not stall:
            continue
        counts = (engine.generation_tokens_total, engine.prompt_tokens_total)
        # It makes progress where a token was generated or a prompt started, or that is not reported.
        if stall and (not fills or None in counts or counts != before):
            yield stall
            stall = []
        before = counts
        if fills:
            stall.append((at_seconds, engine))
    if stall:
        yield stall


def _fills_alone(engine: Engine, pool: KvPool) -> bool:
    if engine.requests_running != 1 or engine.kv_usage_ratio is None:
        return False
    return pool.used_blocks(engine.kv_usage_ratio) >= pool.usable_blocks - 1
