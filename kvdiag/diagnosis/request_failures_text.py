"""Torch's out-of-memory message, as a server hands it on in a failed answer: what the rules of a live run need of it.

Every form of it, and everything else that says that memory ran out, is read in `shortage`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.oom.message import ANCHORS, parse_shortage

_TORCH = tuple(pattern for kind, pattern in ANCHORS if kind in {"torch", "limit", "async"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """What was asked for, what the driver had free, and what torch had reserved without using it, in bytes."""

    asked_bytes: int
    free_bytes: int | None
    unallocated_bytes: int | None

    @property
    def room_left(self) -> bool | None:
        """Whether free and unallocated bytes together would have been enough.

        `None` where a figure is missing, and where the free ones were enough by themselves: then others gave memory
        back before the message was made, or another limit stood against it, and holes have no part in it.
        """
        if self.free_bytes is None or self.unallocated_bytes is None or self.free_bytes >= self.asked_bytes:
            return None
        return self.asked_bytes <= self.free_bytes + self.unallocated_bytes


def parse_oom(text: str) -> OutOfMemory | None:
    """The figures of an out-of-memory message; `None` where the text is none."""
    begins = [found.start() for pattern in _TORCH if (found := pattern.search(text)) is not None]
    if not begins:
        return None
    told = parse_shortage("torch", text[min(begins) :])
    if told.asked_bytes is None:
        return None
    return OutOfMemory(
        asked_bytes=told.asked_bytes, free_bytes=told.free_bytes, unallocated_bytes=told.unallocated_bytes
    )
