"""One replica's samples between two rounds: merged with newer ones, and as bytes for a file. Pure.

A newer read of an interval replaces the older one: samples that arrived late are in it. A series whose newest sample is
enough (`ONCE`) keeps that alone, dated at the end of the history, as a query for it would. A file is one block that
holds everything, and one more for each round since, or for a verdict; a block begins with its length and its checksum,
so that a block that was cut off by a crash is noticed and dropped. Times take few bytes as differences of milliseconds,
which is what the API reports; all series of one scrape share them. Files are kvdiag's own, but checked as any input.
"""

import json
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import sub
from typing import Any

from kvdiag.feeds.history.prometheus_feed import other_pools, processes_of, with_processes
from kvdiag.feeds.history.series_join import OF_NODES, Replica, metric_of
from kvdiag.feeds.history.series_labels import METRICS, ONCE
from kvdiag.sources.prometheus_answers import MAX_POINTS, History, Labels, LostHistory, Points

MAX_BLOCK_BYTES = 64 * 2**20
"""Of a block, packed; its samples are limited by `MAX_POINTS` too."""

_LENGTHS = struct.Struct("<4sII")
_MAGIC = b"kvf1"


class DamagedError(ValueError):
    """A block is not what kvdiag wrote."""


@dataclass(slots=True)
class ReplicaSamples:
    """What is known of a replica until a moment: its samples, the newest of series that do not change, what is lost."""

    until_seconds: float
    """The end of the newest read."""
    series: dict[Labels, Points] = field(default_factory=dict)
    once: dict[Labels, float] = field(default_factory=dict)
    """The newest value of each series of which that is enough."""
    lost: list[LostHistory] = field(default_factory=list)
    """Intervals that could not be read, and have not been since."""
    warnings: dict[str, None] = field(default_factory=dict)
    blocks: int = 0
    """Of the file that it was restored from."""

    def known(self) -> set[Labels]:
        """Every series that has been read."""
        return {*self.series, *self.once}

    def newest_seconds(self, replica: Replica) -> float:
        """The time of the newest sample of the replica's own series, be it no number; 0 without any."""
        others = () if replica.own == replica.series else OF_NODES
        return max((moment for name, moment in self.newest().items() if name not in others), default=0.0)

    def newest(self) -> dict[str, float]:
        """The time of the newest sample of each metric, be it no number."""
        found: dict[str, float] = {}
        for series_id, points in self.series.items():
            newest = max(points.nan_seconds, points.infinite_seconds, *points.times[-1:])
            if newest:
                name = metric_of(series_id)
                found[name] = max(found.get(name, 0.0), newest)
        return found

    def merge(self, other: "ReplicaSamples", start_seconds: float) -> None:
        """Take over what a later read brought, which began at `start_seconds`."""
        for series_id, points in other.series.items():
            mine = self.series.setdefault(series_id, Points())
            if not other.lost:
                place = bisect_left(mine.times, start_seconds)
                mine.times, mine.values = mine.times[:place], mine.values[:place]
            if points.times:
                mine.add(points.times, points.values)
            mine.infinite_seconds = max(mine.infinite_seconds, points.infinite_seconds)
            mine.nan_seconds = max(mine.nan_seconds, points.nan_seconds)
        self.once |= other.once
        before = [one for one in self.lost if one.start_seconds < start_seconds]
        self.lost = [replace(one, end_seconds=min(one.end_seconds, start_seconds)) for one in before] + other.lost
        self.warnings, self.until_seconds = other.warnings, other.until_seconds

    def drop_before(self, start_seconds: float) -> None:
        """Forget samples that are older than the window, and series without any other."""
        for series_id, points in list(self.series.items()):
            place = bisect_left(points.times, start_seconds)
            if points.infinite_seconds < start_seconds:
                points.infinite_seconds = 0.0
            if points.nan_seconds < start_seconds:
                points.nan_seconds = 0.0
            if place == len(points.times) and not points.infinite_seconds and not points.nan_seconds:
                del self.series[series_id]
            elif place:
                points.times, points.values = points.times[place:], points.values[place:]
        self.lost = [one for one in self.lost if one.end_seconds > start_seconds]

    def drop_after(self, end_seconds: float) -> None:
        """Forget samples that are newer than a moment."""
        for points in self.series.values():
            place = bisect_right(points.times, end_seconds)
            if place < len(points.times):
                points.times, points.values = points.times[:place], points.values[:place]

    def keep_only(self, series: Sequence[Labels]) -> None:
        """Forget series that are no longer the replica's."""
        listed = set(series)
        self.series = {series_id: points for series_id, points in self.series.items() if series_id in listed}
        self.once = {series_id: value for series_id, value in self.once.items() if series_id in listed}

    def history(self, replica: Replica, end_seconds: float) -> tuple[Replica, History]:
        """The replica with its process metrics, and the history as a read of the whole window would have brought it."""
        history = History(series=dict(self.series), lost=list(self.lost), warnings=dict(self.warnings))
        for series_id, value in self.once.items():
            history.series[series_id] = Points(times=array("d", [end_seconds]), values=array("d", [value]))
        return with_processes(replica, processes_of(history.series)), history


