"""Reasons for a drift: each setting that can be confirmed, what is said where none is, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.drift_reasons import explain, settled_batches
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import Calibration, Comparison, Expected, Figure, compare, exactly
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, Platform, deployed_layout
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import StateCacheMode
from tests.unit.kv.dataset import config_of


def model(name: str, layers: int) -> Architecture:
    """A model of the dataset with fewer layers, of the kinds and in the order of its class."""
    return parse_architecture({**config_of(name), "num_hidden_layers": layers, "layer_types_count": None})


LLAMA = model("Llama-3.1-8B", 2)
GEMMA = model("gemma-3-27b", 12)
QWEN = model("Qwen3.6-27B", 8)
"""Gated delta nets beside attention, and a draft layer that its config describes."""

UNKNOWN = "unknown: how the engine lays out this architecture; pass --kv-bytes-per-token"
MAY_DRAFT = "a draft model may share the pool; the engine does not report whether there is one"
ANOTHER = "the engine serves a different model: 'm'"
ANOTHER_FORMAT = "the engine serves a different model or weight format: 'm'"
PADDED = "weights are padded or repacked on load, or LoRA slots are included"
HOLDS_LESS = "the checkpoint has fewer weights than the config describes, or other ranks hold the rest"
SMALLER_RANK = (
    "another rank may have a smaller pool (1 of 2 ranks report theirs), and vLLM uses the smallest for all ranks"
)
OVERHEADS = "context, activation and graphs differ from the plan's (estimate)"


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


def reasons(architecture: Architecture, planned: Deployment, report: EngineReport) -> set[str]:
    """All reasons that are given for any figure."""
    found = compare(architecture, planned, report, Expected())
    explained = explain(found, architecture, planned, report, Expected()).comparisons
    return {reason for one in explained for reason in one.reasons}


@pytest.mark.parametrize(
    ("architecture", "planned", "served", "told", "change"),
    [
        (GEMMA, {}, {"max_num_batched_tokens": 8192}, {}, "--max-num-batched-tokens 8192"),
        (GEMMA, {}, {"hybrid_manager": False}, {}, "--no-hybrid-kv-cache-manager"),
        (GEMMA, {"hybrid_manager": False}, {}, {}, "--hybrid-kv-cache-manager"),
        (GEMMA, {}, {"async_scheduling": False}, {"max_num_batched_tokens": 2048}, "synchronous scheduling"),
        (LLAMA, {}, {"kv_dtype": "fp8"}, {}, "--kv-dtype fp8"),
        (LLAMA, {"kv_dtype": "fp8"}, {"kv_dtype": "bfloat16"}, {}, "--kv-dtype bfloat16"),
        (LLAMA, {}, {"kv_dtype": "int8_per_token_head"}, {}, "--kv-dtype int8_per_token_head"),
        (LLAMA, {}, {"kv_dtype": "int4_per_token_head"}, {}, "--kv-dtype int4_per_token_head"),
        (LLAMA, {}, {"tensor_parallel": 2}, {}, "--tp 2"),
        (LLAMA, {}, {"tensor_parallel": 4}, {}, "--tp 4"),
        (LLAMA, {}, {"tensor_parallel": 8}, {}, "--tp 8"),
        (QWEN, {}, {"state_cache_mode": StateCacheMode.NONE}, {}, "--mamba-cache-mode none"),
        (QWEN, {"prefix_caching": False}, {}, {}, "--mamba-cache-mode align"),
        (QWEN, {}, {"state_dtype": "float16"}, {}, "--mamba-ssm-cache-dtype float16"),
        (QWEN, {"state_dtype": "float16"}, {}, {}, "--mamba-ssm-cache-dtype float32"),
        *(
            (
                QWEN,
                {},
                {"speculative_tokens": tokens, "draft_layers": QWEN.draft_layers},
                {},
                f"a draft model in the same pool (--num-speculative-tokens {tokens})",
            )
            for tokens in (1, 2, 3)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_gives_the_figures_is_the_reason(
    architecture: Architecture, planned: dict[str, Any], served: dict[str, Any], told: dict[str, Any], change: str
) -> None:
    """To the last digit; then no other kind of reason is given."""
    report = report_of(architecture, Deployment(**served), **told)

    found = reasons(architecture, Deployment(**planned), report)

    assert any(f"with {change} " in reason for reason in found)
    assert all(reason.endswith("matches exactly") for reason in found)


@pytest.mark.parametrize(
    ("architecture", "planned", "served", "told", "change"),
    [
        (GEMMA, {}, {"max_num_batched_tokens": 8192}, {"max_num_batched_tokens": 2048}, "--max-num-batched"),
        (GEMMA, {}, {"async_scheduling": False}, {"async_scheduling": True}, "scheduling without"),
        (GEMMA, {"platform": Platform.CPU}, {"async_scheduling": False}, {}, "scheduling without"),
        (LLAMA, {}, {"tensor_parallel": 2}, {"tensor_parallel": 1}, "--tp"),
        (LLAMA, {"tensor_parallel": 2}, {"tensor_parallel": 1}, {}, "--tp 2"),
        (LLAMA, {"kv_dtype": "fp8"}, {"tensor_parallel": 2, "kv_dtype": "fp8"}, {}, "--kv-dtype fp8 "),
        (QWEN, {}, {"state_cache_mode": StateCacheMode.NONE}, {"state_cache_mode": "align"}, "--mamba-cache-mode"),
    ],
    ids=["batches", "scheduling", "a CPU", "ranks", "the ranks it has", "the dtype it has", "states"],
)
def test_what_the_engine_tells_is_not_guessed_otherwise(
    architecture: Architecture, planned: dict[str, Any], served: dict[str, Any], told: dict[str, Any], change: str
) -> None:
    """A setting that is told, or planned already, is no reason."""
    found = reasons(architecture, Deployment(**planned), report_of(architecture, Deployment(**served), **told))

    assert found
    assert not {reason for reason in found if reason.startswith(change)}


def test_a_setting_that_gives_some_of_the_figures_is_no_reason() -> None:
    """With 8 bits the blocks come out, and the tokens do not."""
    report = replace(report_of(LLAMA, Deployment(kv_dtype="fp8")), tokens=1)

    assert not {reason for reason in reasons(LLAMA, Deployment(), report) if "gives exactly" in reason}


def test_three_reasons_are_enough() -> None:
    """Of five kinds of what cannot be excluded the likeliest are given."""
    report = EngineReport(
        settings=EngineSettings(model="m", speculative_tokens=2),
        ranks=(RankReport(name="", pool=PrintedSize(nominal_bytes=1)),),
    )
    one = Comparison(figure=Figure.BLOCKS, predicted=exactly(200), reported=exactly(100))

    found = explain(Calibration(comparisons=(one,)), LLAMA, Deployment(tensor_parallel=2), report, Expected())

    assert (
        "the draft model's layers use part of the pool and are not in MODEL's config",
        SMALLER_RANK,
        ANOTHER,
    ) == found.comparisons[0].reasons


@pytest.mark.parametrize(
    ("figure", "predicted", "settings", "expected"),
    [
        (Figure.BLOCKS, 110, {}, (MAY_DRAFT, UNKNOWN)),
        (Figure.BLOCKS, 110, {"speculative_tokens": 0}, (UNKNOWN,)),
        (Figure.TOKENS, 125, {"model": "m"}, (MAY_DRAFT, UNKNOWN)),
        (Figure.TOKENS, 126, {"model": "m"}, (MAY_DRAFT, ANOTHER, UNKNOWN)),
        (Figure.CONCURRENCY, 126, {}, (MAY_DRAFT, UNKNOWN)),
        (Figure.BLOCKS, 75, {"model": "m"}, (UNKNOWN,)),
        (Figure.BLOCKS, 74, {"model": "m"}, (ANOTHER, UNKNOWN)),
        (Figure.WEIGHTS, 110, {"model": "m"}, (HOLDS_LESS,)),
        (Figure.WEIGHTS, 125, {"model": "m"}, (HOLDS_LESS,)),
        (Figure.WEIGHTS, 126, {"model": "m"}, (ANOTHER_FORMAT, HOLDS_LESS)),
        (Figure.WEIGHTS, 126, {}, (HOLDS_LESS,)),
        (Figure.WEIGHTS, 90, {}, (PADDED,)),
        (Figure.WEIGHTS, 75, {"model": "m"}, (PADDED,)),
        (
            Figure.WEIGHTS,
            74,
            {"model": "m", "quantization": "awq", "speculative_tokens": 1},
            (
                ANOTHER_FORMAT,
                "the engine runs with --quantization awq: pass its format with --weights",
                "the draft model's weights are included",
            ),
        ),
        (
            Figure.WEIGHTS,
            110,
            {"quantization": "fp8", "speculative_tokens": 1},
            ("the engine runs with --quantization fp8: pass its format with --weights", HOLDS_LESS),
        ),
        (Figure.POOL, 110, {}, (OVERHEADS,)),
        (Figure.POOL, 101, {}, ()),
        (Figure.WEIGHTS, 99, {}, ()),
    ],
)
def test_what_cannot_be_excluded(
    figure: Figure, predicted: int, settings: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """Of 100 reported, by which way and how far it is off: beyond a quarter it may be another model."""
    one = Comparison(figure=figure, predicted=exactly(predicted), reported=exactly(100))

    found = explain(
        Calibration(comparisons=(one,)),
        LLAMA,
        Deployment(),
        EngineReport(settings=EngineSettings(**settings)),
        Expected(pool_source="estimate"),
    )

    assert expected == found.comparisons[0].reasons


@pytest.mark.parametrize(
    ("architecture", "v0", "told", "expected"),
    [
        (LLAMA, False, 1, "a token takes less than predicted: check the KV dtype, and for layers that share a cache"),
        (LLAMA, False, 0, UNKNOWN),
        (LLAMA, True, 1, UNKNOWN),
        (GEMMA, True, 1, "the V0 engine keeps the full context in every layer"),
        (GEMMA, False, 0, UNKNOWN),
    ],
)
def test_fewer_blocks_than_reported(architecture: Architecture, v0: bool, told: int, expected: str) -> None:
    """Less predicted than there is: a token costs less, where the pool's bytes are told."""
    ranks = (RankReport(name="", pool=PrintedSize(nominal_bytes=1)),) * told
    one = Comparison(figure=Figure.BLOCKS, predicted=exactly(90), reported=exactly(100))

    found = explain(
        Calibration(comparisons=(one,)), architecture, Deployment(), EngineReport(ranks=ranks, is_v0=v0), Expected()
    )

    assert expected == found.comparisons[0].reasons[0]
    assert UNKNOWN == found.comparisons[0].reasons[-1]


