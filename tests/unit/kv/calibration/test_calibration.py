"""Predicted against reported: drift and rounding, the reasons that are found, and the published logs as reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.drift_reasons import explain, settled_batches
from kvdiag.kv.calibration.engine_report import GIB, EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import (
    Calibration,
    Comparison,
    Expected,
    Figure,
    Interval,
    compare,
    contradiction,
    exactly,
)
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture
from tests.unit.kv.dataset import config_of, row_checks, rows

LLAMA = parse_architecture(config_of("Llama-3.1-8B"))
GEMMA = parse_architecture(config_of("gemma-3-27b"))
BLOCK_BYTES = 16 * 131_072
"""Of Llama 3.1 8B: 131,072 bytes a token, 16 tokens a block."""


def printed(gib: float) -> PrintedSize:
    """A size as a log prints it."""
    return PrintedSize(nominal_bytes=round(gib * GIB), slack_bytes=round(0.005 * GIB))


def exact_report(
    architecture: Architecture, deployment: Deployment, *, blocks: int = 1000, context: int = 65_536
) -> EngineReport:
    """What an engine reports that runs exactly as the model says."""
    layout = deployed_layout(architecture, deployment)
    per_request = layout.admission_blocks(context, deployment.request_terms(architecture))
    concurrency = blocks / per_request
    return EngineReport(
        settings=EngineSettings(version="0.32.0"),
        ranks=(RankReport(name="rank", pool=PrintedSize(nominal_bytes=blocks * layout.bytes_per_block[0])),),
        num_blocks=blocks,
        tokens=int(concurrency * context),
        concurrency=concurrency,
        concurrency_context_tokens=context,
    )


def explained(architecture: Architecture, deployment: Deployment, report: EngineReport) -> Calibration:
    """A comparison with its reasons."""
    calibration = compare(architecture, deployment, report, Expected())
    return explain(calibration, architecture, deployment, report, Expected())


@pytest.mark.parametrize(
    ("predicted", "reported", "expected"),
    [
        (exactly(100), exactly(100), 0.0),
        (exactly(110), exactly(100), 0.1),
        (exactly(90), exactly(100), -0.1),
        (Interval(nominal=100, low=95, high=105), exactly(104), 0.0),
        (Interval(nominal=100, low=95, high=105), exactly(210), -0.5),
        (exactly(204), Interval(nominal=101, low=100, high=102), 1.0),
        (exactly(1), exactly(0), 1.0),
    ],
)
def test_drift_is_counted_from_the_nearest_ends(predicted: Interval, reported: Interval, expected: float) -> None:
    """Inside the rounding there is none; outside it is what rounding cannot explain."""
    comparison = Comparison(figure=Figure.BLOCKS, predicted=predicted, reported=reported)

    assert expected == pytest.approx(comparison.drift_ratio)


def test_an_engine_that_runs_as_modelled_has_no_drift() -> None:
    """Blocks, tokens and concurrency are exact, and nothing needs a reason."""
    calibration = explained(GEMMA, Deployment(), exact_report(GEMMA, Deployment()))

    assert [(Figure.BLOCKS, 0.0), (Figure.TOKENS, 0.0), (Figure.CONCURRENCY, 0.0)] == [
        (one.figure, one.drift_ratio) for one in calibration.comparisons
    ]
    assert not [one for one in calibration.comparisons if one.reasons]


def test_a_printed_pool_is_an_interval() -> None:
    """18.69 GiB is 9,569.28 blocks: with two decimals between 9,566 and 9,571, which all are exact."""
    report = EngineReport(
        settings=EngineSettings(version="0.9.1"), ranks=(RankReport(name="", pool=printed(18.69)),), num_blocks=9567
    )

    one = compare(LLAMA, Deployment(), replace(report, concurrency_context_tokens=8192), Expected()).comparisons[0]

    assert (9569, 9566, 9571, 0.0) == (one.predicted.nominal, one.predicted.low, one.predicted.high, one.drift_ratio)


@pytest.mark.parametrize(
    ("architecture", "served", "word"),
    [
        (GEMMA, Deployment(max_num_batched_tokens=16_384), "--max-num-batched-tokens 16384"),
        (GEMMA, Deployment(hybrid_manager=False), "--no-hybrid-kv-cache-manager"),
        (LLAMA, Deployment(kv_dtype="fp8"), "--kv-dtype fp8"),
        (LLAMA, Deployment(tensor_parallel=2), "--tp 2"),
    ],
)
def test_a_setting_that_explains_the_drift_is_named(architecture: Architecture, served: Deployment, word: str) -> None:
    """The model tries each setting alone, and says which one gives what the engine reports."""
    report = exact_report(architecture, served)

    drifting = [one for one in explained(architecture, Deployment(), report).comparisons if not one.within_limit]

    assert drifting
    assert all(any(f"with {word} " in reason for reason in one.reasons) for one in drifting)


def test_a_drafter_in_the_pool_is_named() -> None:
    """The MTP layer of a config that has one."""
    architecture = parse_architecture(config_of("Qwen3.6-27B"))
    drafted = Deployment(speculative_tokens=1, draft_layers=architecture.draft_layers)

    calibration = explained(architecture, Deployment(), exact_report(architecture, drafted))

    assert any("--num-speculative-tokens 1" in reason for one in calibration.comparisons for reason in one.reasons)


def test_a_smaller_rank_is_the_likely_reason_where_one_of_several_tells_its_pool() -> None:
    """Rank 0 tells its pool, and the engine has 10 % fewer blocks than that gives."""
    deployment = Deployment(tensor_parallel=2)
    report = replace(exact_report(LLAMA, deployment, blocks=1003), num_blocks=901, tokens=None, concurrency=None)

    reasons = explained(LLAMA, deployment, report).comparisons[0].reasons

    assert "1 of 2 ranks" in reasons[0]


def test_what_nothing_explains_is_called_unknown() -> None:
    """No setting gives half of the blocks less one; it is not dressed up."""
    report = replace(exact_report(LLAMA, Deployment(), blocks=1003), num_blocks=500, tokens=None, concurrency=None)

    reasons = explained(LLAMA, Deployment(), report).comparisons[0].reasons

    assert any("unknown" in reason for reason in reasons)


def test_the_batch_that_an_engine_does_not_tell_is_settled_by_its_figures() -> None:
    """Windowed layers show it; a model without windows does not depend on it."""
    served = Deployment(max_num_batched_tokens=8192)

    assert [8192, None, None] == [
        settled_batches(GEMMA, Deployment(), exact_report(GEMMA, served)),
        settled_batches(GEMMA, served, exact_report(GEMMA, served)),
        settled_batches(LLAMA, Deployment(), exact_report(LLAMA, served)),
    ]


def test_blocks_alone_give_tokens_and_concurrency() -> None:
    """A page on a GPU tells blocks and no bytes: those are not compared with themselves."""
    report = replace(exact_report(GEMMA, Deployment()), ranks=())

    calibration = compare(GEMMA, Deployment(), report, Expected())

    assert [Figure.TOKENS, Figure.CONCURRENCY] == [one.figure for one in calibration.comparisons]
    assert calibration.within_limit


def test_overridden_blocks_count_and_the_pool_does_not() -> None:
    """--num-gpu-blocks-override takes the place of what the pool affords."""
    report = exact_report(LLAMA, Deployment(), blocks=512)
    bigger = replace(
        report,
        settings=replace(report.settings, blocks_override=512),
        ranks=(RankReport(name="rank", pool=printed(20.0)),),
    )

    assert compare(LLAMA, Deployment(), bigger, Expected()).within_limit


def test_weights_and_pool_are_compared_by_stage() -> None:
    """Two stages of unlike weight, both ranks of the second alike."""
    ranks = (
        RankReport(name="Worker_PP0_TP0", stage=0, weights=printed(10.0), pool=printed(5.0)),
        RankReport(name="Worker_PP1_TP0", stage=1, weights=printed(11.0), pool=printed(4.0)),
        RankReport(name="Worker_PP1_TP1", stage=1, weights=printed(11.0), pool=printed(4.5)),
    )
    expected = Expected(weights_bytes=(10 * GIB, 12 * GIB), pool_bytes=(5 * GIB, 4 * GIB))

    calibration = compare(
        LLAMA, Deployment(tensor_parallel=2, pipeline_parallel=2), EngineReport(ranks=ranks), expected
    )

    weights = [one for one in calibration.comparisons if one.figure is Figure.WEIGHTS]
    assert [("Worker_PP0_TP0", True), ("2 ranks", False)] == [(one.where, one.within_limit) for one in weights]
    pool = next(one for one in calibration.comparisons if one.figure is Figure.POOL)
    assert (4 * GIB, 4 * GIB) == (pool.predicted.nominal, pool.reported.nominal)


@pytest.mark.parametrize(
    ("config", "served", "word"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "Gemma3ForCausalLM", "LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM", None),
        ({"architectures": ["LlamaForCausalLM"]}, "TransformersForCausalLM", None),
        ({"architectures": ["LlamaForCausalLM"]}, None, None),
        ({}, "Qwen2ForCausalLM", "MODEL is of type llama"),
        ({}, "NeverSeenForCausalLM", None),
        ({"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM", None),
    ],
)
def test_another_architecture_is_a_contradiction(config: dict[str, Any], served: str | None, word: str | None) -> None:
    """What the engine resolved against what MODEL's config lists."""
    found = contradiction(config, LLAMA, EngineSettings(architecture=served))

    assert (word is None) is (found is None)
    assert word is None or word in (found or "")


