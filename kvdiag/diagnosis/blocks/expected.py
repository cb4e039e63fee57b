"""Blocks that resident tokens need: by the engine's own report, and for models whose layers differ by their config.

In this order: a window that the engine reports for its whole pool; full attention, where one request of `max_model_len`
tokens takes as many blocks as its tokens fill; else the model's config. Where the engine reports its own figure for
that request (`total_blocks / max_concurrency`, since vLLM 0.24), the second and third are checked against it: a curve
that does not meet it is not used, and without any the expectation is unknown. Where blocks are returned late there is a
range.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdiag.diagnosis.timeline_queries import NO_POOL
from kvdiag.kv.calibration.running_server import reported_blocks, served
from kvdiag.model import Facts, KvPool

if TYPE_CHECKING:
    from kvdiag.kv.calibration.served_layout import Served

FREED_LATE_TOKENS = 2
"""With async scheduling a step is planned before the last one is processed, so blocks are released this much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBlocks:
    """Blocks needed: at least and at most. They differ where blocks are returned some steps after they are outgrown."""

    least_blocks: int
    most_blocks: int


def blocks_needed(resident_tokens: Sequence[int], facts: Facts) -> ExpectedBlocks | None:
    """Blocks that decoding requests with so many resident tokens each need; `None` where the curve is not known.

    Full attention: ceil(tokens / block) for each request (vllm/v1/core/kv_cache_utils.py). A model whose layers all
    slide holds the blocks that its window touches
    (vllm/v1/core/single_type_kv_cache_manager.py::SlidingWindowManager.get_num_skipped_tokens).
    """
    pool = next(iter(facts.pools), None)
    if pool is None or curve_problem(facts) is not None:
        return None
    modelled = None if _is_linear(pool, facts) or pool.sliding_window_tokens else _modelled(facts, pool)
    tokens = resident_tokens
    each = [_by_report(one, pool) if modelled is None else _by_model(one, modelled) for one in tokens]
    return ExpectedBlocks(
        least_blocks=sum(one.least_blocks for one in each), most_blocks=sum(one.most_blocks for one in each)
    )


def filled_ratio(resident_tokens: Sequence[int], held_blocks: int, facts: Facts) -> float | None:
    """Tokens held over tokens paid for: the share of the held blocks that keeps something still needed.

    The rest is the tail of each request's last block, tokens below a window, and the padding of hybrid pages. In bytes
    where a model's layers differ. `None` where nothing is held, or the curve is not known.
    """
    pool = next(iter(facts.pools), None)
    if pool is None or held_blocks <= 0 or curve_problem(facts) is not None:
        return None
    window = pool.sliding_window_tokens
    modelled = None if window or _is_linear(pool, facts) else _modelled(facts, pool)
    if modelled is None:
        kept = sum(min(tokens, window or tokens) for tokens in resident_tokens)
        return kept / (held_blocks * pool.block_tokens)
    kept = sum(map(modelled.content_bytes, resident_tokens))
    return kept / (held_blocks * sum(modelled.layout.bytes_per_block))


def curve_problem(facts: Facts) -> str | None:
    """Why blocks cannot be computed from tokens; `None` where they can."""
    pool = next(iter(facts.pools), None)
    if pool is None:
        return NO_POOL
    if pool.sliding_window_tokens is not None or _is_linear(pool, facts) or _modelled(facts, pool) is not None:
        return None
    reported, unit = reported_blocks(pool), facts.capabilities.unit
    return (
        f"by the engine's own figures a request of {facts.max_model_len_tokens} tokens takes "
        f"{reported} {unit}s, which "
        "neither full attention nor the model's config explains (sliding windows, state, several KV groups); "
        "compare in `kvdiag audit`"
    )


def grows_with_every_token(facts: Facts) -> bool:
    """Whether every layer keeps every token, so that blocks grow on a straight line."""
    pool = next(iter(facts.pools), None)
    return pool is not None and pool.sliding_window_tokens is None and _is_linear(pool, facts)


def _is_linear(pool: KvPool, facts: Facts) -> bool:
    if facts.capabilities.linear:
        return True
    reported, longest = reported_blocks(pool), facts.max_model_len_tokens
    if reported is not None and longest is not None:
        return abs(reported - -(-longest // pool.block_tokens)) <= 1
    model = served(facts, pool)
    return isinstance(model, str) or model.layout.bytes_per_token() is not None


def _by_report(tokens: int, pool: KvPool) -> ExpectedBlocks:
    full = -(-tokens // pool.block_tokens)
    window = pool.sliding_window_tokens
    if window is None:
        return ExpectedBlocks(least_blocks=full, most_blocks=full)
    return ExpectedBlocks(
        least_blocks=full - max(tokens - window + 1, 0) // pool.block_tokens,
        most_blocks=full - max(tokens - window - FREED_LATE_TOKENS, 0) // pool.block_tokens,
    )


def _by_model(tokens: int, model: "Served") -> ExpectedBlocks:
    least, most = model.held_blocks(tokens)
    return ExpectedBlocks(least_blocks=least, most_blocks=most)


def _modelled(facts: Facts, pool: KvPool) -> "Served | None":
    """The config's model, where it meets the engine's own figure for one request."""
    model = served(facts, pool)
    return None if isinstance(model, str) or reported_blocks(pool) not in (None, model.planned_blocks) else model
