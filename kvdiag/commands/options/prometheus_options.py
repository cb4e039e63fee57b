"""The options of `kvdiag diagnose --prometheus`, and the HTTP client that they make. No value of them is trusted."""

from __future__ import annotations

import base64
import math
import re
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import click
import httpx2

import kvdiag
from kvdiag.commands.options.addresses import pasted
from kvdiag.errors import KvdiagError
from kvdiag.feeds.history.prometheus_feed import Window

F = TypeVar("F", bound=Callable[..., Any])

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
MAX_SECRET_BYTES = 64 * 2**10
SUFFIXES = ("/api/v1/query_range", "/api/v1/query", "/api/v1/series", "/api/v1", "/graph", "/query")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
DEFAULT_WINDOW = "24h"
LEAST_WINDOW_SECONDS = 60.0
MAX_WINDOW_SECONDS = 31 * UNITS["d"]

NO_TIME = "is no time: give 2026-11-20T08:00:00Z or Unix seconds"

_LOOPBACK = re.compile(r"localhost$|127\.|::1$")
_PATH = click.Path(path_type=Path)


def prometheus_options(function: F) -> F:
    """Where the history is, whose, of which time, and how to be let in."""
    for option in reversed(
        (
            click.option("--prometheus", metavar="URL", help="Judge the history that this Prometheus API holds."),
            click.option(
                "--match", metavar="SELECTOR", default="", help="Only these servers, such as '{namespace=\"x\"}'."
            ),
            click.option(
                "--window",
                default=DEFAULT_WINDOW,
                show_default=True,
                help="How far back from --end, such as 90m, 24h, 7d.",
            ),
            click.option("--start", help="From here on instead (RFC 3339, as 2026-11-20T08:00:00Z, or Unix seconds)."),
            click.option("--end", help="Up to here instead of now."),
            click.option("--user", help="Name for basic auth; the password comes from --password-file."),
            click.option("--password-file", type=_PATH, help="File with the password (or KVDIAG_DIAGNOSE_PASSWORD)."),
            click.option("--password", hidden=True),
            click.option("--token-file", type=_PATH, help="File with a bearer token (or KVDIAG_DIAGNOSE_TOKEN)."),
            click.option("--token", hidden=True),
            click.option(
                "--header", "headers", multiple=True, metavar="NAME:VALUE", help="As X-Scope-OrgID:team (repeatable)."
            ),
            click.option("--ca-file", type=_PATH, help="Certificates to trust instead of the system's."),
            click.option("--cert-file", type=_PATH, help="Client certificate."),
            click.option("--key-file", type=_PATH, help="Its key, where that is a file of its own."),
            click.option("--insecure", is_flag=True, help="Do not check the server's certificate."),
            click.option(
                "--timeout",
                type=click.FloatRange(min=1.0, max=3600.0),
                default=ANSWER_SECONDS,
                show_default=True,
                help="Seconds for one answer.",
            ),
        )
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a Prometheus is reached: plain values, so that another process can be told."""

    url: str
    headers: tuple[tuple[str, str], ...]
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None
    insecure: bool
    seconds: float

    def client(self) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
        """A client for the server's API.

        Raises:
            KvdiagError: a certificate cannot be used.

        """
        return httpx2.AsyncClient(
            base_url=self.url,
            headers={"User-Agent": f"kvdiag/{kvdiag.__version__}", **dict(self.headers)},
            verify=self._trust(),
            timeout=httpx2.Timeout(self.seconds, connect=CONNECT_SECONDS),
            # A proxy of the environment is for other machines' servers.
            trust_env=not _LOOPBACK.match(urlsplit(self.url).hostname or ""),
        )

    def _trust(self) -> ssl.SSLContext:
        file = self.ca_file
        option = "--ca-file"
        try:
            context = ssl.create_default_context(cafile=file)
            if self.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert_file is not None:
                file, option = self.cert_file, "--cert-file"
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise KvdiagError(f"cannot use {file} as {option}: {error.strerror or error}") from error
        return context


def _no_password() -> str:
    """What answers instead of a prompt on the terminal."""
    raise KvdiagError("the client certificate's key is encrypted: give one that is not")


def access(
    url: str,
    *,
    user: str | None,
    password: str | None,
    password_file: Path | None,
    token: str | None,
    token_file: Path | None,
    headers: tuple[str, ...],
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    insecure: bool,
    timeout: float,
) -> Access:
    """How to reach the Prometheus that the options name.

    Raises:
        KvdiagError: a value cannot be meant.

    """
    address, own_user, own_password = _address(url)
    sent = dict(_header(header) for header in headers)
    token = read_secret(token, token_file)
    user = user or own_user
    secret = read_secret(password, password_file) or own_password
    if token and user:
        raise click.UsageError("give either --user or --token-file")
    if secret and not user:
        raise click.UsageError("a password needs --user")
    if key_file is not None and cert_file is None:
        raise click.UsageError("--key-file needs --cert-file")
    if token:
        sent["Authorization"] = f"Bearer {token}"
    elif user:
        pair = ":".join((user, secret or ""))
        sent["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    return Access(
        url=address,
        headers=tuple(sent.items()),
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        insecure=insecure,
        seconds=timeout,
    )


def _address(url: str) -> tuple[str, str | None, str | None]:
    refusal = f"{_shown(url)!r} is not the address of a Prometheus: give one as http://prometheus:9090"
    parts = pasted(url, SUFFIXES, refusal)
    host = parts.netloc.rpartition("@")[2]
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return urlunsplit(parts._replace(netloc=host, path=f"{parts.path.rstrip('/')}/")), user, password


def _shown(url: str) -> str:
    """An address without what stands before an @: it may be a password."""
    return url.rpartition("@")[2]


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name) or not (value.isascii() and value.isprintable()):
        # What has no name may be the value alone, a token for one.
        shown = f"{name[:40]!r}" if colon else "what was given with --header"
        raise KvdiagError(f"{shown} is no header: give it as NAME:VALUE")
    return name, value.strip()


def read_secret(value: str | None, file: Path | None) -> str | None:
    """The secret that was given, or stands in a file; `None` where there is none.

    Raises:
        KvdiagError: the file cannot be read, or what is in it cannot be meant.

    """
    if file is not None:
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_SECRET_BYTES)
            value = content.decode()
        except OSError as error:
            raise KvdiagError(f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise KvdiagError(f"{file} holds no text") from error
    # A secret that comes from a file often brings its line end.
    value = (value or "").strip()
    if not (value.isascii() and value.isprintable()):
        raise KvdiagError("the token or password has characters that no server takes: is it the right one?")
    return value or None


def matchers(text: str) -> str:
    """The matchers of --match without their braces.

    Raises:
        KvdiagError: it is no selector.

    """
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    one = r'\s*[A-Za-z_][A-Za-z0-9_]*\s*(=|!=|=~|!~)\s*"([^"\\\n]|\\.)*"\s*'
    if text.strip() and not re.fullmatch(rf"{one}(,{one})*,?\s*", text):
        raise KvdiagError(
            f'--match {text[:60]!r} is no selector: give it as \'{{namespace="x",model_name=~"llama.*"}}\''
        )
    return text.strip().rstrip(",")


def window_of(window: str, start: str | None, end: str | None, now_seconds: float) -> Window:
    """The time that the options name.

    Raises:
        KvdiagError: there is none such.

    """
    last = now_seconds if end is None else _moment("--end", end)
    first = last - _duration(window) if start is None else _moment("--start", start)
    if last - first < LEAST_WINDOW_SECONDS:
        raise KvdiagError("the window has to be a minute or more, and to end after it starts")
    if last - first > MAX_WINDOW_SECONDS:
        raise KvdiagError("the window is longer than 31 days: nothing that is judged needs more than a few")
    if first < 0 or first > now_seconds:
        raise KvdiagError("the window lies in the future, or before 1970: check --start, --end and --window")
    return Window(start_seconds=round(first, 3), end_seconds=round(min(last, now_seconds), 3))


def _moment(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise KvdiagError(f"{option} {text[:40]!r} {NO_TIME}") from error
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise KvdiagError(f"{option} {text[:40]!r} {NO_TIME}")
    return seconds


def _duration(text: str) -> float:
    parts = re.findall(r"(\d{1,9})([smhdw])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise KvdiagError(f"--window {text[:40]!r} is no duration: give one as 90m, 24h or 7d")
    return sum(int(number) * UNITS[unit] for number, unit in parts)
