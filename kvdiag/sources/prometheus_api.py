"""History that Prometheus holds, or anything that speaks its HTTP API: raw samples and nothing else.

An instant query of a range vector (`selector[5h]` at a time) gives samples as they were scraped, stale markers left
out; query_range would give points of its own, resampled. Nothing is trusted: answers are bounded in size and time,
every point is checked, and a query that asks for too much is asked again in halves.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from operator import lt
from typing import Any

import httpx2

from kvdiag.sources.bounded_json import TooManyValuesError, decode
from kvdiag.sources.http import UNPACKED, TooMuchError, Unreadable, explain, gathered, unpacked

SOURCE = "prometheus"

MAX_ANSWER_BYTES = 24 * 2**20
"""A point takes 20 to 40 bytes, so that `POINTS_AT_ONCE` of them stay below it."""

MAX_ANSWER_VALUES = 1_000_000
"""Of which a point has three, and a series one for each of its labels."""

MAX_SERIES = 100_000
"""Of all lists of series together, after which `--match` has to name fewer replicas; 1,000 of them have 30,000."""

MAX_LABELS_BYTES = 128 * 2**20
"""For what they are labelled with, each label once: a value's own size, and `LABEL_BYTES` beside it."""

LABEL_BYTES = 200

MAX_POINTS = 3_000_000
"""Of one history: of a replica with 40 series, 13 days at a sample every 15 s. Each takes 16 bytes, and its row 100."""

SERIES_POINTS = 64
"""What a series takes beside its points, in such."""

MAX_SECONDS = 1800.0
"""For everything that is asked of one server; 1,000 replicas of a day take two minutes."""

POINTS_AT_ONCE = 300_000
"""Points that one query may bring. Prometheus itself refuses from 50 million on, and works in memory until then."""

LEAST_SECONDS = 300.0
"""A stretch of time that is not halved again: of 5 minutes no query is too much."""

MAX_FAILURES = 3
"""Queries in a row that failed, after which the others are not asked: a server that hangs would take hours."""

PATIENCE_SECONDS = 0.5
"""Pause before a query that the server was too busy for is asked again."""

MAX_REASON_CHARACTERS = 160
MAX_WARNINGS = 16

_TOO_MUCH = re.compile(r"too many|too large|more than|exceed|limit|max[_ -]", re.IGNORECASE)
"""How Prometheus, Thanos, Mimir and VictoriaMetrics say that a query would load more than they allow."""

Labels = tuple[tuple[str, str], ...]
"""A series' labels, `__name__` among them, in the order of their names."""


class TooSlowError(Unreadable):
    """No answer in time."""


class RefusedError(Unreadable):
    """The server will answer every query so: a wrong address, no permission, no such API."""


@dataclass(slots=True)
class Points:
    """Samples of one series in ascending time, each time once; times in Unix seconds."""

    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    refused: int = 0
    """Points left out because they are infinite; one that is no number at all is no reading."""

    def __len__(self) -> int:
        return len(self.times)

    def add(self, times: array[float], values: array[float]) -> None:
        """Add later points; what is not later than the last one is left out."""
        last = self.times[-1] if self.times else -math.inf
        if times[0] > last and all(map(lt, times, times[1:])) and math.isfinite(sum(values)):
            self.times.extend(times)
            self.values.extend(values)
            return
        for moment, value in zip(times, values, strict=True):
            if math.isinf(value):
                self.refused += 1
            elif not math.isnan(value) and moment > last:
                self.times.append(moment)
                self.values.append(value)
                last = moment


@dataclass(frozen=True, slots=True, kw_only=True)
class LostHistory:
    """A stretch of time that could not be read, and why."""

    start_seconds: float
    end_seconds: float
    reason: str


