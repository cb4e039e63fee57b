"""fragmentation.allocator: memory is there, but no block of it fits.

Confirmed by an allocation that failed although what was free and what lay between live blocks was enough for it: by
torch's message in an answer, or by the agent's black box. Likely where torch had to flush its cache to go on while
holes lie between live blocks. To be watched where more than activations explain stays unused through ten idle minutes.
"Reserved - allocated > 2 GB" alone is none of these: it is cache that the next request uses, CUDA graph pools,
activation workspace. The agents in the server's processes tell which; without them nothing is guessed from device
memory. The three states stand in kvdiag/diagnosis/reserved_memory.py.
"""

from __future__ import annotations

from kvdiag.diagnosis.allocator_growth import allocator_growths
from kvdiag.diagnosis.device_banks import watched_cache
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.request_failures import MemoryFailure, memory_failures
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
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.soak_components import soaked
from kvdiag.diagnosis.soak_verdicts import finding as of_soak
from kvdiag.diagnosis.timeline_queries import block_bytes, counted, readable_bytes, torch_readings
from kvdiag.diagnosis.window import MINUTE_SECONDS
from kvdiag.model import NATIVE, Allocator, Evidence, Facts, FailedAllocation, Finding, Timeline

ID = "fragmentation.allocator"
CYCLES = "single_request"


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
    # Of equals one is named, always the same.
    newest = sorted((last for _, last in readings), key=lambda last: (last.title or "", last.pid, last.device_uuid))
    judged = [_judge_process(last, recent_readings(timeline, last, limits), limits) for last in newest]
    found = max(judged, key=lambda finding: ("ok", "unknown", "suspect", "fault").index(finding.status))
    left = _left_by_the_load(timeline, facts, readings, limits) if found.status == "ok" else None
    if left is not None:
        return (left,)
    if found.status in ("ok", "unknown"):
        growing = _over_cycles if timeline.marks else watched_cache
        return (growing(timeline, facts, limits, ID) or found,)
    return (found,)


