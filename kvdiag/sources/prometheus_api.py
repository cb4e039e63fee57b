"""Queries a Prometheus, or any server with its HTTP API, for raw samples.

An instant query of a range vector (`selector[5h]` at a time) returns samples as scraped, without stale markers;
query_range would resample them. Queries are limited in size and time. One that asks for too much is split in halves of
time, one that failed while the server was busy is repeated once, and after a few failures in a row no further query is
sent. A query that could select less is left to the caller to split: only what then fails is lost.
"""

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

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
    series_labels,
)
from kvdiag.sources.prometheus_names import escaped

MAX_ANSWER_BYTES = 24 * 2**20
"""A sample takes 20 to 40 bytes, so `POINTS_AT_ONCE` of them fit."""

MAX_SERIES = 100_000
"""Listed series in total, beyond which `--match` must select fewer replicas; 1,000 replicas have 30,000."""

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

MAX_ERRORS = 8
"""The same for answers that are errors: they come soon, and those of a few replicas say nothing of the others."""

RETRY_SECONDS = 0.5
"""Pause before a failed query is repeated."""


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
        self._failures = self._errors = 0
        self._last = ""
        self._answered = False
        self.warnings: dict[str, None] = {}
        """Warnings from the server while it listed series, such as a storage node that did not answer."""

    @property
    def gave_up(self) -> bool:
        """Whether no further query is sent: too many failed in a row, or the time limit is reached."""
        if self._clock() > self._until_seconds:
            took = format_duration(MAX_SECONDS)
            self._last = f"the queries have taken more than {took}: narrow --match or --window"
            return True
        return self._failures >= MAX_FAILURES or self._errors >= MAX_ERRORS

    def _failed(self, error: Unreadable) -> None:
        """Count a query that failed and cannot be made smaller."""
        if isinstance(error, RefusedError) or error.status is None:
            self._failures += 1
        else:
            self._errors += 1
        self._last = str(error)

    async def series(self, selectors: Sequence[str], start_seconds: float, end_seconds: float) -> list[Labels]:
        """The series that match any of the selectors and may have samples between two times.

        Raises:
            Unreadable: no answer, an error, or more series than the limit.
        """
        form = [("match[]", selector) for selector in selectors]
        form += [("start", _time(start_seconds)), ("end", _time(end_seconds))]
        if self.gave_up:
            raise TooSlowError("failed", self._last)
        answer = await self._ask("/api/v1/series", form)
        data = answer.get("data")
        if not isinstance(data, list):
            raise RefusedError("failed", "/api/v1/series returned no list of series: is this a Prometheus API?")
        self.warnings |= answer_warnings(answer)
        return [self._known(series_labels(one, self._names)) for one in data]

    def _known(self, series: Labels) -> Labels:
        """The same series, with each distinct label stored once; TooMuchError beyond the limits."""
        if (known := self._listed.get(series)) is not None:
            return known
        for label in series:
            if self._labels.setdefault(label, label) is label:
                self._labels_bytes += LABEL_BYTES + sys.getsizeof(label[1])
        if len(self._listed) >= MAX_SERIES or self._labels_bytes > MAX_LABELS_BYTES:
            what = f"{format_count(len(self._listed))} series match, with {format_count(len(self._labels))} labels"
            raise TooMuchError("failed", f"{what}, which is more than kvdiag reads: narrow --match")
        shared = tuple(self._labels[label] for label in series)
        self._listed[shared] = shared
        return shared

    async def raw(
        self,
        selector: str,
        start_seconds: float,
        end_seconds: float,
        into: History,
        *,
        divisible: bool = False,
        again: bool = False,
    ) -> None:
        """Add the raw samples of a selector, start <= time <= end; intervals that cannot be read are `lost`.

        `again`: it is a part of one that has failed just now, so that it is not repeated.

        Raises:
            Unreadable: the server answers with an error or with too much, and the selector is `divisible`.
        """
        left = [(start_seconds, end_seconds)]
        while left:
            start, end = left.pop()
            given_up = self.gave_up
            lost = LostHistory(start_seconds=start, end_seconds=end, reason=f"not queried: {self._last}")
            if into.is_full:
                lost = replace(lost, reason=f"more than {format_count(MAX_POINTS)} samples: shorten --window")
            if given_up or into.is_full:
                into.lost.append(lost)
                continue
            try:
                answer = await self._patiently(selector, start, end, again=again)
                into.points += add_samples(answer, start, end, into, self._names)
                self._failures = self._errors = 0
            except Unreadable as error:
                if divisible and _may_be_split(error):
                    raise
                too_much = isinstance(error, TooMuchError)
                if not too_much or end - start <= MIN_SECONDS:
                    self._failed(error)
                # Half the interval may be small enough, or fast enough.
                if (too_much or isinstance(error, TooSlowError)) and end - start > MIN_SECONDS and not self.gave_up:
                    midpoint = (start + end) / 2.0
                    left += [(midpoint, end), (start, midpoint)]
                else:
                    into.lost.append(replace(lost, reason=str(error)))

    async def _patiently(
        self, selector: str, start_seconds: float, end_seconds: float, *, again: bool
    ) -> Mapping[str, Any]:
        """One answer; the query is repeated once if the server was busy or the connection broke."""
        span = _milliseconds(start_seconds, end_seconds)
        form = [("query", f"{selector}[{span}]"), ("time", _time(end_seconds))]
        try:
            return await self._ask("/api/v1/query", form)
        except (TooMuchError, TooSlowError, RefusedError):
            raise
        except Unreadable:
            if again:
                raise
            await asyncio.sleep(self._retry_seconds)
            return await self._ask("/api/v1/query", form)

    async def newest(
        self, selector: str, start_seconds: float, end_seconds: float, into: History, *, divisible: bool = False
    ) -> None:
        """Add only the newest sample of each series of a selector, dated at the end of the interval.

        Raises:
            Unreadable: as `raw`.
        """
        if self.gave_up or into.is_full:
            return
        span = _milliseconds(start_seconds, end_seconds)
        form = [("query", f"last_over_time({selector}[{span}])"), ("time", _time(end_seconds))]
        try:
            answer = await self._ask("/api/v1/query", form)
            add_samples(answer, start_seconds, end_seconds, into, self._names)
        except Unreadable as error:
            if divisible and _may_be_split(error):
                raise
            self._failed(error)
            into.lost.append(LostHistory(start_seconds=start_seconds, end_seconds=end_seconds, reason=str(error)))

    async def number(self, query: str) -> float | None:
        """The single value of a query now, by the server's clock; `None` if the result is empty.

        Raises:
            Unreadable: no answer, an error, or several values.
        """
        answer = await self._ask("/api/v1/query", [("query", query)])
        data: Any = answer.get("data")
        try:
            values = [data["result"]] if data["resultType"] == "scalar" else [one["value"] for one in data["result"]]
            numbers = [float(text) for _, text in values]
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("failed", "the answer is not a value: is this a Prometheus API?") from error
        if len(numbers) > 1:
            raise RefusedError("failed", f"the answer has {len(numbers)} values instead of one")
        return numbers[0] if numbers and math.isfinite(numbers[0]) else None

    async def _ask(self, path: str, form: Sequence[tuple[str, str]]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._seconds):
                status, body = await self._post(path, form)
        except TimeoutError as error:
            late = f"no complete answer within {format_duration(self._seconds)} on {path}"
            raise TooSlowError("failed", f"{late}: narrow --match, or raise --timeout") from error
        except httpx2.HTTPError as error:
            ended = isinstance(error, httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError)
            raise Unreadable("failed", explain(error) + (self._closed() if ended else "")) from error
        except OSError as error:
            # A certificate rejected after the handshake, which the client does not report as an HTTP error.
            raise Unreadable("failed", f"the connection was lost{self._closed()}") from error
        self._answered = True
        decoded = decoded_answer(body, path)
        if status in (401, 403):
            raise RefusedError("failed", f"{status} on {path}: pass --token-file, or --user with a password")
        if decoded is None:
            raise not_json_error(status, path, body)
        if decoded.get("status") != "success" or status != httpx2.codes.OK:
            raise query_error(status, path, decoded)
        return decoded

    def _closed(self) -> str:
        """A hint for a TLS connection that was closed: TLS 1.3 requests the client's certificate last."""
        https = self._client.base_url.scheme == "https"
        return "; if the server requires a client certificate, pass --cert-file" if https and not self._answered else ""

    async def _post(self, path: str, form: Sequence[tuple[str, str]]) -> tuple[int, bytearray]:
        data: dict[str, list[str]] = {}
        for name, value in form:
            data.setdefault(name, []).append(value)
        # A selector of 200 pods exceeds the length limit of URLs.
        async with (
            self._client.stream("POST", path.lstrip("/"), data=data, headers=UNPACKED) as response,
            aclosing(unpacked(response, path)) as chunks,
        ):
            return response.status_code, await gathered(chunks, MAX_ANSWER_BYTES, f"{path}: narrow --match")


def _may_be_split(error: Unreadable) -> bool:
    """Whether a smaller selector may succeed: the server answers, and refuses neither the address nor the password."""
    return isinstance(error, TooMuchError) or (error.status is not None and not isinstance(error, RefusedError))


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"


def _milliseconds(start_seconds: float, end_seconds: float) -> str:
    # Prometheus 3 and VictoriaMetrics leave out a sample at the very start of a range.
    return f"{round((end_seconds - start_seconds) * 1000.0) + 1}ms"


def any_of(label: str, values: Sequence[str], *, ending: str = "") -> str:
    """A matcher for any of these values, written so that the server can use its index.

    `ending` is a regular expression that may follow each of them.
    """
    # Escaped for RE2's regular expressions, then for a string of PromQL.
    texts = "|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", value) + ending for value in values)
    quoted = texts.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{quoted}"'


def named(names: Iterable[str]) -> str:
    """A matcher for metrics of any of these names, also where they are stored escaped."""
    names = set(names)
    return any_of("__name__", sorted(names | set(map(escaped, names))))


def selector(*matchers: str) -> str:
    """A vector selector from the non-empty matchers."""
    return "{" + ",".join(matcher for matcher in matchers if matcher) + "}"
