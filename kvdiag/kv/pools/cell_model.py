"""What a model keeps in llama.cpp's caches: a row of K and V per layer and cell, and a state per slot; in elements.

Two sources give the same values: a GGUF header (`gguf_layers`), which decides exactly, and a config.json (below), as
the converter would write it. Elements are of the whole model: layers may lie on several devices, but none is divided.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, CachelessLayer, LatentLayer, LayerKind, StateLayer
from kvdiag.kv.pools.engine_plan import POOL_TYPES

# Model types whose windows llama.cpp keeps in a cache of their own (src/models/*.cpp: load_swa_pattern); every other
# type's sliding layers keep all tokens there. Llama 4 attends in chunks of 8,192, with a window of that size.
_WINDOWED = frozenset(POOL_TYPES["window_cache"])
_CHUNK_WINDOW_TOKENS = 8_192
# Cross-attention to images, for which there is neither a converter nor an architecture, and the types of architectures
# whose caches are not modelled (gguf_architectures.json: unsupported).
_NOT_MODELLED = frozenset(POOL_TYPES["no_cells"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLayer:
    """One layer's row in a cell. `windowed` layers lie in the cache of sliding windows."""

    k_elements: int
    v_elements: int
    k_head_elements: int
    v_head_elements: int
    windowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CellModel:
    """A model as llama.cpp's caches see it.

    `widest_v_elements` pads every V without flash attention (llama-kv-cache.cpp, TAG_V_CACHE_VARIABLE). `latent` models
    keep K alone. `index_elements` is the lightning indexer's row in each of `index_layers` layers. A state layer keeps
    `conv_elements` and `recurrent_elements` per slot in F32 (llama-hparams.cpp::n_embd_r, n_embd_s).
    `draft_layers` (nextn) predict further tokens, in a cache of their own, where speculation uses them.
    `rope_scaling` and `rope_scale` are the training's; YaRN scales `yarn_tokens`, by default the trained context.
    """

    architecture: str
    trained_tokens: int
    layers: tuple[CellLayer, ...]
    window_tokens: int | None = None
    latent: bool = False
    widest_v_elements: int = 0
    index_layers: int = 0
    index_elements: int = 0
    state_layers: int = 0
    conv_elements: int = 0
    recurrent_elements: int = 0
    flash_attention: bool = True
    draft_layers: tuple[CellLayer, ...] = ()
    depth: int = 1
    attention_heads: int = 0
    hidden_size: int = 0
    vocabulary: int = 0
    rope_scaling: str | None = None
    rope_scale: float = 1.0
    yarn_tokens: int | None = None

    @property
    def keeps_cache(self) -> bool:
        """Whether anything is kept between steps."""
        return bool(self.layers or self.state_layers)


def cells_of(architecture: Architecture, *, hidden_size: int, vocabulary: int) -> CellModel:
    """The caches of a model of which the config is known.

    Raises:
        KvModelError: its layers keep what llama.cpp does not.
    """
    if architecture.model_type in _NOT_MODELLED:
        raise KvModelError(f"llama.cpp's caches of model type {architecture.model_type} are not modelled", "model_type")
    windowed = architecture.model_type in _WINDOWED
    layers = tuple(_layers(architecture, windowed=windowed))
    windows = {
        layer.window_tokens or _CHUNK_WINDOW_TOKENS
        for layer in architecture.layers
        if isinstance(layer, AttentionLayer) and windowed and layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED)
    }
    states = [layer.state for layer in architecture.layers if isinstance(layer, StateLayer)]
    indexed = [
        layer.indexer_row_bytes
        for layer in architecture.layers
        if isinstance(layer, LatentLayer)
        if layer.indexer_row_bytes
    ]
    if len(windows) > 1:
        raise KvModelError("layers with windows of several sizes: pass the model's GGUF file", "sliding_window")
    return CellModel(
        architecture=architecture.model_type,
        trained_tokens=architecture.max_context_tokens or 0,
        layers=layers,
        window_tokens=next(iter(windows), None),
        latent=architecture.uses_mla,
        widest_v_elements=max((layer.v_elements for layer in layers), default=0),
        index_layers=len(indexed),
        # A byte per element and a 4-byte scale per 128 in other engines' rows (families/latent.py).
        index_elements=max((size * 128 // 132 for size in indexed), default=0),
        state_layers=len(states),
        conv_elements=max(
            ((one.conv_channels + one.conv_groups * one.conv_group_channels) * one.conv_steps for one in states),
            default=0,
        ),
        recurrent_elements=max((one.recurrent_heads * one.recurrent_head_elements for one in states), default=0),
        depth=architecture.depth,
        attention_heads=architecture.attention_heads,
        hidden_size=hidden_size,
        vocabulary=vocabulary,
    )


def _layers(architecture: Architecture, *, windowed: bool) -> Iterator[CellLayer]:
    for layer in architecture.layers:
        match layer:
            case AttentionLayer(kind=LayerKind.CROSS_ATTENTION):
                raise KvModelError("llama.cpp keeps no cache for cross-attention that is modelled here", "model_type")
            case AttentionLayer():
                yield CellLayer(
                    k_elements=layer.kv_heads * layer.head_size,
                    v_elements=layer.kv_heads * layer.head_size_v,
                    k_head_elements=layer.head_size,
                    v_head_elements=layer.head_size_v,
                    windowed=windowed and layer.kind in (LayerKind.SLIDING, LayerKind.CHUNKED),
                )
            case LatentLayer():
                size = layer.latent_size
                yield CellLayer(k_elements=size, v_elements=0, k_head_elements=size, v_head_elements=0)
            case StateLayer() | CachelessLayer():
                continue
