"""Families with layers that attend to a window or a chunk: in a pattern, as a list says, or all alike.

Each function reads a family's config as its vLLM model file (vllm/model_executor/models/NAME.py) and its transformers
config class do; the docstring names the file. Without `layer_types` the pattern is the one the class fills in.
"""

from kvdiag.kv.families.attention import dense, encoder_only
from kvdiag.kv.families.base import (
    MOST_HEADS,
    Family,
    Heads,
    ModelLayers,
    full_layer,
    layer_names,
    read_depth,
    read_heads,
    sliding_layer,
    typed_layers,
    window_of,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import AttentionLayer, CachelessLayer, Layer, LayerKind

# transformers Gemma3nTextConfig, Gemma4TextConfig: every fifth and every sixth layer is full.
_GEMMA3N_PERIOD = 5
_GEMMA4_PERIOD = 6
_MUSE_PERIOD = 4


def mistral(text: Fields) -> ModelLayers:
    """Mistral and Ministral (mistral.py, transformers backend): as Llama, with a window of 4,096 unless it is null.

    The config class fills the window in, so a config that could be served (it names architectures) and leaves the field
    out has one. `sliding_window` may also be a list that repeats over the layers (configs/mistral.py).
    """
    windows = text.raw("sliding_window")
    if isinstance(windows, list | tuple):
        return _repeated_windows(text)
    if text.has("architectures") or text.root.has("text_config"):
        text = text.filled({"sliding_window": 4096})
    return dense(text)


def plamo3(text: Fields) -> ModelLayers:
    """PLaMo 3 (plamo3.py): a list with a window or null for each layer, under either name."""
    if not isinstance(text.raw("sliding_window"), list | tuple) and not text.has("interleaved_sliding_window"):
        raise text.error("interleaved_sliding_window", "is missing: pass --kv-bytes-per-token")
    return _repeated_windows(text, "interleaved_sliding_window" if text.has("interleaved_sliding_window") else None)


def muse_glimmer(text: Fields) -> ModelLayers:
    """Muse Glimmer (muse_glimmer.py): layers with rope slide, layers without attend to everything: every fourth,
    counted from the last (transformers_utils/configs/muse_glimmer.py).
    """
    depth = read_depth(text)
    heads = read_heads(text)
    rope = text.integers("no_rope_layers", low=0, high=1)
    if rope is None:
        rope = tuple(int((depth - 1 - index) % _MUSE_PERIOD != 0) for index in range(depth))
    if len(rope) < depth:
        raise text.error("no_rope_layers", f"has {len(rope)} entries for {depth} layers")
    window = window_of(text)
    names = tuple("sliding_attention" if flag and window else "full_attention" for flag in rope[:depth])
    return ModelLayers(
        depth=depth,
        attention_heads=heads.attention_heads,
        layers=typed_layers(text, names, heads, window_tokens=window),
    )


def _repeated_windows(text: Fields, name: str | None = None) -> ModelLayers:
    depth = read_depth(text)
    heads = read_heads(text)
    windows: list[int | None] = []
    listed = name or "sliding_window"
    for window in text.sequence(listed) or ():
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise text.error(listed, "has an entry that is neither a window nor null")
        windows.append(window)
    if not windows or len(set(windows) - {None}) > 1:
        raise text.error(listed, "must list one window size and null only")
    layers = tuple(
        full_layer(index, heads)
        if (window := windows[index % len(windows)]) is None
        else sliding_layer(index, heads, window)
        for index in range(depth)
    )
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=layers)


