"""What each field of a config decides: layers and parameters of a model as it is, and with null for a field."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.known_keys import KNOWN_KEYS
from kvdiag.kv.families.registry import FAMILIES
from kvdiag.kv.weights.linear_layers import Linear
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv import hybrids
from tests.unit.kv.families.reading import LETTERS, layer_in_words
from tests.unit.kv.families.test_families import EVERYTHING, OF_TYPE
from tests.unit.kv.families.test_limits import MORE
from tests.unit.kv.recordings import recorded_models
from tests.unit.kv.test_published import PUBLISHED

EVERY_FIELD = hybrids.without(
    {**EVERYTHING, **MORE, "max_window_layers": 0, "index_topk_freq": 4}, "vision_config", "ngram_vocab_size_ratio"
)
FIRST_OF_FAMILY = {family: name for name, family in [*FAMILIES.items()][::-1]}
MODELS: dict[str, dict[str, Any]] = {
    **{name: model["config"] for name, model in recorded_models().items()},
    **{name: config for name, config in hybrids.CONFIGS.items() if "model_type" in config},
    **{name: entry["config"] for name, entry in PUBLISHED.items()},
    **{
        f"every field, {name}": {**EVERY_FIELD, **OF_TYPE.get(name, {}), "model_type": name}
        for name in FIRST_OF_FAMILY.values()
    },
}
SHOWN = ("refused", "order", "cache", "drafts", "heads", "dtypes", "total")


def linear_in_words(linear: Linear) -> str:
    """Its name, parameters, and how it is divided and padded where it is."""
    padded = f"+{linear.padded_parameters}" if linear.padded_parameters else ""
    return f"{linear.name} {linear.parameters}{padded}" + (f"/{linear.most_parts}" if linear.most_parts else "")


def counts(lines: Iterable[str]) -> str:
    """How many there are of each, in the order in which they first come."""
    return ", ".join(f"{count} {line}" for line, count in Counter(lines).items())


def of_config(config: dict[str, Any]) -> dict[str, str]:
    """Layers and parameters; the field that it is refused by."""
    try:
        model = parse_architecture(config)
        counted = count_parameters(config, model)
    except KvModelError as error:
        return {"refused": error.field}
    return {
        "order": "".join(LETTERS[layer.kind] for layer in model.layers),
        "cache": counts(map(layer_in_words, model.layers)),
        "drafts": counts(map(layer_in_words, model.draft_layers)),
        "heads": f"{model.attention_heads}",
        "context": f"{model.max_context_tokens}",
        "dtypes": f"{model.dtype} {model.state_dtype} {model.declared_kv_dtype}",
        "total": f"{counted.total}",
        "outside": f"{counted.embedding} {counted.head} {counted.other}",
        "layers": counts(" ".join([f"{one.plain}", *map(linear_in_words, one.linears)]) for one in counted.layers),
    }


def nulls(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field's path, and the config with null in its place, which no class fills in."""
    for name, value in config.items():
        yield name, {**config, name: None}
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", {**config, name: less}) for inner, less in nulls(value))


def told(name: str, config: dict[str, Any]) -> Iterator[str]:
    """The model, what it is where its class fills in nothing, and what each field decides."""
    usual = of_config(config)
    yield f"{name}: " + "; ".join(f"{part} {text}" for part, text in usual.items())
    for field, less in (("others", {**dict.fromkeys(KNOWN_KEYS), **config}), *nulls(config)):
        found = of_config(less)
        other = [f"{part} {text}" for part, text in found.items() if part in SHOWN and text != usual.get(part)]
        if other and found.get("refused") != field:
            yield f"    no {field}: {'; '.join(other)}"


def test_what_each_field_of_a_config_decides(golden: Callable[[str, str], None]) -> None:
    """A model's layers and parameters, and which of them are others where a field is null."""
    golden("fit/config_fields.txt", "\n".join(line for model in MODELS.items() for line in told(*model)) + "\n")
