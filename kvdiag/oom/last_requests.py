"""The requests that a log names: those since its engine was last idle, and those whose blocks a connector held. Pure.

An engine that counts its pool whenever nothing runs misses what one of these lost. A request that begins while none is
open begins a new period, unless the last one ended less than `SURE_SECONDS` before, by times of whole seconds: whether
the engine was at rest in between is then not certain. Only what the engine's own lines begin with is read, never what
they quote. The wording of these lines stands in engines/NAME/failures.json.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from kvdiag.engine_data import engine_data

SURE_SECONDS = 2.0
MAX_REQUESTS = 64
HEAD_CHARACTERS = 400
_MARKS = tuple(
    (is_begin, re.compile(requests[name]))
    for engine in engine_data("failures.json").values()
    if (requests := engine.get("requests"))
    for name, is_begin in (("begin", True), ("end", False))
)
_HELD_BY = tuple(
    (connector, re.compile(pattern))
    for engine in engine_data("failures.json").values()
    for connector, pattern in engine.get("held_by", {}).items()
)
"""What connectors print where the blocks of a finished request were not fetched before their timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRequest:
    """A request by its id, and whether the log has its end."""

    request: str
    finished: bool


def last_requests(lines: Iterable[str]) -> tuple[LastRequest, ...]:
    """Those of the last period, in order; none where the lines show no request, or more than `MAX_REQUESTS`."""
    period: dict[str, bool] = {}
    ended_at: datetime | None = None
    for line in lines:
        for is_begin, mark in _MARKS:
            if (found := mark.match(line[:HEAD_CHARACTERS])) is None:
                continue
            at, request = _time(found["at"]), found["id"]
            if is_begin and all(period.values()) and _is_later(at, ended_at):
                period.clear()
            period[request] = not is_begin
            if not is_begin:
                ended_at = at
    if len(period) > MAX_REQUESTS:
        return ()
    return tuple(LastRequest(request=request, finished=finished) for request, finished in period.items())


def held_requests(lines: Iterable[str]) -> tuple[str | None, tuple[LastRequest, ...]]:
    """The first connector that held blocks until its timeout, and the finished requests whose blocks it held."""
    connector, found = None, {}
    for line in lines:
        for name, pattern in _HELD_BY:
            if connector in {None, name} and (held := pattern.search(line[:HEAD_CHARACTERS])) is not None:
                connector = name
                found[held["id"]] = LastRequest(request=held["id"], finished=True)
    return connector, tuple(found.values())


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _is_later(at: datetime | None, ended_at: datetime | None) -> bool:
    return at is not None and ended_at is not None and (at - ended_at).total_seconds() >= SURE_SECONDS
