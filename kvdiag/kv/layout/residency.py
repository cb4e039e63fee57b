"""Blocks a request really holds, as opposed to the blocks the engine plans for it (capacity.py).

The rules of vLLM v1/core/kv_cache_manager.py::allocate_slots: before each step it frees what the next token can no
longer see, then gives the step its blocks. `resident_tokens` counts tokens that have a slot: prompt + generated - 1
while a request decodes, since the last sampled token is stored by the next step.
"""

from kvdiag.kv.bounds import MAX_TOKENS, check_range
from kvdiag.kv.layout.capacity import CacheLayout
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode, ceil_div


def decode_blocks(layout: CacheLayout, *, resident_tokens: int, terms: RequestTerms) -> int:
    """Blocks one decoding request holds once it has `resident_tokens` tokens in the cache."""
    check_range("tokens", resident_tokens, 1, MAX_TOKENS)
    in_flight = terms.steps_in_flight
    return sum(
        max(_held(page, resident_tokens, resident_tokens - 1 - in_flight, terms) for page in set(group.pages))
        for group in layout.groups
    )


def wasted_ratio(layout: CacheLayout, *, resident_tokens: int, terms: RequestTerms) -> float:
    """The share of a request's block bytes that holds no token: block tails, short groups, padded pages."""
    blocks = decode_blocks(layout, resident_tokens=resident_tokens, terms=terms)
    paid = blocks * sum(layout.bytes_per_block)
    if paid == 0:
        return 0.0
    return 1 - min(paid, content_bytes(layout, resident_tokens, terms)) / paid


def content_bytes(layout: CacheLayout, tokens: int, terms: RequestTerms) -> int:
    """Bytes of one request's blocks that hold something it still needs, on all pipeline stages."""
    total = 0
    for group in layout.groups:
        for page in group.pages:
            match page.kind:
                case PageKind.STATE:
                    total += page.row_bytes
                case PageKind.RING:
                    total += page.content_bytes
                case PageKind.SLIDING | PageKind.CHUNKED:
                    seen = page.window_tokens or page.chunk_tokens or 1
                    total += min(tokens, seen) * page.heads * page.row_bytes
                case PageKind.CROSS:
                    total += terms.encoder_tokens * page.heads * page.row_bytes
                case PageKind.FULL | PageKind.MLA:
                    ranks = terms.decode_context_parallel if page.dcp_sharded else 1
                    total += ceil_div(tokens, ranks) // page.tokens_per_row * page.heads * page.row_bytes
    return total


def _held(page: PageSpec, tokens: int, processed: int, terms: RequestTerms) -> int:
    """Blocks of one group when `tokens` have a slot and `processed` of them are done with.

    v1/core/single_type_kv_cache_manager.py: get_num_skipped_tokens and remove_skipped_blocks of each manager.
    """
    block = page.block_size_tokens
    match page.kind:
        case PageKind.FULL | PageKind.MLA:
            span = block * (terms.decode_context_parallel if page.dcp_sharded else 1)
            return ceil_div(tokens, span)
        case PageKind.SLIDING:
            skipped = max(0, processed - (page.window_tokens or 1) + 1 - page.retained_tokens)
            return ceil_div(tokens, block) - skipped // block
        case PageKind.CHUNKED:
            chunk = page.chunk_tokens or 1
            return ceil_div(tokens, block) - max(0, processed) // chunk * chunk // block
        case PageKind.CROSS:
            return ceil_div(terms.encoder_tokens, block)
        case PageKind.RING:
            return 1
        case PageKind.STATE:
            return _held_states(page, tokens, processed, terms)


def _held_states(page: PageSpec, tokens: int, processed: int, terms: RequestTerms) -> int:
    """State blocks: the running state, one slot per draft, and in `align` mode the state of the block before
    while the step that crossed the boundary still copies from it (MambaManager.allocate_new_blocks).
    """
    running = 1 + page.speculative_blocks
    match terms.state_cache_mode:
        case StateCacheMode.NONE:
            return running
        case StateCacheMode.ALL:
            return ceil_div(tokens, page.block_size_tokens) + page.speculative_blocks
        case StateCacheMode.ALIGN:
            last = (tokens - 1) // page.block_size_tokens
            kept_from = max(0, processed - 1) // page.block_size_tokens
            return running + min(1, max(0, last - kept_from))
