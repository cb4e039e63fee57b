"""The flight recorder: rotation within a size, kills, full disks, set clocks, and what a restart restores."""

import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.recording import disk_recorder
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.restore import Before, reload
from kvdiag.feeds.recording.segment_store import HISTORY, SEGMENTS, SegmentStore, files
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.model import Facts, Sample
from tests.builders.values import engine, pool

URL = "http://127.0.0.1:8000"
FACTS = Facts(url=URL, model="tiny", pools=(pool(),), server_pids=(7,))
MIB = 2**20


def readings(count: int, begin_seconds: float = 1000.0) -> list[Sample]:
    """One a second."""
    return [
        Sample(at_seconds=begin_seconds + number, engines=(engine(usage=number % 97 / 97),)) for number in range(count)
    ]


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[SegmentStore]:
    """A folder of 16 KiB."""
    made = SegmentStore(tmp_path / "record", max_bytes=16 * 2**10)
    made.begin(FACTS)
    yield made
    made.close()


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_recorded_is_read(segments: SegmentStore) -> None:
    """Over any number of segments: the timeline and the facts are what came."""
    # More than an hour, so that a segment follows another
    came = readings(4000)
    segments.max_bytes = 16 * MIB
    for sample in came:
        segments.add(sample)
    segments.close()
    timeline, facts = read_segments(segments.folder)
    assert (tuple(came), FACTS) == (timeline.samples, facts)
    assert 2 == len(files(segments.folder))


def test_size_is_kept_and_the_newest_with_it(segments: SegmentStore) -> None:
    """However long it records: never more than asked for, the oldest is removed, other files are not touched."""
    # A file of another program
    other = segments.folder / "notes.txt"
    other.write_text("mine")

    most, came = 0, readings(2500)
    for sample in came:
        segments.add(sample)
        most = max(most, size(segments.folder))
    segments.close()

    kept = read_segments(segments.folder)[0].samples
    assert most <= segments.max_bytes
    assert tuple(came[-len(kept) :]) == kept
    assert size(segments.folder) > segments.max_bytes * (SEGMENTS - 3) / SEGMENTS
    assert "mine" == other.read_text()


def test_a_smaller_size_takes_hold_at_once(segments: SegmentStore) -> None:
    """What is too much then is removed."""
    for sample in readings(3000):
        segments.add(sample)
    segments.resize(4 * 2**10)
    assert size(segments.folder) <= 4 * 2**10


@settings(max_examples=12, deadline=None)
@given(left=st.integers(0, 4000))
def test_a_kill_loses_what_was_torn_alone(tmp_path_factory: pytest.TempPathFactory, left: int) -> None:
    """After a kill at any byte all complete lines are read, in order, and the next start continues the recording."""
    folder = tmp_path_factory.mktemp("record")
    segments = SegmentStore(folder, max_bytes=MIB)
    segments.begin(FACTS)
    came = readings(40)
    for sample in came:
        segments.add(sample)
    (path,) = files(folder)
    whole = path.read_bytes()
    segments.close()
    path.write_bytes(whole[: min(left, len(whole))])

    before = reload(folder, now_seconds=1100.0, url=URL)

    tail = () if before is None else before.tail
    assert tuple(came[: len(tail)]) == tail
    assert len(tail) == len(came) or left < len(whole)


def test_every_sample_is_on_disk_when_the_next_one_comes(segments: SegmentStore) -> None:
    """Nothing waits in a buffer: a kill at any moment leaves what came before."""
    came = readings(5)
    for sample in came:
        segments.add(sample)
    before = reload(segments.folder, now_seconds=1100.0, url=URL)
    assert before is not None
    assert tuple(came) == before.tail


def test_two_recorders_never_share_a_folder(segments: SegmentStore) -> None:
    """The second is refused, until the first has ended."""
    with pytest.raises(KvdiagError, match="another kvdiag records to") as refusal:
        SegmentStore(segments.folder, max_bytes=MIB)
    segments.close()
    assert "--record-dir" in str(refusal.value)
    SegmentStore(segments.folder, max_bytes=MIB).close()


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/kvdiag"])
def test_what_is_no_folder_is_an_error(tmp_path: Path, folder: str) -> None:
    """In one line, with the next step."""
    (tmp_path / "file").write_text("")
    with pytest.raises(KvdiagError, match=r"^cannot record to .* --record-dir$"):
        SegmentStore(tmp_path / folder, max_bytes=MIB)


def recorded_day(folder: Path, hours: float = 25.0, step_seconds: float = 30.0) -> tuple[Retention, float]:
    """A folder that a daemon has filled for so long, killed at the end; what it had in memory, and its last moment."""
    living = folder.with_name(f"{folder.name}-living")
    segments = SegmentStore(living, max_bytes=64 * MIB)
    segments.begin(FACTS)
    tiers, now_seconds = Retention(), 1000.0
    for number in range(int(hours * 3600 / step_seconds)):
        now_seconds = 1000.0 + number * step_seconds
        sample = Sample(at_seconds=now_seconds, engines=(engine(usage=number % 97 / 97),))
        segments.add(sample)
        segments.keep(tiers.add(sample))
    # What is on the disk now is what a kill leaves.
    shutil.copytree(living, folder, dirs_exist_ok=True)
    segments.close()
    return tiers, now_seconds


def filled(before: Before | None) -> Retention:
    """Tiers as a start restores them."""
    tiers = Retention()
    assert before is not None
    tiers.load(before.thinned)
    for sample in before.tail:
        tiers.add(sample)
    return tiers


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    """After a day and a kill the next daemon has in memory what the one before had."""
    tiers, now_seconds = recorded_day(tmp_path)
    before = reload(tmp_path, now_seconds=now_seconds, url=URL)
    earliest_seconds = now_seconds - 86_400.0
    expected = tuple(one for one in tiers.samples() if one.at_seconds >= earliest_seconds)
    assert expected == filled(before).samples()
    assert before is not None
    assert FACTS == before.facts


