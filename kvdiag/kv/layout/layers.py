"""What a model is made of, as far as its KV cache goes: layers, each of a kind, in the model's own (undivided) sizes.

Nothing here knows of ranks, blocks or bytes of a pool; see pages.py and capacity.py for those.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import check_range
from kvdiag.kv.layout.state_layers import StateShape

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


def _check_kind(kind: LayerKind, allowed: frozenset[LayerKind]) -> None:
    if kind not in allowed:
        raise KvModelError(f"kind is {kind}: it must be one of {', '.join(sorted(allowed))}", "kind")


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
        check_range("layer index", self.index, 0, _LARGEST)
        check_range("kv_heads", self.kv_heads, 1, _LARGEST)
        check_range("head_size", self.head_size, 1, _LARGEST)
        check_range("head_size_v", self.head_size_v, 1, _LARGEST)
        _check_kind(self.kind, ATTENTION_KINDS)
        if (self.kind is LayerKind.SLIDING) != (self.window_tokens is not None):
            raise KvModelError("only a sliding layer has a window, and it must have one", "sliding_window")
        if (self.kind is LayerKind.CHUNKED) != (self.chunk_tokens is not None):
            raise KvModelError("only a chunked layer has a chunk size, and it must have one", "attention_chunk_size")
        if self.window_tokens is not None:
            check_range("sliding_window", self.window_tokens, 1, _LARGEST)
        if self.chunk_tokens is not None:
            check_range("attention_chunk_size", self.chunk_tokens, 1, _LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """A layer that keeps one compressed row per token for all heads (MLA), with DSA also an indexer row."""

    index: int
    kind: LayerKind
    latent_size: int
    indexer_row_bytes: int | None = None

    def __post_init__(self) -> None:
        check_range("layer index", self.index, 0, _LARGEST)
        check_range("kv_lora_rank + qk_rope_head_dim", self.latent_size, 1, _LARGEST)
        _check_kind(self.kind, LATENT_KINDS)
        if self.indexer_row_bytes is not None:
            check_range("index_head_dim", self.indexer_row_bytes, 1, _LARGEST)
        if self.kind is LayerKind.MLA and self.indexer_row_bytes is not None:
            raise KvModelError(f"a layer with an indexer must be of kind {LayerKind.MLA_DSA}", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A layer that keeps a state of constant size per request."""

    index: int
    kind: LayerKind
    state: StateShape

    def __post_init__(self) -> None:
        check_range("layer index", self.index, 0, _LARGEST)
        _check_kind(self.kind, STATE_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachelessLayer:
    """A layer that takes nothing from the pool: it reuses another layer's cache, or has none.

    `head_size` is that of its queries, where the family defines it.
    """

    index: int
    kind: LayerKind
    head_size: int | None = None

    def __post_init__(self) -> None:
        check_range("layer index", self.index, 0, _LARGEST)
        if self.head_size is not None:
            check_range("head_size", self.head_size, 1, _LARGEST)
        _check_kind(self.kind, CACHELESS_KINDS)


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
        check_range("num_hidden_layers", self.depth, 1, _LARGEST)
        check_range("num_attention_heads", self.attention_heads, 0, _LARGEST)
        if any(layer.index >= self.depth for layer in self.layers):
            raise KvModelError(f"a layer's index is not below num_hidden_layers ({self.depth})", "num_hidden_layers")
        if self.max_context_tokens is not None:
            check_range("max_position_embeddings", self.max_context_tokens, 1, _LARGEST)

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
