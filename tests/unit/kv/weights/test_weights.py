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
from tests.unit.kv.vectors import DATA

GIB = 1 << 30
# Parameters of model cards; "Model loading took X GiB" of published logs, by model, format, ranks; sizes on the Hub.
PUBLISHED: dict[str, Any] = json.loads((DATA / "weights.json").read_text())


def counted(name: str) -> tuple[Architecture, Parameters]:
    """The architecture and parameters of a catalogue model."""
    config = served(name).config
    architecture = parse_architecture(config)
    return architecture, count_parameters(config, architecture)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED["billions_of_parameters"].items())
def test_parameters_equal_the_published_count(name: str, billions: float) -> None:
    """The count from the config is the model card's, to its last digit and half a percent at most."""
    _, parameters = counted(name)

    assert billions == pytest.approx(parameters.total / 1e9, rel=0.005)


@pytest.mark.parametrize(("name", "weight_format", "ranks", "gib"), PUBLISHED["logged_gib"])
def test_weight_bytes_are_those_that_engines_log(name: str, weight_format: str | None, ranks: int, gib: float) -> None:
    """Weights per rank lie within 2.5 % of what vLLM logged for loading that model in that format."""
    architecture, parameters = counted(name)
    config = served(name).config
    chosen = usual_quantization(WeightFormat(weight_format)) if weight_format else declared_quantization(config)

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


@pytest.mark.parametrize(("name", "quantization", "gigabytes"), PUBLISHED["checkpoint_gigabytes"])
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
