"""One layer's cache on one rank: the page that a block of it takes, and how many blocks a request needs of it.

The shape of vLLM v1/kv_cache_interface.py::KVCacheSpec and its kinds. Only what decides bytes and counts is kept.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, check_range


class PageKind(StrEnum):
    """Which allocation rule a page follows."""

    FULL = "full"
    MLA = "mla"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    CROSS = "cross_attention"
    RING = "ring"


class StateCacheMode(StrEnum):
    """`--mamba-cache-mode`: which states are kept for prefix caching (config/cache.py::MambaCacheMode).

    `all` was dropped before vLLM 0.32; it kept the state at every block.
    """

    NONE = "none"
    ALIGN = "align"
    ALL = "all"


TOKEN_GROWING = frozenset({PageKind.FULL, PageKind.MLA})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """What, besides its length, decides how many blocks the engine plans for a request, and how many it holds.

    `steps_in_flight` is 1 with async scheduling (the default on GPUs) and 0 without (the CPU backend): blocks
    are freed on the basis of tokens whose step has been processed.
    """

    max_in_flight_tokens: int
    encoder_tokens: int
    steps_in_flight: int = 0
    decode_context_parallel: int = 1
    state_cache_mode: StateCacheMode = StateCacheMode.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpec:
    """One layer's cache on one rank (a vLLM KVCacheSpec).

    `row_bytes` is what one head of one token takes; for a state page it is the whole state, and `heads` is 1. One row
    stands for `tokens_per_row` tokens.
    `variant` holds what else must be equal before two layers may share a block table (number format,
    head sizes, cache role), as one string that is only ever compared. Blocks lie whole multiples of `stride_bytes`
    apart, where layers lie side by side in each. A `replicated` state is whole on every rank.
    """

    kind: PageKind
    block_size_tokens: int
    heads: int
    row_bytes: int
    variant: str = ""
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    retained_tokens: int = 0
    speculative_blocks: int = 0
    checkpoint_blocks: int = 0
    padded_page_bytes: int | None = None
    dcp_sharded: bool = True
    tokens_per_row: int = 1
    stride_bytes: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.heads < 1 or self.row_bytes < 1 or not 1 <= self.content_bytes <= MAX_BYTES:
            raise KvModelError(f"a page of {self.heads} heads x {self.row_bytes} bytes is impossible", "row_bytes")
        if self.kind is PageKind.SLIDING:
            check_range("sliding_window", self.window_tokens or 0, 1)
        if self.kind is PageKind.CHUNKED:
            check_range("attention_chunk_size", self.chunk_tokens or 0, 1)

    @property
    def content_bytes(self) -> int:
        """Bytes of one block before padding (AttentionSpec.unpadded_page_size_bytes)."""
        if self.kind is PageKind.STATE:
            return self.row_bytes
        return self.heads * (self.block_size_tokens // self.tokens_per_row) * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block (KVCacheSpec.page_size_bytes)."""
        return self.content_bytes if self.padded_page_bytes is None else self.padded_page_bytes

    def admission_blocks(self, tokens: int, terms: RequestTerms) -> int:
        """Blocks the engine plans for one request of `tokens` tokens.

        The per-kind `max_memory_usage_bytes` of kv_cache_interface.py, in blocks. For sliding and chunked layers it is
        a bound on the peak during chunked prefill, not what an idle decode holds (see residency.py).
        """
        block = self.block_size_tokens
        match self.kind:
            case PageKind.FULL | PageKind.MLA:
                ranks = terms.decode_context_parallel if self.dcp_sharded else 1
                return ceil_div(ceil_div(tokens, ranks), block)
            case PageKind.SLIDING:
                if self.dcp_sharded and terms.decode_context_parallel > 1:
                    raise KvModelError(
                        "vLLM has no decode context parallel for sliding-window layers: pass --dcp 1",
                        "decode_context_parallel",
                    )
                window = self.window_tokens or 1
                kept = window - 1 + self.retained_tokens + terms.max_in_flight_tokens
                return ceil_div(min(kept, tokens), block) + 1
            case PageKind.CHUNKED:
                kept = (self.chunk_tokens or 1) + terms.max_in_flight_tokens
                return ceil_div(min(kept, tokens), block)
            case PageKind.STATE:
                if terms.state_cache_mode is StateCacheMode.ALIGN:
                    return 2 + self.speculative_blocks + self.checkpoint_blocks
                if terms.state_cache_mode is StateCacheMode.ALL:
                    return ceil_div(tokens, block) + self.speculative_blocks
                return 1 + self.speculative_blocks
            case PageKind.CROSS:
                return ceil_div(terms.encoder_tokens, block)
            case PageKind.RING:
                return 1


def ceil_div(value: int, parts: int) -> int:
    """The smallest count of `parts` that covers `value`."""
    return -(-value // parts)
