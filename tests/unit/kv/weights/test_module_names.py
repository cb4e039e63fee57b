"""Names of linear layers: what blocks and projections are called elsewhere, and lists that take too long to read."""

import pytest

from kvdiag.kv.weights.linear_layers import Linear
from kvdiag.kv.weights.module_names import parse_module_names
from kvdiag.kv.weights.quantization import declared_quantization
from tests.unit.kv.refused import refused


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        # Qwen (attn), InternLM2 (attention), Nemotron-H (mixer); vLLM packs q, k and v (packed_modules_mapping).
        ("self_attn.q_proj", ["attn.q_proj", "attention.q_proj", "mixer.q_proj", "self_attn.qkv_proj"]),
        ("self_attn.q_proj", ["self_attn.q_proj"]),
        ("self_attn.k_proj", ["self_attn.k_proj", "self_attn.qkv_proj"]),
        ("self_attn.v_proj", ["self_attn.v_proj", "self_attn.qkv_proj"]),
        ("self_attn.q_a_proj", ["self_attn.q_a_proj", "self_attn.fused_qkv_a_proj"]),
        ("self_attn.kv_a_proj_with_mqa", ["self_attn.kv_a_proj_with_mqa", "self_attn.fused_qkv_a_proj"]),
        # Qwen3-Next and Qwen3.5.
        ("linear_attn.in_proj_qkv", ["linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "mixer.in_proj_qkv"]),
        ("linear_attn.in_proj_z", ["linear_attn.in_proj_z", "linear_attn.in_proj_qkvz"]),
        ("linear_attn.in_proj_ba", ["linear_attn.in_proj_ba", "linear_attn.in_proj_b", "linear_attn.in_proj_a"]),
        # Mamba and Nemotron-H.
        ("mamba.in_proj", ["mamba.in_proj", "mixer.in_proj"]),
        # Llama 4, Mixtral, DBRX, Nemotron-H, Step-3.
        (
            "mlp.gate_proj",
            [
                "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "feed_forward.gate_proj",
                "block_sparse_moe.gate_proj", "ffn.gate_proj", "mixer.gate_proj", "moe.gate_proj",
            ],
        ),
        (
            "mlp.shared_experts.down_proj",
            ["mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "mlp.share_expert.down_proj"],
        ),
        ("mlp.experts.0.down_proj", ["mlp.experts.0.down_proj", "mlp.experts", "moe.experts.0.down_proj"]),
    ],
)  # fmt: skip
def test_a_linear_layer_goes_by_the_names_of_its_family(name: str, entries: list[str]) -> None:
    """Each name, as checkpoints and as the engine spell it, means the layer, below any prefix; another does not."""
    for entry in entries:
        for prefix in ("", "model.layers.3.", "model.language_model.layers.3."):
            assert parse_module_names([prefix + entry], field="ignore").match(3, name), entry
        assert not parse_module_names([f"model.layers.4.{entry}"], field="ignore").match(3, name), entry
        assert not parse_module_names([f"X{entry}"], field="ignore").match(3, name), entry


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("layers.3.mlp.down_proj", True),
        ("model.layers.3.mlp.down_proj", True),
        ("re:model.layers.3.mlp.down_proj", True),
        ("re:language_model.model.layers.3.mlp.down_proj", True),
        ("re:model.language_model.layers.3.mlp.down_proj", True),
        ("re:layers.3.mlp.down_proj", True),
        ("re:encoder.layers.3.mlp.down_proj", False),
        (".mlp.down_proj.", True),
        ("down", False),
        ("layers.3", True),
        ("layers", True),
        ("model.layers.3.layers.3.mlp", False),
        ("", False),
        (".", False),
    ],
)
def test_what_stands_before_the_layers_does_not_count(entry: str, meant: bool) -> None:
    """An entry means a layer by whole words of its name; an empty one means none."""
    assert meant == parse_module_names([entry], field="ignore").match(3, "mlp.down_proj")


@pytest.mark.parametrize(
    "entries",
    [
        [f"*a{one}*" for one in range(32)],
        [f"model.layers.3.*a{one}" for one in range(32)] + ["model.layers.4.*b"],
        ["*a*b*c*d"],
        ["m" * 299 + "*"],
        ["re:" + "m" * 300],
        # Three repeats after the first try as many places as a name has letters, 40 each: 32 such are read,
        [f"re:.*a.*b.*c.*{one}" for one in range(32)],
        # and of those that are tried in every layer four, with two repeats after the first.
        [f"re:.*layers.*a.*[{one}]" for one in range(4)],
        [f"re:a{one}" for one in range(200)],
    ],
)
def test_lists_that_can_be_read_in_time_are(entries: list[str]) -> None:
    """The longest and widest lists that are read mean no layer that they do not name."""
    assert not parse_module_names(entries, field="ignore").match(3, "mlp.down_proj")


@pytest.mark.parametrize(
    "entries",
    [
        [f"*a{one}*" for one in range(33)],
        [f"model.layers.3.*a{one}" for one in range(33)],
        ["*a*b*c*d*e"],
        ["m" * 300 + "*"],
        ["re:" + "m" * 301],
        ["re:.*a.*b.*c.*d.*e"],
        [f"re:.*a.*b.*c.*{one}" for one in range(33)],
        [f"re:.*layers.*a.*[{one}]" for one in range(5)],
        ["re:(a+)+"],
        ["re:(a"],
        ["re:" + "m" * 61 + "("],
    ],
)
def test_lists_that_could_take_for_ever_are_refused(entries: list[str]) -> None:
    """One more than is read is refused under the name of the list, and so is what is no expression."""
    with refused("quantization_config.ignore") as caught:
        parse_module_names(entries, field="quantization_config.ignore")
    assert len(str(caught.value)) < 200
    assert "m" * 61 not in str(caught.value)


def test_layers_are_counted_from_zero() -> None:
    """The first layer is number 0; there is none before it."""
    names = parse_module_names(["model.layers.0.mlp"], field="ignore")

    assert names.match(0, "mlp.down_proj")
    assert not names.match(1, "mlp.down_proj")


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


def test_lists_of_every_expert_are_read() -> None:
    """A list may name each linear layer of each expert; the first one stands for all."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(40) for expert in range(256)]
    quantization = declared_quantization({"quantization_config": {"quant_method": "fp8", "ignore": names}})

    assert (16, 8) == tuple(quantization.bits(index, Linear("mlp.experts.0.down_proj", 1)) for index in (39, 40))
