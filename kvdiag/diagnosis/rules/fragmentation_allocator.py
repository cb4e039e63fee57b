"""fragmentation.allocator: enough memory is free, but not in one block.

Decided in this order:

1. Our own requests' out-of-memory messages (kvdiag/diagnosis/request_failures.py): the unallocated bytes alone were
   enough (fault; suspect if they are a tiny share of the device), or all free bytes together were not (ok).
2. Each process by the states of kvdiag/diagnosis/reserved_memory.py: an allocation failed although free and stranded
   memory were enough (fault); torch flushed its cache while much is stranded (suspect); much is unused, and a large
   block would not fit or it stays so through ten idle minutes, most of it stranded (suspect).
3. Where that is ok: bytes left over from loading the weights that no request uses (fault after hours, else suspect).
4. Where none decided: unused bytes that grow while live ones do not, over equal cycles, a soak, or hours.

"Reserved - allocated > 2 GB" alone is none of these: it is cache that the next request uses, CUDA graph pools,
activation workspace. Only the agents in the server's processes separate them; nothing is guessed from device memory.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvdiag.diagnosis.growth.attribution import unused_growth
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.equal_cycles import allocator_growths
from kvdiag.diagnosis.growth.growth_evidence import MINUTE_SECONDS
from kvdiag.diagnosis.growth.soak_memory import finding as of_soak
from kvdiag.diagnosis.growth.soak_memory import soaked
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions import joined_holes
from kvdiag.diagnosis.request_failures import holes_in_message, memory_failures, shortage_evidence
from kvdiag.diagnosis.reserved_memory import (
    RecentReadings,
    confirmed,
    kept_since_start,
    likely,
    recent_failure,
    recent_readings,
    releasable_bytes,
    stranded_bytes,
    watched,
)
from kvdiag.diagnosis.rule import unknown, worst
from kvdiag.diagnosis.timeline_queries import block_bytes, gap_reason, torch_readings
from kvdiag.engine_memory import runs_torch
from kvdiag.formatting import format_bytes, format_count, format_duration, format_holder, plural
from kvdiag.model import NATIVE, Allocator, Evidence, Facts, Finding, Prescription, Span, Status, Timeline
from kvdiag.oom.message import Shortage

ID = "fragmentation.allocator"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at every out-of-memory message of our own requests, then at each process's allocator statistics."""
    failures = memory_failures(timeline)
    judged_failures = [(one, holes_in_message(one[1], limits)) for one in failures]
    fragmented = [one for one, found in judged_failures if found.explain_it]
    if fragmented:
        shortage = max((shortage for _, shortage in fragmented), key=lambda one: one.unallocated_bytes or 0)
        asked, free, unused = (
            format_bytes(size or 0) for size in (shortage.asked_bytes, shortage.free_bytes, shortage.unallocated_bytes)
        )
        room = f"{free} free and {unused} reserved but unallocated"
        summary = f"an allocation of {asked} failed with {room}: no free block is large enough"
        status: Status = "fault" if "confirmed" in {found.state for _, found in judged_failures} else "suspect"
        fix = joined_holes(shortage.unallocated_bytes)
        return (Finding(ID, status, summary, _evidence(fragmented, shortage), prescription=fix),)
    if judged_failures and judged_failures[-1][1].state == "none":
        together = "free plus reserved-but-unallocated memory"
        summary = f"the failed allocation exceeds {together}: out of memory, not fragmentation"
        return (Finding(ID, "ok", summary, _evidence(failures, failures[-1][1])),)
    readings = torch_readings(timeline, facts)
    if not readings and judged_failures:
        last_failure = judged_failures[-1][1]
        return unknown(ID, f"{last_failure.figures}: {last_failure.reason}")
    if not readings and not runs_torch(facts.engine_name):
        return (Finding(ID, "ok", "this engine allocates each buffer whole, without torch"),)
    if not readings:
        hidden = (
            "torch's free blocks are visible only inside the server's process; run the agent in it (`kvdiag agent`)"
        )
        gap = gap_reason(timeline, facts, "torch_allocator")
        missing = hidden if gap is None else f"{gap}; `kvdiag doctor` checks the agent"
        return unknown(ID, f"no allocation failed, and {missing}")
    # Of equals one is named, always the same.
    newest = sorted((last for _, last in readings), key=lambda last: (last.title or "", last.pid, last.device_uuid))
    judged = (_judge_process(last, recent_readings(timeline, last, limits), limits) for last in newest)
    found = worst(
        replace(one, holder=last.who, prescription=_fix(one, last)) for one, last in zip(judged, newest, strict=True)
    )
    left = _left_by_the_load(timeline, facts, readings, limits) if found.status == "ok" else None
    if left is None and found.status in ("ok", "unknown"):
        growing = _over_cycles if timeline.marks else unused_growth
        left = growing(timeline, facts, limits, ID)
    return (left or found,)


