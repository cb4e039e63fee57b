"""Requests of HTTP/1, as much of them as the daemon has to know. What is no request is refused, never guessed at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

MAX_NAMES = 256

OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_VERSION = "1.0.0"

VERSION = re.compile(r"HTTP/1\.\d", re.ASCII)
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\0\r\n]*)")
"""A header's line. A line feed within it would hide another header from us that a proxy before us has seen."""

NEVER = re.compile(r"q=0(\.0*)?")
"""Of a form that the client asks not to be sent (RFC 9110, 12.4.2)."""


class BadRequestError(Exception):
    """What came is no request of HTTP/1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request's line and those of its headers that matter."""

    method: str
    path: str
    names: tuple[str, ...] = ()
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    openmetrics: bool = False
    """Whether the page is wanted as OpenMetrics, and not as Prometheus' text."""
    host: str = ""
    """The address that the client thinks it talks to, as its Host header has it; empty where it says none."""
    authorization: str = ""
    packed: bool = False
    keeps: bool = False
    """Whether the connection can serve another request: the client has not said otherwise, and sends no body."""


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
        host=headers.get("host", ""),
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
