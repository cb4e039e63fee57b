"""`kvdiag doctor` beside a simulated server, beside none, and with addresses of something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands import main
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import Hostile, refused_port, reply


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A healthy simulated server."""
    with Drill(SCENARIOS["healthy"]) as drill:
        yield drill.url


def doctor(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the checks by their ids."""
    code = main(["doctor", "--output", "json", *args])
    checks = json.loads(capsys.readouterr().out)["checks"]
    # An id names one check.
    found = {check["id"]: check for check in checks}
    assert len(checks) == len(found)
    return code, found


def test_a_server_that_can_be_seen_passes_every_check(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A simulated server brings its GPU and its process."""
    # WHEN the doctor looks at a server with its GPU
    code, checks = doctor(capsys, "--url", url)
    # THEN all pass that were asked for, and 0 says so
    asked = {id_: check["outcome"] for id_, check in checks.items() if not id_.startswith(("agent.", "prometheus."))}
    assert set(asked) == {
        "gpu.driver",
        "gpu.memory",
        "gpu.processes",
        "engine.answers",
        "engine.version",
        "engine.series",
        "engine.name_filter",
        "engine.processes",
        "engine.clock",
    }
    assert {"pass"} == set(asked.values())
    assert 0 == code


def test_without_a_server_that_fails_and_the_others_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """What could not be asked is not called well."""
    # GIVEN a port on which nobody listens
    with refused_port() as port:
        # WHEN the doctor looks there
        code, checks = doctor(capsys, "--url", f"http://127.0.0.1:{port}")
    # THEN the server fails, with what to do, and nothing about it is called well
    assert "fail" == checks["engine.answers"]["outcome"]
    assert "--url" in checks["engine.answers"]["fix"]
    others = {
        check["outcome"] for id_, check in checks.items() if id_.startswith("engine.") and id_ != "engine.answers"
    }
    assert {"skip"} == others
    assert 2 == code


def test_an_agents_folder_without_agents_fails(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that is named has to hold something."""
    # WHEN the folder of agents is empty
    code, checks = doctor(capsys, "--url", url, "--agent-dir", str(tmp_path))
    # THEN that is a failure that says how they are installed
    assert "fail" == checks["agent.publications"]["outcome"]
    assert "agent install" in checks["agent.publications"]["fix"]
    assert "pass" == checks["agent.permission"]["outcome"]
    assert 2 == code


def test_what_is_no_prometheus_fails(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Any web server answers something."""
    # GIVEN a web server that knows no API
    with Hostile(reply(b"<html>", content_type="text/html")) as peer:
        # WHEN it is called a Prometheus
        code, checks = doctor(capsys, "--url", url, "--prometheus", peer.url)
    # THEN it fails, and what it should hold is skipped
    assert "fail" == checks["prometheus.answers"]["outcome"]
    assert {"skip"} == {checks[f"prometheus.{title}"]["outcome"] for title in ("clock", "vllm", "gpu", "kvdiag")}
    assert 2 == code


def test_a_person_reads_outcome_id_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    """Without colours, 80 columns wide."""
    # WHEN the doctor prints for a person, and nobody is there
    with refused_port() as port:
        code = main(["doctor", "--url", f"http://127.0.0.1:{port}"])
    # THEN the line names the check, and the next one what to do
    told = capsys.readouterr().out
    assert "FAIL  engine.answers: " in told
    assert "→ give the server's address" in told
    assert 2 == code
