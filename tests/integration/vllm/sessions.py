"""End every process of a session; as a program, session ARGV[1] as soon as standard input closes: when its holder dies.

By session, because vLLM's engine core and workers outlive a killed front end as children of init, and overwrite the
memory behind /proc/PID/environ with their titles: neither parents nor the environment lead to them.
"""

import os
import signal
import sys
import time
from pathlib import Path

KILL_LIMIT_SECONDS = 60.0


def living_in(session: int) -> list[int]:
    """The processes of a session, zombies left out."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _lives_in(entry, session)]


def kill_session(session: int) -> None:
    """SIGKILL until nothing of the session lives; a process may fork between a listing and its kill."""
    deadline = time.monotonic() + KILL_LIMIT_SECONDS
    while pids := living_in(session):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of session {session} survive SIGKILL")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _lives_in(process: Path, session: int) -> bool:
    try:
        # proc_pid_stat(5): the name in parentheses may hold anything; then come state, parent, process group, session.
        state, _parent, _group, its_session = (process / "stat").read_bytes().rpartition(b")")[2].split()[:4]
    except OSError:
        return False
    return state != b"Z" and int(its_session) == session


if __name__ == "__main__":
    sys.stdin.read()
    kill_session(int(sys.argv[1]))
