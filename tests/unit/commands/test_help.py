"""Help: every command has it, as in tests/golden/help, and it comes at once."""

import json
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

import kvdiag
from kvdiag.commands import COMMANDS, cli
from kvdiag.sim import SCENARIOS
from tests.integration.vllm.cli import Result
from tests.unit.commands.bad_input.refusals import call

SUBCOMMANDS = {"agent": ("install", "profile"), "baseline": ("save", "compare"), "fit": ()}
HEAVY = ("httpx2", "rich", "pynvml", "prometheus_client", "torch", "structlog", "psutil", "asyncio")

IMPORTED = """
import io, json, sys
from kvdiag.commands import main
printed, sys.stdout = sys.stdout, io.StringIO()
code = main(json.loads(sys.argv[1]))
sys.stdout = printed
print(json.dumps([code, sorted(sys.modules)]))
"""


def test_help_lists_every_command(golden: Callable[[str, str], None]) -> None:
    """`kvdiag --help` names each command with what it is for; `kvdiag` alone is wrong usage, and prints the same."""
    actual, alone = call("--help"), call()
    assert (0, "") == (actual.code, actual.stderr)
    assert (3, "", actual.stdout) == (alone.code, alone.stdout, alone.stderr)
    golden("help/kvdiag.txt", actual.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, golden: Callable[[str, str], None]) -> None:
    """Each command and its subcommands say how they are used, and exit with 0; -h is --help."""
    actual = [call(name, *more, "--help") for more in ((), *((one,) for one in SUBCOMMANDS.get(name, ())))]
    assert {(0, "")} == {(one.code, one.stderr) for one in actual}
    assert actual[0] == call(name, "-h")
    golden(f"help/{name}.txt", "\n".join(one.stdout for one in actual))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_short_help(name: str) -> None:
    """One clause: what an option does, in at most 60 characters; so does the line of the command itself."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    helps = {one.name: len(one.help or "") for one in options} | {name: len(COMMANDS[name])}
    assert {} == {one: length for one, length in helps.items() if not 0 < length <= 60}


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    """What a person waits for most often loads no HTTP client, no terminal library, no NVML, and never torch."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    code, modules = json.loads(done.stdout)
    assert (0, []) == (code, [name for name in HEAVY if name in modules])


def test_help_of_run_names_the_scenarios() -> None:
    """Every scenario that can be simulated is named where it can be asked for."""
    unwrapped = "".join(call("run", "--help").stdout.split())
    assert [] == [scenario for scenario in SCENARIOS if scenario not in unwrapped]


def test_version_is_told() -> None:
    """`kvdiag --version` gives the package's version."""
    assert Result(code=0, stdout=f"kvdiag, version {kvdiag.__version__}\n", stderr="") == call("--version")
