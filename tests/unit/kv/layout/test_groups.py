"""Which layers share a block table: each rule of get_kv_cache_groups where it just holds and where it just does not."""

from dataclasses import replace

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.capacity import plan_layout, pool_capacity
from kvdiag.kv.layout.groups import PageGroup, group_pages
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode
from tests.unit.kv.refused import refused

TERMS = RequestTerms(max_in_flight_tokens=2048, encoder_tokens=1500)
FULL = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=8, row_bytes=512, variant="bf16 128 128")
WIDE = replace(FULL, heads=16, row_bytes=256, variant="bf16 64 64")
"""Of the same size, and another shape."""
SLIDING = replace(FULL, kind=PageKind.SLIDING, window_tokens=1024)
CHUNKED = replace(FULL, kind=PageKind.CHUNKED, chunk_tokens=8192)
CROSS = replace(FULL, kind=PageKind.CROSS)
LATENT = replace(FULL, kind=PageKind.MLA, heads=1, row_bytes=1152)
PACKED = replace(FULL, kind=PageKind.MLA, block_size_tokens=64, heads=1, row_bytes=656)
INDEXER = replace(PACKED, row_bytes=132, variant="indexer")
STATE = PageSpec(kind=PageKind.STATE, block_size_tokens=16, heads=1, row_bytes=60_000, dcp_sharded=False)
DOUBLE = replace(FULL, block_size_tokens=32, heads=4)
"""Of the same size, with 32 tokens."""


def layers(pages: list[PageSpec], *, hybrid_manager: bool = True) -> list[tuple[int, ...]]:
    """Which layers are in each group."""
    return [group.layers for group in group_pages(pages, hybrid_manager=hybrid_manager)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FULL, WIDE),
        (FULL, replace(FULL, heads=2)),
        (FULL, LATENT),
        (LATENT, FULL),
        (SLIDING, replace(SLIDING, heads=2)),
        (CHUNKED, replace(CHUNKED, heads=2)),
        (CROSS, replace(CROSS, heads=2)),
        (STATE, replace(STATE, variant="another shape")),
    ],
    ids=["shapes", "heads", "full and latent", "latent and full", "windows", "chunks", "encoders", "states"],
)
def test_layers_that_need_equally_many_blocks_share_a_table(one: PageSpec, other: PageSpec) -> None:
    """UniformTypeKVCacheSpecs: layers of one type, with any page sizes."""
    assert [(0, 1, 2)] == layers([one, other, one])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FULL, DOUBLE),
        (FULL, replace(FULL, dcp_sharded=False)),
        (FULL, SLIDING),
        (SLIDING, FULL),
        (SLIDING, replace(SLIDING, window_tokens=512)),
        (SLIDING, CHUNKED),
        (CHUNKED, SLIDING),
        (CHUNKED, replace(CHUNKED, chunk_tokens=4096)),
        (CROSS, FULL),
        (FULL, CROSS),
        (STATE, replace(STATE, speculative_blocks=1)),
        (STATE, replace(STATE, checkpoint_blocks=1)),
        (STATE, replace(STATE, row_bytes=40_000)),
        (STATE, replace(FULL, dcp_sharded=False)),
    ],
)
def test_layers_that_do_not_have_a_table_each(one: PageSpec, other: PageSpec) -> None:
    """Of equally large pages, one group for each kind; the larger page of two states pads the smaller."""
    groups = group_pages([one, other, one, other])

    assert [(0, 2), (1, 3)] == [group.layers for group in groups]
    assert 1 == len({page.page_bytes for group in groups for page in group.pages})


def test_full_layers_of_unlike_shape_are_not_mixed_beside_windows() -> None:
    """4 of each: three groups, none with two shapes, as FullAttentionSpec.merge asserts."""
    assert [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)] == layers([FULL] * 4 + [WIDE] * 4 + [SLIDING] * 4)


