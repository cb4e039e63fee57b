"""Configs of families with states that are refused: sizes that no model has, layers not told; what is just read."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from tests.unit.kv.families.reading import refused
from tests.unit.kv.hybrids import (
    GRANITE,
    KIMI,
    LING,
    NEMOTRON,
    ZAMBA,
    without,
)

LAYERS = 1024


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
        (without(LING, "layer_group_size"), "layer_group_size"),
    ],
)
def test_hybrids_that_do_not_tell_their_layers_are_refused(config: dict[str, Any], field: str) -> None:
    """What tells layers with a state from others must be there, and be known."""
    assert field == refused(config)


@pytest.mark.parametrize("pattern", ["M" * LAYERS, "1000 mamba2 + 24 attention"])
def test_the_longest_patterns_are_read(pattern: str) -> None:
    """1,024 layers are the most, in letters or in words."""
    assert LAYERS == parse_architecture({**NEMOTRON, "hybrid_override_pattern": pattern}).depth
