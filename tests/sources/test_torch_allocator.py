"""The agents' files as a reader meets them: true ones, old ones, and ones that somebody laid as a trap."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdiag.agent import thread
from kvdiag.model import Allocator, Gap
from kvdiag.sources import torch_allocator
from kvdiag.sources.agent_folder import MAX_FILE_BYTES
from kvdiag.sources.torch_allocator import MAX_FILES, TorchAllocatorSource
from tests.sources.publications import MIB, PUBLICATION, READ, SELF, changed

LONG_AGO_SECONDS = 100.0
STRANGER = 54_321


NAME = f"agent-{SELF['pid']}-{SELF['start_ticks']}.json"


def write(folder: Path, told: object = PUBLICATION, name: str = NAME) -> Path:
    """A file as the agent leaves it."""
    path = folder / name
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    path.chmod(0o640)
    return path


def read(folder: Path) -> tuple[tuple[Allocator, ...] | None, list[str]]:
    """One reading: the allocators with no age, and what each gap says."""
    found, gaps = TorchAllocatorSource(folder).read()
    assert all(each.age_seconds < torch_allocator.LEAST_STALE_SECONDS for each in found or ())
    young = None if found is None else tuple(replace(each, age_seconds=0.0) for each in found)
    return young, [f"{gap.kind}: {gap.reason}" for gap in gaps]


def test_publication_is_read_whole(tmp_path: Path) -> None:
    """Every figure of a publication arrives, with the bytes that NVML tells of the process that published."""
    # GIVEN
    write(tmp_path)

    # WHEN / THEN
    assert ((READ,), []) == read(tmp_path)


def test_cuda_malloc_async_has_no_split(tmp_path: Path) -> None:
    """Without segments and blocks the totals are there and their split is not."""
    # GIVEN
    told = changed("torch.backend", "cudaMallocAsync")
    del told["devices"][0]["fragmentation"]
    write(tmp_path, told)

    # WHEN
    (actual,), _ = read(tmp_path)  # type: ignore[misc]

    # THEN
    assert ("cudaMallocAsync", None) == (actual.backend, actual.split)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("kvdiag_agent", 2, "written in format 2, this kvdiag reads 1: use a newer kvdiag"),
        ("kvdiag_agent", "1", "kvdiag_agent is 1, not a number within 1..9007199254740992"),
        ("kvdiag_agent", ..., "kvdiag_agent is None, not a number within 1..9007199254740992"),
        ("process", [], "process is not an object"),
        ("process.pid", 1, "it says that it is process 1's"),
        ("process.pid", True, "pid is True, not a number within 1..4194304"),
        pytest.param("process.start_ticks", 5, f"it says that it is process {SELF['pid']}'s", id="another start"),
        ("period_seconds", 1e9, "period_seconds is 1000000000.0, not a number within 0..3600"),
        ("devices", {}, "devices is not a list"),
    ],
)
def test_file_that_is_no_publication_is_a_gap(tmp_path: Path, path: str, value: object, reason: str) -> None:
    """A file of another version or shape, or that speaks for another process, is named with what is wrong."""
    # GIVEN
    write(tmp_path, changed(path, value))

    # WHEN / THEN
    assert (None, [f"failed: {NAME}: {reason}"]) == read(tmp_path)


DEVICE_TROUBLE: list[tuple[str, object, str]] = [
    ("devices.0.uuid", None, "torch does not tell which GPU it uses (torch before 2.4 cannot)"),
    ("devices.0.statistics", {}, "current is None, not a number within 0..1125899906842624"),
    (
        "devices.0.statistics.allocated_bytes.current",
        2000 * MIB,
        f"Allocator: allocated_bytes is {2000 * MIB}, not within 0..{620 * MIB}",
    ),
    ("devices.0.statistics.reserved_bytes.current", -1, "current is -1"),
    ("devices.0.statistics.reserved_bytes.current", 2**60, "current is 1152921504606846976"),
    ("devices.0.statistics.num_ooms", 1.5, "num_ooms is 1.5"),
    ("devices.0.driver.free_bytes", 2**49, "Memory: free_bytes is"),
    ("devices.0.driver.processes", [[1]], "the process list is not pairs"),
    ("devices.0.driver.processes", [[SELF["pid"], "x"]], "bytes is x"),
    ("devices.0.fragmentation.stranded_bytes", 0, "ReservedSplit: parts of"),
    ("devices.0.fragmentation.unusable_ratio", 7, "ReservedSplit: unusable_ratio is 7.0"),
    ("devices.0.fragmentation", "none", "fragmentation is not an object"),
    ("devices.0", 7, "a device is not an object"),
]


@pytest.mark.parametrize(("path", "value", "reason"), DEVICE_TROUBLE)
def test_impossible_figures_of_a_device_are_a_gap(tmp_path: Path, path: str, value: object, reason: str) -> None:
    """A device whose figures cannot be is left out and said; the process is still there."""
    # GIVEN
    write(tmp_path, changed(path, value))

    # WHEN
    found, gaps = read(tmp_path)

    # THEN
    assert () == found
    assert f"failed: VLLM::Worker_TP1 {SELF['pid']}: {reason}" in gaps[0]


def test_what_the_agent_could_not_read_is_told(tmp_path: Path) -> None:
    """The agent's own errors are gaps, made fit to be shown, and its figures are read all the same."""
    # GIVEN
    write(tmp_path, changed("errors", {"driver": "DriverError: \x1b[2Jno\nlibrary", "x" * 500: "y" * 500}))

    # WHEN
    found, gaps = read(tmp_path)

    # THEN
    assert (READ,) == found
    assert f"failed: VLLM::Worker_TP1 {SELF['pid']}: driver: DriverError:  [2Jno library" == gaps[0]
    assert len(gaps[1]) < 220