@pytest.mark.parametrize(
    ("fewer", "more", "sizes"),
    [
        (2, 2, [2, 2]),
        (2, 3, [2, 2, 1]),
        (4, 5, [4, 5]),
        (3, 4, [3, 4]),
        (5, 8, [5, 4, 4]),
        (1, 3, [1, 1, 1, 1]),
        (13, 12, [13, 12]),
        (12, 18, [12, 9, 9]),
    ],
)
def test_groups_are_as_large_as_the_rarer_kind(fewer: int, more: int, sizes: list[int]) -> None:
    """Unless the other is less than one and a half times as many: 3 is not less than 1.5 x 2."""
    assert sizes == [len(group) for group in layers([FULL] * fewer + [SLIDING] * more)]


def test_the_larger_page_decides_and_the_smaller_has_longer_blocks() -> None:
    """A third of the bytes, three times the tokens."""
    third = replace(SLIDING, heads=8, row_bytes=512)
    wide = replace(FULL, heads=24)

    assert [(16, 196_608), (48, 196_608)] == [
        (group.page.block_size_tokens, group.page.page_bytes) for group in group_pages([wide, third])
    ]


def test_latent_pages_that_divide_have_longer_blocks_beside_states() -> None:
    """1,152 x 16 tokens is a quarter of a state of 73,728 bytes."""
    state = replace(STATE, row_bytes=73_728)

    assert [(64, 73_728), (16, 73_728)] == [
        (group.page.block_size_tokens, group.page.page_bytes) for group in group_pages([LATENT, state])
    ]


@pytest.mark.parametrize("beside", [replace(CHUNKED, row_bytes=511), STATE])
def test_latent_pages_that_do_not_divide_are_refused_beside_anything_but_windows(beside: PageSpec) -> None:
    """Only windows are made full next to latent pages."""
    with refused("kv_lora_rank"):
        group_pages([LATENT, beside])


@pytest.mark.parametrize(
    ("others", "allowed"), [([], True), ([replace(CHUNKED, row_bytes=511)], False), ([STATE], False)]
)
def test_windows_beside_latent_pages_are_made_full_where_nothing_else_is(others: list[PageSpec], allowed: bool) -> None:
    """One table of all, each page of its own size, in the latent layers' blocks."""
    pages = [LATENT, replace(SLIDING, row_bytes=511, block_size_tokens=32), *others]

    if not allowed:
        with pytest.raises(KvModelError):
            group_pages(pages)
        return
    (group,) = group_pages(pages)
    assert [(PageKind.MLA, 16, 18_432), (PageKind.FULL, 16, 8 * 16 * 511)] == [
        (page.kind, page.block_size_tokens, page.page_bytes) for page in group.pages
    ]


@pytest.mark.parametrize("local", [SLIDING, CHUNKED], ids=["window", "chunk"])
def test_without_the_hybrid_manager_local_layers_take_the_full_ones_blocks(local: PageSpec) -> None:
    """320 tokens are 10 blocks of 32, in every layer; what was kept below a window is no longer counted."""
    short = replace(local, retained_tokens=5)

    (group,) = group_pages([DOUBLE, short], hybrid_manager=False)

    assert 10 == group.admission_blocks(320, TERMS)
    assert [(PageKind.FULL, 32, 0)] * 2 == [
        (page.kind, page.block_size_tokens, page.retained_tokens) for page in group.pages
    ]
    assert 65_536 + 131_072 == group.bytes_per_block()


def test_without_the_hybrid_manager_what_is_shared_and_what_is_not_are_promoted_apart() -> None:
    """Two tables, since context-parallel ranks share only one of them."""
    whole = [replace(page, dcp_sharded=False) for page in (FULL, SLIDING)]

    groups = group_pages([FULL, SLIDING, *whole], hybrid_manager=False)

    assert [(0, 1), (2, 3)] == [group.layers for group in groups]
    assert {PageKind.FULL} == {page.kind for group in groups for page in group.pages}


