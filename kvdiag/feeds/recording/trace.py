"""Recorded timelines: JSON Lines, gzip allowed. First line the header with the facts, then one sample or mark a line.

A header may have free metadata `about` the trace, such as its origin; it is not judged. A recorder's has the facts of
the server's earlier lives.
The last line has the number of entries. A trace without it was cut off, which becomes a gap of its facts, and a torn
last line is dropped: a kill leaves both. Any other bad line is an error that names it.

Every few entries a line has the checksum of all before it, and so has the last one: a flipped bit may leave a valid
line. How much is read is bounded in bytes, lines and memory (`kvdiag.feeds.recording.budget`).
"""

import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import kvdiag
from kvdiag import files
from kvdiag.engines import ENGINES
from kvdiag.engines.engine import SOURCE
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording import archive
from kvdiag.feeds.recording.budget import THINNED, Budget, Kept, TooLongError, memory_bytes
from kvdiag.model import Facts, Gap, Mark, Sample, Timeline
from kvdiag.model.codec import from_plain, to_plain
from kvdiag.sources.bounded_json import decode_object

FORMAT = 1
"""Raised when an older kvdiag could read a newer trace wrongly. Added fields alone make an older one refuse by name."""

MAX_LINE_BYTES = 4 * 2**20
"""A sample of 8 GPUs with 64 processes each takes 40 KB."""

MAX_ABOUT_CHARACTERS = 64 * 2**10
"""Room for a report's sources and figures; the reader's bound is the line's."""

MAX_LINE_VALUES = 100_000
"""A sample of 8 GPUs with 64 processes each has 2,000."""

CHECK_EVERY = 10
"""Samples and marks from one checksum to the next: of what a kill cut off, so many may be read unchecked."""

CUT_OFF = Gap("trace", "failed", "the trace is incomplete: its recorder was killed, or is still writing")

END = re.compile(rb'\{"end":\s*(\d{1,18})(?:,"crc32":(\d{1,10}))?\}\s*\n')
"""The last line of a whole trace, with the number of entries before it, and the checksum of all of it."""

CHECK = re.compile(rb'\{"crc32":(\d{1,10})\}\n')
"""A line with the checksum of all before it."""

CLOCK_SET, EARLIER = "clock_set_seconds", "earlier_facts"

MAX_SET_SECONDS = 2e9
"""From 1970, where a machine without a clock begins, to now."""

ENGINE_NAMES = frozenset(engine.name for engine in ENGINES)

Read = TypeVar("Read", Facts, Sample)

SAMPLE = b'{"sample":{"at_seconds":'
"""How the line of a sample begins."""


class NotATraceError(KvdiagError):
    """A file that begins as no trace does; one that only has a bad line is a trace."""


class DamagedError(KvdiagError):
    """A trace that is not as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Earlier:
    until_seconds: float
    facts: Facts


class Header(NamedTuple):
    """A trace's first line. `earlier_facts` are as in a `Timeline`, `None` where its writer names none."""

    facts: Facts
    clock_set_seconds: float
    earlier_facts: tuple[tuple[float, Facts], ...] | None


