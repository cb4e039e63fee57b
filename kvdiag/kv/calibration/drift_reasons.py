"""Why a reported figure differs from the predicted one: what the arithmetic confirms, then what it cannot exclude.

A reason is confirmed where the model with that one setting changed gives every reported capacity to the last digit: the
changes that the report leaves open are tried one by one. Only if none does, a capacity gets the reasons that its sign
and size leave possible. Weights and the pool's bytes have no such test, since overheads are not exact. At most three
reasons are kept, the likeliest first, and a figure within the limit gets none.
"""

import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.engine_report import EngineReport
from kvdiag.kv.calibration.predicted_vs_reported import (
    CAPACITY_FIGURES,
    Calibration,
    Comparison,
    Expected,
    Figure,
    Reason,
    capacity_comparisons,
)
from kvdiag.kv.layout.deployment import USUAL_BATCHED_TOKENS, Deployment
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LayerKind
from kvdiag.kv.layout.pages import StateCacheMode

_USUAL_DRAFTS = (1, 2, 3)
ANOTHER_MODEL_RATIO = 0.25
"""So far off, it is more likely another model than another setting."""

_MAX_REASONS = 3
_TEXTS: Mapping[str, str] = json.loads(pkgutil.get_data(__package__, "drift_reasons.json") or b"")


def explain(
    calibration: Calibration,
    architecture: Architecture,
    deployment: Deployment,
    report: EngineReport,
    expected: Expected,
) -> Calibration:
    """The same comparisons, each that drifts with its likely reasons, the likeliest first."""
    if calibration.within_limit:
        return calibration
    confirmed = tuple(_confirmed(architecture, deployment, report))
    explained = []
    for one in calibration.comparisons:
        if one.within_limit:
            explained.append(one)
            continue
        if one.figure is Figure.WEIGHTS:
            reasons = _weight_reasons(one, report)
        elif one.figure is Figure.POOL:
            reasons = _pool_reasons(calibration, expected)
        else:
            reasons = iter(confirmed) if confirmed else _capacity_reasons(one, architecture, deployment, report)
        explained.append(replace(one, reasons=tuple(reasons)[:_MAX_REASONS]))
    return replace(calibration, comparisons=tuple(explained))


def settled_batches(architecture: Architecture, deployment: Deployment, report: EngineReport) -> int | None:
    """The max_num_batched_tokens of an engine that does not report it, as its plan for windowed layers shows it. None
    where the deployment's own value gives the reported figures, or no usual value does.
    """
    if report.settings.max_num_batched_tokens is not None or not _depends_on_batches(architecture):
        return None
    if not any(one.drift_ratio for one in capacity_comparisons(architecture, deployment, report)):
        return None
    for tokens in USUAL_BATCHED_TOKENS:
        changed = replace(deployment, max_num_batched_tokens=tokens)
        comparisons = capacity_comparisons(architecture, changed, report)
        if comparisons and not any(one.drift_ratio for one in comparisons):
            return tokens
    return None


