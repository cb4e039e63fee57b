"""Predicted and reported figures: the model's prediction for a deployment compared with its engine's report. Pure.

In this order: weights of each rank, the pool that a plan leaves, then blocks, tokens and concurrency. For the last
three the pool's bytes as the engine reports them go through the same arithmetic as in any plan, so that an error in the
overheads does not show as one in the layout. A printed figure that lies inside what its rounding allows has no drift.
What the engine does not report is listed as missing; reasons for a drift are `drift_reasons`' task.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from kvdiag.kv.bounds import MAX_BYTES
from kvdiag.kv.calibration.engine_report import DRIFT_LIMIT_RATIO, EngineReport, EngineSettings, PrintedSize
from kvdiag.kv.families.registry import TYPE_OF_ARCHITECTURE
from kvdiag.kv.layout.capacity import CacheLayout, Capacity, pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture

_EPSILON = 1e-9
# v1/core/kv_cache_utils.py: "KV cache size" was blocks / groups x block size until 0.20, and is concurrency x context
# length since 0.22; the change came between.
_LAST_WITH_OLD_TOKENS = (0, 20)
_FIRST_WITH_NEW_TOKENS = (0, 22)
# get_max_concurrency_for_kv_cache_config counts whole blocks of a request since 0.10; before, tokens were divided.
_FIRST_WITH_WHOLE_BLOCKS = (0, 10)


class Figure(StrEnum):
    """What is compared: its name in documents, in a table, and what it is a figure of, for a sentence."""

    WEIGHTS = "weights_bytes", "weights", "bytes of weights"
    POOL = "kv_pool_bytes", "KV pool", "bytes of KV pool"
    STATES = "state_pool_bytes", "state pool", "bytes of recurrent states"
    BLOCKS = "num_blocks", "blocks", "blocks, with the null block"
    TOKENS = "capacity_tokens", "tokens", "tokens of capacity"
    CONCURRENCY = "max_concurrency", "concurrency", "full-length requests at once"

    label: str
    phrase: str

    def __new__(cls, value: str, label: str = "", phrase: str = "") -> Self:
        """A figure is its name; label and phrase are attributes."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.phrase = value, label, phrase
        return member


SIZES = frozenset({Figure.WEIGHTS, Figure.POOL, Figure.STATES})
"""Figures in bytes, each of a rank."""

