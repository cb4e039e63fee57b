"""Families with Mamba layers, alone or together with attention.

Each function reads one family: which layer is of which kind (by a pattern, a list or a period), then the size of one
state, then the layers. A layer with attention and a state gives two layers of the same index; one with neither keeps no
cache. State sizes are those of vLLM model_executor/layers/mamba/mamba_utils.py::MambaStateShapeCalculator; the fields
are those that each model's get_mamba_state_shape_from_config reads, with the defaults of its config class.
"""

import re
from collections.abc import Mapping

from kvdiag.kv.families.base import (
    ATTENTION_NAMES,
    CONFIG_NAMES,
    MAX_HEADS,
    MAX_LAYERS,
    ModelLayers,
    full_layer,
    full_model,
    layer_names,
    mixed_model,
    names_where,
    read_depth,
    read_heads,
    sliding_layer,
    unknown_layer,
    window_of,
)
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.layers import CachelessLayer, Layer, LayerKind, StateLayer, StateShape


def mamba1_state(inner_size: int, state_size: int, kernel: int) -> StateShape:
    """mamba1_state_shape: drafts do not lengthen its convolution."""
    return StateShape(
        conv_channels=inner_size,
        conv_steps=kernel - 1,
        recurrent_heads=inner_size,
        recurrent_head_elements=state_size,
    )


def read_mamba2(text: Fields, *names: str, inner: int, heads: int, head_size: int) -> StateShape:
    """mamba2_state_shape; `names` are the family's fields for the groups, the size of a state and the kernel."""
    groups, state_size, kernel = names
    size = text.integer(state_size, high=1 << 14)
    return StateShape(
        conv_channels=inner,
        conv_steps=text.integer(kernel, high=1 << 10) - 1,
        drafts_lengthen_conv=True,
        recurrent_heads=heads,
        recurrent_head_elements=head_size * size,
        conv_groups=text.integer(groups, high=MAX_HEADS),
        conv_group_channels=2 * size,
        prefill_checkpoints=1,
    )


def jamba(text: Fields) -> ModelLayers:
    """Jamba (jamba.py): attention every attn_layer_period layers from attn_layer_offset, Mamba-1 elsewhere."""
    period = text.integer("attn_layer_period", high=MAX_LAYERS)
    offset = text.integer("attn_layer_offset", low=0, high=MAX_LAYERS)
    state = mamba1_state(
        text.integer("mamba_expand", high=64) * text.integer("hidden_size"),
        text.integer("mamba_d_state", high=1 << 14),
        text.integer("mamba_d_conv", high=1 << 10),
    )
    names = names_where((index % period == offset for index in range(read_depth(text))), "mamba")
    return mixed_model(text, names, LayerKind.MAMBA1, state)


def mamba1(text: Fields) -> ModelLayers:
    """Mamba and Falcon-Mamba (mamba.py): states only."""
    inner = text.maybe_integer("intermediate_size")
    if inner is None:
        inner = text.integer("expand", high=64) * text.integer("hidden_size")
    state = mamba1_state(inner, text.integer("state_size", high=1 << 14), text.integer("conv_kernel", high=1 << 10))
    return _states(text, LayerKind.MAMBA1, state)


def mamba2(text: Fields) -> ModelLayers:
    """Mamba-2 (mamba2.py): states only."""
    inner = text.integer("expand", high=64) * text.integer("hidden_size")
    heads, size = text.integer("num_heads", high=MAX_HEADS), text.integer("head_dim", high=1 << 14)
    state = read_mamba2(text, "n_groups", "state_size", "conv_kernel", inner=inner, heads=heads, head_size=size)
    return _states(text, LayerKind.MAMBA2, state)


def _states(text: Fields, kind: LayerKind, state: StateShape) -> ModelLayers:
    return ModelLayers(0, tuple(StateLayer(index=index, kind=kind, state=state) for index in range(read_depth(text))))


def granite_hybrid(text: Fields) -> ModelLayers:
    """Granite 4 hybrid (granitemoehybrid.py): layer_types names attention and Mamba-2 layers."""
    depth = read_depth(text)
    names = layer_names(text, depth) or ("mamba",) * depth
    if set(names) <= ATTENTION_NAMES:
        return full_model(text, read_heads(text))
    return mixed_model(text, names, LayerKind.MAMBA2, _prefixed_mamba2(text))


def bamba(text: Fields) -> ModelLayers:
    """Bamba (bamba.py): attention at attn_layer_indices, Mamba-2 elsewhere."""
    attention = frozenset(text.integers("attn_layer_indices", high=MAX_LAYERS) or ())
    names = names_where((index in attention for index in range(read_depth(text))), "mamba")
    return mixed_model(text, names, LayerKind.MAMBA2, _prefixed_mamba2(text))


