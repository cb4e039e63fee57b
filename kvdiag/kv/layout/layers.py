"""What a model is made of, as far as its KV cache goes: layers, each of a kind, in the model's own (undivided) sizes.

Nothing here knows of ranks, blocks or bytes of a pool; see pages.py and capacity.py for those.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvdiag.kv.layout.state_layers import StateShape
from kvdiag.kv.model_error import KvModelError

_LARGEST = 1 << 24


class LayerKind(StrEnum):
    """How a layer's cache grows with a request."""

    FULL = "full"
    MLA = "mla"
    MLA_DSA = "mla_dsa"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    GATED_DELTA_NET = "gated_delta_net"
    KIMI_DELTA = "kimi_delta"
    LINEAR = "linear"
    SHORT_CONV = "short_conv"
    CROSS_ATTENTION = "cross_attention"
    SHARED = "shared"
    ENCODER_ONLY = "encoder_only"
    NO_CACHE = "no_cache"


ATTENTION_KINDS = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.CROSS_ATTENTION})
LATENT_KINDS = frozenset({LayerKind.MLA, LayerKind.MLA_DSA})
STATE_KINDS = frozenset(
    {
        LayerKind.MAMBA1,
        LayerKind.MAMBA2,
        LayerKind.GATED_DELTA_NET,
        LayerKind.KIMI_DELTA,
        LayerKind.LINEAR,
        LayerKind.SHORT_CONV,
    }
)
CACHELESS_KINDS = frozenset({LayerKind.SHARED, LayerKind.ENCODER_ONLY, LayerKind.NO_CACHE})


def _require(name: str, value: int, *, low: int = 1) -> None:
    if not low <= value <= _LARGEST:
        raise KvModelError(f"{name} is {value}; it must lie between {low} and {_LARGEST}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """A layer that keeps K and V per head and token."""

    index: int
    kind: LayerKind
    kv_heads: int
    head_size: int
    head_size_v: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        _require("layer index", self.index, low=0)
        _require("kv_heads", self.kv_heads)
        _require("head_size", self.head_size)
        _require("head_size_v", self.head_size_v)
        if self.kind not in ATTENTION_KINDS:
            raise KvModelError(f"layer {self.index}: {self.kind} is not a kind that keeps K and V per head", "kind")
        if (self.kind is LayerKind.SLIDING) != (self.window_tokens is not None):
            raise KvModelError(f"layer {self.index}: a sliding layer, and no other, has a window", "sliding_window")
        if (self.kind is LayerKind.CHUNKED) != (self.chunk_tokens is not None):
            raise KvModelError(
                f"layer {self.index}: a chunked layer, and no other, has a chunk size", "attention_chunk_size"
            )
        if self.window_tokens is not None:
            _require("sliding_window", self.window_tokens)
        if self.chunk_tokens is not None:
            _require("attention_chunk_size", self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """A layer that keeps one compressed row per token for all heads (MLA), with DSA also an indexer row."""

    index: int
    kind: LayerKind
    latent_size: int
    indexer_row_bytes: int | None = None

    def __post_init__(self) -> None:
        _require("layer index", self.index, low=0)
        _require("kv_lora_rank + qk_rope_head_dim", self.latent_size)
        if self.kind not in LATENT_KINDS:
            raise KvModelError(f"layer {self.index}: {self.kind} is not a kind that keeps a latent row", "kind")
        if self.indexer_row_bytes is not None:
            _require("index_head_dim", self.indexer_row_bytes)
        if self.kind is LayerKind.MLA and self.indexer_row_bytes is not None:
            raise KvModelError(f"layer {self.index}: a layer with an indexer is of kind {LayerKind.MLA_DSA}", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A layer that keeps a state of constant size per request."""

    index: int
    kind: LayerKind
    state: StateShape

    def __post_init__(self) -> None:
        _require("layer index", self.index, low=0)
        if self.kind not in STATE_KINDS:
            raise KvModelError(f"layer {self.index}: {self.kind} is not a kind that keeps a state", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachelessLayer:
    """A layer that takes nothing from the pool: it reuses another layer's cache, or has none.

    `head_size` is that of its queries, where the family says so.
    """

    index: int
    kind: LayerKind
    head_size: int | None = None

    def __post_init__(self) -> None:
        _require("layer index", self.index, low=0)
        if self.head_size is not None:
            _require("head_size", self.head_size)
        if self.kind not in CACHELESS_KINDS:
            raise KvModelError(f"layer {self.index}: {self.kind} is not a kind without a cache of its own", "kind")


Layer = AttentionLayer | LatentLayer | StateLayer | CachelessLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model as its cache sees it.

    `layers` may hold several entries of one `index` (a decoder layer with self- and cross-attention, or with
    attention and a state side by side); `depth` is the number of decoder layers that pipeline stages divide.
    """

    model_type: str
    depth: int
    attention_heads: int
    layers: tuple[Layer, ...]
    dtype: str
    declared_kv_dtype: str | None = None
    state_dtype: str | None = None
    max_context_tokens: int | None = None
    draft_layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        _require("num_hidden_layers", self.depth)
        _require("num_attention_heads", self.attention_heads, low=0)
        if any(layer.index >= self.depth for layer in self.layers):
            raise KvModelError(f"a layer lies beyond num_hidden_layers = {self.depth}", "num_hidden_layers")
        if self.max_context_tokens is not None:
            _require("max_position_embeddings", self.max_context_tokens)

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """How many layers there are of each kind, in the order they first occur."""
        counts: dict[LayerKind, int] = {}
        for layer in self.layers:
            counts[layer.kind] = counts.get(layer.kind, 0) + 1
        return counts

    @property
    def is_hybrid(self) -> bool:
        """Whether layers with a state share the pool with attention."""
        return any(isinstance(layer, StateLayer) for layer in self.layers)

    @property
    def uses_mla(self) -> bool:
        """Whether the attention layers keep latent rows."""
        return any(isinstance(layer, LatentLayer) for layer in self.layers)
