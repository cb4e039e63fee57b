"""`kvdiag top` in a real terminal, with a simulated server and a daemon; and as one frame without a terminal."""

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest

import kvdiag
from kvdiag.commands import main
from kvdiag.sim import SCENARIOS, Drill
from tests.builders import lives
from tests.builders.answers import later
from tests.fixtures.debian import NoPackageError
from tests.fixtures.hostile import Hostile, refused_port, reply
from tests.fixtures.require import require
from tests.fixtures.terminal import terminal, tmux
from tests.integration.vllm.cli import started
from tests.unit.outputs.test_top_frames import view
from tests.unit.sim.client import Client
from tests.unit.sources.test_daemon import answering, healthy, page

FAST = ("--tick-seconds", "0.1")
LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture(autouse=True, scope="module")
def _tmux() -> None:
    try:
        tmux()
    except NoPackageError as error:
        require(ok=False, what=f"tmux ({error})")


@contextmanager
def daemon(url: str) -> Iterator[str]:
    """The address of a daemon for a server, for the length of the block."""
    with started("serve", "--url", url, "--listen", "127.0.0.1:0", *FAST) as process:
        yield json.loads(process.stderr.readline())["address"] if process.stderr is not None else ""


def test_a_leak_is_seen_in_a_terminal_that_is_given_back() -> None:
    """The bar, the finding as it comes, another size; q leaves the terminal as it was."""
    # a server, and the view of it
    with Drill(SCENARIOS["kv-leak"]) as drill, terminal() as window:
        window.kvdiag("top", "--url", drill.url, *FAST)
        assert window.comes_to(lambda: window.shows("OK  "))
        assert "1" == window.asked("alternate_on")
        assert window.shows("GPU 0  Simulated GPU 24GiB")
        assert window.shows("████████")
        assert window.shows("█ weights 5.38 GiB")
        assert window.lines()[-1].endswith("q quits")
        assert window.colours() != set()

        # it leaks
        Client(drill.url).complete(64, 8)
        assert window.comes_to(lambda: window.shows("FAULT leak.kv_blocks: 4 of 8,191"))

        # the window is made smaller, and larger
        for columns, rows in ((40, 12), (120, 40)):
            window.resize(columns, rows)

            # the frame is as large
            assert window.comes_to(
                lambda: len(window.lines()[-1]) == columns and window.lines()[-1].endswith("q quits")  # noqa: B023
            )
            assert rows == len(window.lines())
            assert window.shows("FAULT leak.kv_blocks")
        window.press("q")

        # it ends, and nothing of it is left; what is typed is shown
        assert window.comes_to(lambda: window.shows("ended 0"))
        assert ("0", "1") == (window.asked("alternate_on"), window.asked("cursor_flag"))
        assert not window.shows("FAULT")
        window.type("echo typed")
        assert window.comes_to(lambda: window.shows("$ echo typed"))


def test_it_is_put_aside_and_ended_by_a_signal() -> None:
    """Ctrl-Z gives the shell its terminal, fg takes it again, SIGTERM ends it; NO_COLOR is kept to."""
    with Drill(SCENARIOS["healthy"]) as drill, terminal(NO_COLOR="1") as window:
        window.kvdiag("top", "--url", drill.url, *FAST)
        assert window.comes_to(lambda: window.shows("OK  "))
        assert set() == window.colours()
        window.press("C-z")
        assert window.comes_to(lambda: window.asked("alternate_on") == "0" and window.shows("ended"))
        assert "1" == window.asked("cursor_flag")
        window.type("fg; echo after $?")
        window.press("Enter")
        assert window.comes_to(lambda: window.asked("alternate_on") == "1" and window.shows("OK  "))
        for process in psutil.Process(int(window.asked("pane_pid"))).children():
            process.terminate()
        assert window.comes_to(lambda: window.shows("after 0"))
        assert ("0", "1") == (window.asked("alternate_on"), window.asked("cursor_flag"))


def test_a_daemon_is_looked_through_until_it_goes() -> None:
    """The daemon's view is shown unchanged; once the daemon exits the verdict is unknown."""
    with Drill(SCENARIOS["healthy"]) as drill, terminal() as window:
        with daemon(drill.url) as address:
            window.kvdiag("top", "--attach", address, *FAST)
            assert window.comes_to(lambda: window.shows("OK  "))
            assert window.shows("GPU 0  Simulated GPU 24GiB")
        assert window.comes_to(lambda: window.shows("UNKNOWN  the daemon at"))
        assert window.shows("cannot connect")
        assert not window.shows("OK  ")
        window.press("C-c")
        assert window.comes_to(lambda: window.shows("ended 0"))


