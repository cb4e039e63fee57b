"""Whether blocks in use match what the tokens need, for the steps that send requests.

A load that ran out of memory is a fault. It is judged at its peak among the samples with all of its requests resident,
and unknown where it did not run, failed otherwise, was cut short, has no known curve, ran together with other traffic,
or too few samples have the whole load (`blind_spot`, in that order). More blocks than needed, beyond one per request,
are suspect, and a fault above 1.5 times; fewer are suspect too, since then a report is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from kvdiag.diagnosis.blocks.expected import (
    FREED_LATE_TOKENS,
    ExpectedBlocks,
    blocks_needed,
    curve_problem,
    filled_ratio,
    grows_with_every_token,
)
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.request_failures import oom_error, parse_oom
from kvdiag.diagnosis.timeline_queries import (
    block_bytes,
    floor_within,
    gap_reason,
    most_open,
    most_requests,
    own_blocks,
    samples_needed,
    small_request_blocks,
    tokens_taken,
    under_load,
    whole_load,
)
from kvdiag.formatting import format_bytes, format_count, format_number, plural
from kvdiag.model import Facts, MeasuredFigures, Outcome, Sample, Span, Status, StepFigures, StepResult, Timeline

NOT_RUN, CUT_SHORT = "the step did not run; repeat the run", "the step was cut short; repeat the run"
NO_USAGE = "the pool's usage is not reported; `kvdiag doctor` shows what /metrics lacks"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPeak:
    """The peak of a load: tokens resident, blocks they need, blocks in use beyond the floor before it."""

    samples: int
    requests: int
    tokens: int
    expected: ExpectedBlocks
    held_blocks: int
    filled_ratio: float | None
    ahead_blocks: int = 0
    """Blocks that the tokens need at the next look, where the engine's figures may be ahead of our streams; or with
    those that small requests left in use meanwhile.
    """

    @property
    def excess_blocks(self) -> int:
        """Blocks in use beyond what the tokens need; negative where fewer are."""
        beyond = max(self.held_blocks - max(self.expected.most_blocks, self.ahead_blocks), 0)
        return beyond or min(self.held_blocks - self.expected.least_blocks, 0)


def measure(timeline: Timeline, facts: Facts, span: Span, floor_blocks: int, limits: Limits) -> LoadPeak | None:
    """The fullest sample with all of a span's requests resident; `None` without one, or where blocks are unknown.

    Where that one differs only by the moment of its two looks, the fullest that was taken between two tokens.
    """
    samples = [sample for sample in whole_load(timeline, span, facts) if _decodes(sample, span, facts)]
    left = _left_by_small_requests(timeline, facts, span, floor_blocks, limits)
    peaks = []
    for sample, after in zip_longest(samples, samples[1:]):
        held, counted = own_blocks(sample, facts, limits), tokens_taken(timeline, span, sample)
        peak = None if held is None else _at(sample, facts, held - floor_blocks, len(samples), counted)
        if peak is not None:
            ahead_blocks = peak.expected.most_blocks + left if left else _blocks_ahead(span, after, facts)
            peaks.append(replace(peak, ahead_blocks=ahead_blocks))
    fullest = max(peaks, key=_held_blocks, default=None)
    if fullest is None or fullest.excess_blocks:
        return fullest
    return max(
        (peak for peak in peaks if peak.held_blocks == peak.expected.most_blocks), key=_held_blocks, default=fullest
    )


def _held_blocks(peak: LoadPeak) -> int:
    return peak.held_blocks


def _left_by_small_requests(timeline: Timeline, facts: Facts, span: Span, floor_blocks: int, limits: Limits) -> int:
    """The most blocks that the small requests which make gauges move have left in use before a load's end."""
    if span.outcome is None or not span.outcome.refreshes:
        return 0
    kept = (floor_after(timeline, facts, span, limits) or 0) - floor_blocks
    return max(min(kept, span.outcome.refreshes * small_request_blocks(facts, limits)), 0)


def _blocks_ahead(span: Span, after: Sample | None, facts: Facts) -> int:
    """Blocks that a load needs by the next look at our streams, or at its end; 0 where counters give its tokens.

    A busy client reads its streams late, and a late engine's counters do not say by how much.
    """
    if not facts.capabilities.late_tokens or span.workload is None:
        return 0
    last = [span.workload.tokens_per_request] * span.workload.requests
    needed = blocks_needed(last if after is None or after.load is None else after.load.resident_tokens, facts)
    return 0 if needed is None else needed.most_blocks