@pytest.mark.parametrize("other", [replace(SLIDING, window_tokens=512), CHUNKED], ids=["another window", "a chunk"])
def test_without_the_hybrid_manager_layers_of_two_windows_are_not_described_as_one(other: PageSpec) -> None:
    """A full layer and one window are; what has another, or chunks, has a table of its own."""
    whole = replace(FULL, dcp_sharded=False)

    assert [(0, 1), (2, 3), (4, 5)] == layers([FULL, SLIDING, other, other, whole, whole], hybrid_manager=False)


@pytest.mark.parametrize(
    "pages",
    [[FULL, DOUBLE, SLIDING], [SLIDING, CHUNKED], [FULL, CROSS], [STATE, FULL]],
    ids=["two block sizes", "no full layer", "an encoder's", "states"],
)
def test_without_the_hybrid_manager_some_models_cannot_be_served(pages: list[PageSpec]) -> None:
    """All must become attention of one type."""
    with refused("hybrid_kv_cache_manager"):
        group_pages(pages, hybrid_manager=False)


def test_bytes_and_blocks_of_a_group() -> None:
    """The sum over its layers, or over some of them; of unlike pages the one with the most blocks counts."""
    group = PageGroup(layers=(3, 5), pages=(replace(STATE, speculative_blocks=1), replace(STATE, row_bytes=40_000)))
    aligned = replace(TERMS, state_cache_mode=StateCacheMode.ALIGN)

    assert (100_000, 40_000, 0) == tuple(group.bytes_per_block(each) for each in (None, frozenset({5}), frozenset()))
    assert 3 == group.admission_blocks(100, aligned)


def test_without_groups_nothing_is_padded() -> None:
    """And with equal ones neither."""
    assert [0, 0, 1] == [plan_layout([FULL] * 4 + [SLIDING] * more).padding_layers for more in (0, 4, 3)]
    assert 0 == plan_layout(()).padding_layers


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
    layout = plan_layout([PACKED, INDEXER] * 61)

    assert (1, (61 * 788 * 64,)) == (len(layout.groups), layout.bytes_per_block)


def test_rarer_layers_set_the_group_size_and_the_rest_is_padded() -> None:
    """Gemma-3-27b: 10 full and 52 sliding layers become 1 + 6 groups of 10, 8 layers of them padding."""
    layout = plan_layout(([SLIDING] * 5 + [FULL]) * 10 + [SLIDING] * 2)

    assert (7, 8) == (len(layout.groups), layout.padding_layers)


def test_layers_are_dealt_out_in_turn() -> None:
    """Layer i of a kind goes to group i modulo the number of groups, so that pipeline stages stay even."""
    groups = group_pages([FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING])

    assert [(0, 3), (1, 4), (2, 5)] == [group.layers for group in groups]


def test_pages_that_do_not_divide_are_padded() -> None:
    """Attention pages that cannot be made equal by tokens are padded to the largest."""
    odd = replace(SLIDING, heads=3)
    groups = group_pages([FULL] * 4 + [odd] * 4)

    assert {FULL.page_bytes} == {group.page.page_bytes for group in groups}


def test_without_the_hybrid_manager_windows_cost_their_full_length() -> None:
    """One group, and a request of 32,768 tokens takes 2,048 blocks."""
    layout = plan_layout([FULL] * 10 + [SLIDING] * 52, hybrid_manager=False)

    assert (1, 2048) == (len(layout.groups), layout.admission_blocks(32_768, TERMS))


def test_without_the_hybrid_manager_a_model_of_windows_alone_keeps_them() -> None:
    """Only a mix is promoted."""
    assert 193 == plan_layout([SLIDING] * 32, hybrid_manager=False).admission_blocks(32_768, TERMS)


def test_uneven_stages_have_blocks_of_their_own_size() -> None:
    """A stage's block costs what its layers of the widest group take."""
    layout = plan_layout([FULL] * 5, stages=[0, 0, 0, 1, 1])

    assert (3 * FULL.page_bytes, 2 * FULL.page_bytes) == layout.bytes_per_block
