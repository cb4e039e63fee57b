"""kvdiag's own requests against a drill: their tokens, prompts, load and speed, and how failures are reported."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import pytest

from kvdiag.engines.engine import EngineClient
from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.active.load_generator import DEFAULT_TOKEN_IDS, Requests, Speed, token_ids
from kvdiag.model import Capabilities, Load, Outcome, Workload
from kvdiag.sim import SCENARIOS, Drill
from kvdiag.sources.http import HttpReader
from tests.builders.answers import containing
from tests.fixtures.hostile import Answer, Hostile, endless, head, raw, reply, reply_json
from tests.unit.feeds.active.completions import MODEL, offered, with_client


@asynccontextmanager
async def watched(client: httpx2.AsyncClient) -> AsyncIterator[Callable[[Callable[[int], bool]], Awaitable[int]]]:
    """Wait until the number of requests that run on the server is as wanted; that number."""
    source = ENGINE.open(HttpReader(client))

    async def until(wanted: Callable[[int], bool]) -> int:
        while True:
            engines, gaps = await source.read()
            assert engines, gaps
            running = (engines[0].requests_running or 0) + (engines[0].requests_waiting or 0)
            if wanted(running):
                return running
            await asyncio.sleep(0.01)

    yield until


def test_requests_take_exactly_their_tokens(drill: str) -> None:
    """Prompt and output have the length asked for, by the server's own count."""

    async def counts(client: httpx2.AsyncClient) -> tuple[Outcome, int, int]:
        source = ENGINE.open(HttpReader(client))
        (before,) = (await source.read())[0] or ()
        outcome = await Requests(client, MODEL, engine=ENGINE).offer(
            Workload(requests=3, prompt_tokens=100, max_tokens=7)
        )
        async with watched(client) as until:
            await until(lambda running: running == 0)
        (after,) = (await source.read())[0] or ()
        return (
            outcome,
            (after.prompt_tokens_total or 0) - (before.prompt_tokens_total or 0),
            (after.generation_tokens_total or 0) - (before.generation_tokens_total or 0),
        )

    actual = with_client(drill, counts)

    assert (Outcome(completed=3, failed=0, prompt_tokens=300, generated_tokens=21), 300, 21) == actual


def test_prompts_are_never_cached(drill: str) -> None:
    """Equal workloads hit nothing of what earlier ones left in the prefix cache."""

    async def hits(client: httpx2.AsyncClient) -> int:
        source = ENGINE.open(HttpReader(client))
        (before,) = (await source.read())[0] or ()
        for _ in range(2):
            await Requests(client, MODEL, token_ids=[7], engine=ENGINE).offer(
                Workload(requests=2, prompt_tokens=64, max_tokens=1)
            )
        (after,) = (await source.read())[0] or ()
        return (after.prefix_hits_total or 0) - (before.prefix_hits_total or 0)

    assert 0 == with_client(drill, hits)


def test_repeated_prompts_are_the_same(drill: str) -> None:
    """A repeated workload sends the prompts and salts of the one before: the server's prefix cache knows them all."""
    repeated = Workload(requests=2, prompt_tokens=65, max_tokens=2, repeated=True)

    async def work(client: httpx2.AsyncClient) -> list[int]:
        source, requests = ENGINE.open(HttpReader(client)), Requests(client, MODEL, engine=ENGINE)
        hits = []
        for workload in (repeated, repeated, replace(repeated, repeated=False), replace(repeated, requests=3)):
            before = await _hits(source)
            await requests.offer(workload)
            hits.append(await _hits(source) - before)
        return hits

    # A third request joins at the end, which is new
    assert [0, 128, 0, 128] == with_client(drill, work)


async def _hits(source: EngineClient) -> int:
    engines, _ = await source.read()
    return sum(engine.prefix_hits_total or 0 for engine in engines or ())


def test_load_tells_what_is_resident(drill: str) -> None:
    """While requests run their resident tokens are known; before and after nothing is open."""

    async def loads(client: httpx2.AsyncClient) -> list[Load]:
        requests = Requests(client, MODEL, engine=ENGINE)
        seen = [requests.load()]
        offering = asyncio.create_task(requests.offer(Workload(requests=2, prompt_tokens=100, max_tokens=50)))
        while not offering.done():
            seen.append(requests.load())
            await asyncio.sleep(0.002)
        await offering
        return [*seen, requests.load()]

    first, *between, last = with_client(drill, loads)

    assert (Load(requests=0), Load(requests=0)) == (first, last)
    resident = [tokens for load in between for tokens in load.resident_tokens]
    assert 2 == max(len(load.resident_tokens) for load in between)
    assert min(resident) >= 100
    assert max(resident) <= 100 + 50 - 1


def test_cancelling_frees_the_server(drill: str) -> None:
    """Requests that are given up run on the server no longer, and are open here no longer."""

    async def cancel(client: httpx2.AsyncClient) -> tuple[int, int, Load]:
        requests = Requests(client, MODEL, engine=ENGINE)
        offering = asyncio.create_task(requests.offer(Workload(requests=4, prompt_tokens=512, max_tokens=20_000)))
        async with watched(client) as until:
            ran = await until(lambda running: running == 4)
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)
            return ran, await until(lambda running: running == 0), requests.load()

    assert (4, 0, Load(requests=0)) == with_client(drill, cancel)