def interleaved(
    *,
    period: int,
    period_fields: tuple[str, ...] = ("sliding_window_pattern",),
    extra_window: int = 0,
    first: bool = False,
) -> Family:
    """Models that interleave sliding and full layers: every `period`-th layer is full (the first of each, if `first`).

    gemma2.py, gemma3.py, gpt_oss.py, commandr.py (its window is one token longer), afmoe.py, granite.py, olmo3.
    """

    def read(text: Fields) -> ModelLayers:
        depth = read_depth(text)
        heads = read_heads(text)
        names = layer_names(text, depth)
        if names is None:
            every = text.integer(*period_fields, default=period, high=1 << 20)
            remainder = 0 if first else every - 1
            names = tuple(
                "full_attention" if index % every == remainder else "sliding_attention" for index in range(depth)
            )
        window = window_of(text)
        return ModelLayers(
            depth=depth,
            attention_heads=heads.attention_heads,
            layers=typed_layers(text, names, heads, window_tokens=None if window is None else window + extra_window),
        )

    return read


def laguna(text: Fields) -> ModelLayers:
    """Laguna (laguna.py): as layer_types says; without it every layer is full, whatever sliding_window is."""
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth) or ("full_attention",) * depth
    return ModelLayers(
        depth=depth,
        attention_heads=heads.attention_heads,
        layers=typed_layers(text, names, heads, window_tokens=window_of(text)),
    )


def exaone4(text: Fields) -> ModelLayers:
    """EXAONE 4 and EXAONE MoE (exaone4.py, exaone_moe.py): no window, no sliding layers; the pattern may be a word
    such as LLLG; `sliding_windows` may give each layer its own.
    """
    depth = read_depth(text)
    heads = read_heads(text)
    window = window_of(text)
    names = layer_names(text, depth)
    if names is None:
        names = _exaone_names(text, depth, window)
    windows = text.integers("sliding_windows", low=0, high=1 << 30)
    if windows is not None and len(windows) < depth:
        raise text.error("sliding_windows", f"has {len(windows)} entries for {depth} layers")
    layers: list[AttentionLayer] = []
    for index, layer in enumerate(typed_layers(text, names, heads, window_tokens=window)):
        own = windows[index] if windows is not None and layer.kind is LayerKind.SLIDING else None
        layers.append(sliding_layer(index, heads, own) if own else layer)
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=tuple(layers))


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
        return ("full_attention",) * depth
    pattern = text.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        word = pattern
    else:
        every = text.integer("sliding_window_pattern", default=4, high=1 << 20)
        word = "L" * (every - 1) + "G"
    return tuple("full_attention" if word[index % len(word)] == "G" else "sliding_attention" for index in range(depth))


def gemma3n(text: Fields) -> ModelLayers:
    """Gemma 3n (gemma3n.py): the last num_kv_shared_layers reuse an earlier layer's cache."""
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth) or tuple(
        "sliding_attention" if (index + 1) % _GEMMA3N_PERIOD else "full_attention" for index in range(depth)
    )
    layers = typed_layers(text, names, heads, window_tokens=window_of(text))
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=_share_last(text, layers))


def gemma4(text: Fields) -> ModelLayers:
    """Gemma 4 (gemma4.py): full layers have their own head size and KV heads, the last layer is full, the last
    num_kv_shared_layers reuse a cache. With attention_k_eq_v K and V are equal and still stored twice.
    """
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth) or tuple(
        "sliding_attention" if (index + 1) % _GEMMA4_PERIOD else "full_attention" for index in range(depth)
    )
    names = (*names[:-1], "full_attention")
    global_heads = heads.kv_heads
    if text.flag("attention_k_eq_v", default=False):
        global_heads = text.integer("num_global_key_value_heads", default=heads.kv_heads, high=MOST_HEADS)
    global_size = text.integer("global_head_dim", default=512, high=1 << 14)
    wide = Heads(attention_heads=heads.attention_heads, kv_heads=global_heads, head_size=global_size)
    window = window_of(text)
    layers = tuple(
        full_layer(index, wide) if layer.kind is LayerKind.FULL else layer
        for index, layer in enumerate(typed_layers(text, names, heads, window_tokens=window))
    )
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=_share_last(text, layers))