def fifo(path: Path) -> None:
    """A pipe that nobody writes to: opening it to read would wait for ever."""
    os.mkfifo(path)


def link(path: Path) -> None:
    """A link to a file that is none of the agent's business."""
    path.symlink_to("/etc/passwd")


def link_to_itself(path: Path) -> None:
    """A link that leads nowhere."""
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    """A file with one byte too many."""
    write(path.parent, json.dumps(PUBLICATION) + " " * MAX_FILE_BYTES, path.name)


def sparse(path: Path) -> None:
    """A terabyte of nothing."""
    with path.open("wb") as file:
        file.truncate(2**40)
    path.chmod(0o640)


def open_to_all(path: Path) -> None:
    """A file that anybody may have written."""
    write(path.parent, name=path.name).chmod(0o666)


def nested(path: Path) -> None:
    """JSON of a depth that no reader's stack has."""
    write(path.parent, '{"kvdiag_agent":' + "[" * 100_000, path.name)


TRAPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (fifo, "not a file"),
    "folder": (Path.mkdir, "not a file"),
    "link": (link, "cannot be opened: Too many levels of symbolic links"),
    "link to itself": (link_to_itself, "cannot be opened: Too many levels of symbolic links"),
    "huge": (huge, f"of {MAX_FILE_BYTES + len(json.dumps(PUBLICATION))} bytes, where {MAX_FILE_BYTES} are the most"),
    "sparse": (sparse, f"of {2**40} bytes, where {MAX_FILE_BYTES} are the most"),
    "open to all": (open_to_all, "anybody may write it, so nobody's word is in it"),
    "nested": (nested, "nested too deeply"),
    "empty": (lambda path: write(path.parent, "", path.name), "Expecting value: line 1 column 1 (char 0)"),
    "torn": (
        lambda path: write(path.parent, json.dumps(PUBLICATION)[:9], path.name),
        "Unterminated string starting at: line 1 column 2 (char 1)",
    ),
    "nan": (lambda path: write(path.parent, '{"kvdiag_agent": NaN}', path.name), "NaN is not a number"),
    "list": (lambda path: write(path.parent, "[]", path.name), "not a JSON object"),
}


