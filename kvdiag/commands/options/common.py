"""Parameter types and options that several commands share.

A command's options are the fields of a dataclass (`given_by`), which `collected` turns into click options and back into
one value: a command takes one argument, and an option is declared, typed and documented in one place. Values are
checked while they are parsed, so that an error names the option. An option on the command line excludes its opposite
from the environment or a file (`either`). Nothing here talks to a server: `kvdiag fit` works without one.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

import math
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import click
from click.core import ParameterSource

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.gpu_catalogue import parse_bytes

UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}

TOKENS = re.compile(r"(\d{1,12})([kKmM]?)")
TOKEN_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}

T = TypeVar("T")
U = TypeVar("U")


def parse_duration(text: str) -> float | None:
    """Return the seconds of a text such as 90s, 12m or 1h30m; `None` if it is no duration."""
    parts = re.findall(r"(\d{1,9})([smhdw])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(int(number) * UNIT_SECONDS[unit] for number, unit in parts)


class Duration(click.ParamType[float]):
    """Seconds between two bounds, given as a number and its unit."""

    name = "duration"

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        """Keep the bounds."""
        self._least, self._most = least_seconds, most_seconds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds of a text such as 12m."""
        seconds = parse_duration(str(value).strip())
        if seconds is None:
            self.fail(f"{value!r} is not a duration: give a number and a unit, such as 90s, 12m or 1h", param, ctx)
        if not self._least <= seconds <= self._most:
            self.fail(f"{value} is outside {_short(self._least)} to {_short(self._most)}", param, ctx)
        return seconds


def _short(seconds: float) -> str:
    unit = next(unit for unit, size in reversed(UNIT_SECONDS.items()) if seconds >= size)
    return f"{seconds / UNIT_SECONDS[unit]:g}{unit}"


class Finite(click.types.FloatParamType):
    """A number that is neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number of a text such as 0.9."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Within(click.FloatRange, Finite):
    """A finite number between two bounds; click alone takes NaN to be within any."""


class Size(click.ParamType[int]):
    """Bytes, at least so many, given as a number and its unit."""

    name = "size"

    def __init__(self, least_bytes: int = 1) -> None:
        """Keep the lower bound."""
        self._least = least_bytes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes of a text such as 512MiB."""
        try:
            size = parse_bytes(str(value), field="it")
        except KvModelError:
            self.fail(f"{value!r} is not a size: give a number and a unit, such as 512MiB", param, ctx)
        if size < self._least:
            self.fail(f"{value} is less than the minimum of {self._least >> 20}MiB", param, ctx)
        return size


class Tokens(click.ParamType[int]):
    """A number of tokens, with the suffixes of vLLM (utils/argparse_utils.py::human_readable_int): 32k, 32K."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the tokens of a text: 32k is 32,000, 32K is 32,768."""
        found = TOKENS.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a number of tokens: give one such as 32768, 32k or 32K", param, ctx)
        return int(found[1]) * TOKEN_UNITS[found[2]]


def either(first: tuple[str, T | None], second: tuple[str, U | None]) -> tuple[T | None, U | None]:
    """Return the values of two options that exclude each other, given by name and value.

    If one is on the command line, the other counts only if it is too, not from the environment or a file.
    """
    context = click.get_current_context()
    one, other = (context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name, _ in (first, second))
    return first[1] if one or not other else None, second[1] if other or not one else None


API_KEY = click.option("--api-key", envvar="KVDIAG_API_KEY", help="Server's API key; prefer KVDIAG_API_KEY.")
CA_FILE = click.option("--ca-file", type=click.Path(path_type=Path), help="CA certificates to trust, as a PEM file.")
INSECURE = click.option("--insecure", is_flag=True, help="Do not verify the server's TLS certificate.")
agent_option = click.option(
    "--agent-dir",
    envvar="KVDIAG_AGENT_DIR",
    type=click.Path(path_type=Path, readable=False),  # one that cannot be read is a gap, which doctor explains
    help="Directory the agents publish in (see `kvdiag agent`).",
)
request_ids_option = click.option(
    "--show-request-ids", is_flag=True, help="Show the ids of requests that lost blocks, not hashes."
)
output_option = click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)


def given_by(option: Any, *flags: str, default: Any = None, restart: bool = False, **attributes: Any) -> Any:
    """Return a dataclass field whose value is that of a click option: a ready one, or the help text of a new one.

    A new option has the name and the type of its field unless given otherwise, and shows a default that is not empty.
    `restart` marks an option of a daemon that only a restart changes.
    """
    new = None if callable(option) else (flags, {"help": option, "show_default": bool(default), **attributes})
    return field(default=default, metadata={"option": new or option, "restart": restart})


def flag_of(one: Field[Any]) -> str:
    """The flag of a new option."""
    flags, _ = one.metadata["option"]
    return flags[0] if flags else f"--{one.name.replace('_', '-')}"


def _option(one: Field[Any], hint: Any) -> Any:
    if callable(ready := one.metadata["option"]):
        return ready
    flags, attributes = ready
    kind = next((each for each in (int, float, Path) if hint in (each, each | None)), None)
    if kind is not None:
        types = {int: click.INT, float: Finite(), Path: click.Path(path_type=Path)}
        attributes = {"type": types[kind], **attributes}
    if hint is bool:
        attributes = {"is_flag": True, **attributes}
    return click.option(
        *(flags or (flag_of(one),)), one.name, default=False if hint is bool else one.default, **attributes
    )


def collected(kind: type[Any], name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that adds the options of a dataclass's fields; their values arrive as one, called `name`."""
    hints = get_type_hints(kind)

    def add(function: Callable[..., T]) -> Callable[..., T]:
        @wraps(function)
        def command(*arguments: Any, **values: Any) -> T:
            own = kind(**{one.name: values.pop(one.name) for one in fields(kind)})
            return function(*arguments, **{name: own}, **values)

        for one in reversed(fields(kind)):
            command = _option(one, hints[one.name])(command)
        return command

    return add


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """Where a server's metrics are, the key that it requires, and which certificates to trust."""

    metrics_url: str | None = given_by("Where the metrics are, if not at --url (router, gateway).")
    api_key: str | None = given_by(API_KEY)
    ca_file: Path | None = given_by(CA_FILE)
    insecure: bool = given_by(INSECURE, default=False)


server_access = collected(ServerAccess, "access")
