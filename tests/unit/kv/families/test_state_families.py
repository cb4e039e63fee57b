"""Families with layers that keep a state: which layers those are, and what lies beside them."""

from __future__ import annotations

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, LayerKind
from tests.unit.kv.hybrids import (
    ATTENTION,
    BAILING,
    BAMBA,
    DELTA,
    FALCON,
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

LETTERS = {
    LayerKind.FULL: "F",
    LayerKind.SLIDING: "W",
    LayerKind.MLA: "L",
    LayerKind.NO_CACHE: "-",
    LayerKind.GATED_DELTA_NET: "g",
    LayerKind.MAMBA1: "1",
    LayerKind.MAMBA2: "2",
    LayerKind.SHORT_CONV: "c",
    LayerKind.KIMI_DELTA: "k",
    LayerKind.LINEAR: "l",
}


def letters(architecture: Architecture) -> str:
    """A letter for every layer."""
    return "".join(LETTERS[layer.kind] for layer in architecture.layers)


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
    assert expected == letters(parse_architecture(config))


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
