"""How many parameters a model has, from its config, split by what tensor parallelism and quantization do to them.

For models without a local checkpoint. Each layer is counted by its kind (attention, latent, state), then its
feed-forward half, then what stands outside the layers. Counted from the shapes of the linear layers in vLLM's model
files; norms, biases and routers are counted only as far as they matter (together below 0.1 %). A vision tower is an
estimate. Shared and repeated layers count once, as they are stored. A size that the config leaves out is an error.
"""

import math
from collections.abc import Mapping

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import text_fields
from kvdiag.kv.families.base import MAX_HEADS, MAX_LAYERS, WIDTH_NAMES
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, CachelessLayer, LatentLayer, LayerKind, StateLayer
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.weights.feed_forward import dense_width, feed_forward, is_expert_layer
from kvdiag.kv.weights.linear_layers import TYPES, LayerParameters, Linear, Parameters, block
from kvdiag.kv.weights.non_layer_parameters import non_layer_parameters

# The rank of what makes Mamba's step sizes; "auto", as a missing one, is a sixteenth of the width.
_STEP_RANKS = ("mamba_dt_rank", "time_step_rank")


def count_parameters(config: Mapping[str, object], architecture: Architecture) -> Parameters:
    """The parameters of a model from its config. Raises KvModelError where the config leaves out a size it needs."""
    top = Fields(config)
    text = text_fields(config)
    unknown = architecture.is_compressed or architecture.has_latent_windows or architecture.denoises
    if unknown or architecture.model_type in TYPES["not_counted"]:
        raise KvModelError(
            f"the weights of {architecture.model_type} are not modelled: pass --weights BYTES", "weights"
        )
    hidden = text.integer(*WIDTH_NAMES)
    vocabulary = text.integer("vocab_size", "padded_vocab_size", high=1 << 26)
    tied = _tied(text, top, architecture.model_type)
    # An encoder hands on its last hidden state; it has no output layer.
    encodes = set(architecture.kinds) == {LayerKind.ENCODER_ONLY}
    layers = tuple(_layer(text, architecture, index, hidden) for index in range(architecture.depth))
    return Parameters(
        embedding=vocabulary * hidden,
        head=0 if tied or encodes else vocabulary * hidden,
        layers=layers,
        other=non_layer_parameters(
            text, top, architecture.model_type, vocabulary=vocabulary, depth=architecture.depth, hidden=hidden
        ),
    )


