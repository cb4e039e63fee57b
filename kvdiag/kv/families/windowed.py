"""Families with layers that attend to a window or a chunk: in a pattern, as a list says, or all alike.

Each function reads a family's config as those of attention.py do.
"""

import math
from dataclasses import replace

from kvdiag.kv.families.attention import MAX_LOOPS, dense, encoder_only
from kvdiag.kv.families.base import (
    MAX_HEADS,
    MAX_LAYERS,
    Family,
    Heads,
    ModelLayers,
    every_nth,
    full_layer,
    full_layers,
    layer_names,
    names_where,
    read_depth,
    read_heads,
    sliding_layer,
    typed_layers,
    typed_model,
    window_of,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import AttentionLayer, CachelessLayer, ConvWindowLayer, Layer, LayerKind
from kvdiag.kv.layout.pages import ceil_div


def mistral(text: Fields) -> ModelLayers:
    """Mistral and Ministral (mistral.py, transformers backend): as Llama, with a window of 4,096 unless it is null.

    The config class fills the window in, so a config that could be served (it names architectures) and leaves the field
    out has one. `sliding_window` may also be a list that repeats over the layers (configs/mistral.py).
    """
    if isinstance(text.raw("sliding_window"), list | tuple):
        return _repeated_windows(text, "sliding_window")
    if text.has("architectures") or text.root.has("text_config"):
        text = text.filled({"sliding_window": 4096})
    return dense(text)


def plamo3(text: Fields) -> ModelLayers:
    """PLaMo 3 (plamo3.py): a list with a window or null for each layer, under either name."""
    name = "interleaved_sliding_window"
    if text.has(name):
        return _repeated_windows(text, name)
    if not isinstance(text.raw("sliding_window"), list | tuple):
        raise text.error(name, "is missing: pass --kv-bytes-per-token")
    return _repeated_windows(text, "sliding_window")


def _repeated_windows(text: Fields, name: str) -> ModelLayers:
    windows = text.sequence(name) or ()
    for window in windows:
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise text.error(name, "has an entry that is neither a window nor null")
    sizes = [window for window in windows if isinstance(window, int)]
    if not windows or len(set(sizes)) > 1:
        raise text.error(name, "must list one window size and null only")
    names = names_where(windows[index % len(windows)] is None for index in range(read_depth(text)))
    return typed_model(text, names, sizes[0] if sizes else None)


def muse_glimmer(text: Fields) -> ModelLayers:
    """Muse Glimmer (muse_glimmer.py): layers with rope slide, layers without attend to everything: every fourth,
    counted from the last (transformers_utils/configs/muse_glimmer.py).
    """
    depth, window = read_depth(text), window_of(text)
    rope = _rope_layers(text, depth) or [(depth - 1 - index) % 4 for index in range(depth)]
    return typed_model(text, names_where(not (flag and window) for flag in rope), window)


def _rope_layers(text: Fields, depth: int) -> tuple[int, ...]:
    """`no_rope_layers`, which has 1 for a layer with rope; empty where it is missing or empty."""
    rope = text.integers("no_rope_layers", low=0, high=1) or ()
    if rope and len(rope) < depth:
        raise text.error("no_rope_layers", f"has {len(rope)} entries for {depth} layers")
    return rope[:depth]


def interleaved(
    *,
    period: int,
    period_fields: tuple[str, ...] = ("sliding_window_pattern",),
    extra_window: int = 0,
    first: bool = False,
) -> Family:
    """Models that interleave sliding and full layers: every `period`-th layer is full (the first of each, if `first`).

    gemma2.py, gemma3.py, gpt_oss.py, commandr.py (its window is one token longer), afmoe.py, granite.py, olmo3;
    laguna.py, whose layers are all full without layer_types, with any sliding_window.
    """

    def read(text: Fields) -> ModelLayers:
        depth, window = read_depth(text), window_of(text)
        names = layer_names(text, depth)
        if names is None:
            names = every_nth(depth, text.integer(*period_fields, default=period, high=1 << 20), first=first)
        return typed_model(text, names, None if window is None else window + extra_window)

    return read


gemma2 = interleaved(period=2)
cohere2 = interleaved(period=4, extra_window=1)
olmo3 = interleaved(period=4)
afmoe = interleaved(period=4, period_fields=("global_attn_every_n_layers",))
granite_swa = interleaved(period=4, first=True)
laguna = interleaved(period=1, period_fields=())


def exaone4(text: Fields) -> ModelLayers:
    """EXAONE 4 and EXAONE MoE (exaone4.py, exaone_moe.py): no window, no sliding layers; the pattern may be a word
    such as LLLG; `sliding_windows` may give each layer its own.
    """
    depth, window = read_depth(text), window_of(text)
    model = typed_model(text, layer_names(text, depth) or _exaone_names(text, depth, window), window)
    windows = text.integers("sliding_windows", low=0, high=1 << 30)
    if windows is None:
        return model
    if len(windows) < depth:
        raise text.error("sliding_windows", f"has {len(windows)} entries for {depth} layers")
    layers = tuple(
        replace(layer, window_tokens=own)
        if own and isinstance(layer, AttentionLayer) and layer.window_tokens
        else layer
        for layer, own in zip(model.layers, windows, strict=False)
    )
    return replace(model, layers=layers)


_GEMMA3 = interleaved(period=6)


def gemma3(text: Fields) -> ModelLayers:
    """Gemma 3 (gemma3.py): five sliding layers to a full one; EmbeddingGemma attends both ways and keeps no cache
    (models/config.py::Gemma3TextModelConfig).
    """
    if text.flag("use_bidirectional_attention", default=False):
        return encoder_only(text)
    return _GEMMA3(text)


def _exaone_names(text: Fields, depth: int, window: int | None) -> tuple[str, ...]:
    if window is None:
        return names_where([True] * depth)
    word = text.raw("sliding_window_pattern")
    if isinstance(word, str) and word and set(word) <= {"L", "G"}:
        return names_where(word[index % len(word)] == "G" for index in range(depth))
    return every_nth(depth, text.integer("sliding_window_pattern", default=4, high=1 << 20))


def gemma3n(text: Fields) -> ModelLayers:
    """Gemma 3n (gemma3n.py, transformers Gemma3nTextConfig): every fifth layer is full, and the last
    num_kv_shared_layers reuse an earlier layer's cache.
    """
    return _share_last(text, interleaved(period=5, period_fields=())(text))


def gemma4(text: Fields) -> ModelLayers:
    """Gemma 4 (gemma4.py, transformers Gemma4TextConfig): every sixth layer and the last are full, with their own head
    size and KV heads, unless per_layer_config names others; the last num_kv_shared_layers reuse a cache. With
    attention_k_eq_v K and V are equal and still stored twice.
    """
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth) or every_nth(depth, 6)
    layers = typed_layers(text, (*names[:-1], "full_attention"), heads, window_of(text))
    if text.has("per_layer_config"):
        layers = _own_heads(text, layers)
    else:
        global_heads = heads.kv_heads
        if text.flag("attention_k_eq_v", default=False):
            global_heads = text.integer("num_global_key_value_heads", default=heads.kv_heads, high=MAX_HEADS)
        global_size = text.integer("global_head_dim", default=512, high=1 << 14)
        wide = Heads(attention_heads=heads.attention_heads, kv_heads=global_heads, head_size=global_size)
        layers = tuple(full_layer(layer.index, wide) if layer.kind is LayerKind.FULL else layer for layer in layers)
    return _share_last(text, ModelLayers(heads.attention_heads, layers))


