"""fragmentation.kv_waste: requests use far more KV blocks than their tokens need, and release them at the end.

Causes are large blocks that stay half empty, contiguous reservation up to the maximum length, and padded pages of
hybrid models. With a load of known tokens the comparison is exact; without one the engine's metrics show waste of
several times the most that any of its requests can need (blocks/waste.py).
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import blind_spot, floor_before, measure
from kvdiag.diagnosis.blocks.waste import metrics_waste
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_count, plural
from kvdiag.model import Evidence, Facts, Finding, Timeline

ID = "fragmentation.kv_waste"
RUN = "run `kvdiag run`, whose requests have known tokens"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare, at the peak of every load, blocks in use with blocks needed and with tokens resident."""
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
        return _by_metrics(timeline, facts, limits)
    worst = max(growths, key=lambda growth: growth.held_blocks / max(growth.need.most_blocks, 1))
    ratio = worst.held_blocks / max(worst.need.most_blocks, 1)
    evidence = (
        Evidence("blocks_in_use", worst.held_blocks, "blocks", "engine"),
        Evidence("blocks_needed", worst.need.most_blocks, "blocks", "computed"),
        Evidence("tokens_resident", worst.tokens, "tokens", "kvdiag"),
        Evidence("block_size", pool.block_tokens, "tokens", "engine"),
        Evidence("fill_ratio", worst.filled_ratio, "ratio", "computed"),
    )
    tolerance = limits.blocks_per_request_tolerance * worst.requests
    if worst.excess_blocks <= tolerance:
        return (Finding(ID, "ok", "blocks in use match what the tokens need", evidence),)
    if ratio > limits.kv_excess_fault_ratio:
        blocks = f"{format_count(worst.held_blocks)} instead of {format_count(worst.need.most_blocks)}"
        summary = f"requests use {ratio:.1f} times the blocks that their tokens need ({blocks})"
        return (Finding(ID, "fault", summary, evidence),)
    summary = f"requests use {plural(worst.excess_blocks, 'block')} more than their tokens need"
    return (Finding(ID, "suspect", summary, evidence),)


def _by_metrics(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Without a load of our own: blocks that come and go with a request, against the most that it can need."""
    waste = metrics_waste(timeline, facts, limits)
    if waste is None:
        return unknown(ID, f"no load of known size was observed; {RUN}")
    evidence = (
        Evidence("blocks_per_request", round(waste.blocks_per_request, 2), "blocks", "engine"),
        Evidence("max_blocks_needed", waste.need_blocks, "blocks", "computed"),
        Evidence("max_request_tokens", waste.request_tokens, "tokens", "computed"),
        Evidence("max_prompt_tokens", waste.longest_prompt_tokens, "tokens", "engine"),
        Evidence("min_prompts", waste.prompts, "requests", "engine"),
        Evidence("concurrency_changes", waste.changes, "samples", "engine"),
        Evidence("prefix_queries_to_prompt_tokens", round(waste.looked_up_ratio, 3), "ratio", "engine"),
    )
    if waste.ratio < limits.metrics_waste_ratio:
        summary = (
            f"no load of known size was observed, and by the engine's metrics a request uses "
            f"{waste.blocks_per_request:,.0f} blocks, and its tokens need up to {waste.need_blocks:,}; {RUN}"
        )
        return (Finding(ID, "unknown", summary, evidence),)
    summary = (
        f"a request uses {waste.blocks_per_request:,.0f} blocks, {waste.ratio:.0f} times what its "
        f"{waste.request_tokens:,} tokens at most can need"
    )
    agrees = 1.0 / limits.metrics_agreement_ratio <= waste.looked_up_ratio <= limits.metrics_agreement_ratio
    # One window's prompts may be odd; what every window shows is how this server reserves.
    large = waste.ratio >= limits.metrics_waste_fault_ratio or waste.windows_in_a_row >= limits.metrics_windows
    return (Finding(ID, "fault" if large and agrees else "suspect", summary, evidence),)
