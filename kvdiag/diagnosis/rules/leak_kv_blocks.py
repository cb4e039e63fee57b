"""leak.kv_blocks: blocks that stay held although nothing runs. Exact accounting, no statistics.

The usage gauge counts blocks with a live reference only; cached blocks without one are free
(vllm/v1/core/block_pool.py::BlockPool.get_usage), so an idle engine must show none, prefix caching or not. What idle
moments have shown stands while the engine works, until a later one shows otherwise or the engine is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.diagnosis.blocks.busy_pool import BusyFloor, busy_floor
from kvdiag.diagnosis.blocks.late_frees import Collapse, LateFree, hit_collapse, late_holds
from kvdiag.diagnosis.history import history
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.timeline_queries import (
    IdleFloor,
    block_bytes,
    counted,
    gap_reason,
    held_blocks,
    idle_floors,
    readable_bytes,
    whole_number,
)
from kvdiag.model import Evidence, Facts, Finding, Timeline

ID = "leak.kv_blocks"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the blocks held in every idle stretch with none."""
    if not facts.pools:
        return unseen(ID, gap_reason(timeline, facts, "engine") or "the engine does not report its KV pool")
    began = _began_seconds(timeline, facts, limits)
    every = idle_floors(timeline, facts, limits)
    stretches = [floor for floor in every if floor.at_seconds >= began]
    floors = [floor for floor in stretches if floor.blocks is not None]
    if not floors:
        if not timeline.marks and (lowest := busy_floor(timeline, facts, limits, began)) is not None:
            return (_under_load(lowest, facts),)
        return unseen(ID, _not_idle(every, timeline, facts))
    first, last = floors[0], floors[-1]
    held, before = last.blocks or 0, first.blocks or 0
    if stretches[-1].blocks is None and _least_held_since(last, timeline, facts) < max(held, 1):
        return unseen(ID, "the pool had not settled when the readings ended")
    requests = _requests_between(timeline, first, last)
    evidence = (
        number("idle_stretches", len(floors), "stretches", "engine"),
        number("held_at_first_idle", before, "blocks", "engine"),
        number("held_at_last_idle", held, "blocks", "engine"),
        number("requests_between", requests, "requests", "kvdiag"),
    )
    if held == 0:
        if late := late_holds(timeline, facts, limits):
            return (_came_back_late(late, facts, evidence, limits),)
        if (collapse := hit_collapse(timeline, limits)) is not None:
            return (_hit_less(collapse, evidence),)
        summary = f"in {len(floors)} idle stretches no block stayed held at the end"
        return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)
    if held < _lowest_since_empty(floors[:-1]):
        still = counted(held, "block is", "blocks are")
        summary = f"{still} held while nothing runs, but fewer than before: still being returned?"
        return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
    size = block_bytes(facts)
    amount = f" ({readable_bytes(held * size)})" if size is not None else ""
    rate = f", {(held - before) / requests:.2g} more with each request" if requests and held > before else ""
    total = sum(pool.usable_blocks for pool in facts.pools)
    return (
        Finding(
            id=ID,
            status="fault",
            summary=f"{whole_number(held)} of {whole_number(total)} KV blocks{amount} stay held at idle{rate}",
            evidence=(
                *evidence,
                number("held_bytes", None if size is None else held * size, "bytes", "engine"),
                number("held_share_of_pool", held / total, "ratio", "engine"),
                number(
                    "requests_until_the_pool_is_gone",
                    None if not requests or held <= before else round((total - held) * requests / (held - before)),
                    "requests",
                    "computed",
                ),
            ),
        ),
    )


def _came_back_late(late: Sequence[LateFree], facts: Facts, evidence: tuple[Evidence, ...], limits: Limits) -> Finding:
    """Blocks that nobody used, and that a timeout gave back: no leak for ever, but a pool that is smaller meanwhile."""
    most = max(late, key=lambda hold: hold.blocks)
    longest = max(late, key=lambda hold: hold.seconds).seconds
    total = sum(pool.usable_blocks for pool in facts.pools)
    times = "once" if len(late) == 1 else f"{len(late)} times"
    large = [hold for hold in late if hold.blocks >= limits.late_blocks_fault_ratio * total]
    return Finding(
        id=ID,
        # Once may be a neighbour that was lost; what happens again is how this server works.
        status="fault" if len(large) > 1 else "suspect",
        summary=f"{whole_number(most.blocks)} of {whole_number(total)} KV blocks stayed held for up to {longest:.0f} s "
        f"while nothing ran, {times}, and came back: freed by a timeout, not with their requests",
        evidence=(
            *evidence,
            number("times_held_late", len(late), "times", "engine"),
            number("longest_held", longest, "seconds", "engine"),
            number("most_held_late", most.blocks, "blocks", "engine"),
            number("share_of_pool_held_late", most.blocks / total, "ratio", "engine"),
        ),
        likely_cause="Requests that were cancelled or lost while a KV connector had their blocks: only its timeout "
        "frees them.",
        confirm="Cancel a few requests at once on an idle server and watch the usage: it falls after the connector's "
        "abort timeout (VLLM_NIXL_ABORT_REQUEST_TIMEOUT, 480 s by default), not at once.",
        remedy="Upgrade the engine and the connector; lower the abort timeout, which bounds how long they stay held.",
    )