@pytest.mark.parametrize(
    ("ranks", "stages", "told", "expected"),
    [(1, 1, 1, False), (2, 1, 1, True), (1, 2, 1, True), (2, 2, 3, True), (2, 1, 2, False), (2, 1, 0, False)],
)
def test_a_rank_that_does_not_tell_may_have_less(ranks: int, stages: int, told: int, expected: bool) -> None:
    """Where some of them tell their pool and some do not."""
    report = EngineReport(ranks=(RankReport(name="", pool=PrintedSize(nominal_bytes=1)),) * told)
    one = Comparison(figure=Figure.BLOCKS, predicted=exactly(110), reported=exactly(100))

    deployment = Deployment(tensor_parallel=ranks, pipeline_parallel=stages)
    (found,) = explain(Calibration(comparisons=(one,)), LLAMA, deployment, report, Expected()).comparisons

    assert expected is any(f"({told} of {ranks * stages} ranks" in reason for reason in found.reasons)


@pytest.mark.parametrize("figure", [Figure.BLOCKS, Figure.WEIGHTS])
def test_the_name_of_another_model_is_cut_short(figure: Figure) -> None:
    """80 characters of what the engine was started with."""
    one = Comparison(figure=figure, predicted=exactly(200), reported=exactly(100))
    report = EngineReport(settings=EngineSettings(model="m" * 90, speculative_tokens=0))

    (found,) = explain(Calibration(comparisons=(one,)), LLAMA, Deployment(), report, Expected()).comparisons

    assert found.reasons[0].endswith(f": '{'m' * 80}'")


