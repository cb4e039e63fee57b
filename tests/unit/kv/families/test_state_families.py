"""Families with layers that keep a state: which layers those are, what lies beside them, and what a state holds."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import AttentionLayer, LatentLayer, LayerKind, StateLayer
from kvdiag.kv.layout.state_layers import StateShape
from tests.unit.kv.families.reading import LETTERS, letters
from tests.unit.kv.hybrids import (
    ATTENTION,
    BAILING,
    BAMBA,
    DELTA,
    DELTA_STATE,
    FALCON,
    GRANITE,
    JAMBA,
    KIMI,
    LFM,
    LFM_STATE,
    LING,
    MAMBA,
    MAMBA_2,
    MAMBA_2_STATE,
    NEMOTRON,
    OLMO,
    ZAMBA,
    without,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Every fourth layer is full, or as full_attention_interval or layer_types says.
        (DELTA, "gggFgggFg"),
        ({**DELTA, "full_attention_interval": 2}, "gFgFgFgFg"),
        ({**DELTA, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}, "Fg"),
        (OLMO, "gggFgg"),
        ({**OLMO, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}, "Fg"),
        (JAMBA, "1F11F"),
        ({**JAMBA, "attn_layer_offset": 0}, "F11F1"),
        (MAMBA, "111"),
        (MAMBA_2, "22"),
        (GRANITE, "2F2F2"),
        (without(GRANITE, "layer_types"), "22222"),
        # A Granite without a single Mamba layer says nothing of Mamba.
        ({**ATTENTION, "model_type": "granitemoehybrid", "layer_types": ["attention"] * 5}, "FFFFF"),
        ({**ATTENTION, "model_type": "granitemoehybrid", "layer_types": ["attention", "full_attention"] * 3}, "FFFFF"),
        (BAMBA, "2F22F"),
        (without(BAMBA, "attn_layer_indices"), "22222"),
        # Falcon-H1 has both side by side in each of its two layers; Zamba2's hybrid layers too.
        (FALCON, "F2F2"),
        (ZAMBA, "2F22"),
        ({**without(ZAMBA, "layers_block_type"), "hybrid_layer_ids": [0, 2]}, "F22F2"),
        (NEMOTRON, "2-2F-"),
        ({**NEMOTRON, "sliding_window": 64}, "2-2W-"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "moe"]}, "2-F-"),
        ({**NEMOTRON, "layer_types": ["linear_attention", "full_attention", "mamba2"]}, "2F2"),
        ({**NEMOTRON, "hybrid_override_pattern": "3 mamba2 + 1 attention (+2 mlp, 1 moe)"}, "222F---"),
        (LFM, "FccFc"),
        (without(LFM, "full_attn_idxs"), "FFFFF"),
        ({**LFM, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}, "ccFcF"),
        # Kimi counts its layers from 1.
        (KIMI, "kkLkL"),
        (BAILING, "llLllLl"),
        ({**BAILING, "layer_group_size": 0}, "LLLLLLL"),
        (without(BAILING, "layer_group_size"), "LLLLLLL"),
        # Ling 3 has MLA in what lies beyond the last whole group.
        (LING, "kkLkkLL"),
        ({**BAILING, "architectures": ["BailingMoeV3ForCausalLM"]}, "kkLkkLL"),
        ({"architectures": ["BailingMoeV3VLForConditionalGeneration"], "text_config": BAILING}, "kkLkkLL"),
        ({"text_config": {**BAILING, "architectures": ["BailingMoeV3ForCausalLM"]}}, "kkLkkLL"),
    ],
    ids=lambda value: value.get("model_type", "nested") if isinstance(value, dict) else value,
)
def test_which_layers_keep_a_state(config: dict[str, Any], expected: str) -> None:
    """Each layer is of the kind that the family's pattern gives it."""
    assert expected == letters(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DELTA, {(2, 16)}),
        (OLMO, {(2, 16)}),
        (JAMBA, {(2, 16)}),
        (GRANITE, {(2, 16)}),
        (BAMBA, {(2, 16)}),
        (FALCON, {(2, 16)}),
        (NEMOTRON, {(2, 128)}),
        ({**NEMOTRON, "sliding_window": 64, "head_dim": 16}, {(2, 16)}),
        (LFM, {(2, 16)}),
        # Zamba2's shared block is twice as wide as the model.
        (ZAMBA, {(4, 32)}),
        ({**ZAMBA, "attention_head_dim": 20, "num_key_value_heads": 2}, {(2, 20)}),
        ({**ZAMBA, "head_dim": 16}, {(4, 32)}),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_heads_beside_states(config: dict[str, Any], expected: set[tuple[int, int]]) -> None:
    """The attention layers between have the config's KV heads and head size."""
    layers = parse_architecture(config).layers

    assert expected == {(layer.kv_heads, layer.head_size) for layer in layers if isinstance(layer, AttentionLayer)}


