"""A fleet's state on disk: checked as any input, and for its owner alone."""

import fcntl
import resource
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.replica_samples import DamagedError, ReplicaSamples, block, restored
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.sources.prometheus_answers import MAX_POINTS, Points

KEY = "pod /prod/vllm-0"
SERIES = (("__name__", "vllm:num_requests_running"), ("pod", "vllm-0"))


def samples() -> ReplicaSamples:
    """Of one series."""
    points = Points(times=array("d", [60.0, 120.0]), values=array("d", [1.0, 2.0]))
    return ReplicaSamples(until_seconds=120.0, series={SERIES: points})


def about(folder: StateFolder) -> list[tuple[str, Mapping[str, Any]]]:
    """What is kept with each replica's samples."""
    return [(key, kept) for key, kept, _ in folder.kept()]


def test_no_flipped_bit_is_read_as_it_stands() -> None:
    """At any place of a file with one block."""
    whole = block(samples(), 0.0, {"key": KEY})
    for place in range(len(whole)):
        for bit in (1, 128):
            spoilt = bytearray(whole)
            spoilt[place] ^= bit
            with pytest.raises(DamagedError):
                restored(bytes(spoilt))


@pytest.mark.parametrize("content", [bytes(17 * MAX_POINTS + 8), b"", b"\xff\xff\xff\xff", b"\x02\0\0\0[]"])
def test_a_block_of_other_content_is_refused(content: bytes) -> None:
    """With a valid checksum: one that unpacks to more than a replica may have, and others that are no samples."""
    packed = zlib.compress(content, 1)
    head = struct.pack("<4sII", b"kvf1", len(packed), zlib.crc32(packed))
    with pytest.raises(DamagedError):
        restored(head + packed)


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    """By the next start, and nothing else."""
    state = tmp_path / "state"
    StateFolder(state, {}).close()
    (state / ".0123.replica.4567.tmp").write_bytes(b"half")
    (state / "notes.tmp").write_bytes(b"")
    StateFolder(state, {}).close()
    assert sorted(path.name for path in state.iterdir()) == [".lock", "fleet.json", "notes.tmp"]


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    """The folder and every file in it."""
    folder = StateFolder(tmp_path / "state", {})
    folder.replace(KEY, samples(), 0.0, {})
    folder.extend(KEY, samples(), 60.0)
    folder.close()
    assert 0o700 == (tmp_path / "state").stat().st_mode & 0o777
    assert {0o600} == {file.stat().st_mode & 0o777 for file in (tmp_path / "state").glob("*.replica")}


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    """Neither by a new file nor by an extended one; it is no replica either."""
    victim = tmp_path / "victim"
    victim.write_bytes(before := block(samples(), 0.0, {"key": KEY}))
    folder = StateFolder(tmp_path / "state", {})
    folder.replace(KEY, samples(), 0.0, {})
    [file] = (tmp_path / "state").glob("*.replica")
    file.unlink()
    file.symlink_to(victim)
    assert [] == list(folder.kept())
    with pytest.raises(OSError, match="symbolic links"):
        folder.extend(KEY, samples(), 60.0)
    assert before == victim.read_bytes()
    folder.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can be extended beyond this size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 50])
def test_half_a_block_on_a_full_disk_does_not_hide_the_next_one(tmp_path: Path, room: int) -> None:
    """What was written of it is taken back, and the error is raised."""
    folder = StateFolder(tmp_path / "state", {})
    folder.replace(KEY, samples(), 0.0, {})
    [file] = (tmp_path / "state").glob("*.replica")
    before = file.read_bytes()
    with largest_file(len(before) + room), pytest.raises(OSError, match="File too large"):
        folder.extend(KEY, samples(), 60.0)
    assert before == file.read_bytes()
    folder.extend(KEY, replace(samples(), until_seconds=180.0), 60.0)
    kept = folder.load(KEY)
    assert kept is not None
    assert (180.0, 2) == (kept.until_seconds, kept.blocks)
    folder.close()


