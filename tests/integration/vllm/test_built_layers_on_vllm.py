"""Models that vLLM cannot build of a config class's defaults, against those that it builds of whole configs."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment
from tests.integration.vllm.spec_cases import own_figures

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("built_specs.py")
# transformers has no class for it: fields are read from that of the type that is named.
PANGU = {
    "model_type": "llama",
    "architectures": ["PanguProMoEV2ForCausalLM"],
    "num_hidden_layers": 5,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "qk_nope_dim": 128,
    "qk_rope_dim": 64,
    "v_channels": 128,
    "param_sink_number": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 131_072,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
WINDOWED_PANGU = PANGU | {"interleaved_sliding_window": [512, None], "v_channels": 64, "num_hidden_layers": 4}
DENOISING_TEXT = {
    "model_type": "diffusion_gemma_text",
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
    "vocab_size": 1000,
}
DENOISING = {
    "model_type": "diffusion_gemma",
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "dtype": "bfloat16",
    "vision_config": None,
    "text_config": DENOISING_TEXT,
}
# As transformers writes it.
OWN_HEADS = DENOISING | {
    "text_config": DENOISING_TEXT | {"per_layer_config": {"05": {"head_dim": 384}, "11": {"head_dim": 384}}}
}
GEMMA = DENOISING_TEXT | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "per_layer_config": {"05": {"head_dim": 384, "num_key_value_heads": 8}, "11": {"head_dim": 384}},
}
DEFAULT_HEADS = DENOISING | {
    "text_config": {
        key: value for key, value in DENOISING_TEXT.items() if key not in ("num_global_key_value_heads", "head_dim")
    }
}


def case(module: str, config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A case with the usual settings where none is given."""
    usual = {"context": 100_000, "in_flight": 16_384, "pool_bytes": 10 << 30, "block_size": 32, "ranks": 1}
    return {"module": module, "config": config, "kv_dtype": "auto", **usual, **settings}


CASES = {
    "pangu": case("openpangu", PANGU),
    "pangu, two ranks": case("openpangu", PANGU, ranks=2, block_size=128),
    "pangu, fp8": case("openpangu", PANGU, kv_dtype="fp8"),
    "denoising": case("gemma4", DENOISING),
    "denoising, two ranks": case("gemma4", DENOISING, ranks=2, block_size=64, context=30_000),
    "denoising, heads of its layers": case("gemma4", OWN_HEADS, in_flight=4_096),
    "denoising, default heads": case("gemma4", DEFAULT_HEADS, pool_bytes=(7 << 30) + 12_345),
    "gemma 4, heads of its layers": case("gemma4", GEMMA),
    "pangu, windows": case("openpangu", WINDOWED_PANGU, block_size=64, pool_bytes=(3 << 30) + 54_321),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_and_capacity_are_the_engines_own(name: str, engine_figures: dict[str, dict[str, Any]]) -> None:
    """Of the layers that the engine's model makes of the same config."""
    given = CASES[name]
    named = given["config"]["model_type"] != "llama"
    config = {key: value for key, value in given["config"].items() if named or key != "model_type"}
    architecture = parse_architecture(config)
    deployment = Deployment(
        tensor_parallel=given["ranks"],
        block_size_tokens=given["block_size"],
        kv_dtype=given["kv_dtype"],
        max_in_flight_tokens=given["in_flight"],
    )
    assert engine_figures[name] == own_figures(given, architecture, deployment)
