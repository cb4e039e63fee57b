"""Reading torch's out-of-memory message (2.1 and later wording), as a server hands it on in a failed answer.

Format: c10/cuda/CUDACachingAllocator.cpp. The advice at its end is printed whether or not it fits and is never read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d{1,7}(?:\.\d{1,4})?) (bytes|B|KiB|MiB|GiB|TiB)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """What was asked for, what the driver had free, and what torch had reserved without using it, in bytes."""

    asked_bytes: int
    free_bytes: int | None
    unallocated_bytes: int | None

    @property
    def room_left(self) -> bool | None:
        """Whether free and unallocated bytes together would have been enough; `None` where a figure is missing."""
        if self.free_bytes is None or self.unallocated_bytes is None:
            return None
        return self.asked_bytes <= self.free_bytes + self.unallocated_bytes


def parse_oom(text: str) -> OutOfMemory | None:
    """The figures of an out-of-memory message; `None` where the text is none."""
    asked = _bytes(_ASKED, text)
    if asked is None or "out of memory" not in text.lower():
        return None
    return OutOfMemory(asked_bytes=asked, free_bytes=_bytes(_FREE, text), unallocated_bytes=_bytes(_UNALLOCATED, text))


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
