"""Workloads offered to a server within a deadline, and the pieces of which a stream of completions is made."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx2

from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.active.load_generator import Requests
from kvdiag.model import Capabilities, Outcome, Workload
from kvdiag.model.capabilities import ALL
from tests.builders.answers import containing
from tests.fixtures.hostile import head

T = TypeVar("T")

LONG_SECONDS = 120.0
MODEL = "drill"
STREAM = head(content_type="text/event-stream")


def with_client(url: str, work: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
    """What becomes of work that needs a client, within the deadline."""

    async def run() -> T:
        async with (
            asyncio.timeout(LONG_SECONDS),
            httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client,
        ):
            return await work(client)

    return asyncio.run(run())


def offered(
    url: str, workload: Workload, *, silence_seconds: float = LONG_SECONDS, capabilities: Capabilities = ALL
) -> Outcome:
    """The outcome of a workload."""

    def offer(client: httpx2.AsyncClient) -> Awaitable[Outcome]:
        requests = Requests(client, MODEL, engine=ENGINE, capabilities=capabilities, silence_seconds=silence_seconds)
        return requests.offer(workload)

    return with_client(url, offer)


def one(max_tokens: int = 4) -> Workload:
    """A workload of a single request."""
    return Workload(requests=1, prompt_tokens=8, max_tokens=max_tokens)


def failure(error: str) -> Outcome:
    """The outcome of one request that failed before its first token."""
    return Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=0, errors=(containing(error),))


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(tokens: int | None = None) -> bytes:
    """A chunk of a completion, with the count of tokens so far where the server gives it."""
    value: dict[str, object] = {"object": "text_completion", "choices": [{"index": 0, "text": "x"}]}
    return event(value if tokens is None else {**value, "usage": {"completion_tokens": tokens}})
