"""Reads the answers of a Prometheus API: samples by series, and the errors in them.

No answer is trusted. The number of values is limited before decoding, every sample is checked for order, range and
finiteness, and each error is sorted by what to do about it: ask for less (`TooMuchError`), ask again (`Unreadable`), or
stop asking (`RefusedError`). Pure.

A day of a fleet has a hundred million samples. All servers write them without spaces, so that a series' samples are cut
out of the text and split as a whole, once for the times of all series of one scrape; the rest of the answer is decoded
as JSON, with a constant where the samples of each series were. An answer that is written otherwise is decoded as JSON
throughout, with the same result.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, lt
from types import MappingProxyType
from typing import Any, NamedTuple

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

FIRST_VALUES = 64
"""Of a series, by which one that changes all the time is recognised."""

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
    """Samples of one series in ascending Unix time, without duplicate times.

    The arrays are replaced and never changed, since series of one scrape share their times.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    infinite_seconds: float = 0.0
    nan_seconds: float = 0.0
    """The times of the newest samples that were left out because they are infinite or NaN, 0 without any."""

    def __len__(self) -> int:
        return len(self.times)

    def add(self, times: array[float], values: array[float]) -> None:
        """Append samples in ascending order; those not later than the last one are left out."""
        last = self.times[-1] if self.times else -math.inf
        if times[0] > last and math.isfinite(sum(values)):
            self.times = self.times + times if self.times else times
            self.values = self.values + values if self.values else values
            return
        kept_times, kept_values = self.times[:], self.values[:]
        for moment, value in zip(times, values, strict=True):
            if math.isinf(value):
                self.infinite_seconds = max(self.infinite_seconds, moment)
            elif math.isnan(value):
                self.nan_seconds = max(self.nan_seconds, moment)
            elif moment > last:
                kept_times.append(moment)
                kept_values.append(value)
                last = moment
        self.times, self.values = kept_times, kept_values


def ascends(times: array[float]) -> bool:
    """Whether each time is later than the one before."""
    return all(map(lt, times, times[1:]))


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
    """The JSON object of an answer, `None` if it is not one; samples as `SampleColumns` where written without spaces.

    Raises:
        TooMuchError: it has too many values.
    """
    # Of a sample's three values two quotes show; counting these alone takes a third of the time.
    if body.count(b'"') <= MAX_ANSWER_VALUES * 2 // 3 and (answer := _by_columns(body)) is not None:
        return answer
    try:
        value = decode(body, max_values=MAX_ANSWER_VALUES)
    except TooManyValuesError as error:
        raise TooMuchError("failed", f"{error} on {path}: narrow --match") from error
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class SampleColumns(NamedTuple):
    """The samples of one series: times and values of equal number."""

    times: array[float]
    values: array[float]
    ascending: bool
    """Whether each time is later than the one before."""


_BEGIN, _END = b'"values":[[', b'"]]'
"""Around a series' samples. Within a text of JSON its quotes would be escaped."""

_IN_NUMBERS = b"0123456789.+-eENaInf,"
"""All that numbers with commas between them consist of. Other answers are decoded as JSON throughout."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|Inf)|NaN")
"""A value as all servers write it. `float` reads more: blanks, `1_000`, other alphabets' digits."""


