"""Quantization as configs declare it: bits per weight, layers left in 16 bits, and published checkpoint sizes."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.weights.checkpoint import weights_from_config
from kvdiag.kv.weights.linear_layers import Linear
from kvdiag.kv.weights.module_names import parse_module_names, spellings
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import (
    LINEAR_BITS,
    Quantization,
    WeightFormat,
    declared_quantization,
    parse_weight_format,
    usual_quantization,
)
from tests.unit.kv.models import served

# What Kimi-K2-Thinking and K2.5 leave in 16 bits.
KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:vision_tower.*",
]


def declared(**quantization: Any) -> Quantization:
    """The quantization of a config with these settings."""
    return declared_quantization({"quantization_config": quantization})


def compressed(ignore: tuple[str, ...] = (), targets: tuple[str, ...] = ("Linear",), **weights: Any) -> Quantization:
    """A compressed-tensors config with one group of layers."""
    groups = {"group_0": {"targets": list(targets), "weights": weights}}
    return declared(quant_method="compressed-tensors", config_groups=groups, ignore=list(ignore))


def stored_bits(quantization: Quantization, name: str, index: int = 3) -> float:
    """Bits per weight of one linear layer."""
    return quantization.bits(index, Linear(name=name, parameters=1))


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
        (
            "llama_70b",
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            39.5,
        ),
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

    (rank,) = weights_from_config(
        count_parameters(config, architecture),
        quantization=declared_quantization(config),
        tensor_parallel=1,
        stage_ends=[architecture.depth],
    )

    assert gigabytes == pytest.approx(rank.weights_bytes / 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "mxfp8"}, 8.25),
        ({"quant_method": "awq", "bits": 4}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, 4 + 16 / 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 20 / 32),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, 3 + 19 / 128),
        ({"quant_method": "gptq", "bits": 2, "group_size": 64}, 2 + 18 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True}, 8),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True}, 4 + 8 / 64 + 32 / (64 * 256)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, 4.125),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, 8 + 32 / 16384),
        ({"quant_method": "modelopt_mxfp8"}, 8.25),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, 8),
    ],
)
def test_bits_follow_the_settings(quantization: dict[str, Any], bits: float) -> None:
    """Group size, zero points, block scales and double quantization are those of the config."""
    assert bits == declared(**quantization).linear_bits


@pytest.mark.parametrize(
    ("weights", "bits"),
    [
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, 8),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, 8),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, 8 + 32 / 16384),
        ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}, 8.25),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, 4.125),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}, 4.625),
        ({"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}, 4),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, 4.5),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, 4.25),
    ],
)
def test_bits_of_compressed_tensors(weights: dict[str, Any], bits: float) -> None:
    """num_bits, type, strategy, group_size and symmetric each count."""
    assert bits == compressed(**weights).linear_bits


def test_groups_of_layers_have_bits_of_their_own() -> None:
    """With experts in 4 bits, attention in 8 and nothing said of the rest, the rest stays in 16."""
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
    }
    quantization = declared(quant_method="compressed-tensors", config_groups=groups)

    names = ("self_attn.q_proj", "mlp.experts.0.down_proj", "mlp.down_proj")
    assert [8, 4.5, 16] == [stored_bits(quantization, name) for name in names]


def test_layers_of_their_own_settings_in_gptq() -> None:
    """GPTQModel's `dynamic` leaves layers in 16 bits or gives them more; AutoRound's `extra_config` names them."""
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    dynamic = {"-:.*shared_expert.*": {}, "+:.*down_proj.*": {"bits": 8}, "lm_head": {}}
    extra = {"model.layers.3.self_attn.q_proj": {"bits": 16, "data_type": "fp"}}

    quantization = declared(**settings, dynamic=dynamic, extra_config=extra)

    assert [16, 8 + 24 / 128, 4 + 20 / 128, 16, 4 + 20 / 128, 4 + 20 / 128] == [
        stored_bits(quantization, "mlp.shared_experts.gate_proj"),
        stored_bits(quantization, "mlp.down_proj"),
        stored_bits(quantization, "mlp.gate_proj"),
        stored_bits(quantization, "self_attn.q_proj"),
        stored_bits(quantization, "self_attn.q_proj", index=4),
        quantization.head_bits,
    ]


def test_mxfp4_is_for_experts() -> None:
    """gpt-oss quantizes experts alone, and pads them."""
    quantization = declared(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])

    assert (4.25, 16, True) == (
        stored_bits(quantization, "mlp.experts.0.gate_proj"),
        stored_bits(quantization, "self_attn.q_proj"),
        quantization.padded_experts,
    )


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("self_attn", {"self_attn.o_proj"}),
        ("*self_attn*", {"self_attn.o_proj"}),
        ("model.layers.*.self_attn", {"self_attn.o_proj"}),
        ("model.layers.3.self_attn*", {"self_attn.o_proj"}),
        ("model.layers.3.self_attn.o_proj", {"self_attn.o_proj"}),
        ("language_model.model.layers.3.self_attn", {"self_attn.o_proj"}),
        ("model.layers.4.self_attn*", set()),
        ("model.layers.33*", set()),
        ("re:.*self_attn.*", {"self_attn.o_proj"}),
        ("re:model.layers.3.self_attn", {"self_attn.o_proj"}),
        ("re:language_model.model.layers.3.self_attn", {"self_attn.o_proj"}),
        ("re:.*layers\\.\\d+\\.self_attn.*", {"self_attn.o_proj"}),
        ("re:.*layers\\.(0|3)\\.self_attn.*", {"self_attn.o_proj"}),
        ("re:.*layers\\.(0|1)\\.self_attn.*", set()),
        ("gate", set()),
        ("mlp.gate.", set()),
        ("re:.*mlp.gate$", set()),
        ("lm_head", set()),
        ("shared_expert", {"mlp.shared_experts.down_proj"}),
        ("*.mlp.shared_experts.*", {"mlp.shared_experts.down_proj"}),
        ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", {"mlp.gate_proj"}),
        ("model.layers.3.mlp.gate_up_proj", {"mlp.gate_proj"}),
        ("mlp", {"mlp.gate_proj", "mlp.shared_experts.down_proj", "mlp.experts.0.down_proj"}),
        (
            "model.layers.3.",
            {"self_attn.o_proj", "mlp.gate_proj", "mlp.shared_experts.down_proj", "mlp.experts.0.down_proj"},
        ),
    ],
)
def test_names_of_layers_left_alone(entry: str, left: set[str]) -> None:
    """Parts of names, wildcards and expressions mean what each tool means by them, and no more."""
    names = ("self_attn.o_proj", "mlp.gate_proj", "mlp.shared_experts.down_proj", "mlp.experts.0.down_proj")
    module_names = parse_module_names([entry], field="ignore")

    assert left == {name for name in names if module_names.match(3, name)}


@pytest.mark.parametrize(
    "key", ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"]
)
def test_every_tool_has_a_list_of_its_own(key: str) -> None:
    """The list of layers left in 16 bits is read under each of its names."""
    quantization = declared(quant_method="fp8", **{key: ["self_attn"]})

    assert (16, 8) == (stored_bits(quantization, "self_attn.q_proj"), stored_bits(quantization, "mlp.down_proj"))


def test_lists_of_every_expert_are_read() -> None:
    """A list may name each linear layer of each expert; the first one stands for all."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(40) for expert in range(256)]
    quantization = declared(quant_method="fp8", ignore=names)

    assert (16, 8) == tuple(stored_bits(quantization, "mlp.experts.0.down_proj", index) for index in (39, 40))


