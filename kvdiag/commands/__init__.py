"""The command line: one module per command, listed here and imported only when called, so that `--help` stays fast.

`main` is the only place where errors become exit codes. They follow the monitoring plugins: 0 ok, 1 suspect, 2 fault,
3 unknown, inconclusive, could not run, or wrong usage. As 1 and 2 are verdicts, nothing else may end with them: not
click, a closed stdout or an unforeseen error. Options come from the command line, then the environment, then the
file of --config, whose names and types are all checked, since click would accept wrong ones.
"""

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
from kvdiag.files import opened
from kvdiag.formatting import one_line

MAX_FILE_BYTES = 2**20
"""Of --config."""

EXIT_UNKNOWN = 3

COMMANDS: Mapping[str, str] = {
    "run": "Run load tests against a server and diagnose its memory.",
    "serve": "Monitor a server; serve metrics and a live diagnosis.",
    "top": "Show a live view of memory and findings in the terminal.",
    "audit": "Show where the GPU memory is; the lines add up to the total.",
    "fit": "Compute a model's KV-cache cost and whether it fits a GPU.",
    "diagnose": "Diagnose a recorded trace, a Prometheus history, or a crash.",
    "baseline": "Compare two engine versions or configurations, for CI.",
    "doctor": "Check access to GPUs, server, agents and Prometheus.",
    "explain": "Explain a verdict or an alert, or print its runbook.",
    "alerts": "Print the Prometheus alerting rules.",
    "agent": "Install the agent that reports torch's memory.",
    "drill": "Run a simulated server with a chosen fault.",
    "bundle": "Pack a diagnosis and its data for a bug report.",
    "completion": "Print the script that completes commands in a shell.",
    "man": "Print the manual page of all commands.",
}
"""One-line help by name. A command's module is `kvdiag/commands/NAME.py`; its click command is called `command`."""


SILENT = frozenset({"fit", "agent", "completion", "man"})
"""Commands that log only with -v: importing the log library would take a fifth of their time."""


class CommandGroup(click.Group):
    """A group whose usage errors name the command whose help to read."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the called command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # For an option without its value click's parser does not name the command.
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
            # Before anything else imports the log library: it keeps rich out of it.
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
    help="TOML file of options, with a table for each command.",
)
@click.option("-v", "--verbose", count=True, help="Log events to stderr; -vv also logs each failed read.")
@click.pass_context
def cli(context: click.Context, config: Path | None, verbose: int) -> None:
    """Show where an LLM server's GPU memory goes, whether it is returned after load, and what to change.

    \b
    kvdiag run --url http://127.0.0.1:8000      diagnose a running server
    kvdiag run --simulate kv-leak               see a diagnosis without a server
    kvdiag audit --url http://127.0.0.1:8000    show where the memory is

    Exit codes: 0 ok, 1 suspect, 2 fault, 3 unknown or could not run. Every option can also be set as an environment
    variable, such as KVDIAG_RUN_URL, or in the file
    of --config; flags override the environment, which overrides the file.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    if verbose or context.invoked_subcommand not in SILENT:
        importlib.import_module("kvdiag.commands.logging_setup").configure(verbose)
    if config is not None:
        context.default_map = settings(context, config)


def settings(context: click.Context, path: Path) -> dict[str, dict[str, Any]]:
    """Return the defaults that a file sets for each command, with every name and value type checked.

    Raises:
        KvdiagError: a name or value is invalid, or the file cannot be read.
    """
    try:
        with opened(path) as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise KvdiagError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, too large for options")
        found = tomllib.loads(text.decode())
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise KvdiagError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise KvdiagError(f"{path} is not valid TOML: nested too deeply") from error
    defaults: dict[str, dict[str, Any]] = {}
    for name, options in found.items():
        command = cli.get_command(context, name)
        if command is None:
            raise KvdiagError(f"{path}: unknown command {name!r}; tables are named after commands, such as [run]")
        if not isinstance(options, dict):
            raise KvdiagError(f"{path}: {name!r} must be a table of options, [{name}]")
        # Options that are read before the file, such as --config itself, would come too late in it.
        known = {parameter.name: parameter for parameter in command.params if not parameter.is_eager}
        for option, value in options.items():
            parameter = known.get(option.replace("-", "_"))
            if parameter is None:
                raise KvdiagError(f"{path}: {name} has no option {option!r}; see kvdiag {name} --help")
            if (wanted := _misfit(parameter, value)) is not None:
                raise KvdiagError(f"{path}: {option!r} of {name} must be {wanted}")
            defaults.setdefault(name, {})[parameter.name or option] = value
    return defaults


def _misfit(parameter: click.Parameter, value: Any) -> str | None:
    """Return what an option's value must be if it is not: click would read `true` as 1, and anything as a string."""
    if not isinstance(value, str | int | float):
        return "a string, a number, true or false"
    if getattr(parameter, "is_flag", False):
        return None if isinstance(value, bool | str) else "true or false"
    if isinstance(value, bool):
        return "a string or a number"
    if isinstance(parameter.type, click.types.IntParamType):
        return None if isinstance(value, int) else "an integer"
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
    except SystemExit as leave:
        if not leave.code:
            return 0  # completions are printed
        # click exits with 1 when the reader of stdout has exited (`kvdiag run | head`), which would read as a verdict.
        close_stdout()
    except Exception as error:  # noqa: BLE001 - the interpreter's own exit code would be 1, which reads as a verdict
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
            close_stdout()
            _complain(f"cannot write output: {error.strerror}")
        else:
            for line in traceback.format_exc().splitlines():
                _say(line)
            _complain("internal error in kvdiag or its installation; please report it with the traceback above")
    else:
        return result if isinstance(result, int) else 0
    return EXIT_UNKNOWN


def _open_streams() -> None:
    """Open closed standard streams on /dev/null, before one of our files takes their number.

    Characters that the encoding of stdout lacks become question marks.
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
    """Drop what could not be written, or the interpreter would try again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    """Print one line, even if a server or a file put line ends into the message."""
    _say(f"kvdiag: {' '.join(one_line(message).split())}")


def _say(line: str) -> None:
    """Write to stderr if that is possible."""
    with contextlib.suppress(OSError):
        click.echo(one_line(line), err=True)
