"""Families with latent attention: one row per token, and which layers have a sparse indexer beside it."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.latent import latent
from kvdiag.kv.families.registry import FAMILIES
from kvdiag.kv.layout.layers import AttentionLayer, LatentLayer
from tests.unit.kv.families.reading import refused

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
}
# The widths of DeepSeek V3.2's indexer: 128 bytes and one fp32 scale.
SPARSE = {**DEEPSEEK, "index_topk": 2048, "index_head_dim": 128}
LONGCAT = {**DEEPSEEK, "model_type": "longcat_flash", "num_layers": 3}


def rows(config: dict[str, Any]) -> list[tuple[int, int, int | None]]:
    """Index, latent size and indexer row of each layer."""
    layers = [layer for layer in parse_architecture(config).layers if isinstance(layer, LatentLayer)]
    return [(layer.index, layer.latent_size, layer.indexer_row_bytes) for layer in layers]


def owners(config: dict[str, Any]) -> str:
    """An I for each layer with an indexer of its own, a dash for each that reuses another's selection."""
    return "".join("I" if row is not None else "-" for _, _, row in rows(config))


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family is latent])
def test_a_latent_row_is_the_rank_and_the_part_with_rope(model_type: str) -> None:
    """32 + 8, whatever the heads are."""
    config = {**DEEPSEEK, "model_type": model_type, "index_topk": None}

    assert [(index, 40, None) for index in range(6)] == rows(config)
    assert 6 == parse_architecture(config).attention_heads


def test_a_row_without_rope_is_the_rank_alone() -> None:
    """A rope part of nothing is a size, not a missing field."""
    assert {32} == {size for _, size, _ in rows({**DEEPSEEK, "qk_rope_head_dim": 0})}


def test_longcat_has_two_sublayers_in_every_layer() -> None:
    """Both of a decoder layer's caches lie on the stage that has the layer."""
    architecture = parse_architecture(LONGCAT)

    assert [(index, 40, None) for index in (0, 0, 1, 1, 2, 2)] == rows(LONGCAT)
    assert (3, 6) == (architecture.depth, architecture.attention_heads)


def test_an_ocr_model_without_latent_queries_keeps_heads() -> None:
    """DeepSeek-OCR states both parts as 0: 2 KV heads of 96 / 6."""
    config = {**DEEPSEEK, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}
    architecture = parse_architecture(config)

    heads = [(layer.kv_heads, layer.head_size) for layer in architecture.layers if isinstance(layer, AttentionLayer)]
    assert [(2, 16)] * 6 == heads
    assert 6 == architecture.attention_heads


@pytest.mark.parametrize(("width", "row"), [(64, 64), (127, 127), (128, 132), (256, 264)])
def test_an_indexer_row_has_a_scale_for_each_128_bytes(width: int, row: int) -> None:
    """A byte per element and four more per full 128 (DeepSeek V3.2: 132)."""
    assert [(0, 40, row), (1, 40, row)] == rows({**SPARSE, "num_hidden_layers": 2, "index_head_dim": width})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "IIIIII"),
        # Every third, counted from the layer before the offset: layers 0 to offset - 1 always.
        ({"index_topk_freq": 3}, "II--I-"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, "III--I"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, "--I--I"),
        ({"index_topk_pattern": "FSSFSS"}, "I--I--"),
        ({"index_topk_pattern": ["F", "S"]}, "I-IIII"),
        ({"index_topk_pattern": "S" * 1024}, "------"),
        ({"index_topk": None}, "------"),
    ],
)
def test_which_layers_own_an_indexer(change: dict[str, Any], expected: str) -> None:
    """A pattern says S where a layer reuses a selection; else one in index_topk_freq has its own."""
    assert expected == owners({**SPARSE, **change})


@pytest.mark.parametrize(("drafts", "row"), [(0, None), (1, None), (64, None), (2, 132)])
def test_draft_layers_are_latent_too(drafts: int, row: int | None) -> None:
    """Multi-token prediction adds layers with the model's own row; the last stage has them."""
    config = {**(DEEPSEEK if row is None else SPARSE), "num_nextn_predict_layers": drafts}
    layers = parse_architecture(config).draft_layers

    assert [(5, 40, row)] * drafts == [
        (layer.index, layer.latent_size, layer.indexer_row_bytes) for layer in layers if isinstance(layer, LatentLayer)
    ]
    assert () == parse_architecture(DEEPSEEK).draft_layers


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**DEEPSEEK, "model_type": "sarvam_mla", "kv_lora_rank": None}, "kv_lora_rank"),
        ({**DEEPSEEK, "model_type": "sarvam_mla", "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({**SPARSE, "index_head_dim": None}, "index_head_dim"),
        ({**SPARSE, "index_topk_pattern": "S" * 1025}, "index_topk_pattern"),
        ({**LONGCAT, "num_layers": None}, "num_layers"),
    ],
)
def test_latent_sizes_that_cannot_be_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    """Too many, too few, or missing."""
    assert field == refused(config)
