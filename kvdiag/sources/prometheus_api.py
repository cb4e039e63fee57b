"""Queries a Prometheus, or any server with its HTTP API, for raw samples.

An instant query of a range vector (`selector[5h]` at a time) returns samples as scraped, without stale markers;
query_range would resample them. Queries are limited in size and time. One that asks for too much, or fails, is divided
where it selects several replicas, so that only what then fails is lost; one that still asks for too much is split in
halves of time. One that failed while the server was busy is repeated once, after the pause that the server asks for.

After a few queries without an answer, and after more errors in a row, the server may fail for a few replicas or for
all: whether it works is asked by a query that it has answered before. If that has no answer, no further one is sent.
"""

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import httpx2

from kvdiag.formatting import format_count, format_duration
from kvdiag.sources.http import UNPACKED, TooMuchError, Unreadable, explain, gathered, unpacked
from kvdiag.sources.prometheus_answers import (
    MAX_POINTS,
    History,
    Labels,
    LostHistory,
    RefusedError,
    TooSlowError,
    add_samples,
    answer_warnings,
    decoded_answer,
    not_json_error,
    query_error,
    sample_value,
    series_labels,
)
from kvdiag.sources.prometheus_names import escaped

MAX_ANSWER_BYTES = 24 * 2**20
"""A sample takes 20 to 40 bytes, so `POINTS_AT_ONCE` of them fit."""

MAX_SERIES = 100_000
"""Listed series in total, beyond which `--match` must select fewer replicas; 1,000 replicas have 30,000."""

SERIES_AT_ONCE = 25_000
"""The same that one list may have."""

MAX_LABELS_BYTES = 128 * 2**20
"""Memory for distinct labels: the size of each value plus `LABEL_BYTES`."""

LABEL_BYTES = 200

MAX_SECONDS = 1800.0
"""Time limit for all queries to one server; a day of 1,000 replicas takes two minutes."""

POINTS_AT_ONCE = 300_000
"""Samples that one query may return. Prometheus refuses from 50 million on, and holds them in memory until then."""

MIN_SECONDS = 300.0
"""The shortest interval, which is not halved again: no query for 5 minutes is too large."""

MAX_FAILURES = 3
"""Queries without an answer in a row, after which no further one is sent: a hung server would take hours."""

MAX_SLOW = 9
"""The same in total, from which they are not taken for those of a few replicas: each may take as long as --timeout."""

SLOW_ERROR_SECONDS = 5.0
"""From which an error counts as no answer: a gateway waits so long, or longer, for a server that hangs."""

MAX_ERRORS = 8
"""Answers in a row that are errors, after which a query is sent that had an answer before."""

MAX_UNPROVEN = 128
"""The same while no query for samples had an answer, after which no further one is sent."""

RETRY_SECONDS = 0.5
"""Pause before a failed query is repeated, and after a first answer that the server is busy; doubled for each next."""

FORBIDDEN = (401, 403)
"""To every query alike."""

BUSY = (429, 503)
MAX_PAUSE_SECONDS, MAX_PAUSES_SECONDS = 30.0, 60.0
"""Longest pause that a busy server is given even if it asks for more, and of all pauses together."""

Form = Sequence[tuple[str, str]]


class Query(Protocol):
    """What is asked for: a selector, which may be divided."""

    @property
    def selector(self) -> str:
        """In PromQL."""

    def halves(self) -> Sequence[Self]:
        """Two that together select the same; none if it cannot be divided."""

    def selects(self, series: Labels) -> bool:
        """Whether it selects a series."""


Q = TypeVar("Q", bound=Query)
Lost = tuple[Q, LostHistory]
"""An interval that could not be read, and the smallest query for it that was sent."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A selector that is not divided."""

    selector: str

    def halves(self) -> Sequence[Self]:
        """None."""
        return ()

    def selects(self, series: Labels) -> bool:  # noqa: ARG002
        """Any: its matchers are not evaluated here."""
        return True


