"""Predicted and reported figures: capacity in both counts of vLLM, pool and weights by rank and stage, the drift."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.engine_report import DRIFT_LIMIT_RATIO, EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import (
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
)
def test_the_poorest_stage_gives_the_blocks(ranks: tuple[RankReport, ...], expected: int) -> None:
    """128 KiB a block on the first and 64 KiB on the second; a stage that reports nothing is assumed to have enough."""
    assert {"num_blocks": expected} == predicted(STAGED, report(*ranks, num_blocks=1), STAGES)


def test_on_one_stage_every_rank_counts() -> None:
    """On one stage all ranks count, with any rank number."""
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
                "the device's total",
            ),
        ),
        (report(rank(pool=PAGE), concurrency=1.0), Expected(total_bytes=5), ('"KV cache size: ... tokens"',)),
        (report(rank(pool=PAGE), tokens=16, concurrency=1.0), Expected(total_bytes=5), ()),
        (report(num_blocks=9, concurrency=1.0), Expected(total_bytes=5), ()),
        (report(num_blocks=9), Expected(total_bytes=5), ('"Maximum concurrency"',)),
        (report(num_blocks=9, concurrency=1.0), Expected(total_bytes=5, weights_bytes=(5,)), ('"Model loading took"',)),
        (report(rank(weights=5), num_blocks=9, concurrency=1.0), Expected(total_bytes=5, weights_bytes=(5,)), ()),
        (report(num_blocks=9, concurrency=1.0, settings=EngineSettings(device="cpu")), Expected(), ()),
    ],
)
def test_what_was_not_reported_is_named(of: EngineReport, expected: Expected, missing: tuple[str, ...]) -> None:
    """In the words of the engine's own lines."""
    found = compare(MODEL, Deployment(), of, expected).missing
    assert list(missing) == [text[: len(name)] for text, name in zip(found, missing, strict=True)]


def test_why_nothing_was_planned_is_noted() -> None:
    """After the report's own notes."""
    of = report(notes=("two engines",))

    first, second = compare(MODEL, Deployment(), of, Expected(why_no_weights="no checkpoint")).notes
    assert ("two engines", True) == (first, second.endswith(": no checkpoint"))
    assert ("two engines",) == compare(MODEL, Deployment(), of, Expected()).notes


def test_a_figure_lies_between_its_ends() -> None:
    """Or at both of them."""
    assert (5, 5, 5) == (exactly(5).low, exactly(5).nominal, exactly(5).high)
    size = PrintedSize(nominal_bytes=5, slack_bytes=2)
    assert (3, 5, 7) == (between(size).low, between(size).nominal, between(size).high)


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
        (Interval(nominal=100, low=95, high=105), 104, 0.0, True),
        (Interval(nominal=100, low=95, high=105), 210, -0.5, False),
        (204, Interval(nominal=101, low=100, high=102), 1.0, False),
    ],
)
def test_two_percent_need_no_reason(
    predicted_blocks: int | Interval, reported_blocks: int | Interval, drift: float, within: bool
) -> None:
    """More than predicted, or less, between the nearest ends; anything is a whole more than nothing."""
    ends = [one if isinstance(one, Interval) else exactly(one) for one in (predicted_blocks, reported_blocks)]
    one = Comparison(figure=Figure.BLOCKS, predicted=ends[0], reported=ends[1])

    assert drift == pytest.approx(one.drift_ratio)
    assert (within, 0.02) == (one.within_limit, DRIFT_LIMIT_RATIO)


@pytest.mark.parametrize(
    ("config", "served", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "Gemma3ForCausalLM", "LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM", None),
        ({"architectures": [5, "X" * 90, "LlamaForCausalLM"]}, "LlamaForCausalLM", None),
        ({"architectures": [5, "X" * 90, "LlamaForCausalLM"]}, "Qwen2ForCausalLM", f"{'X' * 80}"),
        ({"architectures": ["LlamaForCausalLM"]}, "TransformersForCausalLM", None),
        ({"architectures": ["LlamaForCausalLM"]}, None, None),
        ({}, "Qwen2ForCausalLM", "llama"),
        ({"architectures": [5]}, "Qwen2ForCausalLM", "llama"),
        ({}, "LlamaForCausalLM", None),
        ({}, "NeverSeenForCausalLM", None),
        ({"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM", None),
    ],
)
def test_another_architecture_is_a_contradiction(config: dict[str, Any], served: str | None, named: str | None) -> None:
    """The class that the engine loaded, and the first that MODEL lists (80 characters of it) or else its type."""
    found = contradiction(config, MODEL, EngineSettings(architecture=served))

    assert (named is None) is (found is None)
    assert found is None or (served and served in found and found.endswith(f" {named}"))


