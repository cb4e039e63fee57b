"""Model values to plain JSON values and back by their declared types: the one codec of kvdiag's own documents.

On the way out `None` and values of the model are left out where they are the default, so that a sample takes about 300
bytes, and a capability that is new changes no header of an engine that has them all. On the way in a value of the wrong
type is refused by the name of its field, and so is an impossible one, by the class's own constructor. A field that is
not known is refused too, because a trace that is not fully understood must not be judged; `lenient` skips it, for
documents that are shown, not judged, and may come from another version of kvdiag. Lists are bounded.
"""

import dataclasses
import sys
import types
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A model value as dicts, lists and scalars, ready for `json.dumps`."""
    if (defaults := _defaults(type(value))) is not None:  # type: ignore[arg-type]  # mypy takes a class for unhashable
        return {
            name: to_plain(item)
            for name, default in defaults
            # Without a default of None, a field that is left out would be missing on the way in.
            if (item := getattr(value, name)) is not None or default is not None
            if _defaults(type(item)) is None or item != default  # type: ignore[arg-type]  # as above
        }
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...] | None:
    """The fields of a class of the model and their defaults; `None` for any other class."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple((field.name, field.default) for field in dataclasses.fields(kind) if field.init)


MAX_ITEMS = 16_384
"""Of one list: sixteen ledger lines for each of a thousand devices."""


def from_plain(kind: type[T], plain: Any, *, lenient: bool = False) -> T:
    """Return the model value that a plain one describes.

    Args:
        kind: the class, a dataclass of the model; its annotations say what its fields must be.
        plain: what `json.loads` returned, of any origin.
        lenient: skip fields that are not known, for documents that are shown and not judged.

    Raises:
        ValueError: a field is missing, of another type, impossible, or (unless lenient) unknown.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"{kind.__name__} must be an object, not {type(plain).__name__}")  # noqa: TRY004 - as the rest
    hints = _fields(kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    unknown = sorted(str(name) for name in plain if name not in hints)
    if unknown and not lenient:
        raise ValueError(f"{kind.__name__} has no field {unknown[0][:40]!r}")
    values = {
        name: _value(hints[name], item, f"{kind.__name__}.{name}", lenient)
        for name, item in plain.items()
        if name in hints
    }
    try:
        return kind(**values)
    except TypeError as error:
        absent = [one for one in dataclasses.fields(kind) if one.name not in values]  # type: ignore[arg-type]
        missing = ", ".join(
            repr(one.name) for one in absent if one.default is one.default_factory is dataclasses.MISSING
        )
        raise ValueError(f"{kind.__name__.lstrip('_')}: {f'{missing} missing' if missing else error}") from error


@cache
def _fields(kind: type[Any]) -> Mapping[str, Any]:
    """Resolved annotations by class: resolving them for each of 86,400 samples would take a minute."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _value(hint: Any, item: Any, where: str, lenient: bool) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if item is None and type(None) in arguments:
            return None
        problems = []
        for choice in (choice for choice in arguments if choice is not type(None)):
            try:
                return _value(choice, item, where, lenient)
            except ValueError as error:
                problems.append(error)
        raise problems[0]
    if origin is Literal:
        if item not in arguments:
            raise ValueError(f"{where} is {str(item)[:40]!r}, not one of {', '.join(map(str, arguments))}")
        return item
    if origin is tuple:
        if not isinstance(item, list):
            raise ValueError(f"{where} must be a list, not {type(item).__name__}")
        if len(item) > MAX_ITEMS:
            raise ValueError(f"{where} has {len(item)} items, more than {MAX_ITEMS}")
        return tuple(_value(arguments[0], part, where, lenient) for part in item)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, item, lenient=lenient)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if item not in list(hint):
            raise ValueError(f"{where} is {str(item)[:40]!r}, not one of {', '.join(hint)}")
        return hint(item)
    return _scalar(hint, item, where)


def _scalar(hint: Any, item: Any, where: str) -> Any:
    # bool is an int to Python, and an int a float to JSON: neither confusion may pass, or 1 would be True.
    if hint is float and isinstance(item, int | float) and not isinstance(item, bool):
        # JSON has no infinity, but 1e999 reads as one, and whole numbers of any length.
        if not abs(item) <= sys.float_info.max:
            raise ValueError(f"{where} is not a finite number")
        return float(item)
    if hint in (int, str, bool) and type(item) is hint:
        return item
    raise ValueError(f"{where} must be {getattr(hint, '__name__', hint)}, not {type(item).__name__}")
