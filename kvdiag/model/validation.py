"""Range checks of every figure: the range follows from the unit in its name, and impossible values are refused."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, make_dataclass
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeVar

C = TypeVar("C", bound="Checked")

MAX_BYTES = 2**50
"""No memory of one host is larger (1 PiB); a larger figure is an error."""

MAX_COUNT = 2**53
"""Largest integer that a float in Prometheus's format represents exactly."""

MAX_PID = 2**32
MAX_INDEX = 1024

_MOST = {"bytes": MAX_BYTES, "ratio": 1, "seconds": MAX_COUNT, "pid": MAX_PID, "pids": MAX_PID, "index": MAX_INDEX}
"""The largest value of a figure by the last word of its name; other whole numbers are counts."""


class Checked:
    """A dataclass whose figures are at least 0 and at most what their names allow; `None` is a missing figure.

    The last word of a field's name is its unit: `used_bytes` is at most 1 PiB, `kv_usage_ratio` at most 1, other whole
    numbers are counts. A subclass sets `MOST` where a name allows another one and `SIGNED` for changes, which may be
    negative, and overrides `_problem` for figures that contradict each other. A source that reads an impossible figure
    returns a `Gap` instead.

    Raises:
        ValueError: a figure is outside its bounds, or contradicts another one; the message names class and field.
    """

    __slots__ = ()

    MOST: ClassVar[Mapping[str, int]] = {}
    """The largest value of fields whose names allow another one."""

    SIGNED: ClassVar[frozenset[str]] = frozenset()
    """Fields that may be negative, by as much as they may be positive."""

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        kind = type(self)
        values, figures = _figures(kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable
        # Plain loops, since every value passes through here.
        for value, (name, least, most) in zip(values(self), figures, strict=True):
            if value is None or (type(value) is not tuple and least <= value <= most):
                continue
            for figure in value if isinstance(value, tuple) else (value,):
                if not least <= figure <= most:
                    raise ValueError(f"{kind.__name__}: {name} is {figure}, not within {least}..{most}")
        if (problem := self._problem()) is not None:
            raise ValueError(f"{kind.__name__}: {problem}")

    @classmethod
    def of_columns(cls, count: int, **columns: Sequence[Any]) -> list[Self]:
        """So many values, whose fields are the rows of the columns; other fields have their defaults.

        As if each were built by itself, at a tenth of the time: a column's range is checked as a whole.
        """
        _, figures = _figures(cls)  # type: ignore[arg-type]  # mypy takes a class for unhashable
        for name, least, most in figures:
            if not _all_within(columns.get(name, ()), least, most):
                # A row is at fault, or is a tuple of figures.
                return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        rows = []
        for field in fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
            if field.name not in columns and field.default is MISSING:
                raise TypeError(f"{cls.__name__}: no column for {field.name}")
            rows.append(columns.get(field.name, repeat(field.default, count)))
        settable, set_fields = _settable(cls)  # type: ignore[arg-type]  # as above
        made: list[Self] = list(map(settable.__new__, repeat(settable, count)))  # type: ignore[arg-type]
        deque(map(set_fields, made, *rows), maxlen=0)
        for one in made:
            one.__class__ = cls
        if cls._problem is not Checked._problem:
            for one in made:
                one.__post_init__()
        return made

    def _problem(self) -> str | None:
        """What is impossible about the combination of figures; `None` if nothing is."""
        return None

    def _above(self, name: str, most: int) -> str | None:
        """The problem of a figure that exceeds `most`, the value of another figure."""
        value = getattr(self, name)
        return None if value is None or value <= most else f"{name} is {value}, not within 0..{most}"


def _all_within(values: Sequence[Any], least: int, most: int) -> bool:
    """Whether all values but missing ones are numbers within bounds."""
    try:
        return not values or (type(values[0]) is not tuple and least <= min(values) and max(values) <= most)
    except TypeError:
        known = [value for value in values if value is not None]
        return not known or (type(known[0]) is not tuple and least <= min(known) and max(known) <= most)


@cache
def _figures(kind: type[Checked]) -> tuple[Callable[[Checked], tuple[Any, ...]], tuple[tuple[str, int, int], ...]]:
    """What reads the fields of a class that have bounds, and each with its least and its largest value."""
    found = []
    for field in fields(kind):  # type: ignore[arg-type]  # every subclass is a dataclass
        most = kind.MOST.get(field.name, _MOST.get(field.name.rpartition("_")[2]))
        if most is not None or field.type is int or str(field.type).startswith(("int", "tuple[int")):
            most = MAX_COUNT if most is None else most
            found.append((field.name, -most if field.name in kind.SIGNED else 0, most))
    names = [name for name, _, _ in found]
    if len(names) < 2:  # noqa: PLR2004 - attrgetter makes a tuple of two names and more
        return lambda one: tuple(getattr(one, name) for name in names), tuple(found)
    return attrgetter(*names), tuple(found)


@cache
def _settable(kind: type[C]) -> tuple[type[C], Callable[..., None]]:
    """The class without its protection from changes, and what sets all fields of an instance.

    That is the `__init__` of a dataclass with the same fields: it sets one in a tenth of the time that a call takes.
    """
    plain = {"__slots__": (), "__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every subclass is a dataclass
    settable: type[C] = type(kind.__name__, (kind,), plain)
    return settable, vars(make_dataclass(kind.__name__, names))["__init__"]
