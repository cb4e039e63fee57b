"""What a model is made of, as far as its KV cache goes: layers, each of a kind, in the model's own (undivided) sizes.

Nothing here knows of blocks or of bytes of a pool; see pages.py and capacity.py for those.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import check_range

_LARGEST_STATE = 1 << 28


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
    SLIDING_MLA = "sliding_mla"
    COMPRESSED_MLA = "compressed_mla"
    CROSS_ATTENTION = "cross_attention"
    SHARED = "shared"
    ENCODER_ONLY = "encoder_only"
    NO_CACHE = "no_cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """A layer that keeps K and V per head and token.

    `index_row_bytes` are the keys by which block-sparse attention selects blocks (MiniMax-M3): one row for all heads,
    the same on every rank and in any format of the cache. With `pool_tokens` one stands for so many tokens (Qwen4-Exp),
    and each request has a ring for the tokens of an incomplete pool, of `pool_row_bytes` each. `sink_tokens` are fixed
    tokens before those of every request, as many as fill whole blocks (Pangu Pro MoE V2). An audio encoder keeps
    `positions_per_token` for each of the text (Voxtral Realtime); `window_tokens` are the text's.
    """

    index: int
    kind: LayerKind
    kv_heads: int
    head_size: int
    head_size_v: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    index_row_bytes: int | None = None
    pool_tokens: int = 1
    pool_row_bytes: int = 0
    sink_tokens: int = 0
    positions_per_token: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWindowLayer:
    """The last inputs of a layer's short convolutions, as a window of tokens in blocks of its size, in the model's own
    format (Inkling). A head's row has `row_elements`.
    """

    index: int
    kv_heads: int
    row_elements: int
    window_tokens: int

    @property
    def kind(self) -> LayerKind:
        """The kind of a convolution."""
        return LayerKind.SHORT_CONV


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """A layer that keeps one compressed row per token for all heads (MLA), with DSA also an indexer row.

    With `pool_tokens` an indexer row stands for so many tokens (GLM-5-Next). Each request then has a ring for the
    tokens of an incomplete pool, of `pool_row_bytes` each.
    """

    index: int
    latent_size: int
    indexer_row_bytes: int | None = None
    pool_tokens: int = 1
    pool_row_bytes: int = 0

    @property
    def kind(self) -> LayerKind:
        """The sparse kind where it owns an indexer."""
        return LayerKind.MLA if self.indexer_row_bytes is None else LayerKind.MLA_DSA


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWindowLayer:
    """A layer that keeps latent rows of a sliding window, in one pool with those of LatentLayer (Dots3-note)."""

    index: int
    latent_size: int
    window_tokens: int

    @property
    def kind(self) -> LayerKind:
        """The kind of a window of latent rows."""
        return LayerKind.SLIDING_MLA


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The state of one layer, undivided: a convolution's last inputs and a recurrent matrix per head.

    It does not grow with the request. Number formats are those of mamba_utils.py::MambaStateDtypeCalculator.

    `conv_channels` are divided over tensor-parallel ranks, as are `conv_groups` groups of `conv_group_channels`
    channels each, after groups were added so that they divide
    (MambaStateShapeCalculator.mamba2_state_shape, extra_groups_for_head_shards).
    `conv_steps` is the kernel size - 1; drafts lengthen it where `drafts_lengthen_conv`. `prefill_checkpoints` are
    state blocks that a prefill may write besides the running one (mamba_mixer2.py::get_kv_cache_spec). A `replicated`
    state is whole on every rank.
    """

    conv_channels: int = 0
    conv_steps: int = 0
    drafts_lengthen_conv: bool = False
    recurrent_heads: int = 0
    recurrent_head_elements: int = 0
    conv_groups: int = 0
    conv_group_channels: int = 0
    recurrent_dtype: str | None = None
    prefill_checkpoints: int = 0
    replicated: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int):
                check_range(field.name, value, 0, _LARGEST_STATE)
        if self.conv_channels * self.conv_steps + self.recurrent_heads * self.recurrent_head_elements == 0:
            raise KvModelError("a state layer has neither a convolution nor a recurrent state", "recurrent_heads")

    def rank_bytes(
        self,
        *,
        tensor_parallel: int,
        speculative_tokens: int,
        conv_element_bytes: int,
        recurrent_element_bytes: int,
    ) -> int:
        """Bytes of one request's state in this layer on one rank."""
        tensor_parallel = 1 if self.replicated else tensor_parallel
        groups = self.conv_groups
        if groups % tensor_parallel:
            groups = tensor_parallel
        channels = self.conv_channels + groups * self.conv_group_channels
        steps = self.conv_steps
        if self.drafts_lengthen_conv and channels:
            steps += speculative_tokens
        conv_elements = _share(channels, tensor_parallel, "convolution channels") * steps
        heads = _share(self.recurrent_heads, tensor_parallel, "recurrent heads")
        return conv_elements * conv_element_bytes + heads * self.recurrent_head_elements * recurrent_element_bytes


