"""Reads the answers of a Prometheus API: samples by series, and the errors in them.

No answer is trusted. The number of values is limited before decoding, every sample is checked for order, range and
finiteness, and each error is sorted by what to do about it: ask for less (`TooMuchError`), ask again (`Unreadable`), or
stop asking (`RefusedError`). Pure.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import lt
from types import MappingProxyType
from typing import Any

import httpx2

from kvdiag.sources.bounded_json import TooManyValuesError, decode
from kvdiag.sources.http import TooMuchError, Unreadable

SOURCE = "prometheus"

MAX_ANSWER_VALUES = 1_000_000
"""A sample has three, and a series one for each label."""

MAX_POINTS = 3_000_000
"""Per history: 13 days of a replica with 40 series at 15 s. A sample takes 16 bytes, its row later 100."""

SERIES_POINTS = 64
"""Overhead of a series, in samples."""

MAX_REASON_CHARACTERS = 160
MAX_WARNINGS = 16

_TOO_MUCH = re.compile(r"too many|too large|more than|exceed|limit|max[_ -]", re.IGNORECASE)
"""Wording of Prometheus, Thanos, Mimir and VictoriaMetrics for a query above their limits."""

Labels = tuple[tuple[str, str], ...]
"""A series' labels including `__name__`, sorted by name."""


class TooSlowError(Unreadable):
    """No answer in time."""


class RefusedError(Unreadable):
    """Every further query would fail too: a wrong address, no permission, not this API."""


@dataclass(slots=True)
class Points:
    """Samples of one series in ascending Unix time, without duplicate times."""

    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    refused: int = 0
    """Samples left out because they are infinite. NaN is a missing sample and is not counted."""

    def __len__(self) -> int:
        return len(self.times)

    def add(self, times: array[float], values: array[float]) -> None:
        """Append samples; those not later than the last one are left out."""
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
    """An interval that could not be read, and why."""

    start_seconds: float
    end_seconds: float
    reason: str


@dataclass(slots=True)
class History:
    """Samples by series, intervals that could not be read, and the server's warnings."""

    series: dict[Labels, Points] = field(default_factory=dict)
    lost: list[LostHistory] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)
    points: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the size limit is reached."""
        return self.points + SERIES_POINTS * len(self.series) > MAX_POINTS


def decoded_answer(body: bytes | bytearray, path: str) -> dict[str, Any] | None:
    """The JSON object of an answer, `None` if it is not one.

    Raises:
        TooMuchError: it has too many values.
    """
    try:
        value = decode(body, max_values=MAX_ANSWER_VALUES)
    except TooManyValuesError as error:
        raise TooMuchError("failed", f"{error} on {path}: narrow --match") from error
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def not_json_error(status: int, path: str, body: bytearray) -> Unreadable:
    """The error for an answer that is not JSON, by its status."""
    if status in (429, 502, 503, 504):
        return Unreadable("failed", f"{status} on {path}", status=status)
    if httpx2.codes.is_redirect(status) or status in (404, 405) or body.lstrip()[:1] == b"<":
        reason = f"{status} on {path}, not JSON: is this the address of a Prometheus API, with its path prefix?"
        return RefusedError("failed", reason, status=status)
    if status != httpx2.codes.OK:
        return Unreadable("failed", f"{status} on {path}", status=status)
    return Unreadable("failed", f"the answer on {path} is incomplete or is not JSON")


def query_error(status: int, path: str, answer: Mapping[str, Any]) -> Unreadable:
    """The error that an answer of the API reports."""
    text = answer.get("error")
    message = (
        " ".join(text.split())[:MAX_REASON_CHARACTERS] if isinstance(text, str) and text else f"{status} on {path}"
    )
    if status in (400, 413, 422, 500, 503) and _TOO_MUCH.search(message):
        return TooMuchError("failed", message, status=status)
    if status in (400, 404, 405):
        return RefusedError("failed", f"query rejected: {message}", status=status)
    return Unreadable("failed", message, status=status)


def series_labels(metric: object, names: Mapping[str, str]) -> Labels:
    """The labels of one series of an answer; a metric that `names` has gets the name given there.

    Raises:
        RefusedError: they are not labels.
    """
    if not isinstance(metric, dict) or not all(isinstance(value, str) for value in metric.values()):
        raise RefusedError("failed", "a series has invalid labels: is this a Prometheus API?")
    name = metric.get("__name__", "")
    return tuple(sorted({**metric, "__name__": names[name]}.items() if name in names else metric.items()))


def answer_warnings(answer: Mapping[str, Any]) -> dict[str, None]:
    """The warnings of an answer, each once and shortened."""
    texts = answer.get("warnings")
    found = {
        str(one)[:MAX_REASON_CHARACTERS]: None for one in (texts[:MAX_WARNINGS] if isinstance(texts, list) else ())
    }
    # VictoriaMetrics' cluster sets it if a storage node did not answer.
    return found | ({"the answer is partial": None} if answer.get("isPartial") is True else {})


def add_samples(
    answer: Mapping[str, Any],
    start_seconds: float,
    end_seconds: float,
    into: History,
    names: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Add an answer's samples, and return their number.

    Raises:
        Unreadable: it has neither range vectors nor instant vectors.
    """
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) and data.get("resultType") in ("matrix", "vector") else None
    if not isinstance(result, list):
        raise Unreadable("failed", "the answer has no samples: is this a Prometheus API?")
    into.warnings |= answer_warnings(answer)
    count = 0
    for one in result:
        values = one.get("values", [one["value"]] if "value" in one else []) if isinstance(one, dict) else None
        if not isinstance(values, list):
            raise Unreadable("failed", "a series of the answer has no values")
        key = series_labels(one.get("metric"), names)
        if not values:
            continue
        try:
            moments, texts = zip(*values, strict=True)
            times, numbers = array("d", moments), array("d", map(float, texts))
        except (TypeError, ValueError, OverflowError) as error:
            raise Unreadable("failed", f"a sample of {dict(key).get('__name__', 'a series')} is no number") from error
        # A sample outside the requested interval would be counted in the next one too.
        if not (start_seconds - 1.0 <= times[0] and times[-1] <= end_seconds + 1.0):
            raise Unreadable("failed", "samples lie outside the requested interval")
        into.series.setdefault(key, Points()).add(times, numbers)
        count += len(times)
        if into.is_full:
            raise TooMuchError("failed", f"more than {MAX_POINTS:,} samples: shorten --window")
    return count
