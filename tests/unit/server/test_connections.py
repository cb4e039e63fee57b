"""No client can block the HTTP shell: connections are limited in time and in number."""

import asyncio
import socket
import threading

import pytest

from kvdiag.server.answers import Answer
from kvdiag.server.connections import MAX_UNSENT_BYTES, Access, WebServer
from kvdiag.server.endpoints import Pages
from kvdiag.server.request import Request
from tests.fixtures.hostile import eventually
from tests.unit.outputs.test_metrics import snapshot
from tests.unit.server.shell import Shell, asked, kept, shell


def test_slow_clients_hold_nobody_up() -> None:
    """A client that never ends its request is closed after a while, and others are answered meanwhile."""

    async def slow_and_quick(serving: Shell) -> tuple[int, int]:
        slow = asyncio.create_task(serving.exchange(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "))
        quick = await serving.exchange(b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return quick.status, (await slow).status

    with shell(snapshot(), request_seconds=0.3) as serving:
        actual = asyncio.run(slow_and_quick(serving))

    assert (200, 0) == actual


def test_connections_are_bounded() -> None:
    """Who comes when all places are taken is closed at the door, counted, and served when there is room again."""

    async def crowd(serving: Shell) -> tuple[int, list[int]]:
        waiting = [asyncio.create_task(serving.exchange(b"GET")) for _ in range(2)]
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert await asyncio.to_thread(eventually, lambda: len(places) == 2)
        try:
            third = (await serving.exchange(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).status
        except ConnectionError:
            third = 0
        return third, [(await one).status for one in waiting]

    with shell(snapshot(), request_seconds=1.0, slow_seconds=1_000.0, most_connections=2) as serving:
        actual = asyncio.run(crowd(serving))
        afterwards = serving.ask("GET /metrics?name[]=kvdiag_connections_refused_total")

    assert ((0, [0, 0]), 200) == (actual, afterwards.status)
    name, _, count = afterwards.body.splitlines()[-1].partition(b" ")
    # Any other client of this machine that tried this port meanwhile was refused too.
    assert (b"kvdiag_connections_refused_total", True) == (name, float(count) >= 1.0)


def test_a_connection_serves_many_requests(serving: Shell) -> None:
    """A scraper reuses its connection, after any previous answer."""
    with kept(serving) as connection:
        local = connection.sock.getsockname()
        actual = [asked(connection, path) for path in ("/metrics", "/nothing", "/", "/metrics")]
        assert [200, 404, 200, 200] == actual
        assert local == connection.sock.getsockname()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /-/ready HTTP/1.0",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nConnection: Close",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nContent-Length: 0",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nConnection: keep-alive",
        b"POST /-/ready HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked",
        b"nonsense",
    ],
    ids=["HTTP/1.0", "asked to", "a body", "a body of two lengths", "asked to and not", "a chunked body", "no request"],
)
def test_a_connection_is_closed_where_no_request_can_follow(serving: Shell, head: bytes) -> None:
    """Nothing after a request with a body, or after what is none, is taken for a request."""
    answer = asyncio.run(serving.exchange(head + b"\r\n\r\n" + b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert "close" == answer.headers["connection"]
    assert b"kvdiag_" not in answer.body


def test_an_idle_connection_is_closed_after_a_while() -> None:
    """A client that does not send another request in that time, or only half of one, is disconnected."""

    async def until_closed(serving: Shell, more: bytes) -> bytes:
        return (await serving.exchange(b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\n\r\n" + more)).body

    with shell(snapshot(), request_seconds=0.3, idle_seconds=0.3) as serving:
        idle = asyncio.run(until_closed(serving, b""))
    with shell(snapshot(), request_seconds=0.3, idle_seconds=1_000.0) as serving:
        half = asyncio.run(until_closed(serving, b"GET /-/re"))

    assert (b"kvdiag is ready.\n", b"kvdiag is ready.\n") == (idle, half)


def states(serving: Shell) -> list[str]:
    """What each connection does now."""
    return [one.state for one in serving.web._connections]  # noqa: SLF001 - no client can see it


def test_idle_connections_make_room() -> None:
    """Idle connections do not block new clients: the longest idle one is closed for a new one."""
    with shell(snapshot(), most_connections=2) as serving, kept(serving) as first, kept(serving) as second:
        assert (200, 200) == (asked(first), asked(second))
        assert eventually(lambda: states(serving) == ["idle", "idle"])
        assert 200 == asked(first)
        assert eventually(lambda: states(serving) == ["idle", "idle"])
        with kept(serving) as third:
            newcomer = asked(third)
        assert (200, 200, 0) == (newcomer, asked(first), asked(second))


def test_answers_under_way_end_in_silence() -> None:
    """Who is still to be answered when the port closes is hung up on, which is no mistake to be logged."""
    looked_at = threading.Event()
    mistakes: list[dict[str, object]] = []

    async def allow(*_: str) -> bool:
        looked_at.set()
        await asyncio.Event().wait()
        return True

    with shell(snapshot()) as serving, kept(serving) as connection:
        serving.loop.set_exception_handler(lambda _, context: mistakes.append(context))
        serving.web.access = Access(allow=allow)
        connection.request("GET", "/-/ready")
        assert looked_at.wait(20)

        asyncio.run_coroutine_threadsafe(serving.web.stop(), serving.loop).result(10)

        with pytest.raises(ConnectionError):
            connection.getresponse()
    assert [] == mistakes


def test_many_requests_at_once_hold_nobody_up(serving: Shell) -> None:
    """A client that sends hundreds of requests without a pause has all of them answered, and others have their turn."""
    requests = (
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500
        + b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )

    async def both() -> tuple[int, bool]:
        greedy = asyncio.create_task(serving.exchange(requests))
        await asyncio.sleep(0)
        other = await serving.exchange(b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return (await greedy).body.count(b"HTTP/1.1 200 OK"), other.status == 200

    assert (500, True) == asyncio.run(both())


class Heavy(Pages):
    """Answers of eight mebibytes: more than the kernel takes for one that does not read."""

    def answer(self, request: Request) -> Answer:
        """The same for all."""
        return Answer(body=bytes(2**23))


def test_who_does_not_read_holds_no_memory() -> None:
    """Of many clients that ask and never read, those who wait longest are hung up on."""
    clients = 12

    async def played() -> int:
        web = WebServer(Heavy(newest=snapshot))
        port = await web.start("127.0.0.1", 0)
        lazy = [socket.socket() for _ in range(clients)]
        try:
            for one in lazy:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", port))
                one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asyncio.sleep(0.05)
            places = web._connections  # noqa: SLF001 - no client can see it
            unsent = sum(one.transport.get_write_buffer_size() for one in places)
            assert unsent <= MAX_UNSENT_BYTES
            return len(places)
        finally:
            for one in lazy:
                one.close()
            await web.stop()

    assert asyncio.run(played()) < clients


def test_a_crowd_of_one_address_makes_room_for_another() -> None:
    """Who begins 64 handshakes a second held all places with connections that were not slow yet."""
    with shell(snapshot(), slow_seconds=1_000.0, most_connections=2) as serving:
        crowd = [socket.create_connection(("127.0.0.1", serving.port), source_address=("127.0.0.2", 0))]
        crowd.append(socket.create_connection(("127.0.0.1", serving.port), source_address=("127.0.0.2", 0)))
        assert eventually(lambda: states(serving) == ["receiving", "receiving"])
        status = serving.ask("GET /-/ready").status
        for each in crowd:
            each.close()
    assert 200 == status
