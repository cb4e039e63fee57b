"""Families with Mamba layers, alone or together with attention.

State sizes from vLLM model_executor/layers/mamba/mamba_utils.py::MambaStateShapeCalculator; the fields are those that
each model's get_mamba_state_shape_from_config reads.
"""

import re

from kvdiag.kv.families.base import (
    ATTENTION_NAMES,
    MOST_HEADS,
    MOST_LAYERS,
    ModelLayers,
    full_layer,
    layer_names,
    mixed_layers,
    read_depth,
    read_heads,
    sliding_layer,
    unknown_layer,
    window_of,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import CachelessLayer, Layer, LayerKind, StateLayer
from kvdiag.kv.layout.state_layers import StateShape


def mamba1_state(inner_size: int, state_size: int, kernel: int) -> StateShape:
    """mamba1_state_shape: drafts do not lengthen its convolution."""
    return StateShape(
        conv_channels=inner_size,
        conv_steps=kernel - 1,
        drafts_lengthen_conv=False,
        recurrent_heads=inner_size,
        recurrent_head_elements=state_size,
    )


def mamba2_state(
    *, inner_size: int, groups: int, heads: int, head_size: int, state_size: int, kernel: int
) -> StateShape:
    """mamba2_state_shape."""
    return StateShape(
        conv_channels=inner_size,
        conv_steps=kernel - 1,
        drafts_lengthen_conv=True,
        recurrent_heads=heads,
        recurrent_head_elements=head_size * state_size,
        conv_groups=groups,
        conv_group_channels=2 * state_size,
        prefill_checkpoints=1,
    )


def jamba(text: Fields) -> ModelLayers:
    """Jamba (jamba.py): attention every attn_layer_period layers from attn_layer_offset, Mamba-1 elsewhere."""
    depth = read_depth(text)
    period = text.integer("attn_layer_period", high=MOST_LAYERS)
    offset = text.integer("attn_layer_offset", low=0, high=MOST_LAYERS)
    heads = read_heads(text)
    state = mamba1_state(
        text.integer("mamba_expand", high=64) * text.integer("hidden_size"),
        text.integer("mamba_d_state", high=1 << 14),
        text.integer("mamba_d_conv", high=1 << 10),
    )
    names = tuple("attention" if index % period == offset else "mamba" for index in range(depth))
    return ModelLayers(
        depth=depth, attention_heads=heads.attention_heads, layers=mixed_layers(text, names, LayerKind.MAMBA1, state)
    )


def mamba1(text: Fields) -> ModelLayers:
    """Mamba and Falcon-Mamba (mamba.py): states only."""
    depth = read_depth(text)
    inner = text.maybe_integer("intermediate_size")
    if inner is None:
        inner = text.integer("expand", high=64) * text.integer("hidden_size")
    state = mamba1_state(inner, text.integer("state_size", high=1 << 14), text.integer("conv_kernel", high=1 << 10))
    return ModelLayers(depth=depth, attention_heads=0, layers=_states(depth, LayerKind.MAMBA1, state))


def mamba2(text: Fields) -> ModelLayers:
    """Mamba-2 (mamba2.py): states only."""
    depth = read_depth(text)
    state = mamba2_state(
        inner_size=text.integer("expand", high=64) * text.integer("hidden_size"),
        groups=text.integer("n_groups", high=MOST_HEADS),
        heads=text.integer("num_heads", high=MOST_HEADS),
        head_size=text.integer("head_dim", high=1 << 14),
        state_size=text.integer("state_size", high=1 << 14),
        kernel=text.integer("conv_kernel", high=1 << 10),
    )
    return ModelLayers(depth=depth, attention_heads=0, layers=_states(depth, LayerKind.MAMBA2, state))


def granite_hybrid(text: Fields) -> ModelLayers:
    """Granite 4 hybrid (granitemoehybrid.py): layer_types names attention and Mamba-2 layers."""
    depth = read_depth(text)
    heads = read_heads(text)
    names = layer_names(text, depth) or ("mamba",) * depth
    if set(names) <= ATTENTION_NAMES:
        layers: tuple[Layer, ...] = tuple(full_layer(index, heads) for index in range(depth))
        return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=layers)
    state = _prefixed_mamba2(text)
    return ModelLayers(
        depth=depth, attention_heads=heads.attention_heads, layers=mixed_layers(text, names, LayerKind.MAMBA2, state)
    )


def bamba(text: Fields) -> ModelLayers:
    """Bamba (bamba.py): attention at attn_layer_indices, Mamba-2 elsewhere."""
    depth = read_depth(text)
    heads = read_heads(text)
    attention = frozenset(text.integers("attn_layer_indices", high=MOST_LAYERS) or ())
    names = tuple("attention" if index in attention else "mamba" for index in range(depth))
    return ModelLayers(
        depth=depth,
        attention_heads=heads.attention_heads,
        layers=mixed_layers(text, names, LayerKind.MAMBA2, _prefixed_mamba2(text)),
    )


def _prefixed_mamba2(text: Fields) -> StateShape:
    """A Mamba-2 state from mamba_* fields, with the head size that follows where it is missing or "auto"."""
    expanded = text.integer("mamba_expand", default=2, high=64) * text.integer("hidden_size")
    inner = text.integer("mamba_d_ssm", default=expanded)
    heads = text.integer("mamba_n_heads", high=MOST_HEADS)
    size = inner // heads if text.raw("mamba_d_head") in (None, "auto") else text.integer("mamba_d_head", high=1 << 14)
    return mamba2_state(
        inner_size=inner,
        groups=text.integer("mamba_n_groups", high=MOST_HEADS),
        heads=heads,
        head_size=size,
        state_size=text.integer("mamba_d_state", high=1 << 14),
        kernel=text.integer("mamba_d_conv", high=1 << 10),
    )


