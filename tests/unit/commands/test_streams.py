"""Started with its streams closed, or from an installation that lacks something: exit codes stay what they mean."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.spinner import Spinner

from kvdiag.commands.printing import spinner_of

FIT = ["fit", "llama_70b", "--gpu", "h100", "--tp", "4", "--context", "8192", "--concurrency", "8"]
MODEL = Path(__file__).parents[2] / "integration" / "vllm" / "architectures" / "qwen3-gqa.json"
ASCII = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
WRONG = ["fit", "llama_70b", "--gpu", "no-such"]


@pytest.mark.parametrize(("arguments", "code"), [(FIT, 0), (WRONG, 3)], ids=["fits", "wrong"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_streams_change_no_exit_code(arguments: list[str], code: int, closed: str) -> None:
    """Supervisors start programs so; 1 would read as a verdict."""
    command = f'exec "$0" -m kvdiag "$@" {closed}'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, *arguments], check=False, capture_output=True)
    assert code == done.returncode
    assert b"Traceback" not in done.stdout + done.stderr


def on_a_pipe(*arguments: str) -> tuple[int, str]:
    """The exit code and what comes out of a pipe whose reader knows ASCII alone."""
    done = subprocess.run(
        [sys.executable, "-m", "kvdiag", *arguments], env=ASCII, check=False, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """The exit code and what a terminal without styles is given that knows ASCII alone."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "kvdiag", *arguments], env=ASCII, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # reading a terminal fails once its last writer has exited
            while more := os.read(ours, 4096):
                shown += more
    os.close(ours)
    return process.returncode, shown.decode("ascii")


@pytest.mark.parametrize("shown_on", [on_a_pipe, on_a_terminal])
def test_an_encoding_of_ascii_gets_ascii(shown_on: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """The bar is of letters that its legend explains; of a name, what the encoding lacks is a question mark."""
    model = tmp_path / "modèle.json"
    model.write_bytes(MODEL.read_bytes())
    code, shown = shown_on("fit", str(model), "--gpu", "h100")
    lines = shown.splitlines()
    bar = lines[next(place for place, line in enumerate(lines) if line.startswith("One GPU")) + 1].strip()
    legend = {line.split()[0] for line in lines if line.rstrip().endswith("%")}
    assert 0 == code
    assert {"%", "."} <= set(bar) <= legend
    assert "mod?le.json" in "".join(line.strip() for line in lines)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_spinner_can_be_shown(encoding: str) -> None:
    """No frame of it has a character that the encoding lacks."""
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    frames = "".join(Spinner(spinner_of(console)).frames)
    assert frames == frames.encode(encoding, "replace").decode(encoding)


def test_what_to_do_is_pointed_at_in_ascii() -> None:
    """The doctor's arrow is drawn with what there is."""
    _, shown = on_a_pipe("doctor", "--url", "http://127.0.0.1:1")
    assert "        -> " in shown


def test_output_that_cannot_be_written_is_said_in_one_line() -> None:
    """With a full disk the exit code is 3, with one line on stderr."""
    command = 'exec "$0" -m kvdiag "$@" >/dev/full'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, *FIT], check=False, capture_output=True, text=True)
    assert (3, 1, True) == (done.returncode, done.stderr.count("\n"), "No space left" in done.stderr)


def test_a_mistake_of_our_own_is_no_verdict() -> None:
    """An internal error, here a missing dependency, exits 3 with its traceback and a last line that says so."""
    script = "import sys; sys.modules['psutil'] = None; from kvdiag.commands import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (3, "") == (done.returncode, done.stdout)
    assert "ModuleNotFoundError: import of psutil halted" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvdiag: internal error")
