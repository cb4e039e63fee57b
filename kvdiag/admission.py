"""Decide whether to admit one more request now: admit, wait or shed, with the numbers. Pure.

vLLM admits a request when its prompt fits at the moment and reserves no blocks for the output of running requests;
when the pool runs out it preempts one and recomputes it later (vllm/v1/core/sched/scheduler.py::_preempt_request).
This module counts the blocks that all requests will still need, from the lengths of finished requests.

Decided in this order: longer than max_model_len (shed); no recent, complete sample (wait, as unknown); then for each
engine: larger than the pool (shed), the only request (admit), blocks left beyond the reserve (admit), a queue that
needs the whole pool (shed), else wait. The strictest engine decides, since the router's choice is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvdiag.diagnosis.blocks.expected import blocks_needed, curve_problem
from kvdiag.formatting import format_duration, plural
from kvdiag.model import Engine, Facts, KvPool, Lengths

Decision = Literal["admit", "wait", "shed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """When a request is admitted, waits or is shed."""

    caution_ratio: float = 0.9
    """Output length assumed for the new request, as a quantile of finished ones; other requests count with the mean."""

    reserve_ratio: float = 0.05
    """Share of the pool that stays free: requests finish in bursts, and the newest sample is a second old."""

    min_finished: int = 20
    """Finished requests needed before their lengths are used: with fewer, one long request decides the quantile."""

    max_queued_ratio: float = 1.0
    """Shed when the queue needs more than this share of the pool: a request would wait for a whole turnover."""

    stale_seconds: float = 5.0
    """Samples older than this are ignored: requests start and finish in less."""


ADMISSION_LIMITS = AdmissionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request that a client wants to send."""

    prompt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError("prompt_tokens and max_tokens must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do with a request, why, and the blocks behind it, each `None` where unknown.

    `free_blocks` are free now, `running_blocks` will still be taken by running requests, `waiting_blocks` are needed by
    the queue, `promised_blocks` were admitted since the newest sample, `request_blocks` are assumed for this request
    (with `output_tokens` of output), `reserve_blocks` stay free.
    """

    decision: Decision
    reason: str
    engine: str | None = None
    usable_blocks: int | None = None
    free_blocks: int | None = None
    running_blocks: int | None = None
    waiting_blocks: int | None = None
    promised_blocks: int | None = None
    request_blocks: int | None = None
    reserve_blocks: int | None = None
    output_tokens: int | None = None


def advise(
    wish: Wish,
    *,
    engines: Sequence[Engine] | None,
    age_seconds: float,
    facts: Facts,
    lengths: Lengths | None,
    promised: Sequence[int] = (),
) -> Advice:
    """Decide on a request by the newest sample of the engines (`None` where there is none).

    `promised` holds the blocks of each request admitted since that sample. With several engines the fullest counts,
    because the router's choice is unknown. Anything unknown is `wait`.
    """
    longest_tokens = facts.max_model_len_tokens
    whole_tokens = wish.prompt_tokens + wish.max_tokens
    if longest_tokens is not None and whole_tokens > longest_tokens:
        reason = f"{whole_tokens:,} tokens exceed max_model_len ({longest_tokens:,}): the request can never be served"
        return Advice(decision="shed", reason=reason)
    doubt = _doubt(engines, age_seconds, facts)
    if doubt is not None or engines is None:
        return Advice(decision="wait", reason=f"unknown: {doubt}")
    pools = {pool.engine: pool for pool in facts.pools}
    advice = [_one(wish, engine, pools[engine.engine], facts, lengths, promised) for engine in engines]
    return min(advice, key=lambda one: (_MILDEST.index(one.decision), _room(one)))


_MILDEST: tuple[Decision, ...] = ("shed", "wait", "admit")


def _doubt(engines: Sequence[Engine] | None, age_seconds: float, facts: Facts) -> str | None:
    if not engines:
        return "the server does not answer; check --url"
    if age_seconds > ADMISSION_LIMITS.stale_seconds:
        return f"the newest sample is {format_duration(age_seconds)} old; see the log of `kvdiag serve`"
    if (problem := curve_problem(facts)) is not None:
        return problem
    pools = {pool.engine for pool in facts.pools}
    for engine in engines:
        if engine.engine not in pools:
            return f"engine {engine.engine} does not report its KV pool; run `kvdiag doctor`"
        if engine.asleep:
            return f"engine {engine.engine} is asleep; wake it up"
        if engine.kv_usage_ratio is None or engine.requests_running is None or engine.requests_waiting is None:
            return f"engine {engine.engine} does not report its KV usage and requests; run `kvdiag doctor`"
    return None


def _one(
    wish: Wish, engine: Engine, pool: KvPool, facts: Facts, lengths: Lengths | None, promised: Sequence[int]
) -> Advice:
    running, waiting = engine.requests_running or 0, engine.requests_waiting or 0
    longest_tokens = facts.max_model_len_tokens or pool.usable_blocks * pool.block_tokens
    known = lengths if lengths is not None and lengths.finished >= ADMISSION_LIMITS.min_finished else None
    output_tokens = (
        wish.max_tokens if known is None else known.quantile_tokens(ADMISSION_LIMITS.caution_ratio, wish.max_tokens)
    )
    mean_tokens = float(wish.max_tokens) if known is None else known.mean_tokens(longest_tokens)
    prompt_tokens = wish.prompt_tokens if known is None else known.mean_prompt_tokens or wish.prompt_tokens
    held_blocks = min(round((engine.kv_usage_ratio or 0.0) * pool.usage_blocks), pool.usable_blocks)
    held_tokens = held_blocks * pool.block_tokens / max(running, 1)
    growth_tokens = wish.max_tokens if known is None else known.peak_growth_tokens(held_tokens, longest_tokens)
    waiting_blocks, promised_blocks = waiting * _blocks(round(prompt_tokens + mean_tokens), facts), sum(promised)
    numbers = Advice(
        decision="wait",
        reason="",
        engine=engine.engine,
        usable_blocks=pool.usable_blocks,
        free_blocks=pool.usable_blocks - held_blocks,
        running_blocks=running * _blocks(round(growth_tokens), facts),
        waiting_blocks=waiting_blocks,
        promised_blocks=promised_blocks,
        request_blocks=_blocks(wish.prompt_tokens + output_tokens, facts),
        reserve_blocks=round(pool.usable_blocks * ADMISSION_LIMITS.reserve_ratio),
        output_tokens=output_tokens,
    )
    usable, queued = pool.usable_blocks, waiting_blocks + promised_blocks
    if (whole_blocks := _blocks(wish.prompt_tokens + wish.max_tokens, facts)) > usable:
        reason = f"{plural(whole_blocks, 'block')}, more than the KV pool's {usable:,}: the request can never be served"
        return replace(numbers, decision="shed", reason=reason)
    if not (running or waiting or promised_blocks):
        return replace(numbers, decision="admit", reason="the server has no other request, and the whole request fits")
    room = _room(numbers)
    if room >= 0:
        return replace(numbers, decision="admit", reason=f"{plural(room, 'block')} free beyond the reserve")
    if queued > ADMISSION_LIMITS.max_queued_ratio * usable:
        reason = f"waiting and just-admitted requests already need {plural(queued, 'block')}, more than the whole pool"
        return replace(numbers, decision="shed", reason=reason)
    reason = f"{plural(-room, 'block')} short of the expected need of all requests"
    return replace(numbers, decision="wait", reason=reason)


def _room(one: Advice) -> int:
    """Blocks that stay free beyond the reserve once all requests have taken what they need."""
    wanted = (one.running_blocks, one.waiting_blocks, one.promised_blocks, one.request_blocks, one.reserve_blocks)
    return (one.free_blocks or 0) - sum(each or 0 for each in wanted)


def _blocks(tokens: int, facts: Facts) -> int:
    """Most blocks that a request of so many tokens uses; growth from zero is at least as steep as later growth."""
    need = blocks_needed([max(tokens, 0)], facts)
    return 0 if need is None else need.most_blocks
