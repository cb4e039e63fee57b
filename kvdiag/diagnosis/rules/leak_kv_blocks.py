"""leak.kv_blocks: KV blocks still in use while no request runs. Exact accounting; statistics only if it is never idle.

The usage gauge counts blocks with a live reference only; cached blocks without one are free
(vllm/v1/core/block_pool.py::BlockPool.get_usage), so an idle engine must show 0, with or without prefix caching.
Decided in this order:

1. Idle intervals of the life that is judged: blocks in use at the end of the last one are a leak, unless they are
   fewer than before (still being released) or the pool had not settled (unknown). A KV connector may hold the blocks
   of finished requests until its timeout: suspect until then.
2. Nothing in use at the end: blocks that a timeout released late, then a prefix cache whose hits collapsed.
3. Never idle: leaked blocks are in use at every moment, so the lowest usage over hours bounds them exactly, and where
   they grow, the lowest samples at equal numbers of running requests rise. A rise proves no leak, since requests may
   have become longer (unknown), but without one there is none.

An agent in the engine's process counts who holds the blocks (`blocks/orphans.py`): that is exact while requests run and
decides first. What it cannot show is the past: blocks that a timeout released late, and a prefix cache that collapsed.

Two kinds of engine show no leak while idle. Where lost units look like cached or free ones, the loads of a run prove
how much of the pool is free (`blocks/refill.py`). Where gauges move only when a request ends, a run makes them move;
without one, their lowest values are judged as those of a server that is never idle.

The verdict of an idle interval stands while the engine works, until a later one or another engine replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from kvdiag.diagnosis.blocks.busy_pool import busy_floor
from kvdiag.diagnosis.blocks.hit_collapse import Collapse, hit_collapse
from kvdiag.diagnosis.blocks.late_frees import LateFree, held_idle, late_frees
from kvdiag.diagnosis.blocks.orphans import combined, owners_finding
from kvdiag.diagnosis.blocks.refill import refilled
from kvdiag.diagnosis.blocks.stall import stalled
from kvdiag.diagnosis.blocks.state_slots import newest_slots, slots_before, slots_in_use
from kvdiag.diagnosis.blocks.step_accounting import NO_USAGE, kept_by_requests
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import (
    NO_POOL,
    IdleFloor,
    block_bytes,
    gap_reason,
    held_blocks,
    idle_floors,
    is_idle,
    open_sessions,
    sample_usage,
)
from kvdiag.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_rate,
    format_ratio,
    plural,
)
from kvdiag.model import Evidence, Facts, Finding, GrowthFigures, Outcome, Timeline

ID = "leak.kv_blocks"
_ON_COMPLETION = (
    "usage moves only when a request ends, so an idle pool is not observed; run `kvdiag run`, or watch it under load "
    "for six hours"
)
PROBE = "isolation"
"""The step whose prompts are each sent alone, so that nothing moves the gauges after them."""


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the blocks in use at the end of every idle interval with 0; else look for requests that never end."""
    found = _judged(timeline, facts, limits)
    counted = owners_finding(ID, timeline, facts, limits)
    # Earlier samples may show a problem that owners counted now cannot show.
    past = late_frees(timeline, facts, limits) or hit_collapse(timeline, limits)
    if counted is not None and (counted.status == "fault" or not past):
        found = (combined(counted, found[0], timeline, limits),)
    stall = None if found[0].status in ("fault", "suspect") else stalled(timeline, facts, limits)
    if stall is None or not stall.blocks:
        return found
    total = sum(pool.usable_blocks for pool in facts.pools)
    held = f"{format_count(stall.blocks)} of {plural(total, f'KV {facts.capabilities.unit}')}"
    return (stall.finding(ID, f"{held} in use, {stall.requests}"),)


