"""Configs of families with layers that keep a state, and the state where it stands beside its config.

The sizes, in data/hybrids.json, are small and unlike each other; each state is worked out as the shapes of vLLM's
mamba_utils.py::MambaStateShapeCalculator.
"""

import json
from typing import Any

from kvdiag.kv.layout.state_layers import StateShape
from tests.unit.kv.vectors import DATA

CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "hybrids.json").read_text())
(
    ATTENTION, DELTA, OLMO, JAMBA, MAMBA, MAMBA_2, GRANITE, BAMBA, FALCON, ZAMBA, NEMOTRON, LFM, KIMI, BAILING, LING
) = CONFIGS.values()  # fmt: skip
# K and Q of 2 heads of 5 and V of 6 heads of 7 go through the convolution.
DELTA_STATE = StateShape(
    conv_channels=2 * 5 * 2 + 7 * 6,
    conv_steps=2,
    drafts_lengthen_conv=True,
    recurrent_heads=6,
    recurrent_head_elements=7 * 5,
)
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
LFM_STATE = StateShape(
    conv_channels=64, conv_steps=3, drafts_lengthen_conv=False, recurrent_heads=0, recurrent_head_elements=0
)


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    """The config less these fields."""
    return {name: value for name, value in config.items() if name not in fields}
