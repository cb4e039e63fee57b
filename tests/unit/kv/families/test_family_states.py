"""What the state of each family is made of, and in what format it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import StateLayer
from kvdiag.kv.layout.state_layers import StateShape
from tests.unit.kv.hybrids import (
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
