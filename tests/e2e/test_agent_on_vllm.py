"""The agent inside vLLM 0.32 itself, which finds it on PYTHONPATH and has nothing installed."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import gauges
from tests.e2e.cli import kvdiag
from tests.e2e.conftest import VllmHome
from tests.e2e.engine import MODEL_NAME, Engine

pytestmark = pytest.mark.real_vllm

LIMIT_SECONDS = 60.0
# A lone API server keeps the name of its program.
PROCESSES = ["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1", "python"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the agents publish."""
    return tmp_path_factory.mktemp("agent") / "published"


@pytest.fixture(scope="module")
def server(vllm: VllmHome, folder: Path) -> Iterator[Engine]:
    """A server of two workers that has the agent on its path."""
    installed = kvdiag("agent", "install", str(folder.parent))
    env = dict(line.split("=", 1) for line in installed.stdout.splitlines())
    with vllm.engine("agent", "--tensor-parallel-size", "2", env=env) as engine:
        yield engine


def published(folder: Path) -> dict[int, dict[str, Any]]:
    """Every publication by its process."""
    told = [json.loads(path.read_text()) for path in folder.glob("agent-*.json")] if folder.is_dir() else []
    return {one["process"]["pid"]: one for one in told}


def wait_for(reached: Callable[[], bool]) -> None:
    """Poll until `reached`."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {LIMIT_SECONDS} s")
        time.sleep(0.05)


def completion(server: Engine) -> list[str]:
    """What the server answers, greedily, to one prompt."""
    body = {"model": MODEL_NAME, "prompt": [500] * 100, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def test_every_process_publishes_each_second(server: Engine, folder: Path) -> None:
    """API server, engine core and both workers have a file each, which is renewed; without a GPU it has no device."""
    # GIVEN
    first = published(folder)

    # WHEN
    wait_for(lambda: all(published(folder)[pid]["sequence"] >= one["sequence"] + 2 for pid, one in first.items()))

    # THEN
    living = {pid: one for pid, one in published(folder).items() if pid in server.pids()}
    titles = sorted(one["process"]["title"] for one in living.values())
    workers = [one["ranks"] for one in living.values() if "Worker" in one["process"]["title"]]
    assert PROCESSES == titles
    assert [0, 1] == sorted(ranks["tensor"] for ranks in workers)
    for one in living.values():
        assert ([], False, {}) == (one["devices"], one["torch"]["cuda_initialised"], one["errors"])
        assert one["process"]["resident_bytes"] > 100 * 2**20


def test_server_does_not_feel_what_happens_to_the_folder(server: Engine, folder: Path) -> None:
    """Without its folder, with a file in its place, and with it back, answers are the same and the agents go on."""
    # GIVEN
    expected = completion(server)

    # WHEN
    shutil.move(folder, folder.with_name("moved"))
    without = completion(server)
    shutil.rmtree(folder, ignore_errors=True)
    wait_for(lambda: len([pid for pid in published(folder) if pid in server.pids()]) >= len(PROCESSES))

    # THEN
    assert expected == without == completion(server)
    gauges.wait_until(server.url, gauges.idle, limit_seconds=LIMIT_SECONDS)


def test_reader_knows_that_a_server_without_a_gpu_holds_none(server: Engine, folder: Path) -> None:
    """The audit reads every process's file, finds nothing wrong with one, and says that none holds GPU memory."""
    # WHEN
    result = kvdiag("audit", "--url", server.url, "--agent-dir", str(folder), "--output", "json")

    # THEN
    told = [gap for gap in result.document["gaps"] if gap["source"] == "torch_allocator"]
    reason = "no process that has an agent holds GPU memory through torch"
    assert [{"source": "torch_allocator", "kind": "absent", "reason": reason}] == told


def test_killed_server_leaves_stale_files(vllm: VllmHome, tmp_path: Path) -> None:
    """After a kill the files stay as they were."""
    # GIVEN
    installed = kvdiag("agent", "install", str(tmp_path))
    env = dict(line.split("=", 1) for line in installed.stdout.splitlines())
    with vllm.engine("agent-killed", env=env) as engine:
        pids = engine.pids()
        wait_for(
            lambda: {"VLLM::Worker"} <= {one["process"]["title"] for one in published(tmp_path / "published").values()}
        )

        # WHEN
        engine.kill()

    # THEN
    left = {pid: one["sequence"] for pid, one in published(tmp_path / "published").items() if pid in pids}
    assert left == {pid: published(tmp_path / "published")[pid]["sequence"] for pid in left}
    assert len(left) >= 3
