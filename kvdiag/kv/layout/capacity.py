"""A pool of bytes -> blocks -> tokens -> concurrent requests, as the engine counts them.

In this order: each rank affords its pool's bytes over the bytes of its block; every rank gets the smallest of these
counts; a request of the full context needs the sum over the groups; their ratio is the concurrency, and times the
context the capacity in tokens. The engine computes its tokens from the concurrency, not from blocks, so this does too.
One block is the null block, which no request gets: it counts in what the engine prints and not in what really fits.
vLLM v1/core/kv_cache_utils.py: get_kv_cache_configs, get_kv_cache_capacity, _check_enough_kv_cache_memory.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, MAX_TOKENS, check_range
from kvdiag.kv.layout.groups import PageGroup, group_pages
from kvdiag.kv.layout.packed_groups import packed_groups
from kvdiag.kv.layout.pages import TOKEN_GROWING, PageKind, PageSpec, RequestTerms, ceil_div

# BlockPool keeps one block back as the null block; it is never given to a request.
NULL_BLOCKS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """All layers of a model in groups, with the pipeline stage that holds each layer."""

    groups: tuple[PageGroup, ...]
    stages: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many pipeline stages there are."""
        return max(self.stages, default=0) + 1

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block on each stage; a block costs the same whichever group takes it
        (_get_kv_cache_bytes_per_block, _project_kv_cache_groups_to_worker).
        """
        of_stage = [
            frozenset(layer for layer, stage in enumerate(self.stages) if stage == rank) for rank in range(self.ranks)
        ]
        return tuple(self._block_bytes(layers) for layers in of_stage)

    def _block_bytes(self, layers: frozenset[int]) -> int:
        """Bytes of a block with the pages of `layers`, the widest group's, rounded up to every page's stride."""
        widest = max((group.bytes_per_block(layers) for group in self.groups), default=0)
        pages = [
            page
            for group in self.groups
            for layer, page in zip(group.layers, group.pages, strict=True)
            if layer in layers
        ]
        stride = math.lcm(*{page.stride_bytes for page in pages})
        return ceil_div(widest, stride) * stride

    @property
    def padding_layers(self) -> int:
        """Layers' worth of pages that blocks of short groups pay for and leave empty."""
        widest = max((len(group.layers) for group in self.groups), default=0)
        return sum(widest - len(group.layers) for group in self.groups)

    @property
    def block_size_tokens(self) -> int | None:
        """The smallest block of a group that grows with tokens, which is what the engine reports."""
        kinds = (PageKind.STATE, PageKind.RING)
        sizes = [group.page.block_size_tokens for group in self.groups if group.page.kind not in kinds]
        return min(sizes, default=None)

    def admission_blocks(self, tokens: int, terms: RequestTerms) -> int:
        """Blocks that the engine plans for one request: the sum over the groups."""
        return sum(group.admission_blocks(tokens, terms) for group in self.groups)

    def bytes_per_token(self, decode_context_parallel: int = 1) -> tuple[float, ...] | None:
        """Bytes one token takes on each stage, or None where there is no such number
        (several groups, windows, states: the cost of a token depends on the request's length).
        """
        if len(self.groups) != 1 or self.groups[0].page.kind not in TOKEN_GROWING:
            return None
        page = self.groups[0].page
        tokens = page.block_size_tokens * (decode_context_parallel if page.dcp_sharded else 1)
        return tuple(_exact(bytes_per_block, tokens) for bytes_per_block in self.bytes_per_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a pool holds. Every rank has `num_blocks`, the smallest of what the ranks could afford."""

    num_blocks: int
    bytes_per_block: tuple[int, ...]
    context_tokens: int
    blocks_per_request: int

    @property
    def max_concurrency(self) -> float:
        """Requests of `context_tokens` that fit at once (get_max_concurrency_for_kv_cache_config)."""
        return self.num_blocks / self.blocks_per_request if self.blocks_per_request else 0.0

    @property
    def capacity_tokens(self) -> int:
        """The engine's "KV cache size: N tokens" (get_kv_cache_capacity)."""
        return int(self.max_concurrency * self.context_tokens)

    @property
    def needed_bytes(self) -> tuple[int, ...]:
        """Bytes one request of `context_tokens` needs on each rank: the refusal's "GiB KV cache is needed"."""
        return tuple(size * self.blocks_per_request for size in self.bytes_per_block)

    @property
    def admits_one(self) -> bool:
        """Whether the engine starts at all: one request and the null block must fit (get_kv_cache_configs)."""
        return self.num_blocks >= self.blocks_per_request + NULL_BLOCKS

    @property
    def whole_requests(self) -> int:
        """Requests of `context_tokens` that really fit at once, the null block kept back."""
        return max(0, self.num_blocks - NULL_BLOCKS) // self.blocks_per_request if self.blocks_per_request else 0


def plan_layout(
    pages: Sequence[PageSpec],
    *,
    stages: Sequence[int] | None = None,
    hybrid_manager: bool = True,
    packed: bool = False,
) -> CacheLayout:
    """Group the layers of all pipeline stages together, as the engine does, and remember where each lies."""
    placed = tuple(stages) if stages is not None else (0,) * len(pages)
    groups = packed_groups(pages) if packed else group_pages(pages, hybrid_manager=hybrid_manager)
    return CacheLayout(groups=groups, stages=placed)


def pool_capacity(
    layout: CacheLayout,
    *,
    pool_bytes: int | Sequence[int],
    context_tokens: int,
    terms: RequestTerms,
) -> Capacity:
    """Blocks, tokens and concurrency of a pool; `pool_bytes` is per rank, one number or one for each stage."""
    pools = (pool_bytes,) * layout.ranks if isinstance(pool_bytes, int) else tuple(pool_bytes)
    if len(pools) != layout.ranks:
        raise KvModelError(f"{len(pools)} pool sizes for {layout.ranks} pipeline stages", "kv_pool_bytes")
    for pool in pools:
        check_range("kv_pool_bytes", pool, 0, MAX_BYTES)
    check_range("context", context_tokens, 1, MAX_TOKENS)
    sizes = layout.bytes_per_block
    affordable = [pool // size for pool, size in zip(pools, sizes, strict=True) if size]
    return Capacity(
        num_blocks=min(affordable, default=1),
        bytes_per_block=sizes,
        context_tokens=context_tokens,
        blocks_per_request=layout.admission_blocks(context_tokens, terms),
    )


def longest_context_tokens(
    layout: CacheLayout, *, num_blocks: int, most_tokens: int, terms: RequestTerms, requests: int = 1
) -> int:
    """The longest context that `requests` requests may have at once in `num_blocks`, 0 where not even one token
    (_estimate_max_model_len_from_groups, which searches in the same way; the null block is kept back).
    """
    usable = max(0, num_blocks - NULL_BLOCKS)

    def needed(tokens: int) -> int:
        return layout.admission_blocks(tokens, terms) * requests

    return bisect_right(range(1, most_tokens + 1), usable, key=needed)


def _exact(numerator: int, denominator: int) -> float:
    whole, rest = divmod(numerator, denominator)
    return whole if rest == 0 else numerator / denominator
