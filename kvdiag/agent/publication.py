"""Atomic file writes: each file is written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

FILE_MODE = 0o640
FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_MODE = 0o750
"""A reader of the same group may come in, as it may read the files."""

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
KEPT_SECONDS = {"agent-": 3600.0, "oom-": 7 * 86_400.0}
"""By the beginning of a file's name. A living agent renews its own every second."""

MOST_NAMES = 4096

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
NOTHING: Mapping[str, str] = {}


class Seldom:
    """Parts of a document as JSON; one that is as it was is not written again, which takes most of a publication."""

    def __init__(self) -> None:
        """Nothing was written yet."""
        self._kept: dict[str, tuple[dict[str, Any], str]] = {}

    def encoded(self, name: str, value: dict[str, Any] | None) -> str:
        """A part as JSON; what is inside of it is never changed, but replaced.

        Raises:
            TypeError, ValueError: the value is no JSON.

        """
        if value is None:
            return "null"
        kept = self._kept.get(name)
        if kept is None or kept[0] != value:
            kept = self._kept[name] = (dict(value), encode(value))
        return kept[1]


class Folder:
    """The folder that the agents of a server publish in, and their reader looks at.

    Opened for each use: one that was taken away and made anew, or mounted over, is found again.
    """

    def __init__(self, path: str) -> None:
        """Touch nothing yet."""
        self._path = path

    def put(self, name: str, value: dict[str, Any], encoded: Mapping[str, str] = NOTHING) -> None:
        """Replace the file `name` by a value as JSON, mode 0640; `encoded` is more of it that is JSON already.

        Raises:
            OSError: the folder is gone, full or read-only; the file, if there was one, is as it was.
            TypeError, ValueError: the value is no JSON.

        """
        parts = "".join(f',"{part}":{text}' for part, text in encoded.items())
        data = f"{encode(value)[:-1]}{parts}}}".encode()
        with self._opened() as folder:
            unfinished = f".{name}.new"
            try:
                file = _created(unfinished, folder)
            except FileExistsError:
                # A process of this id was killed in the middle.
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
        """When the file `name`, whose content is never read, was last written, in nanoseconds; `None` without one."""
        try:
            return os.stat(os.path.join(self._path, name), follow_symlinks=False).st_mtime_ns  # noqa: PTH116, PTH118
        except OSError:
            return None

    def drop(self, name: str) -> None:
        """Remove one file of ours."""
        with contextlib.suppress(OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)

    def tidy(self) -> None:
        """Remove what agents long gone have left: each process leaves a file, and containers start many times."""
        with contextlib.suppress(OSError), self._opened() as folder:
            now_seconds = time.time()
            for name in os.listdir(folder)[:MOST_NAMES]:  # noqa: PTH208 - by descriptor
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
            # Not a link that somebody has laid in its place since.
            folder = os.open(self._path, FOLDER_FLAGS)
            with contextlib.suppress(OSError):
                os.fchmod(folder, FOLDER_MODE)  # whatever the server's umask
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
