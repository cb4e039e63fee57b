"""Model types whose KV cost is known, each with the function that reads its config.

A model type is listed only if its model file in vLLM 0.32.0 was read, or if it runs on vLLM's transformers backend,
which takes windows from layer_types alone. `LAST_SERVED` and TeleChat have no file there any more: they are as
in the last version that had one. MiniCPM-SALA is SGLang's: it is as its logs print it.
Names are HF `model_type` values.

model_types.json lists them by the function (`MODULE:FUNCTION` of this package) that reads their configs. Those of
`attention:qwen2` are the ones whose config class extends Qwen2Config or Qwen3Config, with the language model's fields
at the top.
"""

import json
import pkgutil
from collections.abc import Mapping

from kvdiag.kv.families.base import CONFIG_NAMES, Family

_TYPES: Mapping[str, list[str]] = json.loads(pkgutil.get_data(__package__, "model_types.json") or b"")
FAMILIES: Mapping[str, Family] = {
    name: pkgutil.resolve_name(f"{__package__}.{reader}") for reader, names in _TYPES.items() for name in names
}


def _by_class(file: str) -> Mapping[str, str]:
    """What a file says of classes: {value: [class, ...]}, turned round."""
    table: Mapping[str, list[str]] = json.loads(pkgutil.get_data(__package__, file) or b"")
    return {name: value for value, names in table.items() for name in names}


# Every class of vLLM 0.32's registry is in one of the three. For configs whose model_type is a wrapper's or is missing:
# the model type whose layers the class has.
TYPE_OF_ARCHITECTURE: Mapping[str, str] = _by_class("model_classes.json")

TYPE_OF_WRAPPER: Mapping[str, str] = _by_class("wrapper_classes.json")
"""Multimodal classes, whose language model has a config of its own: its type where that config names none."""

UNMODELLED: Mapping[str, str] = _by_class("unmodelled_classes.json")
"""Classes whose cache is not modelled, each with the reason."""

LAST_SERVED: Mapping[str, str] = CONFIG_NAMES["last_served"]
"""Model types that vLLM has dropped, each with the last version that served it
(0.32.0, registry.py::_PREVIOUSLY_SUPPORTED_MODELS).
"""

# Decoders that vLLM serves as encoders where the config has is_causal false (llama.py, qwen2.py, qwen3.py), and the
# classes for which it sets that itself (models/config.py).
ENCODING_DECODERS = frozenset(CONFIG_NAMES["encoding_decoders"])
ENCODER_CLASSES = frozenset(CONFIG_NAMES["encoders"])
