"""Layers -> groups -> bytes per block."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.capacity import plan_layout, pool_capacity
from kvdiag.kv.layout.groups import group_pages, padding_layers
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode

FULL = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=8, row_bytes=512, variant="bf16 128 128")
SLIDING = replace(FULL, kind=PageKind.SLIDING, window_tokens=1024)
CHUNKED = replace(FULL, kind=PageKind.CHUNKED, chunk_tokens=8192)
LATENT = PageSpec(kind=PageKind.MLA, block_size_tokens=64, heads=1, row_bytes=656)
INDEXER = replace(LATENT, row_bytes=132, variant="indexer")
STATE = PageSpec(kind=PageKind.STATE, block_size_tokens=16, heads=1, row_bytes=60_000, dcp_sharded=False)
TERMS = RequestTerms(max_in_flight_tokens=2048, max_encoder_tokens=1500)


def sizes(pages: list[PageSpec], **options: Any) -> list[int]:
    """How many layers each group has."""
    return [len(group.layers) for group in group_pages(pages, **options)]


def test_equal_layers_are_one_group() -> None:
    """A dense model has one block table."""
    assert [32] == sizes([FULL] * 32)


def test_no_layers_are_no_groups() -> None:
    """A model without a cache needs no blocks, and one block exists all the same."""
    capacity = pool_capacity(plan_layout([]), pool_bytes=1 << 30, context_tokens=4096, terms=TERMS)

    assert ((), 1, 0, 0.0) == (
        group_pages([]),
        capacity.num_blocks,
        capacity.blocks_per_request,
        capacity.max_concurrency,
    )


def test_latent_rows_and_indexer_rows_share_a_block_table() -> None:
    """Pages of different size in one group add up: 61 x (656 + 132) x 64 bytes a block."""
    layout = plan_layout([LATENT, INDEXER] * 61)

    assert (1, (61 * 788 * 64,)) == (len(layout.groups), layout.bytes_per_block)


def test_rarer_layers_set_the_group_size_and_the_rest_is_padded() -> None:
    """Gemma-3-27b: 10 full and 52 sliding layers become 1 + 6 groups of 10, 8 layers of them padding."""
    groups = group_pages(([SLIDING] * 5 + [FULL]) * 10 + [SLIDING] * 2)

    assert (7, 8) == (len(groups), padding_layers(groups))


def test_kinds_of_similar_number_are_padded_to_the_larger() -> None:
    """13 full and 12 sliding layers are two groups of 13, since 13 < 1.5 x 12."""
    assert [13, 12] == sizes([FULL] * 13 + [SLIDING] * 12)


def test_kinds_at_exactly_one_and_a_half_use_the_smaller() -> None:
    """18 is not less than 1.5 x 12: groups of 12 and two of 9."""
    assert [12, 9, 9] == sizes([FULL] * 12 + [SLIDING] * 18)


def test_layers_are_dealt_out_in_turn() -> None:
    """Layer i of a kind goes to group i modulo the number of groups, so that pipeline stages stay even."""
    groups = group_pages([FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING])

    assert [(0, 3), (1, 4), (2, 5)] == [group.layers for group in groups]


def test_smaller_pages_get_longer_blocks() -> None:
    """A page of half the size holds twice the tokens (Gemma-4-31b at TP 2: 32 and 16)."""
    wide = replace(SLIDING, heads=16)
    groups = group_pages([FULL] * 10 + [wide] * 50)

    assert {32, 16} == {group.page.block_size_tokens for group in groups}


def test_pages_that_do_not_divide_are_padded() -> None:
    """Attention pages that cannot be made equal by tokens are padded to the largest."""
    odd = replace(SLIDING, heads=3)
    groups = group_pages([FULL] * 4 + [odd] * 4)

    assert {FULL.page_bytes} == {group.page.page_bytes for group in groups}


def test_state_pages_are_padded() -> None:
    """A state page grows to the attention page beside it."""
    groups = group_pages([FULL] * 2 + [STATE] * 6)

    assert [FULL.page_bytes] * 4 == [group.page.page_bytes for group in groups]


def test_latent_pages_that_do_not_divide_make_sliding_layers_full() -> None:
    """MLA cannot be padded, so a sliding drafter beside it is allocated in full, in one group."""
    drafter = replace(SLIDING, block_size_tokens=64, heads=1, row_bytes=1000)
    groups = group_pages([LATENT] * 4 + [drafter])

    assert (1, PageKind.FULL) == (len(groups), groups[0].pages[-1].kind)


def test_latent_pages_beside_states_that_do_not_divide_are_refused() -> None:
    """The engine cannot serve an MLA page that is no divisor of a state page, and the model says so."""
    with pytest.raises(KvModelError) as caught:
        group_pages([LATENT] * 4 + [STATE] * 4)

    assert "kv_lora_rank" == caught.value.field


def test_without_the_hybrid_manager_windows_cost_their_full_length() -> None:
    """One group, and a request of 32,768 tokens takes 2,048 blocks."""
    layout = plan_layout([FULL] * 10 + [SLIDING] * 52, hybrid_manager=False)

    assert (1, 2048) == (len(layout.groups), layout.admission_blocks(32_768, TERMS))


def test_without_the_hybrid_manager_a_model_of_windows_alone_keeps_them() -> None:
    """Only a mix is promoted."""
    layout = plan_layout([SLIDING] * 32, hybrid_manager=False)

    assert 193 == layout.admission_blocks(32_768, TERMS)


def test_without_the_hybrid_manager_states_are_refused() -> None:
    """States cannot be one type with attention."""
    with pytest.raises(KvModelError) as caught:
        group_pages([FULL] * 2 + [STATE] * 2, hybrid_manager=False)

    assert "hybrid_kv_cache_manager" == caught.value.field


@pytest.mark.parametrize(
    ("page", "tokens", "expected"),
    [
        (FULL, 1, 1),
        (FULL, 16, 1),
        (FULL, 17, 2),
        (SLIDING, 100, 8),
        (SLIDING, 131_072, 193),
        (CHUNKED, 100, 7),
        (CHUNKED, 131_072, 640),
        (STATE, 131_072, 1),
        (replace(FULL, kind=PageKind.CROSS), 448, 94),
    ],
)
def test_blocks_planned_for_a_request(page: PageSpec, tokens: int, expected: Any) -> None:
    """Each kind's admission bound: windows and chunks plus what is in flight, one state, the encoder."""
    assert expected == page.admission_blocks(tokens, TERMS)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(StateCacheMode.NONE, 1 + 3), (StateCacheMode.ALIGN, 2 + 3 + 1), (StateCacheMode.ALL, 64 + 3)],
)
def test_blocks_planned_for_states(mode: StateCacheMode, expected: Any) -> None:
    """State blocks by cache mode, with three drafts and one prefill checkpoint."""
    page = replace(STATE, speculative_blocks=3, checkpoint_blocks=1)

    assert expected == page.admission_blocks(1024, replace(TERMS, state_cache_mode=mode))


