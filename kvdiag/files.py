"""Opens files safely in directories that other users can write to.

Another user could put a symbolic link, a hard link, a pipe or a file of their own in place of the file that kvdiag
is about to write. So a file is either created (O_EXCL) or must be a regular file of this user with one hard link;
links are never followed (O_NOFOLLOW).
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO

CLOSED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
LINK = "it is a symbolic link; give the file itself"
GZIP_MAGIC = b"\x1f\x8b"
"""How a compressed log or trace begins."""

UNFINISHED = ".tmp"
"""How the name of a file ends that `replace` has not written whole; it begins with a dot."""

FILE_MODE = 0o666
"""Less what the umask takes away, as of any file."""


def opened(path: Path, *, write: bool = False) -> IO[bytes]:
    """Open a regular file for reading, and for writing too; a pipe in its place is not waited for.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    file = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "it is not a regular file", str(path))
    return os.fdopen(file, "r+b" if write else "rb")


def folder(path: Path, *, link: bool = True) -> int:
    """Return a descriptor of a directory, to open files in; with `link=False` it must not be a symbolic link.

    Raises:
        OSError: it is not a directory, or is a link that is not allowed.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if link else os.O_NOFOLLOW))


def created(path: Path, *, link: bool = True) -> int:
    """Create a file and return its descriptor; with `link=False` its directory must not be a symbolic link.

    Raises:
        OSError: it cannot be created; FileExistsError if the name is taken, even by a dangling link.
    """
    parent = folder(path.parent, link=link)
    try:
        return os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED, FILE_MODE, dir_fd=parent)
    finally:
        os.close(parent)


def emptied(path: Path) -> int:
    """Create a file or empty a file of this user, and return its descriptor; devices and pipes are opened as they are.

    Raises:
        OSError: it cannot be created or opened, is a link, or belongs to another user.
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
    """Raise the error that `emptied` and `replace` would raise, before there is anything to write.

    Raises:
        OSError: the file cannot be written, is a link or belongs to another user, or its directory is not writable.
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
        raise PermissionError(errno.EPERM, "it has more than one hard link; writing to it would change another file")


def replace(path: Path, content: bytes, *, mode: int | None = None, link: bool = True) -> None:
    """Replace a file in one step: write a temporary file next to it, then rename it.

    `mode` overrides the umask; with `link=False` the directory must not be a symbolic link.

    Raises:
        OSError: it cannot be written, or what has its name is not a regular file.
    """
    parent = folder(path.parent, link=link)
    # A random name, which cannot be guessed; no longer than a file name may be.
    unfinished = f".{path.name[:40]}.{os.urandom(6).hex()}{UNFINISHED}"
    try:
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
            if not stat.S_ISREG(there):
                raise OSError(errno.EINVAL, LINK if stat.S_ISLNK(there) else "it is not a regular file")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED, FILE_MODE, dir_fd=parent)
        try:
            with os.fdopen(file, "wb") as opened:
                if mode is not None:
                    os.fchmod(file, mode)
                opened.write(content)
                opened.flush()
                os.fsync(file)
            os.replace(unfinished, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=parent)
            raise
    finally:
        os.close(parent)
