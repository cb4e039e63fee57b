"""Files are written as in a hostile folder: nothing that was laid in their place is followed or overwritten."""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag import files
from kvdiag.commands import main
from kvdiag.commands.agent import install
from kvdiag.commands.fitting.profile_file import write_profiles
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.restore import reload
from kvdiag.feeds.recording.segment_store import HISTORY, MAX_TAKEN, MIN_MAX_BYTES, SegmentStore
from kvdiag.feeds.recording.segment_store import files as segments_of
from kvdiag.feeds.recording.trace import TraceWriter, read_trace
from kvdiag.model import Facts, Sample

STRANGER = 54_321
KEPT = "somebody else's"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def facts(url: str = "http://127.0.0.1:8000") -> Facts:
    """A server's."""
    return Facts(url=url)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that must not be written."""
    path = tmp_path / "victim"
    path.write_text(KEPT)
    path.chmod(0o644)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that anybody may write in."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    return path


def save(path: Path, trace: Path) -> int:
    """`kvdiag baseline save`, whose refusal is an exit code."""
    return main(["baseline", "save", str(trace), str(path)])


def recorded(path: Path) -> None:
    """A trace of one sample."""
    with TraceWriter(path, facts()) as writer:
        writer.add(Sample(at_seconds=1.0))


WRITERS: dict[str, Callable[[Path], object]] = {
    "trace": recorded,
    "packed trace": recorded,
    "profile": lambda path: write_profiles(path, ()),
    "replace": lambda path: files.replace(path, b"ours"),
}
NAMES = {"packed trace": "ours.jsonl.gz"}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("lay", ["link", "link to nothing", "second name"])
def test_what_was_laid_in_the_place_of_a_file_is_not_written_through(
    kind: str, lay: str, folder: Path, victim: Path
) -> None:
    """A link, one that leads nowhere, or a second name: the file behind it is as it was, or is not there."""
    path = folder / NAMES.get(kind, "ours.jsonl")
    if lay == "second name":
        path.hardlink_to(victim)
    else:
        path.symlink_to(victim if lay == "link" else folder / "made")
    with contextlib.suppress(KvdiagError, OSError):
        WRITERS[kind](path)
    assert KEPT == victim.read_text()
    assert not (folder / "made").exists()
    assert 0o644 == stat.S_IMODE(victim.stat().st_mode)


@pytest.mark.parametrize("command", ["run", "diagnose"])
def test_commands_refuse_links_by_name(
    command: str, folder: Path, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is asked or judged, with what to do."""
    link = folder / "link.jsonl"
    link.symlink_to(victim)
    recorded(tmp_path / "trace.jsonl")
    called = {
        "run": ["run", "--url", "http://127.0.0.1:1", "--record", str(link)],
        "diagnose": ["diagnose", str(tmp_path / "trace.jsonl"), "--report", str(link)],
    }
    assert 3 == main(called[command])
    assert "it is a symbolic link" in capsys.readouterr().err
    assert KEPT == victim.read_text()


@as_root
@pytest.mark.parametrize("kind", ["trace", "packed trace"])
def test_a_strangers_file_is_not_recorded_into(kind: str, folder: Path) -> None:
    """Its owner could read and change what is recorded."""
    path = folder / NAMES.get(kind, "ours.jsonl")
    path.touch()
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(KvdiagError, match=f"it belongs to user {STRANGER}"):
        recorded(path)
    assert 0 == path.stat().st_size


def test_devices_are_not_replaced(folder: Path) -> None:
    """Root could put a file in the place of /dev/null."""
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.replace(folder / "pipe", b"ours")
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)
    assert ["pipe"] == [path.name for path in folder.iterdir()]


def segments(folder: Path) -> SegmentStore:
    """A recorder's, which records one sample."""
    made = SegmentStore(folder, max_bytes=MIN_MAX_BYTES)
    made.begin(facts())
    made.add(Sample(at_seconds=1_000.0))
    made.keep([Sample(at_seconds=1_000.0)])
    return made


def test_recorder_passes_links_in_its_folder_by(folder: Path, victim: Path) -> None:
    """The recorder takes the next free number, in the folder and in its history."""
    (folder / HISTORY).mkdir()
    for number in range(1, 6):
        (folder / f"kvdiag-{number:08d}.jsonl.gz").symlink_to(victim)
        (folder / HISTORY / f"kvdiag-{number:08d}.jsonl.gz").symlink_to(folder / "made")
    segments(folder).close()
    assert KEPT == victim.read_text()
    assert not (folder / "made").exists()
    assert [1] == [len(read_trace(path)[0].samples) for path in segments_of(folder)]
    assert [1] == [len(read_trace(path)[0].samples) for path in segments_of(folder / HISTORY)]


def test_recorder_says_when_every_name_is_taken(folder: Path, victim: Path) -> None:
    """The recorder does not search forever."""
    for number in range(1, MAX_TAKEN + 2):
        (folder / f"kvdiag-{number:08d}.jsonl.gz").symlink_to(victim)

    made = SegmentStore(folder, max_bytes=MIN_MAX_BYTES)
    with pytest.raises(KvdiagError, match=r"cannot record to .*: File exists"):
        made.add(Sample(at_seconds=1_000.0))
    made.close()
    assert KEPT == victim.read_text()


