"""kvdiag's own requests against a drill, and against servers that answer completions in every wrong way."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import httpx2
import pytest

from kvdiag.feeds.requests import DEFAULT_TOKEN_IDS, MAX_ERROR_CHARACTERS, MAX_EVENT_BYTES, Requests, Speed
from kvdiag.feeds.vocabulary import token_ids
from kvdiag.model import Load, Outcome, Workload
from kvdiag.sim import STORIES, Drill
from kvdiag.sources.http import HttpReader
from kvdiag.sources.vllm import VllmSource
from tests.fixtures.hostile import Answer, Hostile, Peer, endless, head, raw, reply, reply_json, silent

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


def offered(url: str, workload: Workload, *, silence_seconds: float = LONG_SECONDS) -> Outcome:
    """The outcome of a workload."""
    return with_client(url, lambda client: Requests(client, MODEL, silence_seconds=silence_seconds).offer(workload))


def one(max_tokens: int = 4) -> Workload:
    """A workload of a single request."""
    return Workload(requests=1, prompt_tokens=8, max_tokens=max_tokens)


def failure(error: str) -> Outcome:
    """The outcome of one request that failed before its first token."""
    return Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=0, errors=(error,))


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(tokens: int | None = None) -> bytes:
    """A chunk of a completion, with the count of tokens so far where the server gives it."""
    value: dict[str, object] = {"object": "text_completion", "choices": [{"index": 0, "text": "x"}]}
    return event(value if tokens is None else {**value, "usage": {"completion_tokens": tokens}})


@pytest.fixture(scope="module")
def drill() -> Iterator[str]:
    """The address of a healthy drill, for tests that leave nothing behind."""
    with Drill(STORIES["healthy"]) as serving:
        yield serving.url


@asynccontextmanager
async def watched(client: httpx2.AsyncClient) -> AsyncIterator[Callable[[Callable[[int], bool]], Awaitable[int]]]:
    """Wait until the number of requests that run on the server is as wanted; that number."""
    source = VllmSource(HttpReader(client))

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

    # GIVEN
    async def counts(client: httpx2.AsyncClient) -> tuple[Outcome, int, int]:
        source = VllmSource(HttpReader(client))
        (before,) = (await source.read())[0] or ()
        outcome = await Requests(client, MODEL).offer(Workload(requests=3, prompt_tokens=100, max_tokens=7))
        async with watched(client) as until:
            await until(lambda running: running == 0)
        (after,) = (await source.read())[0] or ()
        return (
            outcome,
            (after.prompt_tokens_total or 0) - (before.prompt_tokens_total or 0),
            (after.generation_tokens_total or 0) - (before.generation_tokens_total or 0),
        )

    # WHEN
    actual = with_client(drill, counts)

    # THEN
    assert (Outcome(completed=3, failed=0, prompt_tokens=300, generated_tokens=21), 300, 21) == actual


def test_prompts_are_never_cached(drill: str) -> None:
    """Equal workloads hit nothing of what earlier ones left in the prefix cache."""

    # GIVEN
    async def hits(client: httpx2.AsyncClient) -> int:
        source = VllmSource(HttpReader(client))
        (before,) = (await source.read())[0] or ()
        for _ in range(2):
            await Requests(client, MODEL, token_ids=[7]).offer(Workload(requests=2, prompt_tokens=64, max_tokens=1))
        (after,) = (await source.read())[0] or ()
        return (after.prefix_hits_total or 0) - (before.prefix_hits_total or 0)

    # WHEN
    actual = with_client(drill, hits)

    # THEN
    assert 0 == actual


def test_repeated_prompts_are_the_same(drill: str) -> None:
    """A repeated workload sends the prompts and salts of the one before: the server's prefix cache knows them all."""
    # GIVEN
    repeated = Workload(requests=2, prompt_tokens=65, max_tokens=2, repeated=True)

    async def work(client: httpx2.AsyncClient) -> list[int]:
        source, requests = VllmSource(HttpReader(client)), Requests(client, MODEL)
        hits = []
        for workload in (repeated, repeated, replace(repeated, repeated=False), replace(repeated, requests=3)):
            before = await _hits(source)
            await requests.offer(workload)
            hits.append(await _hits(source) - before)
        return hits

    # WHEN a third request joins at the end, which is new
    actual = with_client(drill, work)

    # THEN whole blocks of 16 of all but the last token
    assert [0, 128, 0, 128] == actual


async def _hits(source: VllmSource) -> int:
    engines, _ = await source.read()
    return sum(engine.prefix_hits_total or 0 for engine in engines or ())


