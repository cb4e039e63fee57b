"""Families with K and V per head in identical layers: dense, encoder-only and cross-attention models.

Each function reads a family's config as its vLLM model file (vllm/model_executor/models/NAME.py) and its transformers
config class do; the docstring names the file. Without `layer_types` the pattern is the one the class fills in.
"""

from kvdiag.kv.families.base import (
    MOST_HEADS,
    WIDTH_NAMES,
    Heads,
    ModelLayers,
    full_layer,
    full_layers,
    layer_names,
    read_depth,
    read_heads,
    sliding_layer,
    typed_layers,
    window_of,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import AttentionLayer, CachelessLayer, Layer, LayerKind

_FALCON_40B_WIDTH = 8192


def dense(text: Fields) -> ModelLayers:
    """Llama-like models (llama.py): layers as `layer_types` says.

    Without `layer_types` one `sliding_window` holds for all layers, and with mixed ones only for the named layers
    (engine/arg_utils.py::create_engine_config, attention.py::Attention.__init__).
    """
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth)
    window = window_of(text)
    if names is None:
        names = ("sliding_attention" if window is not None else "full_attention",) * depth
    return ModelLayers(
        depth=depth,
        attention_heads=heads.attention_heads,
        layers=typed_layers(text, names, heads, window_tokens=window),
    )


def step1(text: Fields) -> ModelLayers:
    """Step 1 (step1.py): one KV head unless num_attention_groups or num_key_value_heads says otherwise."""
    depth = read_depth(text)
    heads = read_heads(
        text, kv_heads=text.integer("num_attention_groups", "num_key_value_heads", default=1, high=MOST_HEADS)
    )
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=full_layers(depth, heads))


def dbrx(text: Fields) -> ModelLayers:
    """DBRX (dbrx.py): the number of KV heads is in attn_config."""
    depth = read_depth(text)
    attention = text.child("attn_config")
    heads = read_heads(
        text, kv_heads=None if attention is None else attention.maybe_integer("kv_n_heads", high=MOST_HEADS)
    )
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=full_layers(depth, heads))


def falcon(text: Fields) -> ModelLayers:
    """Falcon, StarCoder (FalconModelArchConfigConvertor): multi_query is one KV head but for the new decoder."""
    depth = read_depth(text)
    # transformers_utils/configs/falcon.py::RWConfig: falcon-40b's first config does not say that it is of the new kind.
    first_40b = text.text("model_type") == "RefinedWeb" and text.integer(*WIDTH_NAMES) == _FALCON_40B_WIDTH
    single = text.flag("multi_query", default=True) and not text.flag("new_decoder_architecture", default=first_40b)
    heads = read_heads(text, kv_heads=1 if single else None)
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=full_layers(depth, heads))


def qwen2(text: Fields) -> ModelLayers:
    """Qwen2 and Qwen3 (qwen2.py): a window counts only with use_sliding_window, and only for all layers at once."""
    depth = read_depth(text)
    heads = read_heads(text)
    window = window_of(text) if text.flag("use_sliding_window", default=False) else None
    names = layer_names(text, depth)
    if names is None:
        first = text.integer("max_window_layers", default=28, low=0, high=1 << 20)
        names = tuple(
            "sliding_attention" if window is not None and index >= first else "full_attention" for index in range(depth)
        )
    if len(set(names)) > 1:
        problem = "gives a window to some layers only, which vLLM refuses for this model: pass --kv-bytes-per-token"
        raise text.error("max_window_layers", problem)
    return ModelLayers(
        depth=depth,
        attention_heads=heads.attention_heads,
        layers=typed_layers(text, names, heads, window_tokens=window),
    )


def qwen_moe(text: Fields) -> ModelLayers:
    """Qwen2-MoE and Qwen3-MoE (qwen2_moe.py, qwen3_moe.py): all layers take the window, or none."""
    depth = read_depth(text)
    heads = read_heads(text)
    window = window_of(text) if text.flag("use_sliding_window", default=False) else None
    names = layer_names(text, depth)
    everywhere = window is not None and (names is None or set(names) == {"sliding_attention"})
    layers = (
        tuple(sliding_layer(index, heads, window) for index in range(depth))
        if everywhere and window is not None
        else full_layers(depth, heads)
    )
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=layers)


def nemotron_nas(text: Fields) -> ModelLayers:
    """Nemotron-NAS (nemotron_nas.py): each block says how many query heads share a KV head, or has no attention."""
    blocks = text.children("block_configs")
    if not blocks:
        raise text.error("block_configs", "is missing: it has the KV heads of a Nemotron-NAS model")
    depth = read_depth(text)
    if len(blocks) < depth:
        raise text.error("block_configs", f"has {len(blocks)} blocks and num_hidden_layers is {depth}")
    attention_heads = text.integer("num_attention_heads", high=MOST_HEADS)
    layers: list[Layer] = []
    for index, block in enumerate(blocks[:depth]):
        attention = block.child("attention")
        if attention is None or attention.flag("no_op", default=False) or not attention.has("n_heads_in_group"):
            layers.append(CachelessLayer(index=index, kind=LayerKind.NO_CACHE))
            continue
        group = attention.integer("n_heads_in_group", high=MOST_HEADS)
        heads = read_heads(text, kv_heads=max(1, attention_heads // group))
        layers.append(full_layer(index, heads))
    return ModelLayers(depth=depth, attention_heads=attention_heads, layers=tuple(layers))


def minicpm3(text: Fields) -> ModelLayers:
    """MiniCPM3 (minicpm3.py): a latent model that is served unpacked, every head keeping its own K and V."""
    depth = read_depth(text)
    attention_heads = text.integer("num_attention_heads", high=MOST_HEADS)
    size = text.integer("qk_nope_head_dim") + text.integer("qk_rope_head_dim")
    heads = Heads(attention_heads=attention_heads, kv_heads=attention_heads, head_size=size)
    return ModelLayers(depth=depth, attention_heads=attention_heads, layers=full_layers(depth, heads))


def whisper(text: Fields) -> ModelLayers:
    """Whisper (whisper.py): every decoder layer has self-attention and cross-attention; the encoder has no cache."""
    depth = text.integer("decoder_layers", "num_hidden_layers", high=1024)
    attention_heads = text.integer("decoder_attention_heads", "num_attention_heads", high=MOST_HEADS)
    width = text.integer("d_model", "hidden_size")
    if width % attention_heads:
        raise text.error("d_model", f"{width} is not a multiple of decoder_attention_heads {attention_heads}")
    heads = Heads(attention_heads=attention_heads, kv_heads=attention_heads, head_size=width // attention_heads)
    layers: list[Layer] = []
    for index in range(depth):
        layers.append(full_layer(index, heads))
        layers.append(
            AttentionLayer(
                index=index,
                kind=LayerKind.CROSS_ATTENTION,
                kv_heads=heads.kv_heads,
                head_size=heads.head_size,
                head_size_v=heads.head_size,
            )
        )
    return ModelLayers(depth=depth, attention_heads=attention_heads, layers=tuple(layers))


def encoder_only(text: Fields) -> ModelLayers:
    """BERT-like models (encoder_only_attention.py): no layer keeps anything between requests."""
    depth = read_depth(text)
    return ModelLayers(
        depth=depth,
        attention_heads=text.integer("num_attention_heads", "n_head", high=MOST_HEADS),
        layers=tuple(CachelessLayer(index=index, kind=LayerKind.ENCODER_ONLY) for index in range(depth)),
    )
