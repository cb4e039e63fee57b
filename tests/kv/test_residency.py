"""Blocks really held by one request, as vLLM's KV cache manager frees and allocates them."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.capacity import plan_layout
from kvdiag.kv.errors import KvModelError
from kvdiag.kv.pages import PageKind, PageSpec, RequestTerms, StateCacheMode
from kvdiag.kv.residency import ServingTerms, decode_blocks, prefill_peak_blocks, wasted_ratio

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
    ("tokens", "expected"),
    [(100, 7), (128, 8), (129, 9), (144, 8), (145, 9), (161, 9), (16_000, 8), (16_001, 9)],
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


@pytest.mark.parametrize(("prompt", "expected"), [(100, 7), (512, 32), (1000, 39), (4096, 40)])
def test_prefill_holds_the_window_and_the_chunk(prompt: int, expected: Any) -> None:
    """While a long prompt is computed in chunks of 512, a window of 128 holds 640 tokens' blocks at most."""
    assert expected == prefill_peak_blocks(plan_layout([SLIDING]), prompt_tokens=prompt, serving=SERVING)


def test_prefill_of_full_attention_peaks_at_its_end() -> None:
    """Full attention holds the whole prompt."""
    assert 256 == prefill_peak_blocks(plan_layout([FULL]), prompt_tokens=4096, serving=SERVING)


def test_what_is_held_never_exceeds_what_is_planned() -> None:
    """The admission bound covers the peak of prefill and every step of decoding."""
    layout = plan_layout([FULL] * 2 + [SLIDING] * 6)
    terms = RequestTerms(max_in_flight_tokens=512, max_encoder_tokens=0)
    for tokens in (1, 100, 511, 512, 513, 1000, 5000):
        planned = layout.admission_blocks(tokens, terms)
        held = max(
            decode_blocks(layout, resident_tokens=tokens, serving=SERVING),
            prefill_peak_blocks(layout, prompt_tokens=tokens, serving=SERVING),
        )

        assert held <= planned


def test_waste_of_a_short_request_is_its_block_tail() -> None:
    """One token in a block of 16 wastes 15/16 of it."""
    assert 15 / 16 == wasted_ratio(plan_layout([FULL] * 4), resident_tokens=1, serving=SERVING)


def test_waste_of_padding_layers() -> None:
    """Groups of 10 with 8 padding layers of 70 waste at least those when blocks are full."""
    layout = plan_layout([FULL] * 10 + [replace(SLIDING, window_tokens=1 << 20)] * 52)

    assert 8 / 70 == pytest.approx(wasted_ratio(layout, resident_tokens=1600, serving=SERVING))


@pytest.mark.parametrize(
    "change",
    [{"prefill_chunk_tokens": 0}, {"steps_in_flight": -1}, {"encoder_tokens": -1}, {"decode_context_parallel": 0}],
)
def test_impossible_serving_terms_cannot_be_made(change: dict[str, Any]) -> None:
    """Terms that no engine can have are refused."""
    with pytest.raises(KvModelError):
        replace(SERVING, **change)


def test_no_tokens_hold_nothing_to_ask_for() -> None:
    """Asking for zero tokens is an error, not zero blocks."""
    with pytest.raises(KvModelError):
        decode_blocks(plan_layout([FULL]), resident_tokens=0, serving=SERVING)
