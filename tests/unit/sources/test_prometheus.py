"""A Prometheus that refuses, hangs, disconnects, lies or fails half-way: losses are reported, the rest is kept."""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Self
from urllib.parse import parse_qs

import httpx2
import pytest

from kvdiag.sources import prometheus_api
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_answers import History, Labels, add_samples
from kvdiag.sources.prometheus_api import (
    MAX_ANSWER_BYTES,
    MAX_SERIES,
    SERIES_AT_ONCE,
    PrometheusSource,
    Whole,
)
from kvdiag.sources.promql import named, selector
from tests.fixtures.hostile import Answer, Hostile, Peer, endless, head, raw, refused_port, reply, reply_json, silent

START, END = 1_000_000.0, 1_086_400.0
SECONDS = 60.0
NAME = {"__name__": "up", "pod": "a"}
KEY = (("__name__", "up"), ("pod", "a"))

TRUST = ssl.create_default_context()
"""The system's authorities, loaded once: that takes longer than most of these tests."""

Json = dict[str, Any]


def asked(url: str, *, seconds: float = SECONDS) -> History:
    """What a day of one selector brings."""

    async def ask() -> History:
        history = History()
        async with httpx2.AsyncClient(base_url=f"{url}/", trust_env=False, verify=TRUST) as client:
            source = PrometheusSource(client, seconds, retry_seconds=0.0)
            lost = await source.raw(Whole(selector('pod="a"')), START, END, history)
        history.lost += [one for _, one in lost]
        return history

    return asyncio.run(ask())


def listed(url: str, times: int = 1) -> str:
    """Why the list of series cannot be had so often."""

    async def ask() -> str:
        async with httpx2.AsyncClient(base_url=f"{url}/", trust_env=False, verify=TRUST) as client:
            source = PrometheusSource(client, SECONDS)
            for _ in range(times - 1):
                await source.series(["{}"], START, END)
            with pytest.raises(Unreadable) as problem:
                await source.series(["{}"], START, END)
        return str(problem.value)

    return asyncio.run(ask())


def matrix(*points: tuple[float | str, ...], **more: Any) -> Json:
    """An answer with one series."""
    result = [{"metric": NAME, "values": [list(point) for point in points]}]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}, **more}


def window(peer: Peer) -> tuple[float, float]:
    """The time that a request asks for."""
    form = parse_qs(peer.request_body.decode())
    end = float(form["time"][0])
    milliseconds = form["query"][0].rpartition("[")[2].removesuffix("ms]")
    # Without the millisecond by which the range is longer.
    return end - (int(milliseconds) - 1) / 1000.0, end


def by_window(answer: Callable[[float, float], Answer]) -> Answer:
    """A server whose answer depends on the time that is asked for."""
    return lambda peer: answer(*window(peer))(peer)


def test_the_samples_of_a_day_are_read() -> None:
    """Times and values as they stand, in one query."""
    with Hostile({"/api/v1/query": reply_json(matrix((START, "1"), (START + 30.5, "0.25")))}) as server:
        history = asked(server.url)
    points = history.series[KEY]
    assert ([START, START + 30.5], [1.0, 0.25]) == (list(points.times), list(points.values))
    assert [] == history.lost


def test_a_sample_at_the_very_start_is_read() -> None:
    """Prometheus 3 and VictoriaMetrics leave out what lies at the start of a range: the range begins before."""

    def left_open(peer: Peer) -> None:
        start = parse_qs(peer.request_body.decode())["query"][0].rpartition("[")[2].removesuffix("ms]")
        points = [(at, "1") for at in (START, END) if END - int(start) / 1000.0 < at]
        reply_json(matrix(*points))(peer)

    with Hostile({"/api/v1/query": left_open}) as server:
        history = asked(server.url)
    assert [START, END] == list(history.series[KEY].times)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        pytest.param(
            422, "query processing would load too many samples into memory in query execution", id="Prometheus"
        ),
        pytest.param(422, "the query exceeded the maximum number of chunks (limit: 2000000 chunks)", id="Mimir"),
        pytest.param(503, "cannot select more than -search.maxSamplesPerQuery samples", id="VictoriaMetrics"),
        pytest.param(413, "exceeded series limit", id="Thanos"),
    ],
)
def test_a_query_that_is_too_much_is_halved(status: int, text: str) -> None:
    """Until the server takes it; every sample is there once."""

    # A server that takes six hours
    def answer(start: float, end: float) -> Answer:
        if end - start > 6 * 3600.0:
            return reply_json({"status": "error", "errorType": "execution", "error": text}, status=status)
        return reply_json(matrix((start, "1"), (end, "2")))

    with Hostile({"/api/v1/query": by_window(answer)}) as server:
        history = asked(server.url)

    assert [START + 21_600.0 * number for number in range(5)] == list(history.series[KEY].times)
    assert [] == history.lost


