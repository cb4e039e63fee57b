"""The folder that keeps a fleet's state: one file for each replica, and one that says what they are of.

A file is replaced in one step when its replica is judged, and extended in between; a block that a crash cut off is
dropped, and its samples are read again. Files that a crash left half written are removed at the start; those of another
Prometheus, selector or window when the first replica of this one is kept, so that a wrong address costs nothing. One
daemon writes to a folder at a time.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvdiag import files
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.replica_samples import DamagedError, ReplicaSamples, block, restored, verdict_block

MAX_FILE_BYTES = 256 * 2**20
FORMAT = 1
_ABOUT = "fleet.json"
_LOCK = ".lock"
"""The name that a recording uses too: a folder is either."""
_SUFFIX = ".replica"


class ReplicaFiles:
    """The files of replicas in a folder; each is read and written by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Use a folder that exists."""
        self._path = path

    def load(self, key: str) -> ReplicaSamples | None:
        """A replica's samples; `None` if there is no usable file."""
        file = self._file(key)
        try:
            with files.opened(file, write=True) as opened:
                # A page is made while a round appends: what it has not written yet is no damage.
                fcntl.flock(opened, fcntl.LOCK_EX)
                content = _read(opened)
                samples, _, sound = restored(content)
                if sound < len(content):
                    with contextlib.suppress(OSError):
                        opened.truncate(sound)
        except (OSError, DamagedError):
            return None
        return samples

    def content(self, key: str) -> bytes:
        """A replica's file as it is; nothing if there is none."""
        try:
            return _content(self._file(key))
        except (OSError, DamagedError):
            return b""

    def take(self, key: str, content: bytes) -> None:
        """Write a replica's file as another machine made it.

        Raises:
            OSError: it cannot be written.
        """
        files.replace(self._file(key), content, mode=0o600)

    def replace(self, key: str, samples: ReplicaSamples, start_seconds: float, about: Mapping[str, Any]) -> None:
        """Write a replica's samples in place of all that its file has.

        Raises:
            OSError: it cannot be written.
        """
        self.take(key, block(samples, start_seconds, {"key": key, **about}))

    def extend(self, key: str, samples: ReplicaSamples, start_seconds: float) -> None:
        """Add what a later read brought, which began at `start_seconds`.

        Raises:
            OSError: it cannot be written.
        """
        self._append(key, block(samples, start_seconds))

    def judged(self, key: str, samples: ReplicaSamples, start_seconds: float, about: Mapping[str, Any]) -> None:
        """Keep a verdict, and only those samples that it is by; a file that was just read whole has no others.

        Raises:
            OSError: it cannot be written.
        """
        if samples.blocks == 1:
            self._append(key, verdict_block({"key": key, **about}))
        else:
            self.replace(key, samples, start_seconds, about)

    def _append(self, key: str, content: bytes) -> None:
        file = os.open(self._file(key), os.O_WRONLY | os.O_APPEND | files.CLOSED)
        with os.fdopen(file, "ab", buffering=0) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            before = os.fstat(file).st_size
            try:
                written = opened.write(content)
                while written < len(content):
                    written += opened.write(content[written:])
            except OSError:
                # What is appended to half a block could not be read again.
                opened.truncate(before)
                raise

    def remove(self, key: str) -> None:
        """Forget a replica."""
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self._path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_SUFFIX}"


class StateFolder(ReplicaFiles):
    """The files of a fleet. `about` says what they are of; others are not read, and removed by the first that is kept.

    `others` is what those are of, as far as it is known; `None` where there are none.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], *, discarded: Callable[[int], None] = lambda _: None
    ) -> None:
        """Make or open the folder; `discarded` gets the number of files of others when they are removed.

        Raises:
            KvdiagError: it cannot be written, or another kvdiag uses it.
        """
        super().__init__(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path / _LOCK)
            for file in path.glob(f".*{files.UNFINISHED}"):
                file.unlink()
            self._known, self._discarded = {"format": FORMAT, **about}, discarded
            before = self._about()
            self.others = before if before != self._known and list(self._files()) else None
            if before != self._known and self.others is None:
                self._write_about()
        except OSError as error:
            reason = f"cannot keep the fleet in {path}: {error.strerror}"
            raise KvdiagError(f"{reason}; give another --record-dir") from error

    def load(self, key: str) -> ReplicaSamples | None:
        """A replica's samples; `None` if there is no usable file."""
        return None if self.others is not None else super().load(key)

    def take(self, key: str, content: bytes) -> None:
        """Write a replica's file; those of others are removed before it.

        Raises:
            OSError: it cannot be written.
        """
        if self.others is not None:
            old = list(self._files())
            for file in old:
                file.unlink()
            self._discarded(len(old))
            self._write_about()
            self.others = None
        super().take(key, content)

    def _write_about(self) -> None:
        files.replace(self._path / _ABOUT, json.dumps(self._known).encode())

    @property
    def shared(self) -> ReplicaFiles:
        """The same files for a worker process, without the lock."""
        return ReplicaFiles(self._path)

    def _about(self) -> Mapping[str, Any]:
        try:
            found = json.loads((self._path / _ABOUT).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _files(self) -> Iterator[Path]:
        for entry in os.scandir(self._path):
            if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)

    def close(self) -> None:
        """Let another daemon use the folder."""
        self._lock.close()

    def kept(self) -> Iterator[tuple[str, Mapping[str, Any], ReplicaSamples]]:
        """Each replica that has a file, what is kept with its samples, and these; damaged files are removed."""
        for file in sorted(self._files()) if self.others is None else ():
            with contextlib.suppress(OSError, DamagedError):
                samples, about, _ = restored(_content(file))
                if isinstance(key := about.get("key"), str) and self._file(key) == file:
                    yield key, about, samples
                    continue
            with contextlib.suppress(OSError):
                file.unlink()


def _content(file: Path) -> bytes:
    with files.opened(file) as opened:
        return _read(opened)


def _read(opened: IO[bytes]) -> bytes:
    content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise DamagedError("the file is too large")
    return content


def _locked(path: Path) -> IO[bytes]:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | files.CLOSED, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise KvdiagError(f"another kvdiag writes to {path.parent}: give each a --record-dir of its own") from error
    return file