def _by_columns(body: bytes | bytearray) -> dict[str, Any] | None:
    """The answer with the samples of each series as columns; `None` if any are not written as expected."""
    rest: list[bytes | bytearray] = []
    found: list[SampleColumns] = []
    known: dict[tuple[str, str], _Moments] = {}
    place = 0
    try:
        while (begin := body.find(_BEGIN, place)) >= 0:
            # Nothing in samples ends an object; their own brackets are a hundred times as many.
            end = body.rindex(_END, begin, body.index(b"}", begin))
            # Times and values alternate, as in: 1795132800.5,"1"],[1795132830.5,"2
            text = body[begin + len(_BEGIN) : end].decode("ascii")
            last = text.rindex('"')
            same = text[: text.index('"')], text[text.rfind('"', 0, last) + 1 : last]
            if (column := _constant(text, text[last + 1 :], known.get(same))) is None:
                texts = text.split('"')
                moments, numbers = texts[::2], texts[1::2]
                if same not in known or known[same].texts != moments:
                    joined = '"'.join(moments)
                    if not joined.endswith(","):
                        return None
                    times = _read_json(joined[:-1].replace(',"],[', ","))
                    known[same] = _Moments(moments, times, ascends(times))
                column = SampleColumns(known[same].times, _values(numbers), known[same].ascending)
                # With a comma within its text a value would be two numbers, and with an empty one none.
                if not len(moments) == len(column.times) == len(numbers) == len(column.values):
                    return None
            found.append(column)
            rest += (body[place : begin + len(_BEGIN) - 2], b"NaN")
            place = end + len(_END)
        if not found:
            return None
        found.reverse()
        # The decoder asks for each constant in turn; one that the server sent is one too many, and `pop` raises.
        rest.append(body[place:])
        answer = decode(b"".join(rest), max_values=MAX_ANSWER_VALUES, parse_constant=lambda _: found.pop())
    except (ValueError, IndexError, OverflowError):
        return None
    return answer if isinstance(answer, dict) else None


class _Moments(NamedTuple):
    """The times of a scrape's samples, as texts up to the next quote, and as numbers."""

    texts: list[str]
    times: array[float]
    ascending: bool


def _constant(text: str, value: str, moments: _Moments | None) -> SampleColumns | None:
    """The samples of a figure that stays the same, at times that are known: half of the series of a day."""
    if moments is None or not text.startswith(f'{moments.texts[0]}"{value}"') or not _NUMBER.fullmatch(value):
        return None
    if text != f'"{value}"'.join(moments.texts) + f'"{value}':
        return None
    return SampleColumns(moments.times, _read(value) * len(moments.times), moments.ascending)


def _values(texts: Sequence[str]) -> array[float]:
    """The numbers; of a figure that seldom changes each text is read once."""
    few = len(set(texts[:FIRST_VALUES])) <= FIRST_VALUES // 4
    distinct = set(texts) if few else set()
    if not few or len(distinct) > len(texts) // 4:
        return _read(",".join(texts))
    known = dict(zip(distinct, _read(",".join(distinct)), strict=True))
    return array("d", list(map(known.__getitem__, texts)))


def _read(numbers: str) -> array[float]:
    """Values with commas between them, as all servers write them.

    Raises:
        ValueError: there is anything else.
    """
    try:
        return _read_json(numbers)
    except ValueError:
        return array("d", map(sample_value, numbers.split(",")))


def _read_json(numbers: str) -> array[float]:
    """Numbers of JSON with commas between them. Its decoder reads them in half of the time that `float` takes.

    Raises:
        ValueError: there is anything else.
    """
    if numbers.encode().translate(None, _IN_NUMBERS):
        raise ValueError("not numbers")
    return array("d", json.loads(f"[{numbers}]"))


def sample_value(text: object) -> float:
    """The number that the text of a sample is.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str) or _NUMBER.fullmatch(text) is None:
        raise ValueError("not the text of a number")
    return float(text)


def not_json_error(status: int, path: str, body: bytearray) -> Unreadable:
    """The error for an answer that is not JSON, by its status."""
    if status in (429, 502, 503, 504):
        return Unreadable("failed", f"{status} on {path}", status=status)
    if httpx2.codes.is_redirect(status) or status in (404, 405) or body.lstrip()[:1] == b"<":
        reason = f"{status} on {path}, not JSON: is this the address of a Prometheus API, with its path prefix?"
        return RefusedError("failed", reason, status=status)
    if status != httpx2.codes.OK:
        return Unreadable("failed", f"{status} on {path}", status=status)
    return Unreadable("failed", f"the answer on {path} is incomplete or is not JSON", status=status)


def query_error(status: int, path: str, answer: Mapping[str, Any]) -> Unreadable:
    """The error that an answer of the API reports."""
    text = answer.get("error")
    message = _shortened(text) if isinstance(text, str) and text else f"{status} on {path}"
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
    if not isinstance(metric, dict) or not all(map(_is_text, (*metric, *metric.values()))):
        raise RefusedError("failed", "a series has invalid labels: is this a Prometheus API?", status=httpx2.codes.OK)
    name = metric.get("__name__", "")
    return tuple(sorted({**metric, "__name__": names[name]}.items() if name in names else metric.items()))


def _is_text(value: object) -> bool:
    """Whether it can be asked for and shown: JSON can have halves of characters, which UTF-8 cannot."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def _shortened(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON_CHARACTERS].encode(errors="replace").decode()


