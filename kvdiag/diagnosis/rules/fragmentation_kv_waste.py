"""fragmentation.kv_waste: requests use far more KV blocks than their tokens need, and release them at the end.

Causes are large blocks that stay half empty, contiguous reservation up to the maximum length, and padded pages of
hybrid models. With a load of known tokens the comparison is exact, and decides: more than one block per request beyond
the need is suspect, and a fault above 1.5 times.

Without one the agent in the engine counts the slots of each running request beyond its tokens: two blocks each at most
are what paging leaves, more than two each on average are suspect.

Without either the engine's metrics show waste of several times the most that any of its requests can need (else
unknown). When one more request runs, or one fewer, the blocks in use change by that request's. Its tokens are bounded
by what the engine counted: no prompt was longer than the most that came between two samples, and a request generated
ten times what the mean of that many prompts did at the very most. Long contexts that stay resident all the time change
neither.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from statistics import median

from kvdiag.diagnosis.blocks.expected import blocks_needed, curve_problem, grows_with_every_token
from kvdiag.diagnosis.blocks.orphans import newest_owners
from kvdiag.diagnosis.blocks.step_accounting import blind_spot, floor_before, measure, tolerated_blocks
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import readings_of
from kvdiag.formatting import format_count, format_number, plural
from kvdiag.model import Engine, Evidence, Facts, Finding, KvPool, Prescription, Timeline

ID = "fragmentation.kv_waste"
RUN = "run the test steps (`kvdiag run`), which send requests of known size"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare, at the peak of every load, blocks in use with blocks needed and with tokens resident."""
    (found,) = _judged(timeline, facts, limits)
    if found.status not in ("suspect", "fault"):
        return (found,)
    flag, unit = typed(facts.engine_name, "block_size") or "the block size", facts.capabilities.unit
    how = "send one request with max_tokens 1: if it uses fewer, they are reserved for its output"
    missing = f"{flag}, or a limit of max_tokens: what holds the further {unit}s is not reported; {how}"
    return (replace(found, prescription=Prescription(missing=(missing,))),)


