"""Families with windows and chunks: which layers have one, how wide it is, and the heads of either kind.

Without a list of its own a config's pattern is the class's: data/class_layers.json has what each class makes of 19
layers (record_class_defaults.py).
"""

import json
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.class_defaults import class_defaults
from kvdiag.kv.layout.layers import Architecture, AttentionLayer
from tests.unit.kv.families.reading import LETTERS, letters, refused
from tests.unit.kv.hybrids import without
from tests.unit.kv.vectors import DATA

CLASS_LAYERS: dict[str, list[str]] = json.loads((DATA / "class_layers.json").read_text())["layer_types"]
DEPTH = 19
OF_NAME = {"full_attention": "F", "sliding_attention": "W", "chunked_attention": "C"}
# Which the class works out of what a config that is served states: vLLM's own class or file decides.
NOT_OF_THE_CLASS = {
    # Its published configs name the layers in hybrid_layer_pattern, which is asked for.
    "mimo_v2_flash"
}
PATTERNED = sorted(
    name
    for name, types in CLASS_LAYERS.items()
    if set(types) <= set(OF_NAME) and name not in {"modernbert", *NOT_OF_THE_CLASS}
)

TEXT: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 32,
}
MIMO = {**TEXT, "model_type": "mimo_v2", "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1], "v_head_dim": 12}
NARROW = {
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 10,
    "swa_v_head_dim": 6,
    "sliding_window_size": 48,
}
STEP: dict[str, Any] = {**TEXT, "model_type": "step3p5"}
OTHER = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 3, "head_dim": 20}
GEMMA_4 = {**TEXT, "model_type": "gemma4_text"}


def shapes(architecture: Architecture) -> list[tuple[str, int, int, int, int | None]]:
    """Kind, KV heads, head sizes of K and V, and window or chunk, of each run of like layers."""
    found: list[tuple[str, int, int, int, int | None]] = []
    for layer in architecture.layers:
        assert isinstance(layer, AttentionLayer)
        span = layer.window_tokens or layer.chunk_tokens
        shape = (LETTERS[layer.kind], layer.kv_heads, layer.head_size, layer.head_size_v, span)
        if not found or found[-1] != shape:
            found.append(shape)
    return found


