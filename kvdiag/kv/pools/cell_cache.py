"""llama.cpp's server: cells of its caches, exactly; and whether model, caches and buffers fit on a GPU.

In this order: the context is padded to 256 cells; slots share it (unified) or each gets its part, rounded up; a sliding
window has a cache of its own, as long as window and batch need; states have a row per slot; then bytes. All of that
follows from flags and model alone (src/llama-context.cpp, llama-kv-cache*.cpp, llama-memory-recurrent.cpp, b11434). A
device must also hold the weights, a compute buffer of the largest graph and CUDA's context, which are estimates.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import check_range
from kvdiag.kv.fit.overheads import GIB
from kvdiag.kv.fit.plan import Demand
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.pools.cell_model import CellLayer, CellModel
from kvdiag.kv.pools.engine_plan import EnginePlan, EnginePool, Part, helpful
from kvdiag.kv.pools.flag_bounds import check_settings
from kvdiag.kv.pools.gguf_header import BLOCKS, row_bytes

_PAD_CELLS = 256
# common/arg.cpp, tools/server/server.cpp: -np unset is 4 slots that share one context (since December 2025).
_DEFAULT_SLOTS = 4
_MAX_SLOTS = 256
_STATE_ELEMENT_BYTES = 4
_CONTEXT_BYTES = GIB * 45 // 100
# Live buffers of a layer's graph per token of a batch, in hidden sizes of F32: residual, norm, Q, K, V, feed-forward.
_HIDDEN_COPIES = 12
PER_CELL = ("KV", "indexer", "draft KV")
"""The caches of which each token of the context has a row."""

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""common/arg.cpp::kv_cache_types"""

_ROLLS_BACK = ("draft-mtp", "draft-eagle3", "draft-dflash")
"""common/common.h::need_n_rs_seq: with these each state has a copy for every drafted token (b9849)."""

