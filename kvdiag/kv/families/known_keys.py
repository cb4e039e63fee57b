"""The fields of a model's config.json that kvdiag keeps: those that the cost model reads.

The config is recorded in traces, which are passed on. A file that is not a model's config, or that contains more than
one, must not get there: unknown fields and texts with spaces are dropped.
"""

import json
import pkgutil
import re
from collections.abc import Mapping

KNOWN_KEYS: frozenset[str] = frozenset(json.loads(pkgutil.get_data(__package__, "known_keys.json") or b""))
"""Names of fields that kvdiag/kv reads, at any depth."""

FREELY_NAMED = frozenset(
    (
        *("config_groups", "dynamic", "extra_config", "layer_types_count", "compress_ratios_count", "rope_parameters"),
        "per_layer_config",
    )
)
"""Fields whose keys are names of layers or groups of layers."""

MAX_DEPTH = 16
WORD = re.compile(r"[!-~]{0,512}")
"""A name, a number format or a module pattern, without spaces."""


def known_part(config: object) -> dict[str, object] | None:
    """Return the known fields of a model's config; `None` if it has neither `architectures` nor `model_type`."""
    if not isinstance(config, Mapping):
        return None
    listed = config.get("architectures")
    named = isinstance(listed, list) and bool(listed) and all(isinstance(one, str) for one in listed)
    if not named and not isinstance(config.get("model_type"), str):
        return None
    return _kept_fields(config, free=False, depth=0)


def _kept_fields(fields: Mapping[object, object], *, free: bool, depth: int) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(name, str) and (WORD.fullmatch(name) if free else name in KNOWN_KEYS):
            left = _kept(value, free=not free and name in FREELY_NAMED, depth=depth + 1)
            if left is not _DROPPED:
                kept[name] = left
    return kept


_DROPPED = object()


def _kept(value: object, *, free: bool, depth: int) -> object:
    """Return a value without its unknown fields; `_DROPPED` if nothing is left."""
    if isinstance(value, str):
        return value if WORD.fullmatch(value) else _DROPPED
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > MAX_DEPTH:
        return _DROPPED
    if isinstance(value, Mapping):
        return _kept_fields(value, free=free, depth=depth)
    if isinstance(value, list):
        return [left for one in value if (left := _kept(one, free=False, depth=depth + 1)) is not _DROPPED]
    return _DROPPED
