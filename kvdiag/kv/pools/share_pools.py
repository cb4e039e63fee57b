"""Pools of TensorRT-LLM, TGI and LMDeploy: a share of the memory that is free at some moment, in blocks of tokens.

They differ in the moment and the share. TensorRT-LLM (PyTorch runtime) takes 0.9 of what is free after weights and the
peak of a trial run; its C++ runtime rounded blocks up until 0.13. TGI keeps 0.1 of the device free and takes the rest
after a trial prefill; graphs come later. LMDeploy takes 0.8 of what is free after weights and a reserve for logits.
Sources: TensorRT-LLM _util.py::KvCacheCreator and #2268; TGI flash_causal_lm.py::warmup; LMDeploy
pytorch/engine/executor/base.py. Sliding-window layers of TensorRT-LLM have pools of their own and are not modelled.
"""

import json
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.formatting import plural
from kvdiag.kv.bounds import MAX_TOKENS, check_range
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.layout.deployment import check_heads
from kvdiag.kv.layout.dtypes import KvDtype, resolve_kv_dtype
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, LayerKind, StateLayer
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.pools.engine_plan import EnginePlan, EnginePool, Machine, Part, helpful
from kvdiag.kv.pools.flag_bounds import check_settings

_LOGITS_BYTES = 2
# TensorRT-LLM's C++ runtime, which sized the pool until the PyTorch one did.
_FIRST_ROUNDING_DOWN = (1,)
# LMDeploy: the share was of the whole device until 0.2.0, and a number of sequences before 0.1.
_FIRST_SHARE, _FIRST_SHARE_OF_FREE = (0, 1), (0, 2, 1)
_FIRST_MORE_REQUESTS = (0, 10)
_MIN_BLOCKS = 2
_HIGHER_SHARE = 0.95
_WIGGLE_RATIO = 0.90
# TGI's block by its attention kernel (models/globals.py::ATTENTION, BLOCK_SIZE).
TGI_BLOCKS: Mapping[str, int] = {"flashinfer": 1, "paged": 16, "flashdecoding": 256, "flashdecoding-ipex": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """One engine's flags that decide its pool. `share` is of what `_ENGINES` names; None is the engine's default."""

    engine: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_dtype: str = "auto"
    share: float | None = None
    block_tokens: int | None = None
    max_tokens: int | None = None
    max_requests: int | None = None
    step_tokens: int | None = None
    context_tokens: int | None = None
    wiggle_ratio: float = _WIGGLE_RATIO
    version: tuple[int, ...] | None = None
    vocabulary: int = 0
    gpu_name: str | None = None

    def __post_init__(self) -> None:
        check_settings(self.engine, self)
        for name in ("tensor_parallel", "pipeline_parallel", "block_tokens", "step_tokens"):
            # Options of `kvdiag fit` that this engine may have no flag for.
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, MAX_TOKENS)

    @property
    def kind(self) -> "_Kind":
        """What is the engine's own."""
        return _ENGINES[self.engine]

    @property
    def share_ratio(self) -> float:
        """The share, the default where none is given."""
        return self.kind.share_ratio if self.share is None else self.share

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.block_tokens or self.kind.block_tokens

    @property
    def running(self) -> int:
        """The most requests at once; LMDeploy's default goes by the name of the device (utils.py::get_max_batch_size:
        so since 0.10, with other figures before).
        """
        older = self.version is not None and self.version < _FIRST_MORE_REQUESTS
        known = self.kind.older_requests_by_gpu if older else self.kind.requests_by_gpu
        by_name = (most for name, most in known.items() if name in (self.gpu_name or ""))
        return self.max_requests or next(by_name, self.kind.max_requests)

    @property
    def tokens_in_step(self) -> int:
        """The most tokens of one step."""
        return self.step_tokens or self.kind.step_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """An engine: its defaults, its flags, and which part of free memory and reserve become the pool."""

    share_ratio: float
    block_tokens: int
    step_tokens: int
    max_requests: int
    share_flag: str
    block_flag: str | None
    step_flag: str
    dtype_flag: str
    parallel_flag: str
    kept_blocks: int
    requests_by_gpu: Mapping[str, int] = field(default_factory=dict)
    older_requests_by_gpu: Mapping[str, int] = field(default_factory=dict)
    pool_bytes: Callable[[ShareSettings, int, int, Overheads], int]


def _tensorrt_pool(settings: ShareSettings, total: int, weights: int, overheads: Overheads) -> int:
    peak = weights + overheads.context_bytes + overheads.activation_bytes
    return int((total - peak) * settings.share_ratio)


def _tgi_pool(settings: ShareSettings, total: int, weights: int, overheads: Overheads) -> int:
    free = total - weights - overheads.context_bytes - overheads.activation_bytes
    return int(free - (1 - settings.share_ratio * settings.wiggle_ratio) * total)


