"""Files written where others may write too: as in a hostile folder, no link is followed and no other file touched.

Whoever can write in the folder can lay a link, a second name of another file, a pipe or a file of his own in the place
of ours. What is written goes into a file that we have just made, or that is ours alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

CLOSED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
LINK = "it is a link: give the file itself"
FILE_MODE = 0o666
"""Less what the umask takes away, as of any file."""


def folder(path: Path, *, link: bool = True) -> int:
    """A descriptor of a folder, to open files in; `link` says whether it may be one.

    Raises:
        OSError: it is no folder, or is a link where that may not be.

    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if link else os.O_NOFOLLOW))


def created(path: Path, *, link: bool = True) -> int:
    """A descriptor of a new file to write; `link` says whether its folder may be a link.

    Raises:
        OSError: it cannot be made; FileExistsError where the name is taken, be it by a link that leads nowhere.

    """
    beside = folder(path.parent, link=link)
    try:
        return os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED, FILE_MODE, dir_fd=beside)
    finally:
        os.close(beside)


def emptied(path: Path) -> int:
    """A descriptor of a new file, or of one of ours that is then empty; of devices and pipes as they are.

    Raises:
        OSError: it cannot be made or opened, is a link, or is not ours.

    """
    try:
        return created(path)
    except FileExistsError:
        refuse(path)
        file = os.open(path, os.O_WRONLY | CLOSED)
    try:
        about = os.fstat(file)
        _refuse_others(about)
        if stat.S_ISREG(about.st_mode):
            os.ftruncate(file, 0)
    except OSError:
        os.close(file)
        raise
    return file


def refuse(path: Path) -> None:
    """Refuse what `emptied` and `replace` would, before there is anything to write.

    Raises:
        OSError: there is something that cannot be written, is a link, or is not ours; or its folder takes no file.

    """
    try:
        about = path.lstat()
    except FileNotFoundError:
        os.close(folder(path.parent))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
        return
    if stat.S_ISLNK(about.st_mode):
        raise OSError(errno.ELOOP, LINK)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    _refuse_others(about)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _refuse_others(about: os.stat_result) -> None:
    if about.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to user {about.st_uid}")
    if stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
        raise PermissionError(errno.EPERM, "the file has another name, which would be overwritten too")


def replace(path: Path, content: bytes, *, mode: int | None = None, link: bool = True) -> None:
    """Put a file in the place of what has this name: as a whole or not at all, made beside it first.

    `mode` is the file's whatever the umask; `link` says whether its folder may be a link.

    Raises:
        OSError: it cannot be written, or what is in its place is no file.

    """
    beside = folder(path.parent, link=link)
    # Nobody can know the name; it is as long as one that may be.
    unfinished = f".{path.name[:40]}.{secrets.token_hex(6)}.tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(path.name, dir_fd=beside, follow_symlinks=False).st_mode
            if not stat.S_ISREG(there):
                raise OSError(errno.EINVAL, LINK if stat.S_ISLNK(there) else "it is there, and not a file")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED, FILE_MODE, dir_fd=beside)
        try:
            with os.fdopen(file, "wb") as opened:
                if mode is not None:
                    os.fchmod(file, mode)
                opened.write(content)
                opened.flush()
                os.fsync(file)
            os.replace(unfinished, path.name, src_dir_fd=beside, dst_dir_fd=beside)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=beside)
            raise
    finally:
        os.close(beside)
