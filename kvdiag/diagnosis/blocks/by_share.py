"""The pool of an engine that reports only the used share of it (LMDeploy): its size follows from a run's own requests.

The single request's tokens, in blocks of LMDeploy's default size, and the share that they take give the size; the loads
of the other steps, and what every load leaves behind, are compared with it. So one load is not judged by itself.
Where cached prefixes count as used, neither is: a share that stays proves nothing.
"""

from dataclasses import replace

from kvdiag.diagnosis.timeline_queries import whole_load
from kvdiag.formatting import plural
from kvdiag.model import Facts, Gap, KvPool, Sample, Timeline

BLOCK_TOKENS = 64
"""Of both of LMDeploy's engines by default (lmdeploy/messages.py::TurbomindEngineConfig.cache_block_seq_len). With
another size blocks differ by less than one a request, which the comparison allows.
"""

ENGINE = "0"
"""The label of the only engine of a server."""


def with_pool_by_share(timeline: Timeline, facts: Facts) -> Facts:
    """The facts, with the pool that a run's single request shows where the engine reports shares alone."""
    can = facts.capabilities
    if facts.pools or can.blocks or not can.usage or not can.returns:
        return facts
    sizes = [
        (usage - floor, sum(-(-tokens // BLOCK_TOKENS) for tokens in sample.load.resident_tokens))
        for span in timeline.spans("single_request")
        if (floor := _usage(timeline.between(span.begin_seconds, span.offer_seconds or span.begin_seconds))) is not None
        for sample in whole_load(timeline, span, facts)
        if sample.load is not None and (usage := _usage((sample,))) is not None and usage > floor
    ]
    if not sizes:
        return facts
    share_ratio, blocks = max(sizes)
    total = max(round(blocks / share_ratio), 2)
    pool = KvPool(engine=ENGINE, block_tokens=BLOCK_TOKENS, total_blocks=total, usable_blocks=total, usage_blocks=total)
    size = f"{plural(total, 'block')} of {BLOCK_TOKENS} tokens"
    reason = f"the pool's size is not reported but measured by the single request's share: {size}"
    return replace(facts, pools=(pool,), gaps=(*facts.gaps, Gap("engine", "absent", reason)))


def _usage(samples: tuple[Sample, ...]) -> float | None:
    """The usage in the last of the samples, of a server with one engine."""
    last = samples[-1].engines if samples else None
    return last[0].kv_usage_ratio if last and len(last) == 1 and last[0].engine == ENGINE else None