@pytest.mark.parametrize(("lay", "reason"), TRAPS.values(), ids=TRAPS)
def test_trap_is_a_gap(tmp_path: Path, lay: Callable[[Path], object], reason: str) -> None:
    """What is no plain publication is said and not waited for, and the file beside it is read."""
    # GIVEN
    lay(tmp_path / "agent-1-1.json")
    write(tmp_path)

    # WHEN / THEN
    assert ((READ,), [f"failed: agent-1-1.json: {reason}"]) == read(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize(
    ("folder_mode", "group", "believed"),
    [
        (0o777, STRANGER, False),
        (0o777, 0, False),
        (0o770, STRANGER, True),
        (0o2777, 0, True),
        (0o2777, STRANGER, False),
    ],
    ids=["anybody's folder", "anybody's, our group", "closed folder", "volume of a pod", "volume, another group"],
)
def test_strangers_file_is_believed_only_where_strangers_cannot_write(
    tmp_path: Path, folder_mode: int, group: int, believed: bool
) -> None:
    """In a folder that anybody can write to, a file of an unknown user is a gap."""
    # GIVEN
    os.chown(write(tmp_path), STRANGER, group)
    tmp_path.chmod(folder_mode)

    # WHEN
    found, gaps = read(tmp_path)

    # THEN
    assert believed == (found == (READ,))
    assert believed != any(f"user {STRANGER} wrote it" in gap for gap in gaps)


def test_names_of_other_files_are_passed_over(tmp_path: Path) -> None:
    """Only names that an agent gives are opened."""
    # GIVEN
    for name in (
        "agent-1.json",
        "agent-x-1.json",
        ".agent-1-1.json.new",
        "oom-1-1-0.json",
        "agent-1-1.json\n",
        "notes",
    ):
        write(tmp_path, "{", name)
    write(tmp_path)

    # WHEN / THEN
    assert ((READ,), []) == read(tmp_path)


def test_number_of_files_is_bounded(tmp_path: Path) -> None:
    """Of more files than a server has processes only so many are read, and that is said."""
    # GIVEN
    for number in range(MAX_FILES + 5):
        write(tmp_path, "{", f"agent-1-{number:04}.json")

    # WHEN
    _, gaps = read(tmp_path)

    # THEN
    assert (MAX_FILES + 1, f"failed: {MAX_FILES + 5} agent files, of which the first {MAX_FILES} are read") == (
        len(gaps),
        gaps[0],
    )


def test_agent_that_stopped_is_noticed(tmp_path: Path) -> None:
    """A file that has grown old while its process lives is of an agent that is stuck."""
    # GIVEN
    os.utime(write(tmp_path), (time.time() - LONG_AGO_SECONDS,) * 2)

    # WHEN / THEN
    who = f"VLLM::Worker_TP1 {SELF['pid']}"
    reason = f"{who} has published nothing for 100 s: it lives, and its agent is stuck"
    assert (None, [f"failed: {reason}"]) == read(tmp_path)


def test_file_that_only_looks_young_is_noticed(tmp_path: Path) -> None:
    """Where the clock was set, a file that is not renewed is told by its number, which stays."""
    # GIVEN
    now = 0.0
    source = TorchAllocatorSource(tmp_path, clock=lambda: now)
    write(tmp_path)
    fresh, _ = source.read()

    # WHEN
    now = 5.0
    os.utime(tmp_path / NAME, (time.time() + 1000,) * 2)
    stuck, gaps = source.read()
    write(tmp_path, changed("sequence", 18))
    renewed, _ = source.read()

    # THEN
    assert [1, None, 1] == [None if found is None else len(found) for found in (fresh, stuck, renewed)]
    assert "published nothing for 5 s" in gaps[0].reason


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({"pid": 2**22, "start_ticks": 1}, "absent: VLLM::Worker_TP1 4194304 has ended; its file is 0 s old"),
        (
            {"start_ticks": 1},
            f"absent: VLLM::Worker_TP1 {SELF['pid']} has ended; its file is 0 s old",
        ),
    ],
    ids=["no such process", "its number belongs to another process now"],
)
def test_process_that_ended_is_not_counted(tmp_path: Path, change: dict[str, int], gap: str) -> None:
    """A process that is gone holds nothing, though its file is young and its number is in use again."""
    # GIVEN
    who = {**PUBLICATION["process"], **change}
    write(tmp_path, changed("process", who), f"agent-{who['pid']}-{who['start_ticks']}.json")

    # WHEN / THEN
    assert (None, [gap]) == read(tmp_path)


def test_other_containers_processes_are_believed_by_their_age_alone(tmp_path: Path) -> None:
    """Where a process id means nothing here, a young file is read, and its process is not called seen."""
    # GIVEN
    who = {**PUBLICATION["process"], "pid": 7, "start_ticks": 1, "pid_namespace": 1}
    told = changed("process", who)
    told["devices"][0]["driver"]["processes"] = []
    write(tmp_path, told, "agent-7-1.json")

    # WHEN
    found, gaps = read(tmp_path)

    # THEN
    assert found is not None
    assert ([(7, False)], []) == ([(each.pid, each.pid_seen) for each in found], gaps)


