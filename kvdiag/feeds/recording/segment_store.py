"""The folder of a recorder: trace segments that rotate within a size limit, readable even after a kill.

    DIR/kvdiag-00000001.jsonl.gz           every sample, a line each     DIR/history/kvdiag-00000001.jsonl.gz   the last
day thinned to minutes, restored at the next start

A segment ends when it is full or old, when the facts change, and when the clock was set, since a trace has one set of
facts and ascending times. Room for a whole new segment is made before it is written, by removing the oldest. A lock
that ends with its process keeps a second recorder out. Links and files of other users are neither followed nor removed.
A torn last line, which a kill leaves, is dropped by readers.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

from kvdiag import files as files_
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts, Sample

MAX_BYTES = 256 * 2**20
"""Three days of a host with eight GPUs and agents (0.9 KB/s packed), a month of one GPU."""

MIN_MAX_BYTES = 4 * 2**20
"""A day of eight GPUs thinned to minutes takes 2 MiB of it."""

SEGMENT_SECONDS = 3600.0
"""Of one segment at most; the reader takes a month of them."""

SEGMENTS = 8
"""A segment has at most this part of the size limit, so that little is removed for a new one."""

MAX_FILES = 1000
"""A daemon that is started every few seconds leaves a segment each time; the reader takes 1,024."""

HISTORY_SECONDS = 21_600.0
"""Of one segment of the history: a day and at most this much are kept."""

KEPT_SECONDS = 86_400.0

NAME = re.compile(r"kvdiag-(\d{8,12})\.jsonl\.gz", re.ASCII)
"""Files of the recorder, if they belong to its user. No other file is read or changed."""

MAX_TAKEN = 1000
"""Existing names that are skipped before it is an error."""

HISTORY = "history"


class _Segment(NamedTuple):
    path: Path
    writer: TraceWriter
    begun_seconds: float


class SegmentStore:
    """The files of one folder, written by one recorder at a time."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Take the folder, made where it is missing.

        Raises:
            KvdiagError: it cannot be made, read or written, or another recorder has it.
        """
        self.folder = folder
        self._is_link = folder.is_symlink()
        self._history = folder / HISTORY
        self.max_bytes = max_bytes
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
            os.close(files_.folder(folder))
            _make_history(folder)
            self._lock = _locked(folder / ".lock")
            self._number = max((number_of(path) for path in (*files(folder), *files(folder / HISTORY))), default=0)
        except OSError as error:
            raise KvdiagError(
                f"cannot record to {folder}: {(error.strerror or str(error)).lower()}; give another --record-dir"
            ) from error
        self._facts = Facts()
        self._earlier: tuple[tuple[float, Facts], ...] = ()
        self._set_seconds = 0.0
        self._open: dict[Path, _Segment] = {}
        self._histories: list[_Segment] = []

    def begin(self, facts: Facts, earlier: tuple[tuple[float, Facts], ...] = ()) -> None:
        """Write the next samples to new segments with these facts, and those of earlier lives, in their headers."""
        if (facts, earlier) != (self._facts, self._earlier):
            self._facts, self._earlier = facts, earlier
            self._end(self.folder)
            self._end(self._history)

    def clock_was_set(self, seconds: float) -> None:
        """Begin a new segment, whose header records how far the clock was set: its times may precede earlier ones."""
        self._end(self.folder)
        self._set_seconds += seconds

    def add(self, sample: Sample) -> None:
        """Write one sample, in a new segment where the old one is full.

        Raises:
            KvdiagError: the disk is full or unmounted; the segment ends there.
        """
        if self.folder not in self._open:
            self._start(self.folder, sample.at_seconds, self._set_seconds)
            self._set_seconds = 0.0
            self._make_room()
        size, age_seconds = self._write(self.folder, (sample,))
        if size >= self.max_bytes // SEGMENTS or not 0.0 <= age_seconds < SEGMENT_SECONDS:
            self._end(self.folder)

    def keep(self, samples: Sequence[Sample]) -> None:
        """Write a minute that was thinned to the history.

        Raises:
            KvdiagError: the disk is full or unmounted.
        """
        if not samples:
            return
        first_seconds, segment = samples[0].at_seconds, self._open.get(self._history)
        if segment is not None and not 0.0 <= first_seconds - segment.begun_seconds < HISTORY_SECONDS:
            self._end(self._history)
        if self._history not in self._open:
            self._histories.append(self._start(self._history, first_seconds))
            # A segment is too old if the one after it begins before the kept time.
            while len(self._histories) > 1 and self._histories[1].begun_seconds < first_seconds - KEPT_SECONDS:
                _remove([self._histories.pop(0).path])
        self._write(self._history, samples)

    def renew_history(self, samples: Sequence[Sample]) -> None:
        """Replace the history.

        Raises:
            KvdiagError: the disk is full or unmounted; the old ones are still there.
        """
        old = files(self._history)
        self._end(self._history)
        self._histories.clear()
        self.keep(samples)
        _remove(old)

    def resize(self, max_bytes: int) -> None:
        """Change the size limit."""
        self.max_bytes = max_bytes
        self._make_room()

    def close(self) -> None:
        """End the open segments and unlock the folder.

        Raises:
            KvdiagError: the disk is full or unmounted; the folder is unlocked all the same.
        """
        try:
            self._end(self.folder)
            self._end(self._history)
        finally:
            self._lock.close()

    def _start(self, folder: Path, begun_seconds: float, clock_set_seconds: float = 0.0) -> _Segment:
        """Create and open a segment with the next free number; a link with that name counts as taken."""
        made: list[Path] = []

        def new(path: Path) -> int:
            # The user may give a link as the directory; the history directory in it must not be one.
            file = files_.created(path, link=folder == self.folder and self._is_link)
            made.append(path)
            return file

        for number in count(self._number + 1):
            path = folder / f"kvdiag-{number:08d}.jsonl.gz"
            try:
                # The folder may have been emptied; the recorder does not create it again.
                self._refuse_link()
                if self.folder.is_dir():
                    self._hold()
                    _make_history(self.folder)
                writer = TraceWriter(
                    path, self._facts, clock_set_seconds=clock_set_seconds, earlier_facts=self._earlier, opened=new
                )
            except KvdiagError as error:
                if isinstance(error.__cause__, FileExistsError) and number < self._number + MAX_TAKEN:
                    continue
                # It is empty; the next attempt uses the same number.
                _remove(made)
                raise
            self._number = number
            self._open[folder] = _Segment(path, writer, begun_seconds)
            return self._open[folder]
        raise AssertionError("there is always a next number")

    def _refuse_link(self) -> None:
        if self.folder.is_symlink() and not self._is_link:
            raise KvdiagError(f"cannot record to {self.folder}: a symbolic link has taken its place")

    def _hold(self) -> None:
        """Lock the folder again if it was replaced: the lock was the old one's."""
        lock = self.folder / ".lock"
        try:
            is_ours = os.path.samestat(os.fstat(self._lock.fileno()), lock.lstat())
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            old, self._lock = self._lock, _locked(lock)
            old.close()

    def _write(self, folder: Path, samples: Sequence[Sample]) -> tuple[int, float]:
        """Write to the open segment of a folder; return its size, and its age by the newest sample."""
        segment = self._open[folder]
        try:
            self._refuse_link()
            for sample in samples:
                segment.writer.add(sample)
            try:
                size = segment.path.lstat().st_size
            except OSError as error:
                raise KvdiagError(f"{segment.path} was removed: {(error.strerror or '').lower()}") from error
        except KvdiagError:
            self._open.pop(folder).writer.drop()
            raise
        return size, samples[-1].at_seconds - segment.begun_seconds

    def _end(self, folder: Path) -> None:
        if (segment := self._open.pop(folder, None)) is not None:
            try:
                segment.writer.close()
            except KvdiagError:
                segment.writer.drop()
                raise

    def _make_room(self) -> None:
        """Remove the oldest segments until a whole new one fits the size limit."""
        self._refuse_link()
        found = [(path, _size(path)) for path in files(self.folder)]
        history_bytes = sum(_size(path) for path in files(self._history))
        left = self.max_bytes - self.max_bytes // SEGMENTS - history_bytes - sum(size for _, size in found)
        while found and (left < 0 or len(found) > MAX_FILES):
            path, size = found.pop(0)
            if self.folder in self._open and path == self._open[self.folder].path:
                break
            _remove([path])
            left += size


