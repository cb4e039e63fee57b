"""A server on a loop of its own, and clients that say what they want to."""

import asyncio
import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.server.connections import WebServer
from kvdiag.server.endpoints import Pages

STARTING = Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=(), refused_total=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a request."""

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
        return asyncio.run(
            self.exchange(f"{request} HTTP/1.1\r\nHost: localhost\r\n{lines}Connection: close\r\n\r\n".encode())
        )


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
