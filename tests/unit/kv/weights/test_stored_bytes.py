"""Bytes of one matrix in every format, by hand: 4,096 inputs and 1,024 outputs, 4,194,304 weights."""

from typing import Any

import pytest

from kvdiag.kv.weights.checkpoint import weights_from_config
from kvdiag.kv.weights.linear_layers import LayerParameters, Linear, Parameters
from kvdiag.kv.weights.quantization import (
    Quantization,
    WeightFormat,
    declared_quantization,
    parse_weight_format,
    usual_quantization,
)
from tests.unit.kv.refused import refused

WEIGHTS = 4096 * 1024
BITS_16, BITS_8, BITS_4 = 2 * WEIGHTS, WEIGHTS, WEIGHTS // 2
# 32 groups of 128 inputs for each output: 16-bit scales, and zero points of four bits.
SCALES, ZEROS = 32 * 1024 * 2, 32 * 1024 // 2
# 32 x 8 blocks of 128 x 128, each with an fp32 scale; a byte for each 16 or 32 weights; an fp32 for each 64.
BLOCKS, PER_16, PER_32, PER_64 = 32 * 8 * 4, WEIGHTS // 16, WEIGHTS // 32, WEIGHTS // 64 * 4


def stored(quantization: Quantization, name: str = "mlp.experts.0.gate_proj", index: int = 0) -> int:
    """Bytes of the matrix under this name, in a model of which it is all."""
    layers = (*[LayerParameters()] * index, LayerParameters((Linear(name, WEIGHTS),)))
    whole = Parameters(embedding=0, head=0, layers=layers)
    (size,) = weights_from_config(whole, quantization=quantization, tensor_parallel=1, stage_ends=[index + 1])
    return size


def declared(**quantization: Any) -> Quantization:
    """What a quantization_config declares."""
    return declared_quantization({"quantization_config": quantization})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", 2 * BITS_16),
        ("bf16", BITS_16),
        ("fp8", BITS_8 + BLOCKS),
        ("int8", BITS_8),
        ("int4", BITS_4 + SCALES),
        ("awq", BITS_4 + SCALES + ZEROS),
        ("gptq", BITS_4 + SCALES + ZEROS),
        ("nvfp4", BITS_4 + PER_16),
        ("mxfp4", BITS_4 + PER_32),
        ("nf4", BITS_4 + PER_64),
        # Other names.
        ("float32", 2 * BITS_16),
        ("fp16", BITS_16),
        ("float16", BITS_16),
        ("bfloat16", BITS_16),
        ("HALF", BITS_16),
        ("w8a8", BITS_8),
        ("w4a16", BITS_4 + SCALES),
        ("bnb", BITS_4 + PER_64),
        ("bitsandbytes", BITS_4 + PER_64),
    ],
)
def test_a_format_by_its_name(name: str, expected: int) -> None:
    """--weights FORMAT stands for its usual groups and scales."""
    weight_format = parse_weight_format(name)
    assert weight_format is not None

    assert expected == stored(usual_quantization(weight_format))


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        *(({"quant_method": name, "bits": 4}, BITS_4 + SCALES + ZEROS) for name in ("awq", "awq_marlin", "auto-awq")),
        *(
            ({"quant_method": name, "bits": 4}, BITS_4 + SCALES + ZEROS)
            for name in ("gptq", "gptq_marlin", "auto-gptq", "auto-round", "intel/auto-round", "inc")
        ),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, BITS_4 + SCALES),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, BITS_4 + 2 * SCALES),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, BITS_8 + 2 * SCALES + 4 * ZEROS),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, BITS_4),
        ({"quant_method": "gptq", "bits": 3}, 3 * WEIGHTS // 8 + SCALES + ZEROS // 4 * 3),
        ({"quant_method": "gptq", "bits": 2, "group_size": 64}, WEIGHTS // 4 + 2 * SCALES + ZEROS),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1}, BITS_4 + 128 * (SCALES + ZEROS)),
        *(({"quant_method": name}, BITS_8) for name in ("fp8", "fbgemm_fp8", "deepspeedfp")),
        ({"quant_method": "FP8", "weight_block_size": [128, 128]}, BITS_8 + BLOCKS),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, BITS_8 + 2 * BLOCKS),
        ({"quant_method": "fp8", "weight_block_size": []}, BITS_8),
        ({"quant_method": "mxfp8"}, BITS_8 + PER_32),
        *(({"quant_method": name}, BITS_4 + PER_32) for name in ("mxfp4", "gpt_oss_mxfp4")),
        ({"quant_method": "bitsandbytes"}, BITS_4 + PER_64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, BITS_8),
        # A byte for each 64 weights, and an fp32 for each 256 of those bytes.
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True},
            BITS_4 + WEIGHTS // 64 + WEIGHTS // 64 // 256 * 4,
        ),
        ({"quant_method": "modelopt"}, BITS_8),
        ({"quant_method": "modelopt_fp4"}, BITS_4 + PER_16),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}},
            BITS_4 + 2 * SCALES,
        ),
        ({"quant_method": "modelopt_mxfp8"}, BITS_8 + PER_32),
        ({"quant_algo": "NVFP4"}, BITS_4 + PER_16),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, BITS_4 + PER_16),
        ({"quant_method": "modelopt", "quantization": {"group_size": 32}, "quant_algo": "NVFP4"}, BITS_4 + PER_16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, BITS_4 + PER_32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 1 << 20}, BITS_4 + 4),
        # Groups are of formats of four bits alone.
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 64}, BITS_8 + PER_32),
    ],
)
def test_a_format_by_its_declaration(quantization: dict[str, Any], expected: int) -> None:
    """Every method's own settings, with what its class takes where they are missing."""
    assert expected == stored(declared(**quantization))