def files(folder: Path) -> list[Path]:
    """A recorder's segments in the order in which they were begun.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if NAME.fullmatch(entry.name) and _is_ours(entry)]
    return sorted((folder / name for name in found), key=number_of)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a regular file of this user or root; other users may have put files here."""
    try:
        about = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid in (0, os.geteuid())


def _make_history(folder: Path) -> None:
    path = folder / HISTORY
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        os.close(files_.folder(path, link=False))
    except OSError as error:
        reason = files_.LINK if path.is_symlink() else error.strerror
        raise KvdiagError(f"cannot record to {path}: {reason}; give another --record-dir") from error


def number_of(path: Path) -> int:
    """A segment's place in the order in which all were begun, those of the history among them."""
    found = NAME.fullmatch(path.name)
    return 0 if found is None else int(found[1])


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _remove(paths: Iterable[Path]) -> None:
    """Remove files; the history directory is not followed if it is a link."""
    for path in paths:
        with contextlib.suppress(OSError):
            folder = files_.folder(path.parent, link=path.parent.name != HISTORY)
            try:
                os.unlink(path.name, dir_fd=folder)
            finally:
                os.close(folder)


def _locked(path: Path) -> IO[bytes]:
    """A lock that ends with its process, even after a kill."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | files_.CLOSED, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise KvdiagError(f"another kvdiag records to {path.parent}: give each a --record-dir of its own") from error
    return file