def test_files_long_forgotten_are_no_news(tmp_path: Path) -> None:
    """What is left of a server that ended an hour ago is not told with each reading."""
    # GIVEN
    os.utime(write(tmp_path), (time.time() - 3600,) * 2)

    # WHEN / THEN
    assert (None, []) == read(tmp_path)


def test_missing_folder_and_empty_folder_say_what_to_do(tmp_path: Path) -> None:
    """Where no agent publishes, the reason names the next step."""
    # WHEN
    (missing, gaps), (empty, empty_gaps) = read(tmp_path / "none"), read(tmp_path)

    # THEN
    assert (None, None) == (missing, empty)
    assert [
        f"absent: no folder of agents at {tmp_path}/none (No such file or directory): see `kvdiag agent install --help`"
    ] == gaps
    assert [
        f"absent: no agent publishes in {tmp_path}: has the server been started with it on its PYTHONPATH?"
    ] == empty_gaps


def test_agents_without_a_gpu_say_so(tmp_path: Path) -> None:
    """A server on the CPU has agents that hold nothing: known to be nothing, and why."""
    # GIVEN
    write(tmp_path, changed("devices", []))

    # WHEN / THEN
    assert ((), ["absent: no process that has an agent holds GPU memory through torch"]) == read(tmp_path)


def test_folder_that_is_taken_away_and_comes_back_is_found_again(tmp_path: Path) -> None:
    """Losing the folder costs readings and nothing else."""
    # GIVEN
    folder = tmp_path / "published"
    folder.mkdir()
    source = TorchAllocatorSource(folder)

    # WHEN
    counts = []
    for _ in range(2):
        write(folder)
        counts.append(len(source.read()[0] or ()))
        shutil.rmtree(folder)
        counts.append(len(source.read()[0] or ()))
        folder.mkdir()

    # THEN
    assert [1, 0, 1, 0] == counts


def test_old_split_is_asked_for_anew(tmp_path: Path) -> None:
    """Where torch has reserved more since its blocks were looked at, the agents are asked to, and not too often."""
    # GIVEN
    now = 0.0
    source = TorchAllocatorSource(tmp_path, clock=lambda: now)
    request = tmp_path / torch_allocator.SPLIT_REQUEST

    def asked(told: dict[str, Any]) -> bool:
        request.unlink(missing_ok=True)
        write(tmp_path, told)
        source.read()
        return request.exists()

    moved = changed("devices.0.statistics.reserved_bytes.current", 1002 * MIB)

    # WHEN
    fresh, first, again = asked(PUBLICATION), asked(moved), asked({**moved, "sequence": 18})
    now = torch_allocator.SPLIT_REQUEST_SECONDS
    later = asked({**moved, "sequence": 19})

    # THEN
    assert (False, True, False, True) == (fresh, first, again, later)
    assert thread.REQUEST == torch_allocator.SPLIT_REQUEST


def test_request_touches_nothing_else(tmp_path: Path) -> None:
    """A link or a pipe in the request's place is left alone, and not waited for."""
    # GIVEN
    write(tmp_path, changed("devices.0.fragmentation", None))
    (tmp_path / "victim").touch()
    os.utime(tmp_path / "victim", (1.0, 1.0))

    # WHEN
    (tmp_path / torch_allocator.SPLIT_REQUEST).symlink_to("victim")
    linked, _ = read(tmp_path)
    (tmp_path / torch_allocator.SPLIT_REQUEST).unlink()
    os.mkfifo(tmp_path / torch_allocator.SPLIT_REQUEST)
    piped, _ = read(tmp_path)

    # THEN
    assert 1.0 == (tmp_path / "victim").stat().st_mtime
    assert linked == piped == (replace(READ, split=None),)


def test_gap_names_its_source(tmp_path: Path) -> None:
    """Whoever looks for why nothing is known of the allocator finds it by the source's name."""
    # WHEN
    _, gaps = TorchAllocatorSource(tmp_path).read()

    # THEN
    assert [torch_allocator.SOURCE] == [gap.source for gap in gaps]
    assert all(isinstance(gap, Gap) for gap in gaps)
