"""The agent: runs inside the serving process and writes torch's allocator statistics to a file every second.

Rules of this package: it imports only the standard library, never torch; it uses the torch that the process has
imported. It calls nothing of CUDA before the process has initialised it, and nothing that waits for the GPU. No
exception leaves it. It is copied out of kvdiag and runs as `kvdiag_agent` (`kvdiag agent install`) on the server's
Python: hence relative imports, and no syntax newer than Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import sys

DIRECTORY = "KVDIAG_AGENT_DIR"
"""Environment variable with the folder to publish in; without it the agent does nothing."""

MAX_CHARACTERS = 300


def register() -> None:
    """Start publishing: vLLM calls this in each of its processes, `sitecustomize` in those of other servers.

    Does nothing if the folder is not set or this process already publishes. Never raises: an exception from a plugin
    would keep vLLM from starting.
    """
    try:
        directory = os.environ.get(DIRECTORY)
        if directory:
            # Imported late: every Python process of a server gets here, and most have nothing to publish.
            from .thread import begin  # noqa: PLC0415

            begin(directory)
    except Exception as error:  # noqa: BLE001 - the server matters more than its diagnosis
        say(f"does not start: {type(error).__name__}: {error}")


def say(what: str) -> None:
    """Write one line to the server's log, for problems that no publication can report. Never raises."""
    with contextlib.suppress(Exception):
        line = " ".join(f"kvdiag agent in process {os.getpid()} {what}".split())
        sys.stderr.write(f"{line[:MAX_CHARACTERS]}\n")
