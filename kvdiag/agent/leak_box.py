"""The black box of a scheduler that its own leak check ends: who held the KV pages then, and who lost them.

SGLang's scheduler raises the error in its own thread and logs it with its traceback, before it signals its server to
exit. A handler of that one logger writes the count then, in that thread, where nothing moves any more; every other
record passes it by its level. The file is a black box (`black_box`) with a message instead of an allocation.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from .document import Document, short
from .publication import Folder
from .schedulers import SGLANG
from .sglang_census import SGLangCensus

FORMAT = 1
SIGNS = ("leak detected", "double free", "use-after-free")
MAX_MESSAGE_CHARACTERS = 2000


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
