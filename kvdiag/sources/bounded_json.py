"""Decodes untrusted JSON within a memory budget: two bytes such as `{}` become an object of 64.

The number of values is bounded before decoding: each value begins the text, or follows a comma or an opening bracket.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_VALUES = 250_000
"""A daemon's ledger of 1,000 devices has 100,000. A value takes at most 120 bytes plus its text."""


class TooManyValuesError(ValueError):
    """A text with more values than the limit."""


def most_values(text: bytes | bytearray | str) -> int:
    """An upper bound of the number of values in a JSON text; punctuation within strings is counted too."""
    if isinstance(text, str):
        return 1 + text.count(",") + text.count("[") + text.count("{")
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def decode(
    text: bytes | bytearray | str,
    *,
    max_values: int = MAX_VALUES,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """The value of a JSON text. `parse_constant` returns the value of NaN, Infinity or -Infinity.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has more values than `max_values`.
    """
    if (count := most_values(text)) > max_values:
        raise TooManyValuesError(f"{count:,} values in one document; at most {max_values:,} are read")
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def decode_object(text: bytes | str, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """The object that a JSON text holds; ValueError as `decode`, and for NaN, infinities and any other value."""
    value = decode(text, max_values=max_values, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for one kind of mistake
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
