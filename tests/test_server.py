"""The HTTP shell: what it answers, to whom, and that nobody can hold it up."""

from __future__ import annotations

import asyncio
import gc
import gzip
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.server import MAX_TLS_CONNECTIONS, MOST_BROKEN_HANDSHAKES, Access, Pages, WebServer
from tests.fixtures.certificates import make_certificate
from tests.fixtures.hostile import eventually
from tests.outputs.test_metrics import page, snapshot

STARTING = Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=())


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


class Shell:
    """A server on a loop of its own, asked with bytes of all kinds."""

    def __init__(
        self, shown: Snapshot, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None = None, **bounds: float
    ) -> None:
        """Show this snapshot, within other bounds than usual where they are given."""
        self.shown = shown
        self.loop = loop
        self.web = WebServer(Pages(newest=lambda: self.shown, now_seconds=lambda: 1_001.0), **bounds)  # type: ignore[arg-type]
        self.port = asyncio.run_coroutine_threadsafe(self.web.start("127.0.0.1", 0, tls), loop).result(10)

    async def exchange(self, *pieces: bytes, end: bool = False) -> Answer:
        """Send pieces on a connection of their own, and read what comes until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if end:
                writer.write_eof()
            raw = await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        return Answer(int(first.split()[1]) if first else 0, headers, body)

    def ask(self, request: str, **headers: str) -> Answer:
        """One request."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return asyncio.run(self.exchange(f"{request} HTTP/1.1\r\nHost: x\r\n{lines}Connection: close\r\n\r\n".encode()))


