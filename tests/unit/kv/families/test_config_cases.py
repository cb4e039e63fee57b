"""What a config gives, family by family: its layers in order, what each keeps, and the field that it is refused by.

data/config_cases.json has small configs of unlike sizes, cases that change them (`of`, `with`, `without`), what each
case gives, and why where that is not plain. States are worked out as the shapes of vLLM's
mamba_utils.py::MambaStateShapeCalculator.

Without a list of its own a config's pattern is the class's: data/class_layers.json has what each class makes of 19
layers (record_class_defaults.py).
"""

import json
from itertools import groupby
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.class_defaults import class_defaults
from kvdiag.kv.families.latent import latent
from kvdiag.kv.families.registry import FAMILIES
from kvdiag.kv.layout.layers import Layer
from tests.unit.kv import hybrids
from tests.unit.kv.families.reading import layer_in_words, letters
from tests.unit.kv.refused import refused
from tests.unit.kv.vectors import DATA

DOCUMENT: dict[str, Any] = json.loads((DATA / "config_cases.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = {**hybrids.CONFIGS, **DOCUMENT["configs"]}
CLASS_LAYERS: dict[str, list[str]] = json.loads((DATA / "class_layers.json").read_text())["layer_types"]
OF_NAME = {"full_attention": "F", "sliding_attention": "W", "chunked_attention": "C"}
# Which the class works out of what a config that is served states: vLLM's own class or file decides.
NOT_OF_THE_CLASS = {
    # Its published configs name the layers in hybrid_layer_pattern, which is asked for.
    "mimo_v2_flash",
    # Its published config names the layers with index keys in sparse_attention_config, which is asked for.
    "minimax_m3_vl_text",
}
PATTERNED = sorted(
    name
    for name, types in CLASS_LAYERS.items()
    if set(types) <= set(OF_NAME) and name not in {"modernbert", *NOT_OF_THE_CLASS}
)
MOST_LAYERS = 1024


def runs(layers: tuple[Layer, ...]) -> str:
    """How many like layers follow each other, in their order."""
    return ", ".join(f"{len(list(alike))} {words}" for words, alike in groupby(map(layer_in_words, layers)))


def config_of(case: dict[str, Any]) -> Any:
    """The config that a case is about; one that is no object stands alone."""
    if "of" not in case:
        return case["with"]
    return hybrids.without({**CONFIGS[case["of"]], **case.get("with", {})}, *case.get("without", ()))


def in_words(case: dict[str, Any]) -> str:
    """A case by its config."""
    return " ".join([case.get("of", ""), str(case.get("with", "")), " ".join(case.get("without", ()))])[:80]


@pytest.mark.parametrize("case", [case for case in DOCUMENT["cases"] if "refused" not in case], ids=in_words)
def test_what_a_config_gives(case: dict[str, Any]) -> None:
    """Each layer is of the kind, and has the sizes, that its family's file gives it; ranks divide heads and depth."""
    model = parse_architecture(config_of(case))

    given = {
        "order": "".join(words[0] for words in map(layer_in_words, model.layers)),
        "cache": runs(model.layers),
        "index": [layer.index for layer in model.layers],
        "drafts": runs(model.draft_layers),
        "draft index": [layer.index for layer in model.draft_layers],
        "heads": model.attention_heads,
        "depth": model.depth,
        "state dtype": model.state_dtype,
    }
    assert case == case | {part: value for part, value in given.items() if part in case}


@pytest.mark.parametrize("case", [case for case in DOCUMENT["cases"] if "refused" in case], ids=in_words)
def test_a_config_that_cannot_be_is_refused_by_name(case: dict[str, Any]) -> None:
    """A config with no model, impossible sizes, or layers of unknown type gives one short line that names the field."""
    with refused(case["refused"]) as caught:
        parse_architecture(config_of(case))
    assert 1 == len(str(caught.value).splitlines())
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("model_type", PATTERNED)
def test_without_a_list_the_pattern_is_the_classs(model_type: str) -> None:
    """Each of 19 layers is of the kind that the config class gives it."""
    config = {**class_defaults(model_type), "model_type": model_type, "architectures": ["Served"]}

    actual = letters({**config, "num_hidden_layers": 19, "num_kv_shared_layers": 0})

    assert "".join(OF_NAME[name] for name in CLASS_LAYERS[model_type]) == actual


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family is latent])
def test_a_latent_row_is_the_rank_and_the_part_with_rope(model_type: str) -> None:
    """32 + 8, with any number of heads."""
    model = parse_architecture({**CONFIGS["DEEPSEEK"], "model_type": model_type, "index_topk": None})

    assert ("6 L 40 -", list(range(6)), 6) == (
        runs(model.layers),
        [layer.index for layer in model.layers],
        model.attention_heads,
    )


@pytest.mark.parametrize(
    ("name", "field", "most", "too_many"),
    [
        ("NEMOTRON", "hybrid_override_pattern", "M" * MOST_LAYERS, "M" * (MOST_LAYERS + 1)),
        ("NEMOTRON", "hybrid_override_pattern", "1000 mamba2 + 24 attention", "1000 mamba2 + 25 attention"),
        ("SPARSE", "index_topk_pattern", "S" * MOST_LAYERS, "S" * (MOST_LAYERS + 1)),
        ("LLAMA", "layer_types", ["full_attention"] * 3, ["full_attention"] * 1_000_000),
    ],
    ids=["letters", "words", "indexers", "names"],
)
def test_the_longest_patterns_are_read(name: str, field: str, most: Any, too_many: Any) -> None:
    """1,024 layers are the most, in letters or in words."""
    depth = parse_architecture({**CONFIGS[name], field: most}).depth
    assert CONFIGS[name].get("num_hidden_layers", MOST_LAYERS) == depth
    with refused(field):
        parse_architecture({**CONFIGS[name], field: too_many})
