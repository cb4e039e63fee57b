"""Feed-forward halves of layers, family by family (test_feed_forward_fields.py has the fields that they read)."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture, text_fields
from kvdiag.kv.weights.feed_forward import expert_count
from kvdiag.kv.weights.linear_layers import LayerParameters
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.recordings import recorded_config
from tests.unit.kv.refused import refused

H = 60
BASE = {
    "vocab_size": 211, "hidden_size": H, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 86,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 34}
LATENT = {"kv_lora_rank": 26, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 13}


def layers(**config: Any) -> tuple[LayerParameters, ...]:
    """The layers of a config like BASE."""
    whole = {**BASE, **config}
    return count_parameters(whole, parse_architecture(whole)).layers


def halves(**config: Any) -> list[dict[str, int]]:
    """The feed-forward matrices of each layer."""
    return [
        {one.name: one.parameters for one in layer.linears if one.name.startswith("mlp")} for layer in layers(**config)
    ]


def totals(**config: Any) -> list[int]:
    """All feed-forward parameters of each layer."""
    return [sum(one.parameters for one in layer.linears if one.name.startswith("mlp")) for layer in layers(**config)]


def gated(width: int, name: str = "mlp", inputs: int = H) -> dict[str, int]:
    """A block of three matrices."""
    return {f"{name}.gate_proj": 2 * inputs * width, f"{name}.down_proj": inputs * width}


def ungated(width: int, name: str = "mlp", inputs: int = H) -> dict[str, int]:
    """A block of two."""
    return {f"{name}.up_proj": inputs * width, f"{name}.down_proj": inputs * width}


def experts(count: int, width: int, inputs: int = H) -> dict[str, int]:
    """The gated experts of a layer."""
    return gated(count * width, "mlp.experts.0", inputs)


@pytest.mark.parametrize(
    "model_type",
    ["RefinedWeb", "RefinedWebModel", "falcon", "gpt2", "phi", "arcee", "apertus", "bert", "roberta", "xlm-roberta"],
)
def test_some_families_do_not_gate(model_type: str) -> None:
    """Falcon, under its first names as well, and others have two matrices and not three."""
    config = {"num_attention_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": None}

    assert ungated(86) == halves(model_type=model_type, **config)[0]


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        ({}, 0),
        ({"n_shared_experts": 3}, 3 * 34),
        ({"num_shared_experts": 3}, 3 * 34),
        ({"moe_num_shared_experts": 3}, 3 * 34),
        ({"num_shared_expert": 3}, 3 * 34),
        ({"num_shared_expert": [1, 2, 2]}, 2 * 34),
        ({"num_shared_expert": []}, 0),
        ({"n_shared_experts": 256}, 256 * 34),
        ({"shared_expert_intermediate_size": 46}, 46),
        ({"shared_intermediate_size": 46}, 46),
        ({"moe_shared_expert_intermediate_size": 46}, 46),
        ({"share_expert_dim": 46}, 46),
        ({"shared_expert_intermediate_size": 0, "n_shared_experts": 3}, 0),
    ],
)
def test_shared_experts_are_as_many_or_as_wide_as_told(config: dict[str, Any], shared: int) -> None:
    """A number of experts' widths, or a width of their own, which may be none."""
    expected = {**experts(5, 34), **(gated(shared, "mlp.shared_experts") if shared else {})}

    assert [expected] * 4 == halves(model_type="qwen3_moe", **EXPERTS, **config)


@pytest.mark.parametrize("field", ["moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"])
def test_experts_have_a_width_under_each_name(field: str) -> None:
    """Or the dense one's where there is no other."""
    config = {"model_type": "qwen3_moe", "num_experts": 5, "intermediate_size": None}

    assert experts(5, 34) == halves(**config, **{field: 34})[0]
    assert experts(5, 86) == halves(**{**config, "intermediate_size": 86})[0]