@pytest.mark.parametrize("model_type", PATTERNED)
def test_without_a_list_the_pattern_is_the_classs(model_type: str) -> None:
    """Each of 19 layers is of the kind that the config class gives it."""
    config = {**class_defaults(model_type), "model_type": model_type, "architectures": ["Served"]}

    actual = letters({**config, "num_hidden_layers": DEPTH, "num_kv_shared_layers": 0})

    assert "".join(OF_NAME[name] for name in CLASS_LAYERS[model_type]) == actual


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Every n-th is full where a field says n; Granite counts the first of n.
        ({**TEXT, "model_type": "gemma3_text", "sliding_window_pattern": 3}, "WWFWWF"),
        ({**TEXT, "model_type": "afmoe", "global_attn_every_n_layers": 2}, "WFWFWF"),
        ({**TEXT, "model_type": "granite_swa", "sliding_window_pattern": 3}, "FWWFWW"),
        ({**TEXT, "model_type": "gemma2", "layer_types": ["full_attention"] * 6}, "FFFFFF"),
        # EmbeddingGemma looks both ways.
        ({**TEXT, "model_type": "gemma3_text", "use_bidirectional_attention": True}, "eeeeee"),
        ({**TEXT, "model_type": "laguna"}, "FFFFFF"),
        ({**TEXT, "model_type": "laguna", "layer_types": ["sliding_attention", "full_attention"] * 3}, "WFWFWF"),
        ({**TEXT, "model_type": "exaone4"}, "WWWFWW"),
        ({**TEXT, "model_type": "exaone4", "sliding_window_pattern": "LG"}, "WFWFWF"),
        ({**TEXT, "model_type": "exaone4", "sliding_window_pattern": 3}, "WWFWWF"),
        # Null is as good as missing.
        ({**TEXT, "model_type": "exaone4", "sliding_window_pattern": None}, "WWWFWW"),
        ({**TEXT, "model_type": "gemma3n_text", "num_kv_shared_layers": None}, "WWWWFW"),
        ({**TEXT, "model_type": "exaone4", "sliding_window": None}, "FFFFFF"),
        ({**TEXT, "model_type": "exaone4", "sliding_window": 0}, "FFFFFF"),
        ({**TEXT, "model_type": "gemma3n_text", "num_kv_shared_layers": 0}, "WWWWFW"),
        ({**TEXT, "model_type": "gemma3n_text", "num_kv_shared_layers": 5}, "Wsssss"),
        ({**TEXT, "model_type": "gemma3n_text", "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 6},
         "FFFFFs"),
        ({**GEMMA_4, "num_hidden_layers": 8}, "WWWWWFWF"),
        ({**GEMMA_4, "layer_types": ["sliding_attention"] * 6}, "WWWWWF"),
        ({**GEMMA_4, "num_kv_shared_layers": 2}, "WWWWss"),
        # Llama 4: without rope everything is attended to; without a chunk size, everywhere.
        ({**TEXT, "model_type": "llama4_text", "attention_chunk_size": 64}, "CCCFCC"),
        ({**TEXT, "model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layer_interval": 2}, "CFCFCF"),
        ({**TEXT, "model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 1, 0, 1, 0]}, "CFCCFC"),
        ({**TEXT, "model_type": "llama4_text", "no_rope_layers": [0, 1, 1, 1, 1, 0]}, "FCCCCF"),
        ({**TEXT, "model_type": "llama4_text", "no_rope_layers": []}, "CCCFCC"),
        ({**TEXT, "model_type": "llama4_text", "layer_types": ["full_attention", "chunked_attention"] * 3}, "FCFCFC"),
        ({**TEXT, "model_type": "llama4_text", "attention_chunk_size": None}, "FFFFFF"),
        # Muse counts from the last layer; with rope a layer slides, where there is a window.
        ({**TEXT, "model_type": "muse_glimmer_text"}, "WFWWWF"),
        ({**TEXT, "model_type": "muse_glimmer_text", "no_rope_layers": [1, 0, 0, 1, 1, 1, 0]}, "WFFWWW"),
        ({**TEXT, "model_type": "muse_glimmer_text", "sliding_window": 0}, "FFFFFF"),
        (MIMO, "FWWFWW"),
        ({**without(MIMO, "hybrid_layer_pattern"), "layer_types": ["sliding_attention", "full_attention"] * 3},
         "WFWFWF"),
        ({**MIMO, "hybrid_layer_pattern": [1, 0] * 4}, "WFWFWF"),
        (STEP, "WFWFWF"),
        (without(STEP, "sliding_window"), "FFFFFF"),
        ({**STEP, "layer_types": ["full_attention", "sliding_attention"] * 3}, "FWFWFW"),
        ({**TEXT, "model_type": "plamo3", "interleaved_sliding_window": [32, 32, None]}, "WWFWWF"),
        ({**TEXT, "model_type": "plamo3", "sliding_window": [None, 32]}, "FWFWFW"),
        ({**TEXT, "model_type": "mistral", "sliding_window": [32]}, "WWWWWW"),
        ({**TEXT, "model_type": "mistral", "sliding_window": [None]}, "FFFFFF"),
        ({**TEXT, "model_type": "mistral", "sliding_window": 0}, "FFFFFF"),
        ({**TEXT, "model_type": "mistral", "sliding_window": 32}, "WWWWWW"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)  # fmt: skip
def test_which_layers_have_a_window(config: dict[str, Any], expected: str) -> None:
    """Each layer is of the kind that its family's file gives it."""
    assert expected == letters(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**TEXT, "model_type": "gemma2"}, [("W", 2, 16, 16, 32), ("F", 2, 16, 16, None)] * 3),
        # Cohere's window is one token longer than its field.
        ({**TEXT, "model_type": "cohere2"}, [("W", 2, 16, 16, 33), ("F", 2, 16, 16, None), ("W", 2, 16, 16, 33)]),
        ({**TEXT, "model_type": "cohere2_moe"}, [("W", 2, 16, 16, 33), ("F", 2, 16, 16, None), ("W", 2, 16, 16, 33)]),
        (
            {**TEXT, "model_type": "exaone4", "sliding_windows": [8, 8, 24, 24, 0, 0]},
            [("W", 2, 16, 16, 8), ("W", 2, 16, 16, 24), ("F", 2, 16, 16, None), ("W", 2, 16, 16, 32)],
        ),
        (
            {**TEXT, "model_type": "llama4_text", "attention_chunk_size": 64},
            [("C", 2, 16, 16, 64), ("F", 2, 16, 16, None), ("C", 2, 16, 16, 64)],
        ),
        ({**TEXT, "model_type": "muse_glimmer_text"}, [("W", 2, 16, 16, 32), ("F", 2, 16, 16, None)] * 2),
        # Gemma 4's full layers have heads of 512, and KV heads of their own only where K is V.
        (GEMMA_4, [("W", 2, 16, 16, 32), ("F", 2, 512, 512, None)]),
        (
            {**GEMMA_4, "global_head_dim": 24, "num_global_key_value_heads": 1},
            [("W", 2, 16, 16, 32), ("F", 2, 24, 24, None)],
        ),
        (
            {**GEMMA_4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            [("W", 2, 16, 16, 32), ("F", 1, 512, 512, None)],
        ),
        ({**GEMMA_4, "attention_k_eq_v": True}, [("W", 2, 16, 16, 32), ("F", 2, 512, 512, None)]),
        (MIMO, [("F", 2, 16, 12, None), ("W", 2, 16, 16, 32)] * 2),
        (without(MIMO, "v_head_dim"), [("F", 2, 16, 16, None), ("W", 2, 16, 16, 32)] * 2),
        ({**MIMO, **NARROW}, [("F", 2, 16, 12, None), ("W", 8, 10, 6, 48)] * 2),
        (STEP, [("W", 2, 16, 16, 32), ("F", 2, 16, 16, None)] * 3),
        ({**STEP, "attention_other_setting": OTHER}, [("W", 3, 20, 20, 32), ("F", 2, 16, 16, None)] * 3),
        (
            {**STEP, "attention_other_setting": {"attention_type": "full_attention"}},
            [("W", 2, 16, 16, 32), ("F", 2, 16, 16, None)] * 3,
        ),
        (
            {**STEP, "attention_other_setting": {"attention_type": "full_attention", "num_attention_groups": 1}},
            [("W", 2, 16, 16, 32), ("F", 1, 16, 16, None)] * 3,
        ),
        (
            {**TEXT, "model_type": "plamo3", "sliding_window": [None, 8]},
            [("F", 2, 16, 16, None), ("W", 2, 16, 16, 8)] * 3,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_heads_and_windows(config: dict[str, Any], expected: list[tuple[str, int, int, int, int | None]]) -> None:
    """KV heads, head sizes of K and V, and the window in tokens."""
    assert expected == shapes(parse_architecture(config))


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "exaone4", "laguna", "llama4_text", "muse_glimmer_text",
     "mimo_v2", "step3p5", "mistral", "plamo3"],
)  # fmt: skip
def test_query_heads_of_windowed_models(model_type: str) -> None:
    """They are the config's, whatever other heads the sliding layers have."""
    config = {**TEXT, **NARROW, "model_type": model_type, "hybrid_layer_pattern": [1] * 6, "num_kv_shared_layers": 0}
    windows = {"sliding_window": [32]} if model_type in {"mistral", "plamo3"} else {}

    assert 4 == parse_architecture({**config, **windows}).attention_heads


MISTRAL = {**without(TEXT, "sliding_window"), "model_type": "mistral"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, ("F", 2, 16, 16, None)),
        ({"model_type": "mistral3", "text_config": MISTRAL}, ("W", 2, 16, 16, 4096)),
        ({**MISTRAL, "architectures": ["MistralForCausalLM"]}, ("W", 2, 16, 16, 4096)),
        ({**MISTRAL, "architectures": ["MistralForCausalLM"], "sliding_window": None}, ("F", 2, 16, 16, None)),
        ({**MISTRAL, "sliding_window": [1]}, ("W", 2, 16, 16, 1)),
    ],
)
def test_a_mistral_that_could_be_served_has_a_window(config: dict[str, Any], expected: Any) -> None:
    """The class's window is taken where a config names a class or is nested in one that does; null is none."""
    assert [expected] == shapes(parse_architecture(config))


