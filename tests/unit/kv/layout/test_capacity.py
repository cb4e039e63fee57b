"""Pools into blocks, tokens and requests: a layout of 64 KiB a layer and block, reckoned by hand."""

from dataclasses import replace

import pytest

from kvdiag.kv.layout.capacity import Capacity, longest_context_tokens, plan_layout, pool_capacity
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms
from tests.unit.kv.refused import refused

PIB = 1 << 50
FULL = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=8, row_bytes=512)
SLIDING = replace(FULL, kind=PageKind.SLIDING, window_tokens=1024)
STATE = PageSpec(kind=PageKind.STATE, block_size_tokens=8, heads=1, row_bytes=65_536, dcp_sharded=False)
TERMS = RequestTerms(max_in_flight_tokens=2048, encoder_tokens=1500)
PAGE_BYTES = 65_536
DENSE = plan_layout([FULL] * 2)
CAPACITY = Capacity(num_blocks=101, bytes_per_block=(131_072,), context_tokens=160, blocks_per_request=10)


def test_what_a_pool_of_101_blocks_holds() -> None:
    """10.1 requests of 10 blocks as the engine counts, 1,616 tokens; really 10, since one block is the null block."""
    assert (10.1, 1616, (1_310_720,), 10, True) == (
        CAPACITY.max_concurrency,
        CAPACITY.capacity_tokens,
        CAPACITY.needed_bytes,
        CAPACITY.whole_requests,
        CAPACITY.admits_one,
    )


@pytest.mark.parametrize(
    ("blocks", "per_request", "concurrency", "whole", "admits"),
    [
        (0, 10, 0.0, 0, False),
        (10, 10, 1.0, 0, False),
        (11, 10, 1.1, 1, True),
        (100, 10, 10.0, 9, True),
        (1, 0, 0.0, 0, True),
        (0, 0, 0.0, 0, False),
    ],
)
def test_requests_that_fit(blocks: int, per_request: int, concurrency: float, whole: int, admits: bool) -> None:
    """A request that needs no blocks is not divided by."""
    capacity = replace(CAPACITY, num_blocks=blocks, blocks_per_request=per_request)

    assert (concurrency, whole, admits) == (capacity.max_concurrency, capacity.whole_requests, capacity.admits_one)


@pytest.mark.parametrize(
    ("pools", "expected"),
    [(2 * PAGE_BYTES * 7, 7), (2 * PAGE_BYTES * 7 - 1, 6), (0, 0), (PIB, PIB // (2 * PAGE_BYTES))],
)
def test_blocks_of_a_pool(pools: int, expected: int) -> None:
    """Whole ones, down to none at all and up to a pebibyte."""
    capacity = pool_capacity(DENSE, pool_bytes=pools, context_tokens=33, terms=TERMS)

    assert (expected, 3, 33) == (capacity.num_blocks, capacity.blocks_per_request, capacity.context_tokens)


@pytest.mark.parametrize(
    ("pools", "context", "field"),
    [
        (-1, 16, "kv_pool_bytes"),
        (PIB + 1, 16, "kv_pool_bytes"),
        ((1, 1), 16, "kv_pool_bytes"),
        ((), 16, "kv_pool_bytes"),
        (1, 0, "context"),
        (1, (1 << 30) + 1, "context"),
    ],
)
def test_pools_and_contexts_that_cannot_be(pools: int | tuple[int, ...], context: int, field: str) -> None:
    """Each names its field."""
    with refused(field):
        pool_capacity(DENSE, pool_bytes=pools, context_tokens=context, terms=TERMS)


def test_the_longest_context_may_be_2_to_the_30() -> None:
    """2**26 blocks of 16 tokens."""
    capacity = pool_capacity(DENSE, pool_bytes=PIB, context_tokens=1 << 30, terms=TERMS)

    assert 1 << 26 == capacity.blocks_per_request


def test_a_stage_without_pages_does_not_decide() -> None:
    """The second of three stages has no layer with a cache: its pool size, however small, is ignored."""
    layout = plan_layout([FULL] * 2, stages=[0, 2])

    capacity = pool_capacity(layout, pool_bytes=[9 * PAGE_BYTES, 1, 8 * PAGE_BYTES], context_tokens=16, terms=TERMS)

    assert (3, (PAGE_BYTES, 0, PAGE_BYTES), 8) == (layout.ranks, capacity.bytes_per_block, capacity.num_blocks)


@pytest.mark.parametrize(
    ("blocks", "most", "requests", "expected"),
    [
        (0, 1000, 1, 0),
        (1, 1000, 1, 0),
        (2, 1000, 1, 16),
        (3, 1000, 1, 32),
        (3, 20, 1, 20),
        (3, 1, 1, 1),
        (3, 1000, 2, 16),
        (3, 1000, 3, 0),
        (62, 1000, 1, 976),
        (63, 1000, 1, 992),
        (64, 1000, 1, 1000),
    ],
)
def test_the_longest_context_of_so_many_requests(blocks: int, most: int, requests: int, expected: int) -> None:
    """16 tokens for each block of a request, one block kept back, and no more than is looked for."""
    assert expected == longest_context_tokens(
        DENSE, num_blocks=blocks, most_tokens=most, terms=TERMS, requests=requests
    )


@pytest.mark.parametrize(
    ("pages", "ranks", "expected"),
    [
        ([FULL] * 2, 1, 8192),
        ([FULL] * 2, 4, 2048),
        ([FULL] * 2, 3, 131_072 / 48),
        ([replace(FULL, dcp_sharded=False)] * 2, 4, 8192),
        ([FULL, replace(FULL, kind=PageKind.MLA, heads=1)], 1, 4608),
        ([SLIDING] * 2, 1, None),
        ([STATE] * 2, 1, None),
        ([FULL, STATE], 1, None),
    ],
)
def test_bytes_of_a_token(pages: list[PageSpec], ranks: int, expected: float | None) -> None:
    """A page of 16 tokens of each layer, shared by context-parallel ranks; none with windows or states."""
    actual = plan_layout(pages).bytes_per_token(ranks)

    assert (None if expected is None else (expected,)) == actual
    assert expected is None or type(expected) is type((actual or (None,))[0])


@pytest.mark.parametrize(
    ("pages", "expected"),
    [([FULL] * 2, 16), ([FULL, STATE], 16), ([FULL, replace(SLIDING, heads=4)], 16), ([STATE], None), ([], None)],
)
def test_tokens_of_a_block_that_the_engine_reports(pages: list[PageSpec], expected: int | None) -> None:
    """The smallest of those that hold tokens; a state's 8 are none."""
    assert expected == plan_layout(pages).block_size_tokens


def test_what_short_groups_pay_for() -> None:
    """4 full and 3 windowed layers are two groups of 4, one place of them empty."""
    layout = plan_layout([FULL] * 4 + [SLIDING] * 3)

    assert (1, (4 * PAGE_BYTES,)) == (layout.padding_layers, layout.bytes_per_block)
    assert (0, (0,)) == (plan_layout([]).padding_layers, plan_layout([]).bytes_per_block)