@pytest.mark.parametrize("config", [KIMI, BAILING, LING], ids=["kimi", "bailing", "ling"])
def test_latent_rows_beside_states(config: dict[str, Any]) -> None:
    """A latent row is the rank and the part with rope; there is no indexer."""
    rows = {
        (layer.latent_size, layer.indexer_row_bytes)
        for layer in parse_architecture(config).layers
        if isinstance(layer, LatentLayer)
    }

    assert {(32 + 8, None)} == rows


@pytest.mark.parametrize(
    ("config", "heads"),
    [(DELTA, 4), (MAMBA, 0), (MAMBA_2, 0), (FALCON, 4), (ZAMBA, 4), (NEMOTRON, 4), (KIMI, 4), (BAILING, 4), (LING, 4)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_query_heads_of_hybrids(config: dict[str, Any], heads: int) -> None:
    """A model of states alone has no query heads."""
    assert heads == parse_architecture(config).attention_heads


@pytest.mark.parametrize(
    ("change", "drafts"), [({}, 0), ({"mtp_num_hidden_layers": 2}, 2), ({"num_nextn_predict_layers": 1}, 1)]
)
def test_a_delta_models_drafter_has_full_layers(change: dict[str, int], drafts: int) -> None:
    """Each layer of the drafter keeps K and V as the model's own full layers do."""
    layers = parse_architecture({**DELTA, **change}).draft_layers

    shapes = [
        (layer.kind, layer.index, layer.kv_heads, layer.head_size)
        for layer in layers
        if isinstance(layer, AttentionLayer)
    ]
    assert [(LayerKind.FULL, 8, 2, 16)] * drafts == shapes
    assert len(layers) == drafts


def test_side_by_side_layers_share_an_index() -> None:
    """Pipeline stages divide the decoder layers, not what is in them."""
    actual = [(layer.index, LETTERS[layer.kind]) for layer in parse_architecture(ZAMBA).layers]

    assert [(0, "2"), (1, "F"), (1, "2"), (2, "2")] == actual


def state_of(config: dict[str, Any]) -> StateShape:
    """The one state that all state layers of a config have."""
    states = {layer.state for layer in parse_architecture(config).layers if isinstance(layer, StateLayer)}
    assert len(states) == 1
    return states.pop()


def mamba_1(inner: int, elements: int, steps: int) -> StateShape:
    """Each channel has a row of its own."""
    return StateShape(
        conv_channels=inner,
        conv_steps=steps,
        drafts_lengthen_conv=False,
        recurrent_heads=inner,
        recurrent_head_elements=elements,
    )


def delta_attention(heads: int, size: int, steps: int) -> StateShape:
    """Q, K and V go through the convolution, and each head keeps a matrix in float32."""
    return StateShape(
        conv_channels=3 * heads * size,
        conv_steps=steps,
        drafts_lengthen_conv=True,
        recurrent_heads=heads,
        recurrent_head_elements=size * size,
        recurrent_dtype="float32",
        prefill_checkpoints=1,
    )


def mamba_2(inner: int, head_size: int, steps: int = 5) -> StateShape:
    """As MAMBA_2_STATE, of another width and head size."""
    return StateShape(
        conv_channels=inner,
        conv_steps=steps,
        drafts_lengthen_conv=True,
        recurrent_heads=8,
        recurrent_head_elements=head_size * 5,
        conv_groups=2,
        conv_group_channels=10,
        prefill_checkpoints=1,
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DELTA, DELTA_STATE),
        # 4 heads; K of 3 x 64 / 4 / 4 = 12, V twice as wide, a kernel of 4.
        (OLMO, StateShape(conv_channels=2 * 12 * 4 + 24 * 4, conv_steps=3, drafts_lengthen_conv=True,
                          recurrent_heads=4, recurrent_head_elements=24 * 12)),
        ({**OLMO, "linear_num_key_heads": 2, "linear_key_head_dim": 5, "linear_conv_kernel_dim": 3},
         StateShape(conv_channels=2 * 5 * 2 + 10 * 4, conv_steps=2, drafts_lengthen_conv=True,
                    recurrent_heads=4, recurrent_head_elements=10 * 5)),
        # K of 3 x 64 / 4 / 2 = 24.
        ({**OLMO, "linear_num_key_heads": 2},
         StateShape(conv_channels=2 * 24 * 2 + 48 * 4, conv_steps=3, drafts_lengthen_conv=True,
                    recurrent_heads=4, recurrent_head_elements=48 * 24)),
        (JAMBA, mamba_1(3 * 64, 5, 5)),
        (MAMBA, mamba_1(3 * 64, 5, 3)),
        ({**MAMBA, "intermediate_size": 96, "conv_kernel": 8}, mamba_1(96, 5, 7)),
        (MAMBA_2, MAMBA_2_STATE),
        (GRANITE, mamba_2(192, 24)),
        (BAMBA, mamba_2(192, 24)),
        ({**BAMBA, "mamba_d_head": None}, mamba_2(192, 24)),
        ({**BAMBA, "mamba_d_head": "auto"}, mamba_2(192, 24)),
        ({**BAMBA, "mamba_d_head": 16}, mamba_2(192, 16)),
        (without(BAMBA, "mamba_expand"), mamba_2(128, 16)),
        # Null is as good as missing.
        ({**BAMBA, "mamba_expand": None}, mamba_2(128, 16)),
        ({**ZAMBA, "mamba_expand": None}, mamba_2(128, 16)),
        ({**LFM, "conv_L_cache": None}, replace(LFM_STATE, conv_steps=2)),
        (FALCON, mamba_2(192, 24)),
        ({**FALCON, "mamba_d_ssm": 160}, mamba_2(160, 20)),
        (ZAMBA, mamba_2(192, 24)),
        ({**ZAMBA, "mamba_headdim": 16}, mamba_2(192, 16)),
        (without(ZAMBA, "mamba_expand"), mamba_2(128, 16)),
        # Nemotron's width is heads x head size; no expansion is read.
        (NEMOTRON, mamba_2(8 * 24, 24)),
        (LFM, LFM_STATE),
        ({**LFM, "conv_dim": 48, "conv_L_cache": 2},
         StateShape(conv_channels=48, conv_steps=1, drafts_lengthen_conv=False, recurrent_heads=0,
                    recurrent_head_elements=0)),
        (KIMI, delta_attention(3, 5, 5)),
        ({**KIMI, "linear_attn_config": {"kda_layers": [1], "num_heads": 3, "head_dim": 5}}, delta_attention(3, 5, 3)),
        (BAILING, StateShape(conv_channels=0, conv_steps=0, drafts_lengthen_conv=False, recurrent_heads=4,
                             recurrent_head_elements=25)),
        (without(BAILING, "head_dim"), StateShape(conv_channels=0, conv_steps=0, drafts_lengthen_conv=False,
                                                  recurrent_heads=4, recurrent_head_elements=16 * 16)),
        (LING, delta_attention(4, 5, 5)),
        ({**BAILING, "architectures": ["BailingMoeV3ForCausalLM"]}, delta_attention(4, 5, 3)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_a_state_is_made_of(config: dict[str, Any], expected: StateShape) -> None:
    """Channels, steps and matrices are those of vLLM's shape calculator."""
    assert expected == state_of(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DELTA, None),
        ({**DELTA, "mamba_ssm_dtype": "float32"}, "float32"),
        (BAMBA, None),
        (NEMOTRON, "float32"),
        ({**NEMOTRON, "model_type": "nemotron_h_puzzle"}, "float32"),
        ({**NEMOTRON, "mamba_ssm_cache_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_format_of_a_state(config: dict[str, Any], expected: str | None) -> None:
    """The config's, the family's, or else the model's own (None)."""
    assert expected == parse_architecture(config).state_dtype
