"""Blocks that resident tokens need, from what the engine reports of its own pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdiag.model import Facts, KvPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Blocks needed: at least and at most. They differ where blocks are returned some steps after they are outgrown."""

    least_blocks: int
    most_blocks: int

    def __add__(self, other: Need) -> Need:
        """The need of both."""
        return Need(
            least_blocks=self.least_blocks + other.least_blocks,
            most_blocks=self.most_blocks + other.most_blocks,
        )


def blocks_needed(resident_tokens: Sequence[int], facts: Facts) -> Need | None:
    """Blocks that requests with so many resident tokens each need; `None` where the pool's curve is not known.

    Full attention: ceil(tokens / block) for each request (vllm/v1/core/kv_cache_utils.py). A model whose layers all
    slide holds the blocks that its window touches, and the step's own tokens until the next step frees the rest
    (vllm/v1/core/single_type_kv_cache_manager.py::SlidingWindowManager.get_num_skipped_tokens).
    """
    pool = next(iter(facts.pools), None)
    if pool is None or curve_problem(facts) is not None:
        return None
    total = Need(least_blocks=0, most_blocks=0)
    for tokens in resident_tokens:
        total += _one_request(tokens, pool)
    return total


FREED_LATE_TOKENS = 2
"""With async scheduling a step is planned before the last one is processed, so blocks come back this much later."""


def _one_request(tokens: int, pool: KvPool) -> Need:
    full = -(-tokens // pool.block_tokens)
    window = pool.sliding_window_tokens
    if window is None:
        return Need(least_blocks=full, most_blocks=full)
    return Need(
        least_blocks=full - max(tokens - window + 1, 0) // pool.block_tokens,
        most_blocks=full - max(tokens - window - FREED_LATE_TOKENS, 0) // pool.block_tokens,
    )


def curve_problem(facts: Facts) -> str | None:
    """Why blocks cannot be computed from tokens by the engine's report alone; `None` where they can."""
    pool = next(iter(facts.pools), None)
    if pool is None:
        return "the engine does not report its KV pool"
    longest = facts.max_model_len_tokens
    if (
        pool.sliding_window_tokens is not None
        or pool.max_concurrency is None
        or not pool.max_concurrency
        or not longest
    ):
        return None
    # The engine's own figure for one request of max_model_len tokens tells whether its layers all cost alike.
    reported = round(pool.total_blocks / pool.max_concurrency)
    linear = -(-longest // pool.block_tokens)
    if abs(reported - linear) <= 1:
        return None
    return (
        f"by its own figures a request of {longest} tokens takes {reported} blocks, not {linear}: "
        "its layers do not all keep every token (sliding window, state or several KV groups)"
    )
