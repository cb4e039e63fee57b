"""The options of `kvdiag diagnose --prometheus`, and the HTTP client that follows from them.

Every value is checked before a query is sent. An error names the option and a valid example, and repeats no value that
may be a secret. Matchers are checked by form, because they become part of queries. A start time replaces the window's
length; a window is one minute to 31 days long and ends now at the latest. `PrometheusAccess` holds plain values and no
client, because each process that reads a part of a fleet makes its own.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

from __future__ import annotations

import math
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import click
import httpx2

import kvdiag
from kvdiag.commands.options.addresses import basic_authorization, pasted, read_secret, without_user
from kvdiag.commands.options.common import CA_FILE, INSECURE, UNIT_SECONDS, collected, given_by, parse_duration
from kvdiag.commands.options.fleet_options import PrometheusFields
from kvdiag.engines import ENGINE_METRICS
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.ray_cluster import check_ray
from kvdiag.feeds.history.prometheus_feed import Window
from kvdiag.sources.http import no_cookies
from kvdiag.sources.prometheus_api import PrometheusSource

CONNECT_SECONDS = 10.0
SUFFIXES = ("/api/v1/query_range", "/api/v1/query", "/api/v1/series", "/api/v1", "/graph", "/query")
MIN_WINDOW_SECONDS = 60.0
MAX_WINDOW_SECONDS = 31 * UNIT_SECONDS["d"]

_LOOPBACK = re.compile(r"localhost$|127\.|::1$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusAccess:
    """How to reach a Prometheus: plain values, so that they can be passed to another process."""

    url: str
    headers: tuple[tuple[str, str], ...]
    options: PrometheusOptions

    @asynccontextmanager
    async def source(self) -> AsyncIterator[PrometheusSource]:
        """The server's API.

        Raises:
            KvdiagError: a certificate cannot be used.
        """
        async with httpx2.AsyncClient(
            base_url=self.url,
            headers={"User-Agent": f"kvdiag/{kvdiag.__version__}", **dict(self.headers)},
            verify=self._trust(),
            cookies=no_cookies(),
            timeout=httpx2.Timeout(self.options.timeout, connect=CONNECT_SECONDS),
            # The environment's proxy is not for servers on this machine.
            trust_env=not _LOOPBACK.match(urlsplit(self.url).hostname or ""),
        ) as client:
            yield PrometheusSource(client, self.options.timeout, names=ENGINE_METRICS)

    def _trust(self) -> ssl.SSLContext:
        options = self.options
        file, option = options.ca_file, "--ca-file"
        try:
            context = ssl.create_default_context(cafile=file)
            if options.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if options.cert_file is not None:
                file, option = options.cert_file, "--cert-file"
                context.load_cert_chain(options.cert_file, options.key_file, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise KvdiagError(f"cannot use {option} {file}: {error.strerror or error}") from error
        return context


def _no_password() -> str:
    """Fail instead of prompting on the terminal."""
    raise KvdiagError("the key of --cert-file is encrypted: give an unencrypted one")


@dataclass(frozen=True, kw_only=True)
class PrometheusOptions(PrometheusFields):
    """The API's address, the servers to diagnose, the time window, and the credentials."""

    start: str | None = given_by("Start time instead of --window: RFC 3339 or Unix seconds.")
    end: str | None = given_by("End time, default now: RFC 3339 or Unix seconds.")
    ca_file: Path | None = given_by(CA_FILE)
    insecure: bool = given_by(INSECURE, default=False)

    def access(self) -> PrometheusAccess:
        """Return how to reach the API.

        Raises:
            KvdiagError: a value is invalid.
        """
        shown = (self.prometheus or "").rpartition("@")[2]
        refusal = f"{shown!r} is not a Prometheus address: give one such as http://prometheus:9090"
        parts = pasted(self.prometheus or "", SUFFIXES, refusal)
        sent = dict(_header(header) for header in self.headers)
        token = read_secret(self.token, self.token_file)
        basic = basic_authorization(parts, self.user, self.password, self.password_file)
        if token and basic:
            raise click.UsageError("give either --user or --token-file")
        if self.ray is not None and self.workers is not None:
            raise click.UsageError("give either --workers or --ray")
        if self.ray is not None:
            check_ray(self.ray)
        if self.key_file is not None and self.cert_file is None:
            raise click.UsageError("--key-file needs --cert-file")
        if token or basic:
            sent["Authorization"] = f"Bearer {token}" if token else str(basic)
        return PrometheusAccess(
            url=urlunsplit(without_user(parts)._replace(path=f"{parts.path.rstrip('/')}/")),
            headers=tuple(sent.items()),
            options=self,
        )

    def matchers(self) -> str:
        """Return the matchers of --match without their braces.

        Raises:
            KvdiagError: it is not a selector.
        """
        text = self.match.strip()
        if text.startswith("{") and text.endswith("}"):
            text = text[1:-1]
        one = r'\s*[A-Za-z_][A-Za-z0-9_]*\s*(=|!=|=~|!~)\s*"([^"\\\n]|\\.)*"\s*'
        if text.strip() and not re.fullmatch(rf"{one}(,{one})*,?\s*", text):
            raise KvdiagError(
                f'--match {text[:60]!r} is not a selector: give one such as \'{{namespace="x",model_name=~"llama.*"}}\''
            )
        return text.strip().rstrip(",")

    def span(self, now_seconds: float) -> Window:
        """Return the time window that the options name.

        Raises:
            KvdiagError: a value is invalid, or the window is empty.
        """
        duration_seconds = parse_duration(self.window)
        if duration_seconds is None:
            raise KvdiagError(f"--window {self.window[:40]!r} is not a duration: give one such as 90m, 24h or 7d")
        last = now_seconds if self.end is None else _moment("--end", self.end)
        first = last - duration_seconds if self.start is None else _moment("--start", self.start)
        if last - first < MIN_WINDOW_SECONDS:
            raise KvdiagError("the window must be at least 1 min long: check --start, --end and --window")
        if last - first > MAX_WINDOW_SECONDS:
            raise KvdiagError("the window is longer than 31 days, the maximum: a few days are enough for every verdict")
        if first < 0 or first > now_seconds:
            raise KvdiagError("the window is in the future or before 1970: check --start, --end and --window")
        return Window(start_seconds=round(first, 3), end_seconds=round(min(last, now_seconds), 3))


prometheus_options = collected(PrometheusOptions, "history")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name) or not (value.isascii() and value.isprintable()):
        # What has no name may be the value alone, a token for one.
        shown = f"{name[:40]!r}" if colon else "the value of --header"
        raise KvdiagError(f"{shown} is not a header: give NAME:VALUE")
    return name, value.strip()


def _moment(option: str, text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(seconds := float(text)):
            return seconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        refusal = "is not a time: give one such as 2026-11-20T08:00:00Z, or Unix seconds"
        raise KvdiagError(f"{option} {text[:40]!r} {refusal}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
