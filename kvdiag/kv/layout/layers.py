"""What a model is made of, as far as its KV cache goes: layers, each of a kind, in the model's own (undivided) sizes.

Nothing here knows of ranks, blocks or bytes of a pool; see pages.py and capacity.py for those.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvdiag.kv.layout.state_layers import StateShape


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


CACHELESS_KINDS = frozenset({LayerKind.SHARED, LayerKind.ENCODER_ONLY, LayerKind.NO_CACHE})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """A layer that keeps one compressed row per token for all heads (MLA), with DSA also an indexer row."""

    index: int
    kind: LayerKind
    latent_size: int
    indexer_row_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A layer that keeps a state of constant size per request."""

    index: int
    kind: LayerKind
    state: StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CachelessLayer:
    """A layer that takes nothing from the pool: it reuses another layer's cache, or has none.

    `head_size` is that of its queries, where the family defines it.
    """

    index: int
    kind: LayerKind
    head_size: int | None = None


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

    @property
    def kinds(self) -> Counter[LayerKind]:
        """How many layers there are of each kind, in the order they first occur."""
        return Counter(layer.kind for layer in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Whether layers with a state share the pool with attention."""
        return any(isinstance(layer, StateLayer) for layer in self.layers)

    @property
    def uses_mla(self) -> bool:
        """Whether the attention layers keep latent rows."""
        return any(isinstance(layer, LatentLayer) for layer in self.layers)
