from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis.blocks.expected import (
    ExpectedBlocks,
    blocks_needed,
    curve_problem,
    filled_ratio,
    grows_with_every_token,
)
from kvdiag.diagnosis.timeline_queries import NO_POOL
from kvdiag.model import Facts
from tests.builders.answers import containing
from tests.builders.values import pool

tokens = st.integers(0, 200_000)


@pytest.mark.parametrize(("resident", "blocks"), [((), 0), ((0,), 0), ((1,), 1), ((16,), 1), ((17,), 2), ((16, 17), 3)])
def test_full_attention_needs_whole_blocks_of_each_request(resident: tuple[int, ...], blocks: int) -> None:
    """Each request rounds up to whole blocks on its own."""
    actual = blocks_needed(resident, Facts(pools=(pool(),)))
    assert ExpectedBlocks(least_blocks=blocks, most_blocks=blocks) == actual


@pytest.mark.parametrize(
    ("resident", "least", "most"),
    [(1024, 64, 64), (1039, 64, 65), (1040, 64, 65), (16_384, 64, 65), (16_500, 65, 65)],
)
def test_a_sliding_window_needs_what_it_touches(resident: int, least: int, most: int) -> None:
    """Beyond the window blocks are returned, with async scheduling a step late."""
    # A window of 1,024 tokens over blocks of 16
    actual = blocks_needed((resident,), Facts(pools=(pool(sliding_window_tokens=1024),)))
    assert ExpectedBlocks(least_blocks=least, most_blocks=most) == actual