def _fix(found: Finding, last: Allocator) -> Prescription | None:
    return joined_holes(stranded_bytes(last)) if found.status in ("suspect", "fault") else None


def _over_cycles(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """Reserved bytes that grow with each equal request while allocated bytes do not; `None` where they do not grow.

    A soak decides where there was one: it separates requests from growth over time.
    """
    found = of_soak(verdict, soaked(timeline, facts, limits).of(MemoryComponent.TORCH_UNUSED), limits)
    if found is not None:
        return found if found.status in ("suspect", "fault") else None
    growths = allocator_growths(timeline, facts, limits)
    growing = [one for one in growths if one.reserved.leaking and not one.live.leaking]
    if not growing:
        return None
    most = max(growing, key=lambda one: one.reserved.bytes_per_cycle)
    climb = most.reserved
    evidence = (
        Evidence("process", most.who, "holder", "torch"),
        Evidence("reserved_growth_per_request", climb.bytes_per_cycle, "bytes", "torch"),
        Evidence("reserved_growth_over_judged_requests", climb.judged_bytes, "bytes", "torch"),
        Evidence("live_growth_over_judged_requests", most.live.judged_bytes, "bytes", "torch"),
        Evidence("judged_requests", climb.judged_cycles, "requests", "kvdiag"),
        Evidence("rising_requests", climb.rising_cycles, "requests", "torch"),
    )
    rate = f"{format_bytes(climb.bytes_per_cycle)} more per request while allocated bytes do not grow"
    return Finding(verdict, "suspect", f"{format_holder(most.who)}: torch reserves {rate}", evidence, holder=most.who)


def _left_by_the_load(
    timeline: Timeline, facts: Facts, readings: tuple[tuple[Allocator, Allocator], ...], limits: Limits
) -> Finding | None:
    """What torch kept after loading the weights and no request ever used: the pool could be larger by it."""
    # All samples are looked at only where the gap is large at both ends.
    large = [
        last
        for first, last in readings
        if min(first.unallocated_bytes, last.unallocated_bytes) > limits.reserved_gap_bytes
    ]
    kept = [(*found, last) for last in large if (found := kept_since_start(timeline, last, limits)) is not None]
    if not kept or not facts.pools:
        return None
    most, seconds, last = min(kept, key=lambda one: (-one[0], one[2].title or "", one[2].pid, one[2].device_uuid))
    who, block = last.who, block_bytes(facts)
    tokens = None if not block else most // block * facts.pools[0].block_tokens
    price = "" if tokens is None else f", room for {format_count(tokens)} tokens"
    processes = "" if len(kept) == 1 else f", and more in {plural(len(kept) - 1, 'other process', 'other processes')}"
    return Finding(
        ID,
        "fault" if seconds >= limits.left_over_seconds else "suspect",
        f"{format_holder(who)}: {format_bytes(most)} reserved by torch but unused since the server started{price}"
        f"{processes}: left over from loading the weights",
        (
            Evidence("process", who, "holder", "torch"),
            Evidence("min_unused_since_start", most, "bytes", "torch"),
            Evidence("processes", len(kept), "processes", "torch"),
            Evidence("kv_tokens_lost", tokens, "tokens", "computed"),
            *_parts(who, last, recent_readings(timeline, last, limits), limits)[1:],
        ),
        holder=who,
        likely_cause="Buffers from loading the weights that torch keeps: its cache was not emptied before the pool "
        "was sized.",
        confirm="torch.cuda.empty_cache() in the worker raises the device's free bytes by this amount.",
        remedy="Upgrade the engine or the loader (fastsafetensors and others keep their buffers), or load "
        "with --load-format auto, which leaves less behind.",
    )


def _judge_process(last: Allocator, recent: RecentReadings, limits: Limits) -> Finding:
    who = format_holder(last.who)
    if last.backend is not None and last.backend != NATIVE:
        return Finding(ID, "unknown", f"{who} allocates with {last.backend}, which reports no blocks; use torch's own")
    evidence = _parts(last.who, last, recent, limits)
    failure = recent_failure(last, limits)
    if failure is not None and confirmed(failure):
        stranded = failure.split.stranded_bytes if failure.split is not None else 0
        age = failure.age_seconds
        when = "just now" if age < MINUTE_SECONDS else f"{format_duration(age)} ago"
        room = f"{format_bytes(failure.free_bytes)} free and {format_bytes(stranded)} stranded between live blocks"
        failed = f"an allocation of {format_bytes(failure.asked_bytes)} failed {when}"
        return Finding(ID, "fault", f"{who}: {failed} with {room}: no free block is large enough", evidence)
    if last.outside_driver:
        summary = f"{who} is asleep or allocates outside torch, so torch's figures do not match the device; wake it up"
        return Finding(ID, "unknown", summary)
    if likely(last, recent, limits):
        summary = (
            f"{who}: torch flushed its cache {recent.retries(limits)} times to continue, with "
            f"{format_bytes(stranded_bytes(last) or 0)} stranded between live blocks"
        )
        return Finding(ID, "suspect", summary, evidence)
    gap = last.unallocated_bytes
    if gap <= limits.reserved_gap_bytes:
        return Finding(ID, "ok", f"{who}: {format_bytes(gap)} reserved by torch but unused, which is normal", evidence)
    return Finding(ID, *_by_the_gap(last, recent, limits), evidence)


def _by_the_gap(last: Allocator, recent: RecentReadings, limits: Limits) -> tuple[Status, str]:
    """The plain "reserved - allocated", by its parts and how long it has been there.

    Prometheus keeps two of the parts, but not whether a large block would fit.
    """
    unused = f"{format_holder(last.who)}: {format_bytes(last.unallocated_bytes)} reserved by torch but unused"
    split = last.split
    releasable, stranded = releasable_bytes(last), stranded_bytes(last)
    if releasable is None or stranded is None or (split is not None and split.fits is None):
        return "unknown", f"{unused}, and its parts are not reported; run the agent in the server (`kvdiag agent`)"
    private = "" if split is None else f"{format_bytes(split.private_bytes)} in graph pools, "
    unused += f" ({format_bytes(releasable)} releasable, {private}{format_bytes(stranded)} stranded)"
    if split is not None and not split.fits and stranded >= split.request_bytes:
        return "suspect", f"{unused}; a block of {format_bytes(split.request_bytes)} would not fit"
    if watched(recent, limits):
        since = f"for {format_duration(limits.idle_gap_seconds)} without a request"
        if stranded > releasable:
            return "suspect", f"{unused} {since}: most of it between live blocks"
        if split is not None:
            return "ok", f"{unused} {since}: cached and releasable"
    if split is None and stranded >= limits.large_request_bytes:
        return "unknown", f"{unused}; run the agent in the server to see whether a large block would fit"
    return "ok", f"{unused}: the next requests use it"


def _parts(who: str, last: Allocator, recent: RecentReadings, limits: Limits) -> tuple[Evidence, ...]:
    split, failure = last.split, recent_failure(last, limits)
    found: tuple[Evidence, ...] = (
        Evidence("process", who, "holder", "torch"),
        Evidence("reserved", last.reserved_bytes, "bytes", "torch"),
        Evidence("reserved_but_unallocated", last.unallocated_bytes, "bytes", "torch"),
        Evidence("alloc_retries", recent.retries(limits), "times", "torch"),
    )
    if failure is not None:
        found += (
            Evidence("requested", failure.asked_bytes, "bytes", "black box"),
            Evidence("free_on_device", failure.free_bytes, "bytes", "black box"),
            Evidence("failed_seconds_ago", failure.age_seconds, "seconds", "black box"),
        )
    releasable, stranded = releasable_bytes(last), stranded_bytes(last)
    if releasable is not None and stranded is not None:
        found += (
            Evidence("releasable", releasable, "bytes", "torch"),
            Evidence("stranded", stranded, "bytes", "torch"),
        )
    if split is not None:
        found += (
            Evidence("private_pools", split.private_bytes, "bytes", "torch"),
            Evidence("pending", split.pending_bytes, "bytes", "torch"),
            Evidence("largest_free_block", split.largest_free_block_bytes, "bytes", "torch"),
            Evidence("unusable_ratio", split.unusable_ratio, "ratio", "computed"),
        )
    return found


def _evidence(failures: Sequence[tuple[Span, Shortage]], shortage: Shortage) -> tuple[Evidence, ...]:
    failed = sum(span.outcome.failed for span, _ in failures if span.outcome is not None)
    steps = ", ".join(dict.fromkeys(span.step for span, _ in failures))
    return *shortage_evidence(shortage), Evidence("failed_requests", failed, "requests", f"step {steps}")