def _hit_less(collapse: Collapse, evidence: tuple[Evidence, ...]) -> Finding:
    """A cache tier behind the pool that lost its blocks shows on the page by this alone, as other prompts do."""
    fell = f"from {collapse.first_ratio:.0%} to {collapse.last_ratio:.0%} over {collapse.hours:.1f} h"
    return Finding(
        id=ID,
        status="unknown",
        summary=f"cannot tell: no block stayed held, but the share of prompt tokens found in a cache fell step by step "
        f"{fell} with room in the pool; the same prompts sent again would decide between other traffic and a cache "
        "tier (LMCache, offloading) that lost its blocks",
        evidence=(
            *evidence,
            number("hit_share_at_first", collapse.first_ratio, "ratio", "engine"),
            number("hit_share_at_last", collapse.last_ratio, "ratio", "engine"),
            number("looked_up", collapse.queried_tokens, "tokens", "engine"),
        ),
    )


def _not_idle(every: Sequence[IdleFloor], timeline: Timeline, facts: Facts) -> str:
    """Why there is no idle floor of the engine that is there now."""
    if any(floor.blocks is not None for floor in every):
        return "the engine was restarted, and was not idle for two samples in a row since"
    seen = any(sample.engines for sample in timeline.samples)
    reason = None if seen else gap_reason(timeline, facts, "engine")
    return reason or "no two samples in a row saw every engine idle"


def _under_load(floor: BusyFloor, facts: Facts) -> Finding:
    """A server that is never idle, by its lowest readings: what they bound is ok, what they leave open is unknown."""
    total = sum(pool.usable_blocks for pool in facts.pools)
    lowest = f"{whole_number(floor.lowest_blocks)} of {whole_number(total)} KV blocks"
    evidence = (
        number("window", round(floor.hours, 2), "hours", "kvdiag"),
        number("lowest_held_under_load", floor.lowest_blocks, "blocks", "engine"),
        number("running_at_the_lowest", floor.running, "requests", "engine"),
        number("growth_of_the_lowest_per_hour", floor.growth_per_hour, "blocks", "engine"),
        number("smallest_visible_growth_per_hour", floor.visible_per_hour, "blocks", "computed"),
    )
    if floor.says == "bounded":
        summary = f"never idle, but at the lowest {lowest} were held: no more can have stayed held"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    if floor.says == "flat":
        summary = (
            f"never idle; the lowest readings beside as many requests do not rise over {floor.hours:.3g} h: "
            f"{floor.visible_per_hour:,.2g} blocks an hour would show"
        )
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    if floor.says == "rising":
        summary = (
            f"cannot tell: never idle, and the lowest readings beside as many requests rise "
            f"{floor.growth_per_hour:,.2g} blocks an hour: an idle moment would tell a leak from longer requests"
        )
        return Finding(id=ID, status="unknown", summary=summary, evidence=evidence)
    summary = (
        f"cannot tell: never idle for two samples in a row, never fewer than {lowest} held of late, and their number "
        "moves too much to see it grow"
    )
    return Finding(id=ID, status="unknown", summary=summary)


def _began_seconds(timeline: Timeline, facts: Facts, limits: Limits) -> float:
    """When the engine that is there now began, as far as that was seen: its pool was empty then."""
    began = history(timeline, facts, limits).engines.began_seconds
    return max(began or 0.0, facts.started_seconds or 0.0)


def _least_held_since(floor: IdleFloor, timeline: Timeline, facts: Facts) -> float:
    """The fewest blocks that any idle reading after a floor shows."""
    since = timeline.between(floor.at_seconds, timeline.samples[-1].at_seconds)
    held = [held_blocks(sample, facts) for sample in since if sample.engines_idle is True]
    return min((blocks for blocks in held if blocks is not None), default=0)


def _lowest_since_empty(floors: Sequence[IdleFloor]) -> int:
    """The lowest floor since the pool was last seen empty: what falls below it comes back late."""
    lowest = 0
    for floor in floors:
        blocks = floor.blocks or 0
        lowest = min(lowest or blocks, blocks)
    return lowest


def _requests_between(timeline: Timeline, first: IdleFloor, last: IdleFloor) -> int | None:
    """Requests of kvdiag's own between two floors; how many others there were is not counted."""
    if not timeline.marks:
        return None
    return sum(
        span.outcome.completed + span.outcome.failed
        for span in timeline.spans()
        if span.outcome is not None
        and span.release_seconds is not None
        and first.at_seconds < span.release_seconds <= last.at_seconds
    )