@pytest.mark.parametrize(
    ("expected", "algorithms"),
    [
        (BITS_8, ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16", "W8A16_AWQ", "W8A8_SQ_PER_CHANNEL"]),
        (BITS_8 + BLOCKS, ["FP8_PB_WO", "fp8_pb_wo", "FP8_BLOCK_SCALES", "FP8_PB_REAL"]),
        (BITS_8 + PER_32, ["MXFP8"]),
        (BITS_4 + PER_32, ["MXFP4", "W4A8_MXFP4_FP8"]),
        (BITS_4 + PER_16, ["NVFP4", "NVFP4_AWQ", "NVFP4_SVDQUANT", "W4A16_NVFP4", "W4A8_NVFP4_FP8"]),
        (BITS_4 + SCALES, ["W4A8_AWQ", "W4A16_AWQ", "INT4_AWQ", "w4a16_awq"]),
    ],
)
def test_modelopts_algorithms(expected: int, algorithms: list[str]) -> None:
    """Blocks of 128 x 128, MX groups of 32, NVFP4's of 16, AWQ's of 128 without zero points."""
    assert [expected] * len(algorithms) == [
        stored(declared(quant_method="modelopt", quant_algo=one)) for one in algorithms
    ]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"num_bits": 8}, BITS_8),
        ({"num_bits": 8, "type": "int", "strategy": "channel", "group_size": 128}, BITS_8),
        ({"num_bits": 8, "type": "int", "strategy": "tensor", "group_size": 128}, BITS_8),
        ({"num_bits": 4, "strategy": "group", "group_size": 128}, BITS_4 + SCALES),
        ({"num_bits": 4, "strategy": "group", "group_size": 1}, BITS_4 + 128 * SCALES),
        ({"num_bits": 4, "group_size": 128, "symmetric": False}, BITS_4 + SCALES + ZEROS),
        ({"num_bits": 4, "group_size": -1, "symmetric": False}, BITS_4),
        ({"num_bits": 4, "group_size": 0}, BITS_4),
        ({"num_bits": 4, "strategy": "group", "group_size": 1 << 20}, BITS_4 + 8),
        ({"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}, BITS_4),
        ({"num_bits": 8, "type": "float"}, BITS_8),
        ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}, BITS_8 + PER_32),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, BITS_4 + PER_32),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, BITS_4 + PER_16),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, BITS_8 + BLOCKS),
        ({"num_bits": 8, "type": "float", "strategy": "channel", "block_structure": [128, 128]}, BITS_8),
        ({"num_bits": 4, "type": "float", "group_size": 16}, BITS_4 + PER_16),
        ({"num_bits": 4, "type": "float", "group_size": 1}, BITS_4 + WEIGHTS),
        ({"num_bits": 4, "type": "float", "group_size": 0}, BITS_4),
        ({"num_bits": 4, "type": "float", "group_size": -1}, BITS_4),
    ],
)
def test_a_group_of_compressed_tensors(weights: dict[str, Any], expected: int) -> None:
    """Integers have 16-bit scales, and zero points where they are not symmetric; small floats have scales of a byte."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}

    assert expected == stored(declared(quant_method="compressed-tensors", config_groups=groups))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_declaration_stands_in_one_of_four_places(key: str) -> None:
    """At the top or with the language model, under either name; without any, weights take 16 bits."""
    declaration = {key: {"quant_method": "fp8"}}

    assert BITS_8 == stored(declared_quantization(declaration))
    assert BITS_8 == stored(declared_quantization({"text_config": declaration}))
    assert BITS_16 == stored(declared_quantization({"text_config": {}}))
    assert BITS_16 == stored(declared_quantization({}))


def test_an_output_layer_is_quantized_where_gptq_says_so() -> None:
    """In every other case it has 16 bits, as the embedding has; fp32 is for the whole model."""
    whole = declared(quant_method="gptq", bits=4, lm_head=True)
    wide = usual_quantization(WeightFormat.FP32)

    assert (4 + 20 / 128, 16.0) == (whole.head_bits, whole.plain_bits)
    assert 16.0 == declared(quant_method="gptq", bits=4).head_bits
    assert 16.0 == declared(quant_method="awq", bits=4).head_bits
    assert (32.0, 32.0) == (wide.head_bits, wide.plain_bits)
    assert {WeightFormat.BF16, WeightFormat.FP32} == {
        one for one in WeightFormat if not usual_quantization(one).quantizes
    }


def test_mxfp4_is_for_experts_alone() -> None:
    """What is not an expert stays in 16 bits, by name or declared."""
    for quantization in (usual_quantization(WeightFormat.MXFP4), declared(quant_method="mxfp4")):
        assert BITS_16 == stored(quantization, "mlp.shared_experts.down_proj")
        assert quantization.padded_experts
    assert not usual_quantization(WeightFormat.NVFP4).padded_experts
    assert not declared(quant_method="fp8").padded_experts


def test_layers_with_settings_of_their_own() -> None:
    """GPTQModel's and AutoRound's: the rest of a setting is the whole's; 16 or 32 bits are left alone."""
    dynamic = {
        "-:.*k_proj.*": {},
        "+:.*q_proj.*": {"bits": 8},
        "lm_head": {},
        "+:.*v_proj.*": {"group_size": 64},
        "+:.*down_proj.*": {"desc_act": True},
        "+:.*gate_proj.*": {"bits": 8, "group_size": -1},
        "mlp.experts": None,
    }
    extra = {"model.layers.3.self_attn.o_proj": {"bits": 16}, "model.layers.4.self_attn.o_proj": {"bits": 32}}

    quantization = declared(quant_method="gptq", bits=4, group_size=32, dynamic=dynamic, extra_config=extra)

    usual = BITS_4 + 4 * (SCALES + ZEROS)
    assert {
        "k_proj": BITS_16, "q_proj": BITS_8 + 4 * (SCALES + 2 * ZEROS), "v_proj": BITS_4 + 2 * (SCALES + ZEROS),
        "down_proj": usual, "gate_proj": BITS_8,
    } == {
        name: stored(quantization, f"self_attn.{name}")
        for name in ("k_proj", "q_proj", "v_proj", "down_proj", "gate_proj")
    }  # fmt: skip
    assert [usual, BITS_16, BITS_16] == [stored(quantization, "self_attn.o_proj", index) for index in (2, 3, 4)]