def _at(sample: Sample, facts: Facts, held: int, samples: int, counted: int | None) -> LoadPeak | None:
    if sample.load is None:
        return None
    exact = facts.capabilities.reserved or facts.capabilities.on_completion
    tokens = sample.load.resident_tokens if exact else _caught_up(sample.load.resident_tokens, counted)
    expected = blocks_needed(tokens, facts)
    if expected is None:
        return None
    # The gauge was rendered somewhere between the two looks at our own streams: a slow page lies far behind the second.
    # An engine that does not renew it with each token is behind the first by as many tokens as it may be late.
    first = tokens if sample.load_before is None else sample.load_before.resident_tokens
    late_tokens = facts.capabilities.late_tokens
    before = blocks_needed([max(each - late_tokens, min(each, 1)) for each in first], facts)
    if before is not None:
        expected = ExpectedBlocks(least_blocks=before.least_blocks, most_blocks=expected.most_blocks)
    return LoadPeak(
        samples=samples,
        requests=sample.load.requests,
        tokens=sum(tokens),
        expected=expected,
        held_blocks=held,
        filled_ratio=filled_ratio(tokens, held, facts),
    )


def _decodes(sample: Sample, span: Span, facts: Facts) -> bool:
    """Whether the blocks that only the prefill needed have been released.

    Windowed layers hold the last chunk of a prompt on top of their window until a step after it has been processed.
    """
    if grows_with_every_token(facts) or span.workload is None:
        return True
    loads = [load for load in (sample.load_before, sample.load) if load is not None]
    least = span.workload.prompt_tokens + 1 + FREED_LATE_TOKENS
    return all(tokens >= least for load in loads for tokens in load.resident_tokens)


