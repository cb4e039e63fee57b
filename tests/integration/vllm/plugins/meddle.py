"""A vLLM general plugin that runs commands from a file in every process of a server, while the server works.

The file `word` in the folder holds a number and a word; each process answers in a file of its own with the number that
it has obeyed last and how often its agent has tried to publish.
"""

from __future__ import annotations

import ctypes
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
COUNTING_POLL_SECONDS = 0.5
"""While steps are counted: they are not to be held up by this."""

HASTE_SECONDS = 0.2
"""Between the publications of an agent in haste."""

KEPT_BYTES = 256 * 1024
KEEP_SECONDS = 0.02
KEPT_PER_REQUEST = 8

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
        self._begun: list[int] = []
        self._publications: list[tuple[int, int, int]] = []
        self._counting = False
        self._keeping = False

    def obey(self) -> None:
        """Wait for commands, forever."""
        words: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "break_torch": self._break_torch,
            "mend_torch": self._put_back,
            "agent_off": self._agent_off,
            "agent_on": self._agent_on,
            "hasten_agent": self._hasten_agent,
            "hold_agent": self._hold_agent,
            "free_agent": self._free_agent,
            "count_steps": self._count_steps,
            "tell_steps": self._tell_steps,
            "keep_in_engine": lambda: self._keep("VLLM::EngineCore", _python),
            "keep_natively_in_engine": lambda: self._keep("VLLM::EngineCore", _native),
            "keep_in_api_server": lambda: self._keep("", _python),
            "keep_per_request": self._keep_per_request,
            "keep_nothing": self._end_keeping,
        }
        done, told = "0", ""
        while True:
            number, _, word = self._word().partition(" ")
            if number != done:
                words[word]()
                done = number
            # While steps are counted nothing is written that only an agent at work gives a reason for.
            tried = 0 if self._counting else _tried()
            answer = json.dumps({"done": int(done), "tried": tried})
            if answer != told:
                told = answer
                self._write(f"answer-{os.getpid()}.json", answer)
            time.sleep(COUNTING_POLL_SECONDS if self._counting else POLL_SECONDS)

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

    def _put_back(self) -> None:
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

    def _keep(self, title: str, keep: Callable[[], None]) -> None:
        """From now on keep memory in the process of this title, without one in that which has none."""
        cmdline = Path("/proc/self/cmdline").read_text()
        if not (cmdline.startswith(title) if title else "VLLM::" not in cmdline):
            return
        self._keeping = True

        def work() -> None:
            while self._keeping:
                keep()
                time.sleep(KEEP_SECONDS)

        threading.Thread(target=work, name="meddle-keeps", daemon=True).start()

    def _keep_per_request(self) -> None:
        """From now on keep memory whenever a request's blocks are freed."""
        module = sys.modules.get("vllm.v1.core.block_pool")
        if module is None or not Path("/proc/self/cmdline").read_text().startswith("VLLM::EngineCore"):
            return
        plain = module.BlockPool.free_blocks
        self._taken.append((module.BlockPool, "free_blocks", plain))

        def free_blocks(this: Any, *arguments: Any, **named: Any) -> Any:
            for _ in range(KEPT_PER_REQUEST):
                _python()
            return plain(this, *arguments, **named)

        module.BlockPool.free_blocks = free_blocks

    def _end_keeping(self) -> None:
        self._keeping = False
        self._put_back()
        _kept.clear()

    def _count_steps(self) -> None:
        """From now on note when each step of the model begins, where there is a worker, and each publication."""
        self._begun.clear()
        self._publications.clear()
        if self._counting:
            return
        self._counting = True
        if "VLLM::Worker" in Path("/proc/self/cmdline").read_text():
            self._note_steps(sys.modules["vllm.v1.worker.cpu_worker"].CPUWorker)
        self._note_publications(type(_agents()[0]))

    def _note_steps(self, worker: Any) -> None:
        plain = worker.execute_model

        def execute_model(this: Any, *arguments: Any, **named: Any) -> Any:
            self._begun.append(time.monotonic_ns())
            return plain(this, *arguments, **named)

        worker.execute_model = execute_model

    def _note_publications(self, agent: Any) -> None:
        plain = agent.publish

        def publish(this: Any) -> None:
            began, began_busy = time.monotonic_ns(), time.thread_time_ns()
            plain(this)
            self._publications.append((began, time.monotonic_ns(), time.thread_time_ns() - began_busy))

        agent.publish = publish

    def _tell_steps(self) -> None:
        told = {"begun": self._begun, "publications": self._publications}
        self._write(f"steps-{os.getpid()}.json", json.dumps(told))
        self._begun.clear()
        self._publications.clear()


_kept: list[bytearray] = []


def _python() -> None:
    _kept.append(bytearray(KEPT_BYTES))


def _native() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    ctypes.memset(library.malloc(KEPT_BYTES), 1, KEPT_BYTES)


def _agents() -> list[Any]:
    found: list[Any] = getattr(sys.modules.get("kvdiag_agent.thread"), "_agents", [])
    return found


def _tried() -> int:
    agents = _agents()
    return int(vars(agents[0])["_sequence"]) if agents else 0


def register() -> None:
    """Called once in every vLLM process."""
    threading.Thread(target=Meddler(Path(os.environ[FOLDER])).obey, name="meddle", daemon=True).start()
