"""Pools of TensorRT-LLM, TGI and LMDeploy: a share of the memory that is free at some moment, in blocks of tokens.

They differ in the moment and the share. TensorRT-LLM (PyTorch runtime) takes 0.9 of what is free after weights and the
peak of a trial run; what it makes of windows and states is in tensorrt_pools.py. TGI keeps 0.1 of the device free and
takes the rest after a trial prefill; graphs come later. LMDeploy takes 0.8 of what is free after weights and a reserve
for logits. Sources: TensorRT-LLM _util.py::KvCacheCreator; TGI flash_causal_lm.py::warmup; LMDeploy
pytorch/engine/executor/base.py.
"""

import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, MAX_TOKENS, check_range
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.layout.deployment import check_heads
from kvdiag.kv.layout.dtypes import KvDtype, resolve_kv_dtype
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, LayerKind, StateLayer
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.pools import tensorrt_pools
from kvdiag.kv.pools.engine_plan import TITLES, EnginePool
from kvdiag.kv.pools.flag_bounds import check_settings

_LOGITS_BYTES = 2
# LMDeploy: the share was of the whole device until 0.2.0, and a number of sequences before 0.1.
_FIRST_SHARE, _FIRST_SHARE_OF_FREE = (0, 1), (0, 2, 1)
_FIRST_MORE_REQUESTS = (0, 10)
_MIN_BLOCKS = 2
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
    windows: tuple[int, ...] | None = None
    state_dtype: str | None = None
    state_interval: int = 0
    manager_v2: str = "auto"
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
    def uses_manager_v2(self) -> bool:
        """Whether TensorRT-LLM runs its KVCacheManagerV2, as far as a flag says so."""
        return self.manager_v2 == "true"

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
    older_block_tokens: tuple[int, ...] = ()
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


def default_blocks(engine: str) -> tuple[int, ...]:
    """Tokens of a block by default in this version and in older ones, where the engine is one of these."""
    return (_ENGINES[engine].block_tokens, *_ENGINES[engine].older_block_tokens) if engine in _ENGINES else ()


def default_share(engine: str) -> float | None:
    """The share of free memory by default, where the engine is one of these."""
    return _ENGINES[engine].share_ratio if engine in _ENGINES else None


@dataclass(frozen=True, slots=True)
class _Stage:
    """A pipeline stage on one rank: bytes of a token in each layer that keeps tokens, and one request's states."""

    rows: tuple[int, ...]
    state_bytes: int
    state_layers: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class SizedPool:
    """A pool of one window size: its blocks, and the bytes of a token in each of its layers; a window of None keeps
    every token.
    """

    settings: ShareSettings
    name: str
    blocks: int
    rows: tuple[int, ...]
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(self.rows) * self.settings.block

    @property
    def units(self) -> int:
        """Blocks that requests can hold: none where the engine does not start."""
        return 0 if self.blocks <= _MIN_BLOCKS else self.blocks - self.settings.kind.kept_blocks

    @property
    def pool(self) -> EnginePool:
        """The pool as a plan has it."""
        return EnginePool(
            name=self.name,
            unit="block" if self.settings.block > 1 else "token",
            units=self.units,
            unit_tokens=self.settings.block,
            bytes=self.blocks * self.block_bytes,
            layers=len(self.rows),
        )

    def needed(self, context_tokens: int) -> int:
        """Blocks of a request of that length: those of its window and the one that leaves it."""
        block = self.settings.block
        return ceil_div(context_tokens if self.window is None else min(context_tokens, self.window + block), block)


