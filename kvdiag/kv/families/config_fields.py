"""Reading an untrusted config.json: every value is checked for type and range, and an error names its field.

Nothing is coerced: a number in quotes is an error, not a number.
"""

from collections.abc import Mapping, Sequence

from kvdiag.kv.model_error import KvModelError

_LARGEST = 1 << 24
_DEEPEST = 8
_MOST_ITEMS = 4096
_SHOWN = 40


class Fields:
    """One JSON object of a config, with the path that leads to it."""

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        """Take the parsed object and the name it is reached by."""
        self._values = values
        self._path = path

    def path(self, name: str) -> str:
        """The field's full name, for messages."""
        shown = name if name.isprintable() else ascii(name)
        return f"{self._path}.{shown}" if self._path else shown

    def filled(self, defaults: Mapping[str, object], *, override: bool = False) -> "Fields":
        """The same object with `defaults` where fields are missing (or, with `override`, in any case)."""
        values = {**self._values, **defaults} if override else {**defaults, **self._values}
        return Fields(values, self._path)

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value as it stands, for callers that accept several types."""
        return self._values.get(name)

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = _LARGEST) -> int:
        """The first of `names` that is there, as a whole number; an error without one and without a default."""
        value = self.maybe_integer(*names, low=low, high=high)
        if value is not None:
            return value
        if default is not None:
            return default
        field = self.path(names[0])
        raise KvModelError(
            f"config has no {' or '.join(self.path(name) for name in names)}; the KV cost cannot be told without it",
            field,
        )

    def maybe_integer(self, *names: str, low: int = 1, high: int = _LARGEST) -> int | None:
        """The first of `names` that is there, as a whole number, or None."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise KvModelError(f"{self.path(name)} is {_shown(value)}, not a whole number", self.path(name))
            if not low <= value <= high:
                raise KvModelError(
                    f"{self.path(name)} is {_shown(value)}; it must lie between {low} and {high}", self.path(name)
                )
            return value
        return None

    def number(self, name: str, *, default: float, low: float, high: float) -> float:
        """A number that may have a fraction."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise KvModelError(
                f"{self.path(name)} is {_shown(value)}; it must be a number between {low} and {high}", self.path(name)
            )
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise KvModelError(f"{self.path(name)} is {_shown(value)}, not true or false", self.path(name))
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where it is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise KvModelError(f"{self.path(name)} is {_shown(value)}, not a string", self.path(name))
        return value

    def sequence(self, name: str, *, most: int = _MOST_ITEMS) -> Sequence[object] | None:
        """A list of no more than `most` entries, or None where it is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise KvModelError(f"{self.path(name)} is {_shown(value)}, not a list", self.path(name))
        if len(value) > most:
            raise KvModelError(f"{self.path(name)} has {len(value)} entries; at most {most} are read", self.path(name))
        return value

    def strings(self, name: str, *, most: int = _MOST_ITEMS) -> tuple[str, ...] | None:
        """A list of strings, or None where it is missing."""
        items = self.sequence(name, most=most)
        if items is None:
            return None
        for item in items:
            if not isinstance(item, str):
                raise KvModelError(f"{self.path(name)} holds {_shown(item)}, not strings only", self.path(name))
        return tuple(str(item) for item in items)

    def integers(self, name: str, *, low: int = 0, high: int = _LARGEST) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where it is missing."""
        items = self.sequence(name)
        if items is None:
            return None
        numbers: list[int] = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise KvModelError(
                    f"{self.path(name)} holds {_shown(item)}, not whole numbers between {low} and {high}",
                    self.path(name),
                )
            numbers.append(item)
        return tuple(numbers)

    def child(self, name: str) -> "Fields | None":
        """A nested object, or None where it is missing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise KvModelError(f"{self.path(name)} is {_shown(value)}, not an object", self.path(name))
        if self.path(name).count(".") >= _DEEPEST:
            raise KvModelError(f"{self.path(name)} is nested more than {_DEEPEST} deep", self.path(name))
        return Fields(value, self.path(name))

    def children(self, name: str) -> "tuple[Fields, ...] | None":
        """A list of objects, or None where it is missing."""
        items = self.sequence(name)
        if items is None:
            return None
        found: list[Fields] = []
        for position, item in enumerate(items):
            path = f"{self.path(name)}[{position}]"
            if not isinstance(item, Mapping):
                raise KvModelError(f"{path} is {_shown(item)}, not an object", path)
            found.append(Fields(item, path))
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
