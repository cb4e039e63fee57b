"""A run that is disturbed: interrupted, not alone on its server, without disk or server; and one that only plans."""

import http.client
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest

from kvdiag.feeds.recording.trace import read_trace
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually
from tests.integration.vllm.cli import RUN_LIMIT_SECONDS, finished, started
from tests.unit.commands.bad_input.refusals import call
from tests.unit.sim.client import Client

SLOW = replace(SCENARIOS["healthy"], max_batched_tokens=2)
"""A prompt of 512 tokens takes more than a second: time enough to interrupt it."""


@pytest.fixture
def drill() -> Iterator[Client]:
    """A healthy server, and its client."""
    with Drill(SCENARIOS["healthy"]) as serving:
        yield Client(serving.url)


@pytest.fixture
def slow_drill() -> Iterator[Client]:
    """A slow one."""
    with Drill(SLOW) as serving:
        yield Client(serving.url)


def url_of(client: Client) -> str:
    """The address of its server."""
    return f"http://{client.host}"


def running(client: Client) -> float:
    """Requests that run or wait on the server."""
    return client.gauge("num_requests_running") + client.gauge("num_requests_waiting")


def served(client: Client) -> float:
    """Requests that the server has finished."""
    return sum(client.series("vllm:request_success_total").values())


