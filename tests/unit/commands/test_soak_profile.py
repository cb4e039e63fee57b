"""`run --soak --profile` on a simulated server that keeps memory, disturbed while the agent traces it."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fixtures.hostile import eventually
from tests.integration.vllm.cli import RUN_LIMIT_SECONDS, Result, finished
from tests.integration.vllm.cli import started as command_started
from tests.unit.agent.subject import environment, installed
from tests.unit.agent.test_publishing import started

pytestmark = pytest.mark.long

SERVER = """
import sys, torch, tracemalloc, kvdiag_agent
from kvdiag.sim import SCENARIOS, Drill, server
kvdiag_agent.register()
kept = []

class Keeps(server.VllmApi):
    async def handle(self, request, *more):
        if request.path.endswith("completions"):
            kept.append(bytearray(512 * 1024))
        return await super().handle(request, *more)

server.APIS = {**server.APIS, "vllm": Keeps}
with Drill(SCENARIOS["healthy"]) as drill:
    print(drill.url, flush=True)
    for _ in sys.stdin:
        print(tracemalloc.is_tracing(), flush=True)
"""
"""A server that keeps half a MiB of each completion, and says on request whether it is traced."""


class Server:
    """One that runs and publishes into `folder`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        """Wait for its address."""
        self.process = process
        self.folder = folder
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()
        assert eventually(lambda: bool(list(folder.glob("agent-*"))))

    def is_traced(self) -> bool:
        """Whether the process traces its allocations; it answers, so it lives."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"

    def soak(self) -> tuple[str, ...]:
        """The arguments of a short soak with a profile."""
        access = ("--url", self.url, "--agent-dir", str(self.folder))
        return ("run", *access, "--soak", "5m", "--soak-cycle", "0.5", "--profile", "--output", "json")

    def requests(self) -> list[str]:
        """Requests for a profile, and answers."""
        return [path.name for path in self.folder.glob("*profile-*")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """The server with its agent."""
    agent, folder = tmp_path / "agent", tmp_path / "published"
    agent.mkdir()
    folder.mkdir(mode=0o700)
    with started(SERVER, environment(installed(agent), folder)) as process:
        yield Server(process, folder)


@contextmanager
def traced(server: Server) -> Iterator[subprocess.Popen[str]]:
    """The command, from the moment at which the server is traced."""
    with command_started(*server.soak()) as process:
        while not list(server.folder.glob("profile-[0-9]*")):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                raise AssertionError(finished(process))
        yield process


def test_interrupted_soak_ends_the_tracing(server: Server) -> None:
    """Ctrl-C: no verdict, no request stays, and the server works on untraced."""
    with traced(server) as process:
        process.send_signal(signal.SIGINT)
        result = finished(process)
    assert (3, "") == (result.code, result.stdout)
    assert result.stderr.splitlines()[-1].startswith("kvdiag: interrupted: "), result.stderr
    assert [] == server.requests()
    assert eventually(lambda: not server.is_traced())


def test_server_that_dies_while_it_is_traced(server: Server) -> None:
    """The document has what the soak found, and the profile's place has the reason."""
    with traced(server) as process:
        server.process.kill()
        result = finished(process)
    assert 3 == result.code, result.stderr
    assert ("soak", []) == (result.document["steps"][-1]["id"], result.document["profiles"])
    assert "exited while it was profiled" in result.stderr
    assert [] == server.requests()


def test_disk_that_is_full_for_the_request(server: Server) -> None:
    """The soak's document without a profile, and the reason; nothing is traced."""
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, (64, {resource.RLIM_INFINITY}))"
    program = f"import resource, runpy; {limit}; runpy.run_module('kvdiag', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program, *server.soak()],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_SECONDS,
        check=False,
    )
    result = Result(code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    assert result.code in (1, 2, 3), result.stderr
    assert json.loads(done.stdout)["steps"][-1]["id"] == "soak"
    assert "cannot write a request" in result.stderr
    assert "Traceback" not in result.stderr
    assert ([], False) == (server.requests(), server.is_traced())
