"""The command line: one file per command, listed here, imported only when it is called (`--help` stays fast).

`main` is the one place where errors become exit codes. They follow the monitoring-plugins: 0 ok, 1 suspect, 2 fault,
3 unknown, inconclusive, could not run, or wrong usage.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import kvdiag
from kvdiag.errors import KvdiagError

EXIT_UNKNOWN = 3

COMMANDS: Mapping[str, str] = {
    "run": "Four test steps against a server: a verdict with evidence and a remedy.",
    "serve": "The daemon beside a server: metrics, and a diagnosis that is always there.",
    "top": "A live view in the terminal: where the memory is, where it goes, what is found.",
    "audit": "Where the memory is: every byte of the device on a line of its own.",
    "fit": "What a model's KV cache costs, and whether model, context and traffic fit a GPU.",
    "diagnose": "Judge a recorded trace, a Prometheus' history, or what a dead server left.",
    "baseline": "Hold one engine version or configuration against another, with an exit code for CI.",
    "doctor": "Whether kvdiag can see GPUs, server, agents and Prometheus from here, and what to change.",
    "explain": "What is known of a verdict: symptom, likely cause, how to confirm it, what to change.",
    "agent": "Put the agent, which tells what torch holds, where a server finds it.",
    "drill": "Serve a simulated server with a chosen fault, to try things on.",
}
"""Name to one-line help. The code of a command is `kvdiag/commands/NAME.py`, its click command is called `command`."""


SILENT = frozenset({"fit", "agent"})
"""Commands that log nothing unless asked: importing the log library would take a fifth of their time."""


class CommandGroup(click.Group):
    """A group whose commands' usage errors all name the command whose help is to be read."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that is called."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # An option without its value: click's parser does not say whose.
            if error.ctx is None and (name := ctx.invoked_subcommand) is not None:
                command = self.get_command(ctx, name)
                error.ctx = ctx if command is None else click.Context(command, parent=ctx, info_name=name)
            raise


class _LazyGroup(CommandGroup):
    """Lists the commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in SILENT:
            # Before anything else imports the log library: it takes care of what that brings along.
            importlib.import_module("kvdiag.commands.logging_setup")
        found: click.Command = importlib.import_module(f"kvdiag.commands.{cmd_name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KVDIAG", "max_content_width": 100},
)
@click.version_option(kvdiag.__version__, prog_name="kvdiag")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A TOML file with a table for each command and its options in it; flags and environment come first.",
)
@click.option("-v", "--verbose", count=True, help="Log what happens to stderr; twice for every reading that fails.")
@click.pass_context
def cli(context: click.Context, config: Path | None, verbose: int) -> None:
    """Say where an LLM server's GPU memory is, whether it comes back, and what to change.

    \b
    kvdiag run --url http://127.0.0.1:8000      diagnose a running vLLM server
    kvdiag run --simulate kv-leak               see a diagnosis without a server
    kvdiag audit --url http://127.0.0.1:8000    where every byte is

    Exit codes: 0 ok, 1 suspect, 2 fault, 3 unknown or could not run. Every option can be given as an environment
    variable, as in KVDIAG_RUN_URL.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    if verbose or context.invoked_subcommand not in SILENT:
        importlib.import_module("kvdiag.commands.logging_setup").configure(verbose)
    if config is not None:
        context.default_map = settings(context, config)


def settings(context: click.Context, path: Path) -> dict[str, dict[str, Any]]:
    """The defaults a file gives by command, after every name and every kind of value in it has been found right.

    Raises:
        KvdiagError: one is not, or the file cannot be read.

    """
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KvdiagError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise KvdiagError(f"{path} is not TOML that can be read: nested too deeply") from error
    defaults: dict[str, dict[str, Any]] = {}
    for name, options in found.items():
        command = cli.get_command(context, name)
        if command is None or not isinstance(options, dict):
            raise KvdiagError(f"{path}: there is no command {name!r} to set options for")
        # What is looked at before the file, as --config itself, would come too late in it.
        known = {parameter.name: parameter for parameter in command.params if not parameter.is_eager}
        for option, value in options.items():
            parameter = known.get(option.replace("-", "_"))
            if parameter is None:
                raise KvdiagError(f"{path}: {name} has no option {option!r}")
            if (wanted := _misfit(parameter, value)) is not None:
                raise KvdiagError(f"{path}: {option!r} of {name} has to be {wanted}")
            defaults.setdefault(name, {})[parameter.name or option] = value
    return defaults


def _misfit(parameter: click.Parameter, value: Any) -> str | None:
    """What the value of an option has to be where it is not: click would make a 1 of `true`, and a text of anything."""
    if not isinstance(value, str | int | float):
        return "a text, a number, true or false"
    if getattr(parameter, "is_flag", False):
        return None if isinstance(value, bool | str) else "true or false"
    if isinstance(value, bool):
        return "a text or a number"
    if isinstance(parameter.type, click.types.IntParamType):
        return None if isinstance(value, int) else "a whole number"
    if isinstance(parameter.type, click.types.FloatParamType):
        return None if isinstance(value, int | float) else "a number"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _open_streams()
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments), prog_name="kvdiag", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "kvdiag"
        _complain(f"{error.format_message().rstrip('.')} (see {command} --help)")
    except click.ClickException as error:
        _complain(error.format_message())
    except click.Abort:
        _complain("interrupted")
    except KvdiagError as error:
        _complain(str(error))
        return error.exit_code
    except SystemExit:
        # So click answers when the reader of our output has gone (`kvdiag run | head`), with a 1 that would read as a
        # verdict. Nothing is left to say, nor anywhere to say it.
        close_stdout()
    except Exception as error:  # noqa: BLE001 - the interpreter's own exit code would be 1, which reads as a verdict
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
            close_stdout()
            _complain(f"cannot write: {error.strerror}")
        else:
            for line in traceback.format_exc().splitlines():
                _say(line)
            _complain("a mistake of kvdiag's own, or of its installation: please report it with the lines above")
    else:
        return result if isinstance(result, int) else 0
    return EXIT_UNKNOWN


def _open_streams() -> None:
    """Give what was closed by whoever started us to /dev/null, before a file of ours takes its number.

    What the encoding of stdout does not have is a question mark there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - a number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def close_stdout() -> None:
    """Let go of what could not be written, or the interpreter would try again at its end, and say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    """One line, whatever a server or a file has put into the message."""
    _say(f"kvdiag: {' '.join(_shown(message).split())}")


def _say(line: str) -> None:
    """To whoever reads errors, where that can be written."""
    with contextlib.suppress(OSError):
        click.echo(_shown(line), err=True)


def _shown(text: str) -> str:
    """What can be shown: nothing in it moves a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
