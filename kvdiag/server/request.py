"""Requests of HTTP/1, parsed by h11 and reduced to what the daemon needs.

The contract for every reader of a `Request`: its head was complete and valid HTTP/1.0 or 1.1, or `BadRequestError` was
raised. Its texts are untrusted, the path is as sent but for trailing slashes, repeated headers are joined by commas,
and a request with a body is answered but is the last one of its connection.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import parse_qs

import h11

MAX_NAMES = 256

MAX_KEPT_HEADS = 16
"""Heads whose requests are kept: a scraper sends the same one each time, and h11 takes longer than the answer."""

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_VERSION = "1.0.0"

PROXY_HEADERS = frozenset((b"forwarded", b"via", b"x-real-ip"))
"""With those that begin with x-forwarded-."""

NEVER = re.compile(r"q=0(\.0*)?")
"""The weight of a content type that the client refuses (RFC 9110, 12.4.2)."""


class BadRequestError(Exception):
    """The bytes are not a request of HTTP/1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request's line and the headers that matter."""

    method: str
    path: str
    names: tuple[str, ...] = ()
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    openmetrics: bool = False
    """Whether the client accepts OpenMetrics; otherwise it gets Prometheus' text format."""
    host: str = ""
    """The Host header: the address that the client has connected to, in its view; empty if there is none."""
    authorization: str = ""
    from_page: bool = False
    """Whether a browser sends it for a page: it says so by Origin or Sec-Fetch-Site."""
    forwarded: bool = False
    """Whether a proxy names another client than the one that is connected."""
    address: str = ""
    """The client's IP address."""
    packed: bool = False
    keeps: bool = False
    """Whether the connection can serve another request: the client does not close it, and sends no body."""


def parse_request(head: bytes) -> Request:
    """The request of a head, which ends in an empty line.

    Raises:
        BadRequestError: it is not a valid request.
    """
    # A password is not kept for longer than its answer takes.
    return _parsed(head) if b"authorization" in head.lower() else _kept(head)


def _parsed(head: bytes) -> Request:
    # h11 accepts a bare line feed as the end of a line; a proxy in front may not, and then reads other headers.
    if head.count(b"\n") != head.count(b"\r\n"):
        raise BadRequestError
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(head)
        request, end = connection.next_event(), connection.next_event()
    except h11.RemoteProtocolError as error:
        raise BadRequestError from error
    if not isinstance(request, h11.Request) or request.http_version not in (b"1.0", b"1.1"):
        raise BadRequestError
    if not request.target.startswith(b"/"):
        raise BadRequestError
    try:
        path, _, asked = request.target.decode("ascii").partition("?")
        query = parse_qs(asked, max_num_fields=MAX_NAMES)
    except ValueError as error:
        raise BadRequestError from error
    headers: dict[bytes, str] = {}
    for name, value in request.headers:
        text = value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return Request(
        method=request.method.decode("ascii"),
        path=path.rstrip("/") or "/",
        names=tuple(query.get("name[]", ())),
        query=query,
        openmetrics=_takes(headers.get(b"accept", ""), OPENMETRICS, version=OPENMETRICS_VERSION),
        host=headers.get(b"host", ""),
        authorization=headers.get(b"authorization", ""),
        from_page=b"origin" in headers or headers.get(b"sec-fetch-site", "none") != "none",
        forwarded=any(name in PROXY_HEADERS or name.startswith(b"x-forwarded-") for name in headers),
        packed=_takes(headers.get(b"accept-encoding", ""), "gzip"),
        keeps=isinstance(end, h11.EndOfMessage) and connection.their_state is h11.DONE,
    )


_kept = lru_cache(MAX_KEPT_HEADS)(_parsed)


def _takes(accepted: str, form: str, version: str | None = None) -> bool:
    """Whether a client accepts a content type, in this version if it names one, and does not refuse it."""
    for each in accepted.lower().split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [one.removeprefix("version=") for one in parameters if one.startswith("version=")]
        if kind == form and (version is None or versions in ([], [version])):
            return not any(NEVER.fullmatch(one) for one in parameters)
    return False