def _own_heads(text: Fields, layers: tuple[AttentionLayer, ...]) -> tuple[AttentionLayer, ...]:
    """The layers with the heads that per_layer_config has for their numbers."""
    own = text.child("per_layer_config") or Fields({})
    by_index: dict[int, Fields] = {}
    for name in own.names():
        fields = own.child(name)
        if not name.isdecimal() or fields is None:
            raise text.error("per_layer_config", "must have an object for each number of a layer")
        by_index[int(name)] = fields

    def with_own(layer: AttentionLayer) -> AttentionLayer:
        fields = by_index.get(layer.index, Fields({}))
        size = fields.integer("head_dim", default=layer.head_size, high=1 << 14)
        kv_heads = fields.integer("num_key_value_heads", default=layer.kv_heads, high=MAX_HEADS)
        return replace(layer, kv_heads=kv_heads, head_size=size, head_size_v=size)

    return tuple(map(with_own, layers))


def diffusion_gemma(text: Fields) -> ModelLayers:
    """DiffusionGemma (diffusion_gemma.py, transformers DiffusionGemmaTextConfig): Gemma 4's layers."""
    if text.text("use_bidirectional_attention") == "all":
        raise text.error("use_bidirectional_attention", "is all, which is not modelled: pass --kv-bytes-per-token")
    return gemma4(text.filled({"attention_k_eq_v": True}))


