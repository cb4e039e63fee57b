"""What kvdiag's own loads prove of a pool whose ended requests keep their cells as a cache (llama.cpp's slots).

Such an engine does not show a cell that is lost: it looks like those of an idle slot. So the pool is filled again: a
load that completes proves that its tokens were free. A load that fits the pool and is refused for lack of room proves
that cells are lost, and so does one of which requests wait for seconds, where as many ran at the same time before.
"""

from dataclasses import dataclass, replace

from kvdiag.diagnosis.request_failures import pool_full
from kvdiag.diagnosis.timeline_queries import (
    began_busy,
    beside_others,
    most_requests,
    pool_tokens,
    under_load,
    whole_load,
)
from kvdiag.formatting import format_count, plural
from kvdiag.model import Facts, Span, StepResult, Timeline

WAITING_SAMPLES, WAITING_SECONDS = 8, 0.7
"""As many samples, and as long: admission takes a step, or a batch of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """One engine's pool, the most tokens that a completed load held at once, and the fewest that found no room.

    `refused_tokens` is `None` where every load that fits the pool found room.
    """

    pool_tokens: int
    proven_tokens: int
    refused_tokens: int | None

    @property
    def unproven_tokens(self) -> int:
        """The most that can be lost."""
        return max(self.pool_tokens - self.proven_tokens, 0)

    def refusal(self, facts: Facts) -> str | None:
        """What a refused load shows; `None` without one, or where other traffic may have used the pool."""
        if self.refused_tokens is None or facts.forced:
            return None
        unit = facts.capabilities.unit
        load, pool = plural(self.refused_tokens, "token"), plural(self.pool_tokens, unit)
        lost = format_count(max(self.pool_tokens - self.refused_tokens, 0) + 1)
        return f"a load of {load} found no room in a pool of {pool}: at least {lost} {unit}s are not released"


def refilled(timeline: Timeline, facts: Facts) -> Refill | None:
    """What the loads of a timeline prove; `None` without a pool, or without loads."""
    pool = min((pool_tokens(pool) for pool in facts.pools), default=0)
    spans = [
        (span, span.workload.requests * span.workload.tokens_per_request) for span in timeline.spans() if span.workload
    ]
    loads = [(span, span.outcome, tokens) for span, tokens in spans if span.outcome and 0 < tokens <= pool]
    if not loads:
        return None
    slots = min((pool.max_requests for pool in facts.pools if pool.max_requests), default=None)
    proven = [tokens for span, outcome, tokens in loads if not outcome.failed and whole_load(timeline, span, facts)]
    at_once = {span.begin_seconds: most_requests(timeline, span, "requests_running") for span, _, _ in loads}
    most = max(at_once.values())
    refused = [
        _at_once(span, slots)
        for span, outcome, _ in loads
        if (pool_full(outcome) and not beside_others(timeline, span) and not began_busy(timeline, span))
        or (
            (at_once[span.begin_seconds] < (span.workload.requests if span.workload else 0) <= most)
            and _waits(timeline, span)
        )
    ]
    return Refill(pool_tokens=pool, proven_tokens=max(proven, default=0), refused_tokens=min(refused, default=None))


def with_refill(result: StepResult, timeline: Timeline, facts: Facts) -> StepResult:
    """The result, with what the load proves of the pool where lost cells do not show."""
    found = None if facts.capabilities.returns else refilled(timeline, facts)
    if found is not None and result.status == "unknown" and (refusal := found.refusal(facts)) is not None:
        return replace(result, status="fault", summary=refusal)
    if found is None or result.status != "ok":
        return result
    unit = facts.capabilities.unit
    filled = f"it filled {format_count(found.proven_tokens)} of {plural(found.pool_tokens, unit)}"
    return replace(
        result, summary=f"{result.summary}; {filled} (detection limit {plural(found.unproven_tokens, unit)})"
    )


def _at_once(span: Span, slots: int | None) -> int:
    """The tokens of those requests of a load that the server runs at the same time."""
    load = span.workload
    return 0 if load is None else min(load.requests, slots or load.requests) * load.tokens_per_request


def _waits(timeline: Timeline, span: Span) -> bool:
    """Whether requests waited through the first half of a span's load: for room, not for a step or a batch."""
    loaded = [sample for sample in under_load(timeline, span) if sample.open_requests]
    half = loaded[: len(loaded) // 2]
    if len(half) < WAITING_SAMPLES or half[-1].at_seconds - half[0].at_seconds < WAITING_SECONDS:
        return False
    return all((sample.total("requests_waiting") or 0) > 0 for sample in half[1:])
