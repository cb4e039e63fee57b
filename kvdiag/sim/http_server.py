"""HTTP/1.1 on asyncio streams, as much as a server on loopback needs: whole bodies in, bodies or event streams out."""

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

MAX_HEAD_BYTES = 64 * 2**10
MAX_BODY_BYTES = 16 * 2**20
SERVER_HEADER = "kvdiag-drill"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A whole request. `gone` is set once its client has hung up."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    body: bytes
    gone: asyncio.Event


@dataclass(frozen=True, slots=True)
class Response:
    """What to answer: a body, or text that is sent piece by piece as it comes."""

    body: bytes = b""
    status: int = 200
    content_type: str | None = None
    stream: AsyncGenerator[str] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        """A JSON answer, compact as Starlette writes it."""
        body = json.dumps(value, separators=(",", ":")).encode()
        return cls(body=body, status=status, content_type="application/json", headers=headers or {})


Handler = Callable[[HttpRequest], Awaitable[Response]]


class BadRequestError(Exception):
    """A request that cannot be read; the connection is of no more use."""


class _Reader(asyncio.StreamReader):
    """A stream that tells at once when the other side has hung up, also while nobody reads."""

    def __init__(self) -> None:
        super().__init__(limit=MAX_HEAD_BYTES)
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        self.gone.set()
        super().feed_eof()

    def set_exception(self, exc: BaseException) -> None:
        self.gone.set()
        super().set_exception(exc)  # type: ignore[arg-type]  # typeshed asks for Exception, asyncio passes any


class HttpServer:
    """Serves `handler` on a loopback port from within a running event loop."""

    def __init__(self, handler: Handler) -> None:
        """Answer with what `handler` returns; `start` opens the port."""
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
        """Hang up on everybody and close the port."""
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
        try:
            with contextlib.suppress(ConnectionError):
                while not writer.is_closing() and await self._serve_one(reader, writer):
                    pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve_one(self, reader: _Reader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is over."""
        try:
            parsed = await _read_request(reader)
        except BadRequestError as error:
            await _write(writer, Response(str(error).encode(), status=400, content_type="text/plain"), keep_alive=False)
            return False
        if parsed is None:
            return False
        request, keep_alive = parsed
        try:
            response = await self._handler(request)
        except ConnectionError:
            return False
        except Exception:  # noqa: BLE001 - whatever it is, the client must get an answer
            response = Response(b"Internal Server Error", status=500, content_type="text/plain; charset=utf-8")
        await _write(writer, response, keep_alive=keep_alive, head_only=request.method == "HEAD")
        return keep_alive


async def _read_request(reader: _Reader) -> tuple[HttpRequest, bool] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise BadRequestError("header too large") from error
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):  # noqa: PLR2004 - method, target, version
        raise BadRequestError("malformed request line")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        raise BadRequestError("a body must have a Content-Length of at most 16 MiB")
    try:
        body = await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        return None
    target = urlsplit(words[1])
    query = tuple(parse_qsl(target.query, keep_blank_values=True))
    keep_alive = words[2] != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
    return HttpRequest(words[0], target.path, query, body, reader.gone), keep_alive


async def _write(
    writer: asyncio.StreamWriter, response: Response, *, keep_alive: bool, head_only: bool = False
) -> None:
    head = [
        f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
        f"Date: {formatdate(usegmt=True)}",
        f"Server: {SERVER_HEADER}",
        *(f"{name}: {value}" for name, value in response.headers.items()),
    ]
    if response.content_type is not None:
        head.append(f"Content-Type: {response.content_type}")
    if response.stream is None:
        head.append(f"Content-Length: {len(response.body)}")
    else:
        head.append("Transfer-Encoding: chunked")
    if not keep_alive:
        head.append("Connection: close")
    writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))
    if response.stream is None:
        if not head_only:
            writer.write(response.body)
    else:
        async with contextlib.aclosing(response.stream) as pieces:
            async for piece in pieces:
                data = piece.encode()
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
    await writer.drain()