def _share_last(text: Fields, layers: tuple[AttentionLayer, ...]) -> tuple[Layer, ...]:
    shared = text.integer("num_kv_shared_layers", default=0, low=0, high=1 << 20)
    first = len(layers) - shared
    if first < 1:
        raise text.error("num_kv_shared_layers", f"is {shared}: it must be less than the {len(layers)} layers")
    own: tuple[Layer, ...] = layers[:first]
    return own + tuple(
        CachelessLayer(index=layer.index, kind=LayerKind.SHARED, head_size=layer.head_size) for layer in layers[first:]
    )


def llama4(text: Fields) -> ModelLayers:
    """Llama 4 (llama4.py): layers with rope attend within chunks, layers without rope attend to everything."""
    depth = read_depth(text)
    heads = read_heads(text)
    rope = text.integers("no_rope_layers", low=0, high=1)
    if rope:
        if len(rope) < depth:
            raise text.error("no_rope_layers", f"has {len(rope)} entries for {depth} layers")
        names = tuple("chunked_attention" if flag else "full_attention" for flag in rope[:depth])
    else:
        every = text.integer("no_rope_layer_interval", default=4, high=1 << 20)
        names = layer_names(text, depth) or tuple(
            "full_attention" if (index + 1) % every == 0 else "chunked_attention" for index in range(depth)
        )
    if not text.has("attention_chunk_size"):
        names = ("full_attention",) * depth
    return ModelLayers(
        depth=depth,
        attention_heads=heads.attention_heads,
        layers=typed_layers(text, names, heads, window_tokens=None),
    )


def mimo_v2(text: Fields) -> ModelLayers:
    """MiMo-V2 (mimo_v2.py): sliding layers have KV heads and head sizes of their own, and V is narrower than K."""
    depth = read_depth(text)
    full = read_heads(text)
    narrow = Heads(
        attention_heads=text.integer("swa_num_attention_heads", default=full.attention_heads, high=MOST_HEADS),
        kv_heads=text.integer("swa_num_key_value_heads", default=full.kv_heads, high=MOST_HEADS),
        head_size=text.integer("swa_head_dim", default=full.head_size, high=1 << 14),
    )
    value = text.integer("v_head_dim", default=full.head_size, high=1 << 14)
    narrow_value = text.integer("swa_v_head_dim", default=narrow.head_size, high=1 << 14)
    window = text.integer("sliding_window_size", "sliding_window", high=1 << 30)
    pattern = text.integers("hybrid_layer_pattern", high=1)
    names = layer_names(text, depth)
    if pattern is not None:
        names = tuple("sliding_attention" if flag else "full_attention" for flag in pattern)
    if names is None or len(names) < depth:
        raise text.error(
            "hybrid_layer_pattern",
            f"must have {depth} entries: it says which layers are sliding-window and which are full",
        )
    layers = tuple(
        sliding_layer(index, narrow, window, head_size_v=narrow_value)
        if name == "sliding_attention"
        else full_layer(index, full, head_size_v=value)
        for index, name in enumerate(names[:depth])
    )
    return ModelLayers(depth=depth, attention_heads=full.attention_heads, layers=layers)


def step3p5(text: Fields) -> ModelLayers:
    """Step-3.5 and 3.7 (step3p5.py): layers of the type named in attention_other_setting have other heads."""
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth)
    if names is None:
        names = tuple("full_attention" if index % 2 else "sliding_attention" for index in range(depth))
    window = window_of(text)
    other = text.child("attention_other_setting")
    other_name = None if other is None else other.text("attention_type")
    other_heads = heads
    if other is not None:
        other_heads = Heads(
            attention_heads=other.integer("num_attention_heads", default=heads.attention_heads, high=MOST_HEADS),
            kv_heads=other.integer("num_attention_groups", default=heads.kv_heads, high=MOST_HEADS),
            head_size=other.integer("head_dim", default=heads.head_size, high=1 << 14),
        )
    layers: list[AttentionLayer] = []
    for index, name in enumerate(names):
        chosen = other_heads if name == other_name else heads
        if name == "sliding_attention" and window is not None:
            layers.append(sliding_layer(index, chosen, window))
        else:
            layers.append(full_layer(index, chosen))
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=tuple(layers))
