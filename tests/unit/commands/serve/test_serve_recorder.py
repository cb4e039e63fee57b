"""`kvdiag serve --record-dir` as a process: killed, begun again, and with a disk that is full for a while."""

import resource
import signal
from pathlib import Path

import pytest

from kvdiag.commands import main
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually
from tests.unit.commands.serve.test_serve import daemon
from tests.unit.sim.client import Client


def newest_seconds(folder: Path) -> float:
    """When the last sample on disk was taken, 0 before there is one."""
    try:
        return read_segments(folder)[0].samples[-1].at_seconds
    except KvdiagError:
        return 0.0  # nothing is there, or a segment that was just begun, or one that a failure has just taken away


def test_a_killed_daemon_is_continued(tmp_path: Path) -> None:
    """After kill -9 the recording ends within a second of it; the next daemon knows the leak although nothing moves."""
    # a daemon that has found a leak
    with Drill(SCENARIOS["kv-leak"]) as drill:
        with daemon(drill.url, "--record-dir", str(tmp_path)) as first:
            assert eventually(first.says("ok"))
            Client(drill.url).complete(64, 8)
            assert eventually(first.says("fault"))
            found_seconds = first.series("kvdiag_sample_timestamp_seconds")[()]
            assert eventually(lambda: newest_seconds(tmp_path) > found_seconds)

            # it is killed
            seen_seconds = first.series("kvdiag_sample_timestamp_seconds")[()]
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(30)
        assert seen_seconds - newest_seconds(tmp_path) < 1.0

        # another begins after the server has gone
        url = drill.url
    with daemon(url, "--record-dir", str(tmp_path)) as second:
        # it says what the server did
        assert eventually(second.says("fault"))
        assert 1.0 == second.series("kvdiag_finding")["leak.kv_blocks", "fault"]
        assert 1.0 == second.up()["recorder",]


def test_a_full_disk_stops_the_recording_alone(tmp_path: Path) -> None:
    """Nothing is recorded and everything goes on; when there is room it records again, and what was lost is told."""
    with Drill(SCENARIOS["healthy"]) as drill, daemon(drill.url, "--record-dir", str(tmp_path)) as serving:
        assert eventually(lambda: newest_seconds(tmp_path) > 0.0)
        assert eventually(lambda: ("engine",) in serving.series("kvdiag_ticks_total"))

        # no file may grow any more
        _, hard = resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE, (0, hard))
        assert eventually(lambda: serving.up()["recorder",] == 0.0)
        lost = serving.series("kvdiag_source_errors_total")["recorder",]
        ticks = serving.series("kvdiag_ticks_total")["engine",]
        assert eventually(lambda: serving.series("kvdiag_ticks_total")["engine",] > ticks + 5)
        assert eventually(lambda: serving.series("kvdiag_source_errors_total")["recorder",] > lost)
        assert 1.0 == serving.up()["engine",]

        # there is room again
        resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        now_seconds = serving.series("kvdiag_sample_timestamp_seconds")[()]
        assert eventually(lambda: serving.up()["recorder",] == 1.0)
        assert eventually(lambda: newest_seconds(tmp_path) > now_seconds)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything else, in one line."""
    file = tmp_path / "file"
    file.write_text("")
    code = main(["serve", "--listen", "127.0.0.1:0", "--record-dir", str(file)])
    error = capsys.readouterr().err
    assert (3, 1) == (code, len(error.splitlines()))
    assert error.startswith(f"kvdiag: cannot record to {file}: not a directory; ")