class TraceWriter(contextlib.AbstractContextManager["TraceWriter"]):
    """Writes a trace line by line, each flushed, so that a kill loses the last line at most."""

    def __init__(
        self,
        path: Path,
        facts: Facts,
        about: Mapping[str, Any] | None = None,
        *,
        clock_set_seconds: float = 0.0,
        earlier_facts: Sequence[tuple[float, Facts]] | None = None,
        opened: Callable[[Path], int] = files.emptied,
    ) -> None:
        """Begin a trace in a new file or over an old one of ours; `about` is metadata for its header.

        `opened` returns the descriptor of the file, emptied.
        `clock_set_seconds` is how far the clock was set between the recording before this one and this one;
        `earlier_facts` are those of the server's earlier lives.

        Raises:
            KvdiagError: the file cannot be written.
            ValueError: `about` is no JSON, or too long.
        """
        self._path = path
        self._entries = 0
        self._crc32 = 0
        header = {"kvdiag_trace": FORMAT, "kvdiag_version": kvdiag.__version__, "facts": to_plain(facts)}
        if clock_set_seconds:
            header[CLOCK_SET] = clock_set_seconds
        if earlier_facts is not None:
            header[EARLIER] = [to_plain(_Earlier(until_seconds=until, facts=one)) for until, one in earlier_facts]
        if about is not None:
            if (length := len(json.dumps(about, allow_nan=False))) > MAX_ABOUT_CHARACTERS:
                raise ValueError(f"`about` has {length} characters; at most {MAX_ABOUT_CHARACTERS} are allowed")
            header["about"] = about
        with self._recording():
            self._raw = os.fdopen(opened(path), "wb")
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw) if path.suffix == ".gz" else self._raw
        self._file = cast("IO[bytes]", packed)
        try:
            self._write(header)
        except KvdiagError:
            self.drop()
            raise

    def add(self, entry: Sample | Mark) -> None:
        """Append one sample or mark.

        Raises:
            KvdiagError: the disk is full or unmounted.
        """
        kind = "sample" if isinstance(entry, Sample) else "mark"
        self._write({kind: to_plain(entry)})
        self._entries += 1
        if self._entries % CHECK_EVERY == 0:
            self._write({"crc32": self._crc32})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._crc32 = zlib.crc32(text, self._crc32)
        with self._recording():
            self._file.write(text)
            self._file.flush()

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KvdiagError(f"cannot record to {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """End the trace.

        Raises:
            KvdiagError: the disk is full or unmounted.
        """
        if self._file.closed:
            return
        self._write({"end": self._entries, "crc32": self._crc32})
        with self._recording():
            self._file.close()
            self._raw.close()

    def drop(self) -> None:
        """Close after an error: what the file still buffers cannot be written, which was reported already."""
        for file in (self._file, self._raw):
            with contextlib.suppress(OSError):
                file.close()

    def __exit__(self, *raised: object) -> None:
        """Close the file, after an error without its end."""
        if raised[0] is None:
            self.close()
        else:
            self.drop()


def read_trace(
    path: Path,
    *,
    from_seconds: float = 0.0,
    share: Callable[[Sample], Sample] | None = None,
    budget: Budget | None = None,
) -> tuple[Timeline, Facts]:
    """The timeline and facts of a trace file; samples before `from_seconds` are left out, which takes little time.

    `share` returns for each sample an equal one that takes less memory; `budget` is shared by several files.

    Raises:
        KvdiagError: it cannot be read, is not a trace, is of a newer version, or holds a bad line (named).
        DamagedError: it is not as it was written.
        TooLongError: it is longer than the budget.
    """
    try:
        with _unpacked(path) as file:
            return _read_lines(_lines(file), path, from_seconds, share, budget or Budget())
    except TooLongError as error:
        raise TooLongError(f"{path} is too long: {error}") from error


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The file's content, unpacked where it is packed; the name does not matter."""
    try:
        if not path.is_file() and path.exists():
            raise KvdiagError(f"{path} is not a file")
        with files.opened(path) as raw:  # something else may have taken its place
            begin = raw.read(len(archive.MAGIC))
            raw.seek(0)
            if begin == archive.MAGIC:
                with archive.opened_trace(raw, path) as file:
                    yield file
                return
            with gzip.open(raw) if begin.startswith(files.GZIP_MAGIC) else raw as file:
                yield cast("IO[bytes]", file)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DamagedError(f"cannot read {path}: {error}: the file is damaged") from error
    except (OSError, EOFError) as error:
        raise KvdiagError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each line with whether it is whole. A gzip stream that was cut off ends with an empty one that is not."""
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES)
        except EOFError:
            yield b"", False
            return
        if not line:
            return
        yield line, line.endswith(b"\n")


def _read_lines(
    lines: Iterator[tuple[bytes, bool]],
    path: Path,
    from_seconds: float,
    share: Callable[[Sample], Sample] | None,
    budget: Budget,
) -> tuple[Timeline, Facts]:
    header = next(lines, (b"", False))[0]
    facts, crc32 = _header(header, path).facts, zlib.crc32(header)
    kept = Kept(budget)
    count = 0
    for number, (line, whole) in enumerate(lines, start=2):
        budget.take(line)
        if found := CHECK.fullmatch(line) or END.fullmatch(line):
            if (reported := found[found.re.groups]) is not None and int(reported) != crc32:
                raise DamagedError(f"{path}, line {number}: the lines before it are damaged or were edited")
            if found.re is END and int(found[1]) == count:
                # gzip compares its own checksum, which stands behind all that is packed, with this last line.
                rest, _ = next(lines, (None, True))
                if rest:
                    raise DamagedError(f"{path} continues after its end line: it is damaged or was edited")
                torn = rest is not None and reported is None
                return _timeline(kept, facts, *((CUT_OFF,) if torn else ()))
        crc32 = zlib.crc32(line, crc32)
        if found and found.re is CHECK:
            continue
        if not whole and len(line) < MAX_LINE_BYTES:
            break  # torn: the recorder was killed while it wrote this line
        if not whole:
            raise KvdiagError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
        count += 1
        if from_seconds and _before(line, from_seconds):
            continue
        try:
            _add(decode_object(line, max_values=MAX_LINE_VALUES), kept, memory_bytes(line), share)
        except ValueError as error:
            why = "not valid JSON" if isinstance(error, json.JSONDecodeError) else str(error)[:160]
            raise KvdiagError(f"{path}, line {number}: {why}") from error
    return _timeline(kept, facts, CUT_OFF)


def _timeline(kept: Kept, facts: Facts, *gaps: Gap) -> tuple[Timeline, Facts]:
    timeline = Timeline(samples=kept.samples(), marks=tuple(kept.marks))
    gaps = (*facts.gaps, *gaps, *(() if kept.is_whole else (THINNED,)))
    return timeline, replace(facts, gaps=gaps)


def _before(line: bytes, seconds: float) -> bool:
    """Whether a line as `TraceWriter` writes them is a sample of before then; any other line is looked at whole."""
    if not line.startswith(SAMPLE):
        return False
    try:
        return float(line[len(SAMPLE) :].partition(b",")[0].rstrip(b"}\n")) < seconds
    except ValueError:
        return False


def read_header(path: Path) -> Header | None:
    """A trace's first line; `None` where that is not whole: a recorder killed before has recorded nothing.

    Raises:
        KvdiagError: as `read_trace`, for what stands there.
    """
    with _unpacked(path) as file:
        line, whole = next(_lines(file), (b"", False))
    return _header(line, path) if whole or len(line) == MAX_LINE_BYTES else None


def _header(line: bytes, path: Path) -> Header:
    not_a_trace = f"{path} is not a kvdiag trace: its first line is not a header"
    try:
        header = decode_object(line, max_values=MAX_LINE_VALUES)
    except ValueError as error:
        raise NotATraceError(not_a_trace) from error
    version = header.get("kvdiag_trace")
    if type(version) is not int or version < 1:
        raise NotATraceError(not_a_trace)
    if version > FORMAT:
        writer = header.get("kvdiag_version")
        use = f"kvdiag {writer[:40]}" if isinstance(writer, str) else "a newer one"
        raise KvdiagError(f"{path} has trace format {version}, but this kvdiag reads format {FORMAT}: use {use}")
    moved, earlier = header.get(CLOCK_SET, 0.0), header.get(EARLIER)
    if not isinstance(moved, int | float) or isinstance(moved, bool) or not abs(moved) <= MAX_SET_SECONDS:
        raise KvdiagError(f"{path}, line 1: {CLOCK_SET} is not a number of seconds")
    if not isinstance(earlier, list | None):
        raise KvdiagError(f"{path}, line 1: {EARLIER} is not a list")
    try:
        facts = _of_today(from_plain(Facts, header.get("facts")))
        known = None if earlier is None else [from_plain(_Earlier, one) for one in earlier]
        lives = None if known is None else tuple((one.until_seconds, one.facts) for one in known)
    except ValueError as error:
        raise KvdiagError(f"{path}, line 1: {str(error)[:160]}") from error
    return Header(facts, float(moved), lives)


def _add(line: dict[str, Any], kept: Kept, size_bytes: int, share: Callable[[Sample], Sample] | None) -> None:
    if list(line) == ["sample"]:
        sample = _of_today(from_plain(Sample, line["sample"]))
        _refuse_earlier(sample, kept.last, "sample")
        kept.add(sample if share is None else share(sample), size_bytes)
    elif list(line) == ["mark"]:
        mark = from_plain(Mark, line["mark"])
        _refuse_earlier(mark, kept.marks[-1] if kept.marks else None, "mark")
        kept.mark(mark, size_bytes)
    elif "end" in line:
        raise ValueError("the trace's end reports another number of samples and marks: was it edited?")
    else:
        raise ValueError("neither a sample nor a mark")


def _of_today(read: Read) -> Read:
    """The same with the source of the engine's gaps as it is called now: early traces have the engine's name there."""
    if not any(gap.source in ENGINE_NAMES for gap in read.gaps):
        return read
    gaps = (replace(gap, source=SOURCE) if gap.source in ENGINE_NAMES else gap for gap in read.gaps)
    return replace(read, gaps=tuple(gaps))


def _refuse_earlier(entry: Sample | Mark, before: Sample | Mark | None, kind: str) -> None:
    if before is not None and entry.at_seconds < before.at_seconds:
        raise ValueError(f"its time is before the previous {kind}'s")
