"""capacity.concurrency: more requests at once than the KV pool holds, so that they wait or preempt one another.

Decided in this order: bursts that are over and cost next to nothing of a long history are ok; any other preemption for
lack of room is a fault, but suspect while it may be of few requests in little of the time; a queue in front of a full
pool is suspect, and a fault where the server meanwhile does less than half of its usual work; requests that ran
together without either are ok. An engine in which no request waits for the pool shows it by requests that fail
(llama.cpp: all that run do).

vLLM also preempts every running request when its cache is reset (`POST /pause?mode=keep`, sleep, a weight update): a
preemption does not count where the samples around it show a pool with much room, or where all that ran was preempted
(over one or two samples), without a queue, out of a pool with room for one more.

Requests wait well below a usage of 1.0: eight 8K requests in a pool of 32,768 tokens stand at 80 %, three running and
five waiting, without a preemption. The engine's own waiting_by_reason{reason="capacity"} is not enough: it also counts
requests behind another prompt's prefill (vLLM 0.32: 7 waiting at 49 of 159 blocks). A wait therefore counts only where
the pool has no room for one more request of the mean size of those that run.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvdiag.diagnosis.blocks.long_requests import one_fills_the_pool
from kvdiag.diagnosis.blocks.queue_room import have_room, is_reset, waiting_for_room
from kvdiag.diagnosis.blocks.refill import refilled
from kvdiag.diagnosis.blocks.stall import stalled
from kvdiag.diagnosis.engine_columns import EngineColumns, engine_columns
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions import for_requests
from kvdiag.diagnosis.request_failures import pool_full
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import began_busy, beside_others, gap_reason, pool_tokens, whole_load
from kvdiag.formatting import format_ratio, plural
from kvdiag.model import Engine, Evidence, Facts, Finding, KvPool, Sample, Span, Status, Timeline
from kvdiag.model.timeline import EngineCount

ID = "capacity.concurrency"
STEP = "concurrent"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Count preemptions, and samples in a row in which requests wait for KV blocks; errors where they do not wait."""
    (found,) = _judged(timeline, facts, limits)
    if found.status not in ("fault", "suspect") or found.remedy is not None:  # a hang brings its own
        return (found,)
    return (replace(found, prescription=for_requests(timeline, facts, limits, step=STEP)),)


