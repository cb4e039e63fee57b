"""Logs: where they are written, and that an unwritable log neither ends nor blocks kvdiag."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import structlog

from kvdiag.commands.logging_setup import configure
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually
from tests.unit.sim.client import Client


def full_disk() -> tuple[int, ...]:
    """Writing fails at once."""
    return (os.open("/dev/full", os.O_WRONLY),)


def reader_gone() -> tuple[int, ...]:
    """Writing fails, with a signal where that is not ignored."""
    reading, writing = os.pipe()
    os.close(reading)
    return (writing,)


def nobody_reads() -> tuple[int, ...]:
    """A full pipe without a reader: the next write would block forever."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    return writing, reading


def nearly_full() -> tuple[int, ...]:
    """A pipe with room for one page: it is ready, and yet a longer write would block forever."""
    writing, reading = nobody_reads()
    os.read(reading, select.PIPE_BUF)
    return writing, reading


@pytest.fixture(params=[full_disk, reader_gone, nobody_reads], ids=lambda made: made.__name__)
def stderr(request: pytest.FixtureRequest) -> Iterator[int]:
    """A place that takes no lines."""
    descriptors = request.param()
    yield descriptors[0]
    for each in descriptors:
        os.close(each)


def says_ok(process: subprocess.Popen[bytes]) -> bool:
    """Whether a daemon on a port of its own choice has come to a verdict."""
    for one in psutil.Process(process.pid).net_connections("tcp4"):
        if one.status == psutil.CONN_LISTEN:
            return '"worst":"ok"' in Client(f"http://127.0.0.1:{one.laddr.port}").get("/api/v1/diagnosis")[1]
    return False


def test_a_daemon_outlives_its_log(stderr: int) -> None:
    """With a broken stderr the daemon samples, judges, serves and exits cleanly."""
    with Drill(SCENARIOS["healthy"]) as drill:
        arguments = ["serve", "--url", drill.url, "--listen", "127.0.0.1:0", "--tick-seconds", "0.1"]
        command = [sys.executable, "-m", "kvdiag", *arguments]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr) as process:
            try:
                assert eventually(lambda: says_ok(process))
                process.send_signal(signal.SIGTERM)
                assert 0 == process.wait(30)
            finally:
                process.kill()


def test_a_long_line_never_waits_for_a_reader() -> None:
    """What a pipe has no room for is lost, however long the line is."""
    program = "from kvdiag.commands.logging_setup import configure, structlog\nconfigure(1)\n"
    program += "structlog.get_logger().info('x' * 10_000)"
    descriptors = nearly_full()
    try:
        subprocess.run([sys.executable, "-c", program], stderr=descriptors[0], check=True, timeout=60)
    finally:
        for each in descriptors:
            os.close(each)


def test_lines_go_to_the_stderr_of_that_moment(capsys: pytest.CaptureFixture[str]) -> None:
    """Who puts another in its place reads what comes from then on; one that was closed costs lines."""
    configure(1)
    log = structlog.get_logger()
    log.info("one")
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stderr(closed):
        log.info("two")
    log.info("three")
    configure(0)
    shown = capsys.readouterr().err
    assert (True, False, True) == tuple(f'"event": "{word}"' in shown for word in ("one", "two", "three"))


def test_a_traceback_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake of our own is to be reported with its log, which has to say where it was made."""
    configure(2)
    try:
        int("unforeseen")
    except ValueError:
        structlog.get_logger().debug("mistake", exc_info=True)
    configure(0)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("with base 10: 'unforeseen'")