def _prefixed_mamba2(text: Fields) -> StateShape:
    """A Mamba-2 state from mamba_* fields, with the head size that follows where it is missing or "auto"."""
    expanded = text.integer("mamba_expand", default=2, high=64) * text.integer("hidden_size")
    inner = text.integer("mamba_d_ssm", default=expanded)
    heads = text.integer("mamba_n_heads", high=MAX_HEADS)
    size = inner // heads if text.raw("mamba_d_head") in (None, "auto") else text.integer("mamba_d_head", high=1 << 14)
    names = ("mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return read_mamba2(text, *names, inner=inner, heads=heads, head_size=size)


def falcon_h1(text: Fields) -> ModelLayers:
    """Falcon-H1 (falcon_h1.py): attention and Mamba-2 side by side in every layer."""
    heads = read_heads(text)
    state = _prefixed_mamba2(text)
    layers: list[Layer] = []
    for index in range(read_depth(text)):
        layers += [full_layer(index, heads), StateLayer(index=index, kind=LayerKind.MAMBA2, state=state)]
    return ModelLayers(heads.attention_heads, tuple(layers))


def zamba2(text: Fields) -> ModelLayers:
    """Zamba2 (zamba2.py): Mamba-2 in every layer; hybrid layers run a shared attention block, each with its own cache
    and heads twice as wide.
    """
    attention_heads = text.integer("num_attention_heads", high=MAX_HEADS)
    hidden = text.integer("hidden_size")
    types = text.strings("layers_block_type")
    if types is None:
        hybrid = frozenset(text.integers("hybrid_layer_ids", high=MAX_LAYERS) or ())
    else:
        hybrid = frozenset(index for index, name in enumerate(types) if name == "hybrid")
    if types is None and not hybrid:
        raise text.error("layers_block_type", "is missing: pass --kv-bytes-per-token")
    size = text.integer("attention_head_dim", default=max(1, 2 * hidden // attention_heads), high=1 << 14)
    # ModelArchConfigConvertorBase.get_total_num_kv_heads
    kv_heads = text.integer("num_key_value_heads", default=attention_heads, high=MAX_HEADS)
    inner = text.integer("mamba_expand", default=2, high=64) * hidden
    heads = text.integer("n_mamba_heads", high=MAX_HEADS)
    head_size = text.integer("mamba_headdim", default=max(1, inner // heads), high=1 << 14)
    names = ("mamba_ngroups", "mamba_d_state", "mamba_d_conv")
    state = read_mamba2(text, *names, inner=inner, heads=heads, head_size=head_size)
    wide = read_heads(text.filled({"head_dim": size}, override=True), kv_heads=kv_heads)
    layers: list[Layer] = []
    for index in range(read_depth(text)):
        if index in hybrid:
            layers.append(full_layer(index, wide))
        layers.append(StateLayer(index=index, kind=LayerKind.MAMBA2, state=state))
    return ModelLayers(attention_heads, tuple(layers))


def nemotron_h(text: Fields) -> ModelLayers:
    """Nemotron-H, Nano and Super (nemotron_h.py): hybrid_override_pattern has a letter per layer, M a Mamba-2 layer,
    * attention, - and E feed-forward only. The recurrent state is float32 unless the config says otherwise
    (models/config.py::NemotronHForCausalLMConfig).
    """
    pattern = nemotron_pattern(text)
    heads = read_heads(text)
    count, size = text.integer("mamba_num_heads", high=MAX_HEADS), text.integer("mamba_head_dim", high=1 << 14)
    names = ("n_groups", "ssm_state_size", "conv_kernel")
    state = read_mamba2(text, *names, inner=count * size, heads=count, head_size=size)
    window = window_of(text)
    layers: list[Layer] = []
    for index, letter in enumerate(pattern):
        match letter:
            case "M":
                layers.append(StateLayer(index=index, kind=LayerKind.MAMBA2, state=state))
            case "*":
                layers.append(full_layer(index, heads) if window is None else sliding_layer(index, heads, window))
            case _:
                layers.append(CachelessLayer(index=index, kind=LayerKind.NO_CACHE))
    state_dtype = text.text("mamba_ssm_cache_dtype") or "float32"
    return ModelLayers(heads.attention_heads, tuple(layers), state_dtype=state_dtype)


_BLOCK_LETTERS: Mapping[str, str] = CONFIG_NAMES["block_letters"]


def nemotron_pattern(text: Fields) -> str:
    """A letter for each layer, from its name or a pattern."""
    names = text.strings("layers_block_type") or text.strings("layer_types")
    if names is not None:
        unknown = next((name for name in names if name not in _BLOCK_LETTERS), None)
        if unknown is not None:
            raise unknown_layer(text, unknown)
        return "".join(_BLOCK_LETTERS[name] for name in names)
    pattern = text.text("hybrid_override_pattern")
    if pattern is None:
        problem = "is missing: it says which layers are Mamba and which are attention"
        raise text.error("hybrid_override_pattern", problem)
    if len(pattern) <= MAX_LAYERS and pattern and set(pattern) <= set("M*-E|"):
        return pattern.replace("|", "")
    summary = re.findall(r"(\d{1,4})\s*(mamba2|mamba|attention|mlp|moe)", pattern[:200])
    if summary and sum(int(count) for count, _ in summary) <= MAX_LAYERS:
        # A summary in words ("27 mamba2 + 4 attention (+25 mlp)"): the order matters to pipeline stages only.
        return "".join(_BLOCK_LETTERS[name] * int(count) for count, name in summary)
    problem = f"{pattern[:40]!a} must have at most {MAX_LAYERS} letters, each M, *, - or E"
    raise text.error("hybrid_override_pattern", problem)
