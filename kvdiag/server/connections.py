"""The port of `kvdiag serve`, on the daemon's own event loop: connections bounded in size, in time and in number.

A connection is `receiving` (a TLS handshake or a request), then `answering`, then `idle` until its next request, as
scrapers expect. When all places are taken, a new client gets the place of the connection that has been idle longest,
else of the one that has been receiving longest and slowly, else of one that does not read its answer; else it is
refused. A client that reads never loses an answer in progress.
"""

import asyncio
import contextlib
import gc
import ipaddress
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from typing import Literal, Protocol

import structlog

import kvdiag
from kvdiag.server.answers import Answer, problem
from kvdiag.server.request import BadRequestError, Request, parse_request

_log = structlog.get_logger()

MAX_HEAD_BYTES = 16 * 2**10
"""Of a request's line and headers, as in h11 and IIS."""

REQUEST_SECONDS = 5.0
"""For a whole request; as long again for its answer."""

SLOW_SECONDS = 1.0
"""Age from which an incomplete request gives way to another client: scrapers send theirs at once."""

IDLE_SECONDS = 150.0
"""Until the next request of a connection: two of the slowest usual scrapes, each minute, and some to spare."""

STOP_SECONDS = 0.5
"""For answers in progress when the port closes."""

MAX_CONNECTIONS = 256
"""At once. A Prometheus has one, a browser six."""

MAX_TLS_CONNECTIONS = 64
"""The same with TLS, where Python keeps some 280 KiB for each: 256 of them would exceed the manifests' memory limit."""

MAX_UNSENT_BYTES = 16 * 2**20
"""Of answers that clients do not read, all together: two of the largest histories."""

MAX_BROKEN_HANDSHAKES = 32
"""Until garbage is collected: each leaves 280 KiB in reference cycles, which Python by itself collects rarely."""


HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[^\s:@\[\]]{1,255}?)\.?(?::\d{1,5})?")
"""A Host header in lower case: name or address, and a port, which differs from ours if it is forwarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may read. `allow` decides by a request's Authorization header and the client's IP address.

    It returns `None` if it cannot decide now.
    """

    allow: Callable[[str, str], Awaitable[bool | None]] | None = None
    headers: tuple[tuple[str, str], ...] = ()


class AnswersRequests(Protocol):
    """The pages of a daemon: an answer at once, or later if another thread has to make it."""

    refused_total: int

    def answer(self, request: Request) -> Answer | Awaitable[Answer]:
        """The answer to a request that may read."""


@dataclass(slots=True, eq=False)
class _Connection:
    """A client's connection, with its state and since when it is in it."""

    task: asyncio.Task[None]
    transport: asyncio.WriteTransport
    address: str
    state: Literal["receiving", "answering", "idle"] = "receiving"
    since_seconds: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def become(self, state: Literal["receiving", "answering", "idle"]) -> None:
        """Enter a state now."""
        self.state, self.since_seconds = state, asyncio.get_running_loop().time()

    def hang_up(self) -> None:
        """End the connection."""
        if self.state == "receiving":
            # asyncio treats a handshake whose transport is aborted as complete.
            self.task.cancel()
        else:
            self.transport.abort()


