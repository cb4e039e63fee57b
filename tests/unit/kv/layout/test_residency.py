"""Blocks really held by one request, as vLLM's KV cache manager frees and allocates them."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.capacity import plan_layout
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode
from kvdiag.kv.layout.residency import content_bytes, decode_blocks, wasted_ratio
from tests.unit.kv.refused import refused

FULL = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=1, row_bytes=64)
SLIDING = replace(FULL, kind=PageKind.SLIDING, window_tokens=128)
CHUNKED = replace(FULL, kind=PageKind.CHUNKED, chunk_tokens=256)
STATE = PageSpec(kind=PageKind.STATE, block_size_tokens=16, heads=1, row_bytes=512, dcp_sharded=False)
SERVING = RequestTerms(max_in_flight_tokens=0, encoder_tokens=0)


CROSS = replace(FULL, kind=PageKind.CROSS)
ALIGN = {"state_cache_mode": StateCacheMode.ALIGN}
ALL = {"state_cache_mode": StateCacheMode.ALL}
DRAFTING = replace(STATE, speculative_blocks=3)


@pytest.mark.parametrize(
    ("pages", "serving", "held"),
    [
        # Full attention holds every token, a block at a time; with DCP 4 a block of 16 spans 64 tokens.
        ([FULL] * 4, {}, {1: 1, 16: 1, 17: 2, 16_000: 1000}),
        ([FULL], {"decode_context_parallel": 4}, {1000: 16}),
        ([replace(FULL, dcp_sharded=False)], {}, {1000: 63}),
        # A window of 128 holds 8 blocks of 16, or 9 while it straddles one more.
        ([SLIDING] * 4, {}, {100: 7, 128: 8, 129: 9, 144: 8, 145: 9, 161: 9, 16_000: 8, 16_001: 9, 16_017: 9}),
        # Steps in flight hold it longer, and what is retained below it stays, of 15,999 tokens that are done with.
        ([SLIDING], {"steps_in_flight": 1}, {16_017: 9}),
        ([SLIDING], {"steps_in_flight": 17}, {16_017: 10}),
        ([replace(SLIDING, retained_tokens=16)], {}, {16_000: 1000 - (15_999 - 127 - 16) // 16}),
        ([replace(SLIDING, retained_tokens=160)], {}, {16_000: 1000 - (15_999 - 127 - 160) // 16}),
        ([replace(SLIDING, block_size_tokens=1)], {}, {100: 100, 200: 128}),
        # Past a chunk's end only the new chunk's blocks are held.
        ([CHUNKED] * 4, {}, {100: 7, 256: 16, 257: 1, 300: 3, 512: 16, 513: 1}),
        ([CHUNKED], {"steps_in_flight": 1}, {1: 1}),
        ([replace(CHUNKED, chunk_tokens=1, block_size_tokens=1)], {"steps_in_flight": 1}, {1: 1}),
        ([FULL] * 2 + [SLIDING] * 6, {}, {16_000: 1000 + 3 * 8}),
        # An encoder's tokens stay for the whole request.
        ([CROSS] * 4, {"encoder_tokens": 1500}, {10: 94}),
        # A state takes one block, in align mode two in the step that crosses the end of a block; drafts one each.
        ([STATE] * 4, {}, {1000: 1}),
        ([STATE] * 4, ALIGN, {16: 1, 17: 2, 18: 1}),
        ([STATE] * 4, ALL, {1000: 63}),
        ([replace(STATE, block_size_tokens=1)], ALIGN, {1: 1, 2: 2, 3: 2}),
        ([DRAFTING], {}, {1000: 1 + 3}),
        ([DRAFTING], ALL, {1000: 63 + 3}),
        ([DRAFTING], ALIGN, {1000: 1 + 3}),
        # The token in slot 40 is in block 2; steps that are done end in block 0. One state is copied from.
        ([DRAFTING], {**ALIGN, "steps_in_flight": 30}, {40: 2 + 3}),
    ],
)
def test_blocks_that_a_decoding_request_holds(
    pages: list[PageSpec], serving: dict[str, Any], held: dict[int, int]
) -> None:
    """By the tokens that have a slot, as each kind's manager frees and allocates them."""
    terms = replace(SERVING, **serving)

    assert held == {tokens: decode_blocks(plan_layout(pages), resident_tokens=tokens, terms=terms) for tokens in held}


def test_waste_of_a_short_request_is_its_block_tail() -> None:
    """One token in a block of 16 wastes 15/16 of it."""
    assert 15 / 16 == wasted_ratio(plan_layout([FULL] * 4), resident_tokens=1, terms=SERVING)


def test_waste_of_padding_layers() -> None:
    """Groups of 10 with 8 padding layers of 70 waste at least those when blocks are full."""
    layout = plan_layout([FULL] * 10 + [replace(SLIDING, window_tokens=1 << 20)] * 52)

    assert 8 / 70 == pytest.approx(wasted_ratio(layout, resident_tokens=1600, terms=SERVING))


@pytest.mark.parametrize(
    ("page", "tokens", "expected"),
    [
        (FULL, 1000, 250 * 3 * 64),
        (replace(FULL, dcp_sharded=False), 1000, 1000 * 3 * 64),
        (SLIDING, 1000, 128 * 3 * 64),
        (SLIDING, 100, 100 * 3 * 64),
        (CHUNKED, 1000, 256 * 3 * 64),
        (CHUNKED, 100, 100 * 3 * 64),
        (replace(FULL, kind=PageKind.CROSS), 10, 1500 * 3 * 64),
        (STATE, 1000, 512),
    ],
)
def test_bytes_that_a_request_still_needs(page: PageSpec, tokens: int, expected: int) -> None:
    """Of full attention the tokens, a quarter of them with DCP 4; of others the window, the chunk, the encoder's tokens
    or the state, in every layer.
    """
    heads = 1 if page.kind is PageKind.STATE else 3
    layout = plan_layout([replace(page, heads=heads)] * 2)
    serving = replace(SERVING, encoder_tokens=1500, decode_context_parallel=4)

    assert 2 * expected == content_bytes(layout, tokens, serving)


def test_nothing_held_is_nothing_wasted() -> None:
    """A decoder whose encoder has had no input has no blocks, and wastes none."""
    layout = plan_layout([replace(FULL, kind=PageKind.CROSS)])

    assert 0.0 == wasted_ratio(layout, resident_tokens=10, terms=SERVING)


@pytest.mark.parametrize("tokens", [0, 2**30 + 1])
def test_tokens_are_at_least_one_and_at_most_a_gi(tokens: int) -> None:
    """Asking for no tokens, or for more than there can be, is an error that says so."""
    with refused("tokens"):
        decode_blocks(plan_layout([FULL]), resident_tokens=tokens, terms=SERVING)
    assert 2**26 == decode_blocks(plan_layout([FULL]), resident_tokens=2**30, terms=SERVING)
