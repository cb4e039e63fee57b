"""One file of the folder that the agents write in.

Rules of this file: nothing in the folder is trusted. A name is opened in the folder and never made into a path
elsewhere, links are not followed, pipes and devices not waited for, and sizes bounded.
"""

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvdiag.formatting import format_duration
from kvdiag.sources.agents.agent_publication import Publication

MAX_NAMES = 4096
MAX_FILE_BYTES = 256 * 2**10
"""A publication of one GPU has 3 KB, of eight 20."""


FUTURE_SECONDS = 5.0
"""Tolerated clock difference of a volume on another machine."""

ENDED = -1
"""Stands for the uid of a process that has exited."""


class Written(NamedTuple):
    """A file: bytes, modification time, whether its group may write it, and the owners of file and directory."""

    text: bytes
    at_seconds: float
    group_writable: bool
    owner: int
    folder_owner: int


class RefusedError(Exception):
    """A file that is not read; the message says why."""


def content(folder: int, name: str) -> Written:
    """A file as it is now.

    Raises:
        RefusedError: it is not a file, too large, dated in the future, or from a user who may not publish here.
    """
    try:
        # Do not follow links, and do not block on a pipe.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise RefusedError(f"cannot be opened: {error.strerror}") from error
    try:
        about, around = os.fstat(file), os.fstat(folder)
        if not stat.S_ISREG(about.st_mode):
            raise RefusedError("not a file")
        if about.st_nlink > 1:
            raise RefusedError("it has more than one hard link, so it may be another program's file")
        if about.st_mode & stat.S_IWOTH:
            raise RefusedError("it is world-writable, so its author is unknown")
        if not _may_publish(about, around):
            raise RefusedError(f"user {about.st_uid} wrote it, but is neither the folder's owner nor kvdiag's user")
        if about.st_size > MAX_FILE_BYTES:
            raise RefusedError(f"{about.st_size} bytes, more than the limit of {MAX_FILE_BYTES}")
        refuse_future(about.st_mtime)
        # The agent never writes into an existing file, so one read returns all of it.
        text = os.read(file, MAX_FILE_BYTES)
        return Written(text, about.st_mtime, bool(about.st_mode & stat.S_IWGRP), about.st_uid, around.st_uid)
    except OSError as error:
        raise RefusedError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def refuse_future(at_seconds: float) -> None:
    """Raise RefusedError for a time that is still to come."""
    if (ahead_seconds := at_seconds - time.time()) > FUTURE_SECONDS:
        raise RefusedError(f"dated {format_duration(ahead_seconds)} in the future: was the clock changed?")


def _may_publish(about: os.stat_result, folder: os.stat_result) -> bool:
    """Whether the file's author is trusted: in a private folder any, else users who could change the folder anyway.

    Volumes of Kubernetes are writable by all of the pod, with a group that their files get and kvdiag is in.
    """
    if not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or about.st_uid in (0, os.geteuid(), folder.st_uid):
        return True
    groups = {os.getegid(), *os.getgroups()}
    return bool(folder.st_mode & stat.S_ISGID) and about.st_gid == folder.st_gid and about.st_gid in groups


def is_own(written: Written, publication: Publication) -> tuple[bool, int | None]:
    """Whether the process's user wrote the file, in its, root's or our directory, and who that is, as in `_owner`.

    Raises:
        RefusedError: another user wrote it.
    """
    owner = _owner(publication)
    if owner is None or owner == ENDED:
        return False, owner
    if written.owner != owner:
        raise RefusedError(f"written by user {written.owner}, but process {publication.pid} runs as user {owner}")
    return not written.group_writable and written.folder_owner in (owner, 0, os.geteuid()), owner


def _owner(publication: Publication) -> int | None:
    """Return the uid of the process that published: `ENDED` if it has exited, `None` if it is not visible from here.

    It is not visible if it is in another PID namespace, or if /proc does not show it.
    """
    try:
        if publication.pid_namespace != Path("/proc/self/ns/pid").stat().st_ino:
            return None
        reported = Path(f"/proc/{publication.pid}/stat").read_bytes()
        status = Path(f"/proc/{publication.pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ENDED
    except OSError:
        return None
    with suppress(IndexError, ValueError):
        # proc_pid_stat(5): the name may hold anything; the start is the 22nd field. Ids are used again, starts not.
        state, *fields = reported.rpartition(b")")[2].split()
        if state == b"Z" or int(fields[18]) != publication.start_ticks:
            return ENDED
        # proc_pid_status(5): real, effective, saved set and file system's; files that it makes are the last's.
        return next(int(line.split()[4]) for line in status.splitlines() if line.startswith(b"Uid:"))
    return None
