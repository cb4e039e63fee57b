"""One layer's page and the blocks of a request, at the edges; a block of one token shows every token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode
from kvdiag.kv.model_error import KvModelError

PIB = 1 << 50
PAGE = PageSpec(kind=PageKind.FULL, block_size_tokens=1, heads=8, row_bytes=512)
TERMS = RequestTerms(max_in_flight_tokens=2048, max_encoder_tokens=1500)
SLIDING = replace(PAGE, kind=PageKind.SLIDING, window_tokens=1024)
CHUNKED = replace(PAGE, kind=PageKind.CHUNKED, chunk_tokens=8192)


def terms(**changes: Any) -> RequestTerms:
    """The usual terms, and these."""
    return replace(TERMS, **changes)


@pytest.mark.parametrize(
    ("page", "tokens", "expected"),
    [
        (SLIDING, 3070, 3070 + 1),
        (SLIDING, 3071, 3071 + 1),
        (SLIDING, 3072, 3071 + 1),
        (replace(SLIDING, retained_tokens=5), 9999, 3076 + 1),
        (replace(SLIDING, window_tokens=1), 9999, 2048 + 1),
        (CHUNKED, 10_239, 10_239),
        (CHUNKED, 10_240, 10_240),
        (CHUNKED, 10_241, 10_240),
        (replace(PAGE, kind=PageKind.CROSS), 9999, 1500),
        (replace(PAGE, kind=PageKind.MLA), 9999, 9999),
    ],
)
def test_tokens_that_are_planned_for(page: PageSpec, tokens: int, expected: int) -> None:
    """Of a window of 1,024 the other 1,023, what is kept below it and 2,048 in flight, and a block more; of a chunk all
    and what is in flight; of an encoder its 1,500.
    """
    assert expected == page.admission_blocks(tokens, TERMS)


@pytest.mark.parametrize(
    ("sharded", "ranks", "tokens", "expected"),
    [(True, 1, 33, 3), (True, 2, 32, 1), (True, 2, 33, 2), (True, 3, 48, 1), (True, 3, 49, 2), (False, 2, 33, 3)],
)
def test_blocks_of_context_parallel_ranks(sharded: bool, ranks: int, tokens: int, expected: int) -> None:
    """Tokens are divided first, each rank's then counted in blocks of 16."""
    # GIVEN
    page = replace(PAGE, block_size_tokens=16, dcp_sharded=sharded)

    # THEN
    assert expected == page.admission_blocks(tokens, replace(TERMS, decode_context_parallel=ranks))


def test_a_window_that_is_not_shared_goes_with_context_parallel() -> None:
    """Only a sharded window is refused."""
    # GIVEN
    terms = replace(TERMS, decode_context_parallel=2)

    # THEN
    assert 101 == replace(SLIDING, dcp_sharded=False).admission_blocks(100, terms)
    with pytest.raises(KvModelError, match="pass --dcp 1"):
        SLIDING.admission_blocks(100, terms)


@pytest.mark.parametrize(
    ("mode", "expected"), [(StateCacheMode.NONE, 4), (StateCacheMode.ALIGN, 7), (StateCacheMode.ALL, 7 + 3)]
)
def test_states_of_a_request(mode: StateCacheMode, expected: int) -> None:
    """Running, 3 drafts, 2 checkpoints and the aligned one; `all` kept one at every block, 7 of 100 tokens."""
    # GIVEN
    page = PageSpec(
        kind=PageKind.STATE, block_size_tokens=16, heads=1, row_bytes=1000, speculative_blocks=3, checkpoint_blocks=2
    )

    # THEN
    assert expected == page.admission_blocks(100, replace(TERMS, state_cache_mode=mode))


@pytest.mark.parametrize(
    ("change", "page_bytes"),
    [
        ({}, 4096),
        ({"block_size_tokens": 16}, 65_536),
        ({"padded_page_bytes": 4096}, 4096),
        ({"padded_page_bytes": 5000}, 5000),
        ({"kind": PageKind.STATE, "block_size_tokens": 16}, 512),
    ],
)
def test_bytes_of_a_page(change: dict[str, Any], page_bytes: int) -> None:
    """Heads x tokens x row, or padded; a state is one row however many tokens a block has."""
    assert page_bytes == replace(PAGE, **change).page_bytes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_size_tokens": 0}, "block_size"),
        ({"block_size_tokens": (1 << 30) + 1, "row_bytes": 1}, "block_size"),
        ({"heads": 0}, "row_bytes"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"heads": -1, "row_bytes": -1}, "row_bytes"),
        ({"heads": 1, "row_bytes": PIB + 1}, "row_bytes"),
        ({"padded_page_bytes": 4095}, "padded_page_bytes"),
        ({"kind": PageKind.SLIDING}, "sliding_window"),
        ({"kind": PageKind.SLIDING, "window_tokens": 0}, "sliding_window"),
        ({"kind": PageKind.CHUNKED}, "attention_chunk_size"),
        ({"kind": PageKind.CHUNKED, "chunk_tokens": 0}, "attention_chunk_size"),
        ({"retained_tokens": -1}, "speculative_blocks"),
        ({"speculative_blocks": -1}, "speculative_blocks"),
        ({"checkpoint_blocks": -1}, "speculative_blocks"),
    ],
)
def test_pages_that_cannot_be_name_the_field(change: dict[str, Any], field: str) -> None:
    """A page without tokens, bytes, window or chunk, one too large, one padded to less than it holds."""
    with pytest.raises(KvModelError) as caught:
        replace(PAGE, **change)

    assert field == caught.value.field


@pytest.mark.parametrize(
    "change",
    [
        {"block_size_tokens": 1 << 30, "heads": 1, "row_bytes": 1},
        {"heads": 1, "row_bytes": PIB},
        {"heads": 1, "row_bytes": 1},
        {"kind": PageKind.SLIDING, "window_tokens": 1},
        {"kind": PageKind.CHUNKED, "chunk_tokens": 1},
    ],
)
def test_the_bounds_themselves_are_pages(change: dict[str, Any]) -> None:
    """A block of 2**30 tokens, a page of a pebibyte, a window and a chunk of one token."""
    # GIVEN
    page = replace(PAGE, **change)

    # THEN
    assert change == {name: getattr(page, name) for name in change}


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("max_in_flight_tokens", 1, 1 << 30),
        ("max_encoder_tokens", 0, 1 << 30),
        ("decode_context_parallel", 1, 4096),
    ],
)
def test_terms_have_bounds(name: str, least: int, most: int) -> None:
    """Each end is allowed, what lies beyond it is refused, and the message names both ends."""
    assert [least, most] == [getattr(terms(**{name: value}), name) for value in (least, most)]
    for value in (least - 1, most + 1):
        with pytest.raises(KvModelError, match=f"{name} is {value}; it must lie between {least} and {most}$") as caught:
            terms(**{name: value})
        assert name == caught.value.field


@pytest.mark.parametrize("tokens", [0, (1 << 30) + 1])
def test_a_block_that_cannot_be_is_told_its_bounds(tokens: int) -> None:
    """Both ends that the message names are allowed themselves."""
    # WHEN
    with pytest.raises(KvModelError, match=f"block size is {tokens} tokens; it must lie between") as caught:
        replace(PAGE, block_size_tokens=tokens, heads=1, row_bytes=1)

    # THEN
    *_, least, most = map(int, re.findall(r"\d+", caught.value.message))
    sizes = [replace(PAGE, block_size_tokens=end, heads=1, row_bytes=1).block_size_tokens for end in (least, most)]
    assert ([1, 1 << 30], "block_size") == (sizes, caught.value.field)
