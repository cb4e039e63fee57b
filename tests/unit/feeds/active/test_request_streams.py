"""kvdiag's own requests against servers that answer completions in every right and wrong way."""

import gzip
import itertools
import json

import pytest

from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.active.load_generator import (
    DEFAULT_TOKEN_IDS,
    MAX_ERROR_CHARACTERS,
    MAX_EVENT_BYTES,
    REFRESH_PROMPT_TOKENS,
    Requests,
)
from kvdiag.model import Capabilities, Outcome, Workload
from tests.builders.answers import containing
from tests.fixtures.hostile import Answer, Hostile, Peer, endless, head, raw, reply, reply_json, silent
from tests.unit.feeds.active.completions import MODEL, STREAM, chunk, event, failure, offered, one, with_client

SENSELESS: tuple[object, ...] = (-1, 2**40, "3", 2.5, None, [], 1)
"""Usages that are no count, or smaller than before."""

PIECES = (
    chunk(1) + b": a comment\r\n\r\n" + chunk(2).replace(b"\n", b"\r\n") + b"event: x\ndata: {\ndata: 5\n\n" + chunk(3)
)


@pytest.mark.parametrize(
    ("answer", "max_tokens", "tokens"),
    [
        pytest.param(raw(STREAM, chunk(1), chunk(6), chunk(10), b"data: [DONE]\n\n"), 10, 10, id="by usage"),
        pytest.param(raw(STREAM, *[chunk()] * 4, b"data: [DONE]\n\n"), 4, 4, id="by chunk"),
        *(
            pytest.param(
                raw(STREAM, chunk(), chunk(), event({"choices": [], "usage": {"completion_tokens": count}})),
                9,
                2,
                id=f"a usage of {count}",
            )
            for count in SENSELESS
        ),
        pytest.param(endless(STREAM + chunk(4), b": still here\n\n", pause_seconds=0.01), 4, 4, id="left at the last"),
        pytest.param(raw(STREAM, *(bytes([byte]) for byte in PIECES)), 3, 3, id="in pieces, with either line ending"),
    ],
)
def test_tokens_are_counted(answer: Answer, max_tokens: int, tokens: int) -> None:
    """By the usage of a chunk if it is a larger count, else one for a chunk; the last token ends the request."""
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=max_tokens))
    assert Outcome(completed=1, failed=0, prompt_tokens=8, generated_tokens=tokens) == actual


@pytest.mark.parametrize(("on_completion", "tokens"), [(False, 4), (True, 5)])
def test_gauges_that_an_end_moves_need_the_stream_read_to_its_end(on_completion: bool, tokens: int) -> None:
    """A server whose response is left at its last token does not count it as ended (trtllm-serve's collector)."""
    with Hostile(raw(STREAM, chunk(4), chunk(5), b"data: [DONE]\n\n")) as server:
        actual = offered(server.url, one(max_tokens=4), capabilities=Capabilities(on_completion=on_completion))
    assert tokens == actual.generated_tokens


LONG_TEXT = "out of memory " * 1000
TOO_LONG = "more than 1 MiB"

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
        endless(head(500), b"x" * 65536), f"HTTP 500: {'x' * MAX_ERROR_CHARACTERS}", id="an endless error text"
    ),
    pytest.param(
        reply(gzip.compress(b"x"), status=500, Content_Encoding="gzip"), "compressed (gzip)", id="a packed error"
    ),
    pytest.param(
        raw(STREAM, event({"error": {"message": "CUDA out of memory"}})), "CUDA out of memory", id="in stream"
    ),
    pytest.param(raw(STREAM, event({"error": "gone"})), "gone", id="in stream, bare"),
    pytest.param(raw(STREAM, event({"object": "error", "message": "old"})), "old", id="in stream, vLLM 0.6's"),
    pytest.param(
        raw(STREAM, event({"error": {"message": LONG_TEXT}})), LONG_TEXT[:MAX_ERROR_CHARACTERS], id="in stream, long"
    ),
    pytest.param(raw(STREAM), "ended without a token", id="an empty stream"),
    pytest.param(raw(STREAM, b"data: [DONE]\n\n"), "ended without a token", id="done at once"),
    pytest.param(reply_json({"choices": [{"text": "hello"}]}), "ended without a token", id="not a stream at all"),
    pytest.param(raw(STREAM, event([1]), event("x")), "ended without a token", id="events that are none"),
    pytest.param(raw(STREAM, b"data: " + b"[" * 100_000 + b"\n"), "ended without a token", id="nested without end"),
    pytest.param(endless(STREAM, b"x" * 65536), TOO_LONG, id="a line that never ends"),
    pytest.param(endless(STREAM + b"data: ", b"x" * 65536), TOO_LONG, id="an event that never ends"),
    pytest.param(
        raw(STREAM, event({"choices": [{"text": "x" * MAX_EVENT_BYTES}]}), chunk()), TOO_LONG, id="a huge event"
    ),
    pytest.param(
        raw(head(Content_Encoding="gzip"), gzip.compress(chunk(4))), "compressed (gzip)", id="a packed stream"
    ),
    pytest.param(raw(), "Server disconnected", id="hangs up at once"),
    pytest.param(raw(head(Transfer_Encoding="chunked"), b"5\r\ndata:\r\n"), "incomplete chunked", id="breaks off"),
    pytest.param(
        reply("", status=307, Location="http://127.0.0.1:1/"), "HTTP 307: no text", id="redirect is not followed"
    ),
]