MANY = 1 << 20
LONG = 1 << 30
HEADS = 4096
SIZE = 1 << 14


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**TEXT, "model_type": "exaone4", "sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ({**TEXT, "model_type": "exaone4", "sliding_window_pattern": ""}, "sliding_window_pattern"),
        ({**TEXT, "model_type": "exaone4", "sliding_windows": [8] * 5}, "sliding_windows"),
        ({**TEXT, "model_type": "llama4_text", "no_rope_layers": [1] * 5}, "no_rope_layers"),
        ({**TEXT, "model_type": "muse_glimmer_text", "no_rope_layers": [1] * 5}, "no_rope_layers"),
        ({**TEXT, "model_type": "gemma3n_text", "num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({**GEMMA_4, "num_kv_shared_layers": 7}, "num_kv_shared_layers"),
        (without(MIMO, "hybrid_layer_pattern"), "hybrid_layer_pattern"),
        ({**MIMO, "hybrid_layer_pattern": [1] * 5}, "hybrid_layer_pattern"),
        (without(MIMO, "sliding_window"), "sliding_window_size"),
        ({**TEXT, "model_type": "plamo3"}, "interleaved_sliding_window"),
        ({**TEXT, "model_type": "plamo3", "interleaved_sliding_window": []}, "interleaved_sliding_window"),
        ({**TEXT, "model_type": "plamo3", "interleaved_sliding_window": [8, 16]}, "interleaved_sliding_window"),
        ({**TEXT, "model_type": "mistral", "sliding_window": []}, "sliding_window"),
        ({**TEXT, "model_type": "mistral", "sliding_window": [8, True]}, "sliding_window"),
        ({**TEXT, "model_type": "mistral", "sliding_window": [True]}, "sliding_window"),
        ({**TEXT, "model_type": "mistral", "sliding_window": ["8"]}, "sliding_window"),
        ({**TEXT, "model_type": "mistral", "sliding_window": [0, None]}, "sliding_window"),
        ({**TEXT, "model_type": "mistral", "sliding_window": [8, 16, None]}, "sliding_window"),
    ],
)
def test_windows_that_cannot_be_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    """A list that is too short, a flag that is none, a size that no model has, or nothing to tell layers by."""
    assert field == refused(config)