@pytest.mark.parametrize(
    ("version", "expected"), [("0.19.1", 0.90), ("0.20.0", 0.92), ("v0.32.0+cu130", 0.92), (None, 0.92), ("x", 0.92)]
)
def test_the_default_fraction_is_the_versions(version: str | None, expected: float) -> None:
    """0.90 up to 0.19, 0.92 since."""
    assert expected == EngineSettings(version=version).fraction_ratio


_FIGURES = {
    "num_blocks": Figure.BLOCKS,
    "kv_tokens": Figure.TOKENS,
    "max_concurrency": Figure.CONCURRENCY,
}
STRICT_ROWS = [
    row
    for row in rows()
    if row["engine"] == "vllm"
    and not row.get("num_spec")
    and any(check.strict and check.figure in _FIGURES for check in row_checks(row))
    and all(check.inside for check in row_checks(row))
]


@pytest.mark.parametrize("row", STRICT_ROWS, ids=lambda row: row["id"])
def test_published_logs_have_no_drift(row: dict[str, Any]) -> None:
    """Rows of the dataset as an engine's report: where nothing was fitted, no figure drifts."""
    architecture = parse_architecture(config_of(row["cfg"]))
    version = (row["engine_version"] or "").split(" ")[0].removesuffix("+")
    v0 = "V0" in (row["engine_version"] or "")
    report = EngineReport(
        settings=EngineSettings(version=version),
        ranks=(RankReport(name="rank 0", pool=printed(row["available_kv_gib"])),) if row["available_kv_gib"] else (),
        num_blocks=row["num_blocks"],
        tokens=row["kv_tokens"],
        concurrency=row["max_concurrency"],
        concurrency_slack=0.005,
        concurrency_context_tokens=row["max_model_len"],
        is_v0=v0,
    )
    deployment = Deployment(
        tensor_parallel=row["tp"],
        pipeline_parallel=row["pp"] or 1,
        decode_context_parallel=row["dcp"] or 1,
        block_size_tokens=None if architecture.is_hybrid else row["block_size"] or 16,
        kv_dtype=(row["kv_dtype"] or "auto").split(" ")[0],
    )

    calibration = explained(architecture, deployment, report)

    strict = {_FIGURES[check.figure] for check in row_checks(row) if check.strict and check.figure in _FIGURES}
    assert strict
    assert not [one for one in calibration.comparisons if one.figure in strict and one.drift_ratio]
