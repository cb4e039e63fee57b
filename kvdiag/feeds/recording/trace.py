"""Recorded timelines: JSON Lines, gzip allowed. First line the header with the facts, then one sample or mark a line.

A header may say `about` itself what it likes, where it comes from for one; nothing of it is judged.
The last line says how many entries there are; a trace without it was cut off, which its facts then say, and a torn
last line is dropped: that is what a kill leaves behind. Any other bad line is an error that names it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar, cast

import kvdiag
from kvdiag.errors import KvdiagError
from kvdiag.model import Facts, Gap, Mark, Sample, Timeline
from kvdiag.model.codec import from_plain, to_plain
from kvdiag.sources.log_file import GZIP_MAGIC

Entry = TypeVar("Entry", Sample, Mark)

FORMAT = 1
"""Raised when an older kvdiag could read a newer trace wrongly. Added fields alone make an older one refuse by name."""

MAX_LINE_BYTES = 4 * 2**20
"""A sample of 8 GPUs with 64 processes each takes 40 KB."""

MAX_ABOUT_CHARACTERS = 64 * 2**10
"""Room for a report's sources and figures; the reader's bound is the line's."""

MAX_TRACE_BYTES = 4 * 2**30
"""Unpacked. A day of 8 GPUs at 1 Hz takes 200 MB; more is a mistake or a decompression bomb."""

CUT_OFF = Gap(source="trace", kind="failed", reason="the trace is cut off: its recorder did not come to its end")

END = re.compile(rb'\{"end":\s*(\d{1,18})\}\s*\n')
"""The last line of a whole trace, with the number of entries before it."""

CLOCK_SET = "clock_set_seconds"

MOST_SET_SECONDS = 2e9
"""From 1970, where a machine without a clock begins, to now."""

SAMPLE = b'{"sample":{"at_seconds":'
"""How the line of a sample begins."""


class NotATraceError(KvdiagError):
    """A file that begins as no trace does; one that only has a bad line is a trace."""


class TraceWriter:
    """Writes a trace line by line, each flushed, so that a kill loses the last line at most."""

    def __init__(
        self,
        path: Path,
        facts: Facts,
        about: Mapping[str, Any] | None = None,
        *,
        clock_set_seconds: float = 0.0,
    ) -> None:
        """Begin a trace in a new file or over an old one; `about` is kept in its header for people to read.

        `clock_set_seconds` tells how far the clock was set between the recording before this one and this one.

        Raises:
            KvdiagError: the file cannot be written.
            ValueError: what it says about itself is no JSON, or too long.

        """
        self._path = path
        self._entries = 0
        header = {"kvdiag_trace": FORMAT, "kvdiag_version": kvdiag.__version__, "facts": to_plain(facts)}
        if clock_set_seconds:
            header[CLOCK_SET] = clock_set_seconds
        if about is not None:
            header["about"] = _bounded(about)
        try:
            self._file = _created(path)
        except OSError as error:
            raise KvdiagError(f"cannot record to {path}: {error.strerror}") from error
        try:
            self._write(header)
        except KvdiagError:
            self.drop()
            raise

    def add(self, entry: Sample | Mark) -> None:
        """Append one sample or mark.

        Raises:
            KvdiagError: the disk is full or gone.

        """
        kind = "sample" if isinstance(entry, Sample) else "mark"
        self._write({kind: to_plain(entry)})
        self._entries += 1

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise KvdiagError(f"cannot record to {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """End the trace.

        Raises:
            KvdiagError: the disk is full or gone.

        """
        if self._file.closed:
            return
        self._write({"end": self._entries})
        try:
            self._file.close()
        except OSError as error:
            raise KvdiagError(f"cannot record to {self._path}: {error.strerror}") from error

    def drop(self) -> None:
        """Close after an error: what the file still held cannot be written, which has been said already."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file whatever happened."""
        if error is None:
            self.close()
        else:
            self.drop()


def _bounded(about: Mapping[str, Any]) -> Mapping[str, Any]:
    length = len(json.dumps(about, allow_nan=False))
    if length > MAX_ABOUT_CHARACTERS:
        raise ValueError(f"a trace says {length} characters about itself, {MAX_ABOUT_CHARACTERS} at most")
    return about


def read_trace(
    path: Path, *, from_seconds: float = 0.0, share: Callable[[Sample], Sample] | None = None
) -> tuple[Timeline, Facts]:
    """The timeline and facts of a trace file; samples before `from_seconds` are left out, which takes little time.

    `share` gives for each sample an equal one that takes less memory.

    Raises:
        KvdiagError: it cannot be read, is not a trace, is of a newer version, or holds a bad line (named).

    """
    try:
        if not path.is_file() and path.exists():
            raise KvdiagError(f"{path} is not a file")
        with _opened(path) as file:
            return _read_lines(_lines(file, path), path, from_seconds, share)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KvdiagError(f"cannot read {path}: {reason}") from error


def is_begun(path: Path) -> bool:
    """Whether a trace's first line is whole: a recorder that was killed before that has recorded nothing.

    Raises:
        KvdiagError: the file cannot be read.

    """
    try:
        with _opened(path) as file:
            first = file.readline(MAX_LINE_BYTES)
            return first.endswith(b"\n") or len(first) == MAX_LINE_BYTES
    except EOFError:
        return False
    except (OSError, zlib.error) as error:
        raise KvdiagError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _created(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb"))


def _opened(path: Path) -> IO[bytes]:
    """The file's content, unpacked where it is packed, whatever the file is called."""
    with path.open("rb") as raw:
        packed = raw.read(2) == GZIP_MAGIC
    return cast("IO[bytes]", gzip.open(path, "rb") if packed else path.open("rb"))


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[bytes, bool]]:
    """Each line with whether it is whole. A gzip stream that was cut off ends like a torn line."""
    total = 0
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES)
        except EOFError:
            return
        if not line:
            return
        total += len(line)
        if total > MAX_TRACE_BYTES:
            raise KvdiagError(f"{path} is larger than {MAX_TRACE_BYTES >> 30} GiB unpacked: not a trace of kvdiag")
        yield line, line.endswith(b"\n")