def test_many_restarts_keep_a_day(tmp_path: Path) -> None:
    """Each start takes over the history in one file of its own; it neither grows nor shrinks by that."""
    tiers, now_seconds = recorded_day(tmp_path, hours=3.0)
    for _ in range(5):
        before = reload(tmp_path, now_seconds=now_seconds, url=URL)
        assert before is not None
        segments = SegmentStore(tmp_path, max_bytes=64 * MIB)
        segments.begin(before.facts)
        segments.renew_history(before.thinned)
        segments.close()
    assert tiers.samples() == filled(reload(tmp_path, now_seconds=now_seconds, url=URL)).samples()
    assert 1 == len(files(tmp_path / HISTORY))


def test_what_is_old_or_of_another_server_is_left(tmp_path: Path) -> None:
    """A day later, or for another server, nothing of it counts."""
    _, now_seconds = recorded_day(tmp_path, hours=1.0)
    later = reload(tmp_path, now_seconds=now_seconds + 90_000.0, url=URL)
    other = reload(tmp_path, now_seconds=now_seconds, url="http://127.0.0.1:9000")
    assert (None, None) == (later, other)


def test_a_set_clock_garbles_nothing(segments: SegmentStore) -> None:
    """An hour back in the middle: read together, the recording is one of unbroken durations."""
    came = readings(20)
    for sample in came[:10]:
        segments.add(sample)
    segments.clock_was_set(-3600.0)
    for sample in came[10:]:
        segments.add(replace(sample, at_seconds=sample.at_seconds - 600.0))
    segments.close()
    timeline, _ = read_segments(segments.folder)
    expected = [*(one.at_seconds - 3600.0 for one in came[:10]), *(one.at_seconds - 600.0 for one in came[10:])]
    assert [max(each, 0.0) for each in expected] == [one.at_seconds for one in timeline.samples]
    assert "clock_set_seconds" in json.loads(gzip.decompress(files(segments.folder)[1].read_bytes()).splitlines()[0])


Recording = tuple[DiskRecorder, list[float], list[Sample]]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """A recorder that has written the first of some samples, with a clock that stands until it is set.

    A busy machine may not run its thread for a second: it is waited for longer than at a daemon's end.
    """
    monkeypatch.setattr(disk_recorder, "LAST_SECONDS", 60.0)
    now, came = [0.0], readings(4)
    recorder = DiskRecorder(SegmentStore(tmp_path / "record", max_bytes=MIB), clock=lambda: now[0])
    recorder.order(SegmentStore.begin, FACTS)
    recorder.add(came[0])
    recorder.drained()
    return recorder, now, came


def test_files_that_are_taken_away_are_missed(tmp_path: Path, watched: Recording) -> None:
    """If the folder is emptied its content is lost: the loss is reported, and new samples go to new files."""
    folder, (recorder, now, came) = tmp_path / "record", watched
    recorder.keep(came[:1])
    recorder.drained()
    for path in (*files(folder), *files(folder / HISTORY)):
        path.unlink()
    (folder / HISTORY).rmdir()

    recorder.add(came[1])
    recorder.drained()

    assert (1, True) == (recorder.lost_total, "was removed" in (recorder.problem or ""))

    recorder.keep(came[1:2])
    recorder.drained()
    now[0] = 2.0
    recorder.add(came[2])
    recorder.keep(came[2:3])
    recorder.close()

    assert 1 == recorder.lost_total
    assert [came[2]] == [one for path in files(folder) for one in read_trace(path)[0].samples]
    assert [came[2]] == [one for path in files(folder / HISTORY) for one in read_trace(path)[0].samples]


def test_a_failing_disk_costs_recorded_samples_alone(tmp_path: Path, watched: Recording) -> None:
    """Samples that cannot be written are counted and reported; when there is room again, recording resumes."""
    folder, (recorder, now, came) = tmp_path / "record", watched
    folder.rename(tmp_path / "gone")
    recorder.order(SegmentStore.begin, replace(FACTS, model="other"))

    recorder.add(came[1])
    recorder.add(came[2])
    recorder.drained()

    assert 2 == recorder.lost_total
    assert (recorder.problem or "").startswith(f"cannot record to {folder}/kvdiag-")

    (tmp_path / "gone").rename(folder)
    now[0] = 2.0
    recorder.add(came[3])
    recorder.close()

    assert (2, None) == (recorder.lost_total, recorder.problem)
    assert [came[0], came[3]] == [one for path in files(folder) for one in read_trace(path)[0].samples]


def test_a_removed_folder_is_noticed_and_taken_again(tmp_path: Path, watched: Recording) -> None:
    """Writes to a deleted file never fail, but its removal is detected; a folder in its place is locked as well."""
    folder, (recorder, now, came) = tmp_path / "record", watched
    shutil.rmtree(folder)

    recorder.add(came[1])
    recorder.drained()

    assert 1 == recorder.lost_total
    assert "was removed" in (recorder.problem or "")

    folder.mkdir()
    now[0] = 2.0
    recorder.add(came[2])
    recorder.drained()

    assert 1 == recorder.lost_total
    with pytest.raises(KvdiagError, match="another kvdiag records to"):
        SegmentStore(folder, max_bytes=MIB)

    recorder.add(came[3])
    recorder.close()

    assert tuple(came[2:]) == read_segments(folder)[0].samples