CRASH = """
import asyncio
from rich.console import Console
from kvdiag.commands.screen import Screen
async def crash():
    with Screen(Console()) as screen:
        screen.draw("drawn")
        raise ValueError("crashed")
asyncio.run(crash())
"""


def test_a_crash_gives_the_terminal_back() -> None:
    """After a crash the terminal's modes, screen and cursor are restored."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    done = subprocess.run(
        [sys.executable, "-c", CRASH],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
        check=False,
        timeout=60,
    )
    written = os.read(ours, 65536)
    after = termios.tcgetattr(theirs)
    for end in (ours, theirs):
        os.close(end)
    assert b"ValueError: crashed" in done.stderr
    assert b"drawn" in written
    assert written.index(b"drawn") < written.index(SHOW_CURSOR)
    assert written.index(b"drawn") < written.index(LEAVE_SCREEN)
    assert before == after


def test_one_frame_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed whole and plain, and the exit code is the verdict's."""
    with Drill(SCENARIOS["kv-leak"]) as drill:
        Client(drill.url).complete(64, 8)
        code = main(["top", "--url", drill.url, *FAST])
    printed = capsys.readouterr().out
    assert 2 == code
    assert "\x1b" not in printed
    assert "FAULT leak.kv_blocks" in printed
    assert "remedy: " in printed
    assert "q quits" not in printed


def test_one_frame_where_there_is_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """No server and no daemon are no fault, and not healthy: 3, with the reason."""
    with refused_port() as port:
        codes = [main(["top", option, f"http://127.0.0.1:{port}", *FAST]) for option in ("--url", "--attach")]
    assert [3, 3] == codes
    own, attached = (part for part in capsys.readouterr().out.split("kvdiag top") if part)
    assert "UNKNOWN  no answer yet: " in own
    assert f"UNKNOWN  the daemon at http://127.0.0.1:{port}: cannot connect" in attached


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--url", "http://a", "--attach", "http://b"], "give either --url or --attach"),
        (["--attach", "ftp://u:secret@b"], "not a daemon address"),
        (["--attach", "http://b", "--password", "x"], "a password needs --user"),
    ],
)
def test_what_cannot_be_meant_is_told(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, without what may be a password."""
    assert 3 == main(["top", *arguments])
    told = capsys.readouterr().err
    assert complaint in told
    assert "secret" not in told


@pytest.mark.parametrize("option", ["--url", "--attach"])
def test_a_daemon_is_one_by_either_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An address of a daemon is asked as one, also where a server's was asked for."""
    with Hostile(answering()) as server:
        code = main(["top", option, server.url, "--once"])
    assert 0 == code
    assert "OK  " in capsys.readouterr().out


def test_a_proxy_that_wants_a_password_is_no_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    """What is in front of a server is not taken for a daemon that was meant."""
    with Hostile(answering(reply("", status=401))) as server:
        code = main(["top", "--url", server.url, *FAST])
    assert 3 == code
    assert "the daemon at" not in capsys.readouterr().out


def test_an_older_daemon_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A daemon of another version is read as far as possible, and its version is reported."""
    text = healthy().replace(f'"version":"{kvdiag.__version__}"', '"version":"0.0.9"')
    with Hostile(answering(reply(text, content_type="application/json"))) as server:
        code = main(["top", "--attach", server.url, "--once"])
    assert 0 == code
    assert f"kvdiag 0.0.9, this is {kvdiag.__version__}" in capsys.readouterr().out


def test_what_a_restart_has_ended_alarms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """The fault of an earlier life leads the frame; the exit code is of the present one."""
    known = view().snapshot
    begun = known.newest.at_seconds - 60.0
    found = lives.judged(lives.life(100.0, lives.LEAKED_BLOCKS, tokens=9), lives.life(140.0, 0))
    text = page(replace(known, diagnosis=later(found, begun - 140.0)))
    with Hostile(answering(reply(text, content_type="application/json"))) as server:
        code = main(["top", "--attach", server.url, "--once"])
    assert (0, True) == (code, "FAULT  before the server stopped" in capsys.readouterr().out)
