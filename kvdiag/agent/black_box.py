"""The black boxes: a file of what a process holds, written as its memory runs out or as SGLang's own check ends it.

`BlackBox`: the allocator's state at a failed allocation, before torch raises its OutOfMemoryError. torch calls an
observer in the thread whose allocation failed, after releasing the allocator's lock. An exception from the observer
would replace torch's error, which vLLM catches by its type: so the observer raises nothing. It cannot be removed, and
there is no public function to add one (`torch._C._cuda_attach_out_of_memory_observer`).

`LeakBox`: who held the KV pages, and who lost them, when SGLang's leak check fails. The scheduler raises the error in
its own thread and logs it with its traceback, before it signals its server to exit. A handler of that one logger writes
the count then, in that thread, where nothing moves any more; every other record passes it by its level. The file has a
message instead of an allocation.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

from . import allocator
from .document import Document, short
from .publication import Folder
from .schedulers import SGLANG
from .sglang_census import SGLangCensus

FORMAT = 1
KEPT = 8
"""Newest black boxes kept per process: a server that continues after the first failure usually fails repeatedly."""

PAUSE_SECONDS = 1.0
SIGNS = ("leak detected", "double free", "use-after-free")
MAX_MESSAGE_CHARACTERS = 2000


class BlackBox:
    """Observes one process; attached once CUDA is initialised, because attaching earlier would initialise it."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Attach nothing yet; `name` identifies this process's files."""
        self._folder = folder
        self._name = name
        self._attached = False
        self._refusal: str | None = None
        self._written = 0
        self._written_at_seconds = float("-inf")

    def attach(self) -> str | None:
        """Attach once CUDA is initialised; returns why torch refuses an observer, `None` if it does not.

        Tried only once: cudaMallocAsync never accepts one.
        """
        try:
            if not self._attached and allocator.cuda() is not None:
                self._attached = True
                sys.modules["torch._C"]._cuda_attach_out_of_memory_observer(self._observe)  # noqa: SLF001 - no public name
        except Exception as error:  # noqa: BLE001 - any error of torch; before the attempt, while it lasts
            if not self._attached:
                return short(error)
            self._refusal = short(error)
        return self._refusal

    def _observe(self, device: int, asked_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
        with contextlib.suppress(BaseException):
            self._write(int(device), int(asked_bytes), int(allowed_bytes), int(free_bytes))

    def _write(self, device: int, asked_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
        now_seconds = time.monotonic()
        if now_seconds - self._written_at_seconds < PAUSE_SECONDS:
            return
        self._written_at_seconds = now_seconds
        # The server waits meanwhile: NVML may hang and is left out; torch passed the free bytes.
        document = Document(driver=None)
        reported = document.read(summary=False)
        cuda = allocator.cuda()
        for each in reported["devices"]:
            if each["index"] == device and cuda is not None:
                try:
                    document.summarise(cuda, each, free_bytes, asked_bytes)
                except Exception as error:  # noqa: BLE001 - keep the rest of the box
                    reported["errors"]["fragmentation"] = short(error)
        box = {
            "kvdiag_black_box": FORMAT,
            "number": self._written,
            "device": device,
            "asked_bytes": asked_bytes,
            "allowed_bytes": allowed_bytes,
            "free_bytes": free_bytes,
            "document": reported,
        }
        name = f"oom-{self._name}-{self._written % KEPT}.json"
        self._folder.put(name, box, {"memory_stats": document.memory_stats_json})
        self._written += 1


class LeakBox(logging.Handler):
    """Waits for the message of a leak; attached once this process has a scheduler of SGLang."""

    def __init__(self, folder: Folder, name: str, census: SGLangCensus) -> None:
        """Attach nothing yet; `name` identifies this process's files."""
        super().__init__(logging.ERROR)
        self._folder = folder
        self._name = name
        self._census = census
        self._attached = False

    def attach(self) -> None:
        """Listen to the scheduler's logger, once."""
        if not self._attached and SGLANG.newest() is not None:
            self._attached = True
            logging.getLogger(SGLANG.module).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the black box of a leak. Never raises."""
        with contextlib.suppress(BaseException):
            text = record.getMessage()
            if any(sign in text.lower() for sign in SIGNS):
                self._write(_error(text))

    def _write(self, message: str) -> None:
        # The server waits meanwhile: NVML may hang and is left out.
        reported: dict[str, Any] = Document(driver=None).read(summary=False)
        try:
            reported["kv_blocks"] = self._census.last_look()
        except Exception as error:  # noqa: BLE001 - keep the rest of the box
            reported["errors"]["kv_blocks"] = short(error)
        box = {"kvdiag_black_box": FORMAT, "leak": message, "document": reported}
        self._folder.put(f"oom-{self._name}-0.json", box)


def _error(text: str) -> str:
    """The error of a traceback, from its first line with a sign of a leak on."""
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if any(sign in line.lower() for sign in SIGNS))
    return "\n".join(lines[first:])[:MAX_MESSAGE_CHARACTERS]
