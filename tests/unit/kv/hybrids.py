"""Configs of families with layers that keep a state: data/hybrids.json, in small sizes unlike each other."""

import json
from typing import Any

from tests.unit.kv.vectors import DATA

CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "hybrids.json").read_text())


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    """The config less these fields."""
    return {name: value for name, value in config.items() if name not in fields}
