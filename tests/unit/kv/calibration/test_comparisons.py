"""Predicted beside reported: capacity in both counts of vLLM, what was not told, and how figures are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import (
    DRIFT_LIMIT_RATIO,
    Comparison,
    Expected,
    Figure,
    Interval,
    between,
    capacity_comparisons,
    compare,
    contradiction,
    exactly,
)
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.layout.layers import Architecture
from tests.unit.kv.reckoned import HYBRID, MODEL, PAGE, STAGED, STAGES, rank, report


def predicted(architecture: Architecture, of: EngineReport, deployment: Deployment | None = None) -> dict[str, float]:
    """The nominal prediction of each capacity figure."""
    found = capacity_comparisons(architecture, deployment or Deployment(), of)
    return {one.figure.value: one.predicted.nominal for one in found}


@pytest.mark.parametrize(
    ("version", "v0", "tokens", "concurrency"),
    [
        ("0.9.2", False, 1120, 11.2),
        ("0.9.2", False, 1120, 10.0),
        ("0.9.2", True, 1120, 11.2),
        ("0.10.0", False, 1120, 10.0),
        ("0.19.1", False, 1120, 10.0),
        ("0.20.0", False, 1120, 10.0),
        ("0.20.0", False, 1000, 10.0),
        ("0.21.0", False, 1120, 10.0),
        ("0.21.0", False, 1000, 10.0),
        ("0.22.0", False, 1000, 10.0),
        ("0.32.0", True, 1120, 11.2),
        (None, False, 1120, 11.2),
        (None, False, 1000, 10.0),
    ],
)
def test_the_ways_in_which_a_release_may_count(version: str | None, v0: bool, tokens: int, concurrency: float) -> None:
    """Tokens by blocks up to 0.19, by requests from 0.22 on, either in between; requests by blocks from 0.10 on."""
    of = report(rank(pool=70 * PAGE), version=version, is_v0=v0, tokens=tokens, concurrency=concurrency)

    assert {"capacity_tokens": tokens, "max_concurrency": pytest.approx(concurrency)} == predicted(MODEL, of)


@pytest.mark.parametrize(
    ("version", "v0", "tokens", "concurrency", "expected"),
    [
        ("0.19.1", False, 1000, 11.2, (1120, 10.0)),
        ("0.9.2", True, 1000, 10.0, (1120, 11.2)),
        ("0.10.0", False, 1120, 11.2, (1120, 10.0)),
        ("0.22.0", False, 1120, 11.2, (1000, 10.0)),
    ],
)
def test_a_release_that_counts_otherwise_drifts(
    version: str, v0: bool, tokens: int, concurrency: float, expected: tuple[float, float]
) -> None:
    """By how much the other way of counting gives."""
    of = report(rank(pool=70 * PAGE), version=version, is_v0=v0, tokens=tokens, concurrency=concurrency)

    assert pytest.approx(expected) == tuple(predicted(MODEL, of).values())


def test_the_old_count_divides_blocks_by_groups_and_multiplies_by_ranks() -> None:
    """71 blocks of 2 groups are 35 x 16 tokens, 71 / 2 x 16 / 100 requests; 2 context-parallel ranks hold double."""
    of = report(rank(pool=71 * PAGE), version="0.9.2", is_v0=True, tokens=1, concurrency=1.0)
    shared = Deployment(tensor_parallel=16, decode_context_parallel=2)

    assert {"capacity_tokens": 560, "max_concurrency": 5.68} == pytest.approx(predicted(HYBRID, of))
    of = replace(of, ranks=(rank(pool=70 * PAGE // 8),))
    assert {"capacity_tokens": 2240, "max_concurrency": 22.4} == pytest.approx(predicted(MODEL, of, shared))


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, {}),
        ({"num_blocks": 70}, {}),
        ({"num_blocks": 70, "tokens": 1000}, {"capacity_tokens": 1000}),
        ({"num_blocks": 70, "concurrency": 10.0}, {"max_concurrency": 10.0}),
        ({"num_blocks": 69, "ranks": (rank(pool=70 * PAGE),)}, {"num_blocks": 70}),
        ({"tokens": 1000, "ranks": (rank(pool=70 * PAGE),)}, {"capacity_tokens": 1000}),
        (
            {"num_blocks": 69, "ranks": (rank(pool=1 * PAGE),), "settings": EngineSettings(blocks_override=70)},
            {"num_blocks": 70},
        ),
        ({"num_blocks": 69, "settings": EngineSettings(blocks_override=70)}, {"num_blocks": 70}),
        ({"num_blocks": 70, "tokens": 1000, "concurrency_context_tokens": None}, {}),
    ],
    ids=[
        "nothing",
        "blocks alone",
        "tokens",
        "requests",
        "a pool",
        "a pool and tokens",
        "blocks asked for",
        "blocks asked for, no pool",
        "of no length",
    ],
)
def test_what_follows_from_what_is_told(figures: dict[str, Any], expected: dict[str, float]) -> None:
    """Blocks from the pool or from --num-gpu-blocks-override, and never from themselves."""
    assert expected == predicted(MODEL, report(**figures))


def test_a_length_that_is_not_told_is_the_configs() -> None:
    """Concurrency of 160 tokens, 10 blocks each."""
    of = report(rank(pool=70 * PAGE), concurrency=7.0, concurrency_context_tokens=None, version="0.32.0")

    assert {"max_concurrency": 7.0} == predicted(replace(MODEL, max_context_tokens=160), of)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((rank(stage=0, pool=10 * 2 * PAGE), rank(stage=1, pool=9 * PAGE)), 9),
        ((rank(stage=0, pool=10 * 2 * PAGE), rank(stage=1, pool=11 * PAGE)), 10),
        ((rank(stage=0, pool=10 * 2 * PAGE),), 10),
        ((rank(stage=1, pool=10 * PAGE),), 10),
        ((rank(stage=None, pool=20 * PAGE),), 10),
        ((rank(stage=0, pool=20 * PAGE), rank(stage=0, pool=18 * PAGE), rank(stage=1, pool=99 * PAGE)), 9),
    ],
    ids=[
        "the second is poorer",
        "the first is",
        "the first tells",
        "the second tells",
        "one of unknown stage",
        "ranks",
    ],
)
def test_the_poorest_stage_gives_the_blocks(ranks: tuple[RankReport, ...], expected: int) -> None:
    """128 KiB a block on the first and 64 KiB on the second; a stage that tells nothing is taken to have enough."""
    assert {"num_blocks": expected} == predicted(STAGED, report(*ranks, num_blocks=1), STAGES)


def test_on_one_stage_every_rank_counts() -> None:
    """Whatever number it gives itself."""
    ranks = (rank(stage=0, pool=9 * PAGE), rank(stage=3, pool=8 * PAGE))

    assert {"num_blocks": 8} == predicted(MODEL, report(*ranks, num_blocks=1))


@pytest.mark.parametrize(
    ("of", "expected", "missing"),
    [
        (
            report(),
            Expected(),
            (
                '"Available KV cache memory"',
                '"KV cache size: ... tokens"',
                '"Maximum concurrency"',
                'the device\'s total ("Free memory on device", "total_gpu_memory")',
            ),
        ),
        (
            report(rank(pool=PAGE), concurrency=1.0),
            Expected(total_bytes=5),
            ('"KV cache size: ... tokens"',),
        ),
        (report(rank(pool=PAGE), tokens=16, concurrency=1.0), Expected(total_bytes=5), ()),
        (report(num_blocks=9, concurrency=1.0), Expected(total_bytes=5), ()),
        (report(num_blocks=9), Expected(total_bytes=5), ('"Maximum concurrency"',)),
        (
            report(num_blocks=9, concurrency=1.0),
            Expected(total_bytes=5, weights_bytes=(5,)),
            ('"Model loading took"',),
        ),
        (report(rank(weights=5), num_blocks=9, concurrency=1.0), Expected(total_bytes=5, weights_bytes=(5,)), ()),
        (report(num_blocks=9, concurrency=1.0, settings=EngineSettings(device="cpu")), Expected(), ()),
    ],
)
def test_what_was_not_told_is_named(of: EngineReport, expected: Expected, missing: tuple[str, ...]) -> None:
    """In the words of the engine's own lines."""
    assert missing == compare(MODEL, Deployment(), of, expected).missing


