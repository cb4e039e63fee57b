"""The HTTP shell of `kvdiag serve`: GET and HEAD of a few paths, on the daemon's own event loop.

Nothing is read or judged for a request: it is answered from the newest snapshot, whose page is rendered once however
often it is asked for. Requests are bounded in size, in time and in number. A connection is kept for the next request,
as scrapers ask for, until its place is wanted by somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

import kvdiag
from kvdiag.admissions import Admissions
from kvdiag.ledger import ledger
from kvdiag.model import Sample, Snapshot
from kvdiag.outputs import jsondoc, status_page
from kvdiag.outputs.metrics import registry

_log = structlog.get_logger()

MAX_HEAD_BYTES = 16 * 2**10
REQUEST_SECONDS = 5.0
"""For a whole request; as long again for its answer."""

SLOW_SECONDS = 1.0
"""After which a request that is not whole gives way like a connection without any: scrapers send theirs at once."""

IDLE_SECONDS = 150.0
"""Until the next request of a connection: two of the slowest usual scrapes, each minute, and some to spare."""

STOP_SECONDS = 0.5
"""For answers that are being made when the port closes."""

MAX_CONNECTIONS = 256
"""At once. One more takes the place of the one that has waited longest for its next request, or else for the rest of
one, or is closed at the door. A Prometheus has one, a person's browser six."""

MAX_TLS_CONNECTIONS = 64
"""The same with TLS, where Python keeps some 280 KiB for each: 256 of them would take more than all else, and more than
the manifests give."""

MOST_BROKEN_HANDSHAKES = 32
"""Until what they leave behind is collected: as much again, in circles, which Python by itself looks for seldom."""

MAX_NAMES = 256

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_VERSION = "1.0.0"

VERSION = re.compile(r"HTTP/1\.\d", re.ASCII)
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\0\r\n]*)")
"""A header's line. A line feed within it would hide another header from us that a proxy before us has seen."""

NEVER = re.compile(r"q=0(\.0*)?")
"""Of a form that the client asks not to be sent (RFC 9110, 12.4.2)."""

STATUS_SECONDS = 2.0
"""How long the status page is kept: who asks more often gets the same one."""

NOT_KEPT = ("Cache-Control", "no-store")
"""Advice is for the one who asked."""