def test_load_tells_what_is_resident(drill: str) -> None:
    """While requests run their resident tokens are known; before and after nothing is open."""

    # GIVEN
    async def loads(client: httpx2.AsyncClient) -> list[Load]:
        requests = Requests(client, MODEL)
        seen = [requests.load()]
        offering = asyncio.create_task(requests.offer(Workload(requests=2, prompt_tokens=100, max_tokens=50)))
        while not offering.done():
            seen.append(requests.load())
            await asyncio.sleep(0.002)
        await offering
        return [*seen, requests.load()]

    # WHEN
    first, *between, last = with_client(drill, loads)

    # THEN the newest token of each has not been through the model
    assert (Load(requests=0), Load(requests=0)) == (first, last)
    resident = [tokens for load in between for tokens in load.resident_tokens]
    assert 2 == max(len(load.resident_tokens) for load in between)
    assert min(resident) >= 100
    assert max(resident) <= 100 + 50 - 1


def test_cancelling_frees_the_server(drill: str) -> None:
    """Requests that are given up run on the server no longer, and are open here no longer."""

    # GIVEN
    async def cancel(client: httpx2.AsyncClient) -> tuple[int, int, Load]:
        requests = Requests(client, MODEL)
        offering = asyncio.create_task(requests.offer(Workload(requests=4, prompt_tokens=512, max_tokens=20_000)))
        async with watched(client) as until:
            ran = await until(lambda running: running == 4)
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)
            return ran, await until(lambda running: running == 0), requests.load()

    # WHEN
    actual = with_client(drill, cancel)

    # THEN
    assert (4, 0, Load(requests=0)) == actual


def test_speed_is_measured(drill: str) -> None:
    """One request alone tells how long the first token takes, and how many follow in a second."""
    # WHEN
    actual = with_client(drill, lambda client: Requests(client, MODEL).measure(256, 16))

    # THEN
    assert isinstance(actual, Speed)
    assert actual.first_token_seconds > 0
    assert 1 < actual.tokens_per_second < 100_000


def test_request_that_is_too_long_is_told(drill: str) -> None:
    """The server's own words come with the status."""
    # WHEN
    actual = offered(drill, Workload(requests=1, prompt_tokens=40_000, max_tokens=1))

    # THEN
    assert (0, 1) == (actual.completed, actual.failed)
    assert "HTTP 400: This model's maximum context length is 32768 tokens." in actual.errors[0]


def test_unknown_model_is_told(drill: str) -> None:
    """A model that the server does not have is an error that a run ends with."""
    # WHEN
    actual = with_client(drill, lambda client: Requests(client, "other").measure(8, 2))

    # THEN
    assert "HTTP 404: The model `other` does not exist. Valid aliases: drill" == actual


def test_running_out_of_memory_is_told() -> None:
    """An error in the middle of the stream comes in torch's own words."""
    # WHEN
    with Drill(STORIES["long-context-oom"]) as serving:
        actual = offered(serving.url, Workload(requests=1, prompt_tokens=16_384, max_tokens=4))

    # THEN
    assert (0, 1, 0) == (actual.completed, actual.failed, actual.generated_tokens)
    assert "CUDA out of memory" in actual.errors[0]


def test_tokens_are_counted_by_usage() -> None:
    """Several tokens in one chunk are as many as its usage says."""
    # GIVEN
    answer = raw(STREAM, chunk(1), chunk(6), chunk(10), b"data: [DONE]\n\n")

    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=10))

    # THEN
    assert Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=10) == actual


def test_tokens_are_counted_by_chunk() -> None:
    """A server that sends no usage has sent a token with each chunk."""
    # GIVEN
    answer = raw(STREAM, *[chunk()] * 4, b"data: [DONE]\n\n")

    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=4))

    # THEN
    assert Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=4) == actual


@pytest.mark.parametrize("count", [-1, 2**40, "3", 2.5, None, [], 1])
def test_senseless_usage_does_not_count(count: object) -> None:
    """A usage that is no count, or smaller than before, takes nothing away."""
    # GIVEN
    answer = raw(STREAM, chunk(), chunk(), event({"choices": [], "usage": {"completion_tokens": count}}))

    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=9))

    # THEN
    assert Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=2) == actual


def test_stream_is_left_with_its_last_token() -> None:
    """When all tokens are there nothing more is waited for, whatever the server still sends or does not."""
    # GIVEN
    answer = endless(STREAM + chunk(4), b": still here\n\n", pause_seconds=0.01)

    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=4))

    # THEN
    assert Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=4) == actual