def _read_lines(
    lines: Iterator[tuple[bytes, bool]],
    path: Path,
    from_seconds: float,
    share: Callable[[Sample], Sample] | None,
) -> tuple[Timeline, Facts]:
    facts = _header(next(lines, (b"", False))[0], path)
    samples: list[Sample] = []
    marks: list[Mark] = []
    left_out = 0
    for number, (line, whole) in enumerate(lines, start=2):
        end = END.fullmatch(line)
        if end is not None and int(end[1]) == len(samples) + len(marks) + left_out:
            return Timeline(samples=tuple(samples), marks=tuple(marks)), facts
        if not whole and len(line) < MAX_LINE_BYTES:
            break  # torn: the recorder was killed while it wrote this line
        if not whole:
            raise KvdiagError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
        if from_seconds and _before(line, from_seconds):
            left_out += 1
            continue
        try:
            _add(_decoded(line), samples, marks)
            if share is not None and samples:
                samples[-1] = share(samples[-1])
        except ValueError as error:
            raise KvdiagError(f"{path}, line {number}: {str(error)[:160]}") from error
    return Timeline(samples=tuple(samples), marks=tuple(marks)), replace(facts, gaps=(*facts.gaps, CUT_OFF))


def _before(line: bytes, seconds: float) -> bool:
    """Whether a line as `TraceWriter` writes them is a sample of before then; any other line is looked at whole."""
    if not line.startswith(SAMPLE):
        return False
    try:
        return float(line[len(SAMPLE) :].partition(b",")[0].rstrip(b"}\n")) < seconds
    except ValueError:
        return False


def read_header(path: Path) -> tuple[Facts, float]:
    """The facts of a trace's first line, and how far the clock was set right before it was begun.

    Raises:
        KvdiagError: as `read_trace`, for what stands there.

    """
    try:
        with _opened(path) as file:
            first = next(_lines(file, path), (b"", False))[0]
            facts, moved = _header(first, path), _decoded(first).get(CLOCK_SET, 0.0)
    except (OSError, EOFError, zlib.error) as error:
        raise KvdiagError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(moved, int | float) or isinstance(moved, bool) or not abs(moved) <= MOST_SET_SECONDS:
        raise KvdiagError(f"{path}, line 1: {CLOCK_SET} is no number of seconds")
    return facts, float(moved)


def _header(line: bytes, path: Path) -> Facts:
    not_a_trace = f"{path} is not a trace of kvdiag: its first line is no header"
    try:
        header = _decoded(line)
    except ValueError as error:
        raise NotATraceError(not_a_trace) from error
    version = header.get("kvdiag_trace")
    if type(version) is not int or version < 1:
        raise NotATraceError(not_a_trace)
    if version > FORMAT:
        writer = header.get("kvdiag_version")
        use = f"kvdiag {writer[:40]}" if isinstance(writer, str) else "a newer one"
        raise KvdiagError(f"{path} is a trace of format {version}, this kvdiag reads {FORMAT}: use {use}")
    try:
        return from_plain(Facts, header.get("facts"))
    except ValueError as error:
        raise KvdiagError(f"{path}, line 1: {str(error)[:160]}") from error


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for one kind of mistake
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _add(line: dict[str, Any], samples: list[Sample], marks: list[Mark]) -> None:
    if list(line) == ["sample"]:
        _append(samples, from_plain(Sample, line["sample"]), "sample")
    elif list(line) == ["mark"]:
        _append(marks, from_plain(Mark, line["mark"]), "mark")
    elif list(line) == ["end"]:
        raise ValueError("the end of a trace with another number of samples and marks: was it edited?")
    else:
        raise ValueError("neither a sample nor a mark")


def _append(entries: list[Entry], entry: Entry, kind: str) -> None:
    if entries and entry.at_seconds < entries[-1].at_seconds:
        raise ValueError(f"its time is before that of the {kind} before it")
    entries.append(entry)
