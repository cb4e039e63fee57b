"""Blocks really held by one request, as vLLM's KV cache manager frees and allocates them."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.capacity import plan_layout
from kvdiag.kv.layout.pages import PageKind, PageSpec, StateCacheMode
from kvdiag.kv.layout.residency import ServingTerms, content_bytes, decode_blocks, wasted_ratio
from tests.unit.kv.refused import refused

FULL = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=1, row_bytes=64)
SLIDING = replace(FULL, kind=PageKind.SLIDING, window_tokens=128)
CHUNKED = replace(FULL, kind=PageKind.CHUNKED, chunk_tokens=256)
STATE = PageSpec(kind=PageKind.STATE, block_size_tokens=16, heads=1, row_bytes=512, dcp_sharded=False)
SERVING = ServingTerms(prefill_chunk_tokens=512)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (16, 1), (17, 2), (16_000, 1000)])
def test_full_attention_holds_every_token(tokens: int, expected: Any) -> None:
    """Blocks grow with tokens, a block at a time."""
    assert expected == decode_blocks(plan_layout([FULL] * 4), resident_tokens=tokens, serving=SERVING)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(100, 7), (128, 8), (129, 9), (144, 8), (145, 9), (161, 9), (16_000, 8), (16_001, 9)]
)
def test_sliding_attention_gives_back_what_it_cannot_see(tokens: int, expected: Any) -> None:
    """A window of 128 holds 8 blocks of 16, or 9 while it straddles one more."""
    assert expected == decode_blocks(plan_layout([SLIDING] * 4), resident_tokens=tokens, serving=SERVING)


@pytest.mark.parametrize(("tokens", "expected"), [(100, 7), (256, 16), (257, 1), (300, 3), (512, 16), (513, 1)])
def test_chunked_attention_starts_afresh_at_every_chunk(tokens: int, expected: Any) -> None:
    """Past a chunk boundary only the new chunk's blocks are held."""
    assert expected == decode_blocks(plan_layout([CHUNKED] * 4), resident_tokens=tokens, serving=SERVING)


def test_groups_add_up() -> None:
    """Two full and six sliding layers: one group that grows and three that do not."""
    layout = plan_layout([FULL] * 2 + [SLIDING] * 6)

    assert 1000 + 3 * 8 == decode_blocks(layout, resident_tokens=16_000, serving=SERVING)


def test_steps_in_flight_hold_a_window_longer() -> None:
    """With async scheduling the blocks of the step before are freed a step later."""
    layout = plan_layout([SLIDING])
    held = [
        decode_blocks(layout, resident_tokens=16_017, serving=replace(SERVING, steps_in_flight=steps))
        for steps in (0, 1, 17)
    ]

    assert [9, 9, 10] == held


@pytest.mark.parametrize(
    ("mode", "tokens", "expected"),
    [
        (StateCacheMode.NONE, 1000, 1),
        (StateCacheMode.ALIGN, 16, 1),
        (StateCacheMode.ALIGN, 17, 2),
        (StateCacheMode.ALIGN, 18, 1),
        (StateCacheMode.ALL, 1000, 63),
    ],
)
def test_states(mode: StateCacheMode, tokens: int, expected: Any) -> None:
    """A state takes one block, and in align mode two in the step that crosses a block boundary."""
    serving = replace(SERVING, state_cache_mode=mode)

    assert expected == decode_blocks(plan_layout([STATE] * 4), resident_tokens=tokens, serving=serving)


def test_cross_attention_holds_its_encoder() -> None:
    """The blocks of the encoder's tokens stay for the whole request."""
    layout = plan_layout([replace(FULL, kind=PageKind.CROSS)] * 4)

    assert 94 == decode_blocks(layout, resident_tokens=10, serving=replace(SERVING, encoder_tokens=1500))


def test_context_parallel_blocks_hold_more_tokens() -> None:
    """With DCP 4 a block of 16 spans 64 tokens."""
    serving = replace(SERVING, decode_context_parallel=4)

    assert 16 == decode_blocks(plan_layout([FULL]), resident_tokens=1000, serving=serving)