def answer_warnings(answer: Mapping[str, Any]) -> dict[str, None]:
    """The warnings of an answer, each once and shortened."""
    texts = answer.get("warnings")
    found = {_shortened(str(one)): None for one in (texts[:MAX_WARNINGS] if isinstance(texts, list) else ())}
    # VictoriaMetrics' cluster sets it if a storage node did not answer.
    return found | ({"the answer is partial": None} if answer.get("isPartial") is True else {})


def add_samples(
    answer: Mapping[str, Any],
    start_seconds: float,
    end_seconds: float,
    into: History,
    names: Mapping[str, str] = MappingProxyType({}),
    selects: Callable[[Labels], bool] = lambda _: True,
) -> int:
    """Add an answer's samples, and return their number. `selects` says whether a series was queried.

    Raises:
        Unreadable: it has neither range vectors nor instant vectors.
    """
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) and data.get("resultType") in ("matrix", "vector") else None
    if not isinstance(result, list):
        raise _wrong("the answer has no samples: is this a Prometheus API?")
    into.warnings |= answer_warnings(answer)
    read: dict[Labels, SampleColumns] = {}
    for one in result:
        values = one.get("values", [one["value"]] if "value" in one else []) if isinstance(one, dict) else None
        if not isinstance(values, list | SampleColumns):
            raise _wrong("a series of the answer has no values")
        key = series_labels(one.get("metric"), names)
        # Some servers leave out the name of what a function returns.
        if not selects(key) and "__name__" in dict(key):
            raise _wrong("the answer has series that were not queried")
        if not values:
            continue
        try:
            columns = values if isinstance(values, SampleColumns) else _columns(values)
        except (TypeError, ValueError, OverflowError) as error:
            raise _wrong(f"a sample of {_name(key)} is no number") from error
        read[key] = _together(read[key], columns, key) if key in read else columns
    count = 0
    for key, columns in read.items():
        # Some servers have a sample twice.
        pairs = zip(columns.times, columns.values, strict=True)
        times, values, _ = columns if columns.ascending else _single(pairs, key)
        # A sample outside the requested interval would be counted in the next one too.
        if not (start_seconds - 1.0 <= times[0] and times[-1] <= end_seconds + 1.0):
            raise _wrong("samples lie outside the requested interval")
        into.series.setdefault(key, Points()).add(times, values)
        count += len(times)
        if into.is_full:
            raise TooMuchError("failed", f"more than {MAX_POINTS:,} samples: shorten --window")
    return count


def _together(one: SampleColumns, other: SampleColumns, key: Labels) -> SampleColumns:
    """The samples of a series that an answer has twice, as under two names of its metric."""
    pairs = (pair for each in (one, other) for pair in zip(each.times, each.values, strict=True))
    return _single(sorted(pairs, key=itemgetter(0)), key)


def _single(pairs: Iterable[tuple[float, float]], key: Labels) -> SampleColumns:
    """One sample for each time, where one may be there twice; an error if they contradict each other."""
    found: dict[float, float] = {}
    for moment, value in pairs:
        before = found.setdefault(moment, value)
        if before != value and not (math.isnan(before) and math.isnan(value)):
            raise _wrong(f"{_name(key)} has two values at one time")
    if not ascends(times := array("d", found)):
        raise _wrong(f"time goes back in the samples of {_name(key)}")
    return SampleColumns(times, array("d", found.values()), ascending=True)


def _name(key: Labels) -> str:
    return dict(key).get("__name__", "a series")


def _wrong(reason: str) -> Unreadable:
    """The error for an answer that came and is wrong, be it for one series alone."""
    return Unreadable("failed", reason, status=httpx2.codes.OK)


def _columns(pairs: Sequence[Any]) -> SampleColumns:
    moments, texts = zip(*pairs, strict=True)
    times = array("d", moments)
    return SampleColumns(times, array("d", map(sample_value, texts)), ascends(times))
