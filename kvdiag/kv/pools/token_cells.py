"""SGLang's flags, and the bytes that one token and one request's states take on a rank of each pipeline stage.

As SGLang 0.5.23 does (srt/model_executor/pool_configurator.py, configs/mamba_utils.py): heads are divided over the
ranks of attention, latent rows are whole on each; a window layer without a pool of its own counts as a full one; a
drafter adds layers like the model's; states keep convolutions in 16 bits and the rest in 32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.deployment import check_heads
from kvdiag.kv.layout.dtypes import model_dtype_bytes, resolve_kv_dtype
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, Layer, LayerKind, StateLayer
from kvdiag.kv.pools.flag_bounds import check_settings

WINDOW_KINDS = (LayerKind.SLIDING, LayerKind.CHUNKED)
EXTRA_SLOTS = {"no_buffer": 0, "extra_buffer": 2, "extra_buffer_lazy": 1}
"""State slots besides a request's own, by --mamba-radix-cache-strategy."""

_STATE_CONV_BYTES = 2
_FP4_BLOCK, _MXFP8_BLOCK = 16, 32
_KV_DTYPES = dict.fromkeys(("fp4_e2m1", "float4_e2m1fn_x2", "nvfp4", "fp4_mx_block16"), "fp4") | {"mxfp8": "mxfp8"}
# Backends that read plain latent rows, without scales (calculate_mla_kv_cache_dim).
_PLAIN_ROW_BACKENDS = frozenset({"trtllm", "tilelang", "aiter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """SGLang's flags that decide its pools; None is the server's default.

    `attention_parallel` groups divide the ranks of one server for attention alone; each of the `replicas` has ranks of
    its own (arg_groups/parallel_hook.py: --enable-dp-attention makes --dp-size the former).
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_parallel: int = 1
    replicas: int = 1
    page_size: int | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    mem_fraction_static: float | None = None
    vision_ratio: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    context_tokens: int | None = None
    chunked_prefill_size: int | None = None
    graph_batch: int | None = None
    graphs: bool = True
    window_pool: bool = True
    window_ratio: float = 0.8
    radix_cache: bool = True
    overlap: bool = True
    state_ratio: float = 0.9
    state_slots: int | None = None
    state_strategy: str = "auto"
    state_dtype: str | None = None
    draft_layers: int = 0
    draft_tokens: int | None = None
    draft_step_tokens: int | None = None
    backend: str | None = None
    row_backend: str | None = None

    def __post_init__(self) -> None:
        check_settings("sglang", self)
        if self.tensor_parallel % self.attention_parallel:
            raise KvModelError(
                f"dp_size {self.attention_parallel} must divide tp_size {self.tensor_parallel}", "attention_parallel"
            )

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks of attention: those of one data-parallel group."""
        return self.tensor_parallel // self.attention_parallel

    @property
    def groups(self) -> int:
        """Data-parallel groups, each with pools and requests of its own: replicas, or those of attention."""
        return self.attention_parallel * self.replicas

    @property
    def gpus(self) -> int:
        """The GPUs of all groups (server_args.py::compute_world_size)."""
        return self.replicas * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCell:
    """Bytes of one token on one rank of a pipeline stage: `full_bytes` in layers that keep every token, `window_bytes`
    in those of the window pool; and bytes of one request's states.
    """

    full_bytes: int
    window_bytes: int
    full_layers: int
    window_layers: int
    state_layers: int
    state_bytes: int
    draft_bytes: int


class Cells:
    """The cells of a model: what each stage keeps per token, with or without a pool of windows."""

    def __init__(
        self, architecture: Architecture, settings: TokenSettings, *, windowed: bool, state_dtype: str
    ) -> None:
        """Keep what decides a cell.

        Raises:
            KvModelError: the ranks of attention do not divide the heads.
        """
        check_heads(architecture, settings.ranks)
        self._architecture = architecture
        # A layer that reuses another's cache has one of its own all the same (model_config.py counts all layer_types).
        self._layers = [getattr(layer, "unshared", None) or layer for layer in architecture.layers]
        self._settings = settings
        self._windowed = windowed
        self._state_dtype = state_dtype
        self._dtype = _element(settings, architecture)

    def of_stages(self) -> Iterator[StageCell]:
        """One cell for each pipeline stage."""
        stages, depth = self._settings.pipeline_parallel, self._architecture.depth
        if stages > depth:
            raise KvModelError(f"pp_size {stages} exceeds the model's {depth} layers", "pipeline_parallel")
        # distributed/utils.py::get_pp_indices: the last stages have one layer more.
        sizes = [depth // stages + (stage >= stages - depth % stages) for stage in range(stages)]
        start = 0
        for end in accumulate(sizes):
            yield self._cell([layer for layer in self._layers if start <= layer.index < end])
            start = end

    def _cell(self, layers: Sequence[Layer]) -> StageCell:
        rows = [layer for layer in layers if isinstance(layer, AttentionLayer | LatentLayer)]
        windowed = [layer for layer in rows if self._windowed and layer.kind in WINDOW_KINDS]
        full = [layer for layer in rows if layer not in windowed]
        states = [layer for layer in layers if isinstance(layer, StateLayer)]
        full_bytes = sum(self._row(self._as_full(layer)) for layer in full)
        drafts = self._settings.draft_layers
        return StageCell(
            full_bytes=full_bytes,
            window_bytes=sum(self._row(layer) for layer in windowed),
            full_layers=len(full),
            window_layers=len(windowed),
            state_layers=len(states),
            state_bytes=sum(self._state(layer) for layer in states),
            draft_bytes=self._draft_bytes(full, full_bytes) if drafts else 0,
        )

    def _as_full(self, layer: AttentionLayer | LatentLayer) -> AttentionLayer | LatentLayer:
        """Without a pool of its own, a window layer is sized as a full one (DefaultPoolConfigurator)."""
        if not isinstance(layer, AttentionLayer) or layer.kind not in WINDOW_KINDS:
            return layer
        every = (one for one in self._layers if isinstance(one, AttentionLayer))
        return next((one for one in every if one.kind is LayerKind.FULL), layer)

    def _draft_bytes(self, full: Sequence[AttentionLayer | LatentLayer], full_bytes: int) -> int:
        """What an EAGLE or MTP drafter adds to a cell: layers like the model's, indexers included."""
        drafts = self._settings.draft_layers
        rows = [layer for layer in full if isinstance(layer, LatentLayer) and layer.indexer_row_bytes]
        if not rows or not full:
            return int(full_bytes * drafts / len(full)) if full else 0
        index = sum(layer.indexer_row_bytes or 0 for layer in rows)
        return int((full_bytes - index) * drafts / len(full)) + (rows[0].indexer_row_bytes or 0) * drafts

    def _row(self, layer: AttentionLayer | LatentLayer) -> int:
        """Bytes of one token in one layer on one rank."""
        if isinstance(layer, LatentLayer):
            # Layers without an indexer of their own have rows of the same form (calculate_mla_kv_cache_dim).
            plain = _PLAIN_ROW_BACKENDS & {self._settings.backend, self._settings.row_backend}
            scaled = LayerKind.MLA_DSA in self._architecture.kinds and not plain
            if scaled and self._dtype == "fp8":
                row = resolve_kv_dtype("fp8_ds_mla", model_dtype="bfloat16").latent_bytes(latent_size=layer.latent_size)
            else:
                row = _bytes(self._dtype, layer.latent_size)
            return row + (layer.indexer_row_bytes or 0)
        heads = max(1, layer.kv_heads // self._settings.ranks)
        return _bytes(self._dtype, heads * (layer.head_size + layer.head_size_v))

    def _state(self, layer: StateLayer) -> int:
        """Bytes of one request's state in one layer: convolutions in 16 bits, the rest in 32."""
        return layer.state.rank_bytes(
            tensor_parallel=self._settings.ranks,
            speculative_tokens=0,
            conv_element_bytes=_STATE_CONV_BYTES,
            recurrent_element_bytes=model_dtype_bytes(self._state_dtype),
        )


def _element(settings: TokenSettings, architecture: Architecture) -> str:
    """The cache's number format: that of the model, fp8, fp4 or mxfp8."""
    name = settings.kv_dtype
    if name in _KV_DTYPES:
        return _KV_DTYPES[name]
    model = architecture.dtype if settings.dtype == "auto" else settings.dtype
    resolved = resolve_kv_dtype(name, model_dtype=model, declared=architecture.declared_kv_dtype)
    return "fp8" if resolved.name.startswith("fp8") else resolved.name


def _bytes(dtype: str, elements: int) -> int:
    """Bytes of so many elements; fp4 has a scale per 16, mxfp8 one per 32."""
    match dtype:
        case "fp8":
            return elements
        case "fp4":
            return elements // 2 + elements // _FP4_BLOCK
        case "mxfp8":
            return elements + elements // _MXFP8_BLOCK
        case _:
            return elements * model_dtype_bytes(dtype)
