"""Traps in the agents' folder: no symbolic link is followed, no pipe blocks the read, no other user is believed."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.sources.agents import allocator_files as agents
from kvdiag.sources.agents.agent_folder import MAX_FILE_BYTES, MAX_NAMES
from kvdiag.sources.agents.allocator_files import MAX_ALLOCATORS, MAX_FILES, MAX_GAPS
from tests.builders.answers import containing
from tests.unit.sources.agents.publications import PUBLICATION, READ, changed, read, write

STRANGER = 54_321


def fifo(path: Path) -> None:
    """A pipe without a writer: opening it to read would block forever."""
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
    "link": (link, "symbolic links"),
    "link to itself": (link_to_itself, "symbolic links"),
    "huge": (huge, f"{MAX_FILE_BYTES + len(json.dumps(PUBLICATION))} bytes"),
    "sparse": (sparse, f"{2**40} bytes"),
    "open to all": (open_to_all, "world-writable"),
    "nested": (nested, "nested too deeply"),
    "empty": (lambda path: write(path.parent, "", path.name), "Expecting value"),
    "torn": (lambda path: write(path.parent, json.dumps(PUBLICATION)[:9], path.name), "Unterminated string"),
    "nan": (lambda path: write(path.parent, '{"kvdiag_agent": NaN}', path.name), "NaN is not a number"),
    "list": (lambda path: write(path.parent, "[]", path.name), "not a JSON object"),
}


@pytest.mark.parametrize(("lay", "reason"), TRAPS.values(), ids=TRAPS)
def test_trap_is_a_gap(tmp_path: Path, lay: Callable[[Path], object], reason: str) -> None:
    """A file that is no plain publication is a gap and does not block; the next file is read."""
    lay(tmp_path / "agent-1-1.json")
    write(tmp_path)
    assert ((READ,), [containing("failed: agent-1-1.json: ", reason)]) == read(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("folder_mode", "group", "believed"),
    [
        (0o777, STRANGER, False),
        (0o777, 0, False),
        (0o770, STRANGER, False),
        (0o750, STRANGER, True),
        (0o2777, 0, True),
        (0o2777, STRANGER, False),
    ],
    ids=[
        "anybody's folder",
        "anybody's, our group",
        "a group's folder",
        "closed folder",
        "volume of a pod",
        "volume, another group",
    ],
)
def test_strangers_file_is_believed_only_where_strangers_cannot_write(
    tmp_path: Path, folder_mode: int, group: int, believed: bool
) -> None:
    """In a folder that others can write to, a file of an unknown user is a gap, for every process id it names."""
    # A file of a process in another pid namespace
    os.chown(write(tmp_path, changed("process.pid_namespace", 1)), STRANGER, group)
    tmp_path.chmod(folder_mode)
    found, gaps = read(tmp_path)
    assert believed == (found == (replace(READ, pid_seen=False, unverified=True),))
    assert believed != any(f"user {STRANGER}" in gap for gap in gaps)


def test_names_of_other_files_are_passed_over(tmp_path: Path) -> None:
    """Only names that an agent gives are opened."""
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

    assert ((READ,), []) == read(tmp_path)


def test_number_of_files_is_bounded(tmp_path: Path) -> None:
    """Of more files than the limit only the first are read, and a gap reports it."""
    for number in range(MAX_FILES + 5):
        write(tmp_path, "{", f"agent-1-{number:04}.json")
    _, gaps = read(tmp_path)
    assert (MAX_FILES + 1, f"failed: {MAX_FILES + 5} agent files, only the first {MAX_FILES} are read") == (
        len(gaps),
        gaps[0],
    )


def test_a_crowded_folder_is_told(tmp_path: Path) -> None:
    """A folder with too many files is a gap: they could hide the agents' own files."""
    for number in range(MAX_NAMES):
        (tmp_path / f"{number}").touch()
    _, gaps = read(tmp_path)
    assert gaps[0].startswith(f"failed: {MAX_NAMES} or more files")


def test_files_are_bounded_together(tmp_path: Path) -> None:
    """Each for itself may be of the size that is allowed; each that is left unread is a gap."""
    write(tmp_path)
    # Named so that they come last; one less would leave room for the first file, which is read.
    most = agents.MAX_READ_BYTES // MAX_FILE_BYTES
    for number in range(most + 2):
        write(tmp_path, "{" + " " * (MAX_FILE_BYTES - 1), f"agent-9999999-{number:02}.json")

    found, gaps = read(tmp_path)

    assert found is not None
    assert [f"agent-9999999-{number:02}.json: not read" for number in range(most - 1, most + 2)] == sorted(
        gap.removeprefix("failed: ").rpartition(": the files")[0] for gap in gaps if "not read: the files" in gap
    )


def test_request_touches_nothing_else(tmp_path: Path) -> None:
    """A link or a pipe in the request's place is left alone, and not waited for."""
    write(tmp_path, changed("devices.0.fragmentation", None))
    (tmp_path / "victim").touch()
    os.utime(tmp_path / "victim", (1.0, 1.0))

    (tmp_path / agents.SPLIT_REQUEST).symlink_to("victim")
    linked, _ = read(tmp_path)
    (tmp_path / agents.SPLIT_REQUEST).unlink()
    os.mkfifo(tmp_path / agents.SPLIT_REQUEST)
    piped, _ = read(tmp_path)

    assert 1.0 == (tmp_path / "victim").stat().st_mtime
    assert linked == piped == (replace(READ, split=None),)


@pytest.mark.parametrize("device", [{}, PUBLICATION["devices"][0]], ids=["bad", "good"])
def test_devices_are_bounded_together(tmp_path: Path, device: dict[str, object]) -> None:
    """128 files of 128 devices each made 16,384 gaps or allocators a second, and a daemon of 470 MB."""
    for pid in range(1, 9):
        devices = [{**device, **({"uuid": f"{pid:04}-{number:04}"} if device else {})} for number in range(100)]
        publication = changed("devices", devices)
        publication["process"] = {**publication["process"], "pid": pid, "start_ticks": 1, "pid_namespace": 1}
        write(tmp_path, publication, f"agent-{pid}-1.json")
    found, gaps = read(tmp_path)
    assert len(found or ()) == (MAX_ALLOCATORS if device else 0)
    assert len(gaps) <= MAX_GAPS + 1
    assert [gap for gap in gaps if "agent-4-1.json" in gap]
