"""A bundle: one zip archive of a recording and what was found in it, to attach to a report of a bug.

Its trace is a trace like any other, under one name, so that everything which reads a trace reads a bundle. An archive
may come from anybody: its list of contents is read only after the record at its end, which says how long that list is.
"""

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from kvdiag.errors import KvdiagError
from kvdiag.model import Timeline

MAGIC = b"PK\x03\x04"
TRACE = "trace.jsonl"

NEWEST_SECONDS = 3600.0

_END = struct.Struct("<4s4H2LH")
"""The end of an archive: signature, two disk numbers, entries here and in all, size and place of the list, comment."""

_END_MAGIC, _WIDE_MAGIC = b"PK\x05\x06", b"PK\x06\x07"
_WIDE_BYTES = 20

MAX_ENTRIES, MAX_LIST_BYTES = 16, 4096
"""A bundle has five files with short names."""


def newest(timeline: Timeline, seconds: float = NEWEST_SECONDS) -> Timeline:
    """The last so many seconds of a timeline, with the marks in them."""
    since = max((one.at_seconds for one in timeline.samples), default=0.0) - seconds
    return Timeline(
        samples=tuple(one for one in timeline.samples if one.at_seconds >= since),
        marks=tuple(one for one in timeline.marks if one.at_seconds >= since),
        earlier_facts=tuple(one for one in timeline.earlier_facts if one[0] >= since),
    )


def write_bundle(path: Path, trace: Path, documents: Mapping[str, str]) -> dict[str, int]:
    """Write a bundle of a trace and further files by their names; returns each name's size in bytes.

    Raises:
        KvdiagError: the file exists, or cannot be written.
    """
    try:
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, text in documents.items():
                archive.writestr(name, text)
            archive.write(trace, TRACE)
            return {one.filename: one.file_size for one in archive.infolist()}
    except OSError as error:
        raise KvdiagError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def opened_trace(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """The lines of a bundle's trace, unpacked as they are read.

    Raises:
        KvdiagError: it is no bundle, or damaged.
    """
    if (problem := _problem(raw)) is not None:
        raise KvdiagError(f"{path}: {problem}")
    try:
        with zipfile.ZipFile(raw) as archive:
            if TRACE not in archive.namelist():
                raise KvdiagError(
                    f"{path} is not a bundle of kvdiag: it has no {TRACE}; give the file as it was written"
                )
            if archive.getinfo(TRACE).compress_type != zipfile.ZIP_DEFLATED:
                raise KvdiagError(f"{path} was packed again by another program: give the file as it was written")
            with archive.open(TRACE) as file:
                yield file
    except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError, NotImplementedError, RuntimeError) as error:
        raise KvdiagError(f"cannot read {path}: {error}: the file is damaged") from error


def _problem(raw: IO[bytes]) -> str | None:
    """Why the archive's list of contents cannot be a bundle's; `None` if it can."""
    size = raw.seek(0, 2)
    raw.seek(max(size - _END.size - _WIDE_BYTES, 0))
    tail = raw.read()
    raw.seek(0)
    magic, _, _, _, entries, list_bytes, _, comment = _END.unpack(tail[-_END.size :].rjust(_END.size, b"\0"))
    if magic != _END_MAGIC or comment:
        return "the archive does not end as a bundle does: it was cut off or changed; copy it again"
    if tail[: -_END.size].startswith(_WIDE_MAGIC) or entries > MAX_ENTRIES or list_bytes > MAX_LIST_BYTES:
        return "the archive holds more than a bundle of kvdiag does; was it packed again?"
    return None
