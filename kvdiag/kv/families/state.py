"""Families with a state other than Mamba's: gated delta net, Kimi delta and linear attention, short convolution.

Each function reads one family: which layers keep a state (by name, list or period), the size of that state, and full
attention or MLA elsewhere. Two models of the same type are distinguished by the fields that only one of them has, or by
their class names. State sizes and fields have the same origin as in mamba.py.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvdiag.kv.families.base import (
    ATTENTION_NAMES,
    MAX_HEADS,
    MAX_LAYERS,
    ModelLayers,
    every_nth,
    full_layer,
    layer_names,
    mixed_model,
    names_where,
    read_depth,
    read_heads,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.families.latent import indexer_row_bytes, latent_size
from kvdiag.kv.layout.layers import AttentionLayer, LatentLayer, Layer, LayerKind, StateLayer, StateShape

_FLASH_KDA_SIZE = 128
_INDEXED_NAMES = ATTENTION_NAMES | {"indexed_attention", "qwen_sparse_attention"}
# qsa_cache.py::QSAKeyStateCache: three 64-bit positions next to elements of 16 bits.
_ELEMENTS_OF_A_POSITION, _POSITION_ELEMENTS = 4, 12


def delta_state(text: Fields) -> StateShape:
    """gated_delta_net_state_shape, from the linear_* fields."""
    key_heads = text.integer("linear_num_key_heads", high=MAX_HEADS)
    value_heads = text.integer("linear_num_value_heads", high=MAX_HEADS)
    key_size = text.integer("linear_key_head_dim", high=1 << 14)
    value_size = text.integer("linear_value_head_dim", high=1 << 14)
    return StateShape(
        conv_channels=2 * key_size * key_heads + value_size * value_heads,
        conv_steps=text.integer("linear_conv_kernel_dim", high=1 << 10) - 1,
        drafts_lengthen_conv=True,
        recurrent_heads=value_heads,
        recurrent_head_elements=value_size * key_size,
    )


def qwen_delta(text: Fields) -> ModelLayers:
    """Qwen3-Next and Qwen3.5 to 3.8 (qwen3_next.py, qwen3_5.py): full attention every full_attention_interval layers,
    gated delta net between them.
    """
    depth = read_depth(text)
    names = layer_names(text, depth)
    if names is None:
        every = text.integer("full_attention_interval", default=4, high=MAX_LAYERS)
        names = every_nth(depth, every, other="linear_attention")
    model = mixed_model(text, names, LayerKind.GATED_DELTA_NET, delta_state(text))
    drafts = text.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, low=0, high=64)
    draft = full_layer(depth - 1, read_heads(text))
    return replace(model, draft_layers=(draft,) * drafts, state_dtype=text.text("mamba_ssm_dtype"))


def qwen4_exp(text: Fields) -> ModelLayers:
    """Qwen4-Exp (models/qwen4_exp/nvidia/model.py, qsa.py, ple_layer.py, common/qsa_cache.py): as Qwen3.5, and with
    indexer fields a key for each of indexer_compress_ratio tokens in the attention layers. The ring for the tokens
    between them keeps positions, too, where they have several axes. Layers in ple_layer_ids, counted from 1, keep the
    inputs of a dilated convolution over all streams, whole on every rank.
    """
    names = layer_names(text, read_depth(text))
    if names is not None:
        attending = [name in _INDEXED_NAMES for name in names]
        text = text.filled({"layer_types": list(names_where(attending, "linear_attention"))}, override=True)
    model = qwen_delta(text)
    streams = text.integer("hc_count", default=4, high=1 << 10) * text.integer("hidden_size")
    kernel, dilation = text.integer("ple_conv_kernel_size", default=4), text.integer("ngram_size", default=3)
    state = StateShape(
        conv_channels=streams,
        conv_steps=(kernel - 1) * dilation,
        drafts_lengthen_conv=True,
        replicated=True,
    )
    keyed = frozenset(text.integers("ple_layer_ids", high=MAX_LAYERS) or ())
    layers: list[Layer] = []
    for layer in model.layers:
        if layer.index + 1 in keyed:
            layers.append(StateLayer(index=layer.index, kind=LayerKind.SHORT_CONV, state=state))
        layers.append(_with_keys(text, layer))
    return replace(
        model, layers=tuple(layers), draft_layers=tuple(_with_keys(text, layer) for layer in model.draft_layers)
    )


def _with_keys(text: Fields, layer: Layer) -> Layer:
    """An attention layer with its indexer's keys, which are in 16 bits."""
    if not isinstance(layer, AttentionLayer) or not text.has("indexer_n_heads"):
        return layer
    size = text.integer("indexer_head_dim", high=1 << 14)
    ratio = text.integer("indexer_compress_ratio", low=2, high=1 << 10)
    # model_executor/models/config.py: the positions of the text model's class have one axis.
    several = "Qwen4ExpForConditionalGeneration" in (text.root.strings("architectures") or ())
    axes = several and (text.child("rope_parameters") or Fields({})).has("mrope_section")
    ring = -(-size // _ELEMENTS_OF_A_POSITION) * _ELEMENTS_OF_A_POSITION + _POSITION_ELEMENTS if axes else size
    return replace(layer, index_row_bytes=2 * size, pool_tokens=ratio, pool_row_bytes=2 * ring)


def olmo_hybrid(text: Fields) -> ModelLayers:
    """OLMo Hybrid (olmo_hybrid.py): as Qwen3-Next, with sizes that follow from the attention heads; every fourth layer
    is full (transformers OlmoHybridConfig).
    """
    depth = read_depth(text)
    names = layer_names(text, depth) or every_nth(depth, 4, other="linear_attention")
    return mixed_model(text, names, LayerKind.GATED_DELTA_NET, delta_state(_olmo_sizes(text)))


def _olmo_sizes(text: Fields) -> Fields:
    """The sizes that transformers OlmoHybridConfig fills in where they are missing."""
    heads = text.integer("num_attention_heads", high=MAX_HEADS)
    key_heads = text.integer("linear_num_key_heads", default=heads, high=MAX_HEADS)
    key_size = text.integer(
        "linear_key_head_dim", default=max(1, 3 * text.integer("hidden_size") // (4 * key_heads)), high=1 << 14
    )
    return text.filled(
        {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": key_size,
            "linear_value_head_dim": 2 * key_size,
        }
    )


def lfm2(text: Fields) -> ModelLayers:
    """LFM2 (lfm2.py, lfm2_moe.py): full attention at full_attn_idxs or as layer_types says, short convolutions
    elsewhere, conv_L_cache - 1 steps long.
    """
    depth = read_depth(text)
    names = layer_names(text, depth)
    if names is None:
        attention = text.integers("full_attn_idxs", high=MAX_LAYERS)
        names = names_where((attention is None or index in attention for index in range(depth)), "conv")
    state = StateShape(
        conv_channels=text.integer("conv_dim", "hidden_size"),
        conv_steps=text.integer("conv_L_cache", default=3, high=1 << 10) - 1,
    )
    return mixed_model(text, names, LayerKind.SHORT_CONV, state)


def minicpm_sala(text: Fields) -> ModelLayers:
    """MiniCPM-SALA (SGLang's models/minicpm_sala.py): lightning attention, whose states are float32, where mixer_types
    names no MiniCPM 4 layer.
    """
    size = text.integer("lightning_head_dim", high=1 << 14)
    heads = text.integer("lightning_nkv", high=MAX_HEADS)
    state = StateShape(recurrent_heads=heads, recurrent_head_elements=size * size, recurrent_dtype="float32")
    mixers = text.strings("mixer_types") or ()
    if len(mixers) < read_depth(text):
        raise text.error("mixer_types", f"names {len(mixers)} layers and num_hidden_layers is {read_depth(text)}")
    names = names_where((mixer == "minicpm4" for mixer in mixers[: read_depth(text)]), "linear_attention")
    return mixed_model(text, names, LayerKind.LINEAR, state)


def kimi_linear(text: Fields) -> ModelLayers:
    """Kimi-Linear (kimi_k3/nvidia/model.py::KimiLinearForCausalLM): MLA at full_attn_layers, Kimi delta attention
    elsewhere; layers are counted from 1 and the recurrent state is float32.
    """
    linear = text.child("linear_attn_config")
    if linear is None:
        raise text.error("linear_attn_config", "is missing: it says which layers are delta attention and which are MLA")
    kda = frozenset(linear.integers("kda_layers", high=MAX_LAYERS) or ())
    state = _kimi_delta_state(linear, linear.integer("num_heads", high=MAX_HEADS))
    stateful = (index + 1 in kda for index in range(read_depth(text)))
    return _states_and_latent(text, LayerKind.KIMI_DELTA, state, stateful)


def glm5_next(text: Fields) -> ModelLayers:
    """GLM-5-Next (glm5next/common/model.py, kda.py): Kimi delta attention where layer_types says linear, elsewhere MLA
    with an indexer whose keys are pooled; without layer_types every fourth layer is MLA (transformers
    Glm5NextTextConfig, which also reads linear_attn_config).
    """
    linear = text.child("linear_attn_config") or Fields({})
    size = linear.maybe_integer("head_dim", high=1 << 14) or text.integer("linear_head_dim", high=1 << 14)
    heads = linear.maybe_integer("num_heads", high=MAX_HEADS) or text.integer("linear_num_heads", high=MAX_HEADS)
    kernel = linear.maybe_integer("short_conv_kernel_size", high=1 << 10)
    steps = kernel or text.integer("linear_conv_kernel_dim", high=1 << 10)
    bounded = text.has("linear_attn_config") or text.has("linear_lower_bound")
    bounded = bounded or "linear_lower_bound" not in text.names()
    state = _delta_state(size, heads, steps, bounded=bounded)
    attention = LatentLayer(0, latent_size(text))
    if text.has("index_topk"):
        pool, key_size = text.integer("index_kpool", low=2, high=1 << 10), text.integer("index_head_dim", high=1 << 14)
        # The ring keeps a key and a score of each channel in 16 bits (common/attention.py::Glm5NextTailCache).
        attention = LatentLayer(0, latent_size(text), indexer_row_bytes(text), pool, 4 * key_size)
    depth = read_depth(text)
    names = layer_names(text, depth) or every_nth(depth, 4, other="linear_attention")
    layers: list[Layer] = [
        StateLayer(index=index, kind=LayerKind.KIMI_DELTA, state=state)
        if name == "linear_attention"
        else replace(attention, index=index)
        for index, name in enumerate(names)
    ]
    drafts = text.integer("num_nextn_predict_layers", default=0, low=0, high=64)
    draft = replace(attention, index=depth - 1)
    heads = text.integer("num_attention_heads", high=MAX_HEADS)
    return ModelLayers(heads, tuple(layers), draft_layers=(draft,) * drafts)


def bailing_linear(text: Fields) -> ModelLayers:
    """Bailing MoE 2.5, Ring-linear (bailing_moe_linear.py): MLA every layer_group_size layers, linear attention
    between them. Ling 3 (bailing_moe_v3.py) has the same model type, Kimi delta attention between them, and MLA also in
    the layers beyond the last whole group.
    """
    depth = read_depth(text)
    heads = text.integer("num_attention_heads", high=MAX_HEADS)
    classes = (*(text.root.strings("architectures") or ()), *(text.strings("architectures") or ()))
    if text.has("short_conv_kernel_size") or any(name.startswith("BailingMoeV3") for name in classes):
        group = text.integer("layer_group_size", high=MAX_LAYERS)
        stateful = ((index + 1) % group != 0 and index < depth // group * group for index in range(depth))
        # Its layers write no checkpoints (bailing_moe_v3.py::BailingMoeV3KimiDeltaAttention).
        state = replace(_kimi_delta_state(text, heads), prefill_checkpoints=0)
        return _states_and_latent(text, LayerKind.KIMI_DELTA, state, stateful)
    group = text.integer("layer_group_size", default=1, low=0, high=MAX_LAYERS)
    size = text.integer("head_dim", default=max(1, text.integer("hidden_size") // heads), high=1 << 14)
    state = StateShape(recurrent_heads=heads, recurrent_head_elements=size * size)
    stateful = (group != 0 and (index + 1) % group != 0 for index in range(depth))
    return _states_and_latent(text, LayerKind.LINEAR, state, stateful)


def _kimi_delta_state(fields: Fields, heads: int) -> StateShape:
    """kda_state_shape and kda_state_dtype. FlashKDA, which needs a bounded gate and heads of 128, writes a checkpoint
    (kimi_k3/nvidia/kda.py::is_flashkda_supported).
    """
    kernel = fields.integer("short_conv_kernel_size", default=4, high=1 << 10)
    bounded = fields.raw("gate_lower_bound") is not None
    return _delta_state(fields.integer("head_dim", high=1 << 14), heads, kernel, bounded=bounded)


def _delta_state(size: int, heads: int, kernel: int, *, bounded: bool) -> StateShape:
    return StateShape(
        conv_channels=3 * heads * size,
        conv_steps=kernel - 1,
        drafts_lengthen_conv=True,
        recurrent_heads=heads,
        recurrent_head_elements=size * size,
        recurrent_dtype="float32",
        prefill_checkpoints=int(size == _FLASH_KDA_SIZE and bounded),
    )


def _states_and_latent(text: Fields, kind: LayerKind, state: StateShape, stateful: Iterable[bool]) -> ModelLayers:
    """A state in each layer for which `stateful` is true, MLA elsewhere."""
    row = latent_size(text)
    layers: list[Layer] = [
        StateLayer(index=index, kind=kind, state=state) if flag else LatentLayer(index, row)
        for index, flag in enumerate(stateful)
    ]
    return ModelLayers(text.integer("num_attention_heads", high=MAX_HEADS), tuple(layers))
