"""Started with its streams closed, or from an installation that lacks something: exit codes stay what they mean."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIT = ["fit", "llama_70b", "--gpu", "h100", "--tp", "4", "--context", "8192", "--concurrency", "8"]
WRONG = ["fit", "llama_70b", "--gpu", "no-such"]


@pytest.mark.parametrize(("arguments", "code"), [(FIT, 0), (WRONG, 3)], ids=["fits", "wrong"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_streams_change_no_exit_code(arguments: list[str], code: int, closed: str) -> None:
    """Supervisors start programs so; 1 would read as a verdict."""
    command = f'exec "$0" -m kvdiag "$@" {closed}'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, *arguments], check=False, capture_output=True)
    assert code == done.returncode
    assert b"Traceback" not in done.stdout + done.stderr


def test_output_that_cannot_be_written_is_said_in_one_line() -> None:
    """A full disk is nobody's mistake, and no verdict."""
    # WHEN
    command = 'exec "$0" -m kvdiag "$@" >/dev/full'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, *FIT], check=False, capture_output=True, text=True)

    # THEN
    assert (3, "kvdiag: cannot write: No space left on device\n") == (done.returncode, done.stderr)


def test_a_mistake_of_our_own_is_no_verdict() -> None:
    """What nobody foresaw, here a dependency that is missing, exits 3 and is told with its traceback."""
    # GIVEN
    script = "import sys; sys.modules['psutil'] = None; from kvdiag.commands import main; sys.exit(main(['doctor']))"

    # WHEN
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)

    # THEN
    assert (3, "") == (done.returncode, done.stdout)
    assert "ModuleNotFoundError: import of psutil halted" in done.stderr
    assert done.stderr.endswith("please report it with the lines above\n")