def _lmdeploy_pool(settings: ShareSettings, total: int, weights: int, overheads: Overheads) -> int:
    if settings.version is not None and settings.version < _FIRST_SHARE_OF_FREE:
        if settings.version < _FIRST_SHARE:
            raise KvModelError("before LMDeploy 0.1 cache_max_entry_count is a number of sequences", "version")
        return int(total * settings.share_ratio)
    reserve = (settings.tokens_in_step + 2 * settings.running) * settings.vocabulary * _LOGITS_BYTES
    return int((total - weights - overheads.context_bytes - reserve) * settings.share_ratio)


_POOL_BYTES = {"trtllm": _tensorrt_pool, "tgi": _tgi_pool, "lmdeploy": _lmdeploy_pool}
_ENGINES = {
    name: _Kind(pool_bytes=_POOL_BYTES[name], **row)
    for name, row in json.loads(pkgutil.get_data(__package__, "share_engines.json") or b"").items()
}


class ShareModel:
    """A model served by one of these engines: its bytes per token, and the blocks of a pool."""

    def __init__(self, architecture: Architecture, settings: ShareSettings) -> None:
        """Compute the bytes of a token on each stage.

        Raises:
            KvModelError: the model keeps what this arithmetic does not know, or the flags are impossible.
        """
        self.architecture = architecture
        self.settings = settings
        if any(isinstance(layer, StateLayer) for layer in architecture.layers):
            raise KvModelError(f"{settings.engine} with recurrent states is not modelled: pass --engine vllm", "engine")
        check_heads(architecture, settings.tensor_parallel)
        dtype = resolve_kv_dtype(
            _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype),
            model_dtype=architecture.dtype,
            declared=architecture.declared_kv_dtype,
        )
        self.token_bytes = tuple(self._stage_bytes(dtype))

    @property
    def windows(self) -> bool:
        """Whether some layers keep a window alone, which is not modelled here."""
        return any(kind in self.architecture.kinds for kind in (LayerKind.SLIDING, LayerKind.CHUNKED))

    def _stage_bytes(self, dtype: KvDtype) -> Iterator[int]:
        stages, depth = self.settings.pipeline_parallel, self.architecture.depth
        if stages > depth:
            raise KvModelError(f"{stages} pipeline stages exceed the model's {depth} layers", "pipeline_parallel")
        start = 0
        for end in accumulate(depth // stages + (stage < depth % stages) for stage in range(stages)):
            yield sum(
                self._row(layer, dtype)
                for layer in self.architecture.layers
                if start <= layer.index < end and isinstance(layer, AttentionLayer | LatentLayer)
            )
            start = end

    def _row(self, layer: AttentionLayer | LatentLayer, dtype: KvDtype) -> int:
        if isinstance(layer, LatentLayer):
            return dtype.latent_bytes(latent_size=layer.latent_size) + (layer.indexer_row_bytes or 0)
        heads = max(1, layer.kv_heads // self.settings.tensor_parallel)
        return heads * dtype.head_bytes(head_size=layer.head_size, head_size_v=layer.head_size_v)

    def blocks(self, pool_bytes: int) -> int:
        """Blocks that the fullest stage affords."""
        block = self.settings.block
        size = max(self.token_bytes)
        if not size:
            raise KvModelError("the model has no KV cache", "engine")
        older = self.settings.version is not None and self.settings.version < _FIRST_ROUNDING_DOWN
        rounds_up = older and self.settings.engine == "trtllm"
        blocks = ceil_div(pool_bytes, size * block) if rounds_up else pool_bytes // (size * block)
        most = self.settings.max_tokens
        return max(0, blocks if most is None else min(blocks, ceil_div(most, block)))

    def with_settings(self, settings: ShareSettings) -> "ShareModel":
        """The same model with other flags."""
        return ShareModel(self.architecture, settings)


_KV_DTYPES = {
    "16": "fp8",
    "17": "fp8_e5m2",
    "4": "int4_per_token_head",
    "8": "int8_per_token_head",
    "0": "auto",
    "fp8_e4m3fn": "fp8",
}


def plan_share(
    model: ShareModel, demand: Demand, *, machine: Machine | None = None, pool_bytes: int | None = None
) -> EnginePlan:
    """What the engine makes of its flags: on GPUs, or of a pool of so many bytes per rank.

    Raises:
        KvModelError: nothing says how large the pool is.
    """
    if machine is None:
        if pool_bytes is None:
            if model.settings.max_tokens is None:
                raise KvModelError("the memory for the pool is unknown: pass --gpu or --kv-pool-bytes", "gpu")
            pool_bytes = model.settings.max_tokens * max(model.token_bytes)
        return _judged(model, demand, pool_bytes)
    plan = _plan(model, demand, machine)
    return (
        plan
        if plan.outcome is Outcome.FITS
        else replace(plan, levers=tuple(helpful(plan, _changes(model, plan, machine))))
    )


def _plan(model: ShareModel, demand: Demand, machine: Machine) -> EnginePlan:
    settings = model.settings
    overheads = machine.overheads(settings.tensor_parallel, settings.tokens_in_step)
    weights = max(machine.weights(settings.tensor_parallel, settings.pipeline_parallel, settings.tensor_parallel))
    available = settings.kind.pool_bytes(settings, machine.gpu_bytes, weights, overheads)
    plan = _judged(model, demand, max(0, available))
    used = [
        Part("weights", weights),
        Part("CUDA context", overheads.context_bytes, estimated=True),
        Part("activation", overheads.activation_bytes, estimated=True),
        *(Part(f"{pool.name} pool", pool.bytes) for pool in plan.pools),
        Part("graphs", overheads.graph_bytes, estimated=True),
    ]
    free = machine.gpu_bytes - sum(part.bytes for part in used)
    return replace(
        plan,
        gpu_bytes=machine.gpu_bytes,
        parts=(*used, Part("free", free)),
        shortfall_bytes=max(0, -available),
        reserve_shortfall_bytes=max(0, -free) if available > 0 else 0,
    )


def _judged(model: ShareModel, demand: Demand, pool_bytes: int) -> EnginePlan:
    settings, block = model.settings, model.settings.block
    blocks = model.blocks(pool_bytes)
    usable = 0 if blocks <= _MIN_BLOCKS else blocks - settings.kind.kept_blocks
    needed = ceil_div(demand.context_tokens, block)
    size = max(model.token_bytes) * block
    longest = settings.context_tokens or model.architecture.max_context_tokens or MAX_TOKENS
    notes = []
    if settings.kind.requests_by_gpu and not (settings.gpu_name or settings.max_requests):
        notes.append("--max-batch-size goes by the name of the GPU: pass --gpu NAME")
    if model.windows:
        notes.append("sliding-window layers are counted as if they kept every token")
    if blocks <= _MIN_BLOCKS:
        notes.append("the engine does not start: no memory for its KV cache")
    elif settings.kind.kept_blocks:
        kept = plural(settings.kind.kept_blocks * block, "token")
        notes.append(f"{kept} of the reported capacity can never be used: the engine keeps the first block")
    return EnginePlan(
        engine=settings.engine,
        demand=demand,
        pools=(
            EnginePool(
                name="KV",
                unit="block" if block > 1 else "token",
                units=usable,
                unit_tokens=block,
                bytes=blocks * size,
                layers=sum(isinstance(layer, AttentionLayer | LatentLayer) for layer in model.architecture.layers),
            ),
        ),
        capacity_tokens=blocks * block,
        longest_request_tokens=min(longest, usable * block),
        max_requests=min(settings.running, usable // needed),
        max_running_requests=settings.running,
        kv_bytes_per_token=max(model.token_bytes),
        headroom_bytes=(usable - needed * demand.requests) * size,
        gpus=settings.tensor_parallel * settings.pipeline_parallel,
        settings={
            settings.kind.share_flag.lstrip("-"): settings.share_ratio,
            **({} if settings.kind.block_flag is None else {settings.kind.block_flag: block}),
        },
        notes=tuple(notes),
    )


def _changes(model: ShareModel, plan: EnginePlan, machine: Machine) -> Iterator[tuple[str, str, EnginePlan]]:
    """Changed flags that may help."""
    settings, kind = model.settings, model.settings.kind
    wider = settings.tensor_parallel * 2
    changes: list[tuple[str, str, dict[str, Any]]] = []
    if not plan.reserve_shortfall_bytes and settings.share_ratio < _HIGHER_SHARE:
        changes.append(
            (f"{kind.share_flag} {_HIGHER_SHARE}", "leaves less room for spikes and graphs", {"share": _HIGHER_SHARE})
        )
    if plan.reserve_shortfall_bytes:
        lower = math.floor(settings.share_ratio * 90) / 100
        changes.append((f"{kind.share_flag} {lower:g}", "less KV cache, more room for graphs", {"share": lower}))
    step = settings.tokens_in_step // 2
    changes += [
        (f"{kind.step_flag} {step}", "longer prompts take more steps", {"step_tokens": step}),
        (
            kind.dtype_flag,
            "half the bytes per token, slight accuracy loss",
            {"kv_dtype": kind.dtype_flag.split()[-1]},
        ),
        (f"{kind.parallel_flag} {wider}", f"{plan.gpus * 2} GPUs instead of {plan.gpus}", {"tensor_parallel": wider}),
    ]
    for change, price, changed in changes:
        with suppress(KvModelError):
            yield change, price, _plan(model.with_settings(replace(settings, **changed)), plan.demand, machine)