STATUS_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("Cache-Control", "no-store"),
)
"""The page has no script, loads nothing, and stands in no other's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request's line and those of its headers that matter."""

    method: str
    path: str
    names: tuple[str, ...] = ()
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    openmetrics: bool = False
    """Whether the page is wanted as OpenMetrics, and not as Prometheus' text."""
    authorization: str = ""
    packed: bool = False
    keeps: bool = False
    """Whether the connection can serve another request: the client has not said otherwise, and sends no body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is answered."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may read. `allow` is asked for the Authorization of a request, and says `None` where it cannot tell now."""

    allow: Callable[[str], Awaitable[bool | None]] | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Pages:
    """Answers from snapshots."""

    newest: Callable[[], Snapshot]
    history: Callable[[], tuple[Sample, ...]] = tuple
    """The samples of the last hours, in ascending time."""
    now_seconds: Callable[[], float] = time
    _admissions: Admissions = field(init=False, default_factory=Admissions)
    _registry: CollectorRegistry = field(init=False)
    _rendered: dict[tuple[str, bool], Answer] = field(init=False, default_factory=dict)
    _of: Snapshot | None = field(init=False, default=None)
    _status: tuple[float, Answer] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Make the registry once."""
        self._registry = registry(self.newest)

    def answer(self, request: Request) -> Answer:
        """The answer to a request."""
        if request.method not in ("GET", "HEAD"):
            return _problem(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is served", ("Allow", "GET, HEAD"))
        if request.path == "/metrics":
            return self._metrics(request)
        if request.path == "/api/v1/diagnosis":
            diagnosis = self.newest().diagnosis
            if diagnosis is None:
                return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "there is no diagnosis yet: ask again in some seconds")
            return _json(jsondoc.document(diagnosis))
        if request.path == "/api/v1/ledger":
            now = self.newest()
            return _json(jsondoc.audit_document(now.facts, now.newest, ledger(now.newest, now.facts), now.newest.gaps))
        if request.path == "/api/v1/admission":
            try:
                return _json(self._admissions.answer(request.query, self.newest(), self.now_seconds()), NOT_KEPT)
            except ValueError as error:
                return _problem(HTTPStatus.BAD_REQUEST, str(error))
        if request.path == "/-/healthy":
            return Answer(body=b"kvdiag is healthy.\n")
        if request.path == "/-/ready":
            if self.newest().newest.at_seconds:
                return Answer(body=b"kvdiag is ready.\n")
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "nothing has been read yet")
        if request.path == "/":
            return self._status_page()
        return _problem(HTTPStatus.NOT_FOUND, "there is no such page; / lists them")

    def _status_page(self) -> Answer:
        now_seconds = self.now_seconds()
        if self._status is None or not 0.0 <= now_seconds - self._status[0] < STATUS_SECONDS:
            body = status_page.page(self.newest(), self.history(), now_seconds).encode()
            answer = Answer(body=body, content_type="text/html; charset=utf-8", headers=STATUS_HEADERS)
            self._status = (now_seconds, answer)
        return self._status[1]

    def _metrics(self, request: Request) -> Answer:
        # Never the client's own words: what prometheus_client does not know of them it raises, or answers with.
        encoder, content_type = choose_encoder(
            f"{OPENMETRICS}; version={OPENMETRICS_VERSION}" if request.openmetrics else ""
        )
        if request.names:
            return _page(encoder(registry(self.newest, request.names)), content_type, packed=False)
        now, key = self.newest(), (content_type, request.packed)
        if self._of is not now:
            self._of = now
            self._rendered.clear()
        if key not in self._rendered:
            self._rendered[key] = _page(encoder(self._registry), content_type, packed=request.packed)
        return self._rendered[key]


def _page(text: bytes, content_type: str, *, packed: bool) -> Answer:
    if not packed:
        return Answer(body=text, content_type=content_type)
    body = gzip.compress(text, compresslevel=1)
    return Answer(body=body, content_type=content_type, headers=(("Content-Encoding", "gzip"),))


def _json(value: Any, *headers: tuple[str, str]) -> Answer:
    body = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    return Answer(body=body, content_type="application/json", headers=headers)


def _problem(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Answer:
    body = json.dumps({"error": text}).encode() + b"\n"
    return Answer(status=status, body=body, content_type="application/json", headers=headers)


class BadRequestError(Exception):
    """What came is no request of HTTP/1."""


def parse_request(head: bytes) -> Request:
    """The request of a head.

    Raises:
        BadRequestError: it is none.

    """
    first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    try:
        method, target, version = first.split(" ")
        parts = urlsplit(target)
        query = parse_qs(parts.query, max_num_fields=MAX_NAMES)
    except ValueError as error:
        raise BadRequestError from error
    if VERSION.fullmatch(version) is None or not target.startswith("/"):
        raise BadRequestError
    headers: dict[str, str] = {}
    for line in rest:
        found = HEADER.fullmatch(line)
        if found is None:
            raise BadRequestError
        name, value = found[1].lower(), found[2].strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Request(
        method=method,
        path=parts.path.rstrip("/") or "/",
        names=tuple(query.get("name[]", ())),
        query=query,
        openmetrics=_takes(headers.get("accept", ""), OPENMETRICS, version=OPENMETRICS_VERSION),
        authorization=headers.get("authorization", ""),
        packed=_takes(headers.get("accept-encoding", ""), "gzip"),
        keeps=version == "HTTP/1.1"
        and "close" not in headers.get("connection", "").lower()
        and headers.get("content-length", "0") == "0"
        and "transfer-encoding" not in headers,
    )


def _takes(accepted: str, form: str, version: str | None = None) -> bool:
    """Whether a client accepts a form, of this version where it names one, and does not refuse it."""
    for each in accepted.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [one.removeprefix("version=") for one in parameters if one.startswith("version=")]
        if kind == form and (version is None or versions in ([], [version])):
            return not any(NEVER.fullmatch(one) for one in parameters)
    return False


class WebServer:
    """Listens on one address within a running event loop."""

    def __init__(
        self,
        pages: Pages,
        *,
        request_seconds: float = REQUEST_SECONDS,
        slow_seconds: float = SLOW_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
        most_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Answer with `pages`; `start` opens the port.

        `request_seconds` is for a request, and again for its answer; `idle_seconds` for the wait for the next one. A
        request that takes `slow_seconds` loses its place where others want it.
        """
        self._pages = pages
        self.access = Access()
        """Whom requests from now on are answered, anybody unless told otherwise."""
        self._request_seconds = request_seconds
        self._slow_seconds = slow_seconds
        self._idle_seconds = idle_seconds
        self._most_connections = most_connections
        self._connections: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
        self._idle: dict[asyncio.Task[None], None] = {}
        """Those of the connections that wait for their next request, the longest waiting first."""
        self._begun: dict[asyncio.Task[None], float] = {}
        """Those whose handshake or request is under way, and since when, the longest first."""
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        self._broken_handshakes = 0
        """Since the last collection, with those that are under way."""

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Open the port, any free one for 0, and return it.

        Raises:
            OSError: it is taken, or may not be used.

        """
        # Not with the server's own TLS: nobody would count connections whose handshake does not end.
        self._tls = tls
        if tls is not None:
            self._most_connections = min(self._most_connections, MAX_TLS_CONNECTIONS)
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close the port and hang up."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            self._hang_up(task)
        if self._connections:
            _, answering = await asyncio.wait(self._connections, timeout=STOP_SECONDS)
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, request: Request) -> Answer:
        allowed = True if self.access.allow is None else await self.access.allow(request.authorization)
        if allowed is None:
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "too many passwords to look at: ask again in some seconds")
        if not allowed:
            challenge = ("WWW-Authenticate", 'Basic realm="kvdiag"')
            return _problem(HTTPStatus.UNAUTHORIZED, "user and password are wanted", challenge)
        return self._pages.answer(request)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or not self._has_room():
            writer.transport.abort()
            return
        self._connections[task] = writer.transport
        self._begun[task] = asyncio.get_running_loop().time()
        try:
            if self._tls is not None:
                self._broken_handshakes += 1
                await writer.start_tls(self._tls, ssl_handshake_timeout=self._request_seconds)
                self._broken_handshakes -= 1
                self._connections[task] = writer.transport
            begun = b""
            while await self._exchange(task, begun, reader, writer):
                self._idle[task] = None
                async with asyncio.timeout(self._idle_seconds):
                    begun = await reader.readexactly(1)
                self._idle.pop(task, None)
                self._begun[task] = asyncio.get_running_loop().time()
            async with asyncio.timeout(self._request_seconds):
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone, or is not worth waiting for
        except asyncio.CancelledError:
            pass  # hung up on; asyncio's streams before 3.12 take a cancelled task for a mistake
        finally:
            self._idle.pop(task, None)
            self._begun.pop(task, None)
            self._connections.pop(task, None)
            with contextlib.suppress(OSError):
                writer.transport.abort()
            if self._broken_handshakes - len(self._begun) >= MOST_BROKEN_HANDSHAKES:
                self._broken_handshakes = len(self._begun)
                gc.collect()

    def _has_room(self) -> bool:
        """Whether one more connection may be served; one that has been idle, or slow, for longest makes room for it."""
        if len(self._connections) < self._most_connections:
            return True
        longest = next(iter(self._idle), None)
        if longest is None:
            longest, since_seconds = next(iter(self._begun.items()), (None, 0.0))
            if longest is None or asyncio.get_running_loop().time() - since_seconds < self._slow_seconds:
                return False
        self._hang_up(longest)
        self._idle.pop(longest, None)
        self._begun.pop(longest, None)
        self._connections.pop(longest)
        return True

    def _hang_up(self, task: asyncio.Task[None]) -> None:
        if task in self._begun:
            # asyncio takes a handshake whose transport is aborted for one that is done.
            task.cancel()
        else:
            self._connections[task].abort()

    async def _exchange(
        self, task: asyncio.Task[None], begun: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer a request whose first bytes were read; whether the connection is good for another one.

        Raises:
            OSError, TimeoutError, asyncio.IncompleteReadError: the client has gone, or takes too long.

        """
        keeps = bodiless = False
        async with asyncio.timeout(self._request_seconds):
            try:
                head = begun + await reader.readuntil(b"\r\n\r\n")
                self._begun.pop(task, None)
                request = parse_request(head)
                bodiless = request.method == "HEAD"
                answer, keeps = await self._answer(request), request.keeps
            except (BadRequestError, asyncio.LimitOverrunError):
                answer = _problem(HTTPStatus.BAD_REQUEST, "that is no request of HTTP/1.1")
            except (OSError, asyncio.IncompleteReadError):
                raise
            except Exception:  # noqa: BLE001  what nobody foresaw costs this answer alone
                _log.error("mistake", exc_info=True)
                answer = _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "kvdiag has made a mistake: its log tells which")
        writer.write(_head(answer, self.access.headers, keeps=keeps) + (b"" if bodiless else answer.body))
        async with asyncio.timeout(self._request_seconds):
            await writer.drain()
            # Who sends many requests at once would be answered all of them before anybody else has a turn.
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
