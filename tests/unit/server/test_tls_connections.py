"""No client can block the HTTP shell with handshakes either."""

import asyncio
import gc
import http.client
import socket
import ssl
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvdiag.server.connections import MAX_BROKEN_HANDSHAKES, MAX_TLS_CONNECTIONS
from tests.fixtures.certificates import make_certificate
from tests.fixtures.hostile import eventually
from tests.unit.outputs.test_metrics import snapshot
from tests.unit.server.shell import Shell, asked, shell


def test_handshakes_are_bounded(tmp_path: Path) -> None:
    """A connection counts before its TLS does: who never begins that takes a place, for a while, and no descriptors."""
    # Two places, taken by clients that say nothing
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

    assert ("at the door", (200, 200)) == (actual, afterwards)


def test_what_broken_handshakes_leave_is_collected(tmp_path: Path) -> None:
    """Clients that disconnect in the middle of handshakes, again and again, do not make the daemon grow."""
    collected: list[int] = []

    def look(phase: str, told: dict[str, int]) -> None:
        if phase == "stop" and told["generation"] == 2:
            collected.append(told["collected"])

    with shell(snapshot(), tls=make_certificate(tmp_path).server_context) as serving:
        gc.disable()
        gc.callbacks.append(look)
        try:
            for _ in range(2 * MAX_BROKEN_HANDSHAKES):
                with socket.create_connection(("127.0.0.1", serving.port)) as broken:
                    broken.sendall(b"\x16")

            assert eventually(lambda: len(collected) >= 1)
        finally:
            gc.callbacks.remove(look)
            gc.enable()


def test_connections_with_tls_are_fewer(tmp_path: Path) -> None:
    """Each takes a quarter of a MiB: those that wait make room before the daemon is as large as its container."""
    certificate = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate.certificate)
    with shell(snapshot(), tls=certificate.server_context) as serving, ExitStack() as stack:

        def another() -> http.client.HTTPSConnection:
            connection = http.client.HTTPSConnection("127.0.0.1", serving.port, timeout=20, context=trust)
            return stack.enter_context(closing(connection))

        answers = [asked(another()) for _ in range(MAX_TLS_CONNECTIONS + 1)]

        assert {200} == set(answers)
        assert eventually(lambda: len(serving.web._connections) == MAX_TLS_CONNECTIONS)  # noqa: SLF001 - no client can see it


def test_handshakes_under_way_end_in_silence(tmp_path: Path) -> None:
    """A client that has sent nothing when the port closes is disconnected at once, and no error is logged."""
    mistakes: list[dict[str, object]] = []
    with (
        shell(snapshot(), make_certificate(tmp_path).server_context, request_seconds=1_000.0) as serving,
        socket.create_connection(("127.0.0.1", serving.port), timeout=20) as silent,
    ):
        serving.loop.set_exception_handler(lambda _, context: mistakes.append(context))
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert eventually(lambda: len(places) == 1)
        asyncio.run_coroutine_threadsafe(serving.web.stop(), serving.loop).result(10)
        assert b"" == silent.recv(1)
    assert [] == mistakes


@pytest.mark.parametrize("encrypted", [False, True], ids=["half a request", "no handshake"])
def test_slow_requests_make_room(encrypted: bool, tmp_path: Path) -> None:
    """Clients that never finish their requests do not block others for long: after a moment they count as idle."""
    # Two places, both taken by such clients for as long as they want
    certificate = make_certificate(tmp_path)
    tls = certificate.server_context if encrypted else None
    trust = ssl.create_default_context(cafile=certificate.certificate)
    with shell(snapshot(), tls, most_connections=2, slow_seconds=0.1, request_seconds=1_000.0) as serving:
        slow = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(2)]
        for each in slow:
            each.sendall(b"\x16" if encrypted else b"GET")
        places = serving.web._connections  # noqa: SLF001 - no client can see it
        assert eventually(lambda: len(places) == 2)

        def served() -> bool:
            try:
                with (
                    socket.create_connection(("127.0.0.1", serving.port), timeout=20) as plain,
                    trust.wrap_socket(plain, server_hostname="127.0.0.1") if encrypted else plain as connection,
                ):
                    connection.sendall(b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    return connection.recv(4096).startswith(b"HTTP/1.1 200")
            except OSError:
                return False  # they are not slow yet

        assert eventually(served)
        for each in slow:
            each.close()