def _judged(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    totals = _totals(timeline, facts, limits)
    if not facts.capabilities.waits:
        return (_without_waiting(timeline, facts, totals, limits),)
    counts = totals.counted >= limits.idle_samples
    if not counts and (not totals.used or (not totals.queued and not _all_ran(timeline, facts))):
        reason = None if any(sample.engines for sample in timeline.samples) else gap_reason(timeline, facts, "engine")
        missing = "the engine does not report preemptions, and no requests were observed that all ran at the same time"
        return unknown(ID, reason or f"{missing}; run the test steps (`kvdiag run`)")
    preempted, most = totals.preempted, totals.most_waiting
    evidence: tuple[Evidence, ...] = (
        Evidence("preemptions", preempted if counts else None, "times", "engine"),
        Evidence("max_waiting", most, "requests", "engine"),
        Evidence("max_running", totals.most_running, "requests", "engine"),
        Evidence("max_usage", totals.highest_usage, "ratio", "engine"),
        Evidence("capacity", _capacity_tokens(facts), "tokens", "engine"),
    )
    if totals.preempted_with_room:
        evidence += (Evidence("preemptions_with_room", totals.preempted_with_room, "times", "engine"),)
    limit = _fits(timeline, facts)
    unit = facts.capabilities.unit
    if (preempted or totals.queued) and (share := _burst_share(timeline, facts, preempted, limits)) is not None:
        bursts = f"requests lacked room for {format_ratio(share)} of the time, in bursts that are over"
        cost = f" ({plural(preempted, 'preemption')} with recomputation)" if preempted else ""
        return (Finding(ID, "ok", f"{bursts}{cost}", (*evidence, Evidence("burst_time", share, "ratio", "engine"))),)
    if preempted:
        # A request may be preempted many times.
        waited = f"up to {most} requests waited for KV {unit}s{limit}"
        status: Status = "suspect" if _is_rare(timeline, facts, preempted, limits) else "fault"
        return (Finding(ID, status, f"{plural(preempted, 'preemption')} with recomputation; {waited}", evidence),)
    if totals.queued:
        summary = f"the pool is full: up to {plural(most, 'request')} waited for KV {unit}s{limit}"
        share = _work_share(timeline, facts, limits)
        evidence = (*evidence, Evidence("throughput_ratio_while_waiting", share, "ratio", "computed"))
        if share is not None and share < limits.queue_collapse_ratio:
            summary = f"{summary}; meanwhile throughput fell to {format_ratio(share)} of normal"
            return (Finding(ID, "fault", summary, evidence),)
        if one_fills_the_pool(timeline, facts, limits) is not None:
            waited = f"up to {plural(most, 'request')} waited for it: see capacity.long_context"
            return (Finding(ID, "ok", f"one request at a time leaves no room for another one, and {waited}", evidence),)
        return (Finding(ID, "suspect", summary, evidence),)
    if (stall := stalled(timeline, facts, limits)) is not None and stall.waiting:
        return (stall.finding(ID, f"{stall.requests} although the pool has room"),)
    if totals.unjudged:
        waited = plural(totals.unjudged, "request")
        how = "`kvdiag doctor` shows what /metrics lacks"
        return unknown(ID, f"up to {waited} waited while the pool's usage was not reported; {how}")
    worked = any(span.outcome is not None and span.outcome.completed for span in timeline.spans(STEP))
    if any(span.outcome is not None and span.outcome.failed for span in timeline.spans(STEP)):
        return unknown(ID, "concurrent requests of the run failed; fix the cause and repeat `kvdiag run`")
    if not worked and totals.most_running <= 1:
        how = "run the test steps (`kvdiag run`), or sample under load"
        return unknown(ID, f"no two requests ran at the same time; {how}")
    if (refusal := _refusal(timeline, facts)) is not None:
        return (refusal,)
    if totals.preempted_with_room:
        paused = f"{plural(totals.preempted_with_room, 'preemption')} with room in the pool: a pause or a cache reset"
        return (Finding(ID, "ok", f"no request waited for KV {unit}s; {paused}", evidence),)
    if most:
        waited = f"up to {plural(most, 'request')} waited for KV {unit}s"
        brief = f"{waited}, never in {limits.waiting_samples} samples in a row"
        return (Finding(ID, "ok", f"{brief}{'; none was preempted' if counts else ''}", evidence),)
    or_preempted = " or was preempted" if counts else ", and all of the run's requests ran at the same time"
    return (Finding(ID, "ok", f"no request waited for KV {unit}s{or_preempted}", evidence),)


def _burst_share(timeline: Timeline, facts: Facts, preempted: int, limits: Limits) -> float | None:
    """The share of the time in which requests lacked room, where that was short, rare and is over; else `None`.

    Only a history of hours, without test steps, shows that: what is short in it is rare. Hours without a sample count
    neither way.
    """
    if timeline.marks or not any(sample.engines for sample in timeline.samples):
        return None
    finished, observed, lacking = _lack(timeline, facts, limits)
    end = observed[-1][0] if observed else 0.0
    if preempted > limits.burst_ratio * finished or _seconds_after(0.0, observed) < limits.busy.floor_seconds:
        return None
    begins = (0.0, end - limits.busy.floor_seconds)
    shares = [_seconds_after(begin, lacking) / _seconds_after(begin, observed) for begin in begins]
    is_over = not lacking or lacking[-1][0] < end - limits.burst_over_seconds
    return shares[0] if is_over and max(shares) <= limits.burst_ratio else None


def _is_rare(timeline: Timeline, facts: Facts, preempted: int, limits: Limits) -> bool:
    """Whether preemptions may cost next to nothing: few of the finished requests, in little of the time.

    A burst or two of a short history say little of how often they come: only the share that is certain counts, which is
    all of it where requests lacked room all the time.
    """
    if timeline.marks:
        return False
    finished, observed, lacking = _lack(timeline, facts, limits)
    if not finished:
        return False
    whole, lacked = _seconds_after(0.0, observed), _seconds_after(0.0, lacking)
    # Samples within one burst are no evidence of another one.
    bursts = lacked / limits.burst_gap_seconds
    error = math.sqrt((1.0 - lacked / whole) / bursts) if bursts > 0.0 else 0.0
    sure = max(1.0 - limits.burst_errors * error, 0.0)
    some = max(limits.queue_seconds, limits.rare_ratio * whole)
    return sure * preempted <= limits.burst_ratio * finished and sure * lacked < some


def _lack(
    timeline: Timeline, facts: Facts, limits: Limits
) -> tuple[int, list[tuple[float, float]], list[tuple[float, float]]]:
    """Requests finished, and the ends and lengths in seconds of all intervals, and of those in which room lacked."""
    read = [sample for sample in timeline.samples if sample.engines]
    finished, observed, lacking = 0, [], []
    for before, sample in pairwise(read):
        finished += max(_rise(before, sample, "requests_finished_total"), 0)
        waits = any(waiting_for_room(one, facts) for one in sample.engines or ())
        interval = (sample.at_seconds, min(sample.at_seconds - before.at_seconds, limits.burst_gap_seconds))
        observed.append(interval)
        if waits or _rise(before, sample, "preemptions_total") > 0:
            lacking.append(interval)
    return finished, observed, lacking


def _seconds_after(begin: float, intervals: Iterable[tuple[float, float]]) -> float:
    return sum(seconds for at_seconds, seconds in intervals if at_seconds > begin)


def _rise(before: Sample, after: Sample, count: EngineCount) -> int:
    first, last = before.total(count), after.total(count)
    return 0 if first is None or last is None else last - first


def _all_ran(timeline: Timeline, facts: Facts) -> bool:
    """Whether all requests of the run's concurrent load were observed to run together: then none was preempted."""
    return any(whole_load(timeline, span, facts) for span in timeline.spans(STEP))


def _without_waiting(timeline: Timeline, facts: Facts, totals: "_Totals", limits: Limits) -> Finding:
    """The finding of an engine whose requests fail, all that run, when the pool has no room for one of them."""
    refused = [span for span in timeline.spans() if span.outcome is not None and pool_full(span.outcome)]
    full = [span for span in refused if not _after_given_up(timeline, span)]
    together = [
        span for span in full if span.workload is None or span.workload.requests > 1 or beside_others(timeline, span)
    ]
    tried = any(span.outcome is not None for span in timeline.spans(STEP))
    failures = sum(span.outcome.failed for span in full if span.outcome)
    evidence = (
        Evidence("requests_failed", failures if tried else None, "requests", "kvdiag"),
        Evidence("max_running", totals.most_running, "requests", "engine"),
        Evidence("max_usage", totals.highest_usage if totals.used else None, "ratio", "engine"),
        Evidence("capacity", _capacity_tokens(facts), "tokens", "engine"),
    )
    unit = facts.capabilities.unit
    if together:
        failed = plural(sum(span.outcome.failed for span in together if span.outcome), "request")
        summary = f"the pool had no {unit} left: {failed} that ran failed, because requests do not wait for {unit}s"
        return Finding(ID, "fault", summary, evidence)
    others = _highest_of_others(timeline)
    share, is_shared = format_ratio(others), any(_is_shared(pool) for pool in facts.pools)
    if others >= limits.pool_full_ratio and is_shared:
        summary = f"running requests used {share} of the pool: without a free {unit}, all that run fail"
        return Finding(ID, "suspect", summary, evidence)
    how = "search the server's log for 'Context size has been exceeded'"
    if not totals.used:
        return unknown(ID, f"neither failed requests nor the pool's usage are reported; {how}")[0]
    least = 1 if [pool.max_requests for pool in facts.pools] == [1] else 2
    if totals.most_running < least:
        how = "run the test steps (`kvdiag run`), or sample under load"
        return unknown(ID, f"no two requests ran at the same time; {how}")[0]
    if (refusal := _refusal(timeline, facts)) is not None:
        return refusal
    if len(full) < len(refused):
        reason = "requests had no room next to one that had no answer in time and still ran; repeat `kvdiag run`"
        return unknown(ID, reason)[0]
    if not tried and is_shared and others > limits.pool_roomy_ratio:
        samples = f"running requests used up to {share} of the pool when it was sampled"
        return unknown(ID, f"{samples}; the engine does not report requests that failed for lack of {unit}s; {how}")[0]
    summary = f"at most {format_ratio(totals.highest_usage)} of the pool was in use"
    if tried:
        summary = f"{summary}, and no request of the run failed for lack of it"
    return Finding(ID, "ok", summary, evidence)


def _refusal(timeline: Timeline, facts: Facts) -> Finding | None:
    """The finding where requests of the run had no room because lost units take it: more room is no remedy."""
    found = None if facts.capabilities.returns else refilled(timeline, facts)
    if found is None or found.refusal(facts) is None:
        return None
    unit = facts.capabilities.unit
    reason = f"requests had no room because {unit}s are not released; fix leak.kv_blocks and repeat `kvdiag run`"
    return unknown(ID, reason)[0]


def _after_given_up(timeline: Timeline, span: Span) -> bool:
    """Whether a load met a request of kvdiag that had no answer in time: the server may work on it for minutes."""
    earlier = (one for one in timeline.spans() if one.begin_seconds < span.begin_seconds and one.outcome is not None)
    return began_busy(timeline, span) and any(one.outcome and one.outcome.failed for one in earlier)


def _highest_of_others(timeline: Timeline) -> float:
    """The highest usage of two or more requests of which none is kvdiag's own: its loads are made to fit the pool."""
    return max(
        (
            engine.kv_usage_ratio or 0.0
            for sample in timeline.samples
            if sample.load is None or not sample.load.requests
            for engine in sample.engines or ()
            if (engine.requests_running or 0) > 1
        ),
        default=0.0,
    )


def _is_shared(pool: KvPool) -> bool:
    """Whether requests that may run at once can need more than the pool holds; one with its own share cannot."""
    return None in (pool.max_requests, pool.max_concurrency) or (pool.max_requests or 0) > (pool.max_concurrency or 0.0)


@dataclass(slots=True)
class _Totals:
    """Totals over all samples of the engines; `counted` of them reported preemptions."""

    counted: int = 0
    preempted: int = 0
    preempted_with_room: int = 0
    queued: bool = False
    most_waiting: int = 0
    unjudged: int = 0
    """Most requests that waited while no usage was reported."""
    most_running: int = 0
    highest_usage: float = 0.0
    used: bool = False
    """Whether any sample reported the pool's usage."""

    def add(self, rise: Sequence[Engine], facts: Facts, limits: Limits) -> None:
        """Count the preemptions of an engine's samples in a row, from the one before the first on."""
        count = (rise[-1].preemptions_total or 0) - (rise[0].preemptions_total or 0)
        if not count:
            return
        if have_room(rise, facts, limits) or is_reset(rise, count, facts):
            self.preempted_with_room += count
        else:
            self.preempted += count


def _totals(timeline: Timeline, facts: Facts, limits: Limits) -> _Totals:
    """The totals over all samples. Each engine counts by itself."""
    columns = engine_columns(timeline)
    usages, reported = columns.usages, columns.total("requests_running")
    running = map(_running, columns.samples) if None in reported else filter(None, reported)
    totals = _Totals(
        most_running=max(running, default=0),
        highest_usage=max(filter(None, usages), default=0.0),
        used=usages.count(None) < len(usages),
    )
    # Most servers of most days have no queue, and preempt nothing.
    if columns.only is None or any(one.requests_waiting or one.requests_waiting_for_capacity for one in columns.only):
        _add_queues(totals, _answers(columns), facts, limits)
    counts = set(columns.total("preemptions_total"))
    if columns.only is not None and len(counts) == 1 and None not in counts:
        totals.counted = len(columns.only)
    else:
        _add_preemptions(totals, _answers(columns), facts, limits)
    return totals


def _answers(columns: EngineColumns) -> Iterator[Sequence[Engine]]:
    return (sample.engines for sample in columns.samples if sample.engines)


def _running(sample: Sample) -> int:
    return sum(engine.requests_running or 0 for engine in sample.engines or ())


def _add_queues(totals: _Totals, answers: Iterable[Sequence[Engine]], facts: Facts, limits: Limits) -> None:
    streak = 0
    for engines in answers:
        waiting = max(waiting_for_room(engine, facts) for engine in engines)
        unjudged = [engine.requests_waiting or 0 for engine in engines if engine.kv_usage_ratio is None]
        streak = streak + 1 if waiting else 0
        totals.queued = totals.queued or streak >= limits.waiting_samples
        totals.most_waiting = max(totals.most_waiting, waiting)
        totals.unjudged = max(totals.unjudged, *unjudged, 0)


def _add_preemptions(totals: _Totals, answers: Iterable[Sequence[Engine]], facts: Facts, limits: Limits) -> None:
    rises: dict[str, list[Engine]] = {}
    for engines in answers:
        if any(engine.preemptions_total is None for engine in engines):
            continue
        totals.counted += 1
        for engine in engines:
            rise = rises.setdefault(engine.engine, [engine])
            if (engine.preemptions_total or 0) <= (rise[-1].preemptions_total or 0):
                totals.add(rise, facts, limits)
                rise.clear()
            rise.append(engine)
    for rise in rises.values():
        totals.add(rise, facts, limits)


def _work_share(timeline: Timeline, facts: Facts, limits: Limits) -> float | None:
    """Throughput while requests wait for KV blocks, over that while some run and none waits.

    A queue alone may be a batch job. `None` where either period was too short, or tokens are not reported.
    """
    tokens, seconds = [0, 0], [0.0, 0.0]
    read = [sample for sample in timeline.samples if sample.engines]
    for before, sample in pairwise(read):
        elapsed_seconds = sample.at_seconds - before.at_seconds
        first, last = before.tokens_total, sample.tokens_total
        if elapsed_seconds > limits.growth.engine_age_seconds or first is None or last is None:
            continue
        both = (before.engines or (), sample.engines or ())
        waits = all(any(waiting_for_room(one, facts) for one in each) for each in both)
        queued = any(one.requests_waiting for each in both for one in each)
        runs = all(any(one.requests_running for one in each) for each in both)
        if waits or (runs and not queued):
            tokens[waits] += last - first
            seconds[waits] += elapsed_seconds
    if min(seconds) < limits.queue_seconds or not tokens[0]:
        return None
    return (tokens[1] / seconds[1]) / (tokens[0] / seconds[0])


def _capacity_tokens(facts: Facts) -> int | None:
    known = [pool_tokens(pool) for pool in facts.pools if pool.sliding_window_tokens is None]
    return sum(known) if known and len(known) == len(facts.pools) else None


def _fits(timeline: Timeline, facts: Facts) -> str:
    """How many requests of the concurrent step's largest attempt the pool holds with all of their tokens, in words."""
    tried = [span.workload for span in timeline.spans(STEP) if span.workload is not None]
    workload = max(tried, key=lambda one: one.tokens_per_request, default=None)
    if workload is None or not workload.requests or not facts.pools or _capacity_tokens(facts) is None:
        return ""
    tokens = workload.tokens_per_request
    holds = sum(pool.usable_blocks // max(-(-tokens // pool.block_tokens), 1) for pool in facts.pools)
    if holds >= workload.requests:
        return f", although the pool holds all {workload.requests} requests at their full length of {tokens:,} tokens"
    return (
        f"; the pool holds {holds} of kvdiag's {workload.requests} requests at their full length of {tokens:,} tokens"
    )
