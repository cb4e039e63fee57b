"""Reads an engine's startup log by a table of wordings, for engines that print few figures. Pure.

The table (wordings.json of the engine) has a regular expression for each figure: `sizes` with their unit, `counts`, and
`settings` with the form of their value; `{number}`, `{whole}`, `{fraction}` and `{word}` stand for forms. Only messages
are matched, so that prefixes do not matter. Of several lines the last one counts, since a trial run may print the same
lines first; a figure of 0 is a dry run's, and does not count. Of several starts in one log, the last that reports its
memory counts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from kvdiag.engine_data import engine_data
from kvdiag.engine_memory import engine_title
from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.oom.message import ANSI

MAX_LINE_CHARACTERS = 16 * 2**10
"""The rest of a line is ignored."""

_MOST = 1 << 40
_FORMS = {
    "number": r"(\d{1,15}(?:\.\d{1,9})?)",
    "whole": r"(\d{1,15})(?!\w|\.\d)",
    "fraction": r"(\d(?:\.\d{1,20})?)(?!\w|\.\d)",
    "word": r"([\w.+-]{1,60})",
}
_UNITS = {"bytes": 1, "MB": 1 << 20, "MiB": 1 << 20, "GB": 1 << 30, "GiB": 1 << 30}
"""Engines print "MB" and "GB" for binary multiples, too."""


class Start(Protocol):
    """What a log has of one start of the server."""

    @property
    def tells_memory(self) -> bool:
        """Whether it has printed a figure of its memory."""


AnyStart = TypeVar("AnyStart", bound=Start)


def last_start(starts: Sequence[AnyStart], absent: str) -> tuple[AnyStart, list[str]]:
    """The last start that reports its memory, and notes on the others; KvdiagError with `absent` if none does."""
    telling = [start for start in starts if start.tells_memory]
    if not telling:
        raise KvdiagError(absent)
    notes = [f"the log has {len(telling)} starts; the last one is used"] if len(telling) > 1 else []
    if telling[-1] is not starts[-1]:
        notes.append("a later start in the log has no memory figures yet; the previous start is used")
    return telling[-1], notes


@dataclass(slots=True)
class _Start:
    sizes: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tells_memory(self) -> bool:
        return bool(self.sizes or self.counts)


class Wordings:
    """An engine's wordings, compiled."""

    def __init__(self, engine: str) -> None:
        """Compile wordings.json in the engine's folder."""
        table: Mapping[str, Any] = engine_data("wordings.json")[engine]
        self._title = engine_title(engine)
        self._starts = re.compile(table["start"])
        self._interesting = re.compile(table["interesting"])
        self._sizes = [(name, unit, _compiled(wording)) for name, unit, wording in table["sizes"]]
        self._counts = [(name, _compiled(wording)) for name, wording in table["counts"]]
        self._settings = [(name, form, _compiled(wording)) for name, form, wording in table["settings"]]

    def report(self, text: str) -> EngineReport:
        """What the last start in `text` says of its memory.

        Raises:
            KvdiagError: none of the lines that report it are there.
        """
        starts = [_Start()]
        for line in self._lines(text):
            if self._starts.search(line) and starts[-1].tells_memory:
                starts.append(_Start())
            self._take(starts[-1], line)
        start, notes = last_start(
            starts,
            f"the log has none of {self._title}'s memory figures: give the log from the server's start, at level INFO",
        )
        together = _blocks_together(start)
        sizes = start.sizes | together
        ranks = (RankReport(name="each rank", **sizes),) if sizes else ()
        settings = replace(EngineSettings(), **start.settings)
        return EngineReport(settings=settings, ranks=ranks, notes=tuple(notes), **start.counts)

    def settings(self, lines: Iterable[str]) -> EngineSettings:
        """The settings that these lines show."""
        start = _Start()
        for line in lines:
            if self._interesting.search(line):
                self._take(start, line[:MAX_LINE_CHARACTERS])
        return replace(EngineSettings(), **start.settings)

    def _lines(self, text: str) -> Iterator[str]:
        for line in re.split(r"[\r\n]+", text):
            if self._interesting.search(line[:MAX_LINE_CHARACTERS]):
                yield ANSI.sub("", line[:MAX_LINE_CHARACTERS])

    def _take(self, start: _Start, line: str) -> None:
        for name, unit, pattern in self._sizes:
            if (found := pattern.search(line)) and (size := _size(found[1], unit)) is not None:
                start.sizes[name] = size
        for name, pattern in self._counts:
            if (found := pattern.search(line)) and 0 < (count := int(found[1])) <= _MOST:
                start.counts[name] = count
        for name, form, pattern in self._settings:
            if (found := pattern.search(line)) and (value := _value(found[1], form)) is not None:
                start.settings[name] = value


def _blocks_together(start: _Start) -> dict[str, PrintedSize]:
    """The pool by the size of a block, which is printed in MB (LMDeploy until 0.14, turbomind BlockManager.cc: first in
    whole ones, rounded down), and the number of blocks.
    """
    block, count = start.sizes.pop("block", None), start.counts.get("num_blocks", 0)
    if block is None or not count:
        return {}
    slack = block.slack_bytes
    middle = block.nominal_bytes + (slack if slack == _UNITS["MB"] // 2 else 0)
    with suppress(KvModelError):
        return {"pool": PrintedSize(nominal_bytes=middle * count, slack_bytes=slack * count)}
    return {}


def _compiled(wording: str) -> re.Pattern[str]:
    for form, pattern in _FORMS.items():
        wording = wording.replace(f"{{{form}}}", pattern)
    return re.compile(wording)


def _size(printed: str, unit: str) -> PrintedSize | None:
    decimals = len(printed.partition(".")[2])
    slack = 0.5 * 10**-decimals if unit != "bytes" else 0.0
    try:
        size = PrintedSize(nominal_bytes=round(float(printed) * _UNITS[unit]), slack_bytes=round(slack * _UNITS[unit]))
    except KvModelError:
        return None
    return size if size.nominal_bytes else None


def _value(text: str, form: str) -> Any:
    if form == "word":
        return text
    if form == "fraction":
        return ratio if 0 < (ratio := float(text)) <= 1 else None
    return number if 0 < (number := int(text)) <= _MOST else None