def _judged(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    peaks = [
        peak
        for span in timeline.spans()
        if span.workload is not None
        and span.workload.requests
        and blind_spot(timeline, facts, span, limits) is None
        and (floor := floor_before(timeline, facts, span, limits)) is not None
        and (peak := measure(timeline, facts, span, floor, limits)) is not None
        and peak.held_blocks > 0
    ]
    pool = next(iter(facts.pools), None)
    if not peaks or pool is None:
        return _by_agent(timeline, facts, limits) or _by_metrics(timeline, facts, limits)
    worst = max(peaks, key=lambda peak: peak.held_blocks / max(peak.expected.most_blocks, 1))
    ratio, unit = worst.held_blocks / max(worst.expected.most_blocks, 1), facts.capabilities.unit
    evidence = (
        Evidence("blocks_in_use", worst.held_blocks, "blocks", "engine"),
        Evidence("blocks_needed", worst.expected.most_blocks, "blocks", "computed"),
        Evidence("tokens_resident", worst.tokens, "tokens", "kvdiag"),
        Evidence("block_size", pool.block_tokens, "tokens", "engine"),
        Evidence("fill_ratio", worst.filled_ratio, "ratio", "computed"),
    )
    if worst.excess_blocks <= tolerated_blocks(worst.requests, worst.expected.most_blocks, facts, limits):
        return (Finding(ID, "ok", f"{unit}s in use match what the tokens need", evidence),)
    if ratio > limits.kv_excess_fault_ratio:
        blocks = f"{format_count(worst.held_blocks)} instead of {format_count(worst.expected.most_blocks)}"
        summary = f"requests use {format_number(ratio)} times the {unit}s that their tokens need ({blocks})"
        return (Finding(ID, "fault", summary, evidence),)
    summary = f"requests use {plural(worst.excess_blocks, unit)} more than their tokens need"
    return (Finding(ID, "suspect", summary, evidence),)


def _by_agent(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """By the unused slots of running requests, where all engines count them; empty where they decide nothing."""
    counts = [(one.held, facts.pool(one.engine)) for one in newest_owners(timeline, limits)]
    looks = [
        (held, pool)
        for held, pool in counts
        if held is not None and held.requests and held.age_seconds <= limits.requests_age_seconds and pool is not None
    ]
    if not looks or len(looks) < len(counts) or len(looks) < len(facts.pools) or not grows_with_every_token(facts):
        return ()
    held, pool = max(looks, key=lambda look: (look[0].tail_tokens or 0) / look[0].requests)
    if held.tail_tokens is None or held.tail_largest_tokens is None:
        return ()
    allowed = (1 + limits.blocks_per_request_tolerance) * pool.block_tokens
    evidence = (
        Evidence("unused_slots", held.tail_tokens, "tokens", "agent"),
        Evidence("max_unused_slots", held.tail_largest_tokens, "tokens", "agent"),
        Evidence("requests", held.requests, "requests", "agent"),
        Evidence("block_size", pool.block_tokens, "tokens", "engine"),
    )
    slots, unit = plural(held.tail_tokens, "token slot"), facts.capabilities.unit
    if held.tail_tokens > held.requests * allowed:
        summary = f"{plural(held.requests, 'request')} hold {slots} beyond their tokens, more than two {unit}s each"
        return (Finding(ID, "suspect", summary, evidence),)
    largest = [look[0].tail_largest_tokens or 0 for look in looks]
    if max(largest) <= allowed:
        summary = f"{slots} of {plural(held.requests, 'request')} unused: normal for paging"
        return (Finding(ID, "ok", summary, evidence),)
    return ()


def _by_metrics(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Without a load of our own: blocks that come and go with a request, against the most that it can need."""
    waste = metrics_waste(timeline, facts, limits)
    if waste is None:
        return unknown(ID, f"no load of known size was observed; {RUN}")
    evidence = (
        Evidence("blocks_per_request", round(waste.blocks_per_request, 2), "blocks", "engine"),
        Evidence("max_blocks_needed", waste.expected_blocks, "blocks", "computed"),
        Evidence("max_request_tokens", waste.request_tokens, "tokens", "computed"),
        Evidence("max_prompt_tokens", waste.longest_prompt_tokens, "tokens", "engine"),
        Evidence("min_prompts", waste.prompts, "requests", "engine"),
        Evidence("concurrency_changes", waste.changes, "samples", "engine"),
        Evidence("prefix_queries_to_prompt_tokens", round(waste.looked_up_ratio, 3), "ratio", "engine"),
    )
    unit = facts.capabilities.unit
    if waste.ratio < limits.metrics_waste_ratio:
        expected = format_count(waste.expected_blocks)
        used = f"about {format_number(waste.blocks_per_request)} {unit}s in use per request"
        both = f" (engine metrics: {used}; its tokens need at most {expected})"
        seen = both if round(waste.blocks_per_request) > 0 else ""
        summary = f"no load of known size was observed{seen}; {RUN}"
        return (Finding(ID, "unknown", summary, evidence),)
    summary = (
        f"a request of at most {waste.request_tokens:,} tokens uses {format_number(waste.blocks_per_request)} {unit}s, "
        f"{format_number(waste.ratio)} times what it needs"
    )
    agrees = 1.0 / limits.metrics_agreement_ratio <= waste.looked_up_ratio <= limits.metrics_agreement_ratio
    # One window's prompts may be odd; what every window shows is how this server reserves.
    large = waste.ratio >= limits.metrics_waste_fault_ratio or waste.windows_in_a_row >= limits.metrics_windows
    return (Finding(ID, "fault" if large and agrees else "suspect", summary, evidence),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsWaste:
    """An engine over one window: blocks that come and go with a request, and the most that it can need."""

    blocks_per_request: float
    expected_blocks: int
    request_tokens: int
    longest_prompt_tokens: int
    prompts: int
    changes: int
    looked_up_ratio: float
    """Tokens looked up in the prefix cache over tokens of the prompts counted: 1 where the two counters agree."""

    windows_in_a_row: int = 1
    """Most windows one after the other in which requests of this engine held as much as counts."""

    @property
    def ratio(self) -> float:
        """Held over needed at the most."""
        return self.blocks_per_request / self.expected_blocks


_COUNTERS = tuple(map(attrgetter, ("prompt_tokens_total", "generation_tokens_total", "prefix_queries_total")))


def metrics_waste(timeline: Timeline, facts: Facts, limits: Limits) -> MetricsWaste | None:
    """The window and engine in which requests held most beyond their need; `None` where no window shows it."""
    if curve_problem(facts) is not None:
        return None
    found: list[MetricsWaste] = []
    for pool in facts.pools:
        times, engines = readings_of(timeline, pool.engine)
        windows = [_of(window, engines, pool, facts, limits) for window in _windows(times, engines, limits)]
        wastes = [waste for waste in windows if waste is not None]
        runs = groupby(waste.ratio >= limits.metrics_waste_ratio for waste in wastes)
        in_a_row = max((len(list(run)) for wasteful, run in runs if wasteful), default=0)
        found += [replace(waste, windows_in_a_row=in_a_row) for waste in wastes]
    return max(found, key=lambda waste: waste.ratio, default=None)


def _windows(times: Sequence[float], engines: Sequence[Engine], limits: Limits) -> Iterator[list[int]]:
    """The places of an engine's samples that are another than the one right before them, window by window."""
    window: list[int] = []
    begin: float | None = None
    before: Engine | None = None
    last = 0.0
    for place, (seconds, engine) in enumerate(zip(times, engines, strict=True)):
        if begin is None or seconds - begin > limits.metrics_window_seconds:
            yield window
            window, begin = [], seconds
        # Over a gap several requests may have come one after the other: their sum bounds no single prompt.
        # Of the same object nothing differs.
        if before is not None and before is not engine and seconds - last <= limits.growth.engine_age_seconds:
            window.append(place)
        before, last = engine, seconds
    yield window


def _change(before: Engine, now: Engine, pool: KvPool) -> float | None:
    """Blocks for each request by which the number of running requests changed; `None` where it did not."""
    running, ran = now.requests_running, before.requests_running
    if running == ran or running is None or ran is None:
        return None
    if now.kv_usage_ratio is None or before.kv_usage_ratio is None:
        return None
    return (pool.used_blocks(now.kv_usage_ratio) - pool.used_blocks(before.kv_usage_ratio)) / (running - ran)


def _of(
    window: Sequence[int], engines: Sequence[Engine], pool: KvPool, facts: Facts, limits: Limits
) -> MetricsWaste | None:
    every = (_change(engines[place - 1], engines[place], pool) for place in window)
    changes = [change for change in every if change is not None]
    if len(changes) < limits.metrics_changes:
        return None
    prompt_tokens, generated_tokens, looked_up_tokens = (
        [(of(engines[place]) or 0) - (of(engines[place - 1]) or 0) for place in window] for of in _COUNTERS
    )
    longest_tokens = max(0, *prompt_tokens)
    if not longest_tokens:
        return None
    prompts = sum(prompt_tokens) // longest_tokens
    if prompts < limits.metrics_prompts:
        return None
    generated = limits.metrics_tail_factor * sum(generated_tokens) / prompts
    tokens = round(longest_tokens + generated)
    if facts.max_model_len_tokens is not None:
        tokens = min(tokens, facts.max_model_len_tokens)
    expected = blocks_needed([tokens], facts)
    if expected is None:
        return None
    return MetricsWaste(
        blocks_per_request=median(changes),
        expected_blocks=expected.most_blocks + tolerated_blocks(1, expected.most_blocks, facts, limits),
        request_tokens=tokens,
        longest_prompt_tokens=longest_tokens,
        prompts=prompts,
        changes=len(changes),
        looked_up_ratio=sum(looked_up_tokens) / sum(prompt_tokens),
    )
