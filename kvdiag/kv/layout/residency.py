"""Blocks a request really holds, as opposed to the blocks the engine plans for it (capacity.py).

The rules of vLLM v1/core/kv_cache_manager.py::allocate_slots: before each step it frees what the next token can no
longer see, then gives the step its blocks. `resident_tokens` counts tokens that have a slot: prompt + generated - 1
while a request decodes, since the last sampled token is stored by the next step.
"""

from dataclasses import dataclass

from kvdiag.kv.bounds import MOST_RANKS, MOST_TOKENS, check_range
from kvdiag.kv.layout.capacity import CacheLayout
from kvdiag.kv.layout.pages import PageKind, PageSpec, StateCacheMode, ceil_div

_MOST_STEPS = 1 << 10
# Of a prompt's last chunks. Earlier chunks hold no more, except a block at the edge of a window.
_MOST_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTerms:
    """The settings that decide when blocks are freed.

    `steps_in_flight` is 1 with async scheduling (the default on GPUs) and 0 without (the CPU backend): blocks are freed
    on the basis of tokens whose step has been processed. `prefill_chunk_tokens` is max_num_batched_tokens.
    """

    prefill_chunk_tokens: int
    steps_in_flight: int = 0
    encoder_tokens: int = 0
    decode_context_parallel: int = 1
    state_cache_mode: StateCacheMode = StateCacheMode.NONE

    def __post_init__(self) -> None:
        check_range("max_num_batched_tokens", self.prefill_chunk_tokens, 1, MOST_TOKENS)
        check_range("steps_in_flight", self.steps_in_flight, 0, _MOST_STEPS)
        check_range("encoder_tokens", self.encoder_tokens, 0, MOST_TOKENS)
        check_range("decode_context_parallel", self.decode_context_parallel, 1, MOST_RANKS)


def decode_blocks(layout: CacheLayout, *, resident_tokens: int, serving: ServingTerms) -> int:
    """Blocks one decoding request holds once it has `resident_tokens` tokens in the cache."""
    check_range("tokens", resident_tokens, 1, MOST_TOKENS)
    in_flight = serving.steps_in_flight
    return sum(
        max(_held(page, resident_tokens, resident_tokens - 1 - in_flight, serving) for page in set(group.pages))
        for group in layout.groups
    )


def prefill_peak_blocks(layout: CacheLayout, *, prompt_tokens: int, serving: ServingTerms) -> int:
    """The most blocks one request holds while its prompt is computed in chunks."""
    check_range("tokens", prompt_tokens, 1, MOST_TOKENS)
    ends = _last_chunk_ends(layout, prompt_tokens, serving)
    overlap = 1 + serving.steps_in_flight
    peak = 0
    for index in range(min(len(ends), _MOST_CHUNKS)):
        # Tokens freed before a chunk starts: those of chunks whose results have come in.
        earlier = ends[index + 1 : index + 1 + overlap]
        processed = earlier[-1] if len(earlier) == overlap else 0
        held = sum(
            max(_held_in_prefill(page, ends[index], earlier, processed, serving) for page in set(group.pages))
            for group in layout.groups
        )
        peak = max(peak, held)
    return peak


