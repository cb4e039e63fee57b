"""The flags of other engines on the command line of `kvdiag fit --engine NAME`, as in the engine's own start command.

kvdiag/kv/pools/engine_flags.json lists, for each engine, the flags that decide its pools, the setting that each is, its
type and its bounds. They are taken from the arguments before click reads the rest, only for the engine that --engine
names, so that a flag is never taken for another engine's, and a mistyped one is still an error. Flags that `fit` has
itself (--tp, --kv-cache-dtype) stay click's. Those of plain_flags.json are left out: they decide no pool.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvdiag.commands.fitting import vllm_command
from kvdiag.commands.fitting.vllm_command import NOTED_KEY
from kvdiag.commands.options.common import TOKEN_UNITS, TOKENS
from kvdiag.engine_memory import modelled_engines
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS, PLAIN_FLAGS, POWER_OF_TWO, allowed, check_flag

META_KEY = "kvdiag.engine_settings"
_ENGINE_KEY = "kvdiag.engine"
_SWITCH = {"on": True, "1": True, "off": False, "0": False, "auto": None}


class EngineCommand(click.Command):
    """A command that also takes the flags of the engine that --engine names; `engine_settings` returns them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the engine's flags out, then let click read the rest."""
        ctx.meta[_ENGINE_KEY] = engine = _engine(ctx, args)
        taken, rest = _taken(engine, args)
        ctx.meta[META_KEY] = taken
        if engine in ("", *modelled_engines()):
            rest, ctx.meta[NOTED_KEY] = vllm_command.taken(rest)
        return super().parse_args(ctx, rest)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, then the flags of the engine that --engine names, one line for each setting."""
        super().format_options(ctx, formatter)
        engine = ctx.meta.get(_ENGINE_KEY, "")
        rows: dict[str, tuple[list[str], str]] = {}
        for flag, (field, kind, *_) in ENGINE_FLAGS.get(engine, {}).items():
            setting = f"{field} {kind}" if kind == "off" else field
            rows.setdefault(setting, ([], allowed(engine, flag) or _WANTED.get(kind, "")))[0].append(flag)
        if rows:
            with formatter.section(f"Flags of {engine}"):
                formatter.write_dl([(", ".join(flags), words) for flags, words in rows.values()])
            formatter.write_text(f"Flags that decide no pool, such as {next(iter(PLAIN_FLAGS[engine]))}, are ignored.")


def engine_settings() -> Mapping[str, Any]:
    """The settings that the engine's own flags give in this call."""
    context = click.get_current_context(silent=True)
    found: Mapping[str, Any] = {} if context is None else context.meta.get(META_KEY, {})
    return found


def _engine(ctx: click.Context, args: Sequence[str]) -> str:
    """The value of --engine: of the arguments, the environment or the file of settings."""
    for place, argument in enumerate(args):
        if argument == "--":
            break
        if argument == "--engine" and place + 1 < len(args):
            return args[place + 1]
        if argument.startswith("--engine="):
            return argument.partition("=")[2]
    named = os.environ.get(f"{ctx.auto_envvar_prefix}_ENGINE") if ctx.auto_envvar_prefix else None
    return named or str((ctx.default_map or {}).get("engine", ""))


def _taken(engine: str, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    flags = ENGINE_FLAGS.get(engine, {})
    taken: dict[str, Any] = {}
    rest: list[str] = []
    waiting = list(args)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        if argument == "--":
            return taken, [*rest, argument, *waiting]
        if (plain := PLAIN_FLAGS.get(engine, {}).get(flag)) is not None:
            del waiting[: plain != "flag" and not equals]
            continue
        if flag not in flags:
            rest.append(argument)
            continue
        field, kind, *_ = flags[flag]
        if kind in ("flag", "off"):
            if equals:
                raise click.UsageError(f"{flag} takes no value")
            taken[field] = kind == "flag"
            continue
        if not equals:
            if not waiting:
                raise click.UsageError(f"{flag} needs a value")
            value = waiting.pop(0)
        taken[field] = _value(flag, kind, value)
        check_flag(engine, flag, taken[field])
    return taken, rest


def _value(flag: str, kind: str, text: str) -> Any:
    """A flag's value.

    Raises:
        click.UsageError: it is not of the flag's type.
    """
    try:
        match kind:
            case "layers" if text in ("all", "auto"):
                return None
            case "int" | "layers" | "power of two":
                return int(text[:20])
            case "float":
                return float(text[:40])
            case "tokens":
                found = TOKENS.fullmatch(text)
                if found is not None:
                    return int(found[1]) * TOKEN_UNITS[found[2]]
            case "list of tokens":
                return tuple(int(part[:20]) for part in text[:4096].split(","))
            case "switch":
                if text in _SWITCH:
                    return _SWITCH[text]
            case "version":
                return tuple(int(part) for part in text.lstrip("v").split(".")[:3])
            case _:
                return text[:200]
    except ValueError:
        pass
    raise click.UsageError(f"{flag} is {text[:40]!a}: give {_WANTED[kind]}")


_WANTED = {
    "int": "a whole number",
    "layers": "a number of layers, all or auto",
    POWER_OF_TWO: "a whole number",
    "float": "a number",
    "tokens": "a number of tokens, such as 32768 or 32K",
    "list of tokens": "numbers of tokens, such as 1024,131072",
    "switch": "on, off or auto",
    "version": "a version, such as 0.13.0",
}
