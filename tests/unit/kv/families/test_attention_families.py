"""Families whose layers keep K and V per head and are alike: how many layers, KV heads, and how large a head."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import AttentionLayer
from tests.unit.kv.families.reading import letters, refused
from tests.unit.kv.hybrids import without

TEXT: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
WINDOWED = {**TEXT, "sliding_window": 32}
FALCON = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6}
DBRX = {"model_type": "dbrx", "n_layers": 2, "d_model": 96, "n_heads": 6}
MINICPM = {
    "model_type": "minicpm3",
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 6,
    "encoder_layers": 5,
    "encoder_attention_heads": 3,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "hidden_size": 48,
}
NAS: dict[str, Any] = {
    "model_type": "nemotron-nas",
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "block_configs": [
        {"attention": {"n_heads_in_group": 3, "no_op": False}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": None, "replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 1}},
    ],
}
BERT = {"num_hidden_layers": 3, "num_attention_heads": 6}


def shapes(config: dict[str, Any]) -> set[tuple[int, int, int]]:
    """KV heads, and head sizes of K and V, of all layers that keep them."""
    layers = parse_architecture(config).layers
    return {
        (layer.kv_heads, layer.head_size, layer.head_size_v) for layer in layers if isinstance(layer, AttentionLayer)
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**TEXT, "model_type": "llama"}, "FFF"),
        ({**WINDOWED, "model_type": "llama"}, "WWW"),
        ({**WINDOWED, "model_type": "llama",
          "layer_types": ["full_attention", "sliding_attention", "attention"]}, "FWF"),
        ({**WINDOWED, "model_type": "llama",
          "layer_types": ["global_attention", "window_attention", "local_attention"]}, "FWW"),
        ({**TEXT, "model_type": "llama", "attention_chunk_size": 8,
          "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "full_attention"]}, "CCF"),
        # A summary of layer types: the rarer ones lie evenly among the others.
        ({**WINDOWED, "model_type": "llama", "num_hidden_layers": 6,
          "layer_types_count": {"sliding_attention": 4, "full_attention": 2, "chunked_attention": 0}}, "WWFWWF"),
        ({**WINDOWED, "model_type": "qwen2"}, "FFF"),
        ({**WINDOWED, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, "WWW"),
        # From the 29th layer on, unless max_window_layers says otherwise: this one has three.
        ({**WINDOWED, "model_type": "qwen2", "use_sliding_window": True}, "FFF"),
        ({**WINDOWED, "model_type": "qwen2", "use_sliding_window": True,
          "layer_types": ["sliding_attention"] * 3}, "WWW"),
        ({**WINDOWED, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, "FFF"),
        ({**WINDOWED, "model_type": "dots_ocr", "num_hidden_layers": 28, "use_sliding_window": True}, "F" * 28),
        ({**WINDOWED, "model_type": "qwen3_moe"}, "FFF"),
        ({**WINDOWED, "model_type": "qwen3_moe", "use_sliding_window": True}, "WWW"),
        ({**WINDOWED, "model_type": "qwen3_moe", "use_sliding_window": True,
          "layer_types": ["sliding_attention"] * 3}, "WWW"),
        ({**WINDOWED, "model_type": "qwen3_moe", "use_sliding_window": True,
          "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "FFF"),
        ({**WINDOWED, "model_type": "qwen3_moe", "sliding_window": 0, "use_sliding_window": True}, "FFF"),
        (NAS, "F--F"),
        (MINICPM, "FF"),
        (DBRX, "FF"),
        # Whisper's decoder has both kinds in each layer.
        (WHISPER, "FxFx"),
        *(({**BERT, "model_type": name}, "eee")
          for name in ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "new", "gte")),
        ({"model_type": "nomic_bert", "n_layer": 3, "n_head": 6}, "eee"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)  # fmt: skip
def test_which_layers_there_are(config: dict[str, Any], expected: str) -> None:
    """Each layer is of the kind that its family's file gives it."""
    assert expected == letters(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # 96 / 6 = 16 unless a field says more; as many KV heads as heads unless a field says fewer.
        ({**TEXT, "model_type": "llama"}, (2, 16, 16)),
        ({**without(TEXT, "num_key_value_heads"), "model_type": "llama"}, (6, 16, 16)),
        ({**TEXT, "model_type": "llama", "head_dim": 20}, (2, 20, 20)),
        ({**TEXT, "model_type": "llama", "head_dim": 0}, (2, 16, 16)),
        ({**TEXT, "model_type": "llama", "hidden_size_per_head": 20}, (2, 20, 20)),
        ({**TEXT, "model_type": "llama", "kv_channels": 20}, (2, 20, 20)),
        ({**TEXT, "model_type": "llama", "hidden_size": 6}, (2, 1, 1)),
        ({**without(TEXT, "num_attention_heads"), "model_type": "orion", "head_dim": 20}, (2, 20, 20)),
        *(({**without(TEXT, "num_key_value_heads"), "model_type": "orion", name: 3}, (3, 16, 16))
          for name in ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num",
                       "num_attention_groups", "n_kv_heads")),
        *(({"model_type": "orion", "num_hidden_layers": 2, "hidden_size": 96, name: 3}, (3, 32, 32))
          for name in ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")),
        *(({"model_type": "orion", "num_hidden_layers": 2, "num_attention_heads": 3, name: 96}, (3, 32, 32))
          for name in ("hidden_size", "n_embd", "n_embed", "d_model", "dim")),
        *(({"model_type": "orion", "hidden_size": 96, "num_attention_heads": 3, name: 2}, (3, 32, 32))
          for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")),
        ({**without(TEXT, "num_key_value_heads"), "model_type": "step1"}, (1, 16, 16)),
        ({**TEXT, "model_type": "step1"}, (2, 16, 16)),
        ({**TEXT, "model_type": "step1", "num_attention_groups": 3}, (3, 16, 16)),
        ({"model_type": "gpt2", "n_layer": 48, "n_head": 25, "n_embd": 1600}, (25, 64, 64)),
        ({"model_type": "chatglm", "num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32,
          "multi_query_group_num": 2, "kv_channels": 128}, (2, 128, 128)),
        ({**DBRX, "attn_config": {"kv_n_heads": 3}}, (3, 16, 16)),
        (DBRX, (6, 16, 16)),
        # Falcon has one KV head but for the new decoder, or where multi_query is off.
        ({**FALCON, "model_type": "falcon"}, (1, 16, 16)),
        ({**FALCON, "model_type": "falcon", "num_kv_heads": 3}, (1, 16, 16)),
        ({**FALCON, "model_type": "falcon", "num_kv_heads": 3, "new_decoder_architecture": True}, (3, 16, 16)),
        ({**FALCON, "model_type": "falcon", "multi_query": False}, (6, 16, 16)),
        ({**FALCON, "model_type": "gpt_bigcode"}, (1, 16, 16)),
        ({**FALCON, "model_type": "gpt_bigcode", "multi_query": False}, (6, 16, 16)),
        # falcon-7b's first config is of the old kind, falcon-40b's, 8,192 wide, of the new, and neither says so.
        ({**FALCON, "model_type": "RefinedWebModel", "n_head_kv": 3}, (1, 16, 16)),
        ({**FALCON, "model_type": "RefinedWeb", "n_head_kv": 3}, (1, 16, 16)),
        ({"model_type": "RefinedWeb", "n_layer": 2, "hidden_size": 8192, "n_head": 128, "n_head_kv": 8}, (8, 64, 64)),
        ({"model_type": "RefinedWebModel", "n_layer": 2, "hidden_size": 8192, "n_head": 128, "n_head_kv": 8},
         (1, 64, 64)),
        # Every one of MiniCPM 3's heads keeps both parts of K, and a V as wide.
        (MINICPM, (6, 14, 14)),
        (WHISPER, (6, 16, 16)),
        ({**without(WHISPER, "d_model", "decoder_layers", "decoder_attention_heads")}, (3, 16, 16)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_heads(config: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """KV heads and head sizes of K and V under each family's own names."""
    assert {expected} == shapes(config)


def test_blocks_of_a_searched_model_have_heads_of_their_own() -> None:
    """Three heads to a group are two KV heads; a block without attention keeps nothing."""
    actual = [
        (layer.index, layer.kv_heads, layer.head_size)
        for layer in parse_architecture(NAS).layers
        if isinstance(layer, AttentionLayer)
    ]

    assert [(0, 2, 16), (3, 6, 16)] == actual


@pytest.mark.parametrize(
    ("config", "heads", "depth"),
    [
        ({**TEXT, "model_type": "llama"}, 6, 3),
        ({**TEXT, "model_type": "qwen3"}, 6, 3),
        ({**TEXT, "model_type": "qwen3_moe"}, 6, 3),
        ({**TEXT, "model_type": "step1"}, 6, 3),
        ({**FALCON, "model_type": "falcon"}, 6, 2),
        (DBRX, 6, 2),
        (MINICPM, 6, 2),
        (NAS, 6, 4),
        (WHISPER, 6, 2),
        ({**BERT, "model_type": "bert"}, 6, 3),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_query_heads_and_depth(config: dict[str, Any], heads: int, depth: int) -> None:
    """What ranks and pipeline stages divide."""
    architecture = parse_architecture(config)

    assert (heads, depth) == (architecture.attention_heads, architecture.depth)


@pytest.mark.parametrize(
    "names", [("sliding_attention", 8, None), ("chunked_attention", None, 8)], ids=["window", "chunk"]
)
def test_the_span_of_a_listed_layer(names: tuple[str, int | None, int | None]) -> None:
    """A window and a chunk are in tokens, and a layer has the one that its name says."""
    name, window, chunk = names
    config = {**TEXT, "model_type": "llama", "layer_types": [name] * 3, "sliding_window": 8, "attention_chunk_size": 8}
    layers = [layer for layer in parse_architecture(config).layers if isinstance(layer, AttentionLayer)]

    assert [(index, window, chunk, 2, 16, 16) for index in range(3)] == [
        (layer.index, layer.window_tokens, layer.chunk_tokens, layer.kv_heads, layer.head_size, layer.head_size_v)
        for layer in layers
    ]


LLAMA = {**TEXT, "model_type": "llama"}
HEADS = 4096
LAYERS = 1024
SIZE = 1 << 14
LONG = 1 << 30


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**LLAMA, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({**LLAMA, "num_key_value_heads": 12}, "num_key_value_heads"),
        ({**LLAMA, "hidden_size": 5}, "hidden_size"),
        ({**LLAMA, "hidden_size": 97}, "hidden_size"),
        (without(LLAMA, "num_attention_heads", "num_key_value_heads") | {"model_type": "orion"}, "num_attention_heads"),
        ({**without(LLAMA, "num_attention_heads"), "model_type": "orion"}, "num_attention_heads"),
        (without(LLAMA, "hidden_size"), "hidden_size"),
        ({**LLAMA, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 3}, "attention_chunk_size"),
        ({**LLAMA, "layer_types_count": {"full_attention": 2}}, "layer_types_count"),
        # From the 29th of 29 layers on, where the class says nothing either.
        ({**WINDOWED, "model_type": "dots_ocr", "num_hidden_layers": 29, "use_sliding_window": True},
         "max_window_layers"),
        ({**WHISPER, "d_model": 97}, "d_model"),
        (without(NAS, "block_configs"), "block_configs"),
        ({**NAS, "block_configs": NAS["block_configs"][:3]}, "block_configs"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    """A size that no model has, heads that do not divide, or nothing to tell layers by."""
    assert field == refused(config)
