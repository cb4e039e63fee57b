"""An engine's report of its own memory, from its startup log or its metrics endpoint. Values only; missing is None.

One type for both sources, so that a comparison does not depend on where the figures come from. A log prints GiB with
two decimals, so a printed size is an interval, and what follows from it is compared as one. What a version leaves out
follows from its number where its source shows it (the default memory fraction, graphs inside it or not), and from
nothing else. Ranks are kept apart: the smallest pool decides for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvdiag.kv.bounds import MAX_BYTES, check_range
from kvdiag.kv.layout.pages import StateCacheMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdiag.model import Facts

GIB = 1 << 30

DRIFT_LIMIT_RATIO = 0.02
"""Above it a figure needs a reason: rounding, page alignment and the allocator's slack stay below."""

# config/cache.py::CacheConfig.gpu_memory_utilization: 0.9 up to vLLM 0.19, 0.92 from 0.20.
_FRACTION_SINCE_0_20_RATIO = 0.92
_FRACTION_BEFORE_RATIO = 0.90
_FIRST_WITH_LARGER_FRACTION = (0, 20)
# v1/worker/gpu_worker.py subtracts its estimate of the graphs from the pool since 0.21
# (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS); before, graphs were captured outside the memory fraction.
_FIRST_WITH_GRAPHS_IN_FRACTION = (0, 21)

