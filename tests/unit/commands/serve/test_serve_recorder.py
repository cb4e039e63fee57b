"""`kvdiag serve --record-dir` as a process: killed, begun again, and with a disk that is full for a while."""

import resource
import signal
from pathlib import Path

import pytest

from kvdiag.commands import main
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually, free_port
from tests.unit.commands.serve.test_serve import daemon
from tests.unit.sim.client import Client


def newest_seconds(folder: Path) -> float:
    """When the last sample on disk was taken, 0 before there is one."""
    try:
        return read_segments(folder)[0].samples[-1].at_seconds
    except KvdiagError:
        return 0.0  # nothing is there, or a segment that was just begun, or one that a failure has just taken away


def test_a_restarted_daemon_lists_the_same_lives(tmp_path: Path) -> None:
    """After SIGKILL or SIGTERM, the next daemon lists the ended life's leak as before and continues the present life;
    a server that was restarted meanwhile starts a new one.
    """
    port = free_port()
    at = (f"http://127.0.0.1:{port}", "--record-dir", str(tmp_path))
    with daemon(*at) as first:
        # one life leaks, the next one is well
        with Drill(SCENARIOS["kv-leak"], port=port) as drill:
            assert eventually(first.says("ok"))
            Client(drill.url).complete(64, 8)
            assert eventually(first.says("fault"))
        assert eventually(lambda: first.up()["engine",] == 0.0)
        with Drill(SCENARIOS["healthy"], port=port) as drill:
            first.lives_with("fault", "ok")
            Client(drill.url).complete(64, 8)
            listed = first.lives_with("fault", "ok")
            newest = first.series("kvdiag_sample_timestamp_seconds")[()]
            assert eventually(lambda: newest_seconds(tmp_path) > newest)

            # the daemon is killed, which loses a second at most, and the next one ends in order
            seen_seconds = first.series("kvdiag_sample_timestamp_seconds")[()]
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(30)
            assert seen_seconds - newest_seconds(tmp_path) < 1.0
            with daemon(*at) as second:
                assert eventually(lambda: second.lives() == listed), second.lives()
                assert "leak.kv_blocks" in second.client.get("/")[1]
                second.process.send_signal(signal.SIGTERM)
                assert 0 == second.process.wait(30)

    # another process has the server's place
    with Drill(SCENARIOS["healthy"], port=port), daemon(*at) as third:
        before, last, present = third.lives_with("fault", "ok", "ok")
    assert (listed[0], listed[1]["start_seconds"], "restarted") == (before, last["start_seconds"], last["end"])
    assert newest < last["end_seconds"] < present["start_seconds"]
    assert present["end_seconds"] is None


def test_a_full_disk_stops_the_recording_alone(tmp_path: Path) -> None:
    """With a full disk only recording stops; once space is free it resumes, and the lost interval is reported."""
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
