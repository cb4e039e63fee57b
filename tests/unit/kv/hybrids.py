"""Configs of families with layers that keep a state, and the state where it stands beside its config.

The sizes are small and unlike each other; each state is worked out as the shapes of vLLM's
mamba_utils.py::MambaStateShapeCalculator.
"""

from __future__ import annotations

from typing import Any

from kvdiag.kv.layout.state_layers import StateShape

ATTENTION = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {
    **ATTENTION,
    "model_type": "qwen3_next",
    "num_hidden_layers": 9,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
# K and Q of 2 heads of 5 and V of 6 heads of 7 go through the convolution.
DELTA_STATE = StateShape(
    conv_channels=2 * 5 * 2 + 7 * 6,
    conv_steps=2,
    drafts_lengthen_conv=True,
    recurrent_heads=6,
    recurrent_head_elements=7 * 5,
)
OLMO = {**ATTENTION, "model_type": "olmo_hybrid", "num_hidden_layers": 6}
JAMBA = {
    **ATTENTION,
    "model_type": "jamba",
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_expand": 3,
    "mamba_d_state": 5,
    "mamba_d_conv": 6,
}
MAMBA = {"model_type": "mamba", "num_hidden_layers": 3, "hidden_size": 64, "expand": 3, "state_size": 5}
MAMBA_2 = {
    "model_type": "mamba2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "expand": 3,
    "num_heads": 8,
    "head_dim": 24,
    "state_size": 5,
    "n_groups": 2,
    "conv_kernel": 6,
}
# 3 x 64 channels, and B and C of 5 for each of 2 groups.
MAMBA_2_STATE = StateShape(
    conv_channels=192,
    conv_steps=5,
    drafts_lengthen_conv=True,
    recurrent_heads=8,
    recurrent_head_elements=24 * 5,
    conv_groups=2,
    conv_group_channels=10,
    prefill_checkpoints=1,
)
PREFIXED = {
    **ATTENTION,
    "mamba_expand": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 6,
}
GRANITE = {
    **PREFIXED,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "linear_attention", "full_attention", "mamba"],
}
BAMBA = {**PREFIXED, "model_type": "bamba", "attn_layer_indices": [1, 4]}
FALCON = {**PREFIXED, "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 192}
ZAMBA = {
    "model_type": "zamba2",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "mamba_expand": 3,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 6,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hybrid_override_pattern": "M-M*|E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "ssm_state_size": 5,
    "n_groups": 2,
    "conv_kernel": 6,
}
LFM = {**ATTENTION, "model_type": "lfm2", "full_attn_idxs": [0, 3], "conv_L_cache": 4}
LFM_STATE = StateShape(
    conv_channels=64, conv_steps=3, drafts_lengthen_conv=False, recurrent_heads=0, recurrent_head_elements=0
)
KIMI: dict[str, Any] = {
    **ATTENTION,
    "model_type": "kimi_linear",
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "linear_attn_config": {"kda_layers": [1, 2, 4], "num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 6},
}
BAILING = {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 5,
    "layer_group_size": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
}
LING = {**BAILING, "short_conv_kernel_size": 6}


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    """The config less these fields."""
    return {name: value for name, value in config.items() if name not in fields}
