"""How many parameters a model has, from its config, split by what tensor parallelism and quantization do to them.

For models whose checkpoint is not at hand. Counted from the shapes of the linear layers in vLLM's model files; norms,
biases and routers are counted only as far as they matter (together below 0.1 %). A vision tower is an estimate.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvdiag.kv.architecture import text_fields
from kvdiag.kv.errors import KvModelError
from kvdiag.kv.family import MOST_LAYERS, WIDTH_NAMES
from kvdiag.kv.fields import Fields
from kvdiag.kv.layers import Architecture, AttentionLayer, LatentLayer, LayerKind, StateLayer

_MOST = 1 << 24
_MOST_EXPERTS = 1 << 16
_MOST_DIGITS = 4
# Feed-forward blocks of two matrices; all other families gate with a third (the model files' MLP classes).
_UNGATED = frozenset(
    {
        "bloom", "codegen", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj", "nemotron", "nemotron_h", "opt",
        "persimmon", "phi", "RefinedWeb", "RefinedWebModel", "starcoder2", "whisper",
    }
)  # fmt: skip
_OUTPUT_GATED = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
_TIED_BY_DEFAULT = frozenset(
    {
        "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
        "gpt2", "granite", "lfm2", "lfm2_moe", "opt", "starcoder2", "whisper",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """One decoder layer. `divided`, `kv_projection` and `experts` are spread over tensor-parallel ranks (the KV
    projection over no more than there are KV heads); `replicated` linear layers and `plain` ones are on each.
    `padded_experts` is what `experts` grow to where a kernel pads their sizes.
    """

    index: int
    divided: int = 0
    kv_projection: int = 0
    kv_heads: int = 1
    experts: int = 0
    padded_experts: int = 0
    replicated: int = 0
    plain: int = 0

    def __post_init__(self) -> None:
        if min(self.index, self.divided, self.kv_projection, self.experts, self.replicated, self.plain) < 0:
            raise KvModelError(f"layer {self.index} has a negative number of parameters", "num_hidden_layers")
        if self.kv_heads < 1:
            raise KvModelError(f"layer {self.index} has {self.kv_heads} KV heads", "num_key_value_heads")

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.divided + self.kv_projection + self.experts + self.replicated + self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A whole model. `head` is 0 where the output layer is the embedding."""

    embedding: int
    head: int
    layers: tuple[LayerParameters, ...]
    other: int = 0

    def __post_init__(self) -> None:
        if min(self.embedding, self.head, self.other) < 0 or not self.layers:
            raise KvModelError("a model has an embedding, layers, and no negative number of parameters", "vocab_size")

    @property
    def total(self) -> int:
        """All parameters, tied ones once."""
        return self.embedding + self.head + self.other + sum(layer.total for layer in self.layers)


def count_parameters(config: Mapping[str, object], architecture: Architecture) -> Parameters:
    """The parameters of a model from its config. Raises KvModelError where the config leaves out a size it needs."""
    top = Fields(config)
    text = text_fields(config)
    hidden = text.integer(*WIDTH_NAMES, high=_MOST)
    vocabulary = text.integer("vocab_size", "padded_vocab_size", high=1 << 26)
    tied = _tied(text, top, architecture.model_type)
    layers: list[LayerParameters] = []
    for index in range(architecture.depth):
        mine = [layer for layer in architecture.layers if layer.index == index]
        parts = LayerParameters(index=index, plain=2 * hidden)
        for layer in mine:
            match layer:
                case AttentionLayer():
                    parts = _add(parts, _attention(text, architecture, layer, hidden))
                case LatentLayer():
                    parts = _add(parts, _latent(text, layer, hidden))
                case StateLayer():
                    parts = _add(parts, _state(text, layer, hidden))
                case _ if layer.kind is LayerKind.SHARED:
                    parts = _add(parts, _shared_attention(text, architecture, index, hidden))
        if architecture.model_type == "zamba2":
            mixer = next(layer for layer in mine if isinstance(layer, StateLayer))
            parts = _add(LayerParameters(index=index, plain=2 * hidden), _state(text, mixer, hidden))
            layers.append(_add(parts, _zamba2_block(text, architecture, index, hidden)))
            continue
        layers.append(_add(parts, _feed_forward(text, architecture, index, hidden)))
    return Parameters(
        embedding=vocabulary * hidden,
        head=0 if tied else vocabulary * hidden,
        layers=tuple(layers),
        other=_vision(top)
        + _encoder(text, architecture.model_type, hidden)
        + _layer_embeddings(text, architecture.depth),
    )


