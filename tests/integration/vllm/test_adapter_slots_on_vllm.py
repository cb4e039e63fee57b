"""The bytes of LoRA slots against those that vLLM 0.32's manager allocates."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.weights.adapter_slots import adapter_slots

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("adapter_slots.py")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64}


def case(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A case with the usual settings where none is given."""
    return {"config": config, "max_loras": 3, "max_lora_rank": 16, "lora_dtype": "auto", **settings}


CASES = {
    "llama": case(LLAMA),
    "llama, tied": case(LLAMA | {"tie_word_embeddings": True}),
    "llama, one of rank 256": case(LLAMA, max_loras=1, max_lora_rank=256, lora_dtype="float16"),
    "mistral": case(LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}),
    "qwen2": case(LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    "qwen3": case(QWEN3),
}


@pytest.mark.parametrize("name", CASES)
def test_slots_are_as_large_as_the_engines(name: str, engine_figures: dict[str, dict[str, Any]]) -> None:
    """On one rank, of each class that is known."""
    given = CASES[name]
    config = given["config"]
    slots = adapter_slots(
        config,
        parse_architecture(config),
        count=given["max_loras"],
        rank=given["max_lora_rank"],
        dtype=given["lora_dtype"],
    )

    assert (engine_figures[name]["bytes"],) == slots.stage_bytes(1, (config["num_hidden_layers"],))
