"""Profiles that agents make on request: a request is a file in their folder, and so is its answer.

kvdiag/agent/memory_profile.py carries them out. Nothing in an answer is trusted: it is opened by the rules of
agent_folder.py, has to be the answer to this request and of this process, and every figure is checked. A request is
created only where none is, so that two never run in one process; it is removed with the answer, which also ends the
tracing early. A kvdiag that was killed leaves its request: the next one removes it, once it is answered or its time is
over. Where kvdiag may not write into the folder, the error says who may.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvdiag.errors import KvdiagError
from kvdiag.formatting import format_duration
from kvdiag.model import MAX_PROFILE_SECONDS, MemoryProfile, ProfileKind
from kvdiag.model.codec import from_plain
from kvdiag.sources.agents.agent_folder import ENDED, FUTURE_SECONDS, MAX_NAMES, RefusedError, content, is_own
from kvdiag.sources.agents.agent_publication import Publication, check_format, parse, plain
from kvdiag.sources.agents.allocator_files import MAX_FILES, MIN_STALE_SECONDS, NAME, STALE_PERIODS
from kvdiag.sources.bounded_json import decode_object

FORMAT = 1
MAX_STACKS = 64
MAX_FRAMES = 16
ANSWER_SECONDS = 60.0
"""After the end of the tracing: sums are made in slices while the server works, and a full disk may be emptied."""

UNREAD_SECONDS = 5.0
"""Age of an answer that is no longer awaited: a kvdiag that waits for it reads it within a second."""

HELP: Mapping[int, str] = {
    errno.ENOENT: "the folder was deleted or replaced; profile again",
    errno.EROFS: "mount the volume writable for kvdiag too",
    errno.ENOSPC: "free some space on its volume",
    errno.EDQUOT: "free some space on its volume",
    errno.EFBIG: "raise the limit of kvdiag's file size (ulimit -f)",
}
"""What to do where a request cannot be written; others are about permissions."""

MAX_TRACING_BYTES = 8 * 2**20
"""What the traces of one process may take: some 130,000 live allocations, whose two lists take another 40 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to one process."""

    publication: Publication
    identifier: str
    kind: ProfileKind

    @property
    def name(self) -> str:
        """What the process is called."""
        return f"{self.publication.title} {self.publication.pid}"


class ProfileFolder:
    """The folder in which a server's agents publish, for requests."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            KvdiagError: there is none, or it cannot be read.
        """
        self._path = path
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            help_ = "see `kvdiag agent install --help`"
            raise KvdiagError(f"no folder of agents at {path} ({error.strerror}): {help_}") from error

    def close(self) -> None:
        """Close it."""
        os.close(self._folder)

    def processes(self) -> tuple[Publication, ...]:
        """The processes whose agents publish now, by title and id."""
        found = []
        with os.scandir(self._folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES) if NAME.fullmatch(entry.name))
        for name in names[:MAX_FILES]:
            with contextlib.suppress(RefusedError, ValueError):
                written = content(self._folder, name)
                one = parse(written.text)
                stale_seconds = max(STALE_PERIODS * one.period_seconds, MIN_STALE_SECONDS)
                fresh = time.time() - written.at_seconds <= stale_seconds
                if fresh and name == f"agent-{_key(one)}.json" and is_own(written, one)[1] != ENDED:
                    found.append(one)
        return tuple(sorted(found, key=lambda one: (one.title, one.pid)))

    def ask(self, publication: Publication, kind: ProfileKind, seconds: float) -> Asked:
        """Ask the agent of a process to trace.

        Raises:
            KvdiagError: another profile of it is in progress, or the folder cannot be written.
        """
        asked = Asked(publication=publication, identifier=secrets.token_hex(8), kind=kind)
        name = _request(publication)
        left_seconds = self._left_seconds(publication)
        text = json.dumps(
            {
                "kvdiag_profile_request": FORMAT,
                "id": asked.identifier,
                "kind": kind,
                "seconds": seconds,
                "max_tracing_bytes": MAX_TRACING_BYTES,
            }
        ).encode()
        # Created, never replaced: one of two who ask at once is refused. The agent reads it again when it has changed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if left_seconds is not None and left_seconds <= 0:
                os.unlink(name, dir_fd=self._folder)
            file = os.open(name, flags, 0o640, dir_fd=self._folder)
        except FileExistsError:
            wait = "" if left_seconds is None else f", {format_duration(left_seconds)} at most"
            raise KvdiagError(f"{asked.name} is being profiled already; wait until that ends{wait}") from None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            os.fchmod(file, 0o640)
            problem = None if os.write(file, text) == len(text) else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            problem = error
        finally:
            os.close(file)
        if problem is not None:
            self._remove(name)
            raise self._unwritable(problem)
        return asked

    def answer(self, asked: Asked) -> MemoryProfile | None:
        """The profile, `None` while it is being made.

        Raises:
            KvdiagError: the process exited, refused, or its answer cannot be used.
        """
        name = _answer(asked.publication)
        try:
            written = content(self._folder, name)
        except RefusedError as error:
            if not self._exists(name):
                self._refuse_unanswerable(asked)
                return None
            raise KvdiagError(f"{asked.name}: its answer {error}") from error
        try:
            is_own(written, asked.publication)
            reported = decode_object(written.text)
            check_format(reported, "kvdiag_profile", FORMAT)
            state = reported.get("state")
            if reported.get("id") != asked.identifier or state == "tracing":
                self._refuse_unanswerable(asked)
                return None
            if state != "done":
                raise KvdiagError(f"{asked.name} was not profiled: {plain(str(reported.get('reason')))}")
            return read_profile(reported, asked)
        except (RefusedError, ValueError) as error:
            raise KvdiagError(f"{asked.name}: its answer cannot be used: {plain(str(error))}") from error

    def withdraw(self, asked: Asked) -> None:
        """Remove a request, which ends its tracing, and the answer; those of a later request stay."""
        for name in (_request(asked.publication), _answer(asked.publication)):
            if self._identifier(name) in (None, asked.identifier):
                self._remove(name)

    def _refuse_unanswerable(self, asked: Asked) -> None:
        """Raise KvdiagError for a process that exited, or cannot find the request."""
        if not self._exists(_request(asked.publication)):
            what = f"the request was removed from {self._path}, or the folder was deleted"
            raise KvdiagError(f"{asked.name} was not profiled: {what}; profile again")
        with contextlib.suppress(RefusedError, ValueError):
            written = content(self._folder, f"agent-{_key(asked.publication)}.json")
            if is_own(written, asked.publication)[1] != ENDED:
                if (silent_seconds := time.time() - written.at_seconds) > ANSWER_SECONDS:
                    # One in another container cannot be looked up.
                    why = "it was killed or hangs, or the folder's disk is full"
                    raise KvdiagError(f"{asked.name} has not published for {format_duration(silent_seconds)}: {why}")
                return
        raise KvdiagError(f"{asked.name} exited while it was profiled; see its log")

    def _left_seconds(self, publication: Publication) -> float | None:
        """How long the request that is there may still be in use, 0 or less if it is abandoned; `None` without one."""
        name = _request(publication)
        try:
            age_seconds = time.time() - os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime
        except OSError:
            return None
        if age_seconds < -FUTURE_SECONDS:
            return 0.0
        seconds: Any = MAX_PROFILE_SECONDS
        with contextlib.suppress(RefusedError):
            try:
                request = decode_object(content(self._folder, name).text)
            except ValueError:
                # Its author was killed before it was written.
                return UNREAD_SECONDS - age_seconds
            given: Any = request.get("seconds")
            if type(given) in (int, float) and 0 <= given <= MAX_PROFILE_SECONDS:
                seconds = given
            with contextlib.suppress(ValueError):
                answer = content(self._folder, _answer(publication))
                reported = decode_object(answer.text)
                if reported.get("id") == request.get("id") and reported.get("state") in ("done", "refused"):
                    return UNREAD_SECONDS - (time.time() - answer.at_seconds)
        return float(seconds) + ANSWER_SECONDS - age_seconds

    def _identifier(self, name: str) -> Any:
        """The id in a request or an answer; `None` where it cannot be read."""
        with contextlib.suppress(RefusedError, ValueError):
            return decode_object(content(self._folder, name).text).get("id")
        return None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def _unwritable(self, error: OSError) -> KvdiagError:
        help_ = HELP.get(error.errno or 0, "run kvdiag as the server's user, or in its group if the group may write")
        return KvdiagError(f"cannot write a request into {self._path} ({error.strerror}): {help_}")

    def _exists(self, name: str) -> bool:
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mode) != 0
        except OSError:
            return False


def read_profile(reported: Mapping[str, Any], asked: Asked) -> MemoryProfile:
    """The profile that an answer describes.

    Raises:
        ValueError: it is of another process, or its figures are impossible, or contradict each other.
    """
    who = reported.get("process")
    publication = asked.publication
    if not isinstance(who, dict) or (who.get("pid"), who.get("start_ticks")) != (
        publication.pid,
        publication.start_ticks,
    ):
        raise ValueError("it is of another process")
    stacks = reported.get("stacks")
    if not isinstance(stacks, list) or len(stacks) > MAX_STACKS:
        raise ValueError(f"stacks is no list of at most {MAX_STACKS}")
    return from_plain(
        MemoryProfile,
        {
            **reported,
            "kind": asked.kind,
            "pid": publication.pid,
            "title": publication.title,
            "stacks": [_stack(one) for one in stacks],
            # Counted by kvdiag.
            "load": {},
        },
        lenient=True,
    )


def _stack(reported: Any) -> Any:
    """A stack with texts that may be shown."""
    frames = reported.get("frames") if isinstance(reported, dict) else None
    if not isinstance(frames, list) or len(frames) > MAX_FRAMES:
        raise ValueError(f"a stack has no list of at most {MAX_FRAMES} frames")
    if not all(isinstance(frame, dict) for frame in frames):
        raise ValueError("a frame is not an object")
    shown = [{name: plain(one) if isinstance(one, str) else one for name, one in frame.items()} for frame in frames]
    return {**reported, "frames": shown}


def _key(publication: Publication) -> str:
    return f"{publication.pid}-{publication.start_ticks}"


def _request(publication: Publication) -> str:
    return f"profile-request-{_key(publication)}.json"


def _answer(publication: Publication) -> str:
    return f"profile-{_key(publication)}.json"