def test_a_folder_has_one_daemon(tmp_path: Path) -> None:
    """A second one is refused with the fix."""
    folder = StateFolder(tmp_path, {})
    with pytest.raises(KvdiagError, match="another kvdiag writes to"):
        StateFolder(tmp_path, {})
    folder.close()


def test_a_file_that_another_machine_made_is_the_replicas(tmp_path: Path) -> None:
    """Its content is sent there and back: the samples, and what is kept with them."""
    here, there = StateFolder(tmp_path / "here", {}), StateFolder(tmp_path / "there", {})
    here.replace(KEY, samples(), 0.0, {"about": 1})
    there.take(KEY, here.content(KEY))
    assert list(here.kept()) == list(there.kept())
    assert here.load(KEY) == there.load(KEY)
    assert b"" == here.content("another")
    here.close()
    there.close()


def test_a_verdict_is_added_to_a_file_that_was_just_read(tmp_path: Path) -> None:
    """What was read whole is not written again; one that a crash cuts off costs the verdict alone."""
    folder = StateFolder(tmp_path / "state", {})
    folder.replace(KEY, samples(), 0.0, {})
    [file] = (tmp_path / "state").glob("*.replica")
    before = file.read_bytes()
    kept = folder.load(KEY)
    assert kept is not None
    folder.judged(KEY, kept, 0.0, {"node": "a"})
    assert file.read_bytes().startswith(before)
    assert [(KEY, {"key": KEY, "node": "a"})] == about(folder)
    assert folder.load(KEY) == replace(kept, blocks=2)
    file.write_bytes(file.read_bytes()[:-1])
    assert [(KEY, {"key": KEY})] == about(folder)
    assert folder.load(KEY) == kept
    folder.close()


def test_a_verdict_replaces_a_file_of_several_rounds(tmp_path: Path) -> None:
    """So that it does not grow with each of them."""
    folder = StateFolder(tmp_path / "state", {})
    folder.replace(KEY, samples(), 0.0, {"node": "a"})
    folder.extend(KEY, samples(), 60.0)
    kept = folder.load(KEY)
    assert kept is not None
    folder.judged(KEY, kept, 0.0, {"node": "b"})
    assert [(KEY, {"key": KEY, "node": "b"})] == about(folder)
    assert folder.load(KEY) == replace(kept, blocks=1)
    folder.close()


def test_the_state_of_another_fleet_stays_until_the_first_replica_is_kept(tmp_path: Path) -> None:
    """Until then it is another's: nothing of it is read, and its own daemon finds it as it was."""
    old, new = {"url": "http://old"}, {"url": "http://new"}
    discarded: list[int] = []

    def kept(about: dict[str, str], *, replaces: bool = False) -> list[str]:
        folder = StateFolder(tmp_path, about, discarded=discarded.append)
        found = [key for key, _, _ in folder.kept()] + ["loaded"] * (folder.load(KEY) is not None)
        if replaces:
            folder.replace(KEY, samples(), 0.0, {})
        folder.close()
        return found

    assert [] == kept(old, replaces=True)
    assert [] == kept(new)
    assert [KEY, "loaded"] == kept(old)
    assert [] == discarded
    assert [] == kept(new, replaces=True)
    assert [1] == discarded
    assert [KEY, "loaded"] == kept(new)
    assert [] == kept(old)


def test_a_block_that_is_being_written_is_not_taken_for_half_of_one(tmp_path: Path) -> None:
    """A page reads the file while a round extends it; the block is there afterwards."""
    folder = StateFolder(tmp_path, {})
    folder.replace(KEY, samples(), 0.0, {})
    [path] = tmp_path.glob("*.replica")
    content = block(replace(samples(), until_seconds=180.0), 60.0)
    with ThreadPoolExecutor(1) as page:
        with path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content[:20])
            reading = page.submit(folder.load, KEY)
            # A page that does not wait has answered by now.
            wait([reading], timeout=0.5)
            file.write(content[20:])
        found = reading.result()
    assert found is not None
    assert (180.0, 2) == (found.until_seconds, found.blocks)
    assert found == folder.load(KEY)
    folder.close()