def test_speed_is_measured(drill: str) -> None:
    """One request alone measures the time to the first token and the tokens per second after it."""
    actual = with_client(drill, lambda client: Requests(client, MODEL, engine=ENGINE).measure(256, 16))
    assert isinstance(actual, Speed)
    assert actual.first_token_seconds > 0
    assert 1 < actual.tokens_per_second < 100_000


def test_request_that_is_too_long_is_told(drill: str) -> None:
    """The server's own words come with the status."""
    actual = offered(drill, Workload(requests=1, prompt_tokens=40_000, max_tokens=1))
    assert (0, 1) == (actual.completed, actual.failed)
    assert "maximum context length is 32768" in actual.errors[0]


def test_unknown_model_is_told(drill: str) -> None:
    """A model that the server does not have is an error that a run ends with."""
    actual = with_client(drill, lambda client: Requests(client, "other", engine=ENGINE).measure(8, 2))
    assert containing("HTTP 404: ", "`other`", "drill") == actual


def test_running_out_of_memory_is_told() -> None:
    """An error in the middle of the stream comes in torch's own words."""
    with Drill(SCENARIOS["long-context-oom"]) as serving:
        actual = offered(serving.url, Workload(requests=1, prompt_tokens=16_384, max_tokens=4))
    assert (0, 1, 0) == (actual.completed, actual.failed, actual.generated_tokens)
    assert "CUDA out of memory" in actual.errors[0]


def test_vocabulary_is_the_servers(drill: str) -> None:
    """Token ids for prompts are those that the server's own tokenizer makes of words."""
    actual = with_client(drill, lambda client: token_ids(client, MODEL))
    assert {3 + byte for byte in b"abcdefghijklmnopqrstuvwxyz "} == set(actual)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(reply("", status=404), id="not there"),
        pytest.param(reply("<html>"), id="HTML"),
        pytest.param(reply_json([]), id="a list"),
        pytest.param(reply_json({"tokens": 5}), id="a number for tokens"),
        pytest.param(reply_json({"tokens": {"a": 1}}), id="an object for tokens"),
        pytest.param(reply_json({"tokens": []}), id="no tokens"),
        pytest.param(reply_json({"tokens": [-1, 0, 2**40, "5", 1.5, None]}), id="tokens that are none"),
        pytest.param(reply("[" * 100_000), id="nested without end"),
        pytest.param(endless(head(), b" " * 65536, limit_bytes=100 * 2**20), id="100 MB"),
        pytest.param(raw(), id="hangs up"),
    ],
)
def test_without_a_vocabulary_a_safe_one_is_used(answer: Answer) -> None:
    """If /tokenize fails or gives an unusable answer, ids that are text in every vocabulary are used."""
    with Hostile({"/tokenize": answer}) as server:
        actual = with_client(server.url, lambda client: token_ids(client, MODEL))
        sent_bytes = server.sent_bytes
    assert DEFAULT_TOKEN_IDS == actual
    assert sent_bytes < 50 * 2**20


def test_vocabulary_that_never_ends_is_given_up() -> None:
    """A /tokenize that keeps sending a little is given up, and not waited for as long as it sends."""
    answer = endless(head(), b" ", pause_seconds=0.05)
    with Hostile({"/tokenize": answer}) as server:
        actual = with_client(server.url, lambda client: token_ids(client, MODEL, answer_seconds=0.3))
    assert DEFAULT_TOKEN_IDS == actual


def test_a_reserving_engine_holds_all_that_a_request_may_need(drill: str) -> None:
    """From its first token on a request counts with its whole output, where the engine reserves it."""
    reserved = Capabilities(reserved=True)

    async def held(client: httpx2.AsyncClient) -> set[int]:
        requests = Requests(client, MODEL, engine=ENGINE, capabilities=reserved)
        task = asyncio.ensure_future(requests.offer(Workload(requests=1, prompt_tokens=64, max_tokens=64)))
        found: set[int] = set()
        while not task.done():
            found.update(requests.load().resident_tokens)
            await asyncio.sleep(0.001)
        return found

    assert {127} == with_client(drill, held)


def test_small_requests_move_gauges_that_only_an_ending_request_moves(drill: str) -> None:
    """They run during a load and after it and count as kvdiag's own; a load is what it held when the last one ended."""
    late = Capabilities(on_completion=True)

    async def offer(client: httpx2.AsyncClient) -> tuple[Outcome, int, set[int]]:
        requests = Requests(client, MODEL, engine=ENGINE, capabilities=late)
        before = await _prompt_tokens(ENGINE.open(HttpReader(client)))
        task = asyncio.ensure_future(requests.offer(Workload(requests=2, prompt_tokens=64, max_tokens=256)))
        changes: set[int] = set()
        while not task.done():
            changes.add(sum(requests.load().resident_tokens))
            await asyncio.sleep(0.001)
        return await task, await _prompt_tokens(ENGINE.open(HttpReader(client))) - before, changes

    outcome, counted, changes = with_client(drill, offer)

    assert (2, counted) == (outcome.completed, outcome.prompt_tokens)
    assert outcome.prompt_tokens == 2 * 64 + outcome.refreshes * 16
    assert outcome.requests == 2 + outcome.refreshes > 2
    assert len(changes) < 256


async def _prompt_tokens(source: EngineClient) -> int:
    engines, _ = await source.read()
    return sum(engine.prompt_tokens_total or 0 for engine in engines or ())