class PrometheusSource:
    """One server's API. The client's base URL is where `/api/v1` begins; its headers carry the credentials."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        seconds: float,
        *,
        names: Iterable[str] = (),
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Query through `client`, with a time limit of `seconds` per answer; `names` are found escaped, too."""
        self._client = client
        self._seconds = seconds
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._names = {escaped(name): name for name in names}
        self._until_seconds = clock() + MAX_SECONDS
        self._listed: dict[Labels, Labels] = {}
        self._labels: dict[tuple[str, str], tuple[str, str]] = {}
        self._labels_bytes = 0
        self._failures = self._errors = self._slow = 0
        self._took_seconds = 0.0
        self._last = ""
        self._proven: Form | None = None
        self._busy = 0
        self._pause_seconds, self._pauses_seconds = 0.0, MAX_PAUSES_SECONDS
        self._answered = False
        self.warnings: dict[str, None] = {}
        """Warnings from the server while it listed series, such as a storage node that did not answer."""

    async def _refusal(self) -> str | None:
        """Why no further query is sent: too many failed in a row, or the time limit is reached; `None` if one is."""
        if self._clock() > self._until_seconds:
            return f"the queries have taken more than {format_duration(MAX_SECONDS)}: narrow --match or --window"
        slow = self._failures == MAX_FAILURES and self._proven is not None and self._slow < MAX_SLOW
        if slow or (self._failures < MAX_FAILURES and self._errors and self._errors % MAX_ERRORS == 0):
            await self._prove()
        return self._last if self._failures >= MAX_FAILURES else None

    async def _prove(self) -> None:
        """Ask for what had an answer before; without one the server does not work, be it for all replicas or for one.

        While nothing had an answer, many errors are taken for those of the server.
        """
        if self._proven is None:
            self._failures = MAX_FAILURES if self._errors >= MAX_UNPROVEN else self._failures
            return
        try:
            await self._ask("/api/v1/query", self._proven)
            self._errors = self._failures = 0
        except Unreadable:
            self._failures = MAX_FAILURES + 1

    def _failed(self, error: Unreadable) -> None:
        """Count a query that failed and cannot be made smaller."""
        slow = error.status == httpx2.codes.GATEWAY_TIMEOUT or self._took_seconds >= SLOW_ERROR_SECONDS
        if error.status is None or error.status in FORBIDDEN or slow:
            self._failures += 1
            self._slow += 1
        else:
            self._errors += 1
        self._last = str(error)

    async def series(self, selectors: Sequence[str], start_seconds: float, end_seconds: float) -> list[Labels]:
        """The series that match any of the selectors and may have samples between two times.

        Raises:
            TooMuchError: more than one answer may have.
            Unreadable: no answer, an error, or more series in total than the limit.
        """
        form = [("match[]", selector) for selector in selectors]
        form += [("start", _time(start_seconds)), ("end", _time(end_seconds))]
        if (refusal := await self._refusal()) is not None:
            raise TooSlowError("failed", refusal)
        answer = await self._patiently("/api/v1/series", form)
        data = answer.get("data")
        if not isinstance(data, list):
            raise RefusedError("failed", "/api/v1/series returned no list of series: is this a Prometheus API?")
        if len(data) > SERIES_AT_ONCE:
            raise TooMuchError("failed", f"more than {format_count(SERIES_AT_ONCE)} series: narrow --match")
        self.warnings |= answer_warnings(answer)
        return [self._known(series_labels(one, self._names)) for one in data]

    def _known(self, series: Labels) -> Labels:
        """The same series, with each distinct label stored once; RefusedError beyond the limits."""
        if (known := self._listed.get(series)) is not None:
            return known
        for label in series:
            if self._labels.setdefault(label, label) is label:
                self._labels_bytes += LABEL_BYTES + sys.getsizeof(label[1])
        if len(self._listed) >= MAX_SERIES or self._labels_bytes > MAX_LABELS_BYTES:
            what = f"{format_count(len(self._listed))} series match, with {format_count(len(self._labels))} labels"
            raise RefusedError("failed", f"{what}, which is more than kvdiag reads: narrow --match")
        shared = tuple(self._labels[label] for label in series)
        self._listed[shared] = shared
        return shared

    async def raw(self, query: Q, start_seconds: float, end_seconds: float, into: History) -> list[Lost[Q]]:
        """Add the raw samples that a query selects, start <= time <= end, and return what could not be read."""
        return await self._samples(query, start_seconds, end_seconds, into, newest=False)

    async def newest(self, query: Q, start_seconds: float, end_seconds: float, into: History) -> list[Lost[Q]]:
        """Add only the newest sample of each series, dated at the end of the interval; as `raw` otherwise."""
        return await self._samples(query, start_seconds, end_seconds, into, newest=True)

    async def _samples(
        self, query: Q, start_seconds: float, end_seconds: float, into: History, *, newest: bool
    ) -> list[Lost[Q]]:
        lost: list[Lost[Q]] = []
        # Each with whether a larger one has just failed. Those for one series are read in ascending time.
        left = [(query, start_seconds, end_seconds, False)]
        while left:
            one, start, end, is_part = left.pop()
            reason = await self._refusal()
            if reason is not None or into.is_full:
                full = f"more than {format_count(MAX_POINTS)} samples: shorten --window"
                reason = f"not queried: {reason}" if reason is not None else full
                lost.append((one, LostHistory(start_seconds=start, end_seconds=end, reason=reason)))
                continue
            form = _form(one.selector, start, end, newest=newest)
            try:
                answer = await (self._ask("/api/v1/query", form) if is_part else self._patiently("/api/v1/query", form))
                count = add_samples(answer, start, end, into, self._names, one.selects)
            except Unreadable as error:
                if _may_be_split(error) and (halves := one.halves()):
                    left += [(half, start, end, True) for half in reversed(halves)]
                    continue
                shorter = not newest and end - start > MIN_SECONDS
                too_much = isinstance(error, TooMuchError)
                if not (too_much and shorter):
                    self._failed(error)
                # Half the interval may be small enough, or fast enough.
                patient = max(self._failures, self._slow) < MAX_FAILURES
                if shorter and (too_much or isinstance(error, TooSlowError)) and patient:
                    midpoint = (start + end) / 2.0
                    left += [(one, midpoint, end, is_part), (one, start, midpoint, is_part)]
                else:
                    lost.append((one, LostHistory(start_seconds=start, end_seconds=end, reason=str(error))))
                continue
            into.points += 0 if newest else count
            self._failures = self._errors = 0
            self._proven = _form(one.selector, start, end, newest=True)
        return lost

    async def _patiently(self, path: str, form: Form) -> Mapping[str, Any]:
        """One answer; the query is repeated once if the server was busy, failed, or the connection broke."""
        try:
            return await self._ask(path, form)
        except (TooMuchError, TooSlowError, RefusedError):
            raise
        except Unreadable as error:
            if error.status not in BUSY:
                await asyncio.sleep(self._retry_seconds)
            return await self._ask(path, form)

    async def number(self, query: str) -> float | None:
        """The single value of a query now, by the server's clock; `None` if the result is empty.

        Raises:
            Unreadable: no answer, an error, or several values.
        """
        answer = await self._patiently("/api/v1/query", [("query", query)])
        data: Any = answer.get("data")
        try:
            values = [data["result"]] if data["resultType"] == "scalar" else [one["value"] for one in data["result"]]
            numbers = [sample_value(text) for _, text in values]
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("failed", "the answer is not a value: is this a Prometheus API?") from error
        if len(numbers) > 1:
            raise RefusedError("failed", f"the answer has {len(numbers)} values instead of one")
        return numbers[0] if numbers and math.isfinite(numbers[0]) else None

    async def _ask(self, path: str, form: Form) -> dict[str, Any]:
        if (pause := min(self._pause_seconds, self._pauses_seconds)) > 0.0:
            self._pause_seconds = 0.0
            self._pauses_seconds -= pause
            await asyncio.sleep(pause)
        began_seconds = self._clock()
        try:
            async with asyncio.timeout(self._seconds):
                status, body, after = await self._post(path, form)
        except TimeoutError as error:
            late = f"no complete answer within {format_duration(self._seconds)} on {path}"
            raise TooSlowError("failed", f"{late}: narrow --match, or raise --timeout") from error
        except httpx2.HTTPError as error:
            ended = isinstance(error, httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError)
            raise Unreadable("failed", explain(error) + (self._closed() if ended else "")) from error
        except OSError as error:
            # A certificate rejected after the handshake, which the client does not report as an HTTP error.
            raise Unreadable("failed", f"the connection was lost{self._closed()}") from error
        finally:
            self._took_seconds = self._clock() - began_seconds
        self._answered = True
        self._take_note(status, after)
        decoded = decoded_answer(body, path)
        if status in FORBIDDEN:
            reason = f"{status} on {path}: pass --token-file, or --user with a password"
            raise RefusedError("failed", reason, status=status)
        if decoded is None:
            raise not_json_error(status, path, body)
        if decoded.get("status") != "success" or status != httpx2.codes.OK:
            raise query_error(status, path, decoded)
        return decoded

    def _closed(self) -> str:
        """A hint for a TLS connection that was closed: TLS 1.3 requests the client's certificate last."""
        https = self._client.base_url.scheme == "https"
        return "; if the server requires a client certificate, pass --cert-file" if https and not self._answered else ""

    def _take_note(self, status: int, retry_after: str | None) -> None:
        """Let a busy server rest before the next query: as long as it asks for, else longer each time."""
        if status not in BUSY:
            self._busy = 0
            return
        seconds = self._retry_seconds * 2.0**self._busy
        self._busy = min(self._busy + 1, 8)
        if retry_after is not None and re.fullmatch("[0-9]{1,9}", retry_after):
            seconds = float(retry_after)
        self._pause_seconds = min(seconds, MAX_PAUSE_SECONDS)

    async def _post(self, path: str, form: Form) -> tuple[int, bytearray, str | None]:
        """The status, the body, and the pause that a busy server asks for."""
        data: dict[str, list[str]] = {}
        for name, value in form:
            data.setdefault(name, []).append(value)
        # A selector of 200 pods exceeds the length limit of URLs.
        async with (
            self._client.stream("POST", path.lstrip("/"), data=data, headers=UNPACKED) as response,
            aclosing(unpacked(response, path)) as chunks,
        ):
            body = await gathered(chunks, MAX_ANSWER_BYTES, f"{path}: narrow --match")
            return response.status_code, body, response.headers.get("retry-after")


def _may_be_split(error: Unreadable) -> bool:
    """Whether a smaller selector may succeed: the server answers, is not busy, and does not refuse all queries."""
    if isinstance(error, TooMuchError):
        return True
    return error.status is not None and error.status not in (*BUSY, *FORBIDDEN)


def _form(selector: str, start_seconds: float, end_seconds: float, *, newest: bool) -> Form:
    """The query for the samples of an interval, or for the newest ones in it."""
    interval = f"{selector}[{_milliseconds(start_seconds, end_seconds)}]"
    return [("query", f"last_over_time({interval})" if newest else interval), ("time", _time(end_seconds))]


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"


def _milliseconds(start_seconds: float, end_seconds: float) -> str:
    # Prometheus 3 and VictoriaMetrics leave out a sample at the very start of a range.
    return f"{round((end_seconds - start_seconds) * 1000.0) + 1}ms"
