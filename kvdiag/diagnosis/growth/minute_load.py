"""The load of the engines, minute by minute, next to series of memory, and bins of minutes.

All devices of a board are read at the same times and stand next to the same load: it is summed up once for them all.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import fsum


class MinuteLoad:
    """The mean load of each minute, the newest last, and what windows need of it: the same for all series of a source.

    Growth follows the load or the highest load so far: the two columns.
    """

    def __init__(self, minutes: list[float]) -> None:
        """Take the minutes."""
        self.minutes = minutes
        self._known: dict[tuple[int, int, int], tuple[list[list[float]], list[float]]] = {}

    def columns(self, start: int, end: int) -> list[list[float]]:
        """The two columns over a window."""
        load = self.minutes[start:end]
        return [load, list(accumulate(load, max))]

    def binned(self, start: int, end: int, size: int) -> tuple[list[list[float]], list[float]]:
        """Each column in bins of so many minutes, and its mean."""
        key = start, end, size
        if key not in self._known:
            columns = self.columns(start, end)
            bins = [[mean for mean in binned(each, size, mean_of) if mean is not None] for each in columns]
            self._known[key] = bins, [mean_of(column) for column in columns]
        return self._known[key]


def binned(minutes: Sequence[float | None], size: int, of: Callable[[Sequence[float]], float]) -> list[float | None]:
    """Bins of so many minutes, the newest whole; `None` where a bin holds no sample."""
    first = len(minutes) % size
    known = minutes[first:]
    if None not in known:
        return [of(known[start : start + size]) for start in range(0, len(known), size)]  # type: ignore[arg-type]
    cells = (
        [value for value in minutes[start : start + size] if value is not None]
        for start in range(first, len(minutes), size)
    )
    return [of(cell) if cell else None for cell in cells]


def mean_of(values: Sequence[float]) -> float:
    """The mean of the samples of a minute or a bin."""
    return fsum(values) / len(values)
