"""Reads an untrusted config.json: checks every value for type and range, and names the field in each error.

A reader names the fields that it accepts, and the first one that is there counts. A value of the wrong type is an error
and not converted: a number in quotes is no number, and true is none either; only 16.0 is taken as 16. Lists, numbers
and nesting are bounded, because a config can come from anyone. A missing field is an error unless the reader has a
default.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvdiag.errors import KvModelError

_LARGEST = 1 << 24
_DEEPEST = 8
_MAX_ITEMS = 4096
_SHOWN = 40
_LONGEST_PATH = 120

T = TypeVar("T")


class Fields:
    """One JSON object of a config, with the path that leads to it.

    Every reader raises KvModelError, which names the field: a wrong type, a value out of range, or nothing to read.
    """

    __slots__ = ("_path", "_values", "root")

    def __init__(self, values: Mapping[str, object], path: str = "", root: "Fields | None" = None) -> None:
        """Keep the parsed object, the path that leads to it, and the whole config it is part of."""
        self._values = values
        self._path = path
        self.root = self if root is None else root

    def path(self, name: str) -> str:
        """The field's full name, for messages."""
        shown = name if name.isprintable() else ascii(name)
        return f"{self._path}.{shown}" if self._path else shown

    def error(self, name: str, problem: str) -> KvModelError:
        """The error for a field that cannot be used: its full name, then the problem."""
        path = self.path(name)[:_LONGEST_PATH]
        return KvModelError(f"{path} {problem}", path)

    def filled(self, defaults: Mapping[str, object], *, override: bool = False) -> "Fields":
        """The same object with `defaults` where fields are missing (or, with `override`, in any case)."""
        values = {**self._values, **defaults} if override else {**defaults, **self._values}
        return Fields(values, self._path, self.root)

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value unchanged, for callers that accept several types."""
        return self._values.get(name)

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = _LARGEST) -> int:
        """The first of `names` that is there, as a whole number; an error without one and without a default."""
        value = self.maybe_integer(*names, low=low, high=high)
        if value is not None:
            return value
        if default is not None:
            return default
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise self.error(names[0], f"is missing{others}: pass a complete config.json, or --kv-bytes-per-token")

    def maybe_integer(self, *names: str, low: int = 1, high: int = _LARGEST) -> int | None:
        """The first of `names` that is there, as a whole number, or None."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.error(name, f"is {_shown(value)}: it must be a whole number")
            if not low <= value <= high:
                raise self.error(name, f"is {_shown(value)}: it must be between {low:,} and {high:,}")
            return value
        return None

    def number(self, name: str, *, default: float, low: float, high: float) -> float:
        """A number that may have a fraction."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"is {_shown(value)}: it must be a number between {low:,} and {high:,}")
        return float(value)

    def _typed(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.error(name, f"is {_shown(value)}: it must be {expected}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """A true or false."""
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """A string, or None where it is missing."""
        return self._typed(name, str, "a string")

    def sequence(self, name: str, *, most: int = _MAX_ITEMS) -> Sequence[object] | None:
        """A list of no more than `most` entries, or None where it is missing."""
        value: Sequence[object] | None = self._typed(name, list | tuple, "a list")  # type: ignore[arg-type]
        if value is not None and len(value) > most:
            raise self.error(name, f"has {len(value):,} entries: at most {most:,} are supported")
        return value

    def _entries(
        self, name: str, is_possible: Callable[[object], bool], expected: str, *, most: int = _MAX_ITEMS
    ) -> tuple[Any, ...] | None:
        items = self.sequence(name, most=most)
        for item in items or ():
            if not is_possible(item):
                raise self.error(name, f"contains {_shown(item)}: all entries must be {expected}")
        return None if items is None else tuple(items)

    def strings(self, name: str, *, most: int = _MAX_ITEMS) -> tuple[str, ...] | None:
        """A list of strings, or None where it is missing."""
        return self._entries(name, lambda item: isinstance(item, str), "strings", most=most)

    def integers(self, name: str, *, low: int = 0, high: int = _LARGEST) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where it is missing."""

        def is_possible(item: object) -> bool:
            return isinstance(item, int) and not isinstance(item, bool) and low <= item <= high

        return self._entries(name, is_possible, f"whole numbers between {low:,} and {high:,}")

    def child(self, name: str) -> "Fields | None":
        """A nested object, or None where it is missing."""
        value = self._typed(name, Mapping, "an object")  # type: ignore[type-abstract]
        if value is None:
            return None
        if self.path(name).count(".") >= _DEEPEST:
            raise self.error(name, f"is nested more than {_DEEPEST} levels deep")
        return Fields(value, self.path(name), self.root)

    def children(self, name: str) -> "tuple[Fields, ...] | None":
        """A list of objects, or None where it is missing."""
        items = self.sequence(name)
        if items is None:
            return None
        found: list[Fields] = []
        for position, item in enumerate(items):
            path = f"{self.path(name)}[{position}]"
            if not isinstance(item, Mapping):
                raise self.error(f"{name}[{position}]", f"is {_shown(item)}: it must be an object")
            found.append(Fields(item, path, self.root))
        return tuple(found)


def _shown(value: object) -> str:
    """A value for a one-line message: its JSON-like form, cut short, with control characters escaped."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