@dataclass(slots=True)
class History:
    """What a selector has brought: points by series, what could not be read, and what the server warned of."""

    series: dict[Labels, Points] = field(default_factory=dict)
    lost: list[LostHistory] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)
    points: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no more is kept."""
        return self.points + SERIES_POINTS * len(self.series) > MAX_POINTS


class PrometheusSource:
    """One server's API. The client's base URL is where `/api/v1` begins; its headers carry the credentials."""

    def __init__(
        self, client: httpx2.AsyncClient, seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Ask through `client`, at most `seconds` for a whole answer."""
        self._client = client
        self._seconds = seconds
        self._clock = clock
        self._until_seconds = clock() + MAX_SECONDS
        self._listed: dict[Labels, Labels] = {}
        self._labels: dict[tuple[str, str], tuple[str, str]] = {}
        self._labels_bytes = 0
        self._failures = 0
        self._last = ""
        self._answered = False
        self.warnings: dict[str, None] = {}
        """What the server has warned of while it listed series, such as a part of it that did not answer."""

    @property
    def gave_up(self) -> bool:
        """Whether so many queries in a row have failed, or all have taken so long, that no other is asked."""
        if self._clock() > self._until_seconds:
            self._last = (
                f"the queries have taken more than {MAX_SECONDS / 60.0:.0f} minutes: narrow --match or --window"
            )
            return True
        return self._failures >= MAX_FAILURES

    async def series(self, selectors: Sequence[str], start_seconds: float, end_seconds: float) -> list[Labels]:
        """The series that match any of the selectors and may have samples between two times.

        Raises:
            Unreadable: no answer, an error, or more series than can be looked through.

        """
        form = [("match[]", selector) for selector in selectors]
        form += [("start", _time(start_seconds)), ("end", _time(end_seconds))]
        if self.gave_up:
            raise TooSlowError("failed", self._last)
        answer = await self._ask("/api/v1/series", form)
        data = answer.get("data")
        if not isinstance(data, list):
            raise RefusedError("failed", "the answer on /api/v1/series lists no series: is this a Prometheus API?")
        self.warnings |= _warnings(answer)
        return [self._known(_labels(one)) for one in data]

    def _known(self, series: Labels) -> Labels:
        """The same series, of labels that are kept once.

        Raises:
            TooMuchError: there are more than can be looked through.

        """
        if (known := self._listed.get(series)) is not None:
            return known
        for label in series:
            if self._labels.setdefault(label, label) is label:
                self._labels_bytes += LABEL_BYTES + sys.getsizeof(label[1])
        if len(self._listed) >= MAX_SERIES or self._labels_bytes > MAX_LABELS_BYTES:
            what = f"{len(self._listed):,} series match, with {len(self._labels):,} labels"
            raise TooMuchError("failed", f"{what}, which is more than kvdiag reads: narrow --match")
        shared = tuple(self._labels[label] for label in series)
        self._listed[shared] = shared
        return shared

    async def raw(self, selector: str, start_seconds: float, end_seconds: float, into: History) -> None:
        """Add the raw samples of a selector, start <= time <= end; what cannot be had is kept as `lost`."""
        left = [(start_seconds, end_seconds)]
        while left:
            start, end = left.pop()
            given_up = self.gave_up
            lost = LostHistory(start_seconds=start, end_seconds=end, reason=f"not asked any more, since {self._last}")
            if into.is_full:
                lost = replace(lost, reason=f"more than {MAX_POINTS:,} samples: shorten --window")
            if given_up or into.is_full:
                into.lost.append(lost)
                continue
            try:
                answer = await self._patiently(selector, start, end)
                into.points += _add(answer, start, end, into)
                self._failures = 0
            except Unreadable as error:
                too_much = isinstance(error, TooMuchError)
                if not too_much or end - start <= LEAST_SECONDS:
                    self._failures += 1
                    self._last = str(error)
                # Half of the time may be little enough, or be answered soon enough.
                if (too_much or isinstance(error, TooSlowError)) and end - start > LEAST_SECONDS and not self.gave_up:
                    middle = (start + end) / 2.0
                    left += [(middle, end), (start, middle)]
                else:
                    into.lost.append(replace(lost, reason=str(error)))

    async def _patiently(self, selector: str, start_seconds: float, end_seconds: float) -> Mapping[str, Any]:
        """One answer; asked for again where the server was busy, or its answer broke off."""
        try:
            return await self._once(selector, start_seconds, end_seconds)
        except (TooMuchError, TooSlowError, RefusedError):
            raise
        except Unreadable:
            await asyncio.sleep(PATIENCE_SECONDS)
            return await self._once(selector, start_seconds, end_seconds)

    async def newest(self, selector: str, start_seconds: float, end_seconds: float, into: History) -> None:
        """Add the newest sample alone of each series of a selector, at the end of the time where it was taken."""
        if self.gave_up or into.is_full:
            return
        span = _milliseconds(start_seconds, end_seconds)
        form = [("query", f"last_over_time({selector}[{span}])"), ("time", _time(end_seconds))]
        try:
            answer = await self._ask("/api/v1/query", form)
            _add(answer, start_seconds, end_seconds, into)
        except Unreadable as error:
            self._failures += 1
            self._last = str(error)
            into.lost.append(LostHistory(start_seconds=start_seconds, end_seconds=end_seconds, reason=str(error)))

    async def number(self, query: str) -> float | None:
        """The one value of a query now, by the server's own clock; `None` where it has none.

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

    async def _once(self, selector: str, start_seconds: float, end_seconds: float) -> Mapping[str, Any]:
        span = _milliseconds(start_seconds, end_seconds)
        form = [("query", f"{selector}[{span}]"), ("time", _time(end_seconds))]
        return await self._ask("/api/v1/query", form)

    async def _ask(self, path: str, form: Sequence[tuple[str, str]]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._seconds):
                status, body = await self._post(path, form)
        except TimeoutError as error:
            reason = f"no whole answer within {self._seconds:g} s on {path}: narrow --match, or raise --timeout"
            raise TooSlowError("failed", reason) from error
        except httpx2.HTTPError as error:
            ended = isinstance(error, httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError)
            raise Unreadable("failed", explain(error) + (self._closed() if ended else "")) from error
        except OSError as error:
            # The refusal of a certificate that comes after the handshake, which is no error of HTTP to the client.
            raise Unreadable("failed", f"the connection broke off{self._closed()}") from error
        self._answered = True
        decoded = _decoded(body, path)
        if status in (401, 403):
            raise RefusedError("failed", f"{status} on {path}: give --token-file, or --user with a password")
        if decoded is None:
            raise _not_json(status, path, body)
        if decoded.get("status") != "success" or status != httpx2.codes.OK:
            raise _error(status, path, decoded)
        return decoded

    def _closed(self) -> str:
        """What to look at where TLS ended: in its version 1.3 the client's certificate is asked for last."""
        https = self._client.base_url.scheme == "https"
        return "; if the server requires a client certificate, pass --cert-file" if https and not self._answered else ""

    async def _post(self, path: str, form: Sequence[tuple[str, str]]) -> tuple[int, bytearray]:
        data: dict[str, list[str]] = {}
        for name, value in form:
            data.setdefault(name, []).append(value)
        # A selector of 200 pods is longer than a URL may be.
        async with (
            self._client.stream("POST", path.lstrip("/"), data=data, headers=UNPACKED) as response,
            aclosing(unpacked(response, path)) as chunks,
        ):
            return response.status_code, await gathered(chunks, MAX_ANSWER_BYTES, f"{path}: narrow --match")


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"


