"""Pure work spread over processes: the same results, also where a process is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.workers import Executor, InProcess, Processes, cores, executor, results
from tests.fixtures.hostile import eventually


def squared(number: int) -> int:
    """Any work."""
    return number * number


def killed_once(mark: Path) -> str:
    """Work whose process is killed the first time."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return mark.name


def killed(_: int) -> None:
    """Work whose process is killed each time."""
    os.kill(os.getpid(), signal.SIGKILL)


def refused(number: int) -> None:
    """Work that fails."""
    raise KvdiagError(f"{number} cannot be used")


@pytest.mark.parametrize("pool", [InProcess(), Processes(2)], ids=["in process", "processes"])
def test_every_task_has_its_result(pool: Executor) -> None:
    """Each once, in any process."""
    with pool:
        assert [number * number for number in range(20)] == sorted(results(pool, squared, range(20)))


def test_a_killed_workers_tasks_are_done_again(tmp_path: Path) -> None:
    """The task that killed its process, and those that others had in work."""
    marks = [tmp_path / str(number) for number in range(5)]
    for mark in marks[1:]:
        mark.touch()
    with Processes(2) as pool:
        assert [mark.name for mark in marks] == sorted(results(pool, killed_once, marks))


def test_work_that_kills_its_process_twice_is_an_error() -> None:
    """It would do so forever."""
    with Processes(2) as pool, pytest.raises(KvdiagError, match=r"killed twice.*--workers"):
        list(results(pool, killed, range(3)))


@pytest.mark.parametrize("pool", [InProcess(), Processes(2)], ids=["in process", "processes"])
def test_an_error_of_the_work_is_the_error(pool: Executor) -> None:
    """With its own message."""
    with pool, pytest.raises(KvdiagError, match="7 cannot be used"):
        list(results(pool, refused, [7]))


def test_leaving_ends_work_in_progress() -> None:
    """A worker that would sleep for an hour is not waited for."""
    with Processes(2) as pool:
        pool.submit(squared, 3).result()
        pool.submit(signal.pause)
        workers = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
    assert workers
    assert not [one for one in workers if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_workers_exit_with_a_killed_parent() -> None:
    """A daemon that is killed leaves no process."""
    code = (
        "from kvdiag.feeds.fleet.workers import *\n"
        "print(Processes(2).submit(os.getpid).result(), flush=True)\n"
        "signal.pause()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 2), ("100000 100000", 1), ("50000 100000", 1), ("900000 100000", 2), ("?", 2)],
)
def test_a_containers_limit_bounds_the_workers(tmp_path: Path, quota: str, expected: int) -> None:
    """As `cpu.max` has it: a quota and its period."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:  # one processor bounds them before any quota
        expected = 1
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        assert expected == cores(tmp_path / "cpu.max")
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("count", "tasks", "expected"), [(1, 9, 1), (3, 9, 3), (3, 2, 2), (3, 1, 1), (None, 1, 1)])
def test_no_more_workers_than_tasks(count: int | None, tasks: int, expected: int) -> None:
    """One is this process."""
    pool = executor(count, tasks)
    assert (expected, expected == 1) == (pool.count, isinstance(pool, InProcess))
