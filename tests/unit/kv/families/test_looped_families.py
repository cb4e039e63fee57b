"""Families that run their layers several times: each run has caches of its own."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import AttentionLayer
from tests.unit.kv.families.reading import refused

HRM = {
    "model_type": "hrm_text",
    "num_layers_per_stack": 3,
    "num_hidden_layers": 5,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "head_dim": 20,
    "H_cycles": 2,
    "L_cycles": 4,
}
CODER = {
    "model_type": "iquestloopcoder",
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
}


def layers_of(config: dict[str, Any]) -> list[tuple[int, int, int, int | None]]:
    """Index, KV heads, head size and window of each layer."""
    return [
        (layer.index, layer.kv_heads, layer.head_size, layer.window_tokens)
        for layer in parse_architecture(config).layers
        if isinstance(layer, AttentionLayer)
    ]


@pytest.mark.parametrize(
    ("change", "depth"),
    [
        # 2 cycles of the high stack, each after 4 of the low one.
        ({}, 3 * 2 * (4 + 1)),
        ({"num_layers_per_stack": None}, 5 * 2 * (4 + 1)),
        ({"H_cycles": 1, "L_cycles": 1}, 3 * 1 * (1 + 1)),
        # Two and three are the class's.
        ({"H_cycles": None, "L_cycles": None}, 3 * 2 * (3 + 1)),
        ({"num_layers_per_stack": 16, "H_cycles": 32, "L_cycles": 1}, 1024),
    ],
)
def test_hrm_keeps_a_cache_for_every_run_of_a_layer(change: dict[str, Any], depth: int) -> None:
    """Every head keeps its own K and V, whatever num_key_value_heads says."""
    config = {**HRM, "num_key_value_heads": 2, **change}

    assert [(index, 6, 20, None) for index in range(depth)] == layers_of(config)
    assert 6 == parse_architecture(config).attention_heads


@pytest.mark.parametrize("name", ["iquestloopcoder", "iquest_loopcoder"])
def test_loop_coder_attends_to_everything_in_its_first_loop_alone(name: str) -> None:
    """Two loops with a window of 64 unless the config says otherwise; head_dim is not read: 96 / 6."""
    config = {**CODER, "model_type": name}
    more = {**config, "loop_num": 3, "loop_window_size": 8}

    assert [(0, 2, 16, None), (1, 2, 16, None), (0, 2, 16, 64), (1, 2, 16, 64)] == layers_of(config)
    assert [(0, 2, 16, 8), (1, 2, 16, 8)] * 2 == layers_of(more)[2:]
    assert [(0, 2, 16, None), (1, 2, 16, None)] == layers_of({**config, "loop_num": 1})
    assert (2, 6) == (parse_architecture(more).depth, parse_architecture(more).attention_heads)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**HRM, "num_layers_per_stack": 16, "H_cycles": 33, "L_cycles": 1}, "H_cycles"),
        # Six heads of a width of five would have no size.
        ({**CODER, "hidden_size": 5}, "num_attention_heads"),
        ({name: value for name, value in CODER.items() if name != "num_key_value_heads"}, "num_key_value_heads"),
        ({name: value for name, value in CODER.items() if name != "hidden_size"}, "hidden_size"),
    ],
)
def test_loops_that_cannot_be_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    """More layers than are read, or loops of nothing."""
    assert field == refused(config)
