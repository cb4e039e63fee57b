"""capacity.concurrency: more requests at once than the pool holds, so that they wait or push one another out.

Waiting for capacity begins well below usage 1.0: eight 8K requests in a pool of 32,768 tokens stand at 80 %, three
running and five waiting, without a preemption. The engine's own waiting_by_reason{reason="capacity"} is no evidence by
itself: it also counts what queues behind another prompt's prefill (seen on 0.32: 7 waiting at 49 of 159 blocks), so a
wait counts where the pool has no room for one more request of the mean size of those that run.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import gap_reason
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Engine, Evidence, Facts, Finding, Sample, Timeline

ID = "capacity.concurrency"
STEP = "concurrent"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Count preemptions, and samples in a row in which requests wait for room."""
    samples = [sample for sample in timeline.samples if sample.engines]
    counted = [sample for sample in samples if _count_preemptions(sample)]
    if len(counted) < limits.idle_samples:
        reason = None if samples else gap_reason(timeline, facts, "vllm")
        return unseen(ID, reason or "the engine counts no preemptions")
    preempted = _preempted(counted)
    streak, most = _longest_wait(samples, facts)
    most_running, highest_usage = _peaks(samples)
    evidence: tuple[Evidence, ...] = (
        number("preemptions", preempted, "requests", "vllm"),
        number("most_waiting_for_room", most, "requests", "vllm"),
        number("most_running", most_running, "requests", "vllm"),
        number("highest_usage", highest_usage, "ratio", "vllm"),
        number("capacity", _capacity_tokens(facts), "tokens", "vllm"),
    )
    fits = _fits(timeline, facts)
    limit = "" if fits is None else f"; the pool holds {fits[0]} of the {fits[1]} requests of {fits[2]:,} tokens"
    if preempted:
        summary = f"{preempted} requests were preempted and computed again, up to {most} waited for room{limit}"
        return (Finding(id=ID, status="fault", summary=summary, evidence=evidence),)
    if streak >= limits.waiting_samples:
        summary = f"up to {most} requests waited for room in the pool{limit}"
        return (Finding(id=ID, status="suspect", summary=summary, evidence=evidence),)
    if (
        not any(span.outcome is not None and span.outcome.completed for span in timeline.spans(STEP))
        and most_running <= 1
    ):
        return unseen(ID, "no requests ran at the same time")
    return (Finding(id=ID, status="ok", summary="no request waited for room, none was preempted", evidence=evidence),)


def _count_preemptions(sample: Sample) -> bool:
    # A day at each second is looked through: a plain loop takes a third of what a generator does.
    for engine in sample.engines or ():  # noqa: SIM110
        if engine.preemptions_total is None:
            return False
    return True


def _preempted(samples: list[Sample]) -> int:
    """Preemptions over the samples, each engine by its own counter: one may be missing from a page, or start anew."""
    last: dict[str, int] = {}
    total = 0
    for sample in samples:
        for engine in sample.engines or ():
            count = engine.preemptions_total or 0
            if count != last.get(engine.engine):
                total += max(count - last.get(engine.engine, count), 0)
                last[engine.engine] = count
    return total


def _peaks(samples: list[Sample]) -> tuple[int, float]:
    """Most requests that ran at once over all engines, and the highest usage of any."""
    most, highest = 0, 0.0
    for sample in samples:
        running = 0
        for engine in sample.engines or ():
            running += engine.requests_running or 0
            if engine.kv_usage_ratio is not None and engine.kv_usage_ratio > highest:
                highest = engine.kv_usage_ratio
        most = max(most, running)
    return most, highest


def _longest_wait(samples: list[Sample], facts: Facts) -> tuple[int, int]:
    """Most samples in a row with requests waiting for room, and most requests that waited so."""
    longest, streak, most = 0, 0, 0
    for sample in samples:
        waiting = 0
        for engine in sample.engines or ():
            if engine.requests_waiting:
                waiting = max(waiting, _waiting_for_room(engine, facts))
        streak = streak + 1 if waiting else 0
        if waiting:
            longest, most = max(longest, streak), max(most, waiting)
    return longest, most


def _waiting_for_room(engine: Engine, facts: Facts) -> int:
    """Requests that wait while the engine's pool has no room for one more like those that run."""
    pool, usage = facts.pool(engine.engine), engine.kv_usage_ratio
    if pool is None or usage is None or not engine.requests_waiting or not engine.requests_running:
        return 0
    held = pool.used_blocks(usage)
    return engine.requests_waiting if pool.usable_blocks - held < held / engine.requests_running else 0


def _capacity_tokens(facts: Facts) -> int | None:
    known = [pool.usable_blocks * pool.block_tokens for pool in facts.pools if pool.sliding_window_tokens is None]
    return sum(known) if known and len(known) == len(facts.pools) else None


def _fits(timeline: Timeline, facts: Facts) -> tuple[int, int, int] | None:
    """How many of the concurrent step's requests the pool holds at their full length."""
    workload = next((span.workload for span in timeline.spans(STEP)), None)
    if workload is None or not workload.requests or not facts.pools or _capacity_tokens(facts) is None:
        return None
    tokens = workload.tokens_per_request
    holds = sum(pool.usable_blocks // max(-(-tokens // pool.block_tokens), 1) for pool in facts.pools)
    return min(holds, workload.requests), workload.requests, tokens
