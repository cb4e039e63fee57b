"""Bad options and settings: one clear line on stderr, nothing on stdout, exit 3, and never a traceback.

The lines stand in tests/golden/errors; every case here fails unless it is exactly one.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import pytest

from kvdiag.commands import COMMANDS, cli
from tests.unit.commands.bad_input.refusals import listed, refusal

SERVER = ("--url", "http://127.0.0.1:1")

USAGE: Mapping[str, tuple[str, ...]] = {
    "unknown command": ("nope",),
    "unknown option": ("--nope",),
    "unknown option of a command": ("audit", "--nope"),
    "missing argument": ("diagnose",),
    "extra argument": ("explain", "a", "b"),
    "no subject": ("run",),
    "two subjects": ("run", *SERVER, "--simulate", "healthy"),
    "option without value": ("run", "--url"),
    "option of a subcommand without value": ("baseline", "compare", "--output"),
    "flag with value": ("top", "--once=3"),
    "own option without value": ("--config",),
    "unknown output": ("diagnose", "x", "--output", "xml"),
    "impossible port": ("drill", "--port", "70000"),
    "unknown scenario to run": ("run", "--simulate", "nope"),
    "unknown scenario to serve": ("drill", "no\nsuch\x1b[2Jscenario"),
    "unknown verdict": ("explain", "nothing\nlike it"),
    "nearly a verdict": ("explain", "leek.kv_block"),
    "isolation with a soak": ("run", *SERVER, "--isolation", "--soak"),
    "another key without isolation": ("run", *SERVER, "--other-api-key", "b"),
    "soak too short": ("run", *SERVER, "--soak=4m"),
    "soak too long": ("run", *SERVER, "--soak=3h"),
    "soak without a unit": ("run", *SERVER, "--soak=12"),
    "trace and report in one file": ("run", *SERVER, "--record", "x", "--report", "x"),
    "crash files without postmortem": ("diagnose", "--log", "x"),
    "postmortem of nothing": ("diagnose", "--postmortem"),
    "trace and Prometheus": ("diagnose", "x", "--prometheus", "http://127.0.0.1:1"),
    "server and daemon": ("top", *SERVER, "--attach", "http://127.0.0.1:1"),
    "report to stdout": ("diagnose", "x", "--report", "-"),
}


def test_wrong_usage_is_one_line(golden: Callable[[str, str], None]) -> None:
    """Each usage error is one line that names the help, with exit code 3 instead of click's 2."""
    golden("errors/usage.txt", listed({name: refusal(*arguments) for name, arguments in USAGE.items()}))


def test_wrong_value_in_the_environment_is_refused_as_well() -> None:
    """An option can be given as a variable."""
    by_flag = refusal("diagnose", "x", "--output", "xml")
    assert by_flag == refusal("diagnose", "x", env={"KVDIAG_DIAGNOSE_OUTPUT": "xml"})


SETTINGS: Mapping[str, str | bytes] = {
    "no TOML": "run = [",
    "no text": b"\xff",
    "a number of 5,000 digits": "a = " + "9" * 5_000,
    "too long": "#" * 2**20 + "\n",
    "nested": "a = " + "[" * 20_000,
    "unknown command": "[nope]\n",
    "no table": "run = 5\n",
    "unknown option": "[run]\ncolour = 1\n",
    "a list": "[run]\nca-file = ['a']\n",
    "a date": "[run]\nrecord = 2026-01-01\n",
    "no truth": "[run]\nforce = 'perhaps'\n",
}


def test_bad_settings_are_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """A settings file that is no TOML, or sets what there is not, is refused before anything is done."""
    path = tmp_path / "kvdiag.toml"
    told = {"missing": refusal("--config", str(path), "run", *SERVER)}
    for name, content in SETTINGS.items():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        told[name] = refusal("--config", str(path), "run", *SERVER)
    for name, target in (("a device", "/dev/zero"), ("a pipe", None)):
        path.unlink()
        path.symlink_to(target) if target else os.mkfifo(path)
        told[name] = refusal("--config", str(path), "run", *SERVER)
    # What comes after these is the codec's or click's own text, which differs between versions.
    texts = {
        name: re.split(" in position| Recognized|: value has", text.replace(str(path), "CONFIG"))[0]
        for name, text in told.items()
    }
    golden("errors/settings.txt", listed(texts))


def test_settings_come_after_flags(tmp_path: Path) -> None:
    """What a settings file sets holds where no flag says otherwise."""
    path = tmp_path / "kvdiag.toml"
    path.write_text("[run]\nurl = 'ftp://settings'\n", encoding="utf-8")
    actual = [refusal("--config", str(path), "run", *more) for more in ([], ["--url", "ftp://flag"])]
    assert ["ftp://settings", "ftp://flag"] == [text.split("'")[1] for text in actual]


@pytest.mark.parametrize("command", [("drill", "healthy", "--port"), ("serve", "--listen")])
def test_port_that_is_taken_is_named(command: tuple[str, ...]) -> None:
    """When the port is in use, the error names the port and the option that chooses another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        actual = refusal(*command, f"127.0.0.1:{port}" if command[0] == "serve" else str(port))
    assert str(port) in actual
    assert "already in use" in actual
    assert command[-1] in actual


def numbers() -> list[tuple[str, ...]]:
    """Each option of a command, of a subcommand too, that takes a number with a fraction."""
    found = []
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        for words, one in (((name,), command), *(((name, sub), each) for sub, each in inner)):
            options = [each for each in one.params if isinstance(each.type, click.types.FloatParamType)]
            found += [(*words, each.opts[0]) for each in options]
    return found


@pytest.mark.parametrize("given", numbers(), ids=" ".join)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_number_must_be_finite(given: tuple[str, ...], value: str) -> None:
    """NaN is within any bounds to click, and passes comparisons everywhere after it."""
    *words, option = given
    assert option in refusal(*words, f"{option}={value}")
