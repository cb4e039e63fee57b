"""Advice to routers on whether to send a request: from the newest snapshot, and the room promised since."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvdiag.admission import Wish, advise
from kvdiag.model import MAX_COUNT, Snapshot

SCHEMA_VERSION = 1

ON_ITS_WAY_SECONDS = 1.0
"""From the advice until the request shows in the engine's metrics."""

MAX_PROMISES = 10_000
"""Open promises; more requests for advice within that time are answered with `wait`."""


class Admissions:
    """Admissions since the engines were last read, so that the same room is not promised twice."""

    def __init__(self) -> None:
        """Start without promises."""
        self._promised: deque[tuple[float, int]] = deque()

    def answer(self, query: Mapping[str, Sequence[str]], now: Snapshot, now_seconds: float) -> dict[str, Any]:
        """The advice for the request of a query, as a document.

        Raises:
            ValueError: the query does not give the sizes of the request.
        """
        wish = Wish(prompt_tokens=_tokens(query, "prompt_tokens"), max_tokens=_tokens(query, "max_tokens"))
        read_seconds = now.engines_seconds
        while self._promised and read_seconds is not None and self._promised[0][0] < read_seconds - ON_ITS_WAY_SECONDS:
            self._promised.popleft()
        reported = advise(
            wish,
            engines=now.newest.engines if now.state == "serving" else None,
            age_seconds=0.0 if read_seconds is None else max(now_seconds - read_seconds, 0.0),
            facts=now.facts,
            lengths=now.lengths,
            promised=[blocks for _, blocks in self._promised],
        )
        if reported.decision == "admit" and len(self._promised) >= MAX_PROMISES:
            reason = "too many requests admitted since the last sample"
            return {"schema_version": SCHEMA_VERSION, "decision": "wait", "reason": reason}
        if reported.decision == "admit":
            self._promised.append((now_seconds, reported.request_blocks or 0))
        finished = None if now.lengths is None else now.lengths.finished
        return {"schema_version": SCHEMA_VERSION, **asdict(reported), "lengths_of": finished}


def _tokens(query: Mapping[str, Sequence[str]], name: str) -> int:
    values = query.get(name, ())
    if len(values) != 1 or not values[0].isascii() or not values[0].isdecimal() or len(values[0]) > len(str(MAX_COUNT)):
        raise ValueError(f"give {name} once, as a whole number of tokens")
    return int(values[0])