def test_an_answer_that_is_too_large_is_halved() -> None:
    """Our own bound on bytes is a reason as good as the server's."""

    # An answer that grows with the time asked for, to twice the bound for a day
    def answer(start: float, end: float) -> Answer:
        points = ((start + 60.0 * number, "1") for number in range(int((end - start) / 60.0) + 1))
        padding = " " * int(2 * MAX_ANSWER_BYTES * (end - start) / (END - START))
        return reply(json.dumps(matrix(*points)) + padding, content_type="application/json")

    with Hostile({"/api/v1/query": by_window(answer)}) as server:
        history = asked(server.url)

    assert 1441 == len(history.series[KEY])
    assert [] == history.lost


def test_an_answer_without_an_end_is_not_kept() -> None:
    """An endless answer loses the whole interval after fewer than 20 requests."""
    flood = endless(head(content_type="application/json") + b'{"status":"success"', b" " * 2**16)
    with Hostile({"/api/v1/query": flood}) as server:
        history = asked(server.url)
        requests = len(server.requests)

    assert START == min(one.start_seconds for one in history.lost)
    assert END == max(one.end_seconds for one in history.lost)
    assert requests < 20


def test_errors_half_way_lose_their_part_alone() -> None:
    """Samples before and after a failed part are kept, and the lost interval carries the server's error."""

    # A server that takes six hours, and has lost the second of four
    def answer(start: float, end: float) -> Answer:
        if end - start > 6 * 3600.0:
            return reply_json({"status": "error", "error": "too many samples"}, status=422)
        if start == START + 21_600.0:
            return reply_json({"status": "error", "error": "open block: no such file"}, status=500)
        return reply_json(matrix((end, "1")))

    with Hostile({"/api/v1/query": by_window(answer)}) as server:
        history = asked(server.url)

    assert [START + 21_600.0, START + 64_800.0, END] == list(history.series[KEY].times)
    assert [(START + 21_600.0, START + 43_200.0, "open block: no such file")] == [
        (one.start_seconds, one.end_seconds, one.reason) for one in history.lost
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(reply("busy", status=503), "503 on /api/v1/query", id="busy"),
        pytest.param(raw(head() + b'{"status":"success","data":{"resultTy'), "is not JSON", id="truncated"),
        pytest.param(raw(head(Content_Length="1000") + b"{"), "the connection was lost", id="shorter than said"),
        pytest.param(reply("<html>Sign in</html>"), "not JSON", id="a web page"),
        pytest.param(reply("", status=302, Location="/login"), "302 on /api/v1/query", id="a redirect"),
        pytest.param(reply("no", status=401), "--token-file", id="no permission"),
        pytest.param(reply("[" * 50_000), "is not JSON", id="nested"),
        pytest.param(reply_json([]), "is not JSON", id="a list"),
        pytest.param(reply_json({"status": "success"}), "no samples", id="no data"),
        pytest.param(
            reply_json({"status": "success", "data": {"resultType": "scalar", "result": [0, "1"]}}),
            "no samples",
            id="a scalar",
        ),
        pytest.param(reply_json(matrix((START, "one"))), "a sample of up", id="no number"),
        pytest.param(
            reply_json(
                {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": NAME, "values": [[1]]}]}}
            ),
            "a sample of up",
            id="half a sample",
        ),
        pytest.param(
            reply_json({"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"a": 1}}]}}),
            "invalid labels",
            id="labels that are numbers",
        ),
        pytest.param(reply_json(matrix((END + 900.0, "1"))), "outside the requested interval", id="from the future"),
        pytest.param(
            reply(b"\x1f\x8b", content_type="application/json", Content_Encoding="gzip"), "is compressed", id="packed"
        ),
        pytest.param(reply_json({"status": "error", "error": "x" * 5000}, status=500), "x" * 160, id="a long error"),
    ],
)
def test_what_is_no_answer_is_lost_and_said(answer: Answer, reason: str) -> None:
    """An invalid answer loses the requested interval with one line of reason, and raises nothing."""
    with Hostile({"/api/v1/query": answer}) as server:
        history = asked(server.url)
    assert [(START, END)] == [(one.start_seconds, one.end_seconds) for one in history.lost]
    assert reason in history.lost[0].reason
    assert "\n" not in history.lost[0].reason
    assert {} == {key: points for key, points in history.series.items() if len(points)}


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_given_the_pause_that_it_asks_for(status: int) -> None:
    """The query is sent again after that, and nothing is lost."""
    times: list[float] = []

    def answer(peer: Peer) -> None:
        times.append(time.monotonic())
        (reply("busy", status=status, Retry_After="1") if len(times) == 1 else reply_json(matrix((END, "1"))))(peer)

    with Hostile({"/api/v1/query": answer}) as server:
        history = asked(server.url)
    assert [] == history.lost
    assert 1.0 <= times[1] - times[0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_lists_and_values_are_asked_for_twice(status: int) -> None:
    """One failure of a server that is busy or restarts does not cost a fleet its round."""
    answers: Json = {
        "/api/v1/series": [NAME],
        "/api/v1/query": {"resultType": "scalar", "result": [START, "1"]},
    }

    def once(path: str) -> Answer:
        served = iter([reply("busy", status=status, Retry_After="0")])
        data = reply_json({"status": "success", "data": answers[path]})

        def answer(peer: Peer) -> None:
            next(served, data)(peer)

        return answer

    async def ask(url: str) -> tuple[list[Labels], float | None]:
        async with httpx2.AsyncClient(base_url=f"{url}/", trust_env=False, verify=TRUST) as client:
            source = PrometheusSource(client, SECONDS, retry_seconds=0.0)
            return await source.series(["{}"], START, END), await source.number("time()")

    with Hostile({path: once(path) for path in answers}) as server:
        assert ([KEY], 1.0) == asyncio.run(ask(server.url))


@pytest.mark.parametrize("asked_for", ["999999999", "-1", "soon", "1e9"])
def test_the_pause_of_a_busy_server_is_bounded(monkeypatch: pytest.MonkeyPatch, asked_for: str) -> None:
    """Of any length, or none at all."""
    monkeypatch.setattr(prometheus_api, "MAX_PAUSE_SECONDS", 0.01)
    with Hostile({"/api/v1/query": reply("busy", status=503, Retry_After=asked_for)}) as server:
        history = asked(server.url)
    assert ["503 on /api/v1/query"] == [one.reason for one in history.lost]


def test_a_server_that_hangs_is_asked_three_times() -> None:
    """Halves are tried, and then nothing is, so that no fleet waits for hours."""
    with Hostile({"/api/v1/query": silent()}) as server:
        history = asked(server.url, seconds=0.2)
        requests = len(server.requests)

    assert 3 == requests
    assert (START, END) == (
        min(one.start_seconds for one in history.lost),
        max(one.end_seconds for one in history.lost),
    )
    assert "no complete answer within 200 ms" in history.lost[0].reason


@dataclass(frozen=True)
class Portion:
    """A selector for several replicas."""

    count: int = 64
    selector: str = '{pod="a"}'

    def halves(self) -> tuple[Self, ...]:
        """Two with half as many each."""
        return (type(self)(self.count // 2),) * 2 if self.count > 1 else ()

    def selects(self, series: Labels) -> bool:
        """Any series."""
        return bool(series)


@pytest.mark.parametrize(
    ("status", "clock", "expected"),
    [
        # All, twice; six halves until one replica is left; the next one; the next two, and one of them.
        pytest.param(504, time.monotonic, 11, id="a gateway's time limit"),
        pytest.param(500, map(float, count(step=6)).__next__, 11, id="errors after 6 s"),
        pytest.param(429, time.monotonic, 2, id="busy"),
    ],
)
def test_a_portion_is_not_queried_one_by_one(status: int, clock: Callable[[], float], expected: int) -> None:
    """Where each of its replicas would wait as long, or keep a busy server busy."""

    async def ask(url: str) -> None:
        async with httpx2.AsyncClient(base_url=f"{url}/", trust_env=False, verify=TRUST) as client:
            source = PrometheusSource(client, SECONDS, retry_seconds=0.0, clock=clock)
            assert await source.raw(Portion(), START, END, History())

    with Hostile({"/api/v1/query": reply("no", status=status)}) as server:
        asyncio.run(ask(server.url))
        assert expected == len(server.requests)


def test_a_server_that_is_gone_is_lost() -> None:
    """No connection is a reason, not an exception."""
    with refused_port() as port:
        history = asked(f"http://127.0.0.1:{port}")
    assert "cannot connect" in history.lost[0].reason


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"warnings": ["store eu-1 is unreachable"]}, "store eu-1 is unreachable"),
        ({"isPartial": True}, "the answer is partial"),
    ],
    ids=["Thanos", "VictoriaMetrics"],
)
def test_a_partial_answer_is_a_warning(more: Json, expected: str) -> None:
    """The server answers with the part that its living stores have, and says so."""
    with Hostile({"/api/v1/query": reply_json(matrix((START, "1"), **more))}) as server:
        assert [expected] == list(asked(server.url).warnings)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(reply("no", status=403), "--token-file", id="no permission"),
        pytest.param(reply("", status=404), "404 on /api/v1/series", id="another server"),
        pytest.param(reply_json({"status": "success", "data": {}}), "no list of series", id="no list"),
        pytest.param(reply_json({"status": "success", "data": ["up"]}), "invalid labels", id="names"),
        pytest.param(
            reply_json({"status": "error", "error": "no org id"}, status=401), "401 on /api/v1/series", id="no tenant"
        ),
    ],
)
def test_a_list_that_cannot_be_had_is_said(answer: Answer, reason: str) -> None:
    """Without the list of series no replica is known, and the error is one line."""
    with Hostile({"/api/v1/series": answer}) as server:
        assert reason in listed(server.url)