def _caught_up(resident_tokens: tuple[int, ...], counted: int | None) -> tuple[int, ...]:
    """Tokens of our requests at the time of the page, by the engines' own counters where our streams lag behind.

    A client that gets no processor for a second still has to read what was generated in it, and the page does not wait.
    The last token that a request has generated is not stored yet.
    """
    requests = len(resident_tokens)
    behind = 0 if counted is None else counted - requests - sum(resident_tokens)
    share = -(-max(behind, 0) // max(requests, 1))
    return tuple(tokens + share for tokens in resident_tokens)


def blind_spot(timeline: Timeline, facts: Facts, span: Span | None, limits: Limits) -> str | None:
    """Why a span cannot be judged; `None` where it can."""
    if span is None:
        reason = gap_reason(timeline, facts, "engine")
        return f"the step did not run: {reason}; repeat the run" if reason else NOT_RUN
    outcome = span.outcome
    if outcome is not None and outcome.failed:
        reason = outcome.errors[0].rstrip(".") if outcome.errors else "no reason reported"
        return f"{_failures(outcome, reason)}; fix the cause and repeat the run"
    if not span.complete:
        return CUT_SHORT
    if not facts.capabilities.usage:
        return f"the engine does not report {facts.capabilities.unit}s in use; `kvdiag doctor` names the flag"
    if (problem := curve_problem(facts)) is not None:
        return problem
    if other := other_tokens(timeline, span):
        return f"other traffic: {plural(other, 'prompt token')} of other clients; pause traffic for the run"
    ours = span.workload.requests if span.workload is not None else 0
    most = most_open(timeline, span, limits.idle_samples)
    if most > ours + facts.capabilities.on_completion:
        return f"other traffic: up to {most} requests at once, {ours} of them kvdiag's; pause traffic for the run"
    samples, waiting = len(whole_load(timeline, span, facts)), most_requests(timeline, span, "requests_waiting")
    together = most_requests(timeline, span, "requests_running")
    needed = samples_needed(facts, limits)
    if samples >= needed:
        return None
    if waiting:
        ran = f"at most {together} of {ours} requests ran" if together < ours else f"all {ours} requests rarely ran"
        compared = f"{facts.capabilities.unit}s in use can be judged only while all {ours} run"
        return f"{ran} at the same time; {compared}; check the size of the KV pool and the limit of concurrent requests"
    few = f"{samples} of the {needed} samples needed were taken while all requests ran"
    if 0 < together < ours:
        return f"{few}, at most {together} of {ours} at once; repeat the run, and give the address of one server"
    return f"{few}; repeat the run"


class Kept(NamedTuple):
    """Blocks that each of some requests left in use, `None` where unknown; "at least " or ""; the requests in words."""

    each_blocks: float | None
    at_least: str
    requests: str


def kept_by_requests(kept: int, outcomes: Sequence[Outcome], facts: Facts, limits: Limits) -> Kept:
    """How many of the kept blocks each request left in use, on average.

    Small requests that make gauges move may each have left all of its blocks: others left at least what remains.
    """
    small = sum(one.refreshes for one in outcomes)
    count = sum(one.requests for one in outcomes) - small
    each = (kept - small * small_request_blocks(facts, limits)) / max(count, 1)
    requests = plural(count, "request") + (f" and {plural(small, 'small one')}" if small else "")
    return Kept(each if count and each > 0 else None, "at least " if small else "", requests)


def not_settled(within: Sequence[Sample], reason: str | None, limits: Limits) -> str:
    """Why there is no idle floor: other traffic, or too few samples, with the reason where there is one."""
    samples = [one for one in within if one.engines]
    if any(sample.engines_idle is False for sample in samples):
        return "the server was never idle (other traffic); pause traffic for the run"
    if any(one.open_sessions for sample in samples for one in sample.engines or ()):
        return "sessions are open, whose tokens look like those of a request; close the sessions and repeat the run"
    if any(sample.engines_idle is None for sample in samples):
        return "the engine does not report running and waiting requests; check its /metrics"
    few = f"{plural(len(samples), 'idle sample')}; {limits.idle_samples} in a row are needed"
    return f"{few}: {reason}" if reason else few


def unsettled(timeline: Timeline) -> str:
    """Why the blocks between requests are not known: usage is not reported, or there was other traffic."""
    if all(one.kv_usage_ratio is None for sample in timeline.samples for one in sample.engines or ()):
        return NO_USAGE
    return "the pool did not settle between the requests; pause other traffic"


def other_tokens(timeline: Timeline, span: Span) -> int:
    """Prompt tokens that the engines counted during a span beyond the span's own; 0 where they do not count."""
    if span.end_seconds is None or span.outcome is None:
        return 0
    within = timeline.between(span.begin_seconds, span.end_seconds)
    counts = [count for sample in within if (count := sample.total("prompt_tokens_total")) is not None]
    return max(counts[-1] - counts[0] - span.outcome.prompt_tokens, 0) if counts else 0


def load_figures(facts: Facts, peak: LoadPeak) -> tuple[StepFigures, MeasuredFigures]:
    """What a load's tokens need, and what it held; bytes where a block's size is known."""
    size, requests, tokens = block_bytes(facts), peak.requests, peak.tokens
    expected, held = peak.expected.most_blocks, peak.held_blocks
    expected_bytes, held_bytes = (None if size is None else blocks * size for blocks in (expected, held))
    # To four places: blocks are counted, not measured to more.
    filled_ratio = None if peak.filled_ratio is None else round(peak.filled_ratio, 4)
    return (
        StepFigures(requests=requests, tokens=tokens, blocks=expected, bytes=expected_bytes),
        MeasuredFigures(requests=requests, tokens=tokens, blocks=held, bytes=held_bytes, filled_ratio=filled_ratio),
    )


def tolerated_blocks(requests: int, expected: int, facts: Facts, limits: Limits) -> int:
    """Blocks of this many requests by which need and usage may differ, as they are not read at the same moment.

    Where the engine does not report the pool's size, what is expected is only as exact as the measured size.
    """
    smallest = min((pool.block_tokens for pool in facts.pools), default=limits.tokens_per_request_tolerance)
    late = facts.capabilities.on_completion
    tokens = limits.completion_tokens_tolerance if late else limits.tokens_per_request_tolerance
    each = max(limits.blocks_per_request_tolerance, tokens // smallest)
    return requests * each + (0 if facts.capabilities.blocks else round(expected * limits.share_error_ratio))


def compare(peak: LoadPeak, facts: Facts, limits: Limits) -> tuple[Status, str]:
    """Status and sentence of a load by its peak."""
    unit = facts.capabilities.unit
    expected = peak.expected.most_blocks
    tolerance = tolerated_blocks(peak.requests, expected, facts, limits)
    reserved = " reserved" if facts.capabilities.reserved else ""
    held = f"{plural(peak.held_blocks, unit)}{reserved} under load, {format_count(expected)} needed"
    who = plural(peak.requests, "request")
    if unit != "token":
        who = f"{plural(peak.tokens, 'token')} of {who}"
    if abs(peak.excess_blocks) <= tolerance:
        return "ok", f"{held} for {who}"
    if peak.held_blocks <= 0:
        return "unknown", f"the usage gauge shows no {unit} in use for {who}; check the engine's metrics"
    if peak.excess_blocks < 0:
        check = f"compare the reported pool and its {unit} size with the engine's startup log"
        return "suspect", f"{held} for {who}: fewer than needed; {check}"
    ratio = peak.held_blocks / max(expected, 1)
    status: Status = "fault" if ratio > limits.kv_excess_fault_ratio else "suspect"
    return status, f"{held} for {who}: {format_number(ratio)} times what is needed"


def floor_before(timeline: Timeline, facts: Facts, span: Span, limits: Limits) -> int | None:
    """Blocks in use while idle just before a span's load."""
    floor = floor_within(timeline, span.begin_seconds, span.offer_seconds, facts, limits)
    return None if floor is None else floor.blocks


def floor_after(timeline: Timeline, facts: Facts, span: Span, limits: Limits) -> int | None:
    """Blocks in use while idle after a span's load has settled."""
    floor = floor_within(timeline, span.release_seconds, span.end_seconds, facts, limits)
    return None if floor is None else floor.blocks


def unknown(step: str, reason: str, span: Span | None = None) -> StepResult:
    """A step that could not be judged, and why."""
    return StepResult(step, "unknown", reason, notes=span.notes if span is not None else ())


def judge_load(step: str, timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """The verdict of a step with one load: blocks in use at its peak against what the tokens need.

    A load without enough samples is repeated once; the last one is judged.
    """
    span = last_span(timeline, step)
    if (refusal := refused(span)) is not None and span is not None:
        return StepResult(step, "fault", refusal, notes=span.notes)
    if (problem := blind_spot(timeline, facts, span, limits)) is not None or span is None:
        return unknown(step, problem or NOT_RUN, span)
    floor = floor_before(timeline, facts, span, limits)
    peak = None if floor is None else measure(timeline, facts, span, floor, limits)
    if peak is None:
        missing = "the pool's usage before or under the load is not reported; check the engine's /metrics"
        return unknown(step, missing, span)
    status, sentence = compare(peak, facts, limits)
    expected, measured = load_figures(facts, peak)
    measured = replace(measured, samples_of_whole_load=peak.samples)
    return StepResult(step, status, sentence, expected=expected, measured=measured, notes=span.notes)


def last_span(timeline: Timeline, step: str) -> Span | None:
    """The last span of a step; `None` where it did not run."""
    return next(reversed(timeline.spans(step)), None)


def refused(span: Span | None) -> str | None:
    """The server's message when it ran out of memory under a span's load; `None` where it did not."""
    if span is None or span.outcome is None or not span.outcome.failed:
        return None
    text = oom_error(span.outcome)
    return None if text is None else _failures(span.outcome, _in_short(text))


def _in_short(text: str) -> str:
    """The figures of torch's message, whose advice is a screen long; another text as it is."""
    shortage = parse_oom(text)
    if shortage is None:
        return text
    free = "" if shortage.free_bytes is None else f", {format_bytes(shortage.free_bytes)} free"
    unused = shortage.unallocated_bytes
    reserved = "" if unused is None else f", {format_bytes(unused)} reserved but unallocated"
    return f"out of memory, {format_bytes(shortage.asked_bytes or 0)} requested{free}{reserved}"


def _failures(outcome: Outcome, reason: str) -> str:
    return f"{outcome.failed} of {outcome.completed + outcome.failed} requests failed: {reason}"


def highest_blocks(timeline: Timeline, facts: Facts, span: Span, limits: Limits) -> int | None:
    """The most blocks in use at any time of a span's load, prefill included, beyond the floor before it.

    Without those that small requests left in use meanwhile.
    """
    floor = floor_before(timeline, facts, span, limits)
    if floor is None or span.release_seconds is None:
        return None
    held = [own_blocks(sample, facts, limits) for sample in under_load(timeline, span)]
    left = _left_by_small_requests(timeline, facts, span, floor, limits)
    return max((max(blocks - floor - left, 0) for blocks in held if blocks is not None), default=None)