def test_other_families_names_are_known() -> None:
    """A block of Mixtral or Nemotron-H goes by another name."""
    assert {"mlp.down_proj", "block_sparse_moe.down_proj", "mixer.down_proj"} <= set(spellings("mlp.down_proj"))


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "squeeze9"}, "quant_method"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": 1}, "bits"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "awq", "w_bit": 6}, "w_bit"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 5}}}, "dynamic.+:.*down.*.bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "ignored_layers": ["re:(a+)+$"]}, "ignored_layers"),
        ({"quant_method": "fp8", "ignored_layers": ["re:((a"]}, "ignored_layers"),
        ({"quant_method": "fp8", "ignored_layers": [f"re:.*a.*b.*c.*{one}" for one in range(33)]}, "ignored_layers"),
        ({"quant_method": "fp8", "ignored_layers": [f"re:.*layers.*a.*{one}" for one in range(5)]}, "ignored_layers"),
        ({"quant_method": "fp8", "ignored_layers": [f"*a{one}*" for one in range(33)]}, "ignored_layers"),
        ({"quant_method": "fp8", "ignored_layers": ["*a*b*c*d*e*"]}, "ignored_layers"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo"),
        ({"quant_method": "modelopt_mixed"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "FP7"}, "quant_algo"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 5}}}},
            "config_groups.a.weights.num_bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 6, "type": "float"}}},
            },
            "config_groups.a.weights.num_bits",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "x"}}}},
            "config_groups.a.weights.type",
        ),
    ],
)
def test_what_cannot_be_counted_names_its_field(quantization: dict[str, Any], field: str) -> None:
    """A format that is not known is an error that names the field and what to pass instead."""
    with pytest.raises(KvModelError) as caught:
        declared(**quantization)

    assert f"quantization_config.{field}" == caught.value.field


def test_a_text_config_may_declare_it() -> None:
    """Multimodal checkpoints keep the declaration beside the language model."""
    config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}

    assert (8, 16) == (declared_quantization(config).linear_bits, declared_quantization({}).linear_bits)


def test_names_alone_stand_for_usual_settings() -> None:
    """--weights FORMAT takes the usual groups, and quantizes unless it is 16 bits or wider."""
    quantizing = {one for one in WeightFormat if usual_quantization(one).quantizes}

    assert (set(WeightFormat) - {WeightFormat.BF16, WeightFormat.FP32}, LINEAR_BITS[WeightFormat.AWQ]) == (
        quantizing,
        usual_quantization(WeightFormat.AWQ).linear_bits,
    )


def test_weight_format_names() -> None:
    """Short names mean their format, auto none, and an unknown one is an error."""
    assert (WeightFormat.INT8, None) == (parse_weight_format("w8a8"), parse_weight_format("auto"))
    with pytest.raises(KvModelError):
        parse_weight_format("int3")
