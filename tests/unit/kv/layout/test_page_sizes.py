"""One layer's page and the blocks of a request, at the edges; a block of one token shows every token."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode
from tests.unit.kv.refused import refused

PAGE = PageSpec(kind=PageKind.FULL, block_size_tokens=1, heads=8, row_bytes=512)
TERMS = RequestTerms(max_in_flight_tokens=2048, encoder_tokens=1500)
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
    page = replace(PAGE, block_size_tokens=16, dcp_sharded=sharded)

    assert expected == page.admission_blocks(tokens, replace(TERMS, decode_context_parallel=ranks))


def test_a_window_that_is_not_shared_goes_with_context_parallel() -> None:
    """Only a sharded window is refused."""
    terms = replace(TERMS, decode_context_parallel=2)

    assert 101 == replace(SLIDING, dcp_sharded=False).admission_blocks(100, terms)
    with refused("decode_context_parallel"):
        SLIDING.admission_blocks(100, terms)


@pytest.mark.parametrize(
    ("mode", "expected"), [(StateCacheMode.NONE, 4), (StateCacheMode.ALIGN, 7), (StateCacheMode.ALL, 7 + 3)]
)
def test_states_of_a_request(mode: StateCacheMode, expected: int) -> None:
    """Running, 3 drafts, 2 checkpoints and the aligned one; `all` kept one at every block, 7 of 100 tokens."""
    page = PageSpec(
        kind=PageKind.STATE, block_size_tokens=16, heads=1, row_bytes=1000, speculative_blocks=3, checkpoint_blocks=2
    )

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
