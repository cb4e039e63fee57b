"""Lives of a server as a daemon lists them, as its history ages and after it was killed itself: they are the same."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.daemon.retention import MAX_LIVES, Retention
from kvdiag.feeds.daemon.server_tracker import MAX_ENGINES, ServerTracker
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.recording import disk_recorder
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.restore import reload
from kvdiag.feeds.recording.segment_store import HISTORY, SegmentStore, files
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Engine, Life, Sample
from tests.builders.lives import KNOWN, LEAKED_BLOCKS, life, outage
from tests.builders.values import pool
from tests.unit.feeds.daemon.test_watch_servers import lives
from tests.unit.feeds.daemon.virtual_time import now_seconds
from tests.unit.feeds.daemon.watched_place import BEGUN_SECONDS, Place, watching

MIB, GIB = 2**20, 2**30
LEAKED_RATIO = 0.05


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may not run the recorder's thread for a second."""
    monkeypatch.setattr(disk_recorder, "LAST_SECONDS", 60.0)


def told(found: Sequence[Life], later_seconds: float = 0.0) -> list[tuple[Any, ...]]:
    """Each life's start, end, cause, verdict and findings."""
    return [
        (
            round(one.start_seconds + later_seconds, 3),
            None if one.end_seconds is None else round(one.end_seconds + later_seconds, 3),
            one.end,
            one.end_detail,
            one.worst,
            [(finding.id, finding.status) for finding in one.findings],
        )
        for one in found
    ]


def killed(folder: Path, place: Place, script: Callable[[], Awaitable[None]]) -> tuple[list[tuple[Any, ...]], float]:
    """What a daemon that recorded to a folder listed of a script's lives when it was killed, and when that was."""
    living = folder.with_name("living")
    recorder = DiskRecorder(SegmentStore(living, max_bytes=64 * MIB))
    listed: list[tuple[Any, ...]] = []

    async def work(watch: Watch) -> None:
        async def write() -> None:
            while True:
                await asyncio.sleep(10)
                recorder.drained()

        writing = asyncio.create_task(write())
        await script()
        await asyncio.sleep(90)
        writing.cancel()
        recorder.drained()
        listed.extend(told(lives(watch)))
        shutil.copytree(living, folder)
        listed.append((BEGUN_SECONDS + now_seconds(),))

    watching(place, work, recorder=recorder)
    recorder.close()
    *found, (ended_seconds,) = listed
    return found, ended_seconds


def restarted(folder: Path, place: Place, at_seconds: float) -> Watch:
    """The next daemon on that folder, two minutes later."""
    segments = SegmentStore(folder, max_bytes=64 * MIB)
    recorder = DiskRecorder(segments, reload(folder, now_seconds=at_seconds, url=None))

    async def script(watch: Watch) -> None:
        await asyncio.sleep(120)

    watch = watching(place, script, recorder=recorder, begun_seconds=at_seconds)
    recorder.close()
    return watch


async def four_lives(place: Place) -> None:
    """One that leaked, then a downtime; one with another pool; a third by counters alone; a fourth, half old now."""
    place.usage = LEAKED_RATIO
    await asyncio.sleep(407)
    place.up = False
    await asyncio.sleep(33)
    place.up, place.usage, place.usable_blocks, place.prompt_tokens = True, 0.0, 6000, 0
    await asyncio.sleep(218)
    place.prompt_tokens = 0
    await asyncio.sleep(165)
    place.prompt_tokens = 0
    await asyncio.sleep(500)


