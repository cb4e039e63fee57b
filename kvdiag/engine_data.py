"""The data files in each engine's folder, for modules that may import no engine: `kvdiag/engines/NAME/*.json`."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def engine_data(file: str) -> dict[str, Any]:
    """The content of one file of every engine that has it, by the engine's name, which is its folder's."""
    folders = sorted(resources.files("kvdiag").joinpath("engines").iterdir(), key=lambda folder: folder.name)
    found = {folder.name: folder.joinpath(file) for folder in folders if folder.is_dir()}
    return {name: json.loads(one.read_text(encoding="utf-8")) for name, one in found.items() if one.is_file()}