def test_too_many_series_are_refused() -> None:
    """More than can be looked through, in one answer or in several: the user names fewer."""
    lists = count()

    def others(peer: Peer) -> None:
        one = {**NAME, "list": str(next(lists))}
        series = [{**one, "pod": str(number)} for number in range(SERIES_AT_ONCE)]
        reply_json({"status": "success", "data": series})(peer)

    with Hostile({"/api/v1/series": others}) as server:
        assert listed(server.url, MAX_SERIES // SERIES_AT_ONCE + 1).startswith(f"{MAX_SERIES:,} series match, with ")
    series = [{**NAME, "pod": str(number)} for number in range(SERIES_AT_ONCE + 1)]
    with Hostile({"/api/v1/series": reply_json({"status": "success", "data": series})}) as server:
        assert "more than 25,000 series: narrow --match" == listed(server.url)


def test_escaped_names_are_found_and_get_their_own() -> None:
    """Prometheus 2 stores a metric of prometheus_client with `_` for its colon: both are asked for, and are one."""
    assert named(["kvdiag_up", "x:y_total"]) == '__name__=~"kvdiag_up|x:y_total|x_y_total"'
    answer = matrix((START, "1"))
    answer["data"]["result"][0]["metric"] = {"__name__": "x_y_total", "pod": "a"}
    history = History()
    add_samples(answer, START, END, history, {"x_y_total": "x:y_total"})
    assert list(history.series) == [(("__name__", "x:y_total"), ("pod", "a"))]