def test_experts_of_grok_2_are_beside_a_dense_block() -> None:
    """grok.py: `residual_moe` adds the dense block."""
    grok = {"model_type": "git", "architectures": ["Grok1ForCausalLM"], **EXPERTS}
    alone, both = totals(**grok)[0], totals(**grok, residual_moe=True)[0]
    assert both - alone == 3 * H * BASE["intermediate_size"]


def test_each_layer_may_have_experts_of_its_own_width() -> None:
    """Hunyuan lists them; a list that ends before the layers do is an error."""
    config = {"model_type": "hunyuan_v1_moe", "num_experts": 5}

    assert [experts(5, width) for width in (1, 2, 3, 4)] == halves(**config, moe_intermediate_size=[1, 2, 3, 4])
    for widths in ([1, 2, 3], []):
        with refused("moe_intermediate_size"):
            halves(**config, moe_intermediate_size=widths)
    with pytest.raises(KvModelError):
        halves(**config, moe_intermediate_size=[0, 1, 2, 3])


def test_experts_may_work_in_a_narrower_space() -> None:
    """Kimi-K3's projections into and out of that space are counted with the experts (routed_expert_hidden_size)."""
    config = {"model_type": "qwen3_moe", **EXPERTS, "routed_expert_hidden_size": 28}

    assert {**experts(5, 34, inputs=28), "mlp.fc1_latent_proj": 2 * H * 28} == halves(**config)[0]


def test_kernels_for_mxfp4_pad_experts() -> None:
    """To 256 of the inputs and 128 of the width, each expert by itself (gpt_oss.py); what fits is not padded."""
    one, two = layers(model_type="gpt_oss", num_local_experts=5, intermediate_size=129)[0].linears[-2:]
    fits = layers(model_type="gpt_oss", num_local_experts=5, hidden_size=512, intermediate_size=256, head_dim=8)
    exact, _ = fits[0].linears[-2:]

    assert (5 * 2 * 256 * 256, 5 * 256 * 256) == (one.padded_parameters, two.padded_parameters)
    assert 5 * 2 * 512 * 256 == exact.padded_parameters == exact.parameters


@pytest.mark.parametrize("model_type", ["longcat_flash", "longcat_flash_ngram"])
@pytest.mark.parametrize("field", ["ffn_hidden_size", "intermediate_size"])
def test_longcat_has_two_dense_blocks_beside_its_experts(model_type: str, field: str) -> None:
    """One after each of the two attention sublayers (longcat_flash.py::FlashDecoderLayer)."""
    config = {
        **LATENT, "num_layers": 2, "intermediate_size": None, "n_routed_experts": 5, "expert_ffn_hidden_size": 34,
        "q_lora_rank": None, field: 86,
    }  # fmt: skip

    assert {**experts(5, 34), **gated(2 * 86, "mlps.0")} == {
        one.name: one.parameters
        for one in layers(model_type=model_type, **config)[0].linears
        if one.name.startswith("mlp")
    }


def test_gemma_4_doubles_blocks_only_where_a_cache_is_shared_and_told_to() -> None:
    """use_double_wide_mlp is for the layers that reuse another's cache (gemma4.py::Gemma4DecoderLayer)."""
    config = {"model_type": "gemma4_text", "head_dim": 14, "num_kv_shared_layers": 2}

    assert [gated(86)] * 4 == halves(**config)
    assert [gated(86)] * 2 + [gated(172)] * 2 == halves(**config, use_double_wide_mlp=True)
    assert [gated(86)] * 4 == halves(**{**config, "num_kv_shared_layers": 0}, use_double_wide_mlp=True)
    assert [gated(86)] * 4 == halves(**{**config, "model_type": "gemma3n_text"}, use_double_wide_mlp=True)


