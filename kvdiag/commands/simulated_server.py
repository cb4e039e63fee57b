"""A simulated server for one run, in a process of its own, as a real server is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvdiag
from kvdiag.errors import KvdiagError
from kvdiag.sim import SCENARIOS

STOP_SECONDS = 5.0


@contextmanager
def simulated(story: str) -> Iterator[str]:
    """Serve `story` and yield its address.

    Raises:
        KvdiagError: there is no such story, or it does not start.

    """
    if story not in SCENARIOS:
        raise KvdiagError(f"there is no story {story!r}; there are {', '.join(SCENARIOS)}")
    # A session of its own: Ctrl-C is for kvdiag, which still has requests to take back from the server.
    # It ends with us even where we are killed: then nobody holds the other end of its input any more.
    # The same package as ours, be it inside a file of its own; -P: no module of the folder that we were called in.
    packages = [str(Path(kvdiag.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
    command = [sys.executable, "-P", "-m", "kvdiag", "drill", story, "--until-eof"]
    with subprocess.Popen(  # noqa: S603 - our own program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as server:
        try:
            lines = iter(server.stdout or ())
            address = next((found[0] for line in lines if (found := re.search(r"http://[\d.]+:\d+", line))), None)
            if address is None:
                raise KvdiagError(f"the simulated server ended at once with exit code {server.wait(STOP_SECONDS)}")
            yield address
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
