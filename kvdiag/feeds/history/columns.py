"""Columns of samples, one for each field, joined into rows by time: an as-of join across scrape targets. Pure.

All series of one scrape have the same time, so that fields of one target are joined exactly. Fields of different
targets are joined by the newest sample, if it is not older than a tolerance.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, islice
from math import inf
from operator import ne
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
Target = tuple[str, ...]
Values = Sequence[float | None]
Rows = Mapping[str, Values]

JOIN_SECONDS = 90.0
"""Age up to which a sample is joined to another target's: scrapes come every 15 to 60 s, some are late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Samples of one field in ascending time, and the targets that they were scraped from."""

    targets: frozenset[Target]
    times: array[float]
    values: array[float]

    def part(self, start: int, end: int) -> Column:
        """The samples from one place to before another."""
        return Column(targets=self.targets, times=self.times[start:end], values=self.values[start:end])

    def between(self, least: float, most: float) -> tuple[Column, int]:
        """The samples with possible values, and how many have impossible ones."""
        # Half of a day's figures stay the same: their bytes are compared at once.
        content = self.values.tobytes()
        every = self.values[:1] if content[8:] == content[:-8] else self.values.tolist()
        if not every or (least <= min(every) and max(every) <= most):
            return self, 0
        possible = [least <= value <= most for value in self.values]
        times, values = (array("d", compress(numbers, possible)) for numbers in (self.times, self.values))
        return Column(targets=self.targets, times=times, values=values), possible.count(False)


def in_turn(columns: Sequence[Column]) -> tuple[Column, int]:
    """One column of several for the same field, and how many of them overlap those before.

    The first one counts; of the others only samples from before, between or after those that are there: a metric that
    an upgrade renamed, a pod with another address after each restart.
    """
    parts = [columns[0]]
    twice = 0
    for column in columns[1:]:
        ends = [-inf, *(end for part in parts for end in (part.times[0], part.times[-1])), inf]
        fitting = [
            column.part(bisect_right(column.times, after), bisect_left(column.times, before))
            for after, before in zip(ends[::2], ends[1::2], strict=True)
        ]
        twice += sum(len(one.times) for one in fitting) < len(column.times)
        parts = sorted([*parts, *(one for one in fitting if one.times)], key=lambda part: part.times[0])
    if len(parts) == 1:
        return parts[0], twice
    times, values = array("d"), array("d")
    for part in parts:
        times += part.times
        values += part.values
    targets = frozenset[Target]().union(*(part.targets for part in parts))
    return Column(targets=targets, times=times, values=values), twice


def combined(columns: Sequence[Column], of: Callable[[Iterable[float]], float]) -> Column:
    """One column of several of the same target: at each time, what `of` makes of the values that are there."""
    if len(columns) == 1:
        return columns[0]
    rows: dict[float, list[float]] = defaultdict(list)
    for column in columns:
        for moment, value in zip(column.times, column.values, strict=True):
            rows[moment].append(value)
    times = sorted(rows)
    return Column(
        targets=columns[0].targets, times=array("d", times), values=array("d", [of(rows[moment]) for moment in times])
    )


def side_by_side(columns: Mapping[Key, Column], tolerance_seconds: float) -> tuple[Sequence[float], dict[Key, Values]]:
    """The times of the rows, and each column's value in every row; `None` where it has no sample near enough."""
    if not columns:
        return (), {}
    lead = max(columns.values(), key=lambda column: len(column.times))
    if all(column.times is lead.times or column.times == lead.times for column in columns.values()):
        return lead.times.tolist(), {key: column.values.tolist() for key, column in columns.items()}
    moments = set(lead.times)
    for column in columns.values():
        if column.targets & lead.targets:
            moments.update(column.times)
        else:
            moments.update(moment for moment in column.times if _lonely(moment, lead.times, tolerance_seconds))
    times = sorted(moments)
    return times, {
        key: _as_of(column, times, 0.0 if column.targets & lead.targets else tolerance_seconds)
        for key, column in columns.items()
    }


def rows_of(parts: Mapping[Key, Mapping[str, Column]]) -> tuple[Sequence[float], dict[Key, Rows]]:
    """The columns of several keys side by side: the times, and by key and field the value at each of them."""
    flat = {(key, name): column for key, fields in parts.items() for name, column in fields.items()}
    times, values = side_by_side(flat, JOIN_SECONDS)
    return times, {key: {name: values[key, name] for name in fields} for key, fields in parts.items()}


def readings(
    times: Sequence[float], rows: Mapping[Key, Rows], make: Callable[[Key, int, Rows], Sequence[T | None]]
) -> dict[float, tuple[T, ...]]:
    """By time, what `make` returns for the figures that each key has there; a time without any is left out.

    `make` gets the number of rows and the columns, without rows that repeat the one before: figures often stay the
    same for hours, and what is made of them is then the same object.
    """
    found: dict[float, tuple[T, ...]] = {}
    for key, fields in rows.items():
        every = list(fields.values())
        table: Sequence[object] = every[0] if len(every) == 1 else list(zip(*every, strict=True))
        fresh = [True, *map(ne, table, table[1:])] if table else []
        columns = fields if all(fresh) else {name: list(compress(values, fresh)) for name, values in fields.items()}
        alone = [() if one is None else (one,) for one in make(key, sum(fresh), columns)]
        each = alone if all(fresh) else list(map(alone.__getitem__, islice(accumulate(fresh, initial=-1), 1, None)))
        if not found:
            found = {moment: made for moment, made in zip(times, each, strict=True) if made}
            continue
        for moment, made in zip(times, each, strict=True):
            if made:
                found[moment] = found[moment] + made if moment in found else made
    return found


def by_row(make: Callable[[Key, Mapping[str, float]], T | None]) -> Callable[[Key, int, Rows], Sequence[T | None]]:
    """Makes each row by itself, of the figures that it has, and equal rows once."""

    def made(key: Key, _: int, columns: Rows) -> Sequence[T | None]:
        known: dict[tuple[float | None, ...], T | None] = {}
        found = []
        for row in zip(*columns.values(), strict=True):
            if row not in known:
                figures = {name: value for name, value in zip(columns, row, strict=True) if value is not None}
                known[row] = make(key, figures) if figures else None
            found.append(known[row])
        return found

    return made


def _lonely(moment: float, times: array[float], tolerance_seconds: float) -> bool:
    place = bisect_left(times, moment)
    return all(abs(times[near] - moment) > tolerance_seconds for near in (place - 1, place) if 0 <= near < len(times))


def _as_of(column: Column, times: Sequence[float], tolerance_seconds: float) -> Values:
    found: list[float | None] = []
    place = -1
    for moment in times:
        while place + 1 < len(column.times) and column.times[place + 1] <= moment:
            place += 1
        near = place >= 0 and moment - column.times[place] <= tolerance_seconds
        found.append(column.values[place] if near else None)
    return found