CAPACITY_FIGURES = frozenset({Figure.BLOCKS, Figure.TOKENS, Figure.CONCURRENCY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and the ends between which it may lie."""

    nominal: float
    low: float
    high: float


def exactly(value: float) -> Interval:
    """A figure without rounding."""
    return Interval(nominal=value, low=value, high=value)


def between(size: PrintedSize) -> Interval:
    """A printed size."""
    return Interval(nominal=size.nominal_bytes, low=size.low_bytes, high=size.high_bytes)


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for a drift, as an id and as text; `setting` is the changed setting that makes the figures exact."""

    id: str
    text: str
    setting: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure, predicted and reported; `where` says of which ranks."""

    figure: Figure
    predicted: Interval
    reported: Interval
    where: str = ""
    reasons: tuple[Reason, ...] = ()

    @property
    def drift_ratio(self) -> float:
        """How much more (less: negative) is predicted than reported; 0 where rounding explains the difference."""
        if self.predicted.low > self.reported.high + _EPSILON:
            return self.predicted.low / self.reported.high - 1 if self.reported.high else 1.0
        if self.predicted.high < self.reported.low - _EPSILON:
            return self.predicted.high / self.reported.low - 1
        return 0.0

    @property
    def within_limit(self) -> bool:
        """Whether it needs no reason."""
        return abs(self.drift_ratio) <= DRIFT_LIMIT_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan predicts, in bytes on one GPU of each pipeline stage. `pool_source` says where
    the plan's context, activation and graphs come from; `pool_bytes` is None where the pool is not planned,
    `why_no_weights` says why the weights are not known either.
    """

    weights_bytes: tuple[int, ...] | None = None
    pool_bytes: tuple[int, ...] | None = None
    pool_source: str = ""
    why_no_weights: str | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything that could be compared, and what was missing for the rest."""

    comparisons: tuple[Comparison, ...]
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def within_limit(self) -> bool:
        """Whether every figure agrees within the limit."""
        return all(one.within_limit for one in self.comparisons)


def contradiction(config: Mapping[str, object], architecture: Architecture, settings: EngineSettings) -> str | None:
    """Why the engine cannot serve this model: it says it resolved another architecture. None where it may."""
    served = settings.architecture
    if served is None or served.startswith("Transformers"):
        return None
    listed = config.get("architectures")
    named = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if named:
        return None if served in named else f"the engine serves {served}, but MODEL is {named[0][:80]}"
    served_type = TYPE_OF_ARCHITECTURE.get(served)
    if served_type in (None, architecture.model_type):
        return None
    return f"the engine serves {served}, but MODEL is of type {architecture.model_type}"


def compare(
    architecture: Architecture, deployment: Deployment, report: EngineReport, expected: Expected
) -> Calibration:
    """Every figure that the engine reports, compared with the model's."""
    layout = deployed_layout(architecture, deployment)
    weights = tuple(_weights(report, expected, stages=layout.ranks))
    pool = tuple(_pool(layout, report, expected))
    capacity = capacity_comparisons(architecture, deployment, report)
    reason = expected.why_no_weights
    return Calibration(
        comparisons=(*weights, *pool, *capacity),
        missing=_missing(report, expected),
        notes=report.notes if reason is None else (*report.notes, f"weights and pool are not compared: {reason}"),
    )


def _weights(report: EngineReport, expected: Expected, *, stages: int) -> Iterator[Comparison]:
    """One line for each stage and distinct figure."""
    if expected.weights_bytes is None:
        return
    ranks_by_size: dict[tuple[int, PrintedSize], list[str]] = {}
    for rank in report.ranks:
        stage = 0 if stages == 1 else rank.stage
        if rank.weights is not None and stage is not None and stage < stages:
            ranks_by_size.setdefault((stage, rank.weights), []).append(rank.name)
    for (stage, size), names in ranks_by_size.items():
        yield Comparison(
            figure=Figure.WEIGHTS,
            predicted=exactly(expected.weights_bytes[stage]),
            reported=between(size),
            where=names[0] if len(names) == 1 else f"all {len(names)} ranks",
        )


def _pool(layout: CacheLayout, report: EngineReport, expected: Expected) -> Iterator[Comparison]:
    """The pool that a plan leaves and the engine's; both of the stage where the plan has the least blocks."""
    planned, sizes = expected.pool_bytes, layout.bytes_per_block
    if planned is None:
        return
    stage = min(range(layout.ranks), key=lambda one: planned[one] / sizes[one])
    pools = _stage_pools(layout, report)
    if pools is not None and (pool := pools[stage]) is not None:
        where = report.deciding_rank.name if report.deciding_rank else ""
        reported = between(pool)
    elif report.num_blocks is not None:
        blocks, size = report.num_blocks, sizes[stage]
        reported = Interval(nominal=blocks * size, low=blocks * size, high=(blocks + 1) * size - 1)
        where = "from the blocks"
    else:
        return
    yield Comparison(figure=Figure.POOL, predicted=exactly(planned[stage]), reported=reported, where=where)


def _stage_pools(layout: CacheLayout, report: EngineReport) -> tuple[PrintedSize | None, ...] | None:
    """The smallest pool that a rank of each stage reports; None where no rank reports one."""
    if report.deciding_rank is None:
        return None
    exact = report.settings.pool_bytes
    pools: list[PrintedSize | None] = []
    for stage in range(layout.ranks):
        sizes = [
            rank.pool
            for rank in report.ranks
            if rank.pool is not None and (layout.ranks == 1 or rank.stage in (None, stage))
        ]
        least = min(sizes, key=lambda size: size.nominal_bytes, default=None)
        if least is not None and exact is not None and least.low_bytes <= exact <= least.high_bytes:
            least = PrintedSize(nominal_bytes=exact)
        pools.append(least)
    return tuple(pools)


def _spanned(values: Iterable[float]) -> Interval:
    """The interval of a figure from its values for the pool as printed and for both ends of its rounding."""
    nominal, *_ = found = tuple(values)
    return Interval(nominal=nominal, low=min(found), high=max(found))


def _capacities(
    architecture: Architecture, deployment: Deployment, layout: CacheLayout, report: EngineReport
) -> tuple[Capacity, ...]:
    """The model's capacity for the pool as printed, and for both ends of its rounding; else from the number of blocks,
    which then is not compared itself. Empty where neither is reported.
    """
    terms = deployment.request_terms(architecture)
    context = report.context_tokens or architecture.max_context_tokens
    if context is None:
        return ()
    pools = _stage_pools(layout, report)
    blocks = report.settings.blocks_override or (report.num_blocks if pools is None else None)
    if blocks is not None:
        capacity = Capacity(
            num_blocks=blocks,
            bytes_per_block=layout.bytes_per_block,
            context_tokens=context,
            blocks_per_request=layout.admission_blocks(context, terms),
        )
        return (capacity,)
    return tuple(
        pool_capacity(
            layout,
            pool_bytes=[MAX_BYTES if pool is None else getattr(pool, end) for pool in pools],
            context_tokens=context,
            terms=terms,
        )
        for end in ("nominal_bytes", "low_bytes", "high_bytes")
        if pools is not None
    )


def capacity_comparisons(
    architecture: Architecture, deployment: Deployment, report: EngineReport
) -> tuple[Comparison, ...]:
    """Blocks, tokens and concurrency that follow from the reported pool, or from the reported blocks."""
    layout = deployed_layout(architecture, deployment)
    found = _capacities(architecture, deployment, layout, report)
    if not found:
        return ()
    comparisons: list[Comparison] = []
    from_pool = report.deciding_rank is not None or report.settings.blocks_override is not None
    if report.num_blocks is not None and from_pool:
        predicted = _spanned(one.num_blocks for one in found)
        comparisons.append(Comparison(figure=Figure.BLOCKS, predicted=predicted, reported=exactly(report.num_blocks)))
    if report.tokens is not None:
        comparisons.append(_nearest(Figure.TOKENS, _tokens(found, layout, deployment, report), exactly(report.tokens)))
    if report.concurrency is not None:
        slack = report.concurrency_slack
        reported = Interval(
            nominal=report.concurrency, low=max(0.0, report.concurrency - slack), high=report.concurrency + slack
        )
        comparisons.append(_nearest(Figure.CONCURRENCY, _concurrency(found, layout, deployment, report), reported))
    return tuple(comparisons)


def _nearest(figure: Figure, predictions: Iterator[Interval], reported: Interval) -> Comparison:
    comparisons = (Comparison(figure=figure, predicted=one, reported=reported) for one in predictions)
    return min(comparisons, key=lambda one: abs(one.drift_ratio))


def _tokens(
    found: Sequence[Capacity], layout: CacheLayout, deployment: Deployment, report: EngineReport
) -> Iterator[Interval]:
    """The "KV cache size" in the ways that this version may count it."""
    release = report.settings.release
    if not report.is_v0 and (release is None or release >= _LAST_WITH_OLD_TOKENS):
        yield _spanned(one.capacity_tokens for one in found)
    if report.is_v0 or release is None or release < _FIRST_WITH_NEW_TOKENS:
        groups = max(1, len(layout.groups))
        scale = (layout.block_size_tokens or 1) * deployment.decode_context_parallel
        yield _spanned(one.num_blocks // groups * scale for one in found)


def _concurrency(
    found: Sequence[Capacity], layout: CacheLayout, deployment: Deployment, report: EngineReport
) -> Iterator[Interval]:
    release = report.settings.release
    if not report.is_v0:
        yield _spanned(one.max_concurrency for one in found)
    if report.is_v0 or release is None or release < _FIRST_WITH_WHOLE_BLOCKS:
        share = (layout.block_size_tokens or 1) * deployment.decode_context_parallel / found[0].context_tokens
        yield _spanned(one.num_blocks / max(1, len(layout.groups)) * share for one in found)


def _missing(report: EngineReport, expected: Expected) -> tuple[str, ...]:
    """What the engine does not report, as its own log lines name it."""
    missing = []
    if report.deciding_rank is None and report.num_blocks is None:
        missing.append('"Available KV cache memory"')
    if report.tokens is None and report.num_blocks is None:
        missing.append('"KV cache size: ... tokens"')
    if report.concurrency is None:
        missing.append('"Maximum concurrency"')
    if expected.weights_bytes is not None and not any(rank.weights for rank in report.ranks):
        missing.append('"Model loading took"')
    if expected.total_bytes is None and not report.settings.is_cpu:
        missing.append('the device\'s total ("Free memory on device", "total_gpu_memory")')
    return tuple(missing)
