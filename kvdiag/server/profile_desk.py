"""`/api/v1/profile`: a POST traces allocations in the server's processes, a GET has the newest answer.

It is the only request that changes something, so it is refused unless it was allowed at the start, comes from this
machine and not from a web page, and no other profile is being taken.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from kvdiag.errors import KvdiagError
from kvdiag.model import MAX_PROFILE_SECONDS, MIN_PROFILE_SECONDS
from kvdiag.server.answers import NOT_KEPT, Answer, json_answer, problem
from kvdiag.server.request import Request

PATH = "/api/v1/profile"
USUAL_SECONDS = "60"
MAX_CHARACTERS = 64

Taken = Callable[[str, float, str | None], Awaitable[dict[str, Any]]]
"""Takes a profile of a kind (`host` or `device`), for so many seconds, of the processes of a role or of all."""


@dataclass(slots=True)
class ProfileDesk:
    """Takes one profile at a time, and keeps the newest answer."""

    take: Taken
    _task: asyncio.Task[dict[str, Any]] | None = field(init=False, default=None)

    def answer(self, request: Request) -> Answer:
        """The answer to a GET, HEAD or POST."""
        if request.forwarded or not _is_local(request.address):
            return problem(HTTPStatus.FORBIDDEN, "profiles are for clients on this machine alone")
        if request.method in ("GET", "HEAD"):
            return self._newest()
        if request.method != "POST":
            allowed = ("Allow", "GET, HEAD, POST")
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, "only GET, HEAD and POST are supported", allowed)
        if request.from_page:
            return problem(HTTPStatus.FORBIDDEN, "a web page cannot ask for a profile")
        if self._task is not None and not self._task.done():
            return problem(HTTPStatus.CONFLICT, "a profile is being taken; GET this path for its answer")
        try:
            kind, seconds, role = _asked(request.query)
        except ValueError as error:
            return problem(HTTPStatus.BAD_REQUEST, str(error))
        self._task = asyncio.get_running_loop().create_task(self._taken(kind, seconds, role))
        return json_answer({"state": "tracing", "kind": kind, "seconds": seconds}, NOT_KEPT, status=HTTPStatus.ACCEPTED)

    async def close(self) -> None:
        """End a profile that is being taken: tracing ends with it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _taken(self, kind: str, seconds: float, role: str | None) -> dict[str, Any]:
        try:
            return {"state": "done", **await self.take(kind, seconds, role)}
        except KvdiagError as error:
            return {"state": "failed", "reason": str(error)}

    def _newest(self) -> Answer:
        if self._task is None:
            return problem(HTTPStatus.NOT_FOUND, "no profile was asked for; POST to this path")
        if not self._task.done():
            return json_answer({"state": "tracing"}, NOT_KEPT, status=HTTPStatus.ACCEPTED)
        return json_answer(self._task.result(), NOT_KEPT)


def _asked(query: Mapping[str, Sequence[str]]) -> tuple[str, float, str | None]:
    values = {name: query.get(name, ()) for name in ("kind", "seconds", "process")}
    unknown = [name for name in query if name not in values]
    if unknown or any(len(given) > 1 or len("".join(given)) > MAX_CHARACTERS for given in values.values()):
        raise ValueError("give kind, seconds and process at most once, and nothing else")
    kind, seconds = next(iter(values["kind"]), "host"), next(iter(values["seconds"]), USUAL_SECONDS)
    if kind not in ("host", "device"):
        raise ValueError("kind is host or device")
    try:
        number = float(seconds)
    except ValueError:
        number = 0.0
    if not MIN_PROFILE_SECONDS <= number <= MAX_PROFILE_SECONDS:
        raise ValueError(f"seconds is a number from {MIN_PROFILE_SECONDS:.0f} to {MAX_PROFILE_SECONDS:.0f}")
    return kind, number, next(iter(values["process"]), None)


def _is_local(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