Recorded = tuple[Path, list[tuple[Any, ...]], float]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A folder that a killed daemon left, what it listed, and when it was killed."""
    folder, place = tmp_path_factory.mktemp("lives") / "record", Place(pids=True)
    listed, seconds = killed(folder, place, lambda: four_lives(place))
    assert ["unreachable", "restarted", "restarted", None] == [one[2] for one in listed]
    assert ["fault", "ok", "ok", "ok"] == [one[4] for one in listed], listed
    return folder, listed, seconds


@pytest.fixture
def left(recorded: Recorded, tmp_path: Path) -> Recorded:
    """The same, with a copy of the folder."""
    return shutil.copytree(recorded[0], tmp_path / "record"), *recorded[1:]


def place_after(**changes: Any) -> Place:
    """The place as the four lives left it, but for some changes."""
    return replace(Place(pids=True, usable_blocks=6000, prompt_tokens=5_000), **changes)


@pytest.mark.parametrize("down_seconds", [1.0, 7200.0], ids=["a second", "two hours"])
def test_a_killed_daemon_lists_the_same_lives(left: Recorded, down_seconds: float) -> None:
    """The server ran on: its present life continues, however long no daemon looked. Each life has its own facts."""
    folder, listed, seconds = left
    before = reload(folder, now_seconds=seconds, url=None)
    assert before is not None
    assert [6144, 6000, 6000] == [facts.pools[0].usable_blocks for _, facts in before.earlier_facts]
    watch = restarted(folder, place_after(), seconds + down_seconds)
    assert listed == told(lives(watch))


@pytest.mark.parametrize("restarts", [False, True], ids=["present life", "past life"])
def test_a_killed_daemon_knows_since_when(tmp_path: Path, restarts: bool) -> None:
    """Of a finding that no sample dates: it was found twenty minutes before the daemon was killed."""
    place, begun = Place(pids=True), []

    async def script() -> None:
        await asyncio.sleep(600)
        place.other_bytes = 4 * GIB
        begun.append(BEGUN_SECONDS + now_seconds())
        await asyncio.sleep(1200)
        if restarts:
            place.prompt_tokens, place.other_bytes = 0, 0
            await asyncio.sleep(600)

    listed, seconds = killed(tmp_path / "record", place, script)
    found = lives(restarted(tmp_path / "record", replace(place, prompt_tokens=10_000), seconds + 60.0))
    assert listed == told(found)
    (foreign,) = [one for life in found for one in life.findings if one.id == "baseline.foreign_memory"]
    assert foreign.since_seconds == pytest.approx(begun[0], abs=130.0)


@pytest.mark.parametrize(
    "changes", [{"pid": 99}, {"prompt_tokens": 0}, {"pids": False, "prompt_tokens": 0}], ids=["pid", "counters", "both"]
)
def test_another_process_is_another_life(left: Recorded, changes: dict[str, Any]) -> None:
    """The server was restarted while no daemon looked: the life before ended with the last answer that was read."""
    folder, listed, seconds = left
    *ended, last, present = told(lives(restarted(folder, place_after(**changes), seconds + 60.0)))
    assert (listed[:-1], listed[-1][0]) == (ended, last[0])
    assert ("restarted", pytest.approx(seconds, abs=2.0)) == (last[2], last[1])
    assert (pytest.approx(seconds + 60.0, abs=5.0), None) == present[:2]


@pytest.mark.parametrize("at_seconds", [None, 5.0], ids=["same", "another"])
def test_another_pool_is_another_process(at_seconds: float | None) -> None:
    """Though it has the same id, as in a container, and is found before it is read."""
    tracker = ServerTracker(cast("Any", None), retry_seconds=1.0)
    tracker.restore(KNOWN, None)
    found = replace(KNOWN, weights_bytes=1) if at_seconds is None else replace(KNOWN, pools=(pool(usable_blocks=3072),))
    assert at_seconds == tracker.take(found, 5.0)


def test_engines_that_are_renamed_are_not_remembered() -> None:
    """A server that renames its engines with each answer would fill the memory."""
    tracker = ServerTracker(cast("Any", None), retry_seconds=1.0)
    for second in range(MAX_ENGINES + 100):
        named = Engine(engine=str(second), prompt_tokens_total=1)
        tracker.add(Sample(at_seconds=float(second), engines=(named,)))
    assert len(tracker._tokens) <= MAX_ENGINES + 1  # noqa: SLF001 - no public attribute has it


def test_a_server_that_went_meanwhile_is_down(left: Recorded) -> None:
    """Not starting: it answered an earlier daemon, and has been down since that answer."""
    folder, listed, seconds = left
    watch = restarted(folder, place_after(up=False), seconds + 60.0)
    *ended, last = told(lives(watch))
    assert (listed[:-1], listed[-1][0], "unreachable") == (ended, last[0], last[2])
    assert ("lost", last[1]) == (watch.snapshot().state, watch.snapshot().down_since_seconds)


def test_a_clock_set_back_meanwhile_moves_all_lives(left: Recorded) -> None:
    """What was recorded cannot be of the future: all lives are dated earlier, by the same time, and so at each start
    after that one; a reader of the recording finds the same.
    """
    folder, listed, seconds = left
    found = told(lives(restarted(folder, place_after(), seconds - 1200.0)))
    moved_seconds = listed[0][0] - found[0][0]
    assert moved_seconds == pytest.approx(1200.0, abs=3.0)
    again = told(lives(restarted(folder, place_after(prompt_tokens=6_000), seconds - 1000.0)))
    timeline, facts = read_segments(folder)
    read = [one.start_seconds for one in diagnose(timeline, facts).lives]
    assert [(one[0] - moved_seconds, one[1] and one[1] - moved_seconds) for one in listed] == [
        pytest.approx(one[:2], abs=0.01) for one in found
    ]
    assert found == again
    assert [one[0] for one in found] == pytest.approx(read, abs=0.01)


def test_whatever_file_is_damaged_the_lives_are_the_same(left: Recorded, tmp_path: Path) -> None:
    """The history has what a segment lost, and the segments of an hour what the history did.

    Next to damage no life is ok.
    """
    folder, listed, seconds = left
    unsure = [(*one[:4], "unknown" if one[4] == "ok" else one[4], one[5]) for one in listed]
    *closed, _ = files(folder)
    for number, path in enumerate([*closed, *files(folder / HISTORY)]):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        damaged = copy / path.relative_to(folder)
        damaged.write_bytes(damaged.read_bytes()[: path.stat().st_size // 2] + b"\0" * 99)
        # The first segment is mostly from before the server was found.
        expected = (unsure,) if number else (listed, unsure)
        assert told(lives(restarted(copy, place_after(), seconds + 1.0))) in expected, path.name


def test_a_crash_loop_lists_as_many_lives_as_before(tmp_path: Path) -> None:
    """What was forgotten for room is not there again."""
    place = Place()

    async def crash() -> None:
        for _ in range(MAX_LIVES + 4):
            await asyncio.sleep(21)
            place.prompt_tokens = 0

    listed, seconds = killed(tmp_path / "record", place, crash)
    assert MAX_LIVES == len(listed)
    assert listed == told(lives(restarted(tmp_path / "record", replace(place, prompt_tokens=500), seconds + 1.0)))


def test_a_folder_of_an_older_kvdiag_is_read(tmp_path: Path) -> None:
    """Its headers name no earlier lives: the last one's samples are its own."""
    (tmp_path / HISTORY).mkdir()
    before, after = life(1000.0, 0, tokens=900), life(1040.0, 0)
    for number, facts, samples in ((1, replace(KNOWN, model="other"), before), (2, KNOWN, after)):
        with TraceWriter(tmp_path / f"kvdiag-{number:08d}.jsonl.gz", facts) as writer:
            for sample in samples:
                writer.add(sample)
    found = reload(tmp_path, now_seconds=1100.0, url=None)
    assert found is not None
    assert (KNOWN, (), after) == (found.facts, found.earlier_facts, found.tail)


@pytest.mark.parametrize("between", [(), outage(3638.0, samples=13)], ids=["within a second", "after an outage"])
def test_a_life_keeps_its_start_and_end_as_it_ages(between: Sequence[Sample]) -> None:
    """Nothing of it depends on how old it is, though only a few samples of each minute are kept."""
    halved = replace(KNOWN, pools=(pool(usable_blocks=3072),))
    # One reading of the minute in which it ends gets no answer.
    first = life(3017.0, LEAKED_BLOCKS, tokens=900, samples=621)
    first = (*first[:603], *outage(3620.0, samples=1), *first[604:])
    second = life(3638.0 + len(between), 0, tokens=0, samples=1500)
    retention, seen = Retention(), []
    for sample in (*first, *between, *second):
        if sample == second[0]:
            retention.begin_life(sample.at_seconds, halved)
        retention.add(sample)
        if sample in second[30::60]:
            seen.append(told(diagnose(retention.timeline(), KNOWN).lives))
    assert [(3017.0, 3637.0), (second[0].at_seconds, None)] == [one[:2] for one in seen[0]]
    assert ["unreachable" if between else "restarted", None] == [one[2] for one in seen[0]]
    assert len(retention.thinned) > 20
    assert [seen[0]] * len(seen) == seen