@given(tokens, tokens, st.sampled_from([1, 16, 128]), st.sampled_from([None, 1, 64, 4096]))
def test_more_tokens_never_need_fewer_blocks_than_their_window(
    fewer: int, more: int, block_tokens: int, window: int | None
) -> None:
    """Full attention never shrinks; a window never needs more than full attention nor less than its own tokens."""
    fewer, more = sorted((fewer, more))
    known = Facts(pools=(pool(block_tokens=block_tokens, sliding_window_tokens=window),))
    low, high = blocks_needed((fewer,), known), blocks_needed((more,), known)

    assert low is not None
    assert high is not None
    assert 0 <= high.least_blocks <= high.most_blocks <= -(-more // block_tokens)
    if window is None:
        assert low.most_blocks <= high.least_blocks or low == high
    else:
        assert -(-min(more, window - 1) // block_tokens) <= high.least_blocks


@pytest.mark.parametrize(
    ("known", "problem"),
    [
        (Facts(), NO_POOL),
        (Facts(pools=(pool(),), max_model_len_tokens=32768), None),
        (Facts(pools=(pool(),)), None),
        (Facts(pools=(pool(max_concurrency=None),), max_model_len_tokens=32768), None),
        (Facts(pools=(pool(max_concurrency=0.0),), max_model_len_tokens=32768), None),
        (Facts(pools=(pool(sliding_window_tokens=512, max_concurrency=99.0),), max_model_len_tokens=32768), None),
    ],
    ids=["no pool", "alike", "no length", "no figure", "no room", "window"],
)
def test_the_curve_is_known_unless_the_engines_own_figure_denies_it(known: Facts, problem: str | None) -> None:
    """Tokens give blocks where nothing contradicts it."""
    assert problem == curve_problem(known)


def test_layers_that_do_not_all_keep_every_token_are_noticed() -> None:
    """An engine that holds nine requests where a straight line allows three has layers that slide or keep a state."""
    known = Facts(pools=(pool(max_concurrency=9.0),), max_model_len_tokens=32768)
    # No blocks are computed by the simple formula
    assert blocks_needed((100,), known) is None
    assert containing("32768 tokens", "683 blocks") == curve_problem(known)


@pytest.mark.parametrize(
    "config",
    ["", "not JSON", "[]", "null", "{}", '{"model_type": "no such model"}', "[" * 100_000, '{"model_type": "llama"}'],
    ids=["empty", "text", "list", "null", "object", "unknown model", "nested", "incomplete"],
)
def test_a_config_that_says_nothing_leaves_the_curve_unknown(config: str) -> None:
    """An empty, malformed or incomplete model config makes the curve unknown and raises no error."""
    known = Facts(pools=(pool(max_concurrency=9.0),), max_model_len_tokens=32768, model_config=config)
    assert curve_problem(known) is not None
    assert blocks_needed((100,), known) is None


GEMMA = Path(__file__).parents[2] / "kv" / "data" / "configs" / "gemma-3-27b.json"


def hybrid(blocks_of_the_longest: int) -> Facts:
    """An engine that runs Gemma 3 27B, whose own figure for 32,768 tokens is so many blocks."""
    most = 60_000 / blocks_of_the_longest
    one = pool(usable_blocks=59_999, max_concurrency=most, capacity_tokens=None, pool_bytes=None, cache_dtype="auto")
    return Facts(pools=(one,), max_model_len_tokens=32_768, model_config=GEMMA.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("tokens", "least", "most"),
    [(160, 7 * 10, 7 * 10), (16_400, 1025 + 6 * 64, 1025 + 6 * 65), (16_401, 1026 + 6 * 65, 1026 + 6 * 65)],
    ids=["short", "a step late", "two steps late"],
)
def test_a_hybrid_models_blocks_follow_its_config(tokens: int, least: int, most: int) -> None:
    """Ten full layers make one group of blocks, 52 sliding ones six: these hold their window of 1,024 tokens alone."""
    # The engine's own figure: 2,048 blocks of the full group, and in six groups what 8,192 tokens in flight and
    # the window touch (576 blocks and one more)
    known = hybrid(2048 + 6 * 577)
    # The curve is known, and is no straight line
    assert curve_problem(known) is None
    assert not grows_with_every_token(known)
    assert blocks_needed((tokens,), known) == ExpectedBlocks(least_blocks=least, most_blocks=most)
    assert not grows_with_every_token(replace(known, pools=(replace(known.pools[0], max_concurrency=None),)))


def test_window_that_the_engine_reports_precedes_the_config() -> None:
    """A pool whose blocks all slide is no group of seven."""
    known = hybrid(2048 + 6 * 577)
    whole = replace(known, pools=(replace(known.pools[0], sliding_window_tokens=1024),))
    assert ExpectedBlocks(least_blocks=10, most_blocks=10) == blocks_needed((160,), whole)


def test_a_config_that_does_not_meet_the_engines_figure_is_not_used() -> None:
    """A model whose engine plans another number of blocks is not the one of this config."""
    known = hybrid(4321)
    assert "takes 4321 blocks" in (curve_problem(known) or "")
    assert blocks_needed((160,), known) is None


@pytest.mark.parametrize(
    ("known", "resident", "held", "ratio"),
    [
        (Facts(pools=(pool(),)), (1600,), 100, 1.0),
        (Facts(pools=(pool(),)), (1, 1), 2, 1 / 16),
        (Facts(pools=(pool(),)), (1600,), 200, 0.5),
        (Facts(pools=(pool(sliding_window_tokens=1024),)), (16_000,), 65, 1024 / (65 * 16)),
        (hybrid(2048 + 6 * 577), (160,), 70, 62 / 70),
        (Facts(pools=(pool(),)), (1600,), 0, None),
        (Facts(), (1600,), 100, None),
        (hybrid(4321), (160,), 70, None),
    ],
    ids=["full blocks", "tails", "twice", "window", "padding", "nothing held", "no pool", "curve not known"],
)
def test_waste_is_what_is_paid_and_holds_no_token(
    known: Facts, resident: tuple[int, ...], held: int, ratio: float | None
) -> None:
    """Tails of blocks, tokens below a window and padding layers (8 of Gemma 3's 70) are paid for and hold nothing."""
    assert ratio == filled_ratio(resident, held, known)
