"""fragmentation.kv_waste: requests hold far more blocks than their tokens need, and give them back.

Tail waste of large blocks, contiguous reservation to the maximum length, or padding of hybrid pages. Exact under a load
of known tokens; without one the engine's page shows waste of several times what any of its requests can need.
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import blind_spot, floor_before, measure
from kvdiag.diagnosis.blocks.waste import PageWaste, page_waste
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.timeline_queries import counted
from kvdiag.model import Facts, Finding, Status, Timeline

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
        return _by_page(timeline, facts, limits)
    worst = max(growths, key=lambda growth: growth.held_blocks / max(growth.need.most_blocks, 1))
    ratio = worst.held_blocks / max(worst.need.most_blocks, 1)
    evidence = (
        number("blocks_held", worst.held_blocks, "blocks", "engine"),
        number("blocks_needed", worst.need.most_blocks, "blocks", "computed"),
        number("tokens_resident", worst.tokens, "tokens", "kvdiag"),
        number("block", pool.block_tokens, "tokens", "engine"),
        number("filled", worst.filled_ratio, "ratio", "computed"),
    )
    tolerance = limits.blocks_per_request_tolerance * worst.requests
    if worst.excess_blocks > tolerance and ratio > limits.kv_excess_fault_ratio:
        blocks = f"{worst.held_blocks} for {worst.need.most_blocks}"
        summary = f"requests hold {ratio:.1f} times the blocks that their tokens need ({blocks})"
        return (Finding(id=ID, status="fault", summary=summary, evidence=evidence),)
    if worst.excess_blocks > tolerance:
        summary = f"requests hold {counted(worst.excess_blocks, 'block', 'blocks')} more than their tokens need"
        return (Finding(id=ID, status="suspect", summary=summary, evidence=evidence),)
    summary = "blocks held are the blocks that the tokens need"
    return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)


def _by_page(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Without a load of our own: blocks that come and go with a request, against the most that it can need."""
    waste = page_waste(timeline, facts, limits)
    if waste is None:
        return unseen(ID, "no load of known tokens was seen whole")
    evidence = (
        number("blocks_per_request", round(waste.blocks_per_request, 2), "blocks", "engine"),
        number("blocks_needed_at_most", waste.need_blocks, "blocks", "computed"),
        number("tokens_of_a_request_at_most", waste.request_tokens, "tokens", "computed"),
        number("longest_prompt_at_most", waste.longest_prompt_tokens, "tokens", "engine"),
        number("prompts_at_least", waste.prompts, "requests", "engine"),
        number("changes_of_running_requests", waste.changes, "readings", "engine"),
        number("looked_up_over_counted", round(waste.looked_up_ratio, 3), "ratio", "engine"),
    )
    if waste.ratio < limits.page_waste_ratio:
        bound = f"requests hold {waste.blocks_per_request:,.0f} blocks, and may need {waste.need_blocks:,}"
        summary = f"cannot tell: no load of known tokens was seen whole; by the page {bound}"
        return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
    summary = (
        f"a request holds {waste.blocks_per_request:,.0f} blocks, {waste.ratio:.0f} times what "
        f"{waste.request_tokens:,} tokens need, and none of that hour can have had more"
    )
    return (Finding(id=ID, status=_severity(waste, limits), summary=summary, evidence=evidence),)


def _severity(waste: PageWaste, limits: Limits) -> Status:
    agrees = 1.0 / limits.page_agreement_ratio <= waste.looked_up_ratio <= limits.page_agreement_ratio
    # One window's prompts may be odd; what every window shows is how this server holds its requests.
    large = waste.ratio >= limits.page_waste_fault_ratio or waste.windows_in_a_row >= limits.page_windows
    return "fault" if large and agrees else "suspect"
