"""Published config.json files of families outside the dataset: layers, heads and parameters as vLLM 0.32 builds them.

data/published.json: the fields of each config that decide its cost, and the parameters (billions) of its model card.
"""

import json
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.layers import AttentionLayer
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.refused import refused
from tests.unit.kv.vectors import DATA

PUBLISHED: dict[str, Any] = json.loads((DATA / "published.json").read_text())
ENOUGH = 0.025


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_layers_that_vllm_builds(name: str) -> None:
    """Kinds, KV heads and head size are those of the family's vLLM model file."""
    entry = PUBLISHED[name]

    architecture = parse_architecture(entry["config"])
    kinds = {str(kind): count for kind, count in architecture.kinds.items()}
    heads = {(layer.kv_heads, layer.head_size) for layer in architecture.layers if isinstance(layer, AttentionLayer)}

    assert (entry["kinds"], {tuple(entry["heads"])} if entry["heads"] else set()) == (kinds, heads)


@pytest.mark.parametrize("name", [name for name, entry in PUBLISHED.items() if entry["billions"]])
def test_published_configs_have_the_parameters_of_their_cards(name: str) -> None:
    """The count is that of the model card, to 2.5 % (vision towers are estimates)."""
    entry = PUBLISHED[name]

    total = count_parameters(entry["config"], parse_architecture(entry["config"])).total / 1e9

    assert abs(total / entry["billions"] - 1) < ENOUGH, total


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("Hunyuan-A13B", {"moe_intermediate_size": [3072]}, "moe_intermediate_size"),
        ("step3", {"moe_layers_enum": "4,x"}, "text_config.moe_layers_enum"),
        ("step3", {"moe_layers_enum": "4,99999"}, "text_config.moe_layers_enum"),
    ],
)
def test_expert_layers_that_cannot_be_read_are_refused(name: str, change: dict[str, Any], field: str) -> None:
    """A list that leaves layers out, or words for numbers, is an error that names the field."""
    config = dict(PUBLISHED[name]["config"])
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **change}
    else:
        config.update(change)

    with refused(field):
        count_parameters(config, parse_architecture(config))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "ultravox", "text_model_id": "meta-llama/Llama-3.2-1B", "hidden_size": 4096}, "text_model_id"),
        ({**PUBLISHED["ERNIE-4.5-VL-28B-A3B"]["config"], "moe_layer_start_index": [1]}, "moe_layer_start_index"),
    ],
)
def test_layers_that_a_config_does_not_tell_are_refused(config: dict[str, Any], field: str) -> None:
    """A language model in another repository, or a list that leaves layers out, is an error that names the field."""
    with refused(field):
        count_parameters(config, parse_architecture(config))


def test_a_language_model_elsewhere_is_named() -> None:
    """The error says which repository to pass instead."""
    with refused("text_model_id") as caught:
        parse_architecture({"model_type": "ultravox", "text_model_id": "meta-llama/Llama-3.2-1B", "hidden_size": 4096})
    assert "'meta-llama/Llama-3.2-1B'" in str(caught.value)
