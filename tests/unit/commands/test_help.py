"""Help: every command has it, it comes at once, and it names what there is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvdiag
from kvdiag.commands import COMMANDS
from kvdiag.sim import SCENARIOS
from tests.integration.vllm.cli import Result
from tests.integration.vllm.cli import kvdiag as call

HEAVY = ("httpx2", "rich", "pynvml", "prometheus_client", "torch", "structlog", "psutil", "asyncio")

IMPORTED = """
import io, json, sys
from kvdiag.commands import main
printed, sys.stdout = sys.stdout, io.StringIO()
code = main(json.loads(sys.argv[1]))
sys.stdout = printed
print(json.dumps([code, sorted(sys.modules)]))
"""


def unwrapped(text: str) -> str:
    """The text without any white space, since help is wrapped at blanks and hyphens."""
    return "".join(text.split())


def test_help_lists_every_command() -> None:
    """`kvdiag --help` ends well and names each command with what it is for."""
    # WHEN
    actual = call("--help")

    # THEN
    assert (0, "") == (actual.code, actual.stderr)
    for name, summary in COMMANDS.items():
        assert unwrapped(f"{name} {summary}") in unwrapped(actual.stdout)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(command: str, option: str) -> None:
    """Each command says how it is used, and exits with 0."""
    # WHEN
    actual = call(command, option)

    # THEN
    assert (0, "") == (actual.code, actual.stderr)
    assert f"Usage: kvdiag {command}" in actual.stdout
    assert "Options:" in actual.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    """What a person waits for most often loads no HTTP client, no terminal library, no NVML, and never torch."""
    # WHEN
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(arguments)], capture_output=True, text=True, timeout=60, check=True
    )

    # THEN
    code, modules = json.loads(done.stdout)
    assert (0, []) == (code, [name for name in HEAVY if name in modules])


def test_help_of_run_names_the_stories() -> None:
    """Every story that can be simulated is named where it can be asked for."""
    # WHEN
    actual = call("run", "--help")

    # THEN
    assert [] == [story for story in SCENARIOS if story not in unwrapped(actual.stdout)]


def test_version_is_told() -> None:
    """`kvdiag --version` gives the package's version."""
    # WHEN
    actual = call("--version")

    # THEN
    assert Result(code=0, stdout=f"kvdiag, version {kvdiag.__version__}\n", stderr="") == actual


def test_no_command_shows_the_help() -> None:
    """`kvdiag` alone is wrong usage, and says what it could have been."""
    # WHEN
    actual = call()

    # THEN
    assert (3, "") == (actual.code, actual.stdout)
    assert "Usage: kvdiag [OPTIONS] COMMAND" in actual.stderr