def _add(first: LayerParameters, second: LayerParameters) -> LayerParameters:
    return LayerParameters(
        index=first.index,
        divided=first.divided + second.divided,
        kv_projection=first.kv_projection + second.kv_projection,
        kv_heads=second.kv_heads if second.kv_projection else first.kv_heads,
        experts=first.experts + second.experts,
        padded_experts=first.padded_experts + second.padded_experts,
        replicated=first.replicated + second.replicated,
        plain=first.plain + second.plain,
    )


def _tied(text: Fields, top: Fields, model_type: str) -> bool:
    for source in (text, top):
        if source.has("tie_word_embeddings"):
            return source.flag("tie_word_embeddings", default=False)
        if source.has("tie_embedding"):
            return source.flag("tie_embedding", default=False)
    return model_type in _TIED_BY_DEFAULT


def _attention(text: Fields, architecture: Architecture, layer: AttentionLayer, hidden: int) -> LayerParameters:
    heads = architecture.attention_heads
    if layer.kind is LayerKind.SLIDING and text.has("swa_num_attention_heads"):
        heads = text.integer("swa_num_attention_heads", high=4096)
    query = hidden * heads * layer.head_size
    if architecture.model_type in _OUTPUT_GATED:
        query *= 2
    return LayerParameters(
        index=layer.index,
        divided=query + heads * layer.head_size_v * hidden,
        kv_projection=hidden * layer.kv_heads * (layer.head_size + layer.head_size_v),
        kv_heads=layer.kv_heads,
    )