def read_until(replica: Replica, whole: Replica, history: History, until_seconds: float) -> ReplicaSamples:
    """What one read brought of a replica: `whole` is the replica with its process metrics."""
    samples = ReplicaSamples(until_seconds=until_seconds, lost=list(history.lost), warnings=dict(history.warnings))
    changed = other_pools(replica)
    for series_id in whole.series:
        points = history.series.get(series_id)
        if points is None:
            continue
        meaning = METRICS[dict(series_id)["__name__"]]
        if meaning.part in ONCE and not (changed and meaning.field == "pool"):
            if points.values:
                samples.once[series_id] = points.values[-1]
        else:
            samples.series[series_id] = points
    return samples


def block(samples: ReplicaSamples, start_seconds: float, about: dict[str, Any] | None = None) -> bytes:
    """The samples as bytes; `about` is kept with them."""
    columns: dict[bytes, int] = {}
    times: list[bytes] = []
    rows: list[list[Any]] = []
    values: list[bytes] = []
    for series_id, points in samples.series.items():
        key = points.times.tobytes()
        if key not in columns:
            columns[key] = len(times)
            moments = [round(moment * 1000.0) for moment in points.times]
            times.append(array("q", map(sub, moments, [0, *moments])).tobytes())
        rows.append([_flat(series_id), columns[key], points.infinite_seconds, points.nan_seconds])
        values.append(points.values.tobytes())
    head = {
        "start": start_seconds,
        "until": samples.until_seconds,
        "times": [len(one) // 8 for one in times],
        "series": rows,
        "once": [[_flat(series_id), value] for series_id, value in samples.once.items()],
        "lost": [[one.start_seconds, one.end_seconds, one.reason] for one in samples.lost],
        "warnings": list(samples.warnings),
        "about": about or {},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    packed = zlib.compress(b"".join((struct.pack("<I", len(text)), text, *times, *values)), 1)
    return _LENGTHS.pack(_MAGIC, len(packed), zlib.crc32(packed)) + packed


def verdict_block(about: dict[str, Any]) -> bytes:
    """A block without samples, whose `about` replaces that of the blocks before it."""
    return block(ReplicaSamples(until_seconds=0.0), 0.0, about)


def restored(content: bytes) -> tuple[ReplicaSamples, dict[str, Any], int]:
    """The samples of a file, what was kept with them last, and the bytes of the blocks that are whole.

    Raises:
        DamagedError: not even the first block is whole.
    """
    samples: ReplicaSamples | None = None
    about: dict[str, Any] = {}
    sound = 0
    for packed, end in _blocks(content):
        try:
            newer, start_seconds, more = _parsed(packed)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, struct.error, zlib.error) as error:
            raise DamagedError(str(error)) from error
        about = more or about
        if samples is None:
            samples = newer
        elif newer.until_seconds:
            samples.merge(newer, start_seconds)
        samples.blocks += 1
        sound = end
    if samples is None:
        raise DamagedError("no complete block")
    return samples, about, sound


def _blocks(content: bytes) -> Iterator[tuple[bytes, int]]:
    place = 0
    while place + _LENGTHS.size <= len(content):
        magic, length, checksum = _LENGTHS.unpack_from(content, place)
        packed = content[place + _LENGTHS.size : place + _LENGTHS.size + length]
        if magic != _MAGIC or length > MAX_BLOCK_BYTES or len(packed) < length or zlib.crc32(packed) != checksum:
            return
        place += _LENGTHS.size + length
        yield packed, place


def _parsed(packed: bytes) -> tuple[ReplicaSamples, float, dict[str, Any]]:
    unpacker = zlib.decompressobj()
    body = unpacker.decompress(packed, 17 * MAX_POINTS)
    if unpacker.unconsumed_tail:
        raise DamagedError("more samples than a replica may have")
    (length,) = struct.unpack_from("<I", body)
    head = json.loads(body[4 : 4 + length])
    place = 4 + length
    columns: list[array[float]] = []
    for count in head["times"]:
        moments = array("q", body[place : place + 8 * count])
        columns.append(array("d", [moment / 1000.0 for moment in accumulate(moments)]))
        place += 8 * count
    samples = ReplicaSamples(until_seconds=float(head["until"]))
    for flat, column, infinite, nan in head["series"]:
        times = columns[column]
        values = array("d", body[place : place + 8 * len(times)])
        place += 8 * len(times)
        samples.series[_labels(flat)] = Points(
            times=times, values=values, infinite_seconds=float(infinite), nan_seconds=float(nan)
        )
    if place != len(body):
        raise DamagedError("samples are missing")
    samples.once = {_labels(flat): float(value) for flat, value in head["once"]}
    samples.lost = [
        LostHistory(start_seconds=float(start), end_seconds=float(end), reason=str(reason))
        for start, end, reason in head["lost"]
    ]
    samples.warnings = {str(one): None for one in head["warnings"]}
    return samples, float(head["start"]), dict(head["about"])


def _flat(series_id: Labels) -> list[str]:
    return [text for label in series_id for text in label]


def _labels(flat: Sequence[str]) -> Labels:
    if not all(isinstance(text, str) for text in flat):
        raise DamagedError("a label is not a text")
    return tuple(zip(flat[::2], flat[1::2], strict=True))