def test_context_parallel_divides_what_it_shards() -> None:
    """A block of a sharded group holds the tokens of all ranks, a state's does not."""
    terms = replace(TERMS, decode_context_parallel=8)

    assert (1024, 1) == (FULL.admission_blocks(131_072, terms), STATE.admission_blocks(131_072, terms))


def test_context_parallel_refuses_windows() -> None:
    """VLLM asserts that sliding windows and decode context parallel do not meet."""
    with pytest.raises(KvModelError) as caught:
        SLIDING.admission_blocks(1024, replace(TERMS, decode_context_parallel=2))

    assert "decode_context_parallel" == caught.value.field


def test_drafts_lengthen_a_window_by_what_they_reread() -> None:
    """Several draft modules keep tokens below the window."""
    assert 194 == replace(SLIDING, retained_tokens=16).admission_blocks(131_072, TERMS)


def test_the_smallest_rank_decides() -> None:
    """Two stages with different pools get the blocks of the poorer one."""
    layout = plan_layout([FULL] * 4, stages=[0, 0, 1, 1])
    capacity = pool_capacity(layout, pool_bytes=[100 * 65536 * 2, 50 * 65536 * 2], context_tokens=160, terms=TERMS)

    assert 50 == capacity.num_blocks


def test_uneven_stages_have_blocks_of_their_own_size() -> None:
    """A stage's block costs what its layers of the widest group take."""
    layout = plan_layout([FULL] * 5, stages=[0, 0, 0, 1, 1])

    assert (3 * FULL.page_bytes, 2 * FULL.page_bytes) == layout.bytes_per_block


def test_a_pool_of_exactly_one_request_is_refused_for_the_null_block() -> None:
    """128 blocks do not admit a request of 128; 129 do."""
    layout = plan_layout([FULL])
    fits = [
        pool_capacity(layout, pool_bytes=blocks * FULL.page_bytes, context_tokens=2048, terms=TERMS).admits_one
        for blocks in (128, 129)
    ]

    assert [False, True] == fits


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"pool_bytes": -1, "context_tokens": 16}, "kv_pool_bytes"),
        ({"pool_bytes": 1 << 60, "context_tokens": 16}, "kv_pool_bytes"),
        ({"pool_bytes": 1 << 30, "context_tokens": 0}, "context"),
        ({"pool_bytes": [1 << 30, 1 << 30], "context_tokens": 16}, "kv_pool_bytes"),
    ],
)
def test_impossible_pools_are_refused(arguments: dict[str, Any], field: str) -> None:
    """A negative or absurd pool, no context, or pools for stages that are not there name their field."""
    with pytest.raises(KvModelError) as caught:
        pool_capacity(plan_layout([FULL]), terms=TERMS, **arguments)

    assert field == caught.value.field


def test_bytes_per_token_exist_only_without_windows_and_states() -> None:
    """A dense model has one figure, a model with windows none."""
    dense = plan_layout([FULL] * 32).bytes_per_token()
    mixed = plan_layout([FULL] * 2 + [SLIDING] * 2).bytes_per_token()

    assert ((131_072,), None) == (dense, mixed)
