"""Weight bytes, from parameter counts and from checkpoint headers."""

import json
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.weights.checkpoint import read_headers, weights_from_config, weights_from_tensors
from kvdiag.kv.weights.linear_layers import Parameters
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import WeightFormat, declared_quantization, usual_quantization
from tests.unit.kv.models import catalogue, served

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

    assert gib == pytest.approx(weights[0].weights_bytes / GIB, rel=0.025)


def test_stages_add_up_to_the_model() -> None:
    """Two stages hold what one rank held, each its own layers."""
    architecture, parameters = counted("llama_7b")
    whole = weights_from_config(
        parameters,
        quantization=usual_quantization(WeightFormat.BF16),
        tensor_parallel=1,
        stage_ends=[architecture.depth],
    )
    halves = weights_from_config(
        parameters, quantization=usual_quantization(WeightFormat.BF16), tensor_parallel=1, stage_ends=[16, 32]
    )

    assert whole[0].weights_bytes == sum(stage.weights_bytes for stage in halves)


def test_a_tied_output_layer_is_stored_again_on_the_last_stage() -> None:
    """A tied embedding is on the first and the last stage."""
    _, parameters = counted("llama-3.2-1b")
    halves = weights_from_config(
        parameters, quantization=usual_quantization(WeightFormat.BF16), tensor_parallel=1, stage_ends=[8, 16]
    )

    assert halves[0].weights_bytes == halves[1].weights_bytes


HEADER = {
    "__metadata__": {"format": "pt"},
    "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1000, 64], "data_offsets": [0, 128_000]},
    "model.layers.0.self_attn.q_proj.weight": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192]},
    "model.layers.0.self_attn.k_proj.weight": {"dtype": "BF16", "shape": [16, 64], "data_offsets": [0, 2048]},
    "model.layers.0.input_layernorm.weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]},
    "model.layers.1.mlp.down_proj.weight": {"dtype": "F8_E4M3", "shape": [64, 256], "data_offsets": [0, 16_384]},
    "lm_head.weight": {"dtype": "BF16", "shape": [1000, 64], "data_offsets": [0, 128_000]},
}


def test_headers_add_up() -> None:
    """The bytes of a checkpoint are those of its tensors, metadata apart."""
    tensors = read_headers([HEADER])
    weights = weights_from_tensors(tensors, tensor_parallel=1, stage_ends=[2])

    assert 128_000 + 8192 + 2048 + 128 + 16_384 + 128_000 == weights[0].weights_bytes


def test_headers_are_divided_as_layers_are() -> None:
    """Norms are on every rank, a single KV head's projection too, the rest is divided."""
    tensors = read_headers([HEADER])
    weights = weights_from_tensors(tensors, tensor_parallel=4, stage_ends=[2], kv_heads=1)

    assert (128_000 + 8192 + 16_384 + 128_000) // 4 + 2048 + 128 == weights[0].weights_bytes


def test_headers_are_staged_by_layer_number() -> None:
    """The embedding goes to the first stage, the output layer to the last, layers to their own."""
    tensors = read_headers([HEADER])
    weights = weights_from_tensors(tensors, tensor_parallel=1, stage_ends=[1, 2])

    assert [128_000 + 8192 + 2048 + 128, 16_384 + 128_000] == [stage.weights_bytes for stage in weights]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 9]},
        {"dtype": "BF17", "shape": [2, 2], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [-1, 2], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": "2x2", "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [1] * 9},
        "not an object",
    ],
)
def test_headers_that_lie_are_refused(entry: Any) -> None:
    """A tensor whose type, shape or place is impossible is an error that names it."""
    with pytest.raises(KvModelError) as caught:
        read_headers([{"model.weight": entry}])

    assert caught.value.field.startswith("model.weight")


def test_empty_headers_are_refused() -> None:
    """A checkpoint without tensors has no size."""
    with pytest.raises(KvModelError):
        read_headers([{"__metadata__": {}}])


def test_a_config_without_sizes_names_the_one_that_is_missing() -> None:
    """Counting needs the vocabulary."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    with pytest.raises(KvModelError) as caught:
        count_parameters(config, parse_architecture(config))

    assert "vocab_size" == caught.value.field


def test_formats_order_by_size() -> None:
    """No format of fewer bits gives more bytes."""
    architecture, parameters = counted("llama-3.1-8b")
    sizes = [
        weights_from_config(
            parameters,
            quantization=usual_quantization(weight_format),
            tensor_parallel=1,
            stage_ends=[architecture.depth],
        )[0].weights_bytes
        for weight_format in (
            WeightFormat.INT4,
            WeightFormat.NVFP4,
            WeightFormat.INT8,
            WeightFormat.FP8,
            WeightFormat.BF16,
            WeightFormat.FP32,
        )
    ]

    assert sorted(sizes) == sizes


def test_the_catalogue_can_be_weighed() -> None:
    """Every model of the catalogue has a layout and a parameter count."""
    for name in catalogue().names:
        _, parameters = counted(name)

        assert parameters.total > 1e8, json.dumps(name)