def moondream(**text: Any) -> dict[str, Any]:
    """A Moondream of six layers (transformers_utils/configs/moondream3.py)."""
    return {
        "model_type": "moondream3",
        "config": {
            "text": {"vocab_size": 211, "dim": H, "n_layers": 6, "n_heads": 6, "n_kv_heads": 6, "ff_dim": 86, **text}
        },
    }


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        (None, [ungated(86)] * 4 + [experts(64, 1024)] * 2),
        ({"start_layer": 5}, [ungated(86)] * 5 + [experts(64, 1024)]),
        ({"start_layer": 0, "n_experts": 5, "expert_inner_dim": 34}, [experts(5, 34)] * 6),
    ],
)
def test_moondreams_first_layers_are_dense_and_do_not_gate(moe: dict[str, int] | None, expected: Any) -> None:
    """Its experts gate (moondream3.py); a router has an output for each."""
    whole = count_parameters(moondream(moe=moe), parse_architecture(moondream(moe=moe))).layers

    assert expected == [
        {one.name: one.parameters for one in layer.linears if one.name.startswith("mlp")} for layer in whole
    ]
    assert (2 + (64 if moe is None or len(moe) == 1 else 5)) * H == whole[5].plain


ERNIE = {
    "model_type": "ernie4_5_vl_moe_text", "num_hidden_layers": 6, "moe_num_experts": [5, 7],
    "moe_intermediate_size": [34, 22], "moe_num_shared_experts": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, ["both"] * 6),
        ({"moe_layer_start_index": [1, 2], "moe_layer_end_index": [4, 3]}, ["", "text", "both", "both", "text", ""]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4}, ["", "both", "both", "both", "both", ""]),
        ({"moe_layer_interval": 2}, ["", "both"] * 3),
        ({"moe_layer_interval": 3}, ["", "", "both"] * 2),
        ({"moe_layer_start_index": [2, 4], "moe_layer_end_index": [3, 5]}, ["", "", "text", "text", "image", "image"]),
    ],
)
def test_ernie_has_experts_for_text_and_for_images(config: dict[str, Any], kinds: list[str]) -> None:
    """Where one kind has none it has a dense block; both share experts as wide as text's (ernie45_vl_moe.py)."""
    shared, text, image = 3 * H * 2 * 34, 3 * H * 5 * 34, 3 * H * 7 * 22
    dense = 3 * H * 86
    expected = {
        "": dense,
        "both": shared + text + image,
        "text": shared + text + dense,
        "image": shared + dense + image,
    }
    routers = {"": 0, "both": 12 * H, "text": 5 * H, "image": 7 * H}

    assert [expected[kind] for kind in kinds] == totals(**ERNIE, **config)
    assert [2 * H + routers[kind] for kind in kinds] == [layer.plain for layer in layers(**ERNIE, **config)]


def test_ernies_numbers_may_be_one_for_both() -> None:
    """A list with another number of entries is an error that says so."""
    assert 3 * H * (2 + 5 + 7) * 34 == totals(**{**ERNIE, "moe_intermediate_size": 34})[0]
    with refused("moe_num_experts"):
        halves(**{**ERNIE, "moe_num_experts": [5, 7, 9]})
    with pytest.raises(KvModelError):
        halves(**ERNIE, moe_layer_end_index=-1)


def test_blocks_of_a_searched_architecture() -> None:
    """Nemotron-NAS: two thirds of so many widths rounded up to 256, a width of its own, a matrix, or nothing
    (nemotron_nas.py::_ffn_mult_to_intermediate_size).
    """
    attention = {"n_heads_in_group": 2}
    blocks: list[dict[str, Any]] = [
        # 2 * 5.25 * 60 / 3 = 210
        {"attention": attention, "ffn": {"ffn_mult": 5.25}},
        # 2 * 6.5 * 60 / 3 = 260
        {"attention": attention, "ffn": {"ffn_mult": 6.5}},
        {"attention": attention, "ffn": {"intermediate_size": 86, "ffn_mult": 5.25}},
        {"attention": attention, "ffn": {"replace_with_linear": True, "ffn_mult": 1.0}},
        {"attention": attention, "ffn": {"no_op": True, "ffn_mult": 1.0}},
        {"attention": attention},
        {"attention": attention, "ffn": {}},
    ]
    config = {"model_type": "nemotron-nas", "num_hidden_layers": 7, "block_configs": blocks}

    assert [gated(256), gated(512), gated(86), {"mlp.linear_mlp": H * H}, {}, {}, {}] == halves(**config)
    blocks[0]["ffn"] = {"ffn_mult": 1024.5}
    with pytest.raises(KvModelError):
        halves(**config)