def _last_chunk_ends(layout: CacheLayout, prompt_tokens: int, serving: ServingTerms) -> list[int]:
    """Where the last chunks of a prompt end, the last first.

    Chunks are as long as a step allows. With `align` states they end at block boundaries, the last of which is
    before the prompt's last token; a block longer than a step is reached in several
    (vllm/v1/core/sched/scheduler.py::_mamba_block_aligned_split).
    """
    chunk = serving.prefill_chunk_tokens
    block = _state_block(layout) if serving.state_cache_mode is StateCacheMode.ALIGN else None
    unit = prompt_tokens if block is None else max(block, chunk // block * block)
    ends = [prompt_tokens]
    while ends[-1] > 0 and len(ends) < _MOST_CHUNKS + 1 + serving.steps_in_flight:
        last = ends[-1] - 1
        start = last // unit * unit
        before = start + (last - start) // chunk * chunk
        if block is not None and ends[-1] == prompt_tokens:
            before = max(before, last // block * block)
        ends.append(before)
    return [end for end in ends if end > 0]


def _state_block(layout: CacheLayout) -> int | None:
    return next(
        (page.block_size_tokens for group in layout.groups for page in group.pages if page.kind is PageKind.STATE),
        None,
    )


def wasted_ratio(layout: CacheLayout, *, resident_tokens: int, serving: ServingTerms) -> float:
    """The share of a request's block bytes that holds no token: block tails, short groups, padded pages."""
    blocks = decode_blocks(layout, resident_tokens=resident_tokens, serving=serving)
    paid = blocks * sum(layout.bytes_per_block)
    if paid == 0:
        return 0.0
    return 1 - min(paid, content_bytes(layout, resident_tokens, serving)) / paid


def content_bytes(layout: CacheLayout, tokens: int, serving: ServingTerms) -> int:
    """Bytes of one request's blocks that hold something it still needs, on all pipeline stages."""
    total = 0
    for group in layout.groups:
        for page in group.pages:
            match page.kind:
                case PageKind.STATE:
                    total += page.row_bytes
                case PageKind.SLIDING:
                    total += min(tokens, page.window_tokens or 1) * page.heads * page.row_bytes
                case PageKind.CHUNKED:
                    total += min(tokens, page.chunk_tokens or 1) * page.heads * page.row_bytes
                case PageKind.CROSS:
                    total += serving.encoder_tokens * page.heads * page.row_bytes
                case PageKind.FULL | PageKind.MLA:
                    ranks = serving.decode_context_parallel if page.dcp_sharded else 1
                    total += ceil_div(tokens, ranks) * page.heads * page.row_bytes
    return total


def _held(page: PageSpec, tokens: int, processed: int, serving: ServingTerms) -> int:
    """Blocks of one group when `tokens` have a slot and `processed` of them are done with.

    v1/core/single_type_kv_cache_manager.py: get_num_skipped_tokens and remove_skipped_blocks of each manager.
    """
    block = page.block_size_tokens
    match page.kind:
        case PageKind.FULL | PageKind.MLA:
            span = block * (serving.decode_context_parallel if page.dcp_sharded else 1)
            return ceil_div(tokens, span)
        case PageKind.SLIDING:
            skipped = max(0, processed - (page.window_tokens or 1) + 1 - page.retained_tokens)
            return ceil_div(tokens, block) - skipped // block
        case PageKind.CHUNKED:
            chunk = page.chunk_tokens or 1
            return ceil_div(tokens, block) - max(0, processed) // chunk * chunk // block
        case PageKind.CROSS:
            return ceil_div(serving.encoder_tokens, block)
        case PageKind.STATE:
            return _held_states(page, tokens, processed, serving)


def _held_in_prefill(page: PageSpec, end: int, earlier: list[int], processed: int, serving: ServingTerms) -> int:
    """As `_held`, for a chunk: in `align` mode the states at the ends of chunks still in flight stay, too."""
    if page.kind is PageKind.STATE and serving.state_cache_mode is StateCacheMode.ALIGN:
        blocks = {(one - 1) // page.block_size_tokens for one in (end, *earlier)}
        return len(blocks) + page.speculative_blocks
    return _held(page, end, processed, serving)


def _held_states(page: PageSpec, tokens: int, processed: int, serving: ServingTerms) -> int:
    """State blocks: the running state, one slot per draft, and in `align` mode the state of the block before
    while the step that crossed the boundary still copies from it (MambaManager.allocate_new_blocks).
    """
    running = 1 + page.speculative_blocks
    match serving.state_cache_mode:
        case StateCacheMode.NONE:
            return running
        case StateCacheMode.ALL:
            return ceil_div(tokens, page.block_size_tokens) + page.speculative_blocks
        case StateCacheMode.ALIGN:
            last = (tokens - 1) // page.block_size_tokens
            kept_from = max(0, processed - 1) // page.block_size_tokens
            return running + min(1, max(0, last - kept_from))
