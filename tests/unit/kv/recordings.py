"""Models whose parameters transformers counted (recorded_parameters.py)."""

import functools
import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "data" / "parameters.json"


@functools.cache
def recorded_models() -> dict[str, Any]:
    """All of them, by name: a config and the groups of its parameters."""
    models: dict[str, Any] = json.loads(_FILE.read_text())["models"]
    return models


def recorded_config(name: str) -> dict[str, Any]:
    """The config of one of them."""
    config: dict[str, Any] = recorded_models()[name]["config"]
    return config
