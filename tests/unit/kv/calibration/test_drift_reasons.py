"""Reasons for a drift: each setting that is confirmed, what is given where none is, and in which order."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.drift_reasons import explain, settled_batches
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import (
    Calibration,
    Comparison,
    Expected,
    Figure,
    Reason,
    compare,
    exactly,
)
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LayerKind
from kvdiag.kv.layout.pages import StateCacheMode
from tests.unit.kv.dataset import config_of


def model(name: str, layers: int) -> Architecture:
    """A model of the dataset with fewer layers, of the kinds and in the order of its class."""
    return parse_architecture({**config_of(name), "num_hidden_layers": layers, "layer_types_count": None})


LLAMA = model("Llama-3.1-8B", 2)
GEMMA = model("gemma-3-27b", 12)
QWEN = model("Qwen3.6-27B", 8)
"""Gated delta nets with attention layers, and a draft layer that the config describes."""
WHISPER = model("whisper-large-v3", 2)
"""With an encoder; it cannot be served without the hybrid manager."""


def report_of(architecture: Architecture, deployment: Deployment, **settings: Any) -> EngineReport:
    """What an engine with these settings reports of a pool of 100,000 blocks, for requests of 65,536 tokens."""
    layout = deployed_layout(architecture, deployment)
    per_request = layout.admission_blocks(65_536, deployment.request_terms(architecture))
    return EngineReport(
        settings=EngineSettings(version="0.32.0", **settings),
        ranks=(RankReport(name="rank", pool=PrintedSize(nominal_bytes=100_000 * layout.bytes_per_block[0])),),
        num_blocks=100_000,
        tokens=int(100_000 / per_request * 65_536),
        concurrency=100_000 / per_request,
        concurrency_context_tokens=65_536,
    )


def reasons(architecture: Architecture, planned: Deployment, report: EngineReport) -> set[Reason]:
    """All reasons for any drift; every figure that drifts has one."""
    found = compare(architecture, planned, report, Expected())
    explained = explain(found, architecture, planned, report, Expected()).comparisons
    assert all(bool(one.reasons) is not one.within_limit for one in explained)
    return {reason for one in explained for reason in one.reasons}


def reasons_for(
    figure: Figure,
    predicted: int,
    report: EngineReport,
    *,
    architecture: Architecture = LLAMA,
    deployment: Deployment | None = None,
) -> tuple[Reason, ...]:
    """The reasons for one figure of which 100 are reported."""
    one = Comparison(figure=figure, predicted=exactly(predicted), reported=exactly(100))
    found = explain(
        Calibration(comparisons=(one,)), architecture, deployment or Deployment(), report, Expected()
    ).comparisons
    return found[0].reasons


def ids(found: tuple[Reason, ...]) -> list[str]:
    """The kinds of reasons, in order."""
    return [one.id for one in found]


@pytest.mark.parametrize(
    ("architecture", "planned", "served", "reported", "setting"),
    [
        (GEMMA, {}, {"max_num_batched_tokens": 8192}, {}, "--max-num-batched-tokens 8192"),
        (GEMMA, {}, {"hybrid_manager": False}, {}, "--no-hybrid-kv-cache-manager"),
        (GEMMA, {"hybrid_manager": False}, {}, {}, "--hybrid-kv-cache-manager"),
        (GEMMA, {}, {"async_scheduling": False}, {"max_num_batched_tokens": 2048}, "synchronous scheduling"),
        (LLAMA, {}, {"kv_dtype": "fp8"}, {}, "--kv-dtype fp8"),
        (LLAMA, {"kv_dtype": "fp8"}, {"kv_dtype": "bfloat16"}, {}, "--kv-dtype bfloat16"),
        (LLAMA, {}, {"kv_dtype": "int8_per_token_head"}, {}, "--kv-dtype int8_per_token_head"),
        (LLAMA, {}, {"kv_dtype": "int4_per_token_head"}, {}, "--kv-dtype int4_per_token_head"),
        (WHISPER, {}, {"kv_dtype": "fp8"}, {}, "--kv-dtype fp8"),
        *((LLAMA, {}, {"tensor_parallel": ranks}, {}, f"--tp {ranks}") for ranks in (2, 4, 8)),
        (QWEN, {}, {"state_cache_mode": StateCacheMode.NONE}, {}, "--mamba-cache-mode none"),
        (QWEN, {"prefix_caching": False}, {}, {}, "--mamba-cache-mode align"),
        (QWEN, {}, {"state_dtype": "float16"}, {}, "--mamba-ssm-cache-dtype float16"),
        (QWEN, {"state_dtype": "float16"}, {}, {}, "--mamba-ssm-cache-dtype float32"),
        *(
            (
                QWEN,
                {},
                {"speculative_tokens": drafts, "draft_layers": QWEN.draft_layers},
                {},
                f"--num-speculative-tokens {drafts}",
            )
            for drafts in (1, 2, 3)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_gives_the_figures_is_the_reason(
    architecture: Architecture, planned: dict[str, Any], served: dict[str, Any], reported: dict[str, Any], setting: str
) -> None:
    """To the last digit; then no other kind of reason is given."""
    found = reasons(architecture, Deployment(**planned), report_of(architecture, Deployment(**served), **reported))

    assert any((one.setting or "").rstrip(")").endswith(setting) for one in found)
    assert {"setting"} == {one.id for one in found}


@pytest.mark.parametrize(
    ("architecture", "planned", "served", "reported", "setting"),
    [
        (GEMMA, {}, {"max_num_batched_tokens": 8192}, {"max_num_batched_tokens": 2048}, "--max-num-batched"),
        (GEMMA, {}, {"async_scheduling": False}, {"async_scheduling": True}, "synchronous"),
        (GEMMA, {"platform": Platform.CPU}, {"async_scheduling": False}, {}, "synchronous"),
        (LLAMA, {}, {"tensor_parallel": 2}, {"tensor_parallel": 1}, "--tp"),
        (LLAMA, {"tensor_parallel": 2}, {"tensor_parallel": 1}, {}, "--tp 2"),
        (LLAMA, {"kv_dtype": "fp8"}, {"tensor_parallel": 2, "kv_dtype": "fp8"}, {}, "--kv-dtype fp8"),
        (QWEN, {}, {"state_cache_mode": StateCacheMode.NONE}, {"state_cache_mode": "align"}, "--mamba-cache-mode"),
        (
            QWEN,
            {"speculative_tokens": 1, "draft_layers": QWEN.draft_layers},
            {"speculative_tokens": 2, "draft_layers": QWEN.draft_layers},
            {},
            "a draft model",
        ),
    ],
    ids=["batches", "scheduling", "a CPU", "ranks", "the ranks it has", "the dtype it has", "states", "drafts"],
)
def test_a_setting_that_is_reported_or_planned_is_no_reason(
    architecture: Architecture, planned: dict[str, Any], served: dict[str, Any], reported: dict[str, Any], setting: str
) -> None:
    """What is known is not guessed to be different."""
    found = reasons(architecture, Deployment(**planned), report_of(architecture, Deployment(**served), **reported))

    assert found
    assert not {one for one in found if (one.setting or "").startswith(setting)}


def test_a_drafter_of_one_layer_is_the_reason() -> None:
    """An EAGLE head whose layer is like the windowed ones: each group of the pool then has one layer."""
    drafter = replace(next(layer for layer in GEMMA.layers if isinstance(layer, AttentionLayer)), kind=LayerKind.FULL)
    served = Deployment(
        max_num_batched_tokens=8192,
        speculative_tokens=3,
        draft_layers=(replace(drafter, index=GEMMA.depth, window_tokens=None),),
        draft_modules=False,
    )

    found = reasons(GEMMA, Deployment(), report_of(GEMMA, served))

    (setting,) = {one.setting for one in found}
    assert setting is not None
    assert setting.startswith("a draft model")
    assert "--max-num-batched-tokens 8192" in setting


def test_a_setting_that_gives_some_of_the_figures_is_no_reason() -> None:
    """With 8 bits the blocks are exact, and the tokens are not."""
    report = replace(report_of(LLAMA, Deployment(kv_dtype="fp8")), tokens=1)

    found = reasons(LLAMA, Deployment(), report)
    assert found
    assert "setting" not in {one.id for one in found}


def test_three_reasons_are_enough() -> None:
    """Of five kinds of what cannot be excluded the likeliest are given."""
    report = EngineReport(
        settings=EngineSettings(model="m", speculative_tokens=2),
        ranks=(RankReport(name="", pool=PrintedSize(nominal_bytes=1)),),
    )

    found = reasons_for(Figure.BLOCKS, 200, report, deployment=Deployment(tensor_parallel=2))

    assert ["draft_model", "smaller_rank", "different_model"] == ids(found)


MAY_DRAFT, UNKNOWN, ANOTHER = "possible_draft_model", "unknown_layout", "different_model"
FEWER, PADDED, FORMAT = "fewer_weights", "padded_weights", "weight_format"


@pytest.mark.parametrize(
    ("figure", "predicted", "settings", "expected"),
    [
        (Figure.BLOCKS, 110, {}, [MAY_DRAFT, UNKNOWN]),
        (Figure.BLOCKS, 110, {"speculative_tokens": 0}, [UNKNOWN]),
        (Figure.TOKENS, 125, {"model": "m"}, [MAY_DRAFT, UNKNOWN]),
        (Figure.TOKENS, 126, {"model": "m"}, [MAY_DRAFT, ANOTHER, UNKNOWN]),
        (Figure.CONCURRENCY, 126, {}, [MAY_DRAFT, UNKNOWN]),
        (Figure.BLOCKS, 75, {"model": "m"}, [UNKNOWN]),
        (Figure.BLOCKS, 74, {"model": "m"}, [ANOTHER, UNKNOWN]),
        (Figure.WEIGHTS, 125, {"model": "m"}, [FEWER]),
        (Figure.WEIGHTS, 126, {"model": "m"}, [ANOTHER, FEWER]),
        (Figure.WEIGHTS, 126, {}, [FEWER]),
        (Figure.WEIGHTS, 90, {}, [PADDED]),
        (Figure.WEIGHTS, 75, {"model": "m"}, [PADDED]),
        (
            Figure.WEIGHTS,
            74,
            {"model": "m", "quantization": "awq", "speculative_tokens": 1},
            [ANOTHER, FORMAT, "draft_weights"],
        ),
        (Figure.WEIGHTS, 110, {"quantization": "fp8", "speculative_tokens": 1}, [FORMAT, FEWER]),
        (Figure.POOL, 110, {}, ["overheads_differ"]),
        (Figure.POOL, 101, {}, []),
        (Figure.WEIGHTS, 99, {}, []),
    ],
)
def test_what_cannot_be_excluded(figure: Figure, predicted: int, settings: dict[str, Any], expected: list[str]) -> None:
    """Of 100 reported, by which way and how far it is off: beyond a quarter it may be another model."""
    assert expected == ids(reasons_for(figure, predicted, EngineReport(settings=EngineSettings(**settings))))


@pytest.mark.parametrize(
    ("architecture", "v0", "reporting", "expected"),
    [
        (LLAMA, False, 1, ["cheaper_tokens", UNKNOWN]),
        (LLAMA, False, 0, [UNKNOWN]),
        (LLAMA, True, 1, [UNKNOWN]),
        (GEMMA, True, 1, ["v0_full_context", UNKNOWN]),
        (GEMMA, False, 0, [UNKNOWN]),
    ],
)
def test_fewer_blocks_than_reported(architecture: Architecture, v0: bool, reporting: int, expected: list[str]) -> None:
    """Less predicted than there is: a token costs less, where the pool's bytes are reported."""
    report = EngineReport(ranks=(RankReport(name="", pool=PrintedSize(nominal_bytes=1)),) * reporting, is_v0=v0)

    assert expected == ids(reasons_for(Figure.BLOCKS, 90, report, architecture=architecture))