def test_recorder_does_not_follow_a_link_to_another_history(folder: Path, tmp_path: Path) -> None:
    """SegmentStore files behind the link belong to another user: they are neither extended nor removed."""
    other = tmp_path / "other"
    segments(other).close()
    kept = {path.name: path.read_bytes() for path in (other / HISTORY).iterdir()}
    (folder / HISTORY).symlink_to(other / HISTORY)
    with pytest.raises(KvdiagError, match="it is a symbolic link"):
        segments(folder)
    assert kept == {path.name: path.read_bytes() for path in (other / HISTORY).iterdir()}


def test_recorder_does_not_follow_a_link_in_the_place_of_its_folder(folder: Path, tmp_path: Path) -> None:
    """It wrote into the other recorder's folder, and removed its oldest segments for room."""
    made, other = segments(folder), tmp_path / "other"
    segments(other).close()
    kept = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    folder.rename(tmp_path / "moved")
    folder.symlink_to(other)
    for order in (made.add, made.add, lambda _: made.resize(1), lambda one: made.renew_history([one])):
        with pytest.raises(KvdiagError, match=r"removed|taken its place"):
            order(Sample(at_seconds=2_000.0))
    made.close()
    assert kept == {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}

    folder.unlink()
    (tmp_path / "moved").rename(folder)
    folder_link = tmp_path / "link"
    folder_link.symlink_to(folder)
    segments(folder_link).close()
    assert 2 == len(segments_of(folder))


def test_recorder_notices_a_link_that_is_laid_while_it_works(folder: Path, tmp_path: Path) -> None:
    """Also when a history is renewed, which removes the one before."""
    made = segments(folder)
    other = tmp_path / "other"
    segments(other).close()
    kept = sorted(path.name for path in (other / HISTORY).iterdir())
    (folder / HISTORY).rename(tmp_path / "moved")
    (folder / HISTORY).symlink_to(other / HISTORY)
    with contextlib.suppress(KvdiagError):
        made.renew_history([Sample(at_seconds=2_000.0)])
    made.close()
    assert kept == sorted(path.name for path in (other / HISTORY).iterdir())


def test_lock_is_no_link(folder: Path, victim: Path) -> None:
    """Nor made where one leads."""
    (folder / ".lock").symlink_to(folder / "made")
    with pytest.raises(KvdiagError, match="cannot record to"):
        segments(folder)
    assert not (folder / "made").exists()
    assert KEPT == victim.read_text()


def test_a_large_number_does_not_hide_later_segments(folder: Path) -> None:
    """Of the highest number of eight digits the next one has nine."""
    recorded(folder / "kvdiag-99999999.jsonl.gz")
    segments(folder).close()
    segments(folder).close()
    assert 3 == len(segments_of(folder))


@as_root
def test_what_a_stranger_recorded_is_no_history_of_ours(folder: Path) -> None:
    """A daemon restores only what it wrote itself."""
    segments(folder).close()
    for path in (*segments_of(folder), *segments_of(folder / HISTORY)):
        os.chown(path, STRANGER, STRANGER)
    assert reload(folder, now_seconds=1_001.0, url=None) is None


def test_a_pipe_among_the_segments_is_not_waited_for(folder: Path) -> None:
    """At the start of the daemon."""
    segments(folder).close()
    os.mkfifo(folder / "kvdiag-00000099.jsonl.gz")
    assert reload(folder, now_seconds=1_001.0, url=None) is not None


def test_the_agent_is_not_installed_through_a_link(folder: Path, tmp_path: Path) -> None:
    """A folder that another user has put in the package's place is not written to."""
    (tmp_path / "other").mkdir()
    (folder / "kvdiag_agent").symlink_to(tmp_path / "other")
    assert install.callback is not None
    with pytest.raises(KvdiagError, match="cannot install into"):
        install.callback(folder)
    assert [] == list((tmp_path / "other").iterdir())


@as_root
def test_the_agent_is_not_installed_into_a_strangers_package(folder: Path) -> None:
    """Its owner could replace what the server imports."""
    (folder / "kvdiag_agent").mkdir()
    os.chown(folder / "kvdiag_agent", STRANGER, STRANGER)
    assert install.callback is not None
    with pytest.raises(KvdiagError, match=f"belongs to user {STRANGER}"):
        install.callback(folder)
    assert [] == list((folder / "kvdiag_agent").iterdir())


def test_a_pipe_in_a_folder_of_traces_is_not_waited_for(folder: Path) -> None:
    """`kvdiag diagnose DIR` reads what else is there."""
    segments(folder).close()
    os.mkfifo(folder / "aaa.jsonl")
    assert 1 == len(read_segments(folder)[0].samples)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model, of lengths, of profiles, of baselines and of the web configuration."""
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    commands = (
        ("fit", str(tmp_path), "--gpu", "h100"),
        ("fit", "llama_70b", "--gpu", "h100", "--request-rate", "1", "--lengths", str(pipe)),
        ("fit", "llama_70b", "--gpu", "h100", "--profile", str(pipe)),
        ("baseline", "compare", str(pipe), str(pipe)),
        ("serve", "--listen", "127.0.0.1:0", "--web-config", str(pipe)),
    )
    assert [3] * len(commands) == [main(list(one)) for one in commands]
    assert len(commands) == capsys.readouterr().err.count("config.json")
