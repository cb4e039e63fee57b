"""Options of a command, given in Python: each is converted and checked by the command's own option."""

from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import PurePath
from typing import Any

import click

from kvdiag.api.checked_arguments import is_usable, shown
from kvdiag.errors import KvdiagError


def option_values(command: click.Command, given: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """The values of options by their names, as the command would have them; `None` is an option that is not given.

    Numbers and paths may be given as such or as text, times as `datetime`, headers as a mapping.

    Raises:
        KvdiagError: there is no such option, or a value is none of it.
    """
    if unknown := sorted(set(given) - set(allowed)):
        raise KvdiagError(f"there is no option {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    options = {one.name: one for one in command.params}
    context = click.Context(command, info_name=command.name)
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            found[name] = options[name].type_cast_value(context, _as_typed(value, options[name]))
        except click.UsageError as error:
            raise KvdiagError(f"{name}: {error.format_message()}") from error
    return found


def _as_typed(value: Any, option: click.Parameter) -> Any:
    """A value as it would be typed: click would round a number that is no integer, and take any text for true."""
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise click.BadParameter("give True or False")
        return value
    if getattr(option, "multiple", False):
        pairs = [f"{key}:{each}" for key, each in value.items()] if isinstance(value, Mapping) else value
        return tuple(_typed(one) for one in (pairs if isinstance(pairs, list | tuple) else (pairs,)))
    return _typed(value)


def _typed(value: Any) -> str:
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float | PurePath | datetime)
        or not is_usable(value)
    ):
        raise click.BadParameter(f"it is {shown(value)}: give text, a number or a path")
    try:
        return str(value.timestamp() if isinstance(value, datetime) else value)
    except (OverflowError, ValueError) as error:
        raise click.BadParameter(f"{value} is no time that this machine knows") from error
