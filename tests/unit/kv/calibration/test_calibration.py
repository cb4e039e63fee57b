"""Predicted against reported: an engine that runs as modelled, and the published logs as reports."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.drift_reasons import explain
from kvdiag.kv.calibration.engine_report import GIB, EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import Calibration, Expected, Figure, compare
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture
from tests.unit.kv.dataset import config_of, row_checks, rows

LLAMA = parse_architecture(config_of("Llama-3.1-8B"))
GEMMA = parse_architecture(config_of("gemma-3-27b"))


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


_FIGURES = {"num_blocks": Figure.BLOCKS, "kv_tokens": Figure.TOKENS, "max_concurrency": Figure.CONCURRENCY}
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