_STATE_CACHE_MODES = frozenset(StateCacheMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedSize:
    """A size as it was printed: somewhere between `low_bytes` and `high_bytes`, both included. `excess_bytes` is how
    much of something else may be in it.
    """

    nominal_bytes: int
    slack_bytes: int = 0
    excess_bytes: int = 0

    def __post_init__(self) -> None:
        check_range("size", self.nominal_bytes, 0, MAX_BYTES)
        check_range("size", self.slack_bytes, 0, MAX_BYTES)

    @property
    def low_bytes(self) -> int:
        """The least it can be."""
        return max(0, self.nominal_bytes - self.slack_bytes - self.excess_bytes)

    @property
    def high_bytes(self) -> int:
        """The most it can be."""
        return self.nominal_bytes + self.slack_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one worker process says of its GPU.

    `states` have a pool of their own; `consumed` is weights and non-torch memory together (0.27 and later);
    `activation` includes the graphs' estimate where the engine applies one
    (v1/worker/gpu_worker.py::Worker.compile_or_warm_up_model); of what is `free` the engine takes a share as its pool.
    """

    name: str
    stage: int | None = None
    weights: PrintedSize | None = None
    pool: PrintedSize | None = None
    states: PrintedSize | None = None
    activation: PrintedSize | None = None
    peak_torch: PrintedSize | None = None
    non_torch: PrintedSize | None = None
    consumed: PrintedSize | None = None
    graphs_actual: PrintedSize | None = None
    graphs_estimate: PrintedSize | None = None
    total: PrintedSize | None = None
    free: PrintedSize | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine says it was started; only what was printed. `flags` are settings that its pools alone have, by the
    names in kvdiag/kv/pools; `host_weights` is whether part of the weights stays in host memory.
    """

    version: str | None = None
    model: str | None = None
    architecture: str | None = None
    device: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    decode_context_parallel: int | None = None
    max_model_len_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    block_size_tokens: int | None = None
    memory_fraction_ratio: float | None = None
    pool_bytes: int | None = None
    blocks_override: int | None = None
    speculative_tokens: int | None = None
    slots: int | None = None
    shares_pool: bool | None = None
    window_tokens: int | None = None
    prefix_caching: bool | None = None
    hybrid_manager: bool | None = None
    async_scheduling: bool | None = None
    state_cache_mode: str | None = None
    state_dtype: str | None = None
    enforce_eager: bool | None = None
    graphs_estimated: bool | None = None
    host_weights: bool | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor of the version."""
        parts = (self.version or "").lstrip("v").split(".")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal():
            return int(parts[0]), int(parts[1])
        return None

    @property
    def is_cpu(self) -> bool:
        """Whether the engine runs on the CPU, where the pool is not a share of a device."""
        return self.device == "cpu"

    @property
    def fraction_ratio(self) -> float:
        """The memory fraction, the version's default where none is printed."""
        if self.memory_fraction_ratio is not None:
            return self.memory_fraction_ratio
        release = self.release
        older = release is not None and release < _FIRST_WITH_LARGER_FRACTION
        return _FRACTION_BEFORE_RATIO if older else _FRACTION_SINCE_0_20_RATIO

    @property
    def graphs_in_fraction(self) -> bool:
        """Whether the engine keeps room for its graphs inside the memory fraction."""
        if self.enforce_eager:
            return False
        if self.graphs_estimated is not None:
            return self.graphs_estimated
        release = self.release
        return release is None or release >= _FIRST_WITH_GRAPHS_IN_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine's memory as it reports it, with every rank that reports.

    `tokens` and `concurrency` are the engine's own "KV cache size" and "Maximum concurrency" for requests of
    `concurrency_context_tokens`; `concurrency_slack` is half of the last printed digit, 0 where it is exact.
    `state_slots` are those of a pool for recurrent states that requests can use.
    `cache_layers` are the layers of each cache of tokens that it lists, `None` where it lists no layers.
    `model_settings` are those of the model's GGUF file, where the engine lists them.
    """

    settings: EngineSettings = field(default_factory=EngineSettings)
    engine_name: str | None = None
    ranks: tuple[RankReport, ...] = ()
    cache_layers: tuple[int, ...] | None = None
    model_settings: Mapping[str, Any] | None = None
    num_blocks: int | None = None
    tokens: int | None = None
    state_slots: int | None = None
    concurrency: float | None = None
    concurrency_slack: float = 0.0
    concurrency_context_tokens: int | None = None
    is_v0: bool = False
    notes: tuple[str, ...] = ()

    @property
    def context_tokens(self) -> int | None:
        """The request length, in tokens, that the reported concurrency is for."""
        return self.concurrency_context_tokens or self.settings.max_model_len_tokens

    @property
    def deciding_rank(self) -> RankReport | None:
        """The rank with the smallest pool: the engine gives every rank what the smallest one affords
        (v1/core/kv_cache_utils.py::get_kv_cache_configs).
        """
        reporting = [rank for rank in self.ranks if rank.pool is not None]
        return min(reporting, key=lambda rank: rank.pool.nominal_bytes if rank.pool else 0, default=None)

    @property
    def total_bytes(self) -> int | None:
        """The device's memory as the engine sees it, of the rank with the least."""
        totals = [rank.total.nominal_bytes for rank in self.ranks if rank.total is not None]
        return min(totals, default=None)


def page_report(facts: Facts) -> EngineReport:
    """The same from a live server's metrics endpoint. Of several data-parallel engines, the one with fewest blocks.

    The page has no sizes of weights or activation, and on a GPU none of the pool.
    """
    settings = EngineSettings(
        version=facts.engine_version,
        model=facts.model,
        max_model_len_tokens=facts.max_model_len_tokens,
        tensor_parallel=facts.tensor_parallel,
        pipeline_parallel=facts.pipeline_parallel,
    )
    pool = min(facts.pools, key=lambda one: one.total_blocks, default=None)
    if pool is None:
        return EngineReport(settings=settings, engine_name=facts.engine_name)
    settings = replace(
        settings,
        kv_dtype=pool.cache_dtype,
        block_size_tokens=pool.block_tokens,
        memory_fraction_ratio=pool.memory_fraction_ratio,
        pool_bytes=pool.pool_bytes,
        prefix_caching=pool.prefix_caching,
        state_cache_mode=pool.state_cache_mode if pool.state_cache_mode in _STATE_CACHE_MODES else None,
        state_dtype=None if pool.state_dtype == "auto" else pool.state_dtype,
    )
    size = None if pool.pool_bytes is None else PrintedSize(nominal_bytes=pool.pool_bytes)
    several = f"{len(facts.pools)} data-parallel engines: compared with engine {pool.engine}, the smallest pool"
    return EngineReport(
        settings=settings,
        engine_name=facts.engine_name,
        ranks=() if size is None else (RankReport(name="each rank", pool=size),),
        num_blocks=pool.total_blocks,
        tokens=pool.capacity_tokens,
        concurrency=pool.max_concurrency,
        is_v0=pool.usable_blocks == pool.total_blocks,
        notes=(several,) if len(facts.pools) > 1 else (),
    )