_CHEAPER = {"f32": "f16", "f16": "q8_0", "bf16": "q8_0", "q8_0": "q4_0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """llama-server's flags that decide its caches; None is the server's default."""

    context_size: int = 0
    slots: int | None = None
    unified: bool | None = None
    batch: int = 2_048
    ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool | None = None
    swa_full: bool = False
    kv_offload: bool = True
    gpu_layers: int | None = None
    fit: bool | None = None
    slot_size: int | None = None
    spec_type: str = "none"
    draft_tokens: int = 3
    rope_scaling: str | None = None
    rope_scale: float | None = None
    yarn_tokens: int = 0

    def __post_init__(self) -> None:
        check_settings("llamacpp", self)
        check_range("parallel", self.slot_count, 1, _MAX_SLOTS)
        for flag, name in (("cache_type_k", self.type_k), ("cache_type_v", self.type_v)):
            if name not in CACHE_TYPES:
                raise KvModelError(f"{flag} is {name[:40]!a}: pass one of {', '.join(CACHE_TYPES)}", flag)

    @property
    def state_copies(self) -> int:
        """How often each slot's states are kept, to be rolled back to behind a drafted token."""
        rolls_back = any(kind in _ROLLS_BACK for kind in self.spec_type.split(","))
        return 1 + self.draft_tokens if rolls_back else 1

    @property
    def is_auto(self) -> bool:
        """Whether the server chooses the slots: -np is not given, or -1."""
        return self.slots in (None, -1)

    @property
    def slot_count(self) -> int:
        """How many requests are served at once."""
        return _DEFAULT_SLOTS if self.is_auto else self.slots or 0

    @property
    def shares_cells(self) -> bool:
        """Whether slots share one context: by default as long as -np is not given."""
        return self.is_auto if self.unified is None else self.unified


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCache:
    """The caches of one start. `cells` and `window_cells` are of each stream."""

    streams: int
    context_tokens: int
    slot_tokens: int
    pools: tuple[EnginePool, ...]

    @property
    def bytes(self) -> int:
        """All caches."""
        return sum(pool.bytes for pool in self.pools)


def size_cells(model: CellModel, settings: CellSettings) -> CellCache:
    """The caches that llama-server allocates.

    Raises:
        KvModelError: it would refuse these flags for this model.
    """
    _check_types(model, settings)
    slots = settings.slot_count
    # Without -c, --fit (on by default) gives the trained context to each slot (b11549: common_params_fit_impl), and
    # --kv-unified-per-slot that many tokens.
    together = settings.slot_size is None and (settings.shares_cells or settings.fit is False)
    trained = _trained_tokens(model, settings)
    unset = model.trained_tokens if settings.fit is False else trained
    asked = settings.context_size or (settings.slot_size or unset) * (1 if together else slots)
    if asked < 1:
        raise KvModelError("the model states no context length: pass -c", "ctx_size")
    if settings.context_size == 1:
        # common.cpp::common_init_from_params: two tokens, for which the batch has no room (b11549).
        raise KvModelError("with -c 1 llama.cpp aborts in its warm-up: pass a longer context", "ctx_size")
    context = _padded(asked)
    streams = 1 if settings.shares_cells else slots
    cells = context if settings.shares_cells else _padded(context // slots)
    pools = list(_row_pools(model, settings, asked=asked, cells=cells, streams=streams))
    if model.index_layers:
        size = row_bytes(settings.type_k, model.index_elements) * model.index_layers * cells * streams
        pools.append(_pool("indexer", cells, streams, model.index_layers, size, 0))
    if model.state_layers:
        row = (model.conv_elements + model.recurrent_elements) * _STATE_ELEMENT_BYTES
        pools.append(
            EnginePool(
                name="states",
                unit="slot",
                units=slots,
                bytes=row * model.state_layers * slots * settings.state_copies,
                layers=model.state_layers,
            )
        )
    if model.draft_layers and "draft-mtp" in settings.spec_type.split(","):
        drafting = replace(settings, type_k="f16", type_v="f16")
        pools.append(_rows("draft KV", list(model.draft_layers), model, drafting, cells, streams))
    return CellCache(
        streams=streams,
        context_tokens=context if settings.shares_cells else cells * slots,
        slot_tokens=min(cells, trained or cells, settings.slot_size or cells),
        pools=tuple(pools),
    )


def _trained_tokens(model: CellModel, settings: CellSettings) -> int:
    """The trained context; scaled by YaRN with another factor than in training (llama_init_from_model)."""
    scale = settings.rope_scale or model.rope_scale
    if (settings.rope_scaling or model.rope_scaling) != "yarn" or scale == model.rope_scale:
        return model.trained_tokens
    return int((settings.yarn_tokens or model.yarn_tokens or model.trained_tokens) * scale)


def _padded(tokens: int) -> int:
    return ceil_div(tokens, _PAD_CELLS) * _PAD_CELLS


def _flash_attention(model: CellModel, settings: CellSettings) -> bool:
    return model.flash_attention and settings.flash_attention is not False


def _check_types(model: CellModel, settings: CellSettings) -> None:
    """llama-context.cpp::llama_init_from_model."""
    if model.latent and settings.type_k != settings.type_v:
        raise KvModelError(
            f"llama.cpp refuses cache types {settings.type_k} and {settings.type_v} for latent rows: pass one type",
            "cache_type_v",
        )
    flash = _flash_attention(model, settings)
    if BLOCKS[settings.type_v][0] > 1 and not flash:
        raise KvModelError(f"cache_type_v {settings.type_v} needs flash attention: pass -fa on", "cache_type_v")
    if flash:
        for layer in model.layers:
            for name, size in ((settings.type_k, layer.k_head_elements), (settings.type_v, layer.v_head_elements)):
                if size % BLOCKS[name][0]:
                    raise KvModelError(
                        f"llama.cpp refuses cache type {name} for heads of {size}: its blocks have {BLOCKS[name][0]}",
                        "cache_type_k",
                    )


def _row_pools(
    model: CellModel, settings: CellSettings, *, asked: int, cells: int, streams: int
) -> Iterator[EnginePool]:
    """The cache of all tokens, then that of windows (llama_kv_cache_iswa)."""
    full = [layer for layer in model.layers if not layer.windowed]
    windowed = [layer for layer in model.layers if layer.windowed]
    if full or windowed:
        yield _rows("KV", full, model, settings, cells, streams)
    if windowed:
        ubatch = min(settings.ubatch, settings.batch, asked)
        windows = (model.window_tokens or 0) * (settings.slot_count if settings.shares_cells else 1)
        window_cells = cells if settings.swa_full else _padded(min(cells, windows + ubatch))
        yield _rows("sliding window", windowed, model, settings, window_cells, streams)


def _rows(
    name: str, layers: list[CellLayer], model: CellModel, settings: CellSettings, cells: int, streams: int
) -> EnginePool:
    flash = _flash_attention(model, settings)
    k = sum(row_bytes(settings.type_k, layer.k_elements) for layer in layers)
    v = 0
    if not model.latent:
        v = sum(row_bytes(settings.type_v, layer.v_elements if flash else model.widest_v_elements) for layer in layers)
    return _pool(name, cells, streams, len(layers), k * cells * streams, v * cells * streams)


def _pool(name: str, cells: int, streams: int, layers: int, k_bytes: int, v_bytes: int) -> EnginePool:
    return EnginePool(
        name=name,
        unit="cell",
        units=cells,
        streams=streams,
        layers=layers,
        bytes=k_bytes + v_bytes,
        k_bytes=k_bytes,
        v_bytes=v_bytes,
    )


def plan_cells(
    model: CellModel,
    settings: CellSettings,
    demand: Demand,
    *,
    weights_bytes: int | None = None,
    gpu_bytes: int | None = None,
    gpus: int = 1,
) -> EnginePlan:
    """Whether the server starts with these flags on the GPUs, and serves the demand."""
    plan = _plan(model, settings, demand, weights_bytes, gpu_bytes, gpus)
    return replace(plan, levers=tuple(helpful(plan, _changes(model, settings, plan, weights_bytes))))


def _plan(
    model: CellModel,
    settings: CellSettings,
    demand: Demand,
    weights_bytes: int | None,
    gpu_bytes: int | None,
    gpus: int,
) -> EnginePlan:
    cache = size_cells(model, settings)
    check_range("gpus", gpus, 1, model.depth)
    layers = settings.gpu_layers
    if gpu_bytes is not None and layers is not None and 0 <= layers < model.depth:
        kept = f"--n-gpu-layers keeps {model.depth - layers} of {model.depth} layers in host memory"
        raise KvModelError(f"{kept}; a plan counts all on the GPU: omit --gpu, or pass all", "gpu_layers")
    slots = settings.slot_count
    rows = [pool for pool in cache.pools if pool.unit == "cell"]
    per_token = sum(pool.bytes / (pool.units * pool.streams) for pool in rows if pool.name in PER_CELL)
    together = cache.slot_tokens if cache.streams > 1 else cache.context_tokens
    held = slots if cache.streams > 1 or not rows else min(slots, together // demand.context_tokens)
    fits = held if demand.context_tokens <= cache.slot_tokens else 0
    share = ceil_div(model.depth, gpus) / model.depth
    parts: list[Part] = []
    headroom = 0
    if gpu_bytes is not None and weights_bytes is not None:
        on_device = cache.bytes if settings.kv_offload else 0
        parts = [
            Part("weights", round(weights_bytes * share)),
            *(Part(f"{pool.name} cache", round(pool.bytes * share)) for pool in cache.pools if on_device),
            Part("compute buffer", _compute_bytes(model, settings, cache), estimated=True),
            Part("CUDA context", _CONTEXT_BYTES, estimated=True),
        ]
        headroom = gpu_bytes - sum(part.bytes for part in parts)
    return EnginePlan(
        engine="llamacpp",
        demand=demand,
        pools=cache.pools,
        capacity_tokens=cache.context_tokens,
        longest_request_tokens=cache.slot_tokens,
        max_requests=fits,
        max_running_requests=slots,
        kv_bytes_per_token=per_token or None,
        headroom_bytes=headroom,
        shortfall_bytes=max(0, -headroom),
        gpus=gpus,
        gpu_bytes=gpu_bytes if parts else None,
        parts=tuple(parts),
        notes=_notes(settings) if parts else (),
        settings={
            "n_ctx": cache.context_tokens,
            "n_ctx_seq": cache.pools[0].units if rows else cache.context_tokens // cache.streams,
            "n_ctx_slot": cache.slot_tokens,
            "n_parallel": slots,
            "kv_unified": settings.shares_cells,
            "cache_type_k": settings.type_k,
            "cache_type_v": settings.type_v,
        },
    )


def _notes(settings: CellSettings) -> tuple[str, ...]:
    if settings.context_size or settings.slot_size or settings.fit is False:
        return ()
    return ("without -c, --fit shortens the context to what the device holds; pass -c for what is computed here",)


def _compute_bytes(model: CellModel, settings: CellSettings, cache: CellCache) -> int:
    """About what the largest graph needs: logits or a layer's activations of a batch, and without flash attention the
    attention scores of the whole context.
    """
    tokens = min(settings.ubatch, settings.batch, cache.context_tokens)
    graph = tokens * (model.vocabulary + _HIDDEN_COPIES * model.hidden_size) * 4
    if not _flash_attention(model, settings):
        graph += tokens * cache.pools[0].units * model.attention_heads * 4
    return graph


def _changes(
    model: CellModel, settings: CellSettings, plan: EnginePlan, weights_bytes: int | None
) -> Iterator[tuple[str, str, EnginePlan]]:
    """Single flags that may help, where the demand is not served or the device is too small."""
    if plan.outcome in (None, "fits"):
        return
    demand = plan.demand
    needed = _padded(demand.context_tokens)
    cheaper = _CHEAPER.get(settings.type_k)
    changes: list[tuple[str, str, CellSettings]] = []
    if not plan.shortfall_bytes:
        size = needed * demand.requests
        slots = demand.requests
        changes.append(
            (
                f"-c {size} -np {slots}",
                "every slot gets its own part of the context; takes more memory",
                replace(settings, context_size=size, slots=slots, unified=None),
            )
        )
    if (plan.outcome == "does_not_fit" and plan.shortfall_bytes) or plan.outcome == "tight":
        if cheaper is not None:
            price = "less memory per cell, some accuracy loss; V needs flash attention"
            changes.append((f"-ctk {cheaper} -ctv {cheaper}", price, replace(settings, type_k=cheaper, type_v=cheaper)))
        least = needed * demand.requests
        if plan.capacity_tokens > least:
            changes.append(
                (
                    f"-c {least} -np {demand.requests}",
                    "no cells beyond the demand",
                    replace(settings, context_size=least, slots=demand.requests, unified=None),
                )
            )
        if settings.swa_full:
            changes.append(
                ("omit --swa-full", "the prompt cache of windows is reused less", replace(settings, swa_full=False))
            )
        if settings.kv_offload:
            changes.append(
                ("--no-kv-offload", "caches in host memory; attention is slow", replace(settings, kv_offload=False))
            )
    for change, price, changed in changes:
        with suppress(KvModelError):
            yield change, price, _plan(model, changed, demand, weights_bytes, plan.gpu_bytes, plan.gpus)