def _milliseconds(start_seconds: float, end_seconds: float) -> str:
    return f"{max(round((end_seconds - start_seconds) * 1000.0), 1)}ms"


def _decoded(body: bytes | bytearray, path: str) -> dict[str, Any] | None:
    try:
        value = decode(body, max_values=MAX_ANSWER_VALUES)
    except TooManyValuesError as error:
        raise TooMuchError("failed", f"{error} on {path}: narrow --match") from error
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _not_json(status: int, path: str, body: bytearray) -> Unreadable:
    if status in (429, 502, 503, 504):
        return Unreadable("failed", f"{status} on {path}", status=status)
    if httpx2.codes.is_redirect(status) or status in (404, 405) or body.lstrip()[:1] == b"<":
        reason = f"{status} on {path}, and not JSON: is this the address of a Prometheus API, with its path prefix?"
        return RefusedError("failed", reason, status=status)
    if status != httpx2.codes.OK:
        return Unreadable("failed", f"{status} on {path}", status=status)
    return Unreadable("failed", f"the answer on {path} broke off, or is not JSON")


def _error(status: int, path: str, answer: Mapping[str, Any]) -> Unreadable:
    text = answer.get("error")
    told = " ".join(text.split())[:MAX_REASON_CHARACTERS] if isinstance(text, str) and text else f"{status} on {path}"
    if status in (400, 413, 422, 500, 503) and _TOO_MUCH.search(told):
        return TooMuchError("failed", told, status=status)
    if status in (400, 404, 405):
        return RefusedError("failed", f"it refuses the query: {told}", status=status)
    return Unreadable("failed", told, status=status)


