"""The agent inside vLLM 0.32 itself, which finds it on PYTHONPATH and has nothing installed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.fixtures.hostile import eventually
from tests.integration.vllm import gauges, harms
from tests.integration.vllm.cli import kvdiag, started
from tests.integration.vllm.meddling import Meddling, published
from tests.integration.vllm.side_by_side import asked, completion, side_by_side

pytestmark = pytest.mark.real_vllm


@pytest.fixture(scope="module")
def folder(workers: Meddling) -> Path:
    """Where the agents of two workers publish."""
    return workers.published


def assert_published(meddling: Meddling, tensor_ranks: list[int]) -> None:
    """API server, engine core and workers have a file each, which is renewed; without a GPU it has no device."""
    server, folder = meddling.server, meddling.published
    first = published(folder)
    assert eventually(
        lambda: all(published(folder)[pid]["sequence"] >= one["sequence"] + 2 for pid, one in first.items())
    )

    def living() -> list[dict[str, Any]]:
        return [one for pid, one in published(folder).items() if pid in server.pids()]

    # Titles and ranks come with a process's first work, and are renewed every 5 s.
    assert eventually(lambda: meddling.processes == sorted(one["process"]["title"] for one in living()))
    workers = [one["ranks"] for one in living() if "Worker" in one["process"]["title"]]
    assert tensor_ranks == sorted(ranks["tensor"] for ranks in workers)
    for one in living():
        assert ([], False, {}) == (one["devices"], one["torch"]["cuda_initialised"], one["errors"])
        assert one["process"]["resident_bytes"] > 100 * 2**20


def test_every_process_publishes_again_and_again(meddling: Meddling) -> None:
    """Every process of vLLM's loads the agent."""
    assert_published(meddling, [0])


def test_both_workers_publish_their_rank(workers: Meddling) -> None:
    """Those of a tensor-parallel server among them."""
    assert_published(workers, [0, 1])


def sequence(folder: Path, pid: int) -> int:
    """The number of a process's last publication."""
    told = published(folder)
    return int(told[pid]["sequence"]) if pid in told else 0


@pytest.mark.parametrize("harm", harms.HARMS)
def test_server_does_not_feel_what_happens_to_the_agent(workers: Meddling, folder: Path, harm: harms.Harm) -> None:
    """While the agents are disturbed, answers and latency are unchanged; afterwards every agent publishes again."""
    server, held = workers.server, dict[int, int]()
    assert eventually(lambda: len([pid for pid in published(folder) if pid in server.pids()]) >= len(workers.processes))
    worker_pids = server.pids("VLLM::Worker")

    @contextmanager
    def harmed() -> Iterator[None]:
        with harm(workers, folder):
            held.update(workers.tried())
            yield

    def in_effect() -> None:
        """What was done had the effect that it is called after."""
        if harm is harms.stuck:
            assert held == workers.tried()
            return
        workers.wait_for_tries(1)
        tried = workers.tried()
        told = published(folder.with_name("moved") if harm is harms.read_only else folder)
        if harm is harms.torch_broken:
            assert all("AttributeError" in told[pid]["errors"]["torch"] for pid in worker_pids)
        elif harm is not harms.gone:
            assert all(told[pid]["sequence"] < tried[pid] for pid in worker_pids)

    actual = side_by_side(server, harmed, in_effect)

    assert 1 == len(actual.undisturbed.texts | actual.disturbed.texts)
    assert not actual.slower, actual
    # The next publication may have begun while things were still as they were.
    healed = workers.tried()
    assert eventually(lambda: all(sequence(folder, pid) > count + 1 for pid, count in healed.items()))
    assert [{}] * len(workers.processes) == [
        one["errors"] for pid, one in published(folder).items() if pid in server.pids()
    ]


def test_stopped_worker_is_told_as_stuck(workers: Meddling, folder: Path) -> None:
    """A worker that lives and publishes nothing is named with its age; once it runs again it answers as before."""
    server = workers.server
    expected = completion(server)
    worker = server.pids("VLLM::Worker_TP1")[0]
    source = TorchAllocatorSource(folder)

    os.kill(worker, signal.SIGSTOP)
    try:
        assert eventually(lambda: any("stuck" in gap.reason for gap in source.read()[1]))
        result = kvdiag("audit", "--url", server.url, "--agent-dir", str(folder), "--output", "json")
    finally:
        os.kill(worker, signal.SIGCONT)

    told = [gap["reason"] for gap in result.document["gaps"] if "stuck" in gap["reason"]]
    assert 1 == len(told)
    assert f"VLLM::Worker_TP1 {worker} " in told[0]
    assert expected == completion(server)
    assert eventually(lambda: not any("stuck" in gap.reason for gap in source.read()[1]))


def test_stopped_reader_is_not_felt(workers: Meddling, folder: Path) -> None:
    """A kvdiag that is stopped in the middle of its run, with requests open, blocks no other client."""
    server = workers.server
    expected = asked(server, 2).texts
    with started("run", "--url", server.url, "--agent-dir", str(folder)) as reader:
        gauges.wait_until(server.url, gauges.loaded)
        os.kill(reader.pid, signal.SIGSTOP)
        # Its open requests are answered, though it reads no answer.
        gauges.wait_until(server.url, gauges.idle)
        while_stopped = asked(server, 6)
    assert expected == while_stopped.texts
    gauges.wait_until(server.url, gauges.idle)


def test_reader_knows_that_a_server_without_a_gpu_holds_none(meddling: Meddling) -> None:
    """The audit reads every process's file, finds nothing wrong with one, and says that none holds GPU memory."""
    folder = str(meddling.published)
    result = kvdiag("audit", "--url", meddling.server.url, "--agent-dir", folder, "--output", "json")
    gaps = [gap for gap in result.document["gaps"] if gap["source"] == "torch_allocator"]
    assert [("absent", True)] == [(gap["kind"], "holds GPU memory" in gap["reason"]) for gap in gaps]