@pytest.mark.parametrize(
    ("ranks", "stages", "reporting", "expected"),
    [(1, 1, 1, False), (2, 1, 1, True), (1, 2, 1, True), (2, 2, 3, True), (2, 1, 2, False), (2, 1, 0, False)],
)
def test_a_rank_that_does_not_report_may_have_less(ranks: int, stages: int, reporting: int, expected: bool) -> None:
    """Where some ranks report their pool and some do not."""
    report = EngineReport(ranks=(RankReport(name="", pool=PrintedSize(nominal_bytes=1)),) * reporting)
    deployment = Deployment(tensor_parallel=ranks, pipeline_parallel=stages)

    found = reasons_for(Figure.BLOCKS, 110, report, deployment=deployment)

    assert expected is ("smaller_rank" in ids(found))
    assert expected is any(f"({reporting} of {ranks * stages} ranks" in one.text for one in found)


@pytest.mark.parametrize("figure", [Figure.BLOCKS, Figure.WEIGHTS])
def test_the_name_of_another_model_is_cut_short(figure: Figure) -> None:
    """80 characters of what the engine was started with."""
    report = EngineReport(settings=EngineSettings(model="m" * 90, speculative_tokens=0))

    assert reasons_for(figure, 200, report)[0].text.endswith(f": '{'m' * 80}'")


