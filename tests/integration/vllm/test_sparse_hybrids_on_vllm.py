"""Pools of models with sparse attention and recurrent states against vLLM 0.32's own cache layers and grouping."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.pages import StateCacheMode
from tests.integration.vllm.spec_cases import own_figures

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("sparse_hybrid_specs.py")
# transformers Glm5NextTextConfig's defaults, which are GLM-5.3-Flash's.
GLM = {
    "model_type": "glm5_next_text",
    "architectures": ["Glm5NextForCausalLM"],
    "num_hidden_layers": 45,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_kpool": 16,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "layer_types": [*[*["linear_attention"] * 3, "indexed_attention"] * 11, "linear_attention"],
    "max_position_embeddings": 1_048_576,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
SMALLER = {
    **GLM,
    "num_hidden_layers": 24,
    "linear_num_heads": 32,
    "linear_head_dim": 64,
    "index_kpool": 8,
    "linear_lower_bound": None,
    "layer_types": ["linear_attention", "indexed_attention"] * 12,
}


def case(config: dict[str, Any], **given: Any) -> dict[str, Any]:
    """A case with the usual settings where none is given."""
    usual = {
        "ranks": 1,
        "capability": 90,
        "kv_dtype": "auto",
        "block_size": None,
        "context": 131_072,
        "in_flight": 16_384,
        "pool_bytes": 60 << 30,
        "state_mode": "align",
        "drafts": 0,
        "draft_layers": 0,
    }
    return {"config": config, **usual, **given}


CASES = {
    "glm": case(GLM),
    "glm, 2 ranks": case(GLM, ranks=2),
    "glm, 8 ranks": case(GLM, ranks=8),
    "glm, fp8": case(GLM, kv_dtype="fp8"),
    "glm, packed fp8": case(GLM, kv_dtype="fp8_ds_mla", ranks=4),
    "glm, long": case(GLM, context=1_000_000, ranks=4),
    "glm, blocks of 64": case(GLM, block_size=64, ranks=4),
    "glm, blocks of 6,144": case(GLM, block_size=6_144),
    "glm, no prefix caching": case(GLM, state_mode="none"),
    "glm, mtp": case(GLM, drafts=1, draft_layers=1),
    "glm, long mtp": case(GLM, drafts=3, draft_layers=1, ranks=2),
    "glm on B200": case(GLM, capability=100, ranks=2),
    "glm on B200, fp8": case(GLM, capability=100, ranks=2, kv_dtype="fp8"),
    "glm on desktop Blackwell": case(GLM, capability=120, ranks=4),
    "smaller": case(SMALLER),
    "smaller, fp8": case(SMALLER, kv_dtype="fp8", ranks=2),
    "smaller on B200, fp8": case(SMALLER, kv_dtype="fp8", capability=100),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_groups_and_capacity_are_the_engines_own(name: str, engine_figures: dict[str, dict[str, Any]]) -> None:
    """Block size, groups, blocks, tokens and concurrency, from the config and the flags."""
    given = CASES[name]
    architecture = parse_architecture(given["config"])
    deployment = Deployment(
        tensor_parallel=given["ranks"],
        compute_capability=given["capability"],
        kv_dtype=given["kv_dtype"],
        block_size_tokens=given["block_size"],
        max_in_flight_tokens=given["in_flight"],
        state_cache_mode=StateCacheMode(given["state_mode"]),
        speculative_tokens=given["drafts"],
        draft_layers=architecture.draft_layers[: given["draft_layers"]],
    )
    block_tokens = deployed_layout(architecture, deployment).block_size_tokens
    expected = {"block_size": block_tokens, **own_figures(given, architecture, deployment)}
    assert engine_figures[name] == expected