def _judged(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    if not facts.pools:
        found = _by_share(timeline, facts, limits)
        return unknown(ID, gap_reason(timeline, facts, "engine") or NO_POOL) if found is None else (found,)
    if not facts.capabilities.returns:
        return (_by_filling(timeline, facts, limits),)
    moved = timeline.marks and not timeline.spans(PROBE)
    if facts.capabilities.on_completion and not moved:
        lowest = None if timeline.marks else busy_floor(timeline, facts, limits)
        return unknown(ID, _ON_COMPLETION) if lowest is None else (lowest.finding(ID, facts),)
    unit = facts.capabilities.unit
    intervals = idle_floors(timeline, facts, limits)
    floors = [floor for floor in intervals if floor.blocks is not None]
    if not floors:
        if not timeline.marks and (lowest := busy_floor(timeline, facts, limits)) is not None:
            return (lowest.finding(ID, facts),)
        return unknown(ID, _not_idle(timeline, facts))
    first, last = floors[0], floors[-1]
    held, before = last.blocks or 0, first.blocks or 0
    if intervals[-1].blocks is None and _least_held_since(last, timeline, facts) < max(held, 1):
        return unknown(ID, "the pool had not settled at the last sample; sample the idle server for a few seconds more")
    outcomes = _outcomes_between(timeline, first, last)
    requests = None if outcomes is None else sum(one.requests for one in outcomes)
    counted = ("requests including warm-up", "kvdiag") if timeline.marks else ("requests", "engine")
    evidence: tuple[Evidence, ...] = (
        Evidence("idle_intervals", len(floors), "intervals", "engine"),
        Evidence("blocks_at_first_idle", before, "blocks", "engine"),
        Evidence("blocks_at_last_idle", held, "blocks", "engine"),
        Evidence("requests_between", requests, *counted),
    )
    if held == 0:
        if slots := newest_slots(intervals):
            return (_slots_kept(slots, open_sessions(timeline, last, facts)[0], evidence),)
        if newest_slots(intervals) is None and (slots := slots_before(intervals)):
            earlier = f"{plural(slots, 'state slot')} of recurrent layers stayed in use in an earlier idle interval"
            missing = f"{earlier}, and the last one does not show them; sample the idle server for a minute"
            return (Finding(ID, "unknown", missing, evidence),)
        if late := late_frees(timeline, facts, limits):
            return (_released_late(late, facts, evidence, limits),)
        if (collapse := hit_collapse(timeline, limits)) is not None:
            return (_hits_collapsed(collapse, evidence),)
        if (rising := _rising_since(last, timeline, facts, limits)) is not None:
            return (replace(rising, evidence=(*evidence, *rising.evidence)),)
        limit = f"detection limit 1 {unit}" + (f" over {plural(requests, 'request')}" if requests else "")
        summary = f"no {unit} was in use at the end of {plural(len(floors), 'idle interval')} ({limit})"
        return (Finding(ID, "ok", summary, evidence),)
    # What falls below the lowest floor since the pool was last empty is being released late.
    since_empty = [last, *takewhile(lambda floor: floor.blocks, reversed(floors[:-1]))]
    if held < min((floor.blocks for floor in since_empty[1:] if floor.blocks), default=held):
        blocks = plural(held, f"{unit} is", f"{unit}s are")
        summary = f"{blocks} in use while idle, but fewer than before; sample longer to see whether all are released"
        return (Finding(ID, "unknown", summary, evidence),)
    size = block_bytes(facts)
    amount = f" ({format_bytes(held * size)})" if size is not None else ""
    by_each = kept_by_requests(held - before, outcomes or (), facts, limits)
    each = by_each.each_blocks
    rate = "" if each is None else f"; {by_each.at_least}+{format_number(each)} per request"
    if timeline.marks and requests and held == before:
        rate = f", all of them since before the run: none was lost in its {plural(requests, 'request')}"
    total = sum(pool.usable_blocks for pool in facts.pools)
    left = None if each is None else round((total - held) / each)
    evidence += (
        Evidence("leaked", None if size is None else held * size, "bytes", "engine"),
        Evidence("leaked_ratio", held / total, "ratio", "engine"),
        Evidence("requests_until_pool_full", left, "requests", "computed"),
    )
    growth = None if timeline.marks or size is None else _growth(floors, size, (total - held) * size, limits)
    if growth is not None and growth.exhaustion_seconds is not None:
        grows = format_rate(growth.bytes_per_second * HOUR_SECONDS)
        rate = f"; +{grows}, full in {format_duration(growth.exhaustion_seconds)}"
    summary = f"{format_number(held)} of {plural(total, f'KV {unit}')}{amount} still in use while idle{rate}"
    since = since_empty[-1].begin_seconds
    sessions, kept = open_sessions(timeline, last, facts)
    if sessions and kept is not None:
        evidence += (Evidence("blocks_held_by_sessions", kept, "blocks", "engine"),)
    if sessions and kept == held:
        holding = plural(sessions, "open streaming session holds", "open streaming sessions hold")
        return (Finding(ID, "ok", f"{summary}: {holding} all of them", evidence),)
    # A run's own requests belong to no session: what is left of them is lost.
    if sessions and not (timeline.marks and held > before):
        keeping = plural(sessions, "open streaming session keeps", "open streaming sessions keep")
        keeping += " tokens" if kept is None else f" {plural(kept, unit)} and may lock cached {unit}s"
        summary = f"{summary}; {keeping}; close the sessions to see whether the rest is released"
        return (Finding(ID, "unknown", summary, evidence),)
    if facts.kv_connector is not None and _held_seconds(last, timeline, facts) < limits.connector_timeout_seconds:
        timeout = format_duration(limits.connector_timeout_seconds)
        summary = f"{summary}; the KV connector ({facts.kv_connector}) may release them within its timeout of {timeout}"
        return (Finding(ID, "suspect", summary, evidence, growth=growth, since_seconds=since),)
    # An engine that reports a share alone may keep a part for itself: without growth it is no proof, as in `_by_share`.
    steady = timeline.marks and held == before and not facts.capabilities.blocks
    return (Finding(ID, "suspect" if steady else "fault", summary, evidence, growth=growth, since_seconds=since),)


def _by_share(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """The verdict where the engine reports no size of its pool, but the share in use, which is 0 of an idle one.

    Short requests may never show as running where the figures are renewed seldom: what was in use before is therefore
    the least of all idle samples.
    """
    can = facts.capabilities
    if not can.usage or can.blocks or not can.returns or can.on_completion:
        return None
    floors = [one for one in idle_floors(timeline, facts, limits) if one.usage_ratio is not None]
    idle = [usage for one in timeline.samples if is_idle(one) and (usage := sample_usage(one)) is not None]
    if not floors or not idle:
        return None
    least, held = min(idle), floors[-1].usage_ratio or 0.0
    evidence = (
        Evidence("idle_intervals", len(floors), "intervals", "engine"),
        Evidence("least_usage_while_idle", least, "ratio", "engine"),
        Evidence("usage_at_last_idle", held, "ratio", "engine"),
    )
    if held == 0.0:
        last = f"no part of the KV pool was in use at the end of {plural(len(floors), 'idle interval')}"
        return Finding(ID, "ok", last, evidence)
    share = f"{format_ratio(held)} of the KV pool still in use while idle"
    if any((floor.usage_ratio or 0.0) > held for floor in floors[-2:]):
        return Finding(ID, "unknown", f"{share}, but less than before; sample longer to see what is released", evidence)
    if held > least:
        grew = f"{share}, {format_ratio(least)} before: requests did not release it"
        return Finding(ID, "fault", grew, evidence, since_seconds=floors[-1].begin_seconds)
    return Finding(ID, "suspect", f"{share} since it was first sampled; `kvdiag run` shows whether it grows", evidence)


def _by_filling(timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    """The verdict where cells of ended requests are a cache: by what the run's own loads could fill."""
    unit = facts.capabilities.unit
    hidden = f"this engine's metrics do not show lost {unit}s"
    found = refilled(timeline, facts)
    if found is None:
        return Finding(ID, "unknown", f"{hidden}; fill the pool with `kvdiag run`")
    evidence = (
        Evidence("pool_tokens", found.pool_tokens, "tokens", "engine"),
        Evidence("tokens_filled", found.proven_tokens, "tokens", "kvdiag"),
        Evidence("tokens_refused", found.refused_tokens, "tokens", "kvdiag"),
    )
    pool = plural(found.pool_tokens, unit)
    if (refusal := found.refusal(facts)) is not None:
        return Finding(ID, "fault", refusal, evidence)
    unproven = plural(found.unproven_tokens, unit)
    if found.unproven_tokens <= limits.unproven_ratio * found.pool_tokens:
        filled = f"a load filled {format_count(found.proven_tokens)} of {pool} again after all others had ended"
        return Finding(ID, "ok", f"{filled} (detection limit {unproven})", evidence)
    filled = f"{hidden}; the run filled only {format_count(found.proven_tokens)} of {pool}"
    return Finding(ID, "unknown", f"{filled}; fill it whole: repeat the run while the server is idle", evidence)


def _growth(floors: Sequence[IdleFloor], block_bytes: int, room_bytes: int, limits: Limits) -> GrowthFigures | None:
    """The mean growth since the pool was last empty, and when the pool is full; `None` over too few idle intervals.

    The bounds are the slowest and the fastest of two halves, since load differs from one to the next.
    """
    held = floors[-len(tuple(takewhile(lambda floor: floor.blocks, reversed(floors)))) - 1 :]
    blocks, seconds = [floor.blocks or 0 for floor in held], [floor.at_seconds for floor in held]
    if len(held) < limits.kv_growth_intervals or blocks[-1] <= blocks[0]:
        return None
    rates = [
        (blocks[after] - blocks[before]) * block_bytes / (seconds[after] - seconds[before])
        for before, after in ((0, len(held) // 2), (0, -1), (len(held) // 2, -1))
    ]
    slowest, fastest = max(min(rates), 0.0), max(rates)
    return GrowthFigures(
        bytes_per_second=rates[1],
        low_bytes_per_second=slowest,
        high_bytes_per_second=fastest,
        room_bytes=room_bytes,
        exhaustion_seconds=room_bytes / rates[1],
        exhaustion_low_seconds=room_bytes / fastest,
        exhaustion_high_seconds=room_bytes / slowest if slowest else None,
    )


def _released_late(late: Sequence[LateFree], facts: Facts, evidence: tuple[Evidence, ...], limits: Limits) -> Finding:
    """Blocks that no request used until a timeout released them: no lasting leak, but a smaller pool meanwhile."""
    most, longest = max(hold.blocks for hold in late), max(hold.seconds for hold in late)
    total = sum(pool.usable_blocks for pool in facts.pools)
    times = "once" if len(late) == 1 else f"{len(late)} times"
    # A connector holds the blocks of a finished prefill until they are fetched: what its timeout freed was not.
    least_seconds = limits.late_blocks_seconds if facts.kv_connector is None else limits.connector_timeout_seconds
    large = [
        hold for hold in late if hold.blocks >= limits.late_blocks_fault_ratio * total and hold.seconds >= least_seconds
    ]
    return Finding(
        ID,
        # Once may be a peer that was lost; what happens again is how this server works.
        "fault" if len(large) > 1 else "suspect",
        f"{format_number(most)} of {plural(total, f'KV {facts.capabilities.unit}')} stayed in use for up to "
        f"{format_duration(longest)} while idle, {times}; released by a timeout, not when their requests ended",
        (
            *evidence,
            Evidence("late_frees", len(late), "times", "engine"),
            Evidence("longest_late_free", longest, "seconds", "engine"),
            Evidence("max_blocks_freed_late", most, "blocks", "engine"),
            Evidence("max_late_ratio", most / total, "ratio", "engine"),
        ),
        likely_cause="Requests that were cancelled or lost while a KV connector held their blocks: only the "
        "connector's timeout releases them.",
        confirm="Cancel a few requests at once on an idle server and watch the usage: it falls after the connector's "
        "abort timeout (minutes by default), not at once.",
        remedy="Upgrade the engine and the connector. Lower the abort timeout, which limits how long the blocks stay "
        "in use.",
    )


def _hits_collapsed(collapse: Collapse, evidence: tuple[Evidence, ...]) -> Finding:
    """A cache tier behind the pool that lost its blocks shows in the metrics by this alone, as different prompts do."""
    fell = f"from {format_ratio(collapse.first_ratio)} to {format_ratio(collapse.last_ratio)}"
    return Finding(
        ID,
        "unknown",
        f"no block is in use while idle, but the prefix-cache hit rate fell steadily {fell} over "
        f"{format_duration(collapse.hours * HOUR_SECONDS)} with room in the pool; repeat the same prompts to rule out "
        "a change of traffic; otherwise a cache tier (LMCache, offloading) lost its blocks",
        (
            *evidence,
            Evidence("first_hit_ratio", collapse.first_ratio, "ratio", "engine"),
            Evidence("last_hit_ratio", collapse.last_ratio, "ratio", "engine"),
            Evidence("prefix_queries", collapse.queried_tokens, "tokens", "engine"),
        ),
    )


def _not_idle(timeline: Timeline, facts: Facts) -> str:
    answers = [one for sample in timeline.samples for one in sample.engines or ()]
    is_reported = any(one.kv_usage_ratio is not None for one in answers)
    reason = None if is_reported else gap_reason(timeline, facts, "engine")
    if answers and not is_reported:
        return reason or NO_USAGE
    return reason or "the engines were never idle for two samples in a row; pause traffic for a moment"


def _least_held_since(floor: IdleFloor, timeline: Timeline, facts: Facts) -> float:
    since = timeline.between(floor.at_seconds, timeline.samples[-1].at_seconds)
    held = [held_blocks(sample, facts) for sample in since if sample.engines_idle is True]
    return min(blocks for blocks in held if blocks is not None)


def _held_seconds(floor: IdleFloor, timeline: Timeline, facts: Facts) -> float:
    """How long blocks had been in use without a pause, with nothing running, at the end of an idle interval."""
    newest_first = reversed(timeline.between(timeline.samples[0].at_seconds, floor.at_seconds))
    read = (sample for sample in newest_first if sample.engines is not None)
    held = [sample.at_seconds for sample in takewhile(lambda sample: held_idle(sample, facts), read)]
    return floor.at_seconds - min(held, default=floor.at_seconds)


def _rising_since(floor: IdleFloor, timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """The finding where the lowest samples after an empty idle interval rise: it says nothing of what came later."""
    if timeline.marks or not timeline.samples:
        return None
    last_seconds = timeline.samples[-1].at_seconds
    later = timeline.between(floor.at_seconds, last_seconds)
    since = Timeline(samples=tuple(one for one in later if one.at_seconds > floor.at_seconds))
    lowest = busy_floor(
        since, facts, replace(limits, busy=replace(limits.busy, floor_seconds=limits.busy.since_idle_seconds))
    )
    if lowest is None or lowest.says != "rising":
        return None
    unit, ago = facts.capabilities.unit, format_duration(last_seconds - floor.at_seconds)
    summary = (
        f"no {unit} was in use while idle {ago} ago; since then minimum usage at equal concurrency rises by "
        f"{format_number(lowest.growth_per_hour)} {unit}s/h; pause traffic for a moment to rule out longer requests"
    )
    return Finding(ID, "unknown", summary, lowest.finding(ID, facts).evidence)


def _slots_kept(slots: int, sessions: int, evidence: tuple[Evidence, ...]) -> Finding:
    """The finding on the pool in which each sequence of a hybrid model has a slot; cached slots do not count."""
    summary = slots_in_use(slots)
    evidence = (*evidence, Evidence("state_slots_at_last_idle", slots, "slots", "engine"))
    if sessions:
        return Finding(ID, "unknown", f"{summary}; sessions are open, which keep theirs; close them to see", evidence)
    return Finding(ID, "fault", summary, evidence)


def _outcomes_between(timeline: Timeline, first: IdleFloor, last: IdleFloor) -> Sequence[Outcome] | None:
    """Requests between two floors: kvdiag's own if it sent any, else all that the engines counted as finished."""
    if not timeline.marks:
        counts = [_finished(timeline, floor.at_seconds) for floor in (first, last)]
        if counts[0] is None or counts[1] is None:
            return None
        return [Outcome(completed=max(counts[1] - counts[0], 0), failed=0, prompt_tokens=0, generated_tokens=0)]
    return [
        span.outcome
        for span in timeline.spans()
        if span.outcome is not None
        and span.release_seconds is not None
        and first.at_seconds < span.release_seconds <= last.at_seconds
    ]


def _finished(timeline: Timeline, at_seconds: float) -> int | None:
    """Requests that the engines counted as finished up to a moment; `None` where one does not count them."""
    last = next((one for one in reversed(timeline.between(0.0, at_seconds)) if one.engines), None)
    return None if last is None else last.total("requests_finished_total")