def _share_last(text: Fields, model: ModelLayers) -> ModelLayers:
    shared = text.integer("num_kv_shared_layers", default=0, low=0, high=1 << 20)
    first = len(model.layers) - shared
    if first < 1:
        raise text.error("num_kv_shared_layers", f"is {shared}: it must be less than the {len(model.layers)} layers")
    sharing = (
        CachelessLayer(
            index=layer.index, kind=LayerKind.SHARED, head_size=getattr(layer, "head_size", None), unshared=layer
        )
        for layer in model.layers[first:]
    )
    return replace(model, layers=(*model.layers[:first], *sharing))


def llama4(text: Fields) -> ModelLayers:
    """Llama 4 (llama4.py): layers with rope attend within chunks, layers without rope attend to everything."""
    depth = read_depth(text)
    rope = _rope_layers(text, depth)
    if rope:
        names = names_where((not flag for flag in rope), "chunked_attention")
    else:
        every = text.integer("no_rope_layer_interval", default=4, high=1 << 20)
        names = layer_names(text, depth) or every_nth(depth, every, other="chunked_attention")
    if not text.has("attention_chunk_size"):
        names = names_where([True] * depth)
    return typed_model(text, names, None)


def mimo_v2(text: Fields) -> ModelLayers:
    """MiMo-V2 (mimo_v2.py): sliding layers have KV heads and head sizes of their own, and V is narrower than K."""
    depth = read_depth(text)
    full = read_heads(text)
    narrow = Heads(
        attention_heads=text.integer("swa_num_attention_heads", default=full.attention_heads, high=MAX_HEADS),
        kv_heads=text.integer("swa_num_key_value_heads", default=full.kv_heads, high=MAX_HEADS),
        head_size=text.integer("swa_head_dim", default=full.head_size, high=1 << 14),
    )
    value = text.integer("v_head_dim", default=full.head_size, high=1 << 14)
    narrow_value = text.integer("swa_v_head_dim", default=narrow.head_size, high=1 << 14)
    window = text.integer("sliding_window_size", "sliding_window", high=1 << 30)
    pattern = text.integers("hybrid_layer_pattern", high=1)
    names = layer_names(text, depth) or ()
    if pattern is not None:
        names = names_where(not flag for flag in pattern)
    if len(names) < depth:
        problem = f"must have {depth} entries: it says which layers are sliding-window and which are full"
        raise text.error("hybrid_layer_pattern", problem)
    layers = tuple(
        sliding_layer(index, narrow, window, head_size_v=narrow_value)
        if name == "sliding_attention"
        else full_layer(index, full, head_size_v=value)
        for index, name in enumerate(names[:depth])
    )
    return ModelLayers(full.attention_heads, layers)


def step3p5(text: Fields) -> ModelLayers:
    """Step-3.5 and 3.7 (step3p5.py): layers of the type named in attention_other_setting have other heads."""
    depth, window = read_depth(text), window_of(text)
    heads = read_heads(text)
    other = text.child("attention_other_setting") or Fields({})
    other_name = other.text("attention_type")
    other_heads = Heads(
        attention_heads=other.integer("num_attention_heads", default=heads.attention_heads, high=MAX_HEADS),
        kv_heads=other.integer("num_attention_groups", default=heads.kv_heads, high=MAX_HEADS),
        head_size=other.integer("head_dim", default=heads.head_size, high=1 << 14),
    )
    layers = []
    for index, name in enumerate(layer_names(text, depth) or every_nth(depth, 2)):
        chosen = other_heads if name == other_name else heads
        sliding_window = window if name == "sliding_attention" else None
        layers.append(
            full_layer(index, chosen) if sliding_window is None else sliding_layer(index, chosen, sliding_window)
        )
    return ModelLayers(heads.attention_heads, tuple(layers))


