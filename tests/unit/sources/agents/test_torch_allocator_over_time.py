"""Agents over time: stopped, exited or stale ones, folders that are removed and recreated, repeated split requests."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kvdiag.agent import thread
from kvdiag.sources.agents import allocator_files as agents
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.builders.answers import containing
from tests.unit.sources.agents.publications import MIB, NAME, PUBLICATION, SELF, changed, read, write

LONG_AGO_SECONDS = 100.0


def test_agent_that_stopped_is_noticed(tmp_path: Path) -> None:
    """A file that has grown old while its process lives is of an agent that is stuck."""
    os.utime(write(tmp_path), (time.time() - LONG_AGO_SECONDS,) * 2)
    who = f"VLLM::Worker_TP1 {SELF['pid']}"
    assert (None, [containing(f"failed: {who}", "1 min 40 s")]) == read(tmp_path)


def test_file_that_only_looks_young_is_noticed(tmp_path: Path) -> None:
    """After a clock change, a file that is not renewed is recognised by its unchanged sequence number."""
    now = 0.0
    source = TorchAllocatorSource(tmp_path, clock=lambda: now)
    write(tmp_path)
    fresh, _, _ = source.read()

    now = 5.0
    os.utime(tmp_path / NAME, (time.time() + 4,) * 2)
    stuck, gaps, _ = source.read()
    write(tmp_path, changed("sequence", 18))
    renewed, _, _ = source.read()

    assert [1, None, 1] == [None if found is None else len(found) for found in (fresh, stuck, renewed)]
    assert "published nothing for 5 s" in gaps[0].reason


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({"pid": 2**22, "start_ticks": 1}, "VLLM::Worker_TP1 4194304 exited"),
        ({"start_ticks": 1}, f"VLLM::Worker_TP1 {SELF['pid']} exited"),
    ],
    ids=["no such process", "its pid was reused"],
)
def test_process_that_ended_is_not_counted(tmp_path: Path, change: dict[str, int], gap: str) -> None:
    """A process that has exited is not counted, although its file is recent and its id is in use again."""
    who = {**PUBLICATION["process"], **change}
    write(tmp_path, changed("process", who), f"agent-{who['pid']}-{who['start_ticks']}.json")
    assert (None, [containing("absent: ", gap)]) == read(tmp_path)


def test_other_containers_processes_are_believed_by_their_age_alone(tmp_path: Path) -> None:
    """From another pid namespace a recent file is read, with `pid_seen` false."""
    who = {**PUBLICATION["process"], "pid": 7, "start_ticks": 1, "pid_namespace": 1}
    told = changed("process", who)
    told["devices"][0]["driver"]["processes"] = []
    write(tmp_path, told, "agent-7-1.json")
    found, gaps = read(tmp_path)
    assert found is not None
    assert ([(7, False)], []) == ([(each.pid, each.pid_seen) for each in found], gaps)


def test_files_long_forgotten_are_no_news(tmp_path: Path) -> None:
    """A file of a server that exited an hour ago is not reported as a gap."""
    os.utime(write(tmp_path), (time.time() - 3600,) * 2)
    assert (None, []) == read(tmp_path)


def test_missing_folder_and_empty_folder_say_what_to_do(tmp_path: Path) -> None:
    """Where no agent publishes, the reason names the next step."""
    (missing, gaps), (empty, empty_gaps) = read(tmp_path / "none"), read(tmp_path)
    assert (None, None) == (missing, empty)
    assert [containing("absent: ", f"{tmp_path}/none", "kvdiag agent install")] == gaps
    assert [containing("absent: ", f"{tmp_path}:", "PYTHONPATH")] == empty_gaps


def test_agents_without_a_gpu_say_so(tmp_path: Path) -> None:
    """A server on the CPU has agents that hold nothing: known to be nothing, and why."""
    write(tmp_path, changed("devices", []))
    assert ((), [containing("absent: ", "no process")]) == read(tmp_path)


def test_folder_that_is_taken_away_and_comes_back_is_found_again(tmp_path: Path) -> None:
    """Without the folder the source has nothing to report; once it is back, the files are read again."""
    folder = tmp_path / "published"
    folder.mkdir()
    source = TorchAllocatorSource(folder)

    counts = []
    for _ in range(2):
        write(folder)
        counts.append(len(source.read()[0] or ()))
        shutil.rmtree(folder)
        counts.append(len(source.read()[0] or ()))
        folder.mkdir()

    assert [1, 0, 1, 0] == counts


def test_old_split_is_asked_for_anew(tmp_path: Path) -> None:
    """Where torch has reserved more since its blocks were looked at, the agents are asked to, and not too often."""
    now = 0.0
    source = TorchAllocatorSource(tmp_path, clock=lambda: now)
    request = tmp_path / agents.SPLIT_REQUEST

    def asked(told: dict[str, Any]) -> bool:
        request.unlink(missing_ok=True)
        write(tmp_path, told)
        source.read()
        return request.exists()

    moved = changed("devices.0.statistics.reserved_bytes.current", 1002 * MIB)

    fresh, first, again = asked(PUBLICATION), asked(moved), asked({**moved, "sequence": 18})
    now = agents.SPLIT_REQUEST_SECONDS
    assert (False, True, False, True) == (fresh, first, again, asked({**moved, "sequence": 19}))
    assert thread.REQUEST == agents.SPLIT_REQUEST
