"""What kvdiag asks llama.cpp's server, and what it leaves alone: sleep, gauges that a scrape resets, endpoints off."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from kvdiag.engines.engine import EngineReading
from kvdiag.engines.llamacpp import ENGINE
from kvdiag.engines.llamacpp.client import METRICS_SECONDS, LlamaClient
from kvdiag.model import Engine
from kvdiag.sources.http import HttpReader, Unreadable
from tests.unit.engines.llamacpp.llama_answers import SCRAPES, answer


@dataclass
class Server:
    """Answers as a recorded server did; `asked` are the paths of its requests."""

    props: dict[str, Any] = field(default_factory=lambda: answer("b11549-unified4-props"))
    slots: str = "unified4-idle"
    metrics: str = "unified4-idle"
    off: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)
    now_seconds: float = 0.0

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request."""
        path = request.url.path
        self.asked.append(path)
        texts: dict[str, Callable[[], str]] = {
            "/props": lambda: json.dumps(self.props),
            "/v1/models": lambda: json.dumps(answer("b11549-unified4-models")),
            "/slots": lambda: json.dumps(answer(f"b11549-{self.slots}-slots")),
            "/metrics": (SCRAPES / f"llamacpp-b11549-{self.metrics}.prom").read_text,
        }
        status = 501 if path in self.off else 200

        async def wire() -> AsyncIterator[bytes]:
            yield texts[path]().encode()

        return httpx2.Response(status, content=wire())

    def read(self, times: int = 1, *, command: str | None = None, step_seconds: float = 1.0) -> list[EngineReading]:
        """What a client reads at so many ticks."""

        async def ask() -> list[EngineReading]:
            with self.client(command) as client:
                found = []
                for _ in range(times):
                    found.append(await client.read())
                    self.now_seconds += step_seconds
                return found

        return asyncio.run(ask())

    @contextmanager
    def client(self, command: str | None = None) -> Iterator[LlamaClient]:
        """A client of this server, whose process has this command line."""
        http = httpx2.AsyncClient(base_url="http://place", transport=httpx2.MockTransport(self))
        client = LlamaClient(HttpReader(http), ENGINE, clock=lambda: self.now_seconds)
        client.see(answer("b11549-unified4-models"), [] if command is None else [command])
        yield client


SLEEPS = "llama-server -m x -c 32768 --sleep-idle-seconds 60"


def engine(reading: EngineReading) -> Engine:
    """The one engine of a sample."""
    assert reading[0] is not None
    return reading[0][0]


def test_an_idle_server_is_scraped_no_more_often_than_by_its_prometheus() -> None:
    """A scrape restarts two means of the server: counters are missing in between, requests and tokens are not."""
    server = Server()
    readings = [engine(one) for one in server.read(int(2 * METRICS_SECONDS) + 1, command="llama-server -c 32768")]
    assert 31 == server.asked.count("/slots")
    assert 3 == server.asked.count("/metrics")
    assert [True, False] == [one.prompt_tokens_total is not None for one in readings[:2]]
    assert {(0, 0, 0.0)} == {(one.requests_running, one.requests_waiting, one.kv_usage_ratio) for one in readings}


def test_a_server_that_may_sleep_is_not_kept_awake() -> None:
    """A read of /slots counts as work (b11549): /metrics, which does not, shows whether there is any."""
    server = Server()
    readings = [engine(one) for one in server.read(5, command=SLEEPS)]
    assert "/slots" not in server.asked
    assert {(0, 0.0)} == {(one.requests_running, one.kv_usage_ratio) for one in readings}
    working = Server(slots="unified4-load", metrics="unified4-load")
    (loaded,) = working.read(command=SLEEPS)
    assert (4, 6) == (engine(loaded).requests_running, engine(loaded).requests_waiting)
    assert "/slots" in working.asked


def test_a_server_that_may_sleep_without_metrics_is_left_alone() -> None:
    """The gap names the flag that makes it readable."""
    server = Server(off=("/metrics",))
    ((engines, (gap,)),) = server.read(command=SLEEPS)
    assert (None, "absent") == (engines, gap.kind)
    assert "--metrics" in gap.reason
    assert "/slots" not in server.asked


def test_a_sleeping_server_is_not_woken() -> None:
    """/props says that it sleeps, from a cache; nothing else is read."""
    server = Server()
    server.props["is_sleeping"] = True
    (reading,) = server.read()
    assert (True, ["/props"]) == (engine(reading).asleep, server.asked)


@pytest.mark.parametrize(("step_seconds", "props"), [(0.1, 2), (1.0, 4)])
def test_a_server_whose_command_line_is_unknown_may_have_gone_to_sleep(step_seconds: float, props: int) -> None:
    """Whether it sleeps is asked after the shortest time in which it may do so; before that at every other sample."""
    server = Server()
    server.read(4, step_seconds=step_seconds)
    assert (props, 4) == (server.asked.count("/props"), server.asked.count("/slots"))


@pytest.mark.parametrize(
    ("off", "known"),
    [(("/metrics",), (0, 0.0)), (("/slots",), (0, 0.0)), (("/slots", "/metrics"), None)],
)
def test_endpoints_that_are_off_are_not_asked_again(off: tuple[str, ...], known: tuple[int, float] | None) -> None:
    """With one of them the server's requests are known; with neither a gap says so."""
    server = Server(off=off)
    readings = server.read(3, command="llama-server -c 32768")
    found = {
        None if engines is None else (engines[0].requests_running, engines[0].kv_usage_ratio) for engines, _ in readings
    }
    assert {known} == found
    assert all(server.asked.count(path) == 1 for path in off)


def test_all_slots_busy_asks_the_metrics_for_those_that_wait() -> None:
    """At most as often as its owner does."""
    server = Server(slots="unified4-load", metrics="unified4-load")
    waiting = [engine(one).requests_waiting for one in server.read(3, command="llama-server -c 32768")]
    assert [6, None, None] == waiting


def test_a_router_is_not_one_server() -> None:
    """Its models have servers of their own."""

    async def ask() -> None:
        server = Server()
        server.props["role"] = "router"
        with server.client() as client:
            await client.identify()

    with pytest.raises(Unreadable):
        asyncio.run(ask())


def test_the_server_is_identified_by_its_props_and_models() -> None:
    """Build, model, context of a slot and size of the weights."""

    async def ask() -> Any:
        with Server().client() as client:
            return await client.identify()

    identity = asyncio.run(ask())
    assert ("b0-unknown", "tiny-llama.gguf", 32768, 7_484_416) == (
        identity.version,
        identity.model,
        identity.max_model_len_tokens,
        identity.weights_bytes,
    )
