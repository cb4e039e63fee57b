"""What runs inside the serving process: figures of torch's allocator, written to a file every second.

Rules of this package: it imports the standard library alone, and torch never: it looks at the torch that the process
has imported itself. It asks nothing of CUDA before the process has initialised it, and nothing that waits for the GPU.
No failure of its own leaves it. It is copied out of kvdiag and run as `kvdiag_agent` (`kvdiag agent install`), by
whatever Python the server has: hence imports relative to this package, and no syntax newer than Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import sys

DIRECTORY = "KVDIAG_AGENT_DIR"
"""Environment variable with the folder to publish in; without it nothing here does anything."""

MOST_CHARACTERS = 300


def register() -> None:
    """Begin to publish: vLLM calls this in each of its processes, `sitecustomize` in those of other servers.

    Does nothing where the folder is not set or this process publishes already, and never raises: what a plugin raises
    here would keep vLLM from starting.
    """
    try:
        directory = os.environ.get(DIRECTORY)
        if directory:
            # Every Python process of a server comes by here, and most have nothing to publish.
            from .thread import begin  # noqa: PLC0415

            begin(directory)
    except Exception as error:  # noqa: BLE001 - the server matters more than its diagnosis
        say(f"does not start: {type(error).__name__}: {error}")


def say(what: str) -> None:
    """One line in the server's log, for what no publication can tell: that there is none. Never raises."""
    with contextlib.suppress(Exception):
        line = " ".join(f"kvdiag agent in process {os.getpid()} {what}".split())
        sys.stderr.write(f"{line[:MOST_CHARACTERS]}\n")
