import asyncio
import subprocess
import sys
import threading

import pytest

from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

LONG_SECONDS = 30.0
SHORT_SECONDS = 0.05


class Gate:
    """A read that comes back only when it is let through; counts its runs."""

    def __init__(self) -> None:
        """Begin closed."""
        self.runs = 0
        self.entered = threading.Event()
        self._open = threading.Event()

    def read(self, answer: str = "answer") -> str:
        """Give the answer and the number of this run."""
        self.runs += 1
        self.entered.set()
        assert self._open.wait(LONG_SECONDS)
        return f"{answer} {self.runs}"

    def open(self) -> None:
        """Let every read through, from now on."""
        self._open.set()


def test_answer_is_handed_on() -> None:
    """What the read returns for the question's arguments is what the caller gets."""
    assert (3, 2) == asyncio.run(ThreadedReader(divmod_of, "division").ask(LONG_SECONDS, dividend=17, divisor=5))


def test_error_travels_to_the_caller() -> None:
    """What the read raises is raised where it was asked, and the next question is answered."""
    patient = ThreadedReader(divmod_of, "division")

    with pytest.raises(ZeroDivisionError):
        asyncio.run(patient.ask(LONG_SECONDS, dividend=17, divisor=0))

    assert (1, 0) == asyncio.run(patient.ask(LONG_SECONDS, dividend=5, divisor=5))


def test_hang_is_noticed_and_never_asked_twice() -> None:
    """While a read hangs each question says since when, and no second read is started beside it."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")

    async def ask_twice() -> list[ReadTimeout]:
        busy = []
        for _ in range(2):
            with pytest.raises(ReadTimeout) as caught:
                await patient.ask(SHORT_SECONDS)
            busy.append(caught.value)
        return busy

    first, second = asyncio.run(ask_twice())

    assert ("gate", "gate", 1) == (first.name, second.name, gate.runs)
    assert 0.0 < first.since_seconds < second.since_seconds
    gate.open()


def test_answer_after_a_hang_is_fresh() -> None:
    """Once a hung read came back its late answer is dropped, and the next question gets one of its own."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")

    async def ask_across_a_hang() -> str:
        with pytest.raises(ReadTimeout):
            await patient.ask(SHORT_SECONDS, answer="stale")
        gate.open()
        return await patient.ask(LONG_SECONDS, answer="fresh")

    assert "fresh 2" == asyncio.run(ask_across_a_hang())


def test_answer_after_a_hang_across_loops() -> None:
    """A read that hung in one event loop and came back after its end does not disturb the next loop's question."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")
    with pytest.raises(ReadTimeout):
        asyncio.run(patient.ask(SHORT_SECONDS))

    gate.open()

    assert "answer 2" == asyncio.run(patient.ask(LONG_SECONDS))


def test_cancelled_question_leaves_it_usable() -> None:
    """A task that is cancelled while it waits takes nothing with it: the next question is answered afresh."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")

    async def cancel_then_ask() -> str:
        task = asyncio.create_task(patient.ask(LONG_SECONDS, answer="cancelled"))
        await asyncio.to_thread(gate.entered.wait, LONG_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        return await patient.ask(LONG_SECONDS, answer="asked")

    assert "asked 2" == asyncio.run(cancel_then_ask())


def test_questions_of_two_tasks_take_turns() -> None:
    """Two tasks that ask at once both get an answer, each of a read of its own."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")
    gate.open()

    async def ask_at_once() -> tuple[str, str]:
        return await asyncio.gather(patient.ask(LONG_SECONDS), patient.ask(LONG_SECONDS))

    assert ["answer 1", "answer 2"] == sorted(asyncio.run(ask_at_once()))


def test_event_loop_goes_on_while_a_read_hangs() -> None:
    """Other tasks of the loop run while a read has not come back."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")

    async def open_from_the_loop() -> str:
        answer = asyncio.create_task(patient.ask(LONG_SECONDS))
        await asyncio.sleep(0)
        gate.open()
        return await answer

    assert "answer 1" == asyncio.run(open_from_the_loop())


def test_closed_one_takes_no_question() -> None:
    """After close a question is the caller's mistake, also where the thread still hangs."""
    gate = Gate()
    patient = ThreadedReader(gate.read, "gate")
    with pytest.raises(ReadTimeout):
        asyncio.run(patient.ask(SHORT_SECONDS))

    patient.close()

    with pytest.raises(RuntimeError, match="gate is closed"):
        asyncio.run(patient.ask(SHORT_SECONDS))
    gate.open()


def test_hung_read_does_not_keep_the_process() -> None:
    """A process whose read hangs for ever ends at once, in silence."""
    script = """
import asyncio, threading
from kvdiag.sources.worker_thread import ThreadedReader, ReadTimeout

try:
    asyncio.run(ThreadedReader(threading.Event().wait, "for ever").ask(0.01))
except ReadTimeout as busy:
    print(busy.name)
"""

    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_SECONDS, check=False
    )

    assert (0, "for ever\n", "") == (ended.returncode, ended.stdout, ended.stderr)


def test_calls_of_a_loop_are_left_behind() -> None:
    """Calls and their errors come back through a loop's executor, side by side; one that hangs keeps no process."""
    # More calls than threads, one of which never comes back
    script = """
import asyncio, threading
from kvdiag.sources.worker_thread import DaemonThreadPool

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreadPool(most_threads=2))
    hung = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    found = await asyncio.gather(
        *(asyncio.to_thread(divmod, 7, divisor) for divisor in (2, 3, 0)), return_exceptions=True
    )
    print(found, hung.done())

asyncio.run(main())
"""

    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_SECONDS, check=False
    )

    expected = "[(3, 1), (2, 1), ZeroDivisionError('integer division or modulo by zero')] False\n"
    assert (0, expected, "") == (ended.returncode, ended.stdout, ended.stderr)


def divmod_of(dividend: int, divisor: int) -> tuple[int, int]:
    """A read with arguments, which can fail."""
    return divmod(dividend, divisor)