def inkling(text: Fields) -> ModelLayers:
    """Inkling (models/inkling/nvidia/model.py, attention.py, sconv_swa_attn.py): windows where local_layer_ids says so,
    with heads of their own, and in every layer the inputs of four short convolutions. A row of these has K, V and two
    shares of the residual, padded to a power of two. MTP layers are as mtp_config says (config/speculative.py).
    """
    depth = text.integer("num_hidden_layers", high=MAX_LAYERS)
    full = read_heads(text)
    narrow = Heads(
        attention_heads=text.integer("swa_num_attention_heads", default=full.attention_heads, high=MAX_HEADS),
        kv_heads=text.integer("swa_num_key_value_heads", default=full.kv_heads, high=MAX_HEADS),
        head_size=text.integer("swa_head_dim", default=full.head_size, high=1 << 14),
    )
    window = text.integer("sliding_window_size", default=512, high=1 << 30)
    kernel = text.integer("sconv_kernel_size", "conv_kernel_size", default=4, high=1 << 10)
    hidden = text.integer("hidden_size")

    def layers(index: int, *, local: bool) -> tuple[Layer, Layer]:
        heads = narrow if local else full
        elements = 2 * heads.head_size + 2 * (hidden // heads.kv_heads)
        conv = ConvWindowLayer(
            index=index,
            kv_heads=heads.kv_heads,
            row_elements=1 << (elements - 1).bit_length(),
            window_tokens=kernel,
        )
        return conv, sliding_layer(index, heads, window) if local else full_layer(index, heads)

    local_layers = text.integers("local_layer_ids", high=MAX_LAYERS) or ()
    mtp = text.root.child("mtp_config") or Fields({})
    drafts = mtp.integer("num_nextn_predict_layers", default=0, low=0, high=64)
    local_drafts = mtp.integers("local_layer_ids", high=MAX_LAYERS) or ()
    return ModelLayers(
        # Ranks divide those of both kinds.
        math.gcd(full.attention_heads, narrow.attention_heads),
        tuple(layer for index in range(depth) for layer in layers(index, local=index in local_layers)),
        draft_layers=tuple(layer for one in range(drafts) for layer in layers(depth - 1, local=one in local_drafts)),
        # A module is two layers, and there are no more modules than drafts (models/inkling/nvidia/mtp.py).
        layers_per_draft=2,
    )


def voxtral_realtime(text: Fields) -> ModelLayers:
    """Voxtral Realtime (voxtral_realtime.py, whisper_causal.py): Ministral, and a causal audio encoder whose layers
    keep a window of several positions for each token of the text.
    """
    model = dense(text)
    encoder = text.root.child("audio_config")
    if encoder is None:
        raise text.root.error("audio_config", "is missing: the audio encoder keeps a cache, too")
    per_token = encoder.maybe_integer("block_pool_size", "downsample_factor", low=2, high=1 << 10)
    if per_token is None:
        per_token = text.root.integer("downsample_factor", low=2, high=1 << 10)
    heads = encoder.integer("encoder_attention_heads", "num_attention_heads", high=MAX_HEADS)
    hidden = encoder.integer("d_model", "hidden_size")
    layer = replace(
        sliding_layer(
            0,
            Heads(
                attention_heads=heads,
                kv_heads=heads,
                head_size=encoder.integer("encoder_head_dim", "head_dim", default=hidden // heads, high=1 << 14),
            ),
            ceil_div(encoder.integer("sliding_window", high=1 << 30), per_token) + 1,
        ),
        positions_per_token=per_token,
    )
    count = encoder.integer("encoder_layers", "num_hidden_layers", high=MAX_LAYERS)
    return replace(
        model, attention_heads=math.gcd(model.attention_heads, heads), layers=(*(layer,) * count, *model.layers)
    )


def loop_coder(text: Fields) -> ModelLayers:
    """IQuest LoopCoder (iquest_loopcoder.py): the first loop attends to everything, later ones, with a
    cache of their own, to the last loop_window_size tokens.
    """
    depth = text.integer("num_hidden_layers", high=MAX_LAYERS)
    loops = text.integer("loop_num", default=2, high=MAX_LOOPS)
    window = text.integer("loop_window_size", default=64, high=1 << 30)
    attention_heads = text.integer("num_attention_heads", high=MAX_HEADS)
    heads = Heads(
        attention_heads=attention_heads,
        kv_heads=text.integer("num_key_value_heads", high=MAX_HEADS),
        # iquest_loopcoder.py::LoopCoderAttention does not read head_dim.
        head_size=text.integer("hidden_size") // attention_heads,
    )
    later = [sliding_layer(index, heads, window) for _ in range(loops - 1) for index in range(depth)]
    return ModelLayers(attention_heads, (*full_layers(depth, heads), *later))
