"""What engines reported of their pools: the rows of the data files, and their flags as settings."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS
from kvdiag.kv.pools.token_cells import TokenSettings
from kvdiag.kv.pools.token_pools import TokenModel

DATA = Path(__file__).parents[1] / "data"
_SHARED = {"--tp-size": "tensor_parallel", "--kv-cache-dtype": "kv_dtype"}
_SWITCH = {"on": True, "off": False, "auto": None}


def recorded(name: str) -> Sequence[dict[str, Any]]:
    """The rows of a data file."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def vectors(engine: str, *, measured: bool) -> Sequence[dict[str, Any]]:
    """One engine's rows that were measured, or published."""
    return [row for row in recorded("engine_vectors.jsonl") if (row["engine"], row["measured"]) == (engine, measured)]


def settings_of(engine: str, flags: str) -> dict[str, Any]:
    """A command line's flags as settings."""
    table, words, found = ENGINE_FLAGS[engine], flags.split(), dict[str, Any]()
    while words:
        flag = words.pop(0)
        field, kind, *_ = (_SHARED[flag], "text") if flag in _SHARED else table[flag]
        if kind in ("flag", "off"):
            found[field] = kind == "flag"
        else:
            text = words.pop(0)
            found[field] = _SWITCH[text] if kind == "switch" else float(text) if kind == "float" else text
            if text.isdecimal():
                found[field] = int(text)
    return found


def config(name: str) -> dict[str, Any]:
    """A published config."""
    found: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def sglang_model(config: Mapping[str, Any], **settings: Any) -> TokenModel:
    """A model served by SGLang."""
    return TokenModel(parse_architecture(config), TokenSettings(**settings))