def test_lines_come_in_any_pieces() -> None:
    """Events are told apart wherever the network cuts them, with either line ending; what is none is passed over."""
    # GIVEN
    text = (
        chunk(1)
        + b": a comment\r\n\r\n"
        + chunk(2).replace(b"\n", b"\r\n")
        + b"event: x\ndata: {\ndata: 5\n\n"
        + chunk(3)
    )

    # WHEN
    with Hostile(raw(STREAM, *(bytes([byte]) for byte in text))) as server:
        actual = offered(server.url, one(max_tokens=3))

    # THEN
    assert Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=3) == actual


LONG_TEXT = "out of memory " * 1000
TOO_LONG = "a line of more than 1 MiB: not a stream of completions"

FAILURES = [
    pytest.param(
        reply_json({"error": {"message": "no such model", "code": 404}}, status=404),
        "HTTP 404: no such model",
        id="an error object",
    ),
    pytest.param(reply_json({"object": "error", "message": "bad"}, status=400), "HTTP 400: bad", id="vLLM 0.6's error"),
    pytest.param(reply_json({"detail": "Not Found"}, status=404), 'HTTP 404: {"detail": "Not Found"}', id="FastAPI's"),
    pytest.param(reply("<html>no</html>", status=502), "HTTP 502: <html>no</html>", id="a proxy's page"),
    pytest.param(reply("", status=503), "HTTP 503: no text", id="no text"),
    pytest.param(
        reply(b"\xff\xfe", status=500, content_type="text/plain; charset=base64"),
        "HTTP 500: \ufffd\ufffd",
        id="bytes that are no text",
    ),
    pytest.param(
        reply(LONG_TEXT, status=500), f"HTTP 500: {LONG_TEXT[:MAX_ERROR_CHARACTERS]}", id="a long text is cut"
    ),
    pytest.param(
        endless(head(500), b"x" * 65536),
        f"HTTP 500: {'x' * MAX_ERROR_CHARACTERS}",
        id="an error text that never ends",
    ),
    pytest.param(
        reply(gzip.compress(b"x"), status=500, Content_Encoding="gzip"),
        "the answer on /v1/completions is packed (gzip) although that was not asked for",
        id="a packed error",
    ),
    pytest.param(
        raw(STREAM, event({"error": {"message": "CUDA out of memory"}})), "CUDA out of memory", id="in stream"
    ),
    pytest.param(raw(STREAM, event({"error": "gone"})), "gone", id="in stream, bare"),
    pytest.param(raw(STREAM, event({"object": "error", "message": "old"})), "old", id="in stream, vLLM 0.6's"),
    pytest.param(
        raw(STREAM, event({"error": {"message": LONG_TEXT}})), LONG_TEXT[:MAX_ERROR_CHARACTERS], id="in stream, long"
    ),
    pytest.param(raw(STREAM), "the stream ended without a token", id="an empty stream"),
    pytest.param(raw(STREAM, b"data: [DONE]\n\n"), "the stream ended without a token", id="done at once"),
    pytest.param(
        reply_json({"choices": [{"text": "hello"}]}), "the stream ended without a token", id="not a stream at all"
    ),
    pytest.param(raw(STREAM, event([1]), event("x")), "the stream ended without a token", id="events that are none"),
    pytest.param(
        raw(STREAM, b"data: " + b"[" * 100_000 + b"\n"), "the stream ended without a token", id="nested without end"
    ),
    pytest.param(endless(STREAM, b"x" * 65536), TOO_LONG, id="a line that never ends"),
    pytest.param(endless(STREAM + b"data: ", b"x" * 65536), TOO_LONG, id="an event that never ends"),
    pytest.param(
        raw(STREAM, event({"choices": [{"text": "x" * MAX_EVENT_BYTES}]}), chunk()), TOO_LONG, id="a huge event"
    ),
    pytest.param(
        raw(head(Content_Encoding="gzip"), gzip.compress(chunk(4))),
        "the answer on /v1/completions is packed (gzip) although that was not asked for",
        id="a packed stream",
    ),
    pytest.param(
        raw(), "the answer broke off (Server disconnected without sending a response.)", id="hangs up at once"
    ),
    pytest.param(
        raw(head(Transfer_Encoding="chunked"), b"5\r\ndata:\r\n"),
        "the answer broke off (peer closed connection without sending complete message body (incomplete chunked)",
        id="breaks off",
    ),
    pytest.param(
        reply("", status=307, Location="http://127.0.0.1:1/"), "HTTP 307: no text", id="redirect is not followed"
    ),
]


