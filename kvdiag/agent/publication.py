"""Atomic file writes: each file is written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

FILE_MODE = 0o640
FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_MODE = 0o750
"""Readers of the same group may list the folder, as they may read the files."""

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
KEPT_SECONDS = {"agent-": 3600.0, "profile-": 3600.0, "oom-": 7 * 86_400.0}
"""How long files are kept, by the prefix of their names. A running agent renews its own every second."""

MAX_NAMES = 4096

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
NOTHING: Mapping[str, str] = {}


def encoded(kept: dict[str, tuple[dict[str, Any], str]], name: str, value: dict[str, Any] | None) -> str:
    """A part of a document as JSON, `kept` until it changes: encoding it again would take most of a publication.

    Its inner values must be replaced, never modified.

    Raises:
        TypeError, ValueError: the value is not JSON.
    """
    if value is None:
        return "null"
    known = kept.get(name)
    if known is None or known[0] != value:
        known = kept[name] = (dict(value), encode(value))
    return known[1]


class Folder:
    """The folder in which a server's agents publish.

    Opened for each use, so that a folder that was recreated or mounted over is found again.
    """

    def __init__(self, path: str) -> None:
        """Touch nothing yet."""
        self._path = path

    def put(self, name: str, value: dict[str, Any], encoded: Mapping[str, str] = NOTHING) -> None:
        """Replace the file `name` with a value as JSON, mode 0640; `encoded` are further parts that are JSON already.

        Raises:
            OSError: the folder is missing, full or read-only; an existing file stays unchanged.
            TypeError, ValueError: the value is not JSON.
        """
        parts = "".join(f',"{part}":{text}' for part, text in encoded.items())
        data = f"{encode(value)[:-1]}{parts}}}".encode()
        with self._opened() as folder:
            unfinished = f".{name}.new"
            try:
                file = _created(unfinished, folder)
            except FileExistsError:
                # A process with this id was killed while it wrote.
                os.unlink(unfinished, dir_fd=folder)
                file = _created(unfinished, folder)
            try:
                _fill(file, data)
                os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    def asked_at(self, name: str) -> int | None:
        """Modification time of file `name` in nanoseconds, `None` if it does not exist; never reads its content."""
        try:
            return os.stat(os.path.join(self._path, name), follow_symlinks=False).st_mtime_ns  # noqa: PTH116, PTH118
        except OSError:
            return None

    def content(self, name: str, max_bytes: int) -> bytes:
        """The content of a file that anyone who may write in this folder left.

        Raises:
            OSError: there is no such file, or its author may not ask.
        """
        with self._opened() as folder:
            # Follow no link, and do not wait for a pipe.
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                about, around = os.fstat(file), os.fstat(folder)
                # A volume of Kubernetes is writable by all of the pod: its files get the volume's group.
                shared = around.st_mode & stat.S_ISGID and about.st_gid == around.st_gid
                if not (about.st_uid in (0, os.getuid(), around.st_uid) or shared):
                    raise PermissionError(errno.EPERM, "asked for by another user")
                if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1 or about.st_mode & stat.S_IWOTH:
                    raise PermissionError(errno.EPERM, "not a file of one author")
                return os.read(file, max_bytes)
            finally:
                os.close(file)

    def drop(self, name: str) -> None:
        """Remove one of this process's files."""
        with contextlib.suppress(OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)

    def tidy(self) -> None:
        """Remove expired files of exited agents: each process leaves one, and containers restart often."""
        with contextlib.suppress(OSError), self._opened() as folder:
            now_seconds = time.time()
            for name in os.listdir(folder)[:MAX_NAMES]:  # noqa: PTH208 - by descriptor
                kept_seconds = next(
                    (kept for kind, kept in KEPT_SECONDS.items() if name.lstrip(".").startswith(kind)), None
                )
                seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if kept_seconds and seen.st_uid == os.getuid() and now_seconds - seen.st_mtime > kept_seconds:
                    os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            folder = os.open(self._path, FOLDER_FLAGS)
        except FileNotFoundError:
            os.mkdir(self._path, 0o700)  # noqa: PTH102 - pathlib costs every Python process its import
            # Not a link that has been put in its place since.
            folder = os.open(self._path, FOLDER_FLAGS)
            with contextlib.suppress(OSError):
                os.fchmod(folder, FOLDER_MODE)  # with any umask of the server
        try:
            yield folder
        finally:
            os.close(folder)


def _created(name: str, folder: int) -> int:
    return os.open(name, FILE_FLAGS, FILE_MODE, dir_fd=folder)


def _fill(file: int, data: bytes) -> None:
    try:
        os.fchmod(file, FILE_MODE)  # the server's umask would lock the reader's group out
        if os.write(file, data) != len(data):
            raise OSError("the disk is full")
    finally:
        os.close(file)
