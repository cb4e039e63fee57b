"""Families with K and V per head in identical layers: dense, looped, encoder-only and cross-attention models.

Each function reads a family's config as its vLLM model file (vllm/model_executor/models/NAME.py) and its transformers
config class do; the docstring names the file. Without `layer_types` the pattern is the one the class fills in.
"""

from dataclasses import replace

from kvdiag.kv.families.base import (
    MAX_HEADS,
    MAX_LAYERS,
    WIDTH_NAMES,
    Heads,
    ModelLayers,
    full_layer,
    full_layers,
    full_model,
    layer_names,
    names_where,
    read_depth,
    read_heads,
    typed_model,
    window_of,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import CachelessLayer, Layer, LayerKind

_FALCON_40B_WIDTH = 8192
MAX_LOOPS = 64


def dense(text: Fields) -> ModelLayers:
    """Llama-like models (llama.py): layers as `layer_types` says.

    Without `layer_types` one `sliding_window` holds for all layers, and with mixed ones only for the named layers
    (engine/arg_utils.py::create_engine_config, attention.py::Attention.__init__).
    """
    depth, window = read_depth(text), window_of(text)
    return typed_model(text, layer_names(text, depth) or names_where([window is None] * depth), window)


def step1(text: Fields) -> ModelLayers:
    """Step 1 (step1.py): one KV head unless num_attention_groups or num_key_value_heads says otherwise."""
    kv_heads = text.integer("num_attention_groups", "num_key_value_heads", default=1, high=MAX_HEADS)
    return full_model(text, read_heads(text, kv_heads=kv_heads))


def step3(text: Fields) -> ModelLayers:
    """Step 3 (step3_text.py): one KV head, which its attention asserts."""
    return full_model(text, read_heads(text, kv_heads=1))


def dbrx(text: Fields) -> ModelLayers:
    """DBRX (dbrx.py): the number of KV heads is in attn_config."""
    attention = text.child("attn_config")
    kv_heads = None if attention is None else attention.maybe_integer("kv_n_heads", high=MAX_HEADS)
    return full_model(text, read_heads(text, kv_heads=kv_heads))


def falcon(text: Fields) -> ModelLayers:
    """Falcon, StarCoder (FalconModelArchConfigConvertor): multi_query is one KV head but for the new decoder."""
    # transformers_utils/configs/falcon.py::RWConfig: falcon-40b's first config does not say that it is of the new kind.
    first_40b = text.text("model_type") == "RefinedWeb" and text.integer(*WIDTH_NAMES) == _FALCON_40B_WIDTH
    single = text.flag("multi_query", default=True) and not text.flag("new_decoder_architecture", default=first_40b)
    return full_model(text, read_heads(text, kv_heads=1 if single else None))


def qwen2(text: Fields) -> ModelLayers:
    """Qwen2 and Qwen3 (qwen2.py): a window counts only with use_sliding_window, and only for all layers at once."""
    depth = read_depth(text)
    window = window_of(text) if text.flag("use_sliding_window", default=False) else None
    names = layer_names(text, depth)
    if names is None:
        first = text.integer("max_window_layers", default=28, low=0, high=1 << 20)
        names = names_where(window is None or index < first for index in range(depth))
    if len(set(names)) > 1:
        problem = "gives a window to some layers only, which vLLM refuses for this model: pass --kv-bytes-per-token"
        raise text.error("max_window_layers", problem)
    return typed_model(text, names, window)


def qwen_moe(text: Fields) -> ModelLayers:
    """Qwen2-MoE and Qwen3-MoE (qwen2_moe.py, qwen3_moe.py): all layers take the window, or none."""
    depth = read_depth(text)
    window = window_of(text) if text.flag("use_sliding_window", default=False) else None
    everywhere = set(layer_names(text, depth) or ("sliding_attention",)) == {"sliding_attention"}
    return typed_model(text, names_where([window is None or not everywhere] * depth), window)


def nemotron_nas(text: Fields) -> ModelLayers:
    """Nemotron-NAS (nemotron_nas.py): each block says how many query heads share a KV head, or has no attention."""
    blocks = text.children("block_configs")
    if not blocks:
        raise text.error("block_configs", "is missing: it has the KV heads of a Nemotron-NAS model")
    depth = read_depth(text)
    if len(blocks) < depth:
        raise text.error("block_configs", f"has {len(blocks)} blocks and num_hidden_layers is {depth}")
    attention_heads = text.integer("num_attention_heads", high=MAX_HEADS)
    layers: list[Layer] = []
    for index, block in enumerate(blocks[:depth]):
        attention = block.child("attention")
        if attention is None or attention.flag("no_op", default=False) or not attention.has("n_heads_in_group"):
            layers.append(CachelessLayer(index=index, kind=LayerKind.NO_CACHE))
            continue
        group = attention.integer("n_heads_in_group", high=MAX_HEADS)
        layers.append(full_layer(index, read_heads(text, kv_heads=max(1, attention_heads // group))))
    return ModelLayers(attention_heads, tuple(layers))


def minicpm3(text: Fields) -> ModelLayers:
    """MiniCPM3 (minicpm3.py): a latent model that is served unpacked, every head keeping its own K and V."""
    attention_heads = text.integer("num_attention_heads", high=MAX_HEADS)
    size = text.integer("qk_nope_head_dim") + text.integer("qk_rope_head_dim")
    return full_model(text, Heads(attention_heads=attention_heads, kv_heads=attention_heads, head_size=size))


def hrm_text(text: Fields) -> ModelLayers:
    """HRM-Text (hrm_text.py::HrmTextAttention): two stacks of num_layers_per_stack layers, run H_cycles times L_cycles
    and once, each time with a cache of its own; every head keeps its own K and V.

    A config whose num_layers_per_stack is missing counts one stack in num_hidden_layers (transformers HrmTextConfig).
    """
    per_stack = text.integer("num_layers_per_stack", "num_hidden_layers", high=MAX_LAYERS)
    high = text.integer("H_cycles", default=2, high=MAX_LOOPS)
    low = text.integer("L_cycles", default=3, high=MAX_LOOPS)
    depth = per_stack * high * (low + 1)
    if depth > MAX_LAYERS:
        raise text.error("H_cycles", f"{high} and L_cycles {low} make {depth} layers; at most {MAX_LAYERS} are read")
    heads = read_heads(text, kv_heads=text.integer("num_attention_heads", high=MAX_HEADS))
    return ModelLayers(heads.attention_heads, full_layers(depth, heads))


def whisper(text: Fields) -> ModelLayers:
    """Whisper (whisper.py): every decoder layer has self-attention and cross-attention; the encoder has no cache."""
    depth = text.integer("decoder_layers", "num_hidden_layers", high=1024)
    attention_heads = text.integer("decoder_attention_heads", "num_attention_heads", high=MAX_HEADS)
    width = text.integer("d_model", "hidden_size")
    if width % attention_heads:
        raise text.error("d_model", f"{width} is not a multiple of decoder_attention_heads {attention_heads}")
    heads = Heads(attention_heads=attention_heads, kv_heads=attention_heads, head_size=width // attention_heads)
    layers: list[Layer] = []
    for index in range(depth):
        own = full_layer(index, heads)
        layers += [own, replace(own, kind=LayerKind.CROSS_ATTENTION)]
    return ModelLayers(attention_heads, tuple(layers))


def cohere_asr(text: Fields) -> ModelLayers:
    """Cohere ASR (cohere_asr.py): Whisper's layers, with the decoder's sizes in transf_decoder.config_dict."""
    decoder = text.child("transf_decoder")
    sizes = None if decoder is None else decoder.child("config_dict")
    if sizes is None:
        raise text.error("transf_decoder", "is missing: its config_dict has the decoder's sizes")
    depth = sizes.integer("num_layers", high=1024)
    return whisper(sizes.filled({"decoder_layers": depth}, override=True))


def minimax_m3(text: Fields) -> ModelLayers:
    """MiniMax-M3 (minimax_m3/nvidia/model.py): index keys in 16 bits where sparse_attention_freq is not 0."""
    depth, heads = read_depth(text), read_heads(text)
    sparse = text.child("sparse_attention_config")
    if sparse is None:
        raise text.error("sparse_attention_config", "is missing: it says which layers keep index keys")
    frequencies = sparse.integers("sparse_attention_freq", low=0, high=MAX_LAYERS) or ()
    layers = list(full_layers(depth, heads))
    for index, frequency in enumerate(frequencies[:depth]):
        if frequency:
            row_bytes = 2 * sparse.integer("sparse_index_dim", high=1 << 14)
            layers[index] = replace(layers[index], index_row_bytes=row_bytes)
    return ModelLayers(heads.attention_heads, tuple(layers))


def pangu_sinks(text: Fields) -> ModelLayers:
    """Pangu Pro MoE V2 (openpangu.py::OpenPanguSinkAttention): K of two parts, V of another size, fixed tokens before
    those of every request, and a full cache in every layer, also with windows (static_sink_attention.py).
    """
    if text.has("kv_lora_rank"):
        raise text.error("kv_lora_rank", "makes its attention latent: pass --kv-bytes-per-token")
    sinks = text.integer("param_sink_number", high=1 << 20)
    attention_heads = text.integer("num_attention_heads", high=MAX_HEADS)
    heads = Heads(
        attention_heads=attention_heads,
        kv_heads=text.integer("num_key_value_heads", default=attention_heads, high=MAX_HEADS),
        head_size=text.integer("qk_nope_dim", high=1 << 14) + text.integer("qk_rope_dim", high=1 << 14),
    )
    value = text.integer("v_channels", high=1 << 14)
    layers = (full_layer(index, heads, head_size_v=value) for index in range(read_depth(text)))
    return ModelLayers(attention_heads, tuple(replace(layer, sink_tokens=sinks) for layer in layers))


def encoder_only(text: Fields) -> ModelLayers:
    """BERT-like models (encoder_only_attention.py): no layer keeps anything between requests."""
    return ModelLayers(
        text.integer("num_attention_heads", "n_head", high=MAX_HEADS),
        tuple(CachelessLayer(index=index, kind=LayerKind.ENCODER_ONLY) for index in range(read_depth(text))),
    )
