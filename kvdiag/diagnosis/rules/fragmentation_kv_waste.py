"""fragmentation.kv_waste: requests hold far more blocks than their tokens need, and give them back.

Tail waste of large blocks, contiguous reservation to the maximum length, or padding of hybrid pages.
"""

from __future__ import annotations

from kvdiag.diagnosis.growth import blind_spot, floor_before, measure
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Facts, Finding, Timeline

ID = "fragmentation.kv_waste"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare, at the fullest moment of every load, blocks held with blocks needed and with tokens resident."""
    growths = [
        growth
        for span in timeline.spans()
        if span.workload is not None
        and span.workload.requests
        and blind_spot(timeline, facts, span, limits) is None
        and (floor := floor_before(timeline, facts, span, limits)) is not None
        and (growth := measure(timeline, facts, span, floor)) is not None
        and growth.held_blocks > 0
    ]
    pool = next(iter(facts.pools), None)
    if not growths or pool is None:
        return unseen(ID, "no load of known tokens was seen whole")
    worst = max(growths, key=lambda growth: growth.held_blocks / max(growth.need.most_blocks, 1))
    ratio = worst.held_blocks / max(worst.need.most_blocks, 1)
    evidence = (
        number("blocks_held", worst.held_blocks, "blocks", "vllm"),
        number("blocks_needed", worst.need.most_blocks, "blocks", "computed"),
        number("tokens_resident", worst.tokens, "tokens", "kvdiag"),
        number("block", pool.block_tokens, "tokens", "vllm"),
        number("filled", worst.filled_ratio, "ratio", "computed"),
    )
    tolerance = limits.blocks_per_request_tolerance * worst.requests
    if worst.excess_blocks > tolerance and ratio > limits.kv_excess_fault_ratio:
        blocks = f"{worst.held_blocks} for {worst.need.most_blocks}"
        summary = f"requests hold {ratio:.1f} times the blocks that their tokens need ({blocks})"
        return (Finding(id=ID, status="fault", summary=summary, evidence=evidence),)
    if worst.excess_blocks > tolerance:
        summary = f"requests hold {worst.excess_blocks} blocks more than their tokens need"
        return (Finding(id=ID, status="suspect", summary=summary, evidence=evidence),)
    summary = "blocks held are the blocks that the tokens need"
    return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)
