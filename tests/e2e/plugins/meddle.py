"""A vLLM general plugin that does in every process of a server what a file tells it to, while the server works.

The file `word` in the folder holds a number and a word; each process answers in a file of its own with the number that
it has obeyed last and how often its agent has tried to publish.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "KVDIAG_TEST_MEDDLE"
POLL_SECONDS = 0.02
HASTE_SECONDS = 0.2
"""Between the publications of an agent in haste: a test would wait most of its time for one a second."""

TAKEN = {
    "torch.cuda": ("is_initialized", "memory_stats_as_nested_dict", "memory_snapshot", "device_count"),
    "torch._C": ("_cuda_memorySnapshot", "_cuda_attach_out_of_memory_observer"),
}


class Meddler:
    """What has been done to one process, so that it can be undone."""

    def __init__(self, folder: Path) -> None:
        """Do nothing yet."""
        self._folder = folder
        self._taken: list[tuple[Any, str, Any]] = []
        self._steps: list[int] = []
        self._plain: Callable[..., Any] | None = None

    def obey(self) -> None:
        """Wait for words, for ever."""
        words: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "break_torch": self._break_torch,
            "mend_torch": self._mend_torch,
            "agent_off": self._agent_off,
            "agent_on": self._agent_on,
            "hasten_agent": self._hasten_agent,
            "hold_agent": self._hold_agent,
            "free_agent": self._free_agent,
            "count_steps": self._count_steps,
            "tell_steps": self._tell_steps,
        }
        done, told = "0", ""
        while True:
            number, _, word = self._word().partition(" ")
            if number != done:
                words[word]()
                done = number
            # While steps are counted nothing is written that only an agent at work gives a reason for.
            tried = _tried() if self._plain is None else 0
            answer = json.dumps({"done": int(done), "tried": tried})
            if answer != told:
                told = answer
                self._write(f"answer-{os.getpid()}.json", answer)
            time.sleep(POLL_SECONDS)

    def _word(self) -> str:
        try:
            return (self._folder / "word").read_text()
        except FileNotFoundError:
            return "0 nothing"

    def _write(self, name: str, text: str) -> None:
        draft = self._folder / f"{name}.new"
        draft.write_text(text)
        draft.replace(self._folder / name)

    def _break_torch(self) -> None:
        for module, names in TAKEN.items():
            for name in names:
                if hasattr(sys.modules.get(module), name):
                    self._taken.append((sys.modules[module], name, getattr(sys.modules[module], name)))
                    delattr(sys.modules[module], name)

    def _mend_torch(self) -> None:
        for module, name, value in self._taken:
            setattr(module, name, value)
        self._taken.clear()

    def _agent_off(self) -> None:
        _agents()[0].end()

    def _agent_on(self) -> None:
        agents = _agents()
        agents[0] = type(agents[0])(agents[0].directory)
        agents[0].start()

    def _hasten_agent(self) -> None:
        _agents()[0].period_seconds = HASTE_SECONDS

    def _hold_agent(self) -> None:
        _agents()[0].busy.acquire()

    def _free_agent(self) -> None:
        _agents()[0].busy.release()

    def _count_steps(self) -> None:
        """From now on note how long each step of the model takes, in a process that has a worker."""
        if "VLLM::Worker" not in Path("/proc/self/cmdline").read_text() or self._plain is not None:
            self._steps.clear()
            return
        worker = sys.modules["vllm.v1.worker.cpu_worker"].CPUWorker
        plain = self._plain = worker.execute_model

        def execute_model(this: Any, *arguments: Any, **named: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return plain(this, *arguments, **named)
            finally:
                self._steps.append(time.perf_counter_ns() - began)

        worker.execute_model = execute_model

    def _tell_steps(self) -> None:
        self._write(f"steps-{os.getpid()}.json", json.dumps(self._steps))
        self._steps.clear()


def _agents() -> list[Any]:
    found: list[Any] = getattr(sys.modules.get("kvdiag_agent.thread"), "_agents", [])
    return found


def _tried() -> int:
    agents = _agents()
    return int(vars(agents[0])["_sequence"]) if agents else 0


def register() -> None:
    """Called once in every vLLM process."""
    threading.Thread(target=Meddler(Path(os.environ[FOLDER])).obey, name="meddle", daemon=True).start()
