"""The settings of a model's GGUF file as llama.cpp lists them while it loads it: lines in, values out. Pure.

`llama_model_loader: - kv  5: llama.attention.head_count u32 = 32` (llama-model-loader.cpp). A value is printed up to 40
characters, so that a longer list is cut: a model of which a deciding list is cut is not known by its log.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(
    r"- kv {1,4}\d{1,5}: {1,80}([\w.-]{1,120}) {1,40}([uif]\d{1,2}|bool|str|arr\[\w{1,8},\d{1,9}\]) {1,40}= (.{0,400})"
)
_DECIDING = ("attention.", "feed_forward_length", "block_count")
_MAX_VALUES = 1_024


@dataclass(slots=True)
class ListedModel:
    """What was listed of one file so far."""

    values: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False

    def take(self, line: str) -> None:
        """Read one line."""
        found = _LINE.search(line)
        if found is None or len(self.values) >= _MAX_VALUES:
            return
        name, kind, text = found[1], found[2], found[3].strip()
        if kind == "str":
            self.values[name] = text
            return
        try:
            self.values[name] = json.loads(text)
        except (ValueError, RecursionError):
            _, _, own = name.partition(".")
            self.is_cut = self.is_cut or own.startswith(_DECIDING)

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """All of them; `None` where the log does not show what decides the caches."""
        architecture = self.values.get("general.architecture")
        return None if self.is_cut or f"{architecture}.block_count" not in self.values else self.values