def test_a_drafter_that_is_planned_is_no_reason() -> None:
    """Nor is it guessed with another number of tokens."""
    planned = Deployment(speculative_tokens=1, draft_layers=QWEN.draft_layers)

    found = reasons(QWEN, planned, report_of(QWEN, replace(planned, speculative_tokens=2)))
    assert found
    assert not {reason for reason in found if reason.startswith("a drafter in the same pool")}


def test_what_else_drifts_is_a_reason_for_the_pool() -> None:
    """Weights leave it, capacity follows from it; what does not drift needs no reason."""
    figures = {
        figure: Comparison(figure=figure, predicted=exactly(110), reported=exactly(100))
        for figure in (Figure.WEIGHTS, Figure.POOL, Figure.TOKENS)
    }
    fine = Comparison(figure=Figure.BLOCKS, predicted=exactly(100), reported=exactly(100))

    def of_pool(*drifting: Figure) -> tuple[str, ...]:
        comparisons = (*(figures[figure] for figure in (Figure.POOL, *drifting)), fine)
        expected = Expected(pool_source="estimate")
        found = explain(Calibration(comparisons=comparisons), LLAMA, Deployment(), EngineReport(), expected)
        assert () == found.comparisons[-1].reasons
        return found.comparisons[0].reasons

    weights, capacity = (
        "the weights differ, which changes what is left for the pool",
        "the capacity differs too: see its reasons",
    )
    assert [(OVERHEADS,), (weights, OVERHEADS), (OVERHEADS, capacity), (weights, OVERHEADS, capacity)] == [
        of_pool(),
        of_pool(Figure.WEIGHTS),
        of_pool(Figure.TOKENS),
        of_pool(Figure.WEIGHTS, Figure.TOKENS),
    ]