def test_why_nothing_was_planned_is_noted() -> None:
    """After the report's own notes."""
    of = report(notes=("two engines",))

    assert ("two engines", "weights and pool are not compared: no checkpoint") == compare(
        MODEL, Deployment(), of, Expected(why_no_weights="no checkpoint")
    ).notes
    assert ("two engines",) == compare(MODEL, Deployment(), of, Expected()).notes


@pytest.mark.parametrize(("low", "nominal", "high"), [(2, 1, 3), (1, 3, 2), (3, 2, 1)])
def test_a_figure_lies_between_its_ends(low: float, nominal: float, high: float) -> None:
    """Or at one of them."""
    with pytest.raises(KvModelError) as caught:
        Interval(nominal=nominal, low=low, high=high)
    assert "interval" == caught.value.field

    assert (5, 5, 5) == (exactly(5).low, exactly(5).nominal, exactly(5).high)
    size = PrintedSize(nominal_bytes=5, slack_bytes=2)
    assert (3, 5, 7) == (between(size).low, between(size).nominal, between(size).high)


@pytest.mark.parametrize(
    ("figure", "title"),
    [
        (Figure.WEIGHTS, "bytes of weights"),
        (Figure.POOL, "bytes of KV pool"),
        (Figure.BLOCKS, "blocks in the pool"),
        (Figure.TOKENS, "tokens of capacity"),
        (Figure.CONCURRENCY, "longest requests at once"),
    ],
)
def test_figures_have_titles(figure: Figure, title: str) -> None:
    """For a sentence."""
    assert title == Comparison(figure=figure, predicted=exactly(1), reported=exactly(1)).title


