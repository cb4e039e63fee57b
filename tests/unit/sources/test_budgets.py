"""What servers send is read within budgets of bytes, values, pieces and processor time, and other tasks have turns."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.engines import openai_client
from kvdiag.engines.vllm import ENGINE
from kvdiag.sources import bounded_json, prometheus_text
from kvdiag.sources.http import MAX_ANSWER_BYTES, REST_SECONDS, HttpReader, TooMuchError, Unreadable
from kvdiag.sources.prometheus_text import MAX_PAGE_LINES, MAX_PAGE_SERIES, PIECE_CHARACTERS, TooLargeError
from tests.builders.metrics_pages import parse_page
from tests.fixtures import hostile
from tests.fixtures.hostile import Hostile, head, raw, reply

T = TypeVar("T")

LINE = 'vllm:num_requests_running{{engine="{}",model_name="m"}} 1.0\n'


def asked(answer: hostile.Answer, ask: Callable[[HttpReader], Awaitable[T]], clock: Callable[[], float]) -> T:
    """What `ask` makes of a server that answers everything so."""

    async def ask_it() -> T:
        with Hostile(answer) as server:
            async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
                return await ask(HttpReader(client, 60.0, clock=clock))

    return asyncio.run(ask_it())


@pytest.mark.parametrize("count", [MAX_PAGE_SERIES + 1, 250_000], ids=["within the bytes", "14 MiB"])
def test_a_page_of_too_many_series_is_a_gap_and_is_left_alone(count: int) -> None:
    """An oversized metrics answer is fetched once a minute, and each sample in between carries the reason."""
    now_seconds = [0.0]
    text = "".join(LINE.format(number) for number in range(count))
    taken = 0

    def answer(peer: hostile.Peer) -> None:
        nonlocal taken
        taken += 1
        reply(text)(peer)

    async def read(http: HttpReader) -> list[tuple[int, object, str, bool]]:
        source = ENGINE.open(http)
        told: list[tuple[int, object, str, bool]] = []
        for seconds in (0.0, 1.0, REST_SECONDS - 1.0, REST_SECONDS + 1.0):
            now_seconds[0] = seconds
            engines, (gap,) = await source.read()
            told.append((taken, engines, gap.kind, gap.reason.endswith("1 min after the last")))
        return told

    assert [
        (1, None, "refused", False),
        (1, None, "refused", True),
        (1, None, "refused", True),
        (2, None, "refused", False),
    ] == asked(answer, read, lambda: now_seconds[0])


def test_other_tasks_have_their_turn_while_a_page_is_parsed() -> None:
    """Once for each piece of it at least, so that none of them waits for the whole page."""
    text = "".join(LINE.format(number) for number in range(10_000))
    turns = 0

    async def read(http: HttpReader) -> int:
        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        answer = await http.get("/metrics/")
        parser = prometheus_text.PageParser()
        task = asyncio.create_task(others())
        await openai_client.cooperatively(parser.parsing(answer.text), max_seconds=600.0)
        task.cancel()
        return turns

    assert len(text) // PIECE_CHARACTERS <= asked(reply(text), read, lambda: 0.0)


def test_a_page_that_takes_too_much_of_the_processor_is_given_up() -> None:
    """After the piece that goes beyond the budget, not after the page."""
    pieces = 0

    def parsing() -> Generator[None, None, prometheus_text.Page]:
        nonlocal pieces
        for number in range(1_000):
            pieces += 1
            parse_page(LINE.format(number))
            yield
        return {}

    with pytest.raises(TooLargeError):
        asyncio.run(openai_client.cooperatively(parsing(), max_seconds=0.0))
    assert 1 == pieces


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("\n" * (MAX_PAGE_LINES + 1), "lines", id="empty lines"),
        pytest.param("a 1\n" * (MAX_PAGE_SERIES + 1), "series", id="short lines"),
    ],
)
def test_a_page_beyond_its_budget_is_refused(text: str, reason: str) -> None:
    """A page beyond its budget raises TooLargeError, with the budget that it exceeds."""
    with pytest.raises(TooLargeError, match=reason):
        parse_page(text)


@given(
    st.lists(st.sampled_from(["counter", "gauge", "histogram", "untyped"]), min_size=1, max_size=6), st.integers(0, 40)
)
def test_pieces_come_to_the_same_as_the_whole(kinds: list[str], lines: int) -> None:
    """A counter's samples are named by its type, which stands above them, in another piece or not."""
    page = "".join(
        f"# HELP x{number} Text.\n# TYPE x{number} {kind}\n" + f'x{number}{{a="{"b" * 700}"}} 1\n' * lines
        for number, kind in enumerate(kinds)
    )
    whole = [(one.name, one.labels) for family in text_string_to_metric_families(page) for one in family.samples]

    actual = [(name, one.labels) for name, series in parse_page(page).items() for one in series]

    assert whole == actual


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(raw(head(Transfer_Encoding="chunked"), b"1\r\n#\r\n" * 100_000, b"0\r\n\r\n"), id="crumbs"),
        pytest.param(reply("#" * (MAX_ANSWER_BYTES + 1)), id="too many bytes"),
        pytest.param(reply("[" + "{}," * 400_000 + "{}]"), id="too many values"),
    ],
)
def test_an_answer_beyond_its_budget_is_left_alone(answer: hostile.Answer) -> None:
    """However few bytes it has."""

    async def read(http: HttpReader) -> object:
        with pytest.raises(TooMuchError):
            await http.json("/v1/models")
        return None

    asked(answer, read, lambda: 0.0)


def test_what_is_missing_is_asked_for_again_at_once() -> None:
    """Only what is too much waits for a minute."""

    async def read(http: HttpReader) -> list[str]:
        reasons = []
        for _ in range(2):
            with pytest.raises(Unreadable) as told:
                await http.get("/metrics/")
            reasons.append(str(told.value))
        return reasons

    first, second = asked(reply("", status=503), read, lambda: 0.0)
    assert first == second


@pytest.mark.parametrize("text", ["[" * 100_000, b"[" * 100_000, "{}" * 3, '{"a":', "\ud800"])
def test_no_text_does_more_than_be_refused(text: str | bytes) -> None:
    """Nested, torn or no text at all."""
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
        bounded_json.decode(text)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_values_are_never_counted_too_low(value: object) -> None:
    """So that what is decoded is within the budget."""

    def count(value: object) -> int:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(count(part) for part in parts)

    text = json.dumps(value)
    assert count(value) <= bounded_json.most_values(text) == bounded_json.most_values(text.encode())