@dataclass(slots=True, eq=False)
class WebServer:
    """Listens on one address within a running event loop, and answers with `pages`; `start` opens the port."""

    pages: AnswersRequests
    _: KW_ONLY
    request_seconds: float = REQUEST_SECONDS
    slow_seconds: float = SLOW_SECONDS
    idle_seconds: float = IDLE_SECONDS
    most_connections: int = MAX_CONNECTIONS
    access: Access = field(default_factory=Access)
    """Who may read from now on; anyone unless set."""
    _connections: list[_Connection] = field(init=False, default_factory=list)
    _server: asyncio.Server | None = field(init=False, default=None)
    _tls: ssl.SSLContext | None = field(init=False, default=None)
    _loopback_name: str | None = field(init=False, default=None)
    """The name that the port was opened by if it is a loopback port, else `None`."""
    _broken_handshakes: int = field(init=False, default=0)
    """Since the last garbage collection, including those in progress."""

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Open the port, any free one for 0, and return its number.

        Raises:
            OSError: it is in use, or not permitted.
        """
        # Not with the server's own TLS: connections whose handshake does not end would not be counted.
        self._tls = tls
        if tls is not None:
            self.most_connections = min(self.most_connections, MAX_TLS_CONNECTIONS)
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        addresses = [each.getsockname() for each in self._server.sockets]
        if all(ipaddress.ip_address(address[0]).is_loopback for address in addresses):
            self._loopback_name = host.lower()
        bound: int = addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.hang_up()
        if self._connections:
            tasks = [connection.task for connection in self._connections]
            _, answering = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, request: Request, address: str) -> Answer:
        if self._is_rebound(request):
            reason = (
                "foreign Host header on a loopback port: use localhost or 127.0.0.1, or set passwords with --web-config"
            )
            return problem(HTTPStatus.MISDIRECTED_REQUEST, reason)
        allowed = True if self.access.allow is None else await self.access.allow(request.authorization, address)
        if allowed is None:
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "too many passwords to check; retry in a few seconds")
        if not allowed:
            challenge = ("WWW-Authenticate", 'Basic realm="kvdiag"')
            return problem(HTTPStatus.UNAUTHORIZED, "authentication required", challenge)
        answer = self.pages.answer(replace(request, address=address))
        return answer if isinstance(answer, Answer) else await answer

    def _is_rebound(self, request: Request) -> bool:
        """Return whether a request to a loopback port without passwords or TLS names another host.

        A web page can have its own name resolved to 127.0.0.1 (DNS rebinding) and then read the answer. Passwords and
        certificate names keep such a page out.
        """
        if self._loopback_name is None or self.access.allow is not None or self._tls is not None or not request.host:
            return False
        found = HOST.fullmatch(request.host.lower())
        if found is None:
            return True
        name = found[1].strip("[]")
        if name in ("localhost", self._loopback_name):
            return False
        try:
            return not ipaddress.ip_address(name).is_loopback
        except ValueError:
            return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        address = str(writer.get_extra_info("peername", ("",))[0])
        if task is None or not self._has_room(address):
            self.pages.refused_total += 1
            writer.transport.abort()
            return
        connection = _Connection(task, writer.transport, address)
        self._connections.append(connection)
        try:
            if self._tls is not None:
                self._broken_handshakes += 1
                await writer.start_tls(self._tls, ssl_handshake_timeout=self.request_seconds)
                self._broken_handshakes -= 1
                connection.transport = writer.transport
            begun = b""
            while await self._exchange(connection, begun, reader, writer):
                connection.become("idle")
                async with asyncio.timeout(self.idle_seconds):
                    begun = await reader.readexactly(1)
                connection.become("receiving")
            async with asyncio.timeout(self.request_seconds):
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client disconnected, or took too long
        except asyncio.CancelledError:
            pass  # closed by us; asyncio's streams before 3.12 report a cancelled task as an error
        finally:
            if connection in self._connections:
                self._connections.remove(connection)
            with contextlib.suppress(OSError):
                writer.transport.abort()
            in_progress = sum(one.state == "receiving" for one in self._connections)
            if self._broken_handshakes - in_progress >= MAX_BROKEN_HANDSHAKES:
                self._broken_handshakes = in_progress
                gc.collect()

    def _has_room(self, address: str) -> bool:
        """Whether one more connection may be served; the one that was idle or slow for longest makes room for it.

        If none is, an address that has more than half of all places makes room for another address.
        """
        if len(self._connections) < self.most_connections:
            return True
        slow_seconds = asyncio.get_running_loop().time() - self.slow_seconds
        idle = [one for one in self._connections if one.state == "idle"]
        slow = [one for one in self._connections if one.state == "receiving" and one.since_seconds <= slow_seconds]
        unread = [one for one in self._unread() if one.since_seconds <= slow_seconds]
        crowd, count = Counter(one.address for one in self._connections).most_common(1)[0]
        receiving = [one for one in self._connections if one.state == "receiving" and one.address == crowd]
        crowding = receiving if crowd != address and 2 * count > self.most_connections else []
        longest = min(idle or slow or unread or crowding, key=lambda one: one.since_seconds, default=None)
        if longest is None:
            return False
        self.pages.refused_total += longest.state == "receiving"
        longest.hang_up()
        self._connections.remove(longest)
        return True

    def _unread(self) -> list[_Connection]:
        """The connections whose client has not read its answer, the longest waiting first."""
        unread = (one for one in self._connections if one.transport.get_write_buffer_size())
        return sorted(unread, key=lambda one: one.since_seconds)

    def _drop_unread(self, more_bytes: int) -> None:
        """Hang up on clients that do not read their answers until so much more fits into memory."""
        unread = self._unread()
        unsent_bytes = more_bytes + sum(one.transport.get_write_buffer_size() for one in unread)
        for one in unread:
            if unsent_bytes <= MAX_UNSENT_BYTES:
                return
            unsent_bytes -= one.transport.get_write_buffer_size()
            one.hang_up()

    async def _exchange(
        self, connection: _Connection, begun: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer a request whose first bytes were read; return whether the connection can serve another one."""
        keeps = bodiless = False
        async with asyncio.timeout(self.request_seconds):
            try:
                head = begun + await reader.readuntil(b"\r\n\r\n")
                connection.become("answering")
                request = parse_request(head)
                bodiless = request.method == "HEAD"
                answer, keeps = await self._answer(request, connection.address), request.keeps
            except asyncio.LimitOverrunError:
                reason = f"the headers exceed {MAX_HEAD_BYTES >> 10} KiB"
                answer = problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)
            except BadRequestError:
                answer = problem(HTTPStatus.BAD_REQUEST, "not a valid HTTP/1.1 request")
            except (OSError, asyncio.IncompleteReadError):
                raise
            except Exception:  # noqa: BLE001  an unforeseen error costs this answer alone
                _log.error("internal error", exc_info=True)
                answer = problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the kvdiag log")
        sent = _head(answer, self.access.headers, keeps=keeps) + (b"" if bodiless else answer.body)
        self._drop_unread(len(sent))
        writer.write(sent)
        async with asyncio.timeout(self.request_seconds):
            await writer.drain()
            # A client that pipelines many requests must not be answered all of them before others have a turn.
            await asyncio.sleep(0)
        return keeps


def _head(answer: Answer, more: tuple[tuple[str, str], ...], *, keeps: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Server: kvdiag/{kvdiag.__version__}",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        *(f"{name}: {value}" for name, value in {"X-Content-Type-Options": "nosniff", **dict(more)}.items()),
        *(f"{name}: {value}" for name, value in answer.headers),
        f"Connection: {'keep-alive' if keeps else 'close'}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
