"""Bad options and settings: one clear line on stderr, nothing on stdout, exit 3, and never a traceback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvdiag.sim import SCENARIOS
from tests.unit.commands.refusals import refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["nope"], "No such command 'nope' (see kvdiag --help)", id="unknown command"),
        pytest.param(["--nope"], "No such option '--nope' (see kvdiag --help)", id="unknown option"),
        pytest.param(
            ["audit", "--nope"], "No such option '--nope' (see kvdiag audit --help)", id="unknown option of one"
        ),
        pytest.param(["diagnose"], "Missing argument 'TRACE' (see kvdiag diagnose --help)", id="missing argument"),
        pytest.param(
            ["explain", "a", "b"], "Got unexpected extra argument (b) (see kvdiag explain --help)", id="one too many"
        ),
        pytest.param(["run"], "give either --url URL or --simulate STORY (see kvdiag run --help)", id="no subject"),
        pytest.param(
            ["run", "--url", "http://127.0.0.1:1", "--simulate", "healthy"],
            "give either --url URL or --simulate STORY (see kvdiag run --help)",
            id="two subjects",
        ),
        pytest.param(
            ["run", "--url"], "Option '--url' requires an argument (see kvdiag run --help)", id="option without value"
        ),
        pytest.param(
            ["baseline", "compare", "--output"],
            "Option '--output' requires an argument (see kvdiag baseline compare --help)",
            id="option of a command's command without value",
        ),
        pytest.param(
            ["top", "--once=3"], "Option '--once' does not take a value (see kvdiag top --help)", id="flag with value"
        ),
        pytest.param(
            ["--config"], "Option '--config' requires an argument (see kvdiag --help)", id="own option without value"
        ),
        pytest.param(
            ["diagnose", "x", "--output", "xml"],
            "Invalid value for '--output': 'xml' is not one of 'text', 'json' (see kvdiag diagnose --help)",
            id="unknown output",
        ),
        pytest.param(
            ["drill", "--port", "70000"],
            "Invalid value for '--port': 70000 is not in the range 0<=x<=65535 (see kvdiag drill --help)",
            id="impossible port",
        ),
        pytest.param(
            ["run", "--simulate", "nope"],
            f"there is no story 'nope'; there are {', '.join(SCENARIOS)}",
            id="unknown story to run",
        ),
        pytest.param(
            ["drill", "no\nsuch\x1b[2Jstory"],
            rf"there is no story 'no\nsuch\x1b[2Jstory'; there are {', '.join(SCENARIOS)}",
            id="unknown story to serve",
        ),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], message: str) -> None:
    """What cannot be meant is said, with where to read on, and its exit code is 3 and not click's 2."""
    # WHEN
    actual = refusal(*arguments)

    # THEN
    assert message == actual


def test_wrong_value_in_the_environment_is_told() -> None:
    """An option can be given as a variable, and is refused there as well."""
    # WHEN
    actual = refusal("diagnose", "x", env={"KVDIAG_DIAGNOSE_OUTPUT": "xml"})

    # THEN
    assert "Invalid value for '--output': 'xml' is not one of 'text', 'json' (see kvdiag diagnose --help)" == actual


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("run = [", "CONFIG is not TOML: Invalid value (at end of document)", id="no TOML"),
        pytest.param(b"\xff", "CONFIG is not TOML: 'utf-8' codec can't decode byte 0xff", id="no text"),
        pytest.param("a = " + "[" * 20_000, "CONFIG is not TOML that can be read: nested too deeply", id="nested"),
        pytest.param("[nope]\n", "CONFIG: there is no command 'nope' to set options for", id="unknown command"),
        pytest.param("run = 5\n", "CONFIG: there is no command 'run' to set options for", id="no table"),
        pytest.param("[run]\ncolour = 1\n", "CONFIG: run has no option 'colour'", id="unknown option"),
        pytest.param(
            "[run]\nca-file = ['a']\n",
            "CONFIG: 'ca-file' of run has to be a text, a number, true or false",
            id="a list",
        ),
        pytest.param(
            "[run]\nrecord = 2026-01-01\n",
            "CONFIG: 'record' of run has to be a text, a number, true or false",
            id="a date",
        ),
        pytest.param(
            "[run]\nforce = 'perhaps'\n",
            "Invalid value for '--force': 'perhaps' is not a valid boolean.",
            id="no truth",
        ),
    ],
)
def test_bad_settings_are_told(tmp_path: Path, content: str | bytes, message: str) -> None:
    """A settings file that is no TOML, or sets what there is not, is refused before anything is done."""
    # GIVEN
    path = tmp_path / "kvdiag.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    # WHEN
    actual = refusal("--config", str(path), "run", "--url", "http://127.0.0.1:1")

    # THEN
    assert message == actual.replace(str(path), "CONFIG")[: len(message)]


def test_missing_settings_are_told(tmp_path: Path) -> None:
    """A settings file that is not there says so."""
    # WHEN
    actual = refusal("--config", str(tmp_path / "nope.toml"), "run", "--url", "http://127.0.0.1:1")

    # THEN
    assert f"cannot read {tmp_path}/nope.toml: No such file or directory" == actual


def test_settings_come_after_flags(tmp_path: Path) -> None:
    """What a settings file sets is what is done where no flag says otherwise."""
    # GIVEN
    path = tmp_path / "kvdiag.toml"
    path.write_text("[run]\nurl = 'ftp://settings'\n")

    # WHEN
    actual = [refusal("--config", str(path), "run", *more) for more in ([], ["--url", "ftp://flag"])]

    # THEN
    expected = "is not the address of a server: give one such as http://127.0.0.1:8000"
    assert [f"'ftp://settings' {expected}", f"'ftp://flag' {expected}"] == actual


def test_port_that_is_taken_is_told() -> None:
    """A drill on a port that somebody has says so."""
    # WHEN
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        actual = refusal("drill", "healthy", "--port", str(port))

    # THEN
    assert f"cannot serve on port {port}: " == actual[: len(f"cannot serve on port {port}: ")]
    assert actual.endswith("already in use; --port 0 takes a free one")
