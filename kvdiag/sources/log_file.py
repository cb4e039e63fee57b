"""Reads an engine's log or a bare message of any length: its beginning, the part around the first failure, its end.

A log can cover weeks. The start shows the server's settings, and the cause of a crash can be anywhere after it. Reading
is limited in bytes, and in the time that a pipe may stay silent.
"""

import gzip
import os
import select
import stat
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, get_args

from kvdiag.errors import KvdiagError
from kvdiag.files import GZIP_MAGIC
from kvdiag.formatting import format_duration
from kvdiag.oom.log import MAX_LINE_CHARACTERS, REQUEST_LINE
from kvdiag.oom.message import ANCHORS, WARNINGS, Kind, wordings

CHUNK_BYTES = 2**20
HEAD_CHUNKS = 3
ROUND_CHUNKS = 1
"""Kept before and after the chunk with the failure: a traceback has some 50 KB."""

TAIL_CHUNKS = 3
MAX_BYTES = 512 * 2**20
SILENT_SECONDS = 60.0
WHOLE_SECONDS = 600.0
"""For all of a pipe: a writer that keeps sending a little would never end."""

UNOPENED_SECONDS = 2.0

_KINDS = frozenset(get_args(Kind)) - WARNINGS - {"host"}
LITERALS: tuple[str, ...] = tuple(wordings("literals"))
"""Each message about device memory or the KV pool contains one of them, in any case; this test costs a hundredth of the
patterns.
"""


def read_long_log(
    path: Path, *, silent_seconds: float = SILENT_SECONDS, whole_seconds: float = WHOLE_SECONDS
) -> tuple[bytes, bool]:
    """The kept part of the file at `path` (`-` is standard input), and whether that is all of it.

    A pipe may be silent for `silent_seconds`, and take `whole_seconds` to end.

    Raises:
        KvdiagError: it cannot be read, or a pipe stays silent.
    """
    limits_seconds = silent_seconds, whole_seconds
    try:
        if str(path) == "-":
            return _kept(_chunks(sys.stdin.buffer.fileno(), "standard input", *limits_seconds))
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(file).st_mode
            if stat.S_ISDIR(mode):
                raise KvdiagError(f"{path} is a folder: give the file with the engine's log")
            if stat.S_ISREG(mode) and os.pread(file, len(GZIP_MAGIC), 0) == GZIP_MAGIC:
                with os.fdopen(os.dup(file), "rb") as packed:
                    return _kept(_unpacked(packed))
            chunks = _chunks(file, str(path), *limits_seconds)
            return _kept(chain(chunks, _end(file)) if stat.S_ISREG(mode) else chunks)
        finally:
            os.close(file)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KvdiagError(f"cannot read {path}: {reason}") from error


def _chunks(file: int, name: str, silent_seconds: float, whole_seconds: float) -> Iterator[bytes]:
    """Whole chunks except the last one; KvdiagError if a pipe's writer stays silent, or does not end."""
    held, total = b"", 0
    begun_seconds = time.monotonic()
    unopened_until = begun_seconds + UNOPENED_SECONDS
    waits = os.get_blocking(file)
    while total < MAX_BYTES:
        if time.monotonic() - begun_seconds > whole_seconds:
            raise KvdiagError(f"{name} has not ended within {format_duration(whole_seconds)}: give a log that ends")
        if waits:
            _wait(file, name, silent_seconds)
        try:
            read = os.read(file, CHUNK_BYTES)
        except BlockingIOError:
            _wait(file, name, silent_seconds)
            continue
        if not read:
            # A named pipe without a writer reads as ended.
            if not total and stat.S_ISFIFO(os.fstat(file).st_mode) and time.monotonic() < unopened_until:
                time.sleep(0.05)
                continue
            break
        held, total = held + read, total + len(read)
        if len(held) >= CHUNK_BYTES:
            yield held
            held = b""
    if held:
        yield held


def _end(file: int) -> Iterator[bytes]:
    """The end of a regular file of which the first `MAX_BYTES` were read; nothing if that was all."""
    position, size = os.lseek(file, 0, os.SEEK_CUR), os.fstat(file).st_size
    if size > position:
        os.lseek(file, max(position, size - TAIL_CHUNKS * CHUNK_BYTES), os.SEEK_SET)
        while chunk := os.read(file, CHUNK_BYTES):
            yield chunk


def _wait(file: int, name: str, silent_seconds: float) -> None:
    """Wait for a pipe's writer; KvdiagError if it stays silent."""
    if not select.select([file], [], [], silent_seconds)[0]:
        raise KvdiagError(f"{name} has sent nothing for {format_duration(silent_seconds)}: give a log that ends")


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    total = 0
    with gzip.open(file) as unpacked:
        while total < MAX_BYTES and (chunk := unpacked.read(CHUNK_BYTES)):
            total += len(chunk)
            yield chunk


def _kept(chunks: Iterator[bytes]) -> tuple[bytes, bool]:
    kept: list[tuple[int, bytes]] = []
    recent: deque[tuple[int, bytes]] = deque(maxlen=TAIL_CHUNKS)
    found: int | None = None
    number = -1
    for number, chunk in enumerate(chunks):
        before = recent[-1][1] if recent else b""
        if found is None and _tells(before[-4096:] + chunk):
            found = number
            kept += [each for each in recent if number - each[0] <= ROUND_CHUNKS and each[0] >= HEAD_CHUNKS]
        if number < HEAD_CHUNKS or (found is not None and number <= found + ROUND_CHUNKS):
            kept.append((number, chunk))
        recent.append((number, chunk))
    numbers = {each[0] for each in kept}
    kept += [each for each in recent if each[0] not in numbers]
    parts = [(b"" if at == 0 or kept[at - 1][0] == each[0] - 1 else b"\n") + each[1] for at, each in enumerate(kept)]
    return b"".join(parts), len(kept) == number + 1


def _tells(chunk: bytes) -> bool:
    text = chunk.decode("utf-8", "replace")
    lowered = text.lower()
    if not any(literal in lowered for literal in LITERALS):
        return False
    found = chain.from_iterable(pattern.finditer(text) for kind, pattern in ANCHORS if kind in _KINDS)
    return any(_is_the_servers_own(text, one.start()) for one in found)


def _is_the_servers_own(text: str, position: int) -> bool:
    """Whether the line does not quote a user's request."""
    end = text.find("\n", position)
    line = text[text.rfind("\n", 0, position) + 1 : end if end >= 0 else len(text)]
    return REQUEST_LINE.search(line[:MAX_LINE_CHARACTERS]) is None