def _share(value: int, parts: int, what: str) -> int:
    if value % parts:
        raise KvModelError(f"tensor_parallel {parts} does not divide the {value} {what}", "tensor_parallel")
    return value // parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A layer that keeps a state of constant size per request."""

    index: int
    kind: LayerKind
    state: StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CachelessLayer:
    """A layer that takes nothing from the pool: it reuses another layer's cache, or has none.

    `head_size` is that of its queries, where the family defines it; `unshared` the layer as an engine keeps it that
    does not share caches.
    """

    index: int
    kind: LayerKind
    head_size: int | None = None
    unshared: "Layer | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayer:
    """A DeepSeek-V4 layer: a sliding window of latent rows and, where `ratio` is not 0, a cache of its own with one row
    for `ratio` tokens. Its compressor also keeps rows for the tokens that it still combines.

    `indexer_size` is the head size of its sparse-attention indexer, None without one. `ring` is V4.1's form: the
    compressor's rows are one block per request.
    """

    index: int
    head_size: int
    window_tokens: int
    ratio: int = 0
    indexer_size: int | None = None
    ring: bool = False

    @property
    def kind(self) -> LayerKind:
        """The compressed kind where it keeps more than its window."""
        return LayerKind.COMPRESSED_MLA if self.ratio else LayerKind.SLIDING_MLA


Layer = (
    AttentionLayer | ConvWindowLayer | LatentLayer | LatentWindowLayer | StateLayer | CachelessLayer | CompressedLayer
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model as its cache sees it.

    `layers` may hold several entries of one `index` (a decoder layer with self- and cross-attention, or with
    attention and a state side by side); `depth` is the number of decoder layers that pipeline stages divide.
    `max_context_tokens` is the longest request that the engine serves by default, `accepted_context_tokens` the longest
    that it can be configured for; `None` where the config has no limit.
    """

    model_type: str
    depth: int
    attention_heads: int
    layers: tuple[Layer, ...]
    dtype: str
    declared_kv_dtype: str | None = None
    state_dtype: str | None = None
    max_context_tokens: int | None = None
    accepted_context_tokens: int | None = None
    draft_layers: tuple[Layer, ...] = ()
    layers_per_draft: int | None = None
    """How many draft layers each draft token has of its own; None where all of them are loaded for any number."""

    @property
    def kinds(self) -> Counter[LayerKind]:
        """How many layers there are of each kind, in the order they first occur."""
        return Counter(layer.kind for layer in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Whether layers with a state share the pool with attention."""
        return any(isinstance(layer, StateLayer) for layer in self.layers)

    def without_windows(self) -> "Architecture":
        """The model with --disable-sliding-window: its sliding-window layers keep every token."""
        layers = tuple(
            replace(one, kind=LayerKind.FULL, window_tokens=None)
            if isinstance(one, AttentionLayer) and one.kind is LayerKind.SLIDING
            else one
            for one in self.layers
        )
        return replace(self, layers=layers)

    @property
    def is_compressed(self) -> bool:
        """Whether the layers are DeepSeek-V4's, whose pages of several sizes share a block."""
        return any(isinstance(layer, CompressedLayer) for layer in self.layers)

    @property
    def has_latent_windows(self) -> bool:
        """Whether layers keep windows of latent rows next to those that keep all rows."""
        return any(isinstance(layer, LatentWindowLayer) for layer in self.layers)

    @property
    def index_pool_tokens(self) -> int:
        """Tokens that a row of the sparse-attention indexers stands for: 1 but in GLM-5-Next and Qwen4-Exp."""
        indexed = (layer for layer in self.layers if isinstance(layer, AttentionLayer | LatentLayer))
        return max((layer.pool_tokens for layer in indexed), default=1)

    @property
    def is_packed(self) -> bool:
        """Whether pages of several sizes lie side by side in a block."""
        return self.is_compressed or self.has_latent_windows or self.index_pool_tokens > 1

    @property
    def selects_blocks(self) -> bool:
        """Whether layers with K and V keep index keys besides, by which they select blocks."""
        return self.index_pool_tokens == 1 and any(
            isinstance(layer, AttentionLayer) and layer.index_row_bytes for layer in self.layers
        )

    @property
    def is_vllms_alone(self) -> bool:
        """Whether the pools are modelled as vLLM lays them out, and for no other engine."""
        return self.is_packed or self.selects_blocks or self.runs_on_gpus_alone or self.has_audio_cache

    @property
    def runs_on_gpus_alone(self) -> bool:
        """Whether vLLM has no CPU kernels for the model."""
        return self.has_sinks or self.denoises or self.has_conv_windows or self.index_pool_tokens > 1

    @property
    def has_conv_windows(self) -> bool:
        """Whether short convolutions keep their inputs as windows of tokens."""
        return any(isinstance(layer, ConvWindowLayer) for layer in self.layers)

    @property
    def has_audio_cache(self) -> bool:
        """Whether an audio encoder keeps a cache, too."""
        return any(isinstance(layer, AttentionLayer) and layer.positions_per_token > 1 for layer in self.layers)

    @property
    def runs_on_one_stage(self) -> bool:
        """Whether the model is not modelled with pipeline stages: vLLM refuses Qwen4-Exp's n-gram layers on them
        (model_executor/models/config.py), and divides an audio encoder's layers apart from the text's.
        """
        return self.has_audio_cache or any(
            isinstance(layer, StateLayer) and layer.state.replicated for layer in self.layers
        )

    @property
    def has_sinks(self) -> bool:
        """Whether fixed tokens stand before those of every request."""
        return any(isinstance(layer, AttentionLayer) and layer.sink_tokens for layer in self.layers)

    @property
    def denoises(self) -> bool:
        """Whether the model denoises blocks of tokens instead of generating one after the other."""
        return self.model_type == "diffusion_gemma_text"

    @property
    def uses_mla(self) -> bool:
        """Whether the attention layers keep latent rows."""
        return any(isinstance(layer, LatentLayer) for layer in self.layers)
