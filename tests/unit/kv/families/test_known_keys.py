"""Of a model's config only the known fields are kept: all that the cost model reads, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdiag.diagnosis.growth.host_caches import MEDIA
from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.class_defaults import class_defaults
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.families.known_keys import FREELY_NAMED, KNOWN_KEYS, MAX_DEPTH, known_part
from kvdiag.kv.families.registry import FAMILIES
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import declared_quantization
from tests.unit.kv.models import catalogue
from tests.unit.kv.observed import reads_of_fields

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def configs() -> list[Any]:
    """Every published config that is at hand."""
    # One has a summary in words in the place of its pattern, as no model's own file has.
    paths = [path for path in sorted(CONFIGS.rglob("*.json")) if path.stem != "Nemotron-Nano-9B-v2"]
    files = [pytest.param(json.loads(path.read_text()), id=path.stem) for path in paths]
    return [*files, *(pytest.param(dict(entry.config), id=entry.name) for entry in catalogue().entries)]


def outcome(judged: Callable[[Any], object], config: Any) -> object:
    """What a reader of a config says, be it a refusal."""
    try:
        return judged(config)
    except KvModelError as error:
        return type(error), str(error)


@pytest.mark.parametrize("config", configs())
def test_the_known_part_says_the_same(config: Any) -> None:
    """Layers, parameters and quantization are those of the whole config."""
    readers: tuple[Callable[[Any], object], ...] = (
        parse_architecture,
        declared_quantization,
        lambda one: count_parameters(one, parse_architecture(one)),
        lambda one: [part in one for part in MEDIA],
    )

    kept = known_part(config)

    assert kept is not None
    for judged in readers:
        assert outcome(judged, config) == outcome(judged, kept)


def test_every_field_that_is_read_is_known() -> None:
    """Nothing is asked of a config that would have been dropped before."""
    asked: set[str] = set()

    def note(fields: Fields, names: tuple[str, ...], _given: object) -> None:
        if fields.path("").removesuffix(".").rpartition(".")[2] not in FREELY_NAMED:
            asked.update(names)

    methods = ("has", "raw", "maybe_integer", "number", "flag", "text", "sequence", "child")
    with reads_of_fields(note, *methods):
        for parameters in configs():
            (config,) = parameters.values
            for judged in (parse_architecture, declared_quantization):
                outcome(judged, config)
            outcome(lambda one: count_parameters(one, parse_architecture(one)), config)

    assert len(asked) > 100
    assert set() == asked - KNOWN_KEYS
    assert set() == {name for model_type in FAMILIES for name in class_defaults(model_type)} - KNOWN_KEYS


@pytest.mark.parametrize(
    "document",
    [
        {"auths": {"https://index.docker.io/v1/": {"auth": "c2VjcmV0"}}},
        {"model_type": 1, "hidden_size": 1},
        {"architectures": [], "hidden_size": 1},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [1]},
        {"num_hidden_layers": 4},
        {},
        [],
        "model_type",
        None,
    ],
)
def test_what_is_no_config_is_not_kept(document: object) -> None:
    """Neither an architecture nor a model type: some other program's file."""
    assert known_part(document) is None


def test_a_class_is_enough() -> None:
    """Configs without a model type name the class of the model."""
    config = {"architectures": ["LlamaForCausalLM"]}
    assert config == known_part(config)


def test_only_known_fields_are_kept() -> None:
    """At any depth, in lists too; texts with spaces in them are none of a config's."""
    config = {
        "model_type": "llama",
        "auths": {"registry": {"auth": "c2VjcmV0"}},
        "hidden_size": 8,
        "text_config": {"hidden_size": 4, "token": "hf_secret", "config": {"password": "x", "text": "a b"}},
        "block_configs": [{"attention": {"no_op": True, "key": "x"}}, "a text", 1, ["x y"]],
        "quantization_config": {
            "quant_method": "gptq",
            "dataset": "/home/alice/private",
            "dynamic": {"-:model.*": {"api_key": "x", "bits": 4}, "a b": {"bits": 4}},
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "observer": "minmax"}}},
            "extra_config": {"model.layers.0": {"bits": 4}},
        },
    }

    assert {
        "model_type": "llama",
        "hidden_size": 8,
        "text_config": {"hidden_size": 4, "config": {}},
        "block_configs": [{"attention": {"no_op": True}}, 1, []],
        "quantization_config": {
            "quant_method": "gptq",
            "dynamic": {"-:model.*": {"bits": 4}},
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            "extra_config": {"model.layers.0": {"bits": 4}},
        },
    } == known_part(config)


def test_depth_is_bounded() -> None:
    """Nesting beyond any config's is cut off."""
    deep: dict[str, object] = {"hidden_size": 1}
    deep_list: list[object] = []
    for _ in range(10 * MAX_DEPTH):
        deep, deep_list = {"text_config": deep}, [deep_list]

    kept = known_part({"model_type": "llama", **deep})
    kept_list = known_part({"model_type": "llama", "block_configs": deep_list})

    assert (16, 16, 16) == (MAX_DEPTH, str(kept).count("text_config"), str(kept_list).count("["))
