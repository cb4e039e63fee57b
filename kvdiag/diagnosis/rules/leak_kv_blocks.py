"""leak.kv_blocks: blocks that stay held although nothing runs. Exact accounting, no statistics.

The usage gauge counts blocks with a live reference only; cached blocks without one are free
(vllm/v1/core/block_pool.py::BlockPool.get_usage), so an idle engine must show none, prefix caching or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import (
    IdleFloor,
    block_bytes,
    gap_reason,
    idle_floors,
    readable_bytes,
    whole_number,
)
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Facts, Finding, Timeline

ID = "leak.kv_blocks"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the blocks held in every idle stretch with none."""
    if not facts.pools:
        return unseen(ID, gap_reason(timeline, facts, "vllm") or "the engine does not report its KV pool")
    stretches = idle_floors(timeline, facts, limits)
    floors = [floor for floor in stretches if floor.blocks is not None]
    if not floors:
        seen = any(sample.engines for sample in timeline.samples)
        reason = None if seen else gap_reason(timeline, facts, "vllm")
        return unseen(ID, reason or "no two samples in a row saw every engine idle")
    if stretches[-1].blocks is None:
        return unseen(ID, "the pool had not settled when the readings ended")
    first, last = floors[0], floors[-1]
    held, before = last.blocks or 0, first.blocks or 0
    requests = _requests_between(timeline, first, last)
    evidence = (
        number("idle_stretches", len(floors), "stretches", "vllm"),
        number("held_at_first_idle", before, "blocks", "vllm"),
        number("held_at_last_idle", held, "blocks", "vllm"),
        number("requests_between", requests, "requests", "kvdiag"),
    )
    if held == 0:
        summary = f"in {len(floors)} idle stretches no block stayed held at the end"
        return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)
    if held < _highest_since_empty(floors) and held < (floors[-2].blocks or 0):
        summary = (
            f"{whole_number(held)} blocks are held while nothing runs, but fewer than before: still being returned?"
        )
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
                number("held_bytes", None if size is None else held * size, "bytes", "vllm"),
                number("held_share_of_pool", held / total, "ratio", "vllm"),
                number(
                    "requests_until_the_pool_is_gone",
                    None if not requests or held <= before else round((total - held) * requests / (held - before)),
                    "requests",
                    "computed",
                ),
            ),
        ),
    )


def _highest_since_empty(floors: Sequence[IdleFloor]) -> int:
    """The highest floor since the pool was last seen empty: below it, blocks are coming back late."""
    highest = 0
    for floor in floors:
        highest = max(highest, floor.blocks) if floor.blocks else 0
    return highest


def _requests_between(timeline: Timeline, first: IdleFloor, last: IdleFloor) -> int:
    return sum(
        span.outcome.completed + span.outcome.failed
        for span in timeline.spans()
        if span.outcome is not None
        and span.release_seconds is not None
        and first.at_seconds < span.release_seconds <= last.at_seconds
    )
