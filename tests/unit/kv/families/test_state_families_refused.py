"""Configs of families with states that are refused: sizes that no model has, layers not told; what is just read."""

from __future__ import annotations

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from tests.unit.kv.families.reading import refused
from tests.unit.kv.hybrids import (
    BAILING,
    BAMBA,
    DELTA,
    GRANITE,
    JAMBA,
    KIMI,
    LFM,
    LING,
    MAMBA,
    MAMBA_2,
    NEMOTRON,
    OLMO,
    ZAMBA,
    without,
)

HEADS = 4096
LAYERS = 1024
SIZE = 1 << 14
KERNEL = 1 << 10
MOST: list[tuple[dict[str, Any], dict[str, int]]] = [
    (
        DELTA,
        {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, "linear_key_head_dim": SIZE,
         "linear_value_head_dim": SIZE, "linear_conv_kernel_dim": KERNEL, "full_attention_interval": LAYERS,
         "mtp_num_hidden_layers": 64},
    ),
    (OLMO, {"linear_num_key_heads": HEADS, "linear_key_head_dim": SIZE}),
    (JAMBA, {"attn_layer_period": LAYERS, "attn_layer_offset": LAYERS, "mamba_expand": 64, "mamba_d_state": SIZE,
             "mamba_d_conv": KERNEL}),
    (MAMBA, {"expand": 64, "state_size": SIZE, "conv_kernel": KERNEL}),
    (MAMBA_2, {"expand": 64, "n_groups": HEADS, "num_heads": HEADS, "head_dim": SIZE, "state_size": SIZE,
               "conv_kernel": KERNEL}),
    (BAMBA, {"mamba_expand": 64, "mamba_n_heads": HEADS, "mamba_d_head": SIZE, "mamba_n_groups": HEADS,
             "mamba_d_state": SIZE, "mamba_d_conv": KERNEL}),
    (ZAMBA, {"num_attention_heads": HEADS, "attention_head_dim": SIZE, "num_key_value_heads": HEADS,
             "mamba_expand": 64, "n_mamba_heads": HEADS, "mamba_ngroups": HEADS, "mamba_headdim": SIZE,
             "mamba_d_state": SIZE, "mamba_d_conv": KERNEL}),
    (NEMOTRON, {"mamba_num_heads": HEADS, "mamba_head_dim": SIZE, "n_groups": HEADS, "ssm_state_size": SIZE,
                "conv_kernel": KERNEL}),
    (LFM, {"conv_L_cache": KERNEL}),
    (BAILING, {"layer_group_size": LAYERS, "num_attention_heads": HEADS, "head_dim": SIZE}),
    (LING, {"layer_group_size": LAYERS, "num_attention_heads": HEADS, "head_dim": SIZE,
            "short_conv_kernel_size": KERNEL}),
    (KIMI, {"num_attention_heads": HEADS}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field", "most"),
    [(config, field, most) for config, fields in MOST for field, most in fields.items()],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_sizes_that_no_model_has_are_refused_by_name(config: dict[str, Any], field: str, most: int) -> None:
    """One more than the most is refused by its own field, as is less than nothing."""
    assert [field, field] == [refused({**config, field: value}) for value in (most + 1, -1)]


@pytest.mark.parametrize(
    ("field", "most"), [("num_heads", HEADS), ("head_dim", SIZE), ("short_conv_kernel_size", KERNEL)]
)
def test_kimis_nested_sizes_are_refused_by_name(field: str, most: int) -> None:
    """The path leads into linear_attn_config."""
    nested = {**KIMI["linear_attn_config"], field: most + 1}

    assert f"linear_attn_config.{field}" == refused({**KIMI, "linear_attn_config": nested})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (without(KIMI, "linear_attn_config"), "linear_attn_config"),
        (without(KIMI, "kv_lora_rank"), "kv_lora_rank"),
        (without(NEMOTRON, "hybrid_override_pattern"), "hybrid_override_pattern"),
        ({**NEMOTRON, "hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        ({**NEMOTRON, "hybrid_override_pattern": "MX*"}, "hybrid_override_pattern"),
        ({**NEMOTRON, "hybrid_override_pattern": "M" * (LAYERS + 1)}, "hybrid_override_pattern"),
        ({**NEMOTRON, "hybrid_override_pattern": "1000 mamba2 + 25 attention"}, "hybrid_override_pattern"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "wormhole"]}, "layer_types"),
        (without(ZAMBA, "layers_block_type"), "layers_block_type"),
        ({**without(ZAMBA, "layers_block_type"), "hybrid_layer_ids": []}, "layers_block_type"),
        ({**GRANITE, "layer_types": ["mamba", "wormhole", "mamba", "mamba", "mamba"]}, "layer_types"),
        ({**BAMBA, "attn_layer_indices": [LAYERS + 1]}, "attn_layer_indices"),
        (without(LING, "layer_group_size"), "layer_group_size"),
        ({**LING, "layer_group_size": 0}, "layer_group_size"),
        ({**DELTA, "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
    ],
)
def test_hybrids_that_do_not_tell_their_layers_are_refused(config: dict[str, Any], field: str) -> None:
    """What tells layers with a state from others must be there, and be known."""
    assert field == refused(config)


@pytest.mark.parametrize("pattern", ["M" * LAYERS, "1000 mamba2 + 24 attention"])
def test_the_longest_patterns_are_read(pattern: str) -> None:
    """1,024 layers are the most, in letters or in words."""
    assert LAYERS == parse_architecture({**NEMOTRON, "hybrid_override_pattern": pattern}).depth