def test_what_else_drifts_is_a_reason_for_the_pool() -> None:
    """Weights leave it, capacity follows from it; what does not drift needs no reason."""
    figures = {
        figure: Comparison(figure=figure, predicted=exactly(110), reported=exactly(100))
        for figure in (Figure.WEIGHTS, Figure.POOL, Figure.TOKENS)
    }
    fine = Comparison(figure=Figure.BLOCKS, predicted=exactly(100), reported=exactly(100))

    def of_pool(*drifting: Figure) -> list[str]:
        comparisons = (*(figures[figure] for figure in (Figure.POOL, *drifting)), fine)
        expected = Expected(pool_source="the source")
        found = explain(Calibration(comparisons=comparisons), LLAMA, Deployment(), EngineReport(), expected)
        assert () == found.comparisons[-1].reasons
        assert any("(the source)" in one.text for one in found.comparisons[0].reasons)
        return ids(found.comparisons[0].reasons)

    weights, overheads, capacity = "weights_differ", "overheads_differ", "capacity_differs"
    assert [[overheads], [weights, overheads], [overheads, capacity], [weights, overheads, capacity]] == [
        of_pool(),
        of_pool(Figure.WEIGHTS),
        of_pool(Figure.TOKENS),
        of_pool(Figure.WEIGHTS, Figure.TOKENS),
    ]


@pytest.mark.parametrize(
    ("architecture", "served", "reported", "expected"),
    [
        *((GEMMA, tokens, {}, tokens) for tokens in (1024, 4096, 8192, 16_384, 32_768)),
        (GEMMA, 2048, {}, None),
        (GEMMA, 8192, {"max_num_batched_tokens": 2048}, None),
        (GEMMA, 3000, {}, None),
        (LLAMA, 8192, {}, None),
    ],
)
def test_the_batch_size_that_the_figures_show(
    architecture: Architecture, served: int, reported: dict[str, Any], expected: int | None
) -> None:
    """Planned with 2,048: the usual size that gives every figure, for a model with windows and not reported."""
    report = report_of(architecture, Deployment(max_num_batched_tokens=served), **reported)

    assert expected == settled_batches(architecture, Deployment(), report)


def test_without_figures_no_batch_is_settled() -> None:
    """An engine that reports nothing contradicts nothing."""
    assert settled_batches(GEMMA, Deployment(), EngineReport()) is None
