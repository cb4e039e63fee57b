"""Programs that stand for a server on this host, and the gap of an unobservable one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvdiag.model import Gap
from kvdiag.sources.host import SOURCE

LONG_SECONDS = 60.0

WAIT = "import sys; sys.stdin.read()"

SERVER = f"""
import json, os, socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
workers = [subprocess.Popen([sys.executable, "-c", {WAIT!r}]) for _ in range(2)]
pids = [os.getpid(), *(worker.pid for worker in workers)]
print(json.dumps({{"port": listener.getsockname()[1], "pids": pids}}), flush=True)
sys.stdin.read()
"""

LAUNCHER = f"""
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {SERVER!r}])
"""


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that listens, its workers, and who started it where that was one of its own kind."""

    port: int
    pids: tuple[int, ...]
    launcher: int | None = None


@contextmanager
def listening(program: str, *arguments: str, starter: str = "sh") -> Iterator[Listening]:
    """Run a program that prints where it listens, until its input ends.

    A shell, or a copy of it, stands between it and the tests, whose own command line may name vLLM.
    """
    shell = [starter, "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, *arguments]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        launcher = int(first) if program is LAUNCHER else None
        said = json.loads(process.stdout.readline() if launcher is not None else first)
        yield Listening(port=said["port"], pids=tuple(said["pids"]), launcher=launcher)
        process.communicate(timeout=LONG_SECONDS)


def unseen(reason: str) -> Gap:
    """The gap of something that is not observable from this host."""
    return Gap(source=SOURCE, kind="absent", reason=reason)
