"""Whether requests are open and the engines do nothing: a hang, a pause, or kernels that are compiled.

Such requests keep their blocks although the gauges call them running, so no idle interval shows them. Judged where each
step of the engine moves a figure: tokens counted and the usage of the pool have stayed the same for minutes. Where the
pool is full, requests may wait for each other's blocks, which is a verdict of its own. Of several engines each is
judged by itself, too: one of them hangs while the others work. Its own usage decides where the front end counts tokens
for all of them together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.formatting import format_duration, plural
from kvdiag.model import Engine, Evidence, Facts, Finding, Sample, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Requests that were open at the newest sample, since when nothing moved, and the blocks that they hold."""

    since_seconds: float
    seconds: float
    running: int
    waiting: int
    blocks: int
    engine: str | None = None
    """The only one of several engines that does nothing."""
    admitted_tokens: int | None = None
    """Longest request that the scheduler admits to an empty pool, where only longer ones may wait: it keeps blocks."""

    def finding(self, rule_id: str, summary: str) -> Finding:
        """The finding of a rule, with what to do about it."""
        who = "the engine" if self.engine is None else f"engine {self.engine}"
        evidence = (
            Evidence("no_progress", self.seconds, "seconds", "engine"),
            Evidence("blocks_without_progress", self.blocks, "blocks", "engine"),
            Evidence("running", self.running, "requests", "engine"),
            Evidence("waiting", self.waiting, "requests", "engine"),
        )
        longer = too_long = refuse = ""
        if self.admitted_tokens is not None:
            longer = f", or a request is longer than the {self.admitted_tokens:,} tokens that it admits"
            too_long = "A request that would leave no page of the pool free is accepted, and waits forever. "
            refuse = f"Lower --max-model-len to {self.admitted_tokens} or less, so that such requests are refused. "
        return Finding(
            rule_id,
            "suspect",
            f"{summary}, and no token processed for {format_duration(self.seconds)}: {who} hangs or is paused{longer}",
            evidence,
            since_seconds=self.since_seconds,
            likely_cause=f"{too_long}The engine is paused, hangs in a step (a kernel, a collective of several ranks, a "
            "transfer), or compiles kernels for a new shape. Requests whose clients have disconnected are then not "
            "aborted either, and keep their blocks.",
            confirm="Send one short request: without an answer, the engine takes no step. A dump of the stacks of its "
            "scheduler or engine process (py-spy) shows where it hangs.",
            remedy=f"{refuse}Resume the engine if it was paused on purpose. Otherwise restart it: until then none of "
            "these blocks is released.",
        )

    @property
    def requests(self) -> str:
        """The open requests, in words."""
        counts = ((self.running, "running"), (self.waiting, "waiting"))
        return " and ".join(plural(count, f"{state} request") for count, state in counts if count)


def stalled(timeline: Timeline, facts: Facts, limits: Limits) -> Stall | None:
    """The stall at the newest sample; `None` where the engines work or are idle, or do not show each step."""
    if not shows_steps(facts):
        return None
    whole = _stalled(timeline, facts, limits)
    last = next((sample for sample in reversed(timeline.samples) if sample.engines is not None), None)
    engines = () if last is None else last.engines or ()
    counted = any(engine.generation_tokens_total is not None for engine in engines)
    if whole is not None or last is None or len(engines) < 2 or not counted:  # noqa: PLR2004 - several
        return whole
    alone = [_stalled(timeline, facts, limits, engine.engine) for engine in engines if _is_open(engine)]
    if last.tokens_total is None and all(alone):
        # One of them processes the tokens that are counted for all: their usage does not show which.
        return None
    return max(filter(None, alone), key=lambda one: one.seconds, default=None)


def _is_open(engine: Engine) -> bool:
    return bool(engine.requests_running or engine.requests_waiting)


def _stalled(timeline: Timeline, facts: Facts, limits: Limits, only: str | None = None) -> Stall | None:
    read = _newest_first(timeline, only)
    last = next(read, None)
    blocks = None if last is None else held_blocks(last, facts)
    if last is None or blocks is None or not last.open_requests:
        return None
    if any((engine.kv_usage_ratio or 0.0) >= limits.pool_full_ratio for engine in last.engines or ()):
        return None
    # llama.cpp's counters are read less often than its slots, whose output tokens count as well.
    first, (tokens, *moved) = last, _work(last)
    for sample in read:
        counted, *now = _work(sample)
        if now != moved or not sample.open_requests or (None not in (counted, tokens) and counted != tokens):
            break
        first, tokens = sample, counted if tokens is None else tokens
    if only is None and tokens is None and last.total("running_output_tokens") is None:
        return None
    seconds = last.at_seconds - first.at_seconds
    if seconds < limits.stalled_seconds:
        return None
    running = last.total("requests_running") or 0
    return Stall(
        since_seconds=first.at_seconds,
        seconds=seconds,
        running=running,
        waiting=last.open_requests - running,
        blocks=blocks,
        engine=only,
        admitted_tokens=None if running or blocks else _admitted_tokens(facts),
    )


def _admitted_tokens(facts: Facts) -> int | None:
    """The longest request that is ever run, where longer ones are accepted; blocks of one token keep none."""
    spare, longest = facts.capabilities.spare_blocks, facts.max_model_len_tokens
    pools = [pool for pool in facts.pools if spare and pool.block_tokens > 1]
    admitted = min(((pool.usable_blocks - spare) * pool.block_tokens for pool in pools), default=None)
    return admitted if admitted is not None and longest is not None and admitted < longest else None


def _newest_first(timeline: Timeline, only: str | None) -> Iterator[Sample]:
    """The samples that have engines; of each but one engine, without tokens that are counted for all together."""
    for sample in reversed(timeline.samples):
        if sample.engines is None:
            continue
        shared = only is not None and sample.tokens_total is None
        own = [engine for engine in sample.engines if only in {None, engine.engine}]
        if shared:
            own = [replace(engine, prompt_tokens_total=None, generation_tokens_total=None) for engine in own]
        yield sample if only is None else replace(sample, engines=tuple(own))


def shows_steps(facts: Facts) -> bool:
    """Whether each step of the engine moves its figures."""
    return not (facts.capabilities.on_completion or facts.capabilities.reserved)


def same_work(earlier: Sample, later: Sample) -> bool:
    """Whether two samples count tokens, and no figure that a step moves differs between them."""
    counts = (later.tokens_total, later.total("running_output_tokens"))
    return not moved(earlier, later) and counts != (None, None)


def moved(earlier: Sample, later: Sample) -> bool:
    """Whether a figure that a step moves differs between two samples."""
    return _work(earlier) != _work(later)


def _work(sample: Sample) -> tuple[float | None, ...]:
    """What each step of an engine moves, where its figures show steps."""
    usages = (engine.kv_usage_ratio for engine in sample.engines or ())
    return sample.tokens_total, sample.total("running_output_tokens"), *usages
