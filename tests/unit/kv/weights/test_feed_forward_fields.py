"""Which layers have experts, how many, and how wide a dense block is, under each family's names."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.weights.feed_forward import dense_width, expert_count, is_expert_layer
from tests.unit.kv.refused import refused

H = 60


def expert_layers(model_type: str = "qwen3_moe", depth: int = 6, **config: Any) -> list[int]:
    """The numbers of the layers with experts."""
    return [index for index in range(depth) if is_expert_layer(Fields(config), model_type, index, depth)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"mlp_layer_types": ["dense", "sparse", "moe", "dense", "dense"]}, [1, 2, 5]),
        # Step-3 lists numbers, with spaces or without.
        ({"moe_layers_enum": "1, 3,4"}, [1, 3, 4]),
        ({"moe_layers_enum": "0004,1023"}, [4]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ({"moe_layer_start_index": 2}, [2, 3, 4, 5]),
        ({"num_dense_layers": 2}, [2, 3, 4, 5]),
        ({"first_k_dense_replace": 6}, []),
        ({"model_type": "param2moe"}, [1, 2, 3, 4, 5]),
        ({"model_type": "sarvam_mla"}, [1, 2, 3, 4, 5]),
        ({"model_type": "sarvam_mla", "first_k_dense_replace": 0}, [0, 1, 2, 3, 4, 5]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [1, 2]),
        ({"moe_layer_freq": 2}, [0, 2, 4]),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, [2, 4]),
        ({"moe_layer_interval": 3}, [0, 3]),
        # Qwen counts from one.
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 3}, [2, 5]),
        ({"moe_layer_end_index": 3}, [0, 1, 2, 3]),
        ({"moe_layer_end_index": 0}, [0]),
        ({"moe_layer_end_index": -1}, [0, 1, 2, 3, 4, 5]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 1}, [1]),
        ({"model_type": "jamba"}, [1, 3, 5]),
        ({"model_type": "jamba", "expert_layer_period": 3, "expert_layer_offset": 0}, [0, 3]),
        ({"model_type": "llama4_text"}, [0, 1, 2, 3, 4, 5]),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, [1, 3, 5]),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 3}, [2, 5]),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 0}, []),
    ],
)
def test_layers_with_experts(config: dict[str, Any], expected: list[int]) -> None:
    """A list, a first and a last layer, or a period says which; each family's way counts."""
    assert expected == expert_layers(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"moe_layers_enum": "1,two"},
        {"moe_layers_enum": "1,,2"},
        {"moe_layers_enum": "12345"},
        {"moe_layers_enum": "x" * 100},
        {"moe_layer_freq": [2]},
    ],
)
def test_layers_that_a_config_cannot_mean(config: dict[str, Any]) -> None:
    """What is no layer's number is an error that shows it, cut short."""
    with pytest.raises(KvModelError) as caught:
        expert_layers(**config)

    assert caught.value.field in config


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 0),
        ({"num_experts": 5}, 5),
        ({"n_routed_experts": 5}, 5),
        ({"num_local_experts": 5}, 5),
        ({"moe_num_experts": 5}, 5),
        ({"num_experts": 0, "num_local_experts": 5}, 0),
        ({"moe_num_experts": [7, 5]}, 7),
        ({"moe_num_experts": []}, 0),
        ({"ffn_config": {"moe_num_experts": 5}}, 5),
        ({"ffn_config": {}}, 0),
    ],
)
def test_experts_are_counted_under_each_name(config: dict[str, Any], count: int) -> None:
    """A model without any of the names is dense."""
    assert count == expert_count(Fields(config))


@pytest.mark.parametrize(
    ("model_type", "config", "width"),
    [
        ("llama", {"intermediate_size": 86}, 86),
        ("opt", {"ffn_dim": 86}, 86),
        ("whisper", {"decoder_ffn_dim": 86}, 86),
        ("chatglm", {"ffn_hidden_size": 86}, 86),
        ("gpt2", {"n_inner": 86}, 86),
        ("lfm2", {"block_ff_dim": 86, "block_auto_adjust_ff_dim": False}, 86),
        ("gpt2", {}, 240),
        ("llama4_text", {"intermediate_size": 34, "intermediate_size_mlp": 86}, 86),
        ("granitemoehybrid", {"intermediate_size": 34, "shared_intermediate_size": 86}, 86),
        # Two thirds of 86 are 57; the next multiples of 256 and of 16.
        ("lfm2", {"intermediate_size": 86}, 256),
        ("lfm2", {"intermediate_size": 86, "block_multiple_of": 16}, 64),
        ("lfm2", {"intermediate_size": 96, "block_multiple_of": 16}, 64),
        ("lfm2_moe", {"intermediate_size": 86}, 86),
        ("lfm2_moe", {"intermediate_size": 86, "block_auto_adjust_ff_dim": True}, 256),
        ("llama", {"intermediate_size": 86, "block_auto_adjust_ff_dim": True}, 86),
        # Molmo counts gate and up together.
        ("molmo", {"intermediate_size": 86}, 43),
        # Gemma 3n has one for each layer.
        ("gemma3n_text", {"intermediate_size": [80, 92]}, 86),
        ("gemma3n_text", {"intermediate_size": []}, 240),
    ],
)
def test_a_dense_block_is_as_wide_as_its_family_says(model_type: str, config: dict[str, Any], width: int) -> None:
    """Each family has a name of its own for the width; some round it, some count twice."""
    assert width == dense_width(Fields(config), model_type, H)


def test_a_width_that_is_missing_is_named() -> None:
    """Of a gated block nothing can be assumed."""
    with refused("intermediate_size"):
        dense_width(Fields({}), "llama", H)
