"""Parameters counted from configs, against those of transformers' own models (recorded_parameters.py)."""

from collections import Counter

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.weights.linear_layers import LayerParameters, Linear
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.recordings import recorded_models

MODELS = recorded_models()
HIDDEN = 60
# Of no matter to what a model takes: below a thousandth of it (parameters.py).
UNCOUNTED = {"norm", "bias", "scalars", "token_types", "pooler"}


def group_of(linear: Linear, recorded: dict[str, int]) -> str:
    """The recorded group that a linear layer belongs to."""
    within = {
        "mlp.shared_experts": "shared",
        "mlp.experts": "experts",
        "mlp.fc1_latent_proj": "experts",
        "mlp": "dense",
        "self_attn": "attention",
        "per_layer_input_gate": "per_layer",
        "laurel": "per_layer",
    }
    if linear.name.startswith(("self_attn.k_proj", "self_attn.v_")) and "kv" in recorded:
        return "kv"
    return next((group for prefix, group in within.items() if linear.name.startswith(prefix)), "state")


def counted(layer: LayerParameters, recorded: dict[str, int]) -> dict[str, int]:
    """A layer's linear layers, in the recorded groups."""
    groups = Counter[str]()
    for linear in layer.linears:
        groups[group_of(linear, recorded)] += linear.parameters
    return {group: parameters for group, parameters in groups.items() if parameters}


def recorded_linears(recorded: dict[str, int]) -> dict[str, int]:
    """The matrices of a recorded layer. Only with experts is a block shared; delta attention has no KV heads."""
    groups = Counter(recorded)
    if "experts" not in groups:
        groups["dense"] += groups.pop("shared", 0)
    if "decay" in groups:
        groups["attention"] += groups.pop("kv", 0)
    apart = {*UNCOUNTED, "router", "convolution", "decay", "streams"}
    return {group: parameters for group, parameters in groups.items() if parameters and group not in apart}


def summed(groups: list[dict[str, int]]) -> dict[str, int]:
    """The groups of all layers together."""
    total = Counter[str]()
    for one in groups:
        total.update(one)
    return dict(total)


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_those_of_the_models_own_class(name: str) -> None:
    """Each layer's attention, K and V, states, dense blocks, experts and shared experts have as many parameters."""
    model = MODELS[name]
    architecture = parse_architecture(model["config"])
    # Layers that run again are counted once.
    layers = [one for one in count_parameters(model["config"], architecture).layers if one.total]

    expected = [recorded_linears(layer) for layer in model["layers"]]

    actual = [counted(one, groups) for one, groups in zip(layers, expected, strict=True)]
    if architecture.model_type == "zamba2":
        # A shared block, with the adapters of all its runs, is the first run's there.
        expected, actual = [summed(expected)], [summed(actual)]

    assert expected == actual


@pytest.mark.parametrize("name", MODELS)
def test_what_every_rank_holds_are_routers_convolutions_and_two_norms(name: str) -> None:
    """Besides its matrices a layer has parts neither divided nor quantized. A decay of Mamba-1 counts twice, since it
    is kept in 32 bits.
    """
    model = MODELS[name]
    parameters = count_parameters(model["config"], parse_architecture(model["config"]))
    layers = [layer for layer in parameters.layers if layer.total]

    expected = []
    for groups in model["layers"]:
        decay = 2 * groups["decay"] if groups.get("decay", 0) > HIDDEN else 0
        expected.append(sum(groups.get(one, 0) for one in ("router", "convolution", "streams")) + decay)

    assert expected == [layer.plain - 2 * HIDDEN for layer in layers]


@pytest.mark.parametrize("name", MODELS)
def test_embedding_and_output_layer_are_those_of_the_models_own_class(name: str) -> None:
    """An output layer is counted unless it is tied, by the config or, where that does not say, by its class."""
    model = MODELS[name]
    parameters = count_parameters(model["config"], parse_architecture(model["config"]))

    outside = Counter(model["outside"])
    other = sum(count for group, count in outside.items() if group not in {"embedding", "head", *UNCOUNTED})

    assert (outside["embedding"], outside["head"], other) == (parameters.embedding, parameters.head, parameters.other)


def test_the_attention_is_divided_as_its_heads_are() -> None:
    """With three KV heads of six, four ranks hold a third of K and V and a quarter of the rest."""
    model = MODELS["llama"]
    layer = count_parameters(model["config"], parse_architecture(model["config"])).layers[0]

    shares = {linear.name: linear.share(4) for linear in layer.linears}

    assert {
        "self_attn.q_proj": 4,
        "self_attn.k_proj": 3,
        "self_attn.v_proj": 3,
        "self_attn.o_proj": 4,
        "mlp.gate_proj": 4,
        "mlp.down_proj": 4,
    } == shares


@pytest.mark.parametrize(
    ("name", "everywhere"),
    [
        ("deepseek_v3", {"self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj"}),
        ("deepseek_v2-whole-query", {"self_attn.kv_a_proj_with_mqa"}),
        ("deepseek_v32", {"self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj", "self_attn.indexer.wq_b"}),
        ("kimi_linear", {"self_attn.f_a_proj"}),
        ("gemma4_text", {"per_layer_input_gate"}),
        ("qwen3_next", set[str]()),
    ],
)
def test_projections_into_a_narrow_space_are_on_every_rank(name: str, everywhere: set[str]) -> None:
    """Latent projections, the indexer and gates of low rank are not divided (deepseek_v2.py, kimi_k3, gemma4.py)."""
    model = MODELS[name]
    layer = count_parameters(model["config"], parse_architecture(model["config"])).layers[0]

    assert everywhere == {linear.name for linear in layer.linears if linear.most_parts == 1}
