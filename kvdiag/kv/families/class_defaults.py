"""What a model's config class fills in where a config.json leaves a field out.

Published configs leave fields out: a nested text config holds only what differs from its class (gemma-3-4b names
neither heads nor head size nor vocabulary). The class is the one that vLLM 0.32.0 loads: its own
(transformers_utils/configs/NAME.py) where it has one, else that of transformers 5.19.0
(models/NAME/configuration_NAME.py). class_defaults.json is recorded from the classes
(tests/unit/kv/families/record_class_defaults.py); the few defaults that must not be used are listed with the
reason in default_rules.json.
"""

import functools
import json
import pkgutil
from collections.abc import Collection, Mapping

_RULES: Mapping[str, Mapping[str, Collection[str]]] = json.loads(
    pkgutil.get_data(__package__, "default_rules.json") or b""
)
# Only the weights depend on these. They are filled in for the types whose published configs leave them out; for any
# other type a missing size is an error, not an estimate.
_WEIGHT_FIELDS = frozenset({"intermediate_size", "vocab_size"})


@functools.cache
def class_defaults(model_type: str) -> Mapping[str, object]:
    """The defaults of a model type's config class; empty where it has none that can be used."""
    if model_type in _RULES["unusable_classes"]:
        return {}
    filled = _RULES["filled_weight_fields"].get(model_type, ())
    unusable = _WEIGHT_FIELDS.difference(filled).union(_RULES["unusable_fields"].get(model_type, ()))
    return {name: value for name, value in _recorded().get(model_type, {}).items() if name not in unusable}


@functools.cache
def _recorded() -> Mapping[str, Mapping[str, object]]:
    recorded = pkgutil.get_data(__package__, "class_defaults.json") or b""
    defaults: Mapping[str, Mapping[str, object]] = json.loads(recorded)["defaults"]
    return defaults
