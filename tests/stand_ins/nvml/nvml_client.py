"""An `NvmlSource` in a process of its own, which loads the stand-in through nvidia-ml-py as any client loads NVIDIA's.

In-process would not do: a library stays loaded, and one test's GPUs would be there for every other test.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvdiag.model import Device, Gap
from kvdiag.sources.nvml import NvmlSource
from kvdiag.sources.worker_thread import ThreadedReader

GIVE_UP_SECONDS = 60.0

Reading = tuple[tuple[Device, ...] | None, tuple[Gap, ...]]


class Client:
    """The test's end: each method runs in the other process and returns, or raises, what came of it there."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Prepare to start it with these environment variables."""
        self._environment = environment

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            cwd=Path(__file__).parents[3],
            env=dict(self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def read(self, *, processes: bool = False) -> Reading:
        """Ask the source, waiting for as long as it takes."""
        reading: Reading = self._run("read", processes)
        return reading

    def ask(self, timeout_seconds: float) -> Reading:
        """Ask the source through a `ThreadedReader`."""
        reading: Reading = self._run("ask", timeout_seconds)
        return reading

    def wait(self, seconds: float) -> None:
        """Let time pass on the source's clock."""
        self._run("wait", seconds)

    def close(self) -> None:
        """Close the source."""
        self._run("close")

    def renew(self) -> None:
        """Close the source and continue with a new one, which has read nothing yet."""
        self._run("renew")

    def end(self) -> int:
        """Let the process come to its end, which the end of its input is; its exit code."""
        self._process.communicate(timeout=GIVE_UP_SECONDS)
        return self._process.returncode

    def _run(self, *command: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(GIVE_UP_SECONDS, self._process.kill)
        limit.start()
        pickle.dump(command, self._process.stdin)
        self._process.stdin.flush()
        outcome = pickle.load(self._process.stdout)  # noqa: S301  our own child's values
        limit.cancel()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _serve() -> None:
    now_seconds = 1000.0
    source: NvmlSource
    patient: ThreadedReader[Reading]

    def renew() -> None:
        nonlocal source, patient
        source = NvmlSource(clock=lambda: now_seconds)
        patient = ThreadedReader(source.read, "nvml")

    renew()
    with asyncio.Runner() as runner:
        while True:
            outcome: object = None
            try:
                match pickle.load(sys.stdin.buffer):  # noqa: S301  our own parent's commands
                    case "read", processes:
                        outcome = source.read(processes=processes)
                    case "ask", timeout_seconds:
                        outcome = runner.run(patient.ask(timeout_seconds, processes=False))
                    case "wait", seconds:
                        now_seconds += seconds
                    case ("close",):
                        source.close()
                    case ("renew",):
                        source.close()
                        patient.close()
                        renew()
            except EOFError:
                return
            except Exception as error:  # noqa: BLE001  the test is to see it
                outcome = error
            pickle.dump(outcome, sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
