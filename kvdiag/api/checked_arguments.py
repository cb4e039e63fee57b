"""Arguments of the public functions, checked by their annotations: a wrong one is a `KvdiagError` that names it."""

import functools
import inspect
import os
import reprlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar, get_args

import click

from kvdiag.errors import KvdiagError

P = ParamSpec("P")
T = TypeVar("T")

WORDS = {
    "str": "text",
    "int": "a whole number",
    "NoneType": "None",
    "History": "a History, from load() or read_prometheus()",
}


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function; a call that does not fit its signature is a `KvdiagError` instead of a `TypeError`.

    Only classes and unions of classes can be checked; `Any` is left to the function. An error of a command's options,
    which it may use, is a `KvdiagError`, too.
    """
    signature = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            given = signature.bind(*arguments, **options).arguments
        except TypeError as error:
            raise KvdiagError(f"{function.__name__}(): {error}; see help(kvdiag)") from error
        for name, value in given.items():
            kinds = get_args(kind := signature.parameters[name].annotation) or (kind,)
            # A truth value is a number to Python.
            if kind is not Any and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                wanted = " or ".join(WORDS.get(one.__name__, f"a {one.__name__}") for one in kinds)
                raise KvdiagError(f"{name} is {shown(value)}: give {wanted}")
            if kind is not Any and not is_usable(value):
                raise KvdiagError(f"{name} is {shown(value)}: it has characters that no name or address has")
        try:
            return function(*arguments, **options)
        except click.UsageError as error:
            raise KvdiagError(error.format_message()) from error

    return call


def is_usable(value: Any) -> bool:
    """Whether a text or path can be passed to the operating system, or it is neither."""
    try:
        return not isinstance(value, str | PurePath) or b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def shown(value: Any) -> str:
    """A value in one short line, with its type."""
    return f"{' '.join(reprlib.repr(value).split())} ({type(value).__name__})"
