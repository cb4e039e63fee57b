"""Flags of `vllm serve` on the command line of `kvdiag fit`, so that a start command can be used as it is.

Flags that are no options of `fit` are taken out before click reads the rest: those that change nothing are dropped,
those that change memory that is only estimated are kept for a note, and those that are not modelled are errors. As in
vLLM, names can be written with underscores, and a list is given as several values. Environment variables that vLLM
reads where it sizes the cache are read from the environment of the call.
"""

import os
from collections.abc import Mapping, Sequence

import click

from kvdiag.formatting import plural
from kvdiag.kv.fit.vllm_flags import MODELLED_VARIABLES, REFUSED_VARIABLES, VLLM_FLAGS, VllmFlag

NOTED_KEY = "kvdiag.vllm_estimated_flags"
LISTS = frozenset({"--kv-cache-dtype-skip-layers"})
"""Options of `fit` with several values, which click gets as one."""

_ON = frozenset({"1", "true", "yes", "on"})


def taken(args: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments that are left for click, and the flags whose effect is not in the estimates.

    Raises:
        click.UsageError: a flag or a variable changes the cache in a way that is not modelled.
    """
    for name, variable in REFUSED_VARIABLES.items():
        if name in os.environ:
            _check(variable, (os.environ[name],))
    rest: list[str] = []
    noted: list[str] = []
    waiting = list(args)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            return [*rest, argument, *waiting], tuple(noted)
        name, equals, value = _spelled(argument).partition("=")
        base, dot, _ = name.partition(".")
        if name in LISTS:
            values = [value] if equals else _list(waiting)
            rest.append(f"{name}={','.join(values)}")
            continue
        flag = VLLM_FLAGS.get(base if name.startswith("--") else name)
        if flag is None:
            if dot and name.startswith("--"):
                raise click.UsageError(f"{name[:80]!a}: pass {base[:80]} as one JSON object")
            rest.append(argument if name.startswith("-") and not name.startswith("--") else _spelled(argument))
            continue
        given = [value] if equals else _list(waiting) if flag.values is None else waiting[: flag.values]
        if not equals and flag.values:
            if len(given) < flag.values or any(one.startswith("--") for one in given):
                raise click.UsageError(f"{name} needs {plural(flag.values, 'value')}")
            del waiting[: flag.values]
        _check(flag, given)
        if flag.estimated and name not in noted:
            noted.append(name)
    return rest, tuple(noted)


def _spelled(argument: str) -> str:
    """The argument with dashes in the flag's name (FlexibleArgumentParser), and -O3 as the flag that it is."""
    if argument.startswith("-O") and argument[2:].removeprefix("=").isalnum():
        return f"-O={argument[2:].removeprefix('=')}"
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    base, dot, path = name.partition(".")
    return f"{base.replace('_', '-')}{dot}{path}{equals}{value}"


def _list(waiting: list[str]) -> list[str]:
    """The values of a flag that takes several, up to the next flag; they are removed from what waits."""
    end = next((place for place, one in enumerate(waiting) if one.startswith("-")), len(waiting))
    values = waiting[:end]
    del waiting[:end]
    return values


def _check(flag: VllmFlag, values: Sequence[str]) -> None:
    if flag.because and not (flag.values and set(values) <= set(flag.harmless)):
        raise click.UsageError(flag.because)


def estimated_note() -> str:
    """A caution for flags that change what is only estimated; empty without any."""
    context = click.get_current_context(silent=True)
    noted: tuple[str, ...] = () if context is None else context.meta.get(NOTED_KEY, ())
    return f"the estimate leaves out what {', '.join(noted)} changes" if noted else ""


def environment() -> Mapping[str, str]:
    """The variables of vLLM that are modelled and that this call's environment has."""
    if click.get_current_context(silent=True) is None:
        return {}
    return {name: os.environ[name] for name in sorted(MODELLED_VARIABLES) if os.environ.get(name)}


def is_on(name: str, *, default: bool = False) -> bool:
    """Whether an environment variable of vLLM turns something on."""
    value = environment().get(name)
    return default if value is None else value.strip().lower() in _ON