def test_waste_of_a_short_request_is_its_block_tail() -> None:
    """One token in a block of 16 wastes 15/16 of it."""
    assert 15 / 16 == wasted_ratio(plan_layout([FULL] * 4), resident_tokens=1, serving=SERVING)


def test_waste_of_padding_layers() -> None:
    """Groups of 10 with 8 padding layers of 70 waste at least those when blocks are full."""
    layout = plan_layout([FULL] * 10 + [replace(SLIDING, window_tokens=1 << 20)] * 52)

    assert 8 / 70 == pytest.approx(wasted_ratio(layout, resident_tokens=1600, serving=SERVING))


def test_states_of_one_token_are_copied_at_every_step() -> None:
    """With a block of one token each step crosses a boundary, but for the first."""
    layout = plan_layout([replace(STATE, block_size_tokens=1)])
    serving = replace(SERVING, state_cache_mode=StateCacheMode.ALIGN)

    assert [1, 2, 2] == [decode_blocks(layout, resident_tokens=tokens, serving=serving) for tokens in (1, 2, 3)]


@pytest.mark.parametrize(
    ("mode", "tokens", "steps", "expected"),
    [
        (StateCacheMode.NONE, 1000, 0, 1 + 3),
        (StateCacheMode.ALL, 1000, 0, 63 + 3),
        (StateCacheMode.ALIGN, 1000, 0, 1 + 3),
        # The token in slot 40 is in block 2; steps that have come back end in block 0. One state is copied from.
        (StateCacheMode.ALIGN, 40, 30, 2 + 3),
    ],
)
def test_drafts_take_a_slot_each(mode: StateCacheMode, tokens: int, steps: int, expected: int) -> None:
    """Three draft tokens need three more states, in every mode."""
    serving = replace(SERVING, state_cache_mode=mode, steps_in_flight=steps)
    layout = plan_layout([replace(STATE, speculative_blocks=3)])

    assert expected == decode_blocks(layout, resident_tokens=tokens, serving=serving)


@pytest.mark.parametrize(
    ("page", "tokens", "steps", "expected"),
    [
        # 15,999 tokens are done with; of those the window keeps 127, and what is retained as well.
        (replace(SLIDING, retained_tokens=16), 16_000, 0, 1000 - (15_999 - 127 - 16) // 16),
        (replace(SLIDING, retained_tokens=160), 16_000, 0, 1000 - (15_999 - 127 - 160) // 16),
        # Nothing is skipped while everything is in sight.
        (replace(SLIDING, block_size_tokens=1), 100, 0, 100),
        (replace(SLIDING, block_size_tokens=1), 200, 0, 128),
        (CHUNKED, 1, 1, 1),
        (replace(CHUNKED, chunk_tokens=1, block_size_tokens=1), 1, 1, 1),
        (replace(FULL, dcp_sharded=False), 1000, 0, 63),
    ],
)
def test_what_one_layer_holds(page: PageSpec, tokens: int, steps: int, expected: int) -> None:
    """Retained tokens stay beyond the window; at the first token nothing has been given back."""
    serving = replace(SERVING, steps_in_flight=steps)

    assert expected == decode_blocks(plan_layout([page]), resident_tokens=tokens, serving=serving)


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
    """A decoder whose encoder has seen nothing has no blocks, and wastes none."""
    layout = plan_layout([replace(FULL, kind=PageKind.CROSS)])

    assert 0.0 == wasted_ratio(layout, resident_tokens=10, serving=SERVING)


@pytest.mark.parametrize("tokens", [0, 2**30 + 1])
def test_tokens_are_at_least_one_and_at_most_a_gi(tokens: int) -> None:
    """Asking for no tokens, or for more than there can be, is an error that says so."""
    with refused("tokens"):
        decode_blocks(plan_layout([FULL]), resident_tokens=tokens, serving=SERVING)
    assert 2**26 == decode_blocks(plan_layout([FULL]), resident_tokens=2**30, serving=SERVING)