def falcon_h1(text: Fields) -> ModelLayers:
    """Falcon-H1 (falcon_h1.py): attention and Mamba-2 side by side in every layer."""
    depth = read_depth(text)
    heads = read_heads(text)
    state = _prefixed_mamba2(text)
    layers: list[Layer] = []
    for index in range(depth):
        layers.append(full_layer(index, heads))
        layers.append(StateLayer(index=index, kind=LayerKind.MAMBA2, state=state))
    return ModelLayers(depth=depth, attention_heads=heads.attention_heads, layers=tuple(layers))


def zamba2(text: Fields) -> ModelLayers:
    """Zamba2 (zamba2.py): Mamba-2 in every layer; hybrid layers run a shared attention block, each with its own cache
    and heads twice as wide.
    """
    depth = read_depth(text)
    attention_heads = text.integer("num_attention_heads", high=MOST_HEADS)
    hidden = text.integer("hidden_size")
    types = text.strings("layers_block_type")
    if types is None:
        hybrid = frozenset(text.integers("hybrid_layer_ids", high=MOST_LAYERS) or ())
    else:
        hybrid = frozenset(index for index, name in enumerate(types) if name == "hybrid")
    if types is None and not hybrid:
        raise text.error("layers_block_type", "is missing: pass --kv-bytes-per-token")
    size = text.integer("attention_head_dim", default=max(1, 2 * hidden // attention_heads), high=1 << 14)
    # ModelArchConfigConvertorBase.get_total_num_kv_heads
    kv_heads = text.integer("num_key_value_heads", default=attention_heads, high=MOST_HEADS)
    inner = text.integer("mamba_expand", default=2, high=64) * hidden
    heads = text.integer("n_mamba_heads", high=MOST_HEADS)
    state = mamba2_state(
        inner_size=inner,
        groups=text.integer("mamba_ngroups", high=MOST_HEADS),
        heads=heads,
        head_size=text.integer("mamba_headdim", default=max(1, inner // heads), high=1 << 14),
        state_size=text.integer("mamba_d_state", high=1 << 14),
        kernel=text.integer("mamba_d_conv", high=1 << 10),
    )
    wide = read_heads(text.filled({"head_dim": size}, override=True), kv_heads=kv_heads)
    layers: list[Layer] = []
    for index in range(depth):
        if index in hybrid:
            layers.append(full_layer(index, wide))
        layers.append(StateLayer(index=index, kind=LayerKind.MAMBA2, state=state))
    return ModelLayers(depth=depth, attention_heads=attention_heads, layers=tuple(layers))


def nemotron_h(text: Fields) -> ModelLayers:
    """Nemotron-H, Nano and Super (nemotron_h.py): hybrid_override_pattern has a letter per layer, M a Mamba-2 layer,
    * attention, - and E feed-forward only. The recurrent state is float32 unless the config says otherwise
    (models/config.py::NemotronHForCausalLMConfig).
    """
    pattern = nemotron_pattern(text)
    heads = read_heads(text)
    state_heads = text.integer("mamba_num_heads", high=MOST_HEADS)
    state_head_size = text.integer("mamba_head_dim", high=1 << 14)
    state = mamba2_state(
        inner_size=state_heads * state_head_size,
        groups=text.integer("n_groups", high=MOST_HEADS),
        heads=state_heads,
        head_size=state_head_size,
        state_size=text.integer("ssm_state_size", high=1 << 14),
        kernel=text.integer("conv_kernel", high=1 << 10),
    )
    window = window_of(text)
    layers: list[Layer] = []
    for index, letter in enumerate(pattern):
        match letter:
            case "M":
                layers.append(StateLayer(index=index, kind=LayerKind.MAMBA2, state=state))
            case "*":
                attention = full_layer(index, heads) if window is None else sliding_layer(index, heads, window)
                layers.append(attention)
            case _:
                layers.append(CachelessLayer(index=index, kind=LayerKind.NO_CACHE))
    return ModelLayers(
        depth=len(pattern),
        attention_heads=heads.attention_heads,
        layers=tuple(layers),
        state_dtype=text.text("mamba_ssm_cache_dtype") or "float32",
    )


_BLOCK_LETTERS = {
    "mamba": "M",
    "mamba2": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def nemotron_pattern(text: Fields) -> str:
    """A letter for each layer, from its name or a pattern."""
    names = text.strings("layers_block_type") or text.strings("layer_types")
    if names is not None:
        return "".join(_letter(text, name) for name in names)
    pattern = text.text("hybrid_override_pattern")
    if pattern is None:
        raise text.error(
            "hybrid_override_pattern", "is missing: it says which layers are Mamba and which are attention"
        )
    if len(pattern) <= MOST_LAYERS and pattern and set(pattern) <= set("M*-E|"):
        return pattern.replace("|", "")
    summary = re.findall(r"(\d{1,4})\s*(mamba2|mamba|attention|mlp|moe)", pattern[:200])
    if summary and sum(int(count) for count, _ in summary) <= MOST_LAYERS:
        # A summary in words ("27 mamba2 + 4 attention (+25 mlp)"): the order matters to pipeline stages only.
        return "".join(_BLOCK_LETTERS[name] * int(count) for count, name in summary)
    raise text.error(
        "hybrid_override_pattern",
        f"{pattern[:40]!a} must have at most {MOST_LAYERS} letters, each M, *, - or E",
    )


def _letter(text: Fields, name: str) -> str:
    if name not in _BLOCK_LETTERS:
        raise unknown_layer(text, name)
    return _BLOCK_LETTERS[name]


def _states(depth: int, kind: LayerKind, state: StateShape) -> tuple[Layer, ...]:
    return tuple(StateLayer(index=index, kind=kind, state=state) for index in range(depth))
