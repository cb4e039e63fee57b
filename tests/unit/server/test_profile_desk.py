"""Profiles asked for over HTTP: who may, one at a time, and what a request has to be."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.server.answers import Answer
from kvdiag.server.endpoints import Pages
from kvdiag.server.profile_desk import PATH, ProfileDesk
from kvdiag.server.request import Request
from tests.unit.server.shell import STARTING

ASKED = Request(method="POST", path=PATH, address="127.0.0.1")
READ = replace(ASKED, method="GET")


class Agents:
    """What takes the profiles: keeps what was asked, and answers once `answer` is set."""

    def __init__(self, problem: str | None = None) -> None:
        """Fail with this problem, if there is one."""
        self.problem = problem
        self.asked: list[tuple[str, float, str | None]] = []
        self.ended = 0
        self.answer = asyncio.Event()

    async def take(self, kind: str, seconds: float, role: str | None) -> dict[str, Any]:
        """A profile."""
        self.asked.append((kind, seconds, role))
        try:
            await self.answer.wait()
        finally:
            self.ended += 1
        if self.problem is not None:
            raise KvdiagError(self.problem)
        return {"processes": [], "problems": []}


def with_agents(check: Callable[[Agents, Pages], Coroutine[Any, Any, None]], problem: str | None = None) -> None:
    """Check on a loop of its own."""

    async def run() -> None:
        agents = Agents(problem)
        desk = ProfileDesk(agents.take)
        await check(agents, Pages(newest=lambda: STARTING, profiles=desk))
        await desk.close()
        assert len(agents.asked) == agents.ended

    asyncio.run(run())


def status(answer: Answer) -> int:
    """The status as a number."""
    return answer.status.value


def test_one_profile_at_a_time_and_its_answer() -> None:
    """Before the first 404, 202 while it is taken, 409 for another one, then the document."""

    async def check(agents: Agents, pages: Pages) -> None:
        assert 404 == status(pages.answer(READ))
        assert 202 == status(
            pages.answer(replace(ASKED, query={"seconds": ["5"], "kind": ["device"], "process": ["x"]}))
        )
        await asyncio.sleep(0)
        assert (202, 409) == (status(pages.answer(READ)), status(pages.answer(ASKED)))
        agents.answer.set()
        await asyncio.sleep(0.01)
        assert [("device", 5.0, "x")] == agents.asked
        assert (200, b'{"state":"done","processes":[],"problems":[]}\n') == (
            status(pages.answer(READ)),
            pages.answer(READ).body,
        )
        assert 202 == status(pages.answer(ASKED))

    with_agents(check)


def test_a_profile_that_fails_has_its_reason() -> None:
    """No agent publishes: the document says so, and the next one may be asked for."""

    async def check(agents: Agents, pages: Pages) -> None:
        agents.answer.set()
        pages.answer(ASKED)
        await asyncio.sleep(0.01)
        assert b'{"state":"failed","reason":"no agent"}\n' == pages.answer(READ).body
        assert 202 == status(pages.answer(ASKED))

    with_agents(check, problem="no agent")


def test_the_end_of_the_daemon_ends_a_profile() -> None:
    """Tracing ends; `with_agents` counts it."""

    async def check(_: Agents, pages: Pages) -> None:
        pages.answer(ASKED)
        await asyncio.sleep(0)

    with_agents(check)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(replace(ASKED, address="10.0.0.7"), 403, id="another machine"),
        pytest.param(replace(READ, address="10.0.0.7"), 403, id="another machine reads"),
        pytest.param(replace(ASKED, forwarded=True), 403, id="behind a proxy"),
        pytest.param(replace(ASKED, address=""), 403, id="no address"),
        pytest.param(replace(ASKED, address="::ffff:127.0.0.1"), 202, id="IPv4 in IPv6"),
        pytest.param(replace(ASKED, address="::1"), 202, id="IPv6"),
        pytest.param(replace(ASKED, from_page=True), 403, id="a web page"),
        pytest.param(replace(ASKED, method="PUT"), 405, id="another method"),
        pytest.param(replace(ASKED, query={"seconds": ["nan"]}), 400, id="no number"),
        pytest.param(replace(ASKED, query={"seconds": ["1e9"]}), 400, id="too long"),
        pytest.param(replace(ASKED, query={"seconds": ["5", "6"]}), 400, id="twice"),
        pytest.param(replace(ASKED, query={"kind": ["heap"]}), 400, id="another kind"),
        pytest.param(replace(ASKED, query={"process": ["x" * 65]}), 400, id="a long name"),
        pytest.param(replace(ASKED, query={"depth": ["8"]}), 400, id="unknown"),
    ],
)
def test_requests_that_are_refused_and_taken(request_: Request, expected: int) -> None:
    """Only this machine's clients that are no web page, with values within their bounds."""

    async def check(agents: Agents, pages: Pages) -> None:
        assert expected == status(pages.answer(request_))
        await asyncio.sleep(0)
        assert (expected == 202) == bool(agents.asked)

    with_agents(check)


@pytest.mark.parametrize(("method", "expected"), [("POST", 405), ("GET", 404)])
def test_without_permission_there_is_no_such_page(method: str, expected: int) -> None:
    """As a daemon starts."""
    assert expected == status(Pages(newest=lambda: STARTING).answer(replace(ASKED, method=method)))
