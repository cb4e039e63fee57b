"""JSON from whoever wrote it, decoded within a budget: two bytes such as `{}` become an object of 64.

How many values a text can hold is counted before anything is made of it: each begins the text, or stands after a
comma or an opening bracket.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_VALUES = 250_000
"""A daemon's ledger of 1,000 devices has 100,000. A value takes 120 bytes at most, beside its own text."""


class TooManyValuesError(ValueError):
    """A text with more values than are decoded."""


def most_values(text: bytes | bytearray | str) -> int:
    """The number of values that a JSON text has at most; marks within its strings are counted too."""
    if isinstance(text, str):
        return 1 + text.count(",") + text.count("[") + text.count("{")
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def decode(
    text: bytes | bytearray | str, *, max_values: int = MAX_VALUES, parse_constant: Callable[[str], Any] | None = None
) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has more values than `max_values`.

    """
    if (count := most_values(text)) > max_values:
        raise TooManyValuesError(f"{count:,} values in one document; at most {max_values:,} are read")
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