@pytest.mark.parametrize(
    ("predicted_blocks", "reported_blocks", "drift", "within"),
    [
        (1019, 1000, 0.019, True),
        (1021, 1000, 0.021, False),
        (981, 1000, -0.019, True),
        (979, 1000, -0.021, False),
        (0, 1000, -1.0, False),
        (0, 0, 0.0, True),
        (5, 0, 1.0, False),
    ],
)
def test_two_percent_need_no_reason(predicted_blocks: int, reported_blocks: int, drift: float, within: bool) -> None:
    """More than predicted, or less; anything is a whole more than nothing."""
    one = Comparison(figure=Figure.BLOCKS, predicted=exactly(predicted_blocks), reported=exactly(reported_blocks))

    assert drift == pytest.approx(one.drift_ratio)
    assert (within, 0.02) == (one.within_limit, DRIFT_LIMIT_RATIO)


def test_what_the_engine_serves_is_named_briefly() -> None:
    """The first class that MODEL lists, 80 characters of it; what is no text is no class."""
    listed = {"architectures": [5, "X" * 90, "LlamaForCausalLM"]}

    assert f"the engine serves Qwen2ForCausalLM, but MODEL is {'X' * 80}" == contradiction(
        listed, MODEL, EngineSettings(architecture="Qwen2ForCausalLM")
    )
    assert contradiction(listed, MODEL, EngineSettings(architecture="LlamaForCausalLM")) is None
    assert "the engine serves Qwen2ForCausalLM, but MODEL is of type llama" == contradiction(
        {"architectures": [5]}, MODEL, EngineSettings(architecture="Qwen2ForCausalLM")
    )
    assert contradiction({}, MODEL, EngineSettings(architecture="LlamaForCausalLM")) is None