def _shared_attention(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    """A layer that reuses a cache still has all its projections."""
    size = text.integer("head_dim", default=max(1, hidden // max(1, architecture.attention_heads)), high=1 << 14)
    kv_heads = text.integer("num_key_value_heads", default=max(1, architecture.attention_heads), high=4096)
    return LayerParameters(
        index=index,
        divided=2 * hidden * architecture.attention_heads * size,
        kv_projection=2 * hidden * kv_heads * size,
        kv_heads=kv_heads,
    )


def _zamba2_block(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    """What a hybrid layer adds to its Mamba-2 (zamba2.py): a linear layer of its own, and one of num_mem_blocks blocks
    that hybrid layers take in turn, so that only the first ones cost anything. A block attends to the hidden state
    and the embedding side by side.
    """
    attention = [layer for layer in architecture.layers if isinstance(layer, AttentionLayer)]
    places = [layer.index for layer in attention]
    if index not in places:
        return LayerParameters(index=index)
    own = LayerParameters(index=index, divided=hidden * hidden)
    if places.index(index) >= text.integer("num_mem_blocks", default=1, high=MOST_LAYERS):
        return own
    layer = attention[places.index(index)]
    heads, size = architecture.attention_heads, layer.head_size
    block = LayerParameters(
        index=index,
        divided=3 * hidden * heads * size + 3 * hidden * _dense_width(text, architecture.model_type, hidden),
        kv_projection=4 * hidden * layer.kv_heads * size,
        kv_heads=layer.kv_heads,
    )
    return _add(own, block)


def _latent(text: Fields, layer: LatentLayer, hidden: int) -> LayerParameters:
    """deepseek_v2.py::DeepseekV2MLAAttention and Indexer."""
    heads = text.integer("num_attention_heads", high=4096)
    nope = text.integer("qk_nope_head_dim", high=1 << 14)
    value = text.integer("v_head_dim", default=nope, high=1 << 14)
    rank = text.integer("kv_lora_rank", high=1 << 14)
    rope = layer.latent_size - rank
    query_rank = text.maybe_integer("q_lora_rank", high=1 << 14)
    query_in = hidden if query_rank is None else query_rank
    replicated = hidden * layer.latent_size + (0 if query_rank is None else hidden * query_rank)
    if layer.kind is LayerKind.MLA_DSA:
        size = text.integer("index_head_dim", high=1 << 14)
        index_heads = text.integer("index_n_heads", default=64, high=4096)
        replicated += query_in * index_heads * size + hidden * size + hidden * index_heads
    return LayerParameters(
        index=layer.index,
        divided=query_in * heads * (nope + rope) + rank * heads * (nope + value) + heads * value * hidden,
        replicated=replicated,
    )


def _state(text: Fields, layer: StateLayer, hidden: int) -> LayerParameters:
    state = layer.state
    kernel = state.conv_steps + 1
    match layer.kind:
        case LayerKind.GATED_DELTA_NET:
            heads = state.recurrent_heads
            value = heads * text.integer("linear_value_head_dim", default=128, high=1 << 14)
            # Projections into q, k, v, z, then b and a, then out (qwen_gdn_linear_attn.py).
            divided = hidden * (state.conv_channels + value + 2 * heads) + value * hidden
            return LayerParameters(index=layer.index, divided=divided, plain=state.conv_channels * kernel)
        case LayerKind.MAMBA2:
            channels = state.conv_channels + state.conv_groups * state.conv_group_channels
            divided = hidden * (state.conv_channels + channels + state.recurrent_heads)
            divided += state.conv_channels * hidden
            return LayerParameters(index=layer.index, divided=divided, plain=channels * (kernel + 1))
        case LayerKind.MAMBA1:
            inner = state.conv_channels
            rank = text.maybe_integer("mamba_dt_rank", "time_step_rank", high=_MOST) if _is_number(text) else None
            rank = rank or -(-hidden // 16)
            divided = 3 * hidden * inner + inner * (rank + 2 * state.recurrent_head_elements) + rank * inner
            return LayerParameters(
                index=layer.index,
                divided=divided,
                plain=inner * (kernel + 1) + 2 * inner * state.recurrent_head_elements,
            )
        case LayerKind.SHORT_CONV:
            divided = 4 * hidden * state.conv_channels
            return LayerParameters(index=layer.index, divided=divided, plain=state.conv_channels * kernel)
        case LayerKind.KIMI_DELTA:
            width = state.conv_channels // 3
            size = width // max(1, state.recurrent_heads)
            divided = 4 * hidden * width + 2 * size * width + hidden * state.recurrent_heads
            return LayerParameters(
                index=layer.index, divided=divided, replicated=2 * hidden * size, plain=state.conv_channels * kernel
            )
        case _:
            heads = state.recurrent_heads
            size = text.integer("head_dim", default=max(1, hidden // max(1, heads)), high=1 << 14)
            return LayerParameters(index=layer.index, divided=5 * hidden * heads * size)


def _is_number(text: Fields) -> bool:
    return not isinstance(text.raw("mamba_dt_rank"), str) and not isinstance(text.raw("time_step_rank"), str)


def _feed_forward(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    matrices = 2 if architecture.model_type in _UNGATED else 3
    if architecture.model_type == "nemotron_h":
        return _nemotron_feed_forward(text, index, hidden)
    if architecture.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return LayerParameters(index=index)
    experts = expert_count(text)
    if experts and _is_expert_layer(text, architecture.model_type, index, architecture.depth):
        width = _expert_width(text, index)
        shared = _shared_expert_width(text, architecture.model_type, width)
        # Experts may work in a narrower space than the residual (Kimi-K3).
        inner = text.integer("routed_expert_hidden_size", default=hidden, high=_MOST)
        if architecture.model_type.startswith("gemma4"):
            # gemma4.py: experts beside a dense block, not instead of it.
            shared = text.integer("intermediate_size", high=_MOST)
        if architecture.model_type == "longcat_flash":
            # longcat_flash.py::FlashDecoderLayer: a dense block after each of the two attention sublayers.
            shared += 2 * text.integer("ffn_hidden_size", "intermediate_size", high=_MOST)
        return LayerParameters(
            index=index,
            divided=matrices * hidden * shared + (0 if inner == hidden else 2 * hidden * inner),
            experts=experts * matrices * inner * width,
            padded_experts=experts * matrices * _up(inner, 256) * _up(width, 128),
            plain=hidden * experts,
        )
    if architecture.model_type == "nemotron-nas":
        return LayerParameters(index=index, divided=_nas_feed_forward(text, index, hidden))
    width = _dense_width(text, architecture.model_type, hidden)
    return LayerParameters(index=index, divided=matrices * hidden * width)


def _nas_feed_forward(text: Fields, index: int, hidden: int) -> int:
    """nemotron_nas.py::_ffn_mult_to_intermediate_size: two thirds of ffn_mult widths, rounded up to 256."""
    blocks = text.children("block_configs") or ()
    ffn = blocks[index].child("ffn") if index < len(blocks) else None
    if ffn is None or ffn.flag("no_op", default=False):
        return 0
    width = ffn.maybe_integer("intermediate_size", high=_MOST)
    if width is None:
        multiple = ffn.number("ffn_mult", default=0.0, low=0.0, high=1024.0)
        width = -(-int(2 * multiple * hidden / 3) // 256) * 256
    if ffn.flag("replace_with_linear", default=False):
        return hidden * hidden
    return 3 * hidden * width


def _nemotron_feed_forward(text: Fields, index: int, hidden: int) -> LayerParameters:
    """nemotron_h.py: a layer is Mamba, attention, MLP or experts, never two of them; experts may work in a narrower
    space (moe_latent_size).
    """
    letter = (text.text("hybrid_override_pattern") or "")[index : index + 1]
    names = text.strings("layers_block_type") or text.strings("layer_types")
    if names is not None and index < len(names):
        letter = {"mlp": "-", "moe": "E"}.get(names[index], "")
    if letter == "-":
        return LayerParameters(index=index, divided=2 * hidden * text.integer("intermediate_size", high=_MOST))
    if letter == "E":
        width = text.integer("moe_intermediate_size", high=_MOST)
        shared = text.integer("moe_shared_expert_intermediate_size", default=0, low=0, high=_MOST)
        shared *= text.integer("n_shared_experts", default=1, low=0, high=256)
        inner = text.integer("moe_latent_size", default=hidden, high=_MOST)
        experts = expert_count(text)
        return LayerParameters(
            index=index,
            divided=2 * hidden * shared + (0 if inner == hidden else 2 * hidden * inner),
            experts=2 * experts * inner * width,
            plain=hidden * experts,
        )
    return LayerParameters(index=index)


def expert_count(text: Fields) -> int:
    """Experts per layer (ModelArchConfigConvertorBase.get_num_experts); 0 for a dense model."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        value = text.raw(name)
        if isinstance(value, list):
            numbers = text.integers(name, high=_MOST_EXPERTS)
            return numbers[0] if numbers else 0
        if value is not None:
            return text.integer(name, low=0, high=_MOST_EXPERTS)
    ffn = text.child("ffn_config")
    return 0 if ffn is None else ffn.integer("moe_num_experts", default=0, low=0, high=_MOST_EXPERTS)


def _expert_width(text: Fields, index: int) -> int:
    """The width of a layer's experts: one number, or a list with one for each layer (Hunyuan's published configs)."""
    ffn = text.child("ffn_config")
    if ffn is not None:
        # transformers DbrxFFNConfig
        return ffn.integer("ffn_hidden_size", high=_MOST)
    if isinstance(text.raw("moe_intermediate_size"), list):
        widths = text.integers("moe_intermediate_size", low=1) or ()
        if index < len(widths):
            return widths[index]
        field = text.path("moe_intermediate_size")
        raise KvModelError(f"{field} has {len(widths)} entries and there is a layer {index}", field)
    return text.integer(
        "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size", high=_MOST
    )


def _listed_expert_layers(text: Fields) -> frozenset[int] | None:
    """`moe_layers_enum`: the numbers of the layers with experts, in a string (step3_text.py, step3p5.py)."""
    listed = text.text("moe_layers_enum")
    if listed is None:
        return None
    numbers = [part.strip() for part in listed[: 8 * MOST_LAYERS].split(",")]
    if not all(number.isdecimal() and len(number) <= _MOST_DIGITS for number in numbers):
        field = text.path("moe_layers_enum")
        raise KvModelError(f"{field} {listed[:40]!a} is not a list of layer numbers", field)
    return frozenset(int(number) for number in numbers)


def _is_expert_layer(text: Fields, model_type: str, index: int, depth: int) -> bool:
    names = text.strings("mlp_layer_types")
    if names is not None and index < len(names):
        return names[index] in ("sparse", "moe")
    listed = _listed_expert_layers(text)
    if listed is not None:
        return index in listed
    if index in (text.integers("mlp_only_layers", high=MOST_LAYERS) or ()):
        return False
    if model_type == "jamba":
        period = text.integer("expert_layer_period", default=2, high=MOST_LAYERS)
        return index % period == text.integer("expert_layer_offset", default=1, low=0, high=MOST_LAYERS)
    if model_type == "llama4_text":
        step = text.integer("interleave_moe_layer_step", default=1, low=0, high=MOST_LAYERS)
        return step > 0 and (index + 1) % step == 0
    dense_first = text.integer(
        "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", default=0, low=0, high=MOST_LAYERS
    )
    if index < dense_first:
        return False
    frequency = text.raw("moe_layer_freq")
    if isinstance(frequency, list):
        flags = text.integers("moe_layer_freq", high=1) or ()
        return index < len(flags) and flags[index] == 1
    step = text.integer("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", default=1, high=MOST_LAYERS)
    if text.has("decoder_sparse_step"):
        return (index + 1) % step == 0
    last = text.integer("moe_layer_end_index", default=depth, low=-1, high=MOST_LAYERS)
    return index % step == 0 and (last < 0 or index <= last)


def _shared_expert_width(text: Fields, model_type: str, width: int) -> int:
    if model_type == "llama4_text":
        return text.integer("intermediate_size", high=_MOST)
    own = text.maybe_integer(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        low=0,
    )
    if own is not None:
        return own
    return width * _shared_experts(text)


def _shared_experts(text: Fields) -> int:
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"):
        if isinstance(text.raw(name), list):
            return max(text.integers(name, high=256) or (0,))
        if text.has(name):
            return text.integer(name, low=0, high=256)
    return 0


def _dense_width(text: Fields, model_type: str, hidden: int) -> int:
    names = ["intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "n_inner", "block_ff_dim"]
    if model_type == "llama4_text":
        names.insert(0, "intermediate_size_mlp")
    if model_type == "granitemoehybrid":
        names.insert(0, "shared_intermediate_size")
    widths = text.raw("intermediate_size")
    if isinstance(widths, list):
        numbers = text.integers("intermediate_size") or (4 * hidden,)
        return sum(numbers) // len(numbers)
    width = text.integer(*names, default=4 * hidden if model_type in _UNGATED else None, high=_MOST)
    if model_type in ("lfm2", "lfm2_moe") and text.flag("block_auto_adjust_ff_dim", default=model_type == "lfm2"):
        # lfm2.py::Lfm2MLP: two thirds, rounded up to block_multiple_of.
        step = text.integer("block_multiple_of", default=256, high=1 << 16)
        width = -(-(2 * width // 3) // step) * step
    return width


def _vision(top: Fields) -> int:
    """A vision tower's parameters: attention and a feed-forward block per layer (an estimate)."""
    tower = top.child("vision_config")
    if tower is None:
        return 0
    # Where a tower has both, hidden_size is the width of what it hands on (transformers Qwen2VLVisionConfig).
    hidden = tower.maybe_integer("embed_dim", "hidden_size", "width", high=1 << 16)
    depth = tower.maybe_integer("num_hidden_layers", "depth", "layers", "n_layers", high=MOST_LAYERS)
    if hidden is None or depth is None:
        return 0
    width = tower.integer("intermediate_size", default=4 * hidden, high=1 << 18)
    return depth * (4 * hidden * hidden + 2 * hidden * width)


def _layer_embeddings(text: Fields, depth: int) -> int:
    """Embeddings per layer (gemma3n.py, gemma4.py): a table of hidden_size_per_layer_input for each layer."""
    size = text.integer("hidden_size_per_layer_input", default=0, low=0, high=1 << 14)
    if not size:
        return 0
    return text.integer("vocab_size_per_layer_input", "vocab_size", high=1 << 26) * depth * size


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _encoder(text: Fields, model_type: str, hidden: int) -> int:
    """Whisper's encoder, and the query and output projections of its decoder's cross-attention are in the layers."""
    if model_type != "whisper":
        return 0
    depth = text.integer("encoder_layers", default=0, low=0, high=MOST_LAYERS)
    width = text.integer("encoder_ffn_dim", default=4 * hidden, high=_MOST)
    bins = text.integer("num_mel_bins", default=80, high=1 << 12)
    return depth * (4 * hidden * hidden + 2 * hidden * width) + 3 * hidden * (bins + hidden)