@pytest.mark.parametrize(
    ("architecture", "served", "told", "expected"),
    [
        (GEMMA, 8192, {}, 8192),
        (GEMMA, 1024, {}, 1024),
        (GEMMA, 4096, {}, 4096),
        (GEMMA, 16_384, {}, 16_384),
        (GEMMA, 32_768, {}, 32_768),
        (GEMMA, 2048, {}, None),
        (GEMMA, 8192, {"max_num_batched_tokens": 2048}, None),
        (GEMMA, 3000, {}, None),
        (LLAMA, 8192, {}, None),
    ],
    ids=[
        "another",
        "the least",
        "twice as many",
        "16 Ki",
        "the whole request",
        "as planned",
        "told",
        "an unusual one",
        "no windows",
    ],
)
def test_the_batch_that_the_figures_give_away(
    architecture: Architecture, served: int, told: dict[str, Any], expected: int | None
) -> None:
    """Planned with 2,048: one of the usual sizes that gives every figure, where the engine does not tell its own."""
    report = report_of(architecture, Deployment(max_num_batched_tokens=served), **told)

    assert expected == settled_batches(architecture, Deployment(), report)


def test_without_figures_no_batch_is_settled() -> None:
    """An engine that reports nothing contradicts nothing."""
    assert settled_batches(GEMMA, Deployment(), EngineReport()) is None