class ShareModel:
    """A model served by one of these engines: its bytes per token, and the blocks of a pool."""

    def __init__(self, architecture: Architecture, settings: ShareSettings) -> None:
        """Compute the bytes of a token on each stage.

        Raises:
            KvModelError: the model keeps what this arithmetic does not know, or the flags are impossible.
        """
        self.architecture = architecture
        self.settings = settings
        if architecture.is_hybrid and settings.engine != "trtllm":
            raise KvModelError(f"recurrent states with {TITLES[settings.engine]} are not modelled", "engine")
        check_heads(architecture, settings.tensor_parallel)
        dtype = resolve_kv_dtype(
            _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype),
            model_dtype=architecture.dtype,
            declared=architecture.declared_kv_dtype,
        )
        self._stages = tuple(self._stages_of(dtype))
        if settings.uses_manager_v2:
            tensorrt_pools.check_manager_v2(settings.windows, longest=self.longest, states=self.states is not None)

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """Bytes of a token on each stage."""
        return tuple(stage.token_bytes for stage in self._stages)

    @property
    def windows(self) -> bool:
        """Whether some layers need a window alone."""
        return any(kind in self.architecture.kinds for kind in (LayerKind.SLIDING, LayerKind.CHUNKED))

    @property
    def own_windows(self) -> tuple[int, ...]:
        """How many tokens each layer needs."""
        return tuple(
            getattr(layer, "window_tokens", None) or getattr(layer, "chunk_tokens", None) or self.longest
            for layer in self.architecture.layers
            if isinstance(layer, AttentionLayer | LatentLayer)
        )

    @property
    def longest(self) -> int:
        """The most tokens of a request."""
        return self.settings.context_tokens or self.architecture.max_context_tokens or MAX_TOKENS

    @property
    def states(self) -> EnginePool | None:
        """The states of a hybrid's requests, on the stage with the most of them."""
        stage = max(self._stages, key=lambda stage: stage.state_bytes)
        slots = self.settings.running * self.settings.pipeline_parallel
        if not stage.state_bytes:
            return None
        return EnginePool(
            name="state", unit="slot", units=slots, bytes=slots * stage.state_bytes, layers=stage.state_layers
        )

    def _stages_of(self, dtype: KvDtype) -> Iterator[_Stage]:
        settings, depth = self.settings, self.architecture.depth
        stages = settings.pipeline_parallel
        if stages > depth:
            raise KvModelError(f"{stages} pipeline stages exceed the model's {depth} layers", "pipeline_parallel")
        start = 0
        for end in accumulate(depth // stages + (stage < depth % stages) for stage in range(stages)):
            layers = [layer for layer in self.architecture.layers if start <= layer.index < end]
            held = [layer for layer in layers if isinstance(layer, StateLayer)]
            yield _Stage(
                tuple(self._row(layer, dtype) for layer in layers if isinstance(layer, AttentionLayer | LatentLayer)),
                tensorrt_pools.state_bytes(
                    held,
                    ranks=settings.tensor_parallel,
                    model_dtype=self.architecture.dtype,
                    state_dtype=settings.state_dtype,
                ),
                len(held),
            )
            start = end

    def _row(self, layer: AttentionLayer | LatentLayer, dtype: KvDtype) -> int:
        if isinstance(layer, LatentLayer):
            return dtype.latent_bytes(latent_size=layer.latent_size) + (layer.indexer_row_bytes or 0)
        heads = ceil_div(layer.kv_heads, self.settings.tensor_parallel)
        # TensorRT-LLM pads V to the width of K (resource_manager.py::get_cache_bytes_per_token: kv_factor x head_dim).
        width_v = layer.head_size if self.settings.engine == "trtllm" else layer.head_size_v
        return heads * dtype.head_bytes(head_size=layer.head_size, head_size_v=width_v)

    def pools(self, pool_bytes: int) -> tuple[SizedPool, ...]:
        """The pools that the stage with the fewest blocks affords."""
        holding = [stage for stage in self._stages if stage.rows]
        if not holding:
            raise KvModelError("the model has no KV cache", "engine")
        if self.settings.windows is None:
            count, rows = min((self._blocks(stage, pool_bytes), stage.rows) for stage in holding)
            return (SizedPool(self.settings, "KV", count, rows),)
        return tuple(
            SizedPool(self.settings, f"window {window:,} KV", count, rows, window)
            for window, count, rows in self._windows(pool_bytes)
        )

    def _windows(self, pool_bytes: int) -> Sequence[tuple[int, int, tuple[int, ...]]]:
        return tensorrt_pools.window_blocks(
            max(self._stages, key=lambda stage: stage.token_bytes).rows,
            self.settings.windows or (self.longest,),
            longest=self.longest,
            pool_bytes=pool_bytes,
            block=self.settings.block,
            version=self.settings.version,
        )

    def bytes_of(self, tokens: int) -> int:
        """The pool that reports so many tokens.

        Raises:
            KvModelError: the states of requests, which the engine counts as tokens, are in it.
        """
        if self.settings.windows is not None:
            parts = [sum(rows) for _, _, rows in self._windows(MAX_BYTES)]
            return int(tokens * len(parts) / sum(1 / part for part in parts))
        if self._states_in_pool:
            raise KvModelError(
                "the pool holds states, which its tokens do not show: pass --kv-pool-bytes", "max_tokens"
            )
        return tokens * max(self.token_bytes)

    @property
    def _states_in_pool(self) -> bool:
        return self.states is not None and tensorrt_pools.states_in_pool(self.settings.version)

    @property
    def apart_bytes(self) -> int:
        """States that are outside the pool."""
        return 0 if self.states is None or self._states_in_pool else self.states.bytes

    @property
    def fixed_bytes(self) -> int:
        """States that the pool holds however small it is."""
        return 0 if self.states is None else self.states.bytes - self.apart_bytes

    def _blocks(self, stage: _Stage, pool_bytes: int) -> int:
        """Blocks of a stage's pool, after the states that it holds."""
        settings, size = self.settings, stage.token_bytes
        if self._states_in_pool:
            pool_bytes -= settings.running * settings.pipeline_parallel * stage.state_bytes
            size += ceil_div(stage.state_bytes, settings.state_interval) if settings.state_interval else 0
        older = settings.engine == "trtllm" and tensorrt_pools.rounds_up(settings.version)
        divided = ceil_div if older else int.__floordiv__
        blocks = divided(pool_bytes, size * settings.block)
        if settings.max_tokens is not None:
            most = tensorrt_pools.tokens_for(settings.max_tokens, manager_v2=settings.uses_manager_v2)
            blocks = min(blocks, divided(most, settings.block))
        return max(0, blocks)

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
