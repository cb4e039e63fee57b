"""Families that run the same layers several times, each time with a cache of its own."""

from kvdiag.kv.families.base import (
    MAX_HEADS,
    MAX_LAYERS,
    Heads,
    ModelLayers,
    full_layers,
    read_heads,
    sliding_layer,
)
from kvdiag.kv.families.config_fields import Fields

_MAX_LOOPS = 64


def hrm_text(text: Fields) -> ModelLayers:
    """HRM-Text (hrm_text.py::HrmTextAttention): two stacks of num_layers_per_stack layers, run H_cycles times L_cycles
    and once; every head keeps its own K and V.

    A config whose num_layers_per_stack is missing counts one stack in num_hidden_layers (transformers HrmTextConfig).
    """
    per_stack = text.integer("num_layers_per_stack", "num_hidden_layers", high=MAX_LAYERS)
    high = text.integer("H_cycles", default=2, high=_MAX_LOOPS)
    low = text.integer("L_cycles", default=3, high=_MAX_LOOPS)
    depth = per_stack * high * (low + 1)
    if depth > MAX_LAYERS:
        raise text.error("H_cycles", f"{high} and L_cycles {low} make {depth} layers; at most {MAX_LAYERS} are read")
    heads = read_heads(text, kv_heads=text.integer("num_attention_heads", high=MAX_HEADS))
    return ModelLayers(heads.attention_heads, full_layers(depth, heads))


def loop_coder(text: Fields) -> ModelLayers:
    """IQuest LoopCoder (iquest_loopcoder.py): the first loop attends to everything, later ones to the last
    loop_window_size tokens.
    """
    depth = text.integer("num_hidden_layers", high=MAX_LAYERS)
    loops = text.integer("loop_num", default=2, high=_MAX_LOOPS)
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