def eagle_drafts(architecture: Architecture, deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with a drafter of one layer that keeps every token, as EAGLE's are, with the heads of each kind of
    the model's own layers.
    """
    heads = {
        (layer.kv_heads, layer.head_size, layer.head_size_v)
        for layer in architecture.layers
        if isinstance(layer, AttentionLayer)
    }
    for kv_heads, size, size_v in sorted(heads):
        drafter = AttentionLayer(
            index=architecture.depth, kind=LayerKind.FULL, kv_heads=kv_heads, head_size=size, head_size_v=size_v
        )
        drafts = max(deployment.speculative_tokens, 1)
        yield replace(deployment, speculative_tokens=drafts, draft_layers=(drafter,), draft_modules=False)


def _reason(reason: str, *, setting: str | None = None, **figures: object) -> Reason:
    """A reason of `drift_reasons.json` with its figures filled in."""
    return Reason(reason, _TEXTS[reason].format(setting=setting, **figures), setting)


def _depends_on_batches(architecture: Architecture) -> bool:
    return bool(set(architecture.kinds) & {LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.CROSS_ATTENTION})


def _confirmed(architecture: Architecture, deployment: Deployment, report: EngineReport) -> Iterator[Reason]:
    """Single changes that make every capacity exact."""
    for text, changed in _changes(architecture, deployment, report):
        try:
            comparisons = capacity_comparisons(architecture, changed, report)
        except KvModelError:
            continue
        if comparisons and not any(one.drift_ratio for one in comparisons):
            yield _reason("setting", setting=text)


def _changes(
    architecture: Architecture, deployment: Deployment, report: EngineReport
) -> Iterator[tuple[str, Deployment]]:
    settings = report.settings
    batches: tuple[int, ...] = ()
    if _depends_on_batches(architecture):
        batches = USUAL_BATCHED_TOKENS if settings.max_num_batched_tokens is None else ()
        for tokens in batches:
            yield f"--max-num-batched-tokens {tokens}", replace(deployment, max_num_batched_tokens=tokens)
        managed = deployment.hybrid_manager is not False
        text = "--no-hybrid-kv-cache-manager" if managed else "--hybrid-kv-cache-manager"
        yield text, replace(deployment, hybrid_manager=not managed)
    if architecture.draft_layers and not deployment.draft_layers:
        for tokens in _USUAL_DRAFTS:
            drafted = replace(deployment, speculative_tokens=tokens, draft_layers=architecture.draft_layers)
            yield f"a draft model in the same pool (--num-speculative-tokens {tokens})", drafted
    if not architecture.draft_layers and not deployment.draft_layers and settings.speculative_tokens != 0:
        for tokens in batches or (deployment.max_num_batched_tokens,):
            batched = f" (--max-num-batched-tokens {tokens})" if batches else ""
            for drafted in eagle_drafts(architecture, replace(deployment, max_num_batched_tokens=tokens)):
                yield f"a draft model of one layer in the same pool{batched}", drafted
    if architecture.is_hybrid and settings.state_cache_mode is None:
        for mode in (StateCacheMode.NONE, StateCacheMode.ALIGN):
            yield f"--mamba-cache-mode {mode}", replace(deployment, state_cache_mode=mode)
    if architecture.is_hybrid:
        for dtype in ("float32", "float16"):
            yield f"--mamba-ssm-cache-dtype {dtype}", replace(deployment, state_dtype=dtype)
    for name in ("fp8", "bfloat16", "int8_per_token_head", "int4_per_token_head"):
        if name != deployment.kv_dtype:
            yield f"--kv-dtype {name}", replace(deployment, kv_dtype=name)
    if settings.async_scheduling is None and deployment.platform is Platform.CUDA:
        yield "synchronous scheduling", replace(deployment, async_scheduling=False)
    if settings.tensor_parallel is None:
        for ranks in (2, 4, 8):
            if ranks != deployment.tensor_parallel:
                yield f"--tp {ranks}", replace(deployment, tensor_parallel=ranks)


def _capacity_reasons(
    one: Comparison, architecture: Architecture, deployment: Deployment, report: EngineReport
) -> Iterator[Reason]:
    settings = report.settings
    ranks = deployment.tensor_parallel * deployment.pipeline_parallel
    reporting = sum(rank.pool is not None for rank in report.ranks)
    if one.drift_ratio > 0:
        if settings.speculative_tokens and not deployment.draft_layers:
            yield _reason("draft_model")
        if 0 < reporting < ranks:
            yield _reason("smaller_rank", reporting=reporting, ranks=ranks)
        if settings.speculative_tokens is None:
            yield _reason("possible_draft_model")
    elif reporting and not report.is_v0:
        yield _reason("cheaper_tokens")
    if abs(one.drift_ratio) > ANOTHER_MODEL_RATIO and settings.model:
        yield _reason("different_model", what="a different model", model=settings.model[:80])
    if report.is_v0 and set(architecture.kinds) - {LayerKind.FULL}:
        yield _reason("v0_full_context")
    yield _reason("unknown_layout")


def _weight_reasons(one: Comparison, report: EngineReport) -> Iterator[Reason]:
    settings = report.settings
    if abs(one.drift_ratio) > ANOTHER_MODEL_RATIO and settings.model:
        yield _reason("different_model", what="a different model or weight format", model=settings.model[:80])
    if settings.quantization is not None:
        yield _reason("weight_format", quantization=settings.quantization)
    if one.drift_ratio < 0:
        if settings.speculative_tokens:
            yield _reason("draft_weights")
        yield _reason("padded_weights")
    else:
        yield _reason("fewer_weights")


def _pool_reasons(calibration: Calibration, expected: Expected) -> Iterator[Reason]:
    weights = [one for one in calibration.comparisons if one.figure is Figure.WEIGHTS and not one.within_limit]
    if weights:
        yield _reason("weights_differ")
    yield _reason("overheads_differ", source=expected.pool_source)
    if any(not one.within_limit for one in calibration.comparisons if one.figure in CAPACITY_FIGURES):
        yield _reason("capacity_differs")
