"""Reads that hang: noticed in time, never started twice, and no hindrance to the event loop or the process's end."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

LONG_SECONDS = 30.0
SHORT_SECONDS = 0.05


class Gate:
    """A read that returns only once it is let through; counts its runs."""

    def __init__(self) -> None:
        """Begin closed."""
        self.runs = 0
        self.entered = threading.Event()
        self.opened = threading.Event()

    def read(self, answer: str = "answer") -> str:
        """Give the answer and the number of this run."""
        self.runs += 1
        self.entered.set()
        assert self.opened.wait(LONG_SECONDS)
        return f"{answer} {self.runs}"


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed, and open when the test is over."""
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def reader(gate: Gate) -> ThreadedReader[str]:
    """Reads through the gate."""
    return ThreadedReader(gate.read, "gate")


def test_answers_and_errors_travel_to_the_caller() -> None:
    """What the read returns for the question's arguments, or raises, is what the caller gets."""
    reader = ThreadedReader(lambda dividend, divisor: (dividend // divisor, dividend % divisor), "division")
    assert (3, 2) == asyncio.run(reader.ask(LONG_SECONDS, dividend=17, divisor=5))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(reader.ask(LONG_SECONDS, dividend=17, divisor=0))
    assert (1, 0) == asyncio.run(reader.ask(LONG_SECONDS, dividend=5, divisor=5))


def test_hang_is_noticed_and_never_asked_twice(gate: Gate, reader: ThreadedReader[str]) -> None:
    """While a read hangs, each question reports since when, and no second read is started."""

    async def ask_twice() -> list[ReadTimeout]:
        busy = []
        for _ in range(2):
            with pytest.raises(ReadTimeout) as caught:
                await reader.ask(SHORT_SECONDS)
            busy.append(caught.value)
        return busy

    first, second = asyncio.run(ask_twice())
    assert ("gate", "gate", 1) == (first.name, second.name, gate.runs)
    assert 0.0 < first.since_seconds < second.since_seconds


def test_answer_after_a_hang_is_fresh(gate: Gate, reader: ThreadedReader[str]) -> None:
    """Once a hung read has returned its late answer is dropped, and the next question gets one of its own."""

    async def ask_across_a_hang() -> str:
        with pytest.raises(ReadTimeout):
            await reader.ask(SHORT_SECONDS, answer="stale")
        gate.opened.set()
        return await reader.ask(LONG_SECONDS, answer="fresh")

    assert "fresh 2" == asyncio.run(ask_across_a_hang())


def test_answer_after_a_hang_across_loops(gate: Gate, reader: ThreadedReader[str]) -> None:
    """A read that hung in one event loop and returned after its end does not disturb the next loop's question."""
    with pytest.raises(ReadTimeout):
        asyncio.run(reader.ask(SHORT_SECONDS))
    gate.opened.set()
    assert "answer 2" == asyncio.run(reader.ask(LONG_SECONDS))


def test_cancelled_question_leaves_it_usable(gate: Gate, reader: ThreadedReader[str]) -> None:
    """A task that is cancelled while it waits takes nothing with it: the next question is answered afresh."""

    async def cancel_then_ask() -> str:
        task = asyncio.create_task(reader.ask(LONG_SECONDS, answer="cancelled"))
        await asyncio.to_thread(gate.entered.wait, LONG_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
        return await reader.ask(LONG_SECONDS, answer="asked")

    assert "asked 2" == asyncio.run(cancel_then_ask())


def test_questions_of_two_tasks_take_turns(gate: Gate, reader: ThreadedReader[str]) -> None:
    """Other tasks of the loop run while a read hangs; two that ask at once each get a read of their own."""

    async def ask_at_once() -> list[str]:
        answers = asyncio.gather(reader.ask(LONG_SECONDS), reader.ask(LONG_SECONDS))
        await asyncio.sleep(0)
        gate.opened.set()
        return list(await answers)

    assert ["answer 1", "answer 2"] == sorted(asyncio.run(ask_at_once()))


def test_closed_one_takes_no_question(reader: ThreadedReader[str]) -> None:
    """After close a question is the caller's mistake, also where the thread still hangs."""
    with pytest.raises(ReadTimeout):
        asyncio.run(reader.ask(SHORT_SECONDS))
    reader.close()
    with pytest.raises(RuntimeError, match="gate is closed"):
        asyncio.run(reader.ask(SHORT_SECONDS))


HANGING_READ = """
import asyncio, threading
from kvdiag.sources.worker_thread import ThreadedReader, ReadTimeout

try:
    asyncio.run(ThreadedReader(threading.Event().wait, "for ever").ask(0.01))
except ReadTimeout as busy:
    print(busy.name)
"""

MORE_CALLS_THAN_THREADS = """
import asyncio, threading
from kvdiag.sources.worker_thread import DaemonThreadPool

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreadPool(most_threads=2))
    hung = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    found = await asyncio.gather(
        *(asyncio.to_thread(divmod, 7, divisor) for divisor in (2, 3, 0)), return_exceptions=True
    )
    print(found[:2], type(found[2]).__name__, hung.done())

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (HANGING_READ, "for ever\n"),
        (MORE_CALLS_THAN_THREADS, "[(3, 1), (2, 1)] ZeroDivisionError False\n"),
    ],
    ids=["a read", "a call of a loop"],
)
def test_hung_call_does_not_keep_the_process(script: str, expected: str) -> None:
    """A process whose read or call hangs forever exits at once without output; the other calls return."""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_SECONDS, check=False
    )
    assert (0, expected, "") == (ended.returncode, ended.stdout, ended.stderr)