@contextmanager
def traffic(client: Client) -> Iterator[None]:
    """Another client's request, which runs for as long as the block."""
    connection = http.client.HTTPConnection(client.host, timeout=RUN_LIMIT_SECONDS)
    body = {"prompt": "somebody else", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    try:
        assert eventually(lambda: running(client) == 1)
        yield
    finally:
        connection.close()


def read_while(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for a condition while the process runs; its end before that fails the test."""
    assert eventually(lambda: condition() or process.poll() is not None)
    assert process.poll() is None, finished(process)


@pytest.mark.parametrize(
    ("sent", "sigint", "name"),
    [(signal.SIGINT, "default", "trace.jsonl.gz"), (signal.SIGTERM, "ignore", "trace.jsonl")],
)
def test_interrupted_run_leaves_nothing_behind(
    tmp_path: Path, slow_drill: Client, sent: signal.Signals, sigint: Literal["default", "ignore"], name: str
) -> None:
    """Ctrl-C during a step, or SIGTERM, takes requests back and keeps the trace: no verdict, no page.

    SIGTERM ends a shell's background job too, which the shell starts with SIGINT ignored.
    """
    # a run that is through its warm-up and has a request under way
    trace, report = tmp_path / name, tmp_path / "report.html"
    files = ("--record", str(trace), "--report", str(report))
    with started("run", "--url", url_of(slow_drill), *files, "--output", "json", sigint=sigint) as process:
        read_while(process, lambda: served(slow_drill) >= 2 and running(slow_drill) == 1)
        before = served(slow_drill)

        process.send_signal(sent)
        result = finished(process)

    assert (3, "") == (result.code, result.stdout)
    assert re.fullmatch(rf"kvdiag: interrupted: .*; .* {trace}", result.stderr.splitlines()[-1])
    assert "Traceback" not in result.stderr
    assert eventually(lambda: running(slow_drill) == 0)
    assert before == served(slow_drill)
    assert [trace] == list(tmp_path.iterdir())
    timeline, facts = read_trace(trace)
    assert url_of(slow_drill) == facts.url
    spans = timeline.spans()
    assert ["baseline", "warmup", "warmup", "single_request"] == [span.step for span in spans[:4]]
    assert [True, False] == [spans[-2].complete, spans[-1].complete]

    # its partial trace can be judged like any other trace
    again = call("diagnose", str(trace), "--output", "json")
    assert (3, "unknown", "") == (again.code, again.document["worst"], again.stderr)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_simulation_leaves_no_server_behind(sent: signal.Signals) -> None:
    """A simulated run that is interrupted ends its simulated server too."""
    with started("run", "--simulate", "healthy") as process:
        found: list[psutil.Process] = []

        def serving() -> bool:
            found[:] = psutil.Process(process.pid).children()
            return any(child.net_connections("tcp") for child in found)

        read_while(process, serving)

        process.send_signal(sent)
        result = finished(process)

    assert (3, "") == (result.code, result.stdout)
    assert "Traceback" not in result.stderr
    assert eventually(lambda: not any(child.is_running() for child in found))


def test_simulation_takes_no_module_of_the_folder_it_is_called_in(tmp_path: Path) -> None:
    """A file there that is called as a package which the simulated server needs is not run."""
    (tmp_path / "click.py").write_text("raise SystemExit('of another program')\n")
    program = Path(sys.executable).with_name("kvdiag")
    result = subprocess.run(
        [program, "run", "--simulate", "healthy", "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_SECONDS,
    )
    assert (0, "") == (result.returncode, result.stderr)
    assert result.stdout.startswith("1 baseline")


def test_refused_run_leaves_an_earlier_trace(tmp_path: Path, drill: Client) -> None:
    """A run that offers nothing does not write over what an earlier one has recorded."""
    earlier = "what an earlier run has seen"
    (tmp_path / "trace.jsonl").write_text(earlier)

    with traffic(drill):
        result = call("run", "--url", url_of(drill), "--record", str(tmp_path / "trace.jsonl"))

    assert 3 == result.code
    assert earlier == (tmp_path / "trace.jsonl").read_text()


def test_other_traffic_is_refused(drill: Client) -> None:
    """A server with other traffic is refused before the first step: other requests would distort the figures."""
    with traffic(drill):
        actual = call("run", "--url", url_of(drill))

    assert (3, "", 1) == (actual.code, actual.stdout, actual.stderr.count("\n"))
    assert "--force" in actual.stderr
    assert 0 == served(drill)


def test_other_traffic_can_be_forced(drill: Client) -> None:
    """With --force the steps run despite other traffic, and the other client's request is not interrupted."""
    with traffic(drill), started("run", "--url", url_of(drill), "--force") as process:
        read_while(process, lambda: served(drill) >= 1)
        process.send_signal(signal.SIGINT)
        result = finished(process)

        assert 3 == result.code
        assert "step 2 of 4" in result.stderr
        assert eventually(lambda: running(drill) == 1)


def test_dry_run_offers_nothing(drill: Client, golden: Callable[[str, str], None]) -> None:
    """--dry-run prints each step with what it would offer here, and asks nothing of the model."""
    actual = call("run", "--url", url_of(drill), "--dry-run")

    assert (0, "") == (actual.code, actual.stderr)
    golden("dry_run/steps.txt", actual.stdout)
    assert (0, 0) == (served(drill), drill.gauge("prompt_tokens_total"))


@pytest.mark.parametrize("where", ["environment", "file"])
def test_the_command_line_says_who_is_diagnosed(tmp_path: Path, where: str) -> None:
    """The usual server, of the environment or a file, is not in the way of a simulated one that is asked for."""
    usual = "http://127.0.0.1:1"
    config = tmp_path / "kvdiag.toml"
    config.write_text(f'[run]\nurl = "{usual}"\n')
    before = ("--config", str(config)) if where == "file" else ()
    actual = call(
        *before,
        *("run", "--simulate", "healthy", "--dry-run"),
        env={"KVDIAG_RUN_URL": usual} if where == "environment" else {},
    )
    assert (0, "") == (actual.code, actual.stderr)
    assert actual.stdout.startswith("1 baseline")


def test_isolation_probe_is_planned(drill: Client, golden: Callable[[str, str], None]) -> None:
    """--dry-run prints all that the probe would cost, and asks nothing of the model."""
    actual = call("run", "--url", url_of(drill), "--isolation", "--other-api-key", "b", "--dry-run")

    assert (0, "") == (actual.code, actual.stderr)
    golden("dry_run/isolation.txt", actual.stdout)
    assert 0 == served(drill)


@pytest.mark.parametrize(
    ("arguments", "env"),
    [(["--soak"], {}), (["--soak", "12m"], {}), ([], {"KVDIAG_RUN_SOAK": "720s"})],
    ids=["bare", "with its length", "environment"],
)
def test_soak_is_planned(
    drill: Client, arguments: list[str], env: dict[str, str], golden: Callable[[str, str], None]
) -> None:
    """--dry-run prints the soak's loads, its idle cycles, its length, and all that it would cost."""
    actual = call("run", "--url", url_of(drill), *arguments, "--dry-run", env=env)

    assert (0, "") == (actual.code, actual.stderr)
    golden("dry_run/soak.txt", actual.stdout)
    assert 0 == served(drill)


@pytest.mark.parametrize(("name", "limit_bytes"), [("trace.jsonl", 4096), ("trace.jsonl.gz", 1536)])
def test_disk_that_fills_up_ends_the_run(tmp_path: Path, drill: Client, name: str, limit_bytes: int) -> None:
    """A trace that cannot be written on is one line; what was written of it can be read."""
    trace = tmp_path / name
    limits = f"{limit_bytes}, {resource.RLIM_INFINITY}"
    limit = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({limits})); "
    command = [sys.executable, "-c", f"{limit} runpy.run_module('kvdiag', run_name='__main__')"]

    done = subprocess.run(
        [*command, "run", "--url", url_of(drill), "--record", str(trace)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_SECONDS,
        check=False,
    )

    last = f"kvdiag: cannot record to {trace}: File too large"
    assert (3, "", last) == (done.returncode, done.stdout, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
    timeline, _ = read_trace(trace)
    assert timeline.samples


def test_server_that_ends_leaves_the_run_without_a_verdict() -> None:
    """When the server exits during a step, the steps so far are shown and the others are unknown."""
    with ExitStack() as ending:
        with Drill(SLOW) as serving:
            client = Client(serving.url)
            process = ending.enter_context(started("run", "--url", serving.url, "--output", "json"))
            read_while(process, lambda: served(client) >= 2 and running(client) == 1)
        result = finished(process)

    steps = {step["id"]: step["status"] for step in result.document["steps"]}
    assert (3, "unknown") == (result.code, result.document["worst"])
    assert {"baseline": "ok"} | dict.fromkeys(["single_request", "concurrent", "long_context"], "unknown") == steps
    assert "Traceback" not in result.stderr


def test_model_may_be_served_behind_a_path(drill: Client) -> None:
    """The paths that people paste are cut off, and the server is found under what is left."""
    actual = [
        call("run", "--url", f"{drill.host}{path}", "--dry-run").code for path in ("/metrics", "/v1/", "/v1/models")
    ]

    assert [0, 0, 0] == actual