@pytest.mark.parametrize(
    ("reported_bytes", "expected"),
    [
        (70 * PAGE + 5, (70, 70, 70)),
        (70 * PAGE - 5, (69, 69, 69)),
        (70 * PAGE + 6, (70, 69, 70)),
        (70 * PAGE - 6, (70, 69, 70)),
        (None, (70, 69, 70)),
    ],
)
def test_a_pool_that_was_asked_for_is_known_to_the_byte(
    reported_bytes: int | None, expected: tuple[int, int, int]
) -> None:
    """--kv-cache-memory-bytes, where what is printed agrees with it: 70 pages give or take 5 bytes."""
    printed = PrintedSize(nominal_bytes=70 * PAGE, slack_bytes=5)
    of = report(
        RankReport(name="", pool=printed),
        num_blocks=70,
        settings=EngineSettings(version="0.32.0", pool_bytes=reported_bytes),
    )

    (one,) = capacity_comparisons(MODEL, Deployment(), of)

    assert expected == (one.predicted.nominal, one.predicted.low, one.predicted.high)


@pytest.mark.parametrize(
    ("printed", "slack", "low", "high"), [(10.0, 0.0, 10.0, 10.0), (10.0, 0.5, 9.5, 10.5), (0.25, 0.5, 0.0, 0.75)]
)
def test_a_printed_concurrency_lies_between_two(printed: float, slack: float, low: float, high: float) -> None:
    """By half of its last digit, and never below 0."""
    of = report(rank(pool=70 * PAGE), version="0.32.0", concurrency=printed, concurrency_slack=slack)

    (one,) = capacity_comparisons(MODEL, Deployment(), of)

    assert (printed, low, high) == (one.reported.nominal, one.reported.low, one.reported.high)


@pytest.mark.parametrize(
    ("ranks", "figures", "expected"),
    [
        ((rank("w0", pool=700),), {"num_blocks": 5}, (700, 700, 700, "w0")),
        ((), {"num_blocks": 5}, (5 * PAGE, 5 * PAGE, 6 * PAGE - 1, "from the blocks")),
        ((rank("w0"),), {"num_blocks": 5}, (5 * PAGE, 5 * PAGE, 6 * PAGE - 1, "from the blocks")),
        ((rank("w0"),), {}, None),
        ((), {}, None),
    ],
)
def test_the_pool_that_a_plan_leaves(
    ranks: tuple[RankReport, ...], figures: dict[str, Any], expected: tuple[object, ...] | None
) -> None:
    """Compared with the bytes that a rank reports, or with its blocks' bytes, which may be up to one block lower."""
    found = compare(MODEL, Deployment(), report(*ranks, **figures), Expected(pool_bytes=(800,))).comparisons
    pools = [one for one in found if one.figure is Figure.POOL]

    assert ([] if expected is None else [expected]) == [
        (one.reported.nominal, one.reported.low, one.reported.high, one.where) for one in pools
    ]
    assert [800] * len(pools) == [one.predicted.nominal for one in pools]


@pytest.mark.parametrize(
    ("planned", "stage"), [((20 * PAGE, 9 * PAGE), 1), ((20 * PAGE, 11 * PAGE), 0), ((18 * PAGE, 11 * PAGE), 0)]
)
def test_the_pool_is_compared_on_the_stage_with_the_least_blocks(planned: tuple[int, int], stage: int) -> None:
    """128 KiB a block on the first, 64 KiB on the second."""
    of = report(rank("w0", stage=0, pool=2000), rank("w1", stage=1, pool=1000))

    (one,) = compare(STAGED, STAGES, of, Expected(pool_bytes=planned)).comparisons

    assert (planned[stage], (2000, 1000)[stage]) == (one.predicted.nominal, one.reported.nominal)


def test_a_stage_that_tells_no_pool_is_compared_by_the_blocks() -> None:
    """The first stage reports its own pool, and the plan's smallest pool is on the second."""
    of = report(rank("w0", stage=0, pool=2000), num_blocks=7)

    found = compare(STAGED, STAGES, of, Expected(pool_bytes=(20 * PAGE, 9 * PAGE))).comparisons[0]

    assert (Figure.POOL, 7 * PAGE, "from the blocks") == (found.figure, found.reported.nominal, found.where)


@pytest.mark.parametrize(
    ("ranks", "deployment", "expected"),
    [
        ((rank("w0", weights=100), rank("w1", weights=100)), Deployment(), [(90, 100, "all 2 ranks")]),
        ((rank("w0", weights=100), rank("w1", weights=101)), Deployment(), [(90, 100, "w0"), (90, 101, "w1")]),
        ((rank("w0", stage=5, weights=100),), Deployment(), [(90, 100, "w0")]),
        ((rank("w0", stage=1, weights=100),), STAGES, [(95, 100, "w0")]),
        ((rank("w0", stage=2, weights=100),), STAGES, []),
        ((rank("w0", stage=None, weights=100),), STAGES, []),
        ((rank("w0"),), Deployment(), []),
    ],
    ids=["alike", "unlike", "any stage of one", "the second", "a third of two", "of unknown stage", "untold"],
)
def test_weights_are_compared_by_rank(
    ranks: tuple[RankReport, ...], deployment: Deployment, expected: list[tuple[int, int, str]]
) -> None:
    """A plan of 90 bytes on the first stage and 95 on the second; ranks that say the same are one line."""
    found = compare(STAGED, deployment, report(*ranks), Expected(weights_bytes=(90, 95))).comparisons

    assert expected == [(one.predicted.nominal, one.reported.nominal, one.where) for one in found]
    assert not compare(STAGED, deployment, report(*ranks), Expected()).comparisons