@contextmanager
def shell(shown: Snapshot, tls: ssl.SSLContext | None = None, **bounds: float) -> Iterator[Shell]:
    """The server for the length of a block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = Shell(shown, loop, tls, **bounds)
    try:
        yield serving
    finally:
        asyncio.run_coroutine_threadsafe(serving.web.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def serving() -> Iterator[Shell]:
    """A server that shows a leaking server."""
    with shell(snapshot()) as serving:
        yield serving


def test_metrics_are_the_page(serving: Shell) -> None:
    """A scrape gets the page with the exact type that Prometheus asks for, packed where it takes that."""
    # WHEN
    plain = serving.ask("GET /metrics")
    packed = serving.ask("GET /metrics/", accept_encoding="gzip", accept="application/openmetrics-text;version=1.0.0")

    # THEN
    assert (200, page(snapshot()).encode()) == (plain.status, plain.body)
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert packed.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert gzip.decompress(packed.body).endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "openmetrics-text"),
        ("application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5", "plain"),
        ("application/openmetrics-text", "openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0;q=0", "plain"),
        ("application/openmetrics-text;version=abc", "plain"),
        ("application/openmetrics-text;version=9.9.9", "plain"),
        ("text/plain;version=\xb2", "plain"),
        ("", "plain"),
    ],
    ids=["Prometheus", "an older one", "any version", "refused", "no version", "a later version", "no number", "none"],
)
def test_the_form_is_one_of_two(serving: Shell, accept: str, expected: str) -> None:
    """Whatever a client says it accepts, it gets the page in a form that is known, and none of its own words."""
    # WHEN
    answer = serving.ask("GET /metrics", accept=accept)

    # THEN
    forms = {
        "plain": "text/plain; version=0.0.4; charset=utf-8",
        "openmetrics-text": "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
    }
    assert (200, forms[expected]) == (answer.status, answer.headers["content-type"])


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("identity, gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("notgzip", False),
    ],
    ids=["asked for", "among others", "not asked for", "refused", "refused at length", "another"],
)
def test_only_who_takes_it_gets_it_packed(serving: Shell, accepted: str, expected: bool) -> None:
    """A page is packed for clients that say so, and not for those that say they do not want it."""
    # WHEN
    answer = serving.ask("GET /metrics", accept_encoding=accepted)

    # THEN
    assert expected == ("content-encoding" in answer.headers)


def test_a_mistake_of_our_own_costs_one_answer(serving: Shell) -> None:
    """What nobody foresaw is answered with 500, and the next request is served."""
    # GIVEN what cannot be shown
    right, serving.shown = serving.shown, None  # type: ignore[assignment]

    # WHEN
    broken = serving.ask("GET /-/ready").status
    serving.shown = right

    # THEN
    assert (500, 200) == (broken, serving.ask("GET /-/ready").status)


def test_names_filter_the_page(serving: Shell) -> None:
    """`name[]` asks for some series alone."""
    # WHEN
    answer = serving.ask("GET /metrics?name[]=kvdiag_kv_usage_ratio&name[]=kvdiag_build_info")

    # THEN
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    assert ['kvdiag_build_info{version="0.1.0"} 1.0', 'kvdiag_kv_usage_ratio{engine="0"} 0.25'] == lines


def test_a_new_snapshot_is_a_new_page(serving: Shell) -> None:
    """What was rendered is kept for as long as nothing new was seen."""
    # GIVEN a page that was asked for
    serving.ask("GET /metrics")

    # WHEN
    serving.shown = STARTING

    # THEN
    assert page(STARTING).encode() == serving.ask("GET /metrics").body


def test_diagnosis_and_ledger_are_documents(serving: Shell) -> None:
    """The diagnosis is that of `kvdiag run --output json`; the ledger adds up to what is used."""
    # WHEN
    diagnosis = json.loads(serving.ask("GET /api/v1/diagnosis").body)
    audit = json.loads(serving.ask("GET /api/v1/ledger").body)

    # THEN
    assert (1, "fault") == (diagnosis["schema_version"], diagnosis["worst"])
    assert audit["devices"][0]["used_bytes"] == sum(line["bytes"] for line in audit["ledger"])


def test_the_first_page_is_for_a_person(serving: Shell) -> None:
    """A document that a browser lets load nothing, and that is made once however often it is asked for."""
    # GIVEN
    first = serving.ask("GET /")

    # WHEN a moment has passed, and something else is known
    serving.shown = STARTING
    second = serving.ask("GET /")

    # THEN
    assert (200, "text/html; charset=utf-8") == (first.status, first.headers["content-type"])
    assert first.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert b"leak.kv_blocks" in first.body
    assert first.body == second.body


def test_before_anything_is_known_it_says_so() -> None:
    """Healthy means that the daemon lives; ready that something was read; there is no diagnosis of nothing."""
    # GIVEN
    with shell(STARTING) as serving:
        actual = {
            path: serving.ask(f"GET {path}").status
            for path in ("/-/healthy", "/-/ready", "/api/v1/diagnosis", "/metrics", "/", "/nothing")
        }

    # THEN
    assert {
        "/-/healthy": 200,
        "/-/ready": 503,
        "/api/v1/diagnosis": 503,
        "/metrics": 200,
        "/": 200,
        "/nothing": 404,
    } == actual


def test_head_has_no_body(serving: Shell) -> None:
    """HEAD answers as GET does, without what it would carry."""
    # WHEN
    answer = serving.ask("HEAD /-/ready")

    # THEN
    assert (200, b"", "17") == (answer.status, answer.body, answer.headers["content-length"])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(serving: Shell, method: str) -> None:
    """Only GET is served."""
    # WHEN
    answer = serving.ask(f"{method} /metrics")

    # THEN
    assert (405, "GET, HEAD") == (answer.status, answer.headers["allow"])


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET metrics HTTP/1.1\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\n\r\n",
        b"GET //[ HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00 tls \xff\r\n\r\n",
        b"GET /metrics?" + b"name[]=x&" * 1000 + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /-/ready HTTP/1.x\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nnonsense\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nContent-Length : 4\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nX: y\nContent-Length: 4\r\n\r\n",
    ],
    ids=[
        *("nothing", "a word", "HTTP/0.9", "no path", "no URL", "no host", "TLS", "1,000 names", "200 KB"),
        *("HTTP/1.x", "no header", "a folded header", "a space before the colon", "a line feed in a header"),
    ],
)
def test_garbage_is_refused(serving: Shell, sent: bytes) -> None:
    """What is no request, or too large for one, is answered with 400 or a closed connection, and the next is served."""
    # WHEN
    try:
        status = asyncio.run(serving.exchange(sent)).status
    except ConnectionError:
        status = 0  # closed while more was being sent

    # THEN
    assert status in (0, 400)
    assert 200 == serving.ask("GET /-/ready").status


def test_slow_clients_hold_nobody_up() -> None:
    """A client that never ends its request is closed after a while, and others are answered meanwhile."""

    # GIVEN
    async def slow_and_quick(serving: Shell) -> tuple[int, int]:
        slow = asyncio.create_task(serving.exchange(b"GET /metrics HTTP/1.1\r\nX: "))
        quick = await serving.exchange(b"GET /-/ready HTTP/1.1\r\nConnection: close\r\n\r\n")
        return quick.status, (await slow).status

    # WHEN
    with shell(snapshot(), request_seconds=0.3) as serving:
        actual = asyncio.run(slow_and_quick(serving))

    # THEN
    assert (200, 0) == actual


def test_connections_are_bounded() -> None:
    """Who comes when all places are taken is closed at the door, and served when there is room again."""

    # GIVEN two places, taken by clients that wait
    async def crowd(serving: Shell) -> tuple[int, list[int]]:
        waiting = [asyncio.create_task(serving.exchange(b"GET")) for _ in range(2)]
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert await asyncio.to_thread(eventually, lambda: len(places) == 2)
        try:
            third = (await serving.exchange(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")).status
        except ConnectionError:
            third = 0
        return third, [(await one).status for one in waiting]

    # WHEN
    with shell(snapshot(), request_seconds=1.0, most_connections=2) as serving:
        actual = asyncio.run(crowd(serving))
        afterwards = serving.ask("GET /-/ready").status

    # THEN
    assert ((0, [0, 0]), 200) == (actual, afterwards)


def asked(connection: http.client.HTTPConnection, path: str = "/-/ready", **headers: str) -> int:
    """A request on a connection that is kept; 0 where it has been closed."""
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
    except (ConnectionError, http.client.RemoteDisconnected):
        return 0
    answer.read()
    return answer.status


@contextmanager
def kept(serving: Shell) -> Iterator[http.client.HTTPConnection]:
    """A connection that does not open itself again once it was closed."""
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=10)
    connection.auto_open = 0
    connection.connect()
    try:
        yield connection
    finally:
        connection.close()


def test_a_connection_serves_many_requests(serving: Shell) -> None:
    """A scraper asks again on the connection that it has, whatever was answered before."""
    # WHEN
    with kept(serving) as connection:
        local = connection.sock.getsockname()
        actual = [asked(connection, path) for path in ("/metrics", "/nothing", "/", "/metrics")]

        # THEN
        assert [200, 404, 200, 200] == actual
        assert local == connection.sock.getsockname()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /-/ready HTTP/1.0",
        b"GET /-/ready HTTP/1.1\r\nConnection: Close",
        b"GET /-/ready HTTP/1.1\r\nContent-Length: 4",
        b"GET /-/ready HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 0",
        b"GET /-/ready HTTP/1.1\r\nConnection: close\r\nConnection: keep-alive",
        b"POST /-/ready HTTP/1.1\r\nTransfer-Encoding: chunked",
        b"nonsense",
    ],
    ids=["HTTP/1.0", "asked to", "a body", "a body of two lengths", "asked to and not", "a chunked body", "no request"],
)
def test_a_connection_is_closed_where_no_request_can_follow(serving: Shell, head: bytes) -> None:
    """Nothing after a request with a body, or after what is none, is taken for a request."""
    # WHEN
    answer = asyncio.run(serving.exchange(head + b"\r\n\r\n" + b"GET /metrics HTTP/1.1\r\n\r\n"))

    # THEN
    assert "close" == answer.headers["connection"]
    assert b"kvdiag_" not in answer.body


def test_an_idle_connection_is_closed_after_a_while() -> None:
    """Who does not come back is waited for no longer than that; nor is who comes back with half a request."""

    async def until_closed(serving: Shell, more: bytes) -> bytes:
        return (await serving.exchange(b"GET /-/ready HTTP/1.1\r\n\r\n" + more)).body

    # WHEN
    with shell(snapshot(), request_seconds=0.3, idle_seconds=0.3) as serving:
        idle = asyncio.run(until_closed(serving, b""))
    with shell(snapshot(), request_seconds=0.3, idle_seconds=1_000.0) as serving:
        half = asyncio.run(until_closed(serving, b"GET /-/re"))

    # THEN one answer, and the end
    assert (b"kvdiag is ready.\n", b"kvdiag is ready.\n") == (idle, half)


def test_handshakes_are_bounded(tmp_path: Path) -> None:
    """A connection counts before its TLS does: who never begins that takes a place, for a while, and no descriptors."""
    # GIVEN two places, taken by clients that say nothing
    certificate = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate.certificate)
    bounds = {"request_seconds": 1.0, "most_connections": 2}

    async def third(serving: Shell) -> str:
        silent = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(2)]
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert await asyncio.to_thread(eventually, lambda: len(places) == 2)
        try:
            await asyncio.open_connection("127.0.0.1", serving.port, ssl=trust)
        except OSError:
            closed = "at the door"
        else:
            closed = "not"
        # WHEN they have had their time, THEN it is over for them
        ends = [await reader.read() for reader, _ in silent]
        for _, writer in silent:
            writer.close()
        assert [b"", b""] == ends
        return closed

    with shell(snapshot(), tls=certificate.server_context, **bounds) as serving:
        actual = asyncio.run(third(serving))
        connection = http.client.HTTPSConnection("127.0.0.1", serving.port, timeout=10, context=trust)
        afterwards = (asked(connection), asked(connection))
        connection.close()

    # THEN
    assert ("at the door", (200, 200)) == (actual, afterwards)


def test_what_broken_handshakes_leave_is_collected(tmp_path: Path) -> None:
    """Whoever hangs up in the middle of handshakes, again and again, does not make the daemon grow."""
    # GIVEN
    collected: list[int] = []

    def look(phase: str, told: dict[str, int]) -> None:
        if phase == "stop" and told["generation"] == 2:
            collected.append(told["collected"])

    with shell(snapshot(), tls=make_certificate(tmp_path).server_context) as serving:
        gc.disable()
        gc.callbacks.append(look)
        try:
            # WHEN
            for _ in range(2 * MOST_BROKEN_HANDSHAKES):
                with socket.create_connection(("127.0.0.1", serving.port)) as broken:
                    broken.sendall(b"\x16")

            # THEN
            assert eventually(lambda: len(collected) >= 1)
        finally:
            gc.callbacks.remove(look)
            gc.enable()


def test_connections_with_tls_are_fewer(tmp_path: Path) -> None:
    """Each takes a quarter of a MiB: those that wait make room before the daemon is as large as its container."""
    # GIVEN
    certificate = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate.certificate)
    with shell(snapshot(), tls=certificate.server_context) as serving, ExitStack() as stack:

        def another() -> http.client.HTTPSConnection:
            connection = http.client.HTTPSConnection("127.0.0.1", serving.port, timeout=20, context=trust)
            return stack.enter_context(closing(connection))

        # WHEN one more comes than there are places
        answers = [asked(another()) for _ in range(MAX_TLS_CONNECTIONS + 1)]

        # THEN
        assert {200} == set(answers)
        assert eventually(lambda: len(serving.web._connections) == MAX_TLS_CONNECTIONS)  # noqa: SLF001 - no client can see it


def test_idle_connections_make_room() -> None:
    """Connections that only wait keep nobody out: the one that has waited longest is closed for a new one."""
    # GIVEN two places, both taken by scrapers between two scrapes
    with shell(snapshot(), most_connections=2) as serving, kept(serving) as first, kept(serving) as second:
        assert (200, 200) == (asked(first), asked(second))
        assert eventually(lambda: len(serving.web._idle) == 2)  # noqa: SLF001 - no client can see it
        assert 200 == asked(first)
        assert eventually(lambda: len(serving.web._idle) == 2)  # noqa: SLF001

        # WHEN
        with kept(serving) as third:
            newcomer = asked(third)

        # THEN
        assert (200, 200, 0) == (newcomer, asked(first), asked(second))


def test_handshakes_under_way_end_in_silence(tmp_path: Path) -> None:
    """Who has not said anything yet when the port closes is hung up on at once, which is no mistake to be logged."""
    # GIVEN
    mistakes: list[dict[str, object]] = []
    with (
        shell(snapshot(), make_certificate(tmp_path).server_context, request_seconds=1_000.0) as serving,
        socket.create_connection(("127.0.0.1", serving.port), timeout=20) as silent,
    ):
        serving.loop.set_exception_handler(lambda _, context: mistakes.append(context))
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert eventually(lambda: len(places) == 1)

        # WHEN
        asyncio.run_coroutine_threadsafe(serving.web.stop(), serving.loop).result(10)

        # THEN
        assert b"" == silent.recv(1)
    assert [] == mistakes


def test_answers_under_way_end_in_silence() -> None:
    """Who is still to be answered when the port closes is hung up on, which is no mistake to be logged."""
    # GIVEN a request of somebody whose password is being looked at
    looked_at = threading.Event()
    mistakes: list[dict[str, object]] = []

    async def allow(_: str) -> bool:
        looked_at.set()
        await asyncio.Event().wait()
        return True

    with shell(snapshot()) as serving, kept(serving) as connection:
        serving.loop.set_exception_handler(lambda _, context: mistakes.append(context))
        serving.web.access = Access(allow=allow)
        connection.request("GET", "/-/ready")
        assert looked_at.wait(20)

        # WHEN
        asyncio.run_coroutine_threadsafe(serving.web.stop(), serving.loop).result(10)

        # THEN
        with pytest.raises(ConnectionError):
            connection.getresponse()
    assert [] == mistakes


@pytest.mark.parametrize("encrypted", [False, True], ids=["half a request", "no handshake"])
def test_slow_requests_make_room(encrypted: bool, tmp_path: Path) -> None:
    """Clients that never end their requests keep nobody out for long: after a moment they are idle like others."""
    # GIVEN two places, both taken by such clients for as long as they want
    certificate = make_certificate(tmp_path)
    tls = certificate.server_context if encrypted else None
    trust = ssl.create_default_context(cafile=certificate.certificate)
    with shell(snapshot(), tls, most_connections=2, slow_seconds=0.1, request_seconds=1_000.0) as serving:
        slow = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(2)]
        for each in slow:
            each.sendall(b"\x16" if encrypted else b"GET")
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert eventually(lambda: len(places) == 2)

        # WHEN
        def served() -> bool:
            try:
                with (
                    socket.create_connection(("127.0.0.1", serving.port), timeout=20) as plain,
                    trust.wrap_socket(plain, server_hostname="127.0.0.1") if encrypted else plain as connection,
                ):
                    connection.sendall(b"GET /-/ready HTTP/1.1\r\n\r\n")
                    return connection.recv(4096).startswith(b"HTTP/1.1 200")
            except OSError:
                return False  # they are not slow yet

        # THEN
        assert eventually(served)
        for each in slow:
            each.close()


def test_many_requests_at_once_hold_nobody_up(serving: Shell) -> None:
    """A client that sends hundreds of requests without a pause has all of them answered, and others have their turn."""
    # GIVEN
    requests = b"GET /-/ready HTTP/1.1\r\n\r\n" * 500 + b"GET /-/ready HTTP/1.1\r\nConnection: close\r\n\r\n"

    async def both() -> tuple[int, bool]:
        greedy = asyncio.create_task(serving.exchange(requests))
        await asyncio.sleep(0)
        other = await serving.exchange(b"GET /-/ready HTTP/1.1\r\nConnection: close\r\n\r\n")
        return (await greedy).body.count(b"HTTP/1.1 200 OK"), other.status == 200

    # WHEN
    actual = asyncio.run(both())

    # THEN
    assert (500, True) == actual
