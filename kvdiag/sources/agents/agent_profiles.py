"""Profiles that agents make on request: a request is a file in their folder, and so is its answer.

kvdiag/agent/memory_profile.py carries them out. Nothing in an answer is trusted: it is opened by the rules of
agent_folder.py, has to be the answer to this request and of this process, and every figure is checked. A request is
created only where none is, so that two never run in one process; it is removed with the answer, which also ends the
tracing early. Where kvdiag may not write into the folder, the error says who may.
"""

import contextlib
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
from kvdiag.model import MAX_BYTES, MAX_COUNT, MemoryProfile, ProfileKind
from kvdiag.model.codec import from_plain
from kvdiag.sources.agents.agent_folder import ENDED, MAX_NAMES, RefusedError, content, is_own
from kvdiag.sources.agents.agent_publication import Publication, check_format, parse, plain
from kvdiag.sources.agents.allocator_files import MAX_FILES, MIN_STALE_SECONDS, NAME, STALE_PERIODS
from kvdiag.sources.bounded_json import decode_object

FORMAT = 1
MAX_STACKS = 64
MAX_FRAMES = 16
MAX_SECONDS = 600.0
ABANDONED_SECONDS = MAX_SECONDS + 60.0
"""After which a request is none any more: the kvdiag that asked was killed."""

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
            self._remove_abandoned(name)
            file = os.open(name, flags, 0o640, dir_fd=self._folder)
            try:
                os.fchmod(file, 0o640)
                complete = os.write(file, text) == len(text)
            finally:
                os.close(file)
        except FileExistsError:
            raise KvdiagError(f"{asked.name} is being profiled already; wait until that ends") from None
        except OSError as error:
            self.withdraw(asked)
            who = "run kvdiag as the server's user, or in its group with a folder that the group may write"
            raise KvdiagError(f"cannot ask the agents in {self._path} ({error.strerror}): {who}") from error
        if not complete:
            self.withdraw(asked)
            raise KvdiagError(f"cannot ask the agents in {self._path}: the disk is full")
        return asked

    def answer(self, asked: Asked) -> MemoryProfile | None:
        """The profile, `None` while it is being made.

        Raises:
            KvdiagError: the process exited, refused, or its answer cannot be used.
        """
        name = f"profile-{_key(asked.publication)}.json"
        try:
            written = content(self._folder, name)
        except RefusedError as error:
            if not self._exists(name):
                self._refuse_ended(asked)
                return None
            raise KvdiagError(f"{asked.name}: its answer {error}") from error
        try:
            is_own(written, asked.publication)
            reported = decode_object(written.text)
            check_format(reported, "kvdiag_profile", FORMAT)
            state = reported.get("state")
            if reported.get("id") != asked.identifier or state == "tracing":
                self._refuse_ended(asked)
                return None
            if state != "done":
                raise KvdiagError(f"{asked.name} was not profiled: {plain(str(reported.get('reason')))}")
            return read_profile(reported, asked)
        except (RefusedError, ValueError) as error:
            raise KvdiagError(f"{asked.name}: its answer cannot be used: {plain(str(error))}") from error

    def withdraw(self, asked: Asked) -> None:
        """Remove a request, which ends its tracing, and the answer."""
        for name in (_request(asked.publication), f"profile-{_key(asked.publication)}.json"):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)

    def _refuse_ended(self, asked: Asked) -> None:
        """Raise KvdiagError for a process that exited and will not answer."""
        with contextlib.suppress(RefusedError, ValueError):
            written = content(self._folder, f"agent-{_key(asked.publication)}.json")
            if is_own(written, asked.publication)[1] != ENDED:
                return
        raise KvdiagError(f"{asked.name} exited while it was profiled; see its log")

    def _remove_abandoned(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime > ABANDONED_SECONDS:
                os.unlink(name, dir_fd=self._folder)

    def _exists(self, name: str) -> bool:
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mode) != 0
        except OSError:
            return False


def read_profile(reported: Mapping[str, Any], asked: Asked) -> MemoryProfile:
    """The profile that an answer describes.

    Raises:
        ValueError: it is of another process, or has figures of a wrong type or size.
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
    profile = from_plain(
        MemoryProfile,
        {
            **reported,
            "kind": asked.kind,
            "pid": publication.pid,
            "title": publication.title,
            "stacks": [_stack(one) for one in stacks],
        },
        lenient=True,
    )
    sizes = (profile.other_bytes, *(one.bytes for one in profile.stacks))
    counts = (profile.other_stacks, *(one.blocks for one in profile.stacks))
    if any(abs(size) > MAX_BYTES for size in sizes) or any(abs(count) > MAX_COUNT for count in counts):
        raise ValueError("a stack holds more than a machine has")
    return profile


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
