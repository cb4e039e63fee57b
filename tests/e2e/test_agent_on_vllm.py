"""The agent inside vLLM 0.32 itself, which finds it on PYTHONPATH and has nothing installed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvdiag.sources.torch_allocator import TorchAllocatorSource
from tests.e2e import gauges
from tests.e2e.cli import kvdiag, started
from tests.e2e.conftest import VllmHome
from tests.e2e.engine import MODEL_NAME, Engine
from tests.e2e.meddling import LIMIT_SECONDS, Meddling, wait_for
from tests.e2e.meddling import environment as meddling_env

pytestmark = pytest.mark.real_vllm

# A lone API server keeps the name of its program.
PROCESSES = ["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1", "python"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the agents publish."""
    return tmp_path_factory.mktemp("agent") / "published"


@pytest.fixture(scope="module")
def meddling(vllm: VllmHome, folder: Path) -> Iterator[Meddling]:
    """A server of two workers that has the agent on its path, and beside it what meddles with both."""
    installed = kvdiag("agent", "install", str(folder.parent))
    env = dict(line.split("=", 1) for line in installed.stdout.splitlines())
    meddler = folder.with_name("meddle")
    with vllm.engine("agent", "--tensor-parallel-size", "2", env=meddling_env(env, meddler)) as engine:
        yield Meddling(engine, meddler)


@pytest.fixture(scope="module")
def server(meddling: Meddling) -> Engine:
    """That server."""
    return meddling.server


def published(folder: Path) -> dict[int, dict[str, Any]]:
    """Every publication by its process."""
    told = [json.loads(path.read_text()) for path in folder.glob("agent-*.json")] if folder.is_dir() else []
    return {one["process"]["pid"]: one for one in told}


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


@contextmanager
def gone(meddling: Meddling, folder: Path) -> Iterator[None]:
    """The folder is gone with all that was in it, and what is put in its place is gone again."""
    _remove(folder)
    yield
    _remove(folder)


def _remove(folder: Path) -> None:
    # Moved first: what is published while a folder is emptied would keep it from being removed.
    removed = folder.with_name("removed")
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


@contextmanager
def read_only(meddling: Meddling, folder: Path) -> Iterator[None]:
    """The folder is on a file system that takes no file from anybody, root included."""
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("/sys")
    yield
    folder.unlink()
    folder.with_name("moved").rename(folder)


@contextmanager
def full(meddling: Meddling, folder: Path) -> Iterator[None]:
    """No process that computes can write another byte into a file: as on a full disk, a write comes back with less."""
    limited = [*meddling.server.pids("VLLM::Worker"), *meddling.server.pids("VLLM::EngineCore")]
    usual = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY)) for pid in limited]
    yield
    for pid, limits in zip(limited, usual, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@contextmanager
def torch_broken(meddling: Meddling, folder: Path) -> Iterator[None]:
    """What the agent calls of torch is taken out of it."""
    meddling.tell("break_torch")
    yield
    meddling.tell("mend_torch")


def workers_published(meddling: Meddling, folder: Path) -> list[int]:
    """The last number that each worker has published."""
    return [published(folder)[pid]["sequence"] for pid in meddling.server.pids("VLLM::Worker")]


@pytest.mark.parametrize("harm", [gone, read_only, full, torch_broken])
def test_server_does_not_feel_what_happens_to_the_agent(
    meddling: Meddling, folder: Path, harm: Callable[[Meddling, Path], AbstractContextManager[None]]
) -> None:
    """Answers are the same before, while the agents try and cannot, and after, when they go on."""
    # GIVEN
    server = meddling.server
    wait_for(lambda: len([pid for pid in published(folder) if pid in server.pids()]) >= len(PROCESSES))
    expected = completion(server)

    # WHEN
    with harm(meddling, folder):
        meddling.wait_for_tries(2)
        answered = completion(server)
        tried = meddling.tried()
        told = {pid: one for pid, one in published(folder).items() if pid in server.pids("VLLM::Worker")}

    # THEN what was done had the effect that it is called after
    if harm is torch_broken:
        assert all("AttributeError" in one["errors"]["torch"] for one in told.values())
    elif harm is not gone:
        assert all(one["sequence"] < tried[pid] for pid, one in told.items())
    assert expected == answered == completion(server)
    wait_for(lambda: len([pid for pid in published(folder) if pid in server.pids()]) >= len(PROCESSES))
    # The next publication may have begun while things were still as they were.
    healed = meddling.tried()
    wait_for(lambda: all(published(folder)[pid]["sequence"] > count + 1 for pid, count in healed.items()))
    assert [{}] * len(PROCESSES) == [one["errors"] for pid, one in published(folder).items() if pid in server.pids()]
    gauges.wait_until(server.url, gauges.idle, limit_seconds=LIMIT_SECONDS)


def test_stopped_worker_is_told_as_stuck(server: Engine, folder: Path) -> None:
    """A worker that lives and publishes nothing is named with its age; once it runs again it answers as before."""
    # GIVEN
    expected = completion(server)
    worker = server.pids("VLLM::Worker_TP1")[0]
    source = TorchAllocatorSource(folder)

    # WHEN
    os.kill(worker, signal.SIGSTOP)
    try:
        wait_for(lambda: any("stuck" in gap.reason for gap in source.read()[1]))
        result = kvdiag("audit", "--url", server.url, "--agent-dir", str(folder), "--output", "json")
    finally:
        os.kill(worker, signal.SIGCONT)

    # THEN
    told = [gap["reason"] for gap in result.document["gaps"] if "stuck" in gap["reason"]]
    assert 1 == len(told)
    assert f"VLLM::Worker_TP1 {worker} has published nothing for" in told[0]
    assert told[0].endswith("it lives, and its agent is stuck")
    assert expected == completion(server)
    wait_for(lambda: not any("stuck" in gap.reason for gap in source.read()[1]))


def test_stopped_reader_is_not_felt(server: Engine, folder: Path) -> None:
    """A kvdiag that is stopped in the middle of its run, with requests open, holds nobody up."""
    # GIVEN
    expected = completion(server)

    # WHEN
    with started("run", "--url", server.url, "--agent-dir", str(folder)) as reader:
        gauges.wait_until(server.url, lambda reading: not gauges.idle(reading), limit_seconds=LIMIT_SECONDS)
        os.kill(reader.pid, signal.SIGSTOP)
        while_stopped = completion(server)

    # THEN
    assert expected == while_stopped
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
