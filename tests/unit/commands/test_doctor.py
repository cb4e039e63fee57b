"""`kvdiag doctor` with a simulated server, without a server, and with addresses of something else."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdiag.checks.engine_check import AFTER_ANSWERS
from kvdiag.commands import main
from kvdiag.sim import SCENARIOS, Drill
from kvdiag.sources import host
from tests.fixtures.hostile import Hostile, refused_port, reply, reply_json
from tests.fixtures.load_balancer import balanced
from tests.unit.commands.bad_input.refusals import call, refusal


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
    code, checks = doctor(capsys, "--url", url)
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
    with refused_port() as port:
        code, checks = doctor(capsys, "--url", f"http://127.0.0.1:{port}")
    assert "fail" == checks["engine.answers"]["outcome"]
    assert "--url" in checks["engine.answers"]["fix"]
    others = {
        check["outcome"] for id_, check in checks.items() if id_.startswith("engine.") and id_ != "engine.answers"
    }
    assert {"skip"} == others
    assert 2 == code


def test_every_server_on_this_host_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is checked, the others are named with address and missing series; the refusal of a run lists all."""
    models = {"/v1/models": reply_json({"data": [{"id": "tiny", "owned_by": "vllm"}]}), "/metrics/": reply("vllm:x 1")}
    front = {"/v1/models": reply_json({"data": [{"id": "big", "owned_by": "nvidia"}]}), "/metrics": reply("")}
    with Hostile({}) as nothing, Hostile(models) as one, Hostile(front) as other:
        # The usual ones may be another program's here.
        monkeypatch.setattr(host, "PORTS", (nothing.port, one.port, other.port))
        _, checks = doctor(capsys)
        refusal = call("run").stderr
    assert one.url in checks["engine.answers"]["found"]
    assert all(part in checks["engine.others"]["found"] for part in (f"{other.url} (Dynamo", "front end", "big"))
    assert "warn" == checks["engine.others"]["outcome"]
    assert f"{other.url}: " in checks["engine.others"]["fix"]
    assert f"{one.url} (vLLM, tiny)" in refusal
    assert other.url in refusal
    assert nothing.url not in refusal


def test_what_is_in_front_of_a_server_reports_no_series_of_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A gateway may pass the metrics of another server on: those that are missing at --metrics-url stay missing."""
    pages = {"/v1/models": reply_json({"data": [{"id": "tiny", "owned_by": "vllm"}]}), "/metrics/": reply("vllm:x 1")}
    with Hostile(pages) as server:
        _, checks = doctor(capsys, "--url", url, "--metrics-url", server.url)
    assert server.url in checks["engine.answers"]["found"]
    assert "warn" == checks["engine.series"]["outcome"]
    assert "KV usage" in checks["engine.series"]["found"]


@pytest.mark.parametrize("second", ["llamacpp-healthy", "tgi-healthy"])
def test_two_engines_at_one_address_are_named_and_not_checked(
    url: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request goes to the next of them: half of what one engine has is missing on the other."""
    with Drill(SCENARIOS[second]) as other, balanced([url, other.url]) as address:
        code, checks = doctor(capsys, "--url", address)
        refusals = [refusal(command, "--url", address) for command in ("audit", "run")]
    found = checks["engine.answers"]["found"]
    assert "fail" == checks["engine.answers"]["outcome"]
    assert {"skip"} == {checks[id_]["outcome"] for id_ in AFTER_ANSWERS}
    assert 2 == code
    assert all("vLLM" in text and "404" not in text for text in (*refusals, found))


def test_an_agents_folder_without_agents_fails(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that is named has to hold something."""
    code, checks = doctor(capsys, "--url", url, "--agent-dir", str(tmp_path))
    assert "fail" == checks["agent.publications"]["outcome"]
    assert "agent install" in checks["agent.publications"]["fix"]
    assert "pass" == checks["agent.permission"]["outcome"]
    assert 2 == code


def test_what_is_no_prometheus_fails(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Any web server answers something."""
    with Hostile(reply(b"<html>", content_type="text/html")) as peer:
        code, checks = doctor(capsys, "--url", url, "--prometheus", peer.url)
    assert "fail" == checks["prometheus.answers"]["outcome"]
    assert {"skip"} == {checks[f"prometheus.{title}"]["outcome"] for title in ("clock", "vllm", "gpu", "kvdiag")}
    assert 2 == code


def test_a_person_reads_outcome_id_and_fix(golden: Callable[[str, str], None]) -> None:
    """Without colours, 80 columns wide, with an arrow that the encoding has."""
    with refused_port() as port:
        told = call("doctor", "--url", f"http://127.0.0.1:{port}")
    assert 2 == told.code
    # The lines about GPUs depend on this machine.
    shown = told.stdout[told.stdout.index("  FAIL  engine.answers") :].replace(str(port), "PORT")
    golden("doctor.txt", re.sub(r"\n\n.*\n$", "\n", re.sub(r"\(.*?\)", "(…)", shown, count=1, flags=re.DOTALL)))
