"""For the tests of an engine's developers: one call that loads a server and fails where memory is not returned.

from kvdiag.testing import assert_no_leak

def test_memory_is_returned(server):
    assert_no_leak(server.url, requests=200)
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvdiag.api.checked_arguments import checked
from kvdiag.api.history import load
from kvdiag.api.verdict import Diagnosis, diagnose
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active.soak_plan import MAX_SECONDS, MIN_SECONDS, plan_soak
from kvdiag.model import Facts

STEPS_REQUESTS = 20
"""The test steps alone send so many at least."""

LEAK = "leak."


@checked
def assert_no_leak(
    url: str, *, requests: int = 200, agent_dir: str | Path | None = None, api_key: str | None = None
) -> Diagnosis:
    """Run the test steps, and a soak of at least so many requests, against an idle server; return the verdict.

    Up to 20 requests the steps are enough (about a minute); more take five minutes or longer.

    Args:
        url: of the server, which has no other traffic.
        requests: at least so many.
        agent_dir: where the server's agents publish, for torch's memory and the owners of blocks.
        api_key: the server's; it is passed on in the environment of the process that runs the steps.

    Raises:
        AssertionError: a leak is a fault or suspected, or leaks of blocks stay undecided; with the evidence.
        KvdiagError: the run could not be made.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl.gz"
        command = [sys.executable, "-m", "kvdiag", "run", "--url", url, "--record", str(trace), *_soak(requests)]
        if agent_dir is not None:
            command += ["--agent-dir", str(agent_dir)]
        env = {**os.environ, **({} if api_key is None else {"KVDIAG_API_KEY": api_key})}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
        if not trace.exists():
            raise KvdiagError(
                done.stderr.strip().removeprefix("kvdiag: ") or f"kvdiag run ended with {done.returncode}"
            )
        found = diagnose(replace(load(trace), name=url))
    leaks = [one for one in found.problems if one.id.startswith(LEAK)]
    undecided = found.finding("leak.kv_blocks").status == "unknown"
    if leaks or undecided:
        raise AssertionError(str(found))
    return found


def _soak(requests: int) -> Iterator[str]:
    """The options of the shortest soak that sends so many requests.

    Raises:
        KvdiagError: no soak does.
    """
    most = plan_soak(MAX_SECONDS, Facts()).requests
    if not 1 <= requests <= most:
        raise KvdiagError(f"requests is {requests!r}: give a number of 1 to {most:,}")
    if requests <= STEPS_REQUESTS:
        return
    seconds = MIN_SECONDS
    while plan_soak(seconds, Facts()).requests < requests and seconds < MAX_SECONDS:
        seconds = min(seconds * 1.25, MAX_SECONDS)
    yield from ("--soak", f"{int(seconds)}s")