def test_settings_of_a_layer_take_the_usual_group() -> None:
    """Where neither the layer nor the whole has one, it is 128."""
    quantization = declared(quant_method="gptq", bits=4, dynamic={"+:.*q_proj.*": {"bits": 8}})

    assert BITS_8 + SCALES + 2 * ZEROS == stored(quantization, "self_attn.q_proj")


def test_groups_of_layers() -> None:
    """A class of layers, names and expressions; the first group of the class counts, and one without weights does not.

    What no group names keeps 16 bits, and what is to be ignored does in any case.
    """
    eight, four = {"num_bits": 8}, {"num_bits": 4}
    groups: dict[str, Any] = {
        "a": {"targets": ["Linear"]},
        "b": {"targets": ["re:.*q_proj$"], "weights": four},
        "c": None,
        "d": {"weights": eight},
        "e": {"targets": ["Linear"], "weights": four},
        "f": {"targets": ["model.layers.0.self_attn.k_proj"], "weights": four},
    }
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
    whole = declared(quant_method="compressed-tensors", config_groups=groups, ignore=["re:.*o_proj"])
    some = declared(
        quant_method="compressed-tensors", config_groups={name: groups[name] for name in "bf"}, ignore=["q_proj"]
    )

    assert [BITS_4, BITS_4, BITS_16, BITS_8] == [stored(whole, name) for name in names]
    assert [BITS_16, BITS_4, BITS_16, BITS_16] == [stored(some, name) for name in names]