@pytest.mark.parametrize(("answer", "error"), FAILURES)
def test_failure_is_told(answer: Answer, error: str) -> None:
    """Any failure of a request is reported as an error text of bounded length; nothing is raised."""
    with Hostile(answer) as server:
        actual = offered(server.url, one())
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
    with Hostile(answer) as server:
        actual = offered(server.url, one(), silence_seconds=0.3)
    assert (containing("no answer in time"),) == actual.errors


def test_partial_output_of_a_failure_is_counted() -> None:
    """Tokens received before an error are counted with it, and do not make the request complete."""
    answer = raw(STREAM, chunk(), chunk(), event({"error": {"message": "aborted"}}))
    with Hostile(answer) as server:
        actual = offered(server.url, one(max_tokens=9))
    expected = Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=2, errors=("aborted",))
    assert expected == actual


def test_equal_errors_are_told_once() -> None:
    """Of ten requests that fail alike one text is kept, and of those that fail differently no more than four."""
    numbers = iter(range(100))

    def answer(peer: Peer) -> None:
        reply(f"reason {next(numbers) % 6}", status=500)(peer)

    with Hostile(reply("same", status=500)) as alike, Hostile(answer) as different:
        actual = [
            offered(server.url, Workload(requests=8, prompt_tokens=1, max_tokens=1)) for server in (alike, different)
        ]

    assert [("HTTP 500: same",), 4] == [actual[0].errors, len(actual[1].errors)]
    assert [8, 8] == [outcome.failed for outcome in actual]


def test_some_fail_and_some_do_not() -> None:
    """A workload of which some requests fail counts both, and the prompts of those that are complete."""
    numbers = iter(range(100))

    def answer(peer: Peer) -> None:
        (raw(STREAM, chunk(2)) if next(numbers) % 2 else reply("no", status=500))(peer)

    with Hostile(answer) as server:
        actual = offered(server.url, Workload(requests=6, prompt_tokens=10, max_tokens=2))

    expected = Outcome(completed=3, failed=3, prompt_tokens=30, generated_tokens=6, errors=("HTTP 500: no",))
    assert expected == actual


def test_only_answered_small_requests_count_as_own() -> None:
    """One is answered, one refused and one never answered: the prompt tokens of the others would hide other traffic."""
    answers = [raw(STREAM, chunk(1), b"data: [DONE]\n\n"), reply("", status=503), silent()]
    number = itertools.count()

    def answer(peer: Peer) -> None:
        answers[next(number)](peer)

    with Hostile(answer) as server:
        actual = with_client(
            server.url, lambda client: Requests(client, MODEL, engine=ENGINE).refresh(len(answers), seconds=3.0)
        )
    assert REFRESH_PROMPT_TOKENS == actual


def test_request_is_as_vllm_wants_it() -> None:
    """The body asks for exact lengths, a stream with counts, and a salt that no other request has."""
    bodies: list[dict[str, object]] = []

    def answer(peer: Peer) -> None:
        bodies.append(json.loads(peer.request_body))
        raw(STREAM, chunk(3))(peer)

    with Hostile({"/v1/completions": answer}) as server:
        offered(server.url, Workload(requests=2, prompt_tokens=5, max_tokens=3))

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