@pytest.mark.parametrize(("answer", "error"), FAILURES)
def test_failure_is_told(answer: Answer, error: str) -> None:
    """Whatever goes wrong with a request is its error's text, bounded in length, and nothing is raised."""
    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one())

    # THEN
    assert failure(error) == actual


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(silent(), id="before the answer"),
        pytest.param(silent(STREAM), id="before the first event"),
        pytest.param(silent(STREAM + chunk()), id="after a token"),
        pytest.param(silent(head(500)), id="before an error's text"),
    ],
)
def test_silence_is_given_up(answer: Answer) -> None:
    """A server that falls silent is given up after the time allowed for it."""
    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one(), silence_seconds=0.3)

    # THEN
    assert ("no answer in time: is the server hanging, or a firewall in between?",) == actual.errors


def test_partial_output_of_a_failure_is_counted() -> None:
    """Tokens that came before an error are told beside it, and do not make the request complete."""
    # GIVEN
    answer = raw(STREAM, chunk(), chunk(), event({"error": {"message": "aborted"}}))

    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=9))

    # THEN
    expected = Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=2, errors=("aborted",))
    assert expected == actual


def test_equal_errors_are_told_once() -> None:
    """Of ten requests that fail alike one text is kept, and of those that fail differently no more than four."""
    # GIVEN
    numbers = iter(range(100))

    def answer(peer: Peer) -> None:
        reply(f"reason {next(numbers) % 6}", status=500)(peer)

    # WHEN
    with Hostile(reply("same", status=500)) as alike, Hostile(answer) as different:
        actual = [
            offered(server.url, Workload(requests=8, prompt_tokens=1, max_tokens=1)) for server in (alike, different)
        ]

    # THEN
    assert [("HTTP 500: same",), 4] == [actual[0].errors, len(actual[1].errors)]
    assert [8, 8] == [outcome.failed for outcome in actual]


def test_some_fail_and_some_do_not() -> None:
    """A workload of which some requests fail counts both, and the prompts of those that are complete."""
    # GIVEN
    numbers = iter(range(100))

    def answer(peer: Peer) -> None:
        (raw(STREAM, chunk(2)) if next(numbers) % 2 else reply("no", status=500))(peer)

    # WHEN
    with Hostile(answer) as server:
        actual = offered(server.url, Workload(requests=6, prompt_tokens=10, max_tokens=2))

    # THEN
    expected = Outcome(completed=3, failed=3, prompt_tokens=30, generated_tokens=6, errors=("HTTP 500: no",))
    assert expected == actual


def test_request_is_as_vllm_wants_it() -> None:
    """The body asks for exact lengths, a stream with counts, and a salt that no other request has."""
    # GIVEN
    bodies: list[dict[str, object]] = []

    def answer(peer: Peer) -> None:
        bodies.append(json.loads(peer.request_body))
        raw(STREAM, chunk(3))(peer)

    # WHEN
    with Hostile({"/v1/completions": answer}) as server:
        offered(server.url, Workload(requests=2, prompt_tokens=5, max_tokens=3))

    # THEN
    prompts = [body.pop("prompt") for body in bodies]
    salts = {body.pop("cache_salt") for body in bodies}
    expected = {
        "model": MODEL,
        "max_tokens": 3,
        "min_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert [expected] * 2 == bodies
    assert 2 == len(salts)
    for prompt in prompts:
        assert isinstance(prompt, list)
        assert 5 == len(prompt)
        assert set(prompt) <= set(DEFAULT_TOKEN_IDS)


def test_vocabulary_is_the_servers(drill: str) -> None:
    """Token ids for prompts are those that the server's own tokenizer makes of words."""
    # WHEN
    actual = with_client(drill, lambda client: token_ids(client, MODEL))

    # THEN the drill's tokenizer knows bytes
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
    """A /tokenize that cannot be had, whatever it answers, leaves ids that are text in every vocabulary."""
    # WHEN
    with Hostile({"/tokenize": answer}) as server:
        actual = with_client(server.url, lambda client: token_ids(client, MODEL))
        sent_bytes = server.sent_bytes

    # THEN
    assert DEFAULT_TOKEN_IDS == actual
    assert sent_bytes < 50 * 2**20


def test_vocabulary_that_never_ends_is_given_up() -> None:
    """A /tokenize that keeps sending a little is given up, and not waited for as long as it sends."""
    # GIVEN
    answer = endless(head(), b" ", pause_seconds=0.05)

    # WHEN
    with Hostile({"/tokenize": answer}) as server:
        actual = with_client(server.url, lambda client: token_ids(client, MODEL, answer_seconds=0.3))

    # THEN
    assert DEFAULT_TOKEN_IDS == actual