@pytest.mark.parametrize(
    "key", ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"]
)
def test_a_list_of_layers_left_alone_may_stand_deeper(key: str) -> None:
    """ModelOpt keeps it in `quantization`; both are read, and an empty list leaves nothing alone."""
    inner = {"quant_algo": "FP8", key: ["q_proj"]}
    quantization = declared(quant_method="modelopt", quantization=inner, **{key: ["k_proj"]})

    assert [BITS_16, BITS_16, BITS_8] == [stored(quantization, f"self_attn.{one}_proj") for one in "qkv"]
    assert () == declared(quant_method="fp8", **{key: []}).exceptions


def test_a_list_names_at_most_every_matrix_of_every_expert() -> None:
    """262,144 names are read, one more are refused."""
    assert BITS_16 == stored(declared(quant_method="fp8", ignore=["mlp"] * (1 << 18)))
    with refused("quantization_config.ignore"):
        declared(quant_method="fp8", ignore=["mlp"] * ((1 << 18) + 1))


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "x" * 99}, "quant_method"),
        ({}, "quant_method"),
        ({"quant_method": "gptq", "bits": 1}, "bits"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "awq", "w_bit": 6}, "w_bit"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 5}}}, "dynamic.+:.*down.*.bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "ignored_layers": ["re:(a+)+$"]}, "ignored_layers"),
        ({"quant_method": "modelopt_mixed"}, "quant_algo"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(a": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "extra_config": {"re:(a": {"bits": 8}}}, "extra_config"),
        ({"quant_method": "fp8", "weight_block_size": [1, 1, 1]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "F" * 99}}, "quantization.quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "Mixed_Precision"}, "quant_algo"),
        ({"quant_method": "modelopt_mixed", "quant_algo": "FP8"}, "quant_algo"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "config_groups"),
    ],
)
def test_what_cannot_be_counted_says_why(quantization: dict[str, Any], field: str) -> None:
    """A method, a number of bits or a group that is not known is an error with its field."""
    with refused(f"quantization_config.{field}"):
        declared(**quantization)


@pytest.mark.parametrize(
    ("group", "field"),
    [
        ({"weights": {"num_bits": 5}}, "weights.num_bits"),
        ({"weights": {"num_bits": 6, "type": "float"}}, "weights.num_bits"),
        ({"weights": {"num_bits": 1, "type": "float"}}, "weights.num_bits"),
        ({"weights": {"num_bits": 4, "type": "y" * 99}}, "weights.type"),
        ({"weights": {"num_bits": 4}, "targets": ["re:(a"]}, "targets"),
        (
            {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [1]}},
            "weights.block_structure",
        ),
    ],
)
def test_a_group_that_cannot_be_counted_says_why(group: dict[str, Any], field: str) -> None:
    """The field is that of the group."""
    with refused(f"quantization_config.config_groups.g.{field}"):
        declared(quant_method="compressed-tensors", config_groups={"g": group})


def test_a_format_that_is_not_known_is_named() -> None:
    """Its first letters are shown, with all names that are known."""
    with refused("weights") as caught:
        parse_weight_format("z" * 99)
    assert "z" * 41 not in str(caught.value)
    assert parse_weight_format("AUTO") is None
