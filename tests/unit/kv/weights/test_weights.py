"""Parameter counts and weight bytes against model cards and published logs."""

import json
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.weights.checkpoint import weights_from_config
from kvdiag.kv.weights.linear_layers import Parameters
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import WeightFormat, declared_quantization, usual_quantization
from tests.unit.kv.models import catalogue, served
from tests.unit.kv.refused import refused

GIB = 1 << 30
# Published parameter counts (model cards), in billions.
PUBLISHED = {
    "llama_7b": 6.74,
    "llama_13b": 13.02,
    "llama_70b": 70.55,
    "mixtral_8x7b": 46.70,
    "llama-3.1-8b": 8.03,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.62,
    "qwen3-0.6b": 0.596,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "qwen3-next-80b-a3b": 79.67,
    "deepseek-v2-lite": 15.71,
    "deepseek-v3": 671.03,
    "kimi-k2": 1026.41,
    "minimax-m2.5": 228.69,
    "gemma-3-27b": 27.01,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "phi-4": 14.66,
    "nemotron-3-nano-30b-a3b": 31.58,
    "nemotron-nano-9b-v2": 8.89,
    "lfm2-1.2b": 1.17,
    "lfm2-2.6b": 2.57,
    "whisper-large-v3": 1.54,
}
# "Model loading took X GiB" of published logs, each with its row of the dataset.
LOGGED = [
    ("llama-3.1-8b", None, 1, 14.9888),
    ("llama-3.1-8b", WeightFormat.NVFP4, 1, 5.6473),
    ("llama_70b", WeightFormat.AWQ, 1, 37.09),
    ("llama_70b", WeightFormat.FP8, 4, 16.9619),
    ("qwen2.5-14b", None, 2, 13.9476),
    ("qwen3-30b-a3b", None, 4, 14.27),
    ("qwen3-8b", None, 1, 15.2683),
    ("opt-6.7b", None, 1, 12.4),
    ("gpt-oss-120b", WeightFormat.MXFP4, 1, 65.9651),
    ("whisper-large-v3", None, 1, 2.88),
    ("granite-4.0-h-1b", None, 1, 2.72),
    ("qwen3-4b", None, 1, 7.56),
    ("llama_7b", None, 1, 12.5523),
    ("deepseek-v3", WeightFormat.FP8, 8, 79.739),
]


def counted(name: str) -> tuple[Architecture, Parameters]:
    """The architecture and parameters of a catalogue model."""
    config = served(name).config
    architecture = parse_architecture(config)
    return architecture, count_parameters(config, architecture)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_equal_the_published_count(name: str, billions: float) -> None:
    """The count from the config is the model card's, to its last digit and half a percent at most."""
    _, parameters = counted(name)

    assert billions == pytest.approx(parameters.total / 1e9, rel=0.005)


@pytest.mark.parametrize(("name", "weight_format", "ranks", "gib"), LOGGED)
def test_weight_bytes_are_those_that_engines_log(
    name: str, weight_format: WeightFormat | None, ranks: int, gib: float
) -> None:
    """Weights per rank lie within 2.5 % of what vLLM logged for loading that model in that format."""
    architecture, parameters = counted(name)
    chosen = declared_quantization(served(name).config) if weight_format is None else usual_quantization(weight_format)

    weights = weights_from_config(
        parameters, quantization=chosen, tensor_parallel=ranks, stage_ends=[architecture.depth]
    )

    assert gib == pytest.approx(weights[0] / GIB, rel=0.025)


def test_a_config_without_sizes_names_the_one_that_is_missing() -> None:
    """Counting needs the vocabulary."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    with refused("vocab_size"):
        count_parameters(config, parse_architecture(config))


def test_the_catalogue_can_be_weighed() -> None:
    """Every model of the catalogue has a layout and a parameter count."""
    for name in catalogue().names:
        _, parameters = counted(name)

        assert parameters.total > 1e8, json.dumps(name)


def test_a_published_config_without_heads_and_vocabulary_has_weights() -> None:
    """gemma-3-4b-it leaves both to its class: 4.3 billion parameters by its card."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    config = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}, "vision_config": vision}

    assert pytest.approx(4.3, rel=0.025) == count_parameters(config, parse_architecture(config)).total / 1e9


# What Kimi-K2-Thinking and K2.5 leave in 16 bits.
KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:vision_tower.*",
]


@pytest.mark.parametrize(
    ("name", "quantization", "gigabytes"),
    [
        (
            "kimi-k2",
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
                    }
                },
                "ignore": KIMI_IGNORE,
            },
            595,
        ),
        (
            "deepseek-v3",
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", *(f"model.layers.{index}.self_attn*" for index in range(61)), "model.layers.61*"],
            },
            397,
        ),
        ("llama_70b", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, 42.9),
        ("llama_70b", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 39.8),
        ("llama_70b", {"quant_method": "fp8"}, 72.7),
        ("llama_70b", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 39.5),
        (
            "minimax-m2.5",
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            },
            230,
        ),
    ],
)
def test_checkpoints_have_their_published_size(name: str, quantization: dict[str, Any], gigabytes: float) -> None:
    """The config's own settings give the size that the Hub shows, to 3 %."""
    config = {**served(name).config, "quantization_config": quantization}
    architecture = parse_architecture(config)

    (size,) = weights_from_config(
        count_parameters(config, architecture),
        quantization=declared_quantization(config),
        tensor_parallel=1,
        stage_ends=[architecture.depth],
    )

    assert gigabytes == pytest.approx(size / 1e9, rel=0.03)
