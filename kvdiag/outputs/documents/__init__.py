"""JSON documents and their schemas, built of values as JSON has them. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


def plain(value: Any) -> Any:
    """A value as JSON has it: a dataclass as an object of its fields, a tuple as a list."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return value


def fields_of(value: object | None, *names: str, **renamed: str) -> Json:
    """The named fields of a value, `renamed` under another name; each is null if the value is `None`."""
    fields = {name: name for name in names} | renamed
    return {name: None if value is None else plain(getattr(value, field)) for name, field in fields.items()}