def _labels(metric: object) -> Labels:
    if not isinstance(metric, dict) or not all(isinstance(value, str) for value in metric.values()):
        raise RefusedError("failed", "a series has invalid labels: is this a Prometheus API?")
    return tuple(sorted(metric.items()))


def _warnings(answer: Mapping[str, Any]) -> dict[str, None]:
    told = answer.get("warnings")
    found = {str(one)[:MAX_REASON_CHARACTERS]: None for one in (told[:MAX_WARNINGS] if isinstance(told, list) else ())}
    # VictoriaMetrics' cluster says so where a storage node has not answered.
    return found | ({"the answer is partial": None} if answer.get("isPartial") is True else {})


def _add(answer: Mapping[str, Any], start_seconds: float, end_seconds: float, into: History) -> int:
    """Add an answer's points, and give their number.

    Raises:
        Unreadable: it holds neither a range of samples nor single ones.

    """
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) and data.get("resultType") in ("matrix", "vector") else None
    if not isinstance(result, list):
        raise Unreadable("failed", "the answer has no range of samples: is this a Prometheus API?")
    into.warnings |= _warnings(answer)
    count = 0
    for one in result:
        values = one.get("values", [one["value"]] if "value" in one else []) if isinstance(one, dict) else None
        if not isinstance(values, list):
            raise Unreadable("failed", "a series of the answer has no values")
        key = _labels(one.get("metric"))
        if not values:
            continue
        try:
            moments, texts = zip(*values, strict=True)
            times, numbers = array("d", moments), array("d", map(float, texts))
        except (TypeError, ValueError, OverflowError) as error:
            raise Unreadable("failed", f"a sample of {dict(key).get('__name__', 'a series')} is no number") from error
        # Whatever the server thinks of the range's ends: a sample outside it would be counted in another stretch too.
        if not (start_seconds - 1.0 <= times[0] and times[-1] <= end_seconds + 1.0):
            raise Unreadable("failed", "samples lie outside the requested time")
        into.series.setdefault(key, Points()).add(times, numbers)
        count += len(times)
        if into.is_full:
            raise TooMuchError("failed", f"more than {MAX_POINTS:,} samples: shorten --window")
    return count


def any_of(label: str, values: Sequence[str], *, ending: str = "") -> str:
    """A matcher for any of some values, written so that the server can look each of them up.

    `ending` is a regular expression that may follow each of them.
    """
    texts = "|".join(_literal(value) + ending for value in values)
    return f'{label}=~"{_quoted(texts)}"'


def _literal(value: str) -> str:
    """A value as a regular expression of RE2."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", value)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def selector(*matchers: str) -> str:
    """A vector selector of all these matchers."""
    return "{" + ",".join(matcher for matcher in matchers if matcher) + "}"
