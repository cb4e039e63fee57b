"""capacity.long_context: one request's context needs more memory than there is."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.request_failures import memory_failures
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.timeline_queries import counted, readable_bytes, readings_of, whole_load
from kvdiag.model import Engine, Facts, Finding, KvPool, Timeline

ID = "capacity.long_context"
STEP = "long_context"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at single requests that ran out of memory, at the pool's size, and at the longest request that worked."""
    alone = [
        (workload.prompt_tokens, failure.oom)
        for failure in memory_failures(timeline)
        if (workload := failure.span.workload) is not None
        and workload.requests == 1
        and failure.oom.room_left is not True
    ]
    if alone:
        tokens, oom = alone[0]
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
                    number("capacity", capacity, "tokens", "engine"),
                    number("max_model_len", longest, "tokens", "engine"),
                ),
            ),
        )
    if (stuck := _stuck(timeline, facts, limits)) is not None:
        return (stuck,)
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
        number("max_model_len", longest, "tokens", "engine"),
        number("capacity", capacity, "tokens", "engine"),
    )
    return (Finding(id=ID, status="ok", summary=f"a request of {tokens:,} tokens ran to its end", evidence=evidence),)


def _stuck(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """One request that has the whole pool and gets no further, while others wait behind it."""
    for pool in facts.pools:
        begin: tuple[float, Engine] | None = None
        readings = 0
        for at_seconds, engine in readings_of(timeline, pool.engine):
            if not _fills_alone(engine, pool):
                begin = None
            elif begin is None or _advanced(begin[1], engine):
                begin, readings = (at_seconds, engine), 1
            else:
                readings += 1
                if readings > limits.waiting_samples and at_seconds - begin[0] >= limits.stuck_seconds:
                    return _hangs(pool, begin[0], timeline, limits)
    return None


def _hangs(pool: KvPool, since_seconds: float, timeline: Timeline, limits: Limits) -> Finding:
    """The finding of an engine that stands still, with how long it did and how many came to wait."""
    seconds, waiting, first = 0.0, 0, None
    for at_seconds, engine in readings_of(timeline, pool.engine):
        if at_seconds < since_seconds:
            continue
        first = first or engine
        if not _fills_alone(engine, pool) or _advanced(first, engine):
            break
        seconds, waiting = at_seconds - since_seconds, max(waiting, engine.requests_waiting or 0)
    capacity = pool.usable_blocks * pool.block_tokens if pool.capacity_tokens is None else pool.capacity_tokens
    return Finding(
        id=ID,
        status="fault",
        summary=f"one request holds all of the pool ({capacity:,} tokens) and got no token in {seconds / 60:.0f} "
        f"minutes, {counted(waiting, 'waits', 'wait')} behind it: its context needs more than there is",
        evidence=(
            number("capacity", capacity, "tokens", "engine"),
            number("running", 1, "requests", "engine"),
            number("most_waiting", waiting, "requests", "engine"),
            number("without_a_token", seconds, "seconds", "engine"),
            number("tokens_meanwhile", 0, "tokens", "engine"),
            number("least_time_that_counts", limits.stuck_seconds, "seconds", "kvdiag"),
        ),
    )


def _fills_alone(engine: Engine, pool: KvPool) -> bool:
    """Whether one request runs, others wait, and not a block is left to it."""
    if engine.requests_running != 1 or not engine.requests_waiting or engine.kv_usage_ratio is None:
        return False
    return pool.used_blocks(engine.kv_usage_ratio) >= pool.usable_blocks - 1


def _advanced(before: Engine, now: Engine) -> bool:
    """Whether a token was made or a prompt begun in between, or it is not told."""
    counts = ((before.generation_tokens_total, now.generation_tokens_total),
              (before.prompt_tokens_total, now.prompt_tokens_total))  # fmt: skip
    return any(one is None or one != other for one, other in counts)
