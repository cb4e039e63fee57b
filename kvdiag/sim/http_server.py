"""HTTP/1.1 on asyncio streams for a server on loopback: whole bodies in, bodies or event streams out.

h11 parses and frames; this module adds limits, connections and the detection of disconnected clients. Requests of one
connection are answered one after the other: read whole, handled, written. A malformed or too large request is refused
and ends its connection, since what follows it cannot be framed. When its client disconnects,
`HttpRequest.disconnected` is set at once, even while the response is being made: vLLM aborts a request then. There is
no TLS, compression or authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import h11

MAX_HEAD_BYTES = 64 * 2**10
MAX_BODY_BYTES = 16 * 2**20
READ_BYTES = 64 * 2**10
SERVER_HEADER = "kvdiag-drill"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A whole request. `disconnected` is set once its client has disconnected."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    body: bytes
    disconnected: asyncio.Event


@dataclass(frozen=True, slots=True)
class Response:
    """An answer: a body, or text that is sent piece by piece."""

    body: bytes = b""
    status: int = 200
    content_type: str | None = None
    stream: AsyncGenerator[str] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        """A JSON answer, as compact as Starlette writes it."""
        body = json.dumps(value, separators=(",", ":")).encode()
        return cls(body=body, status=status, content_type="application/json", headers=headers or {})


Handler = Callable[[HttpRequest], Awaitable[Response]]


class _Reader(asyncio.StreamReader):
    """A stream that notices at once that the client has disconnected, even while nothing reads from it."""

    def __init__(self) -> None:
        super().__init__(limit=MAX_HEAD_BYTES)
        self.disconnected = asyncio.Event()

    def feed_eof(self) -> None:
        self.disconnected.set()
        super().feed_eof()

    def set_exception(self, exc: BaseException) -> None:
        self.disconnected.set()
        super().set_exception(exc)  # type: ignore[arg-type]  # typeshed asks for Exception, asyncio passes any


class HttpServer:
    """Serves `handler` on a loopback port from within a running event loop."""

    def __init__(self, handler: Handler) -> None:
        """Answer with the result of `handler`; `start` opens the port."""
        self._handler = handler
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> int:
        """Listen on 127.0.0.1; 0 picks a free port. Returns the port.

        Raises:
            OSError: the port is taken or may not be used.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, "127.0.0.1", port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close all connections and the port."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = _Reader()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        return asyncio.StreamReaderProtocol(reader, connected)

    async def _serve(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            with contextlib.suppress(ConnectionError):
                while await self._serve_one(connection, reader, writer):
                    connection.start_next_cycle()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve_one(self, connection: h11.Connection, reader: _Reader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection can serve another."""
        try:
            request = await _read_request(connection, reader, writer)
        except h11.RemoteProtocolError as error:
            refusal = Response(str(error).encode(), status=error.error_status_hint, content_type="text/plain")
            if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await _write(connection, writer, refusal)
            return False
        if request is None:
            return False
        try:
            response = await self._handler(request)
        except ConnectionError:
            return False
        except Exception:  # noqa: BLE001 - the client must get an answer in any case
            response = Response(b"Internal Server Error", status=500, content_type="text/plain; charset=utf-8")
        await _write(connection, writer, response, head_only=request.method == "HEAD")
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE


async def _read_request(
    connection: h11.Connection, reader: _Reader, writer: asyncio.StreamWriter
) -> HttpRequest | None:
    """A whole request, `None` if the client is done; h11.RemoteProtocolError if it is malformed or too large."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError("a body may have at most 16 MiB", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            target = urlsplit(head.target.decode("latin-1"))
            query = tuple(parse_qsl(target.query, keep_blank_values=True))
            return HttpRequest(head.method.decode(), target.path, query, bytes(body), reader.disconnected)
        else:
            return None


async def _write(
    connection: h11.Connection, writer: asyncio.StreamWriter, response: Response, *, head_only: bool = False
) -> None:
    headers = [("Date", formatdate(usegmt=True)), ("Server", SERVER_HEADER), *response.headers.items()]
    if response.content_type is not None:
        headers.append(("Content-Type", response.content_type))
    if response.stream is None:
        headers.append(("Content-Length", str(len(response.body))))

    def send(event: h11.Event) -> None:
        writer.write(connection.send(event) or b"")

    reason = HTTPStatus(response.status).phrase
    send(h11.Response(status_code=response.status, headers=headers, reason=reason.encode()))
    if response.stream is not None:
        async with contextlib.aclosing(response.stream) as pieces:
            async for piece in pieces:
                send(h11.Data(data=piece.encode()))
                await writer.drain()
    elif not head_only:
        send(h11.Data(data=response.body))
    send(h11.EndOfMessage())
    await writer.drain()
