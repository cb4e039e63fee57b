"""Whether TensorRT-LLM's figures stand still, which its client alone can see."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx2

from kvdiag.engines.dynamo import worker
from kvdiag.engines.engine import EngineAdapter
from kvdiag.engines.trtllm import ENGINE, STILL_SECONDS
from kvdiag.sources.http import HttpReader
from tests.unit.feeds.daemon.virtual_time import run

RUNNING, LATENCY = "trtllm_num_requests_running", "trtllm_iteration_latency_seconds"


def running(pages: Iterator[str], pauses: list[float], engine: EngineAdapter = ENGINE) -> list[int | None]:
    """The running requests of a read after each pause, in a time of its own."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        async def wire() -> AsyncIterator[bytes]:
            yield next(pages).encode()

        return httpx2.Response(200, content=wire())

    async def reads() -> list[int | None]:
        async with httpx2.AsyncClient(base_url="http://place", transport=httpx2.MockTransport(answer)) as client:
            reader = engine.open(HttpReader(client))
            found = []
            for pause in pauses:
                await asyncio.sleep(pause)
                engines, _ = await reader.read()
                found.append(engines[0].requests_running if engines else -1)
            return found

    return run(reads())


def page(iteration: int, requests: int) -> str:
    """The gauges of one iteration."""
    return f"{LATENCY} 0.00{iteration}\n{RUNNING} {requests}\n"


def test_a_count_that_stands_still_is_over() -> None:
    """The last iteration counts requests that have ended since: after a while without another, none runs."""
    pages = [page(1, 0), page(2, 3), page(2, 3), page(2, 3)]
    assert [0, 3, 3, 0] == running(iter(pages), [0.0, 0.2, 0.2, STILL_SECONDS])


def test_a_count_that_moves_is_of_now() -> None:
    """As long as iterations come, their requests run."""
    pages = [page(number, 2) for number in range(1, 6)]
    assert [None, 2, 2, 2, 2] == running(iter(pages), [0.0, *[STILL_SECONDS * 2] * 4])


def test_the_first_read_says_nothing() -> None:
    """A count above 0 may be an idle server's, until it has stood still for a while; a count of 0 is 0."""
    assert [None, None, 0] == running(iter([page(1, 1)] * 3), [0.0, STILL_SECONDS / 2, STILL_SECONDS / 2])
    assert [0] == running(iter([page(1, 0)]), [0.0])


def test_a_dynamo_workers_count_that_stands_still_is_over() -> None:
    """The worker passes the gauges through, with clocks of its own, which always move."""
    pages = [f"dynamo_component_uptime_seconds {number}\n{page(1, 3)}" for number in range(3)]
    engine = worker(ENGINE, pages[0])
    assert [None, None, 0] == running(iter(pages), [0.0, STILL_SECONDS / 2, STILL_SECONDS / 2], engine)