def _over_cycles(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What torch reserves more with each equal request while what lives in it does not grow; `None` where it does not.

    A soak decides where there was one: it tells requests from what grows anyway.
    """
    soak = soaked(timeline, facts, limits)
    found = None if soak is None else of_soak(verdict, soak.of("torch_cache"), limits)
    if found is not None:
        return found if found.status in ("suspect", "fault") else None
    growths = allocator_growths(timeline, facts, limits, step=CYCLES)
    worst = max(
        (one for one in growths if one.reserved.leaking and not one.live.leaking),
        key=lambda one: one.reserved.bytes_per_cycle,
        default=None,
    )
    if worst is None:
        return None
    climb = worst.reserved
    return Finding(
        id=verdict,
        status="suspect",
        summary=f"{worst.who}: torch reserves {readable_bytes(climb.bytes_per_cycle)} more with each request, while "
        "what lives in it does not grow",
        evidence=(
            number("process", worst.who, "", "torch"),
            number("reserved_growth_per_cycle", climb.bytes_per_cycle, "bytes", "torch"),
            number("reserved_growth_over_judged_cycles", climb.judged_bytes, "bytes", "torch"),
            number("live_growth_over_judged_cycles", worst.live.judged_bytes, "bytes", "torch"),
            number("judged_cycles", climb.judged_cycles, "cycles", "kvdiag"),
            number("rising_cycles", climb.rising_cycles, "cycles", "torch"),
        ),
    )


def _left_by_the_load(
    timeline: Timeline, facts: Facts, readings: tuple[tuple[Allocator, Allocator], ...], limits: Limits
) -> Finding | None:
    """What torch kept when the weights were there, and no request ever used: a pool made at start lacks it."""
    # Only where the gap is large at both ends is it worth while to look at all between.
    large = [last for first, last in readings if min(_gap_bytes(first), _gap_bytes(last)) > limits.reserved_gap_bytes]
    kept = [(*found, last) for last in large if (found := kept_since_start(timeline, last, limits)) is not None]
    if not kept or not facts.pools:
        return None
    most, seconds, last = min(kept, key=lambda one: (-one[0], one[2].title or "", one[2].pid, one[2].device_uuid))
    who, block = last.who, block_bytes(facts)
    tokens = None if not block else most // block * facts.pools[0].block_tokens
    price = "" if tokens is None else f", room for {tokens:,} tokens"
    processes = "" if len(kept) == 1 else f", and in {counted(len(kept) - 1, 'process', 'processes')} more"
    return Finding(
        id=ID,
        status="fault" if seconds >= limits.left_over_seconds else "suspect",
        summary=f"{who}: {readable_bytes(most)} reserved by torch lie unused since its server's start{price}"
        f"{processes}: left over from loading the weights, and no request has used them",
        evidence=(
            number("process", who, "", "torch"),
            number("least_unused_since_start", most, "bytes", "torch"),
            number("processes", len(kept), "processes", "torch"),
            number("kv_tokens_lost", tokens, "tokens", "computed"),
            *_parts(who, last, recent_readings(timeline, last, limits), limits)[1:],
        ),
        likely_cause="Buffers of the weights' loading that torch keeps: its cache was not emptied before the pool and "
        "the batch were sized.",
        confirm="torch.cuda.empty_cache() in the worker raises the device's free bytes by as much.",
        remedy="Upgrade the engine or the loader (fastsafetensors and others keep what they used); load with "
        "--load-format auto, which leaves less behind.",
    )


def _gap_bytes(allocator: Allocator) -> int:
    return allocator.reserved_bytes - allocator.allocated_bytes


def _judge_process(last: Allocator, seen: RecentReadings, limits: Limits) -> Finding:
    """One process, by the first of the states that its readings bear out."""
    who = last.who
    if last.backend is not None and last.backend != NATIVE:
        return _unknown(f"{who} allocates by {last.backend}, which has no blocks to look at")
    evidence = _parts(who, last, seen, limits)
    failure = recent_failure(last, limits)
    if failure is not None and confirmed(failure):
        summary = (
            f"{who}: {readable_bytes(failure.asked_bytes)} could not be allocated {_ago(failure)}, although "
            f"{readable_bytes(failure.free_bytes)} were free and {_lay(failure)} between live blocks: no hole fits"
        )
        return Finding(id=ID, status="fault", summary=summary, evidence=evidence)
    if last.outside_driver:
        return _unknown(f"{who} is asleep, or allocates past torch: what torch counts is not what is on the device")
    retries = seen.retries(limits)
    stranded = stranded_bytes(last)
    if likely(last, seen, limits):
        summary = (
            f"{who}: torch had to flush its cache {retries} times to go on, while {readable_bytes(stranded or 0)} lie "
            f"free between live blocks"
        )
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    return _by_the_gap(who, last, seen, evidence, limits)


def _by_the_gap(
    who: str, last: Allocator, seen: RecentReadings, evidence: tuple[Evidence, ...], limits: Limits
) -> Finding:
    """The plain "reserved - allocated", by its parts: what is in it decides, and how long it has been there."""
    split, gap = last.split, last.reserved_bytes - last.allocated_bytes
    if gap <= limits.reserved_gap_bytes:
        summary = f"{who}: {readable_bytes(gap)} reserved by torch lie unused, which is normal"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    if split is None and _shown_by_metrics(last):
        return _by_what_is_kept(who, last, seen, evidence, limits)
    if split is None or split.fits is None:
        return _unknown(f"{who}: {readable_bytes(gap)} reserved by torch lie unused, and why is not told", evidence)
    parts = (
        f"{readable_bytes(split.releasable_bytes)} releasable, {readable_bytes(split.private_bytes)} in graph pools, "
        f"{readable_bytes(split.stranded_bytes)} between live blocks"
    )
    unused = f"{who}: {readable_bytes(gap)} reserved by torch lie unused ({parts})"
    if not split.fits and split.stranded_bytes >= split.request_bytes:
        summary = f"{unused}, and {readable_bytes(split.request_bytes)} would not fit"
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    if watched(seen, limits):
        minutes = limits.idle_gap_seconds / 60
        if split.stranded_bytes > split.releasable_bytes:
            summary = f"{unused} for {minutes:.0f} minutes without a request: most of it between live blocks"
            return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
        summary = f"{unused} for {minutes:.0f} minutes without a request: cached, releasable; worth watching"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    summary = f"{who}: {readable_bytes(gap)} reserved by torch lie unused, of use to the next request ({parts})"
    return Finding(id=ID, status="ok", summary=summary, evidence=evidence)


def _shown_by_metrics(last: Allocator) -> bool:
    return releasable_bytes(last) is not None and stranded_bytes(last) is not None


def _by_what_is_kept(
    who: str, last: Allocator, seen: RecentReadings, evidence: tuple[Evidence, ...], limits: Limits
) -> Finding:
    """The gap by the two of its parts that a Prometheus keeps: whether a block would fit is not among them."""
    gap, releasable, stranded = _gap_bytes(last), releasable_bytes(last) or 0, stranded_bytes(last) or 0
    parts = f"{readable_bytes(releasable)} releasable, {readable_bytes(stranded)} between live blocks"
    unused = f"{who}: {readable_bytes(gap)} reserved by torch lie unused ({parts})"
    if stranded > releasable and watched(seen, limits):
        minutes = limits.idle_gap_seconds / 60
        summary = f"{unused} for {minutes:.0f} minutes without a request: most of it between live blocks"
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    if stranded >= limits.large_request_bytes:
        return _unknown(f"{unused}, and whether a large block would fit is not told", evidence)
    summary = f"{who}: {readable_bytes(gap)} reserved by torch lie unused, of use to the next request ({parts})"
    return Finding(id=ID, status="ok", summary=summary, evidence=evidence)


def _ago(failure: FailedAllocation) -> str:
    if failure.age_seconds < MINUTE_SECONDS:
        return "just now"
    return f"{failure.age_seconds / MINUTE_SECONDS:.0f} minutes ago"


def _lay(failure: FailedAllocation) -> str:
    return f"{readable_bytes(failure.split.stranded_bytes if failure.split is not None else 0)} lay free"


def _unknown(reason: str, evidence: tuple[Evidence, ...] = ()) -> Finding:
    return Finding(id=ID, status="unknown", summary=f"cannot tell: {reason}", evidence=evidence)


def _parts(who: str, last: Allocator, seen: RecentReadings, limits: Limits) -> tuple[Evidence, ...]:
    split, failure = last.split, recent_failure(last, limits)
    retries = seen.retries(limits)
    found: tuple[Evidence, ...] = (
        number("process", who, "", "torch"),
        number("reserved", last.reserved_bytes, "bytes", "torch"),
        number("reserved_but_unallocated", last.reserved_bytes - last.allocated_bytes, "bytes", "torch"),
        number("alloc_retries", retries, "times", "torch"),
    )
    if failure is not None:
        found = (
            *found,
            number("asked", failure.asked_bytes, "bytes", "black box"),
            number("free_on_device", failure.free_bytes, "bytes", "black box"),
            number("failed_before", failure.age_seconds, "seconds", "black box"),
        )
    if split is None and not _shown_by_metrics(last):
        return found
    if split is None:
        kept = (("releasable", releasable_bytes(last)), ("stranded", stranded_bytes(last)))
        return (*found, *(number(name, size, "bytes", "torch") for name, size in kept))
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