NEMOTRON = {
    "head_dim": 14, "ssm_state_size": 11, "mamba_num_heads": 10, "mamba_head_dim": 12, "n_groups": 2,
    "conv_kernel": 5, "n_routed_experts": 5, "moe_intermediate_size": 34,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["nemotron_h", "nemotron_h_puzzle"])
@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ({"hybrid_override_pattern": "M-*E"}, "M-*E"),
        # A bar divides pipeline stages; a summary in words has no order of its own.
        ({"hybrid_override_pattern": "M|-*|E"}, "M-*E"),
        ({"hybrid_override_pattern": "1 mamba2 + 1 attention (+2 mlp)"}, "M*--"),
        ({"layers_block_type": ["mamba", "mlp", "attention", "moe"]}, "M-*E"),
        ({"layer_types": ["moe", "moe", "mlp"]}, "EE-"),
    ],
)
def test_a_layer_of_nemotron_h_is_one_thing(model_type: str, pattern: dict[str, Any], kinds: str) -> None:
    """Mamba, attention, a block that does not gate, or experts that do not (nemotron_h.py)."""
    expected = {"M": {}, "*": {}, "-": ungated(86), "E": gated(5 * 34, "mlp.experts.0")}
    expected["E"]["mlp.experts.0.gate_proj"] //= 2

    assert [expected[kind] for kind in kinds] == halves(model_type=model_type, **NEMOTRON, **pattern)


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        ({}, 0),
        ({"moe_shared_expert_intermediate_size": 46}, 46),
        ({"moe_shared_expert_intermediate_size": 46, "n_shared_experts": 3}, 138),
        ({"moe_shared_expert_intermediate_size": 46, "n_shared_experts": 0}, 0),
        ({"moe_shared_expert_intermediate_size": 0, "n_shared_experts": 1}, 0),
    ],
)
def test_nemotrons_shared_experts(config: dict[str, int], shared: int) -> None:
    """So many of a width of their own."""
    half = halves(model_type="nemotron_h", **NEMOTRON, layers_block_type=["moe"], **config)[0]

    assert 2 * H * shared == sum(count for name, count in half.items() if "shared" in name)


def test_blocks_of_a_puzzle_have_sizes_of_their_own() -> None:
    """What a block leaves out is the whole model's (nemotron_h.py::_get_max_n_routed_experts)."""
    blocks = [{"block_type": "moe", "n_routed_experts": 3}, {"block_type": "mlp", "intermediate_size": 22}]
    config = {"layers_block_type": ["moe", "mlp", "mlp"], "block_configs": blocks}
    moe, own, usual = halves(model_type="nemotron_h_puzzle", **NEMOTRON, **config)

    assert (H * 3 * 34, ungated(22), ungated(86)) == (moe["mlp.experts.0.down_proj"], own, usual)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "mamba2"])
def test_mamba_has_no_feed_forward(model_type: str) -> None:
    """A layer of Mamba is its state alone."""
    config = recorded_config(model_type)
    whole = count_parameters({**config, "intermediate_size": 120}, parse_architecture(config)).layers

    assert not any(one.name.startswith("mlp") for layer in whole for one in layer.linears)


def test_a_config_may_hold_the_language_model() -> None:
    """The feed-forward fields are the language model's."""
    whole = {"text_config": {**BASE, "model_type": "qwen3_moe", **EXPERTS}, "num_experts": 99}

    assert 5 == expert_count(text_fields(whole))