def _layer(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    parts = LayerParameters(plain=2 * hidden)
    if architecture.model_type == "hrm_text":
        # hrm_text.py: two stacks, whose layers are run again.
        stacks = 2 * text.integer("num_layers_per_stack", "num_hidden_layers", high=MAX_LAYERS)
        if index >= stacks:
            return LayerParameters()
    looped = architecture.model_type in ("iquestloopcoder", "iquest_loopcoder")
    for layer in architecture.layers:
        if layer.index != index:
            continue
        match layer:
            case AttentionLayer() if architecture.model_type == "minicpm3":
                # minicpm3.py: latent projections, with K and V kept per head.
                size = text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim")
                parts += _latent(text, size, hidden)
            case AttentionLayer():
                # A shared block is counted with the layers that run it.
                if architecture.model_type != "zamba2" and not (looped and layer.kind is LayerKind.SLIDING):
                    parts += _attention(text, architecture, layer, hidden)
            case LatentLayer():
                parts += _latent(text, layer.latent_size, hidden, sparse=layer.kind is LayerKind.MLA_DSA)
            case StateLayer():
                parts += _state(text, layer, hidden)
            case CachelessLayer() if layer.kind is LayerKind.SHARED:
                # It has a query and an output alone (gemma3n.py, gemma4.py: is_kv_shared_layer).
                query = hidden * architecture.attention_heads * (layer.head_size or 0)
                parts += LayerParameters((Linear("self_attn.q_proj", query), Linear("self_attn.o_proj", query)))
            case _ if layer.kind is LayerKind.ENCODER_ONLY:
                parts += _uncached_attention(text, architecture, index, hidden)
    if architecture.model_type == "zamba2":
        return parts + _zamba2_block(text, architecture, index, hidden)
    return (
        parts + _gemma_extras(text, architecture.model_type, hidden) + feed_forward(text, architecture, index, hidden)
    )


def _gemma_extras(text: Fields, model_type: str, hidden: int) -> LayerParameters:
    """The parameters of Gemma 3n and 4 layers besides attention and feed-forward (gemma3n.py, gemma4.py): a gate and a
    projection of the layer's own embeddings; Gemma 3n also LAuReL's two matrices and what mixes its streams.
    """
    linears: tuple[Linear, ...] = ()
    plain = 0
    size = text.integer("hidden_size_per_layer_input", default=0, low=0, high=1 << 14)
    if size:
        linears += (Linear("per_layer_input_gate", 2 * hidden * size, most_parts=1),)
    if model_type == "gemma3n_text":
        rank = text.integer("laurel_rank", default=64, high=1 << 14)
        linears += (Linear("laurel.linear_left", 2 * hidden * rank),)
        streams = text.integer("altup_num_inputs", default=4, high=64)
        plain = hidden * streams + streams * streams + streams**3
    return LayerParameters(linears, plain)


def _tied(text: Fields, top: Fields, model_type: str) -> bool:
    for source in (text, top):
        for name in ("tie_word_embeddings", "tie_embedding", "weight_tying"):
            if source.has(name):
                return source.flag(name, default=False)
    return model_type in TYPES["tied_by_default"]


def _projections(
    *, hidden: int, query: int, output: int, kv_heads: int, key_size: int, value_size: int
) -> LayerParameters:
    """Attention from `hidden` with a query and an output matrix of so many parameters."""
    return LayerParameters(
        (
            Linear("self_attn.q_proj", query),
            Linear("self_attn.k_proj", hidden * kv_heads * key_size, kv_heads),
            Linear("self_attn.v_proj", hidden * kv_heads * value_size, kv_heads),
            Linear("self_attn.o_proj", output),
        )
    )


def _attention(text: Fields, architecture: Architecture, layer: AttentionLayer, hidden: int) -> LayerParameters:
    heads = architecture.attention_heads
    if layer.kind is LayerKind.SLIDING and text.has("swa_num_attention_heads"):
        heads = text.integer("swa_num_attention_heads", high=MAX_HEADS)
    per_layer = text.integers("num_attention_heads_per_layer", low=1, high=MAX_HEADS) or ()
    if layer.index < len(per_layer):
        heads = per_layer[layer.index]
    query = heads * layer.head_size
    projections = _projections(
        hidden=hidden,
        query=hidden * (query + _gate_outputs(text, architecture.model_type, heads, query)),
        output=heads * layer.head_size_v * hidden,
        kv_heads=layer.kv_heads,
        key_size=layer.head_size,
        value_size=layer.head_size_v,
    )
    model_type = architecture.model_type
    if model_type == "k2_horizon" and is_expert_layer(text, model_type, layer.index, architecture.depth):
        # k2_horizon.py::K2HorizonMoVAAttention: a router chooses among value projections.
        more = text.integer("mova_num_experts", default=1, low=0, high=1 << 16) - 1
        count = max(0, more) * hidden * layer.kv_heads * layer.head_size
        values = Linear("self_attn.v_experts.0", count, layer.kv_heads)
        return projections + LayerParameters((values,))
    return projections


def _gate_outputs(text: Fields, model_type: str, heads: int, query: int) -> int:
    """How wide attention's gate is: as its query, or with an output for each head (laguna.py::LagunaAttention)."""
    if model_type == "laguna":
        kind = text.raw("gating")
        return 0 if kind is False else query if kind == "per-element" else heads
    if model_type.startswith("muse_glimmer"):
        gated = text.flag("use_attn_output_gate", default=True)
    else:
        gated = model_type in TYPES["output_gated"] or (model_type == "k2_horizon" and text.has("attention_gate_func"))
    return query if gated else 0


def _uncached_attention(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    """An encoder's layer, with all its projections."""
    heads = architecture.attention_heads
    size = text.integer("head_dim", default=max(1, hidden // heads), high=1 << 14)
    kv_heads = text.integer("num_key_value_heads", default=heads, high=MAX_HEADS)
    layer = AttentionLayer(index=index, kind=LayerKind.FULL, kv_heads=kv_heads, head_size=size, head_size_v=size)
    return _attention(text, architecture, layer, hidden)


def _zamba2_block(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    """What a hybrid layer adds to its Mamba-2 (zamba2.py): a linear layer of its own, and one of num_mem_blocks blocks
    that hybrid layers take in turn, so that only the first ones cost anything. A block attends to the hidden state
    and the embedding side by side.
    """
    attention = [layer for layer in architecture.layers if isinstance(layer, AttentionLayer)]
    places = [layer.index for layer in attention]
    if index not in places:
        return LayerParameters()
    width = dense_width(text, architecture.model_type, hidden)
    # Zamba2LoRA: the adapters that differ between runs of a block.
    rank = text.integer("adapter_rank", default=128)
    linears: tuple[Linear, ...] = (
        Linear("linear", hidden * hidden),
        Linear("mlp.gate_up_proj_adapter_list", rank * (hidden + 2 * width)),
    )
    if text.flag("use_shared_attention_adapter", default=False):
        linears += (Linear("self_attn.linear_q_adapter_list", 3 * rank * 4 * hidden),)
    own = LayerParameters(linears)
    if places.index(index) >= text.integer("num_mem_blocks", default=1, high=MAX_LAYERS):
        return own
    layer = attention[places.index(index)]
    shared = _projections(
        hidden=2 * hidden,
        query=2 * hidden * architecture.attention_heads * layer.head_size,
        output=hidden * architecture.attention_heads * layer.head_size,
        kv_heads=layer.kv_heads,
        key_size=layer.head_size,
        value_size=layer.head_size,
    )
    return own + shared + block("mlp", inputs=hidden, width=width)


def _latent(text: Fields, latent_size: int, hidden: int, *, sparse: bool = False) -> LayerParameters:
    """deepseek_v2.py::DeepseekV2MLAAttention and Indexer."""
    heads = text.integer("num_attention_heads", high=MAX_HEADS)
    nope = text.integer("qk_nope_head_dim", high=1 << 14)
    value = text.integer("v_head_dim", default=nope, high=1 << 14)
    rank = text.integer("kv_lora_rank", high=1 << 14)
    query_rank = text.maybe_integer("q_lora_rank", high=1 << 14)
    query_in = hidden if query_rank is None else query_rank
    query_size = query_in * heads * (nope + latent_size - rank)
    down: tuple[Linear, ...] = (Linear("self_attn.kv_a_proj_with_mqa", hidden * latent_size, most_parts=1),)
    if query_rank is not None:
        down += (Linear("self_attn.q_a_proj", hidden * query_rank, most_parts=1),)
    if sparse:
        size = text.integer("index_head_dim")
        index_heads = text.integer("index_n_heads", default=64, high=MAX_HEADS)
        indexer = query_in * index_heads * size + hidden * size + hidden * index_heads
        down += (Linear("self_attn.indexer.wq_b", indexer, most_parts=1),)
    return LayerParameters(
        (
            *down,
            Linear(f"self_attn.{'q_proj' if query_rank is None else 'q_b_proj'}", query_size),
            Linear("self_attn.kv_b_proj", rank * heads * (nope + value)),
            Linear("self_attn.o_proj", heads * value * hidden),
        )
    )


def _state(text: Fields, layer: StateLayer, hidden: int) -> LayerParameters:
    state = layer.state
    kernel = state.conv_steps + 1
    match layer.kind:
        case LayerKind.GATED_DELTA_NET:
            heads = state.recurrent_heads
            # A head's elements are key x value, and where the config does not say, a value is twice as long as a key
            # (transformers OlmoHybridConfig): value squared over 2.
            size = text.maybe_integer("linear_value_head_dim") or math.isqrt(2 * state.recurrent_head_elements)
            value = heads * size
            # Projections into q, k, v, z, then b and a, then out (qwen_gdn_linear_attn.py).
            linears: tuple[Linear, ...] = (
                Linear("linear_attn.in_proj_qkv", hidden * state.conv_channels),
                Linear("linear_attn.in_proj_z", hidden * value),
                Linear("linear_attn.in_proj_ba", 2 * hidden * heads),
                Linear("linear_attn.out_proj", value * hidden),
            )
            return LayerParameters(linears, plain=state.conv_channels * kernel)
        case LayerKind.MAMBA2:
            channels = state.conv_channels + state.conv_groups * state.conv_group_channels
            into = hidden * (state.conv_channels + channels + state.recurrent_heads)
            return _in_and_out("mamba", into, state.conv_channels * hidden, plain=channels * (kernel + 1))
        case LayerKind.MAMBA1:
            inner = state.conv_channels
            rank = None
            if not any(isinstance(text.raw(name), str) for name in _STEP_RANKS):
                rank = text.maybe_integer(*_STEP_RANKS)
            rank = rank or ceil_div(hidden, 16)
            small = inner * (rank + 2 * state.recurrent_head_elements) + rank * inner
            # Its decay is kept in 32 bits (mamba_mixer.py: A), twice as many as the rest.
            plain = inner * (kernel + 1) + 2 * inner * state.recurrent_head_elements
            into_and_out = _in_and_out("mamba", 2 * hidden * inner, inner * hidden, plain=plain)
            return into_and_out + LayerParameters((Linear("mamba.x_proj", small),))
        case LayerKind.SHORT_CONV:
            channels = state.conv_channels
            return _in_and_out("conv", 3 * hidden * channels, channels * hidden, plain=channels * kernel)
        case LayerKind.KIMI_DELTA:
            return _delta_attention(text, layer, hidden)
        case _:
            heads = state.recurrent_heads
            size = math.isqrt(state.recurrent_head_elements)
            return _in_and_out("self_attn", 4 * hidden * heads * size, heads * size * hidden)


def _in_and_out(name: str, into: int, out: int, *, plain: int = 0) -> LayerParameters:
    return LayerParameters((Linear(f"{name}.in_proj", into), Linear(f"{name}.out_proj", out)), plain)


def _delta_attention(text: Fields, layer: StateLayer, hidden: int) -> LayerParameters:
    """Kimi delta attention: q, k, v, beta and output, and two gates, of low rank (kimi_k3/nvidia/model.py) or, with
    no_kda_lora, whole (bailing_moe_v3.py).
    """
    state = layer.state
    width = state.conv_channels // 3
    size = width // state.recurrent_heads
    gates: tuple[Linear, ...] = (Linear("self_attn.g_proj", 2 * hidden * width),)
    if not text.flag("no_kda_lora", default=False):
        gates = (
            Linear("self_attn.f_b_proj", 2 * size * width),
            Linear("self_attn.f_a_proj", 2 * hidden * size, most_parts=1),
        )
    linears = (
        Linear("self_attn.q_proj", 3 * hidden * width),
        Linear("self_attn.b_proj", hidden * state.recurrent_heads),
        *gates,
        Linear("self_attn.o_proj", hidden * width),
    )
    return LayerParameters(linears, plain=state.conv_channels * (state.conv_steps + 1))
