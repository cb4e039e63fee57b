"""The black boxes that the agents in a server's processes have written (kvdiag/agent/black_box.py), as untrusted input.

Pure: `parse`. With I/O: `read_folder`, `read_file`, `NewestBlackBoxes`. In a folder the rules of publications hold:
names matched, links not followed, sizes and counts bounded, and what does not pass is a `Gap`. A file that is named is
the user's choice.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvdiag.errors import KvdiagError
from kvdiag.model import MAX_BYTES, Allocator, FailedAllocation, Gap, ReservedSplit
from kvdiag.oom.message import Shortage
from kvdiag.sources import agent_publication
from kvdiag.sources.agent_folder import FUTURE_SECONDS, MAX_FILE_BYTES, MAX_NAMES, RefusedError, Written, content

SOURCE = "black_box"
FORMAT = 1
NAME = re.compile(r"oom-[0-9]{1,10}-[0-9]{1,20}-[0-9]{1,3}\.json", re.ASCII)
MAX_BOXES = 256
MAX_GPUS = 1024


class BlackBox(NamedTuple):
    """A failed allocation as the agent recorded it, sizes in exact bytes; `at_seconds` is a wall clock."""

    origin: str
    at_seconds: float | None
    process: str
    shortage: Shortage
    allocator: Allocator | None

    @property
    def split(self) -> ReservedSplit | None:
        """The reserved bytes by what they could be used for; `None` where the blocks could not be read."""
        return None if self.allocator is None else self.allocator.split


def parse(text: str | bytes, *, origin: str = "the black box") -> BlackBox:
    """The black box in a file's text.

    Raises:
        ValueError: it is no black box that this version understands.

    """
    try:
        reported = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(reported, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for one kind of mistake
    version = _whole(reported, "kvdiag_black_box", most=2**31)
    if version > FORMAT or version < 1:
        raise ValueError(f"written in format {version}, this kvdiag reads {FORMAT}: use a newer kvdiag")
    device, asked = _whole(reported, "device", most=MAX_GPUS), _whole(reported, "asked_bytes", most=2**63)
    total, free = _whole(reported, "allowed_bytes", most=MAX_BYTES), _whole(reported, "free_bytes", most=MAX_BYTES)
    document = reported.get("document")
    if not isinstance(document, dict):
        raise ValueError("it has no document")  # noqa: TRY004 - as above
    devices = document.get("devices")
    own = [
        # torch before 2.4 does not tell the device's identity, which nothing here needs.
        {**each, "uuid": each.get("uuid") or "unknown"}
        for each in (devices if isinstance(devices, list) else [])[: agent_publication.MAX_DEVICES]
        if isinstance(each, dict) and each.get("index") == device
    ]
    # A publication but for its pace.
    whole = {**document, "devices": own[:1], "sequence": 0, "period_seconds": 1.0}
    seen = agent_publication.parse(json.dumps(whole))
    allocator = seen.allocators[0] if seen.allocators else None
    at = document.get("wall_seconds")
    return BlackBox(
        origin=origin,
        at_seconds=float(at) if isinstance(at, int | float) and 0 <= at < 2**53 else None,
        process=f"{seen.title} {seen.pid}",
        shortage=Shortage(
            kind="torch" if asked <= MAX_BYTES else "absurd",
            message="",
            device=device,
            asked_bytes=asked if asked <= MAX_BYTES else None,
            free_bytes=min(free, total) if total else free,
            total_bytes=total or None,
            allocated_bytes=None if allocator is None else allocator.allocated_bytes,
            unallocated_bytes=None if allocator is None else allocator.reserved_bytes - allocator.allocated_bytes,
            process_bytes=None if allocator is None else allocator.process_bytes,
        ),
        allocator=allocator,
    )


def read_folder(path: Path) -> tuple[tuple[BlackBox, ...], tuple[Gap, ...]]:
    """Every black box in an agent's folder, the oldest first.

    Raises:
        KvdiagError: the folder cannot be read.

    """
    boxes: list[BlackBox] = []
    gaps: list[Gap] = []
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES) if NAME.fullmatch(entry.name))
        if len(names) > MAX_BOXES:
            gaps.append(_gap(f"{len(names)} black boxes, only the first {MAX_BOXES} are read"))
        for name in names[:MAX_BOXES]:
            try:
                boxes.append(parse(content(folder, name).text, origin=f"the black box {name}"))
            except (RefusedError, ValueError) as problem:
                gaps.append(_gap(f"{name}: {agent_publication.plain(str(problem))}"))
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(folder)
    boxes.sort(key=lambda box: box.at_seconds or 0.0)
    return tuple(boxes), tuple(gaps)


Owner = tuple[str, int, int]
"""A process on a device: the device's identifier, the process's id and its start."""


class NewestBlackBoxes:
    """What living processes last failed to allocate. A box is read once, and again when it has been replaced."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._read: dict[str, tuple[int, BlackBox | Gap]] = {}

    def read(
        self, folder: int, names: Sequence[str], users: Mapping[tuple[int, int], int]
    ) -> tuple[dict[Owner, FailedAllocation], tuple[Gap, ...]]:
        """The newest box of each of these processes; boxes of others, which may be long gone, are left alone.

        `users` has, by id and start of a process, whose file its publication is: its boxes have to be the same user's.
        """
        whose = {f"oom-{pid}-{start}-": user for (pid, start), user in users.items()}
        wanted = {name: begin for name in names if NAME.fullmatch(name) and (begin := _process(name)) in whose}
        self._read = {name: self._box(folder, name, whose[begin]) for name, begin in islice(wanted.items(), MAX_BOXES)}
        newest: dict[Owner, BlackBox] = {}
        for _, box in self._read.values():
            if isinstance(box, Gap) or box.allocator is None or box.at_seconds is None:
                continue
            owner = box.allocator.identity
            known = newest.get(owner)
            if known is None or box.at_seconds > (known.at_seconds or 0.0):
                newest[owner] = box
        failures = {owner: _failure(box) for owner, box in newest.items()}
        gaps = tuple(box for _, box in self._read.values() if isinstance(box, Gap))
        return {owner: failure for owner, failure in failures.items() if failure is not None}, gaps

    def _box(self, folder: int, name: str, user: int) -> tuple[int, BlackBox | Gap]:
        try:
            changed_at = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns
            known = self._read.get(name)
            if known is not None and known[0] == changed_at:
                return known
            return changed_at, _own(content(folder, name), name, user)
        except (OSError, RefusedError, ValueError) as problem:
            return 0, _gap(f"{name}: {agent_publication.plain(str(problem))}")


def _own(written: Written, name: str, user: int) -> BlackBox:
    """Return a black box that belongs to the process in its name and to that process's user.

    Raises:
        RefusedError: it belongs to another process or user, or is dated in the future.
        ValueError: it is not a black box.

    """
    if written.owner != user:
        raise RefusedError(f"written by user {written.owner}, but the process publishes as user {user}")
    box = parse(written.text, origin=f"the black box {name}")
    if box.allocator is not None and _process(name) != f"oom-{box.allocator.pid}-{box.allocator.start_ticks}-":
        raise RefusedError(f"it says that it is process {box.allocator.pid}'s")
    if box.at_seconds is not None and box.at_seconds > time.time() + FUTURE_SECONDS:
        raise RefusedError("its failure is dated in the future: was the clock changed?")
    return box


def _process(name: str) -> str:
    """Return the prefix of a black box's file name, which names its process."""
    return name[: name.rindex("-") + 1]


def _failure(box: BlackBox) -> FailedAllocation | None:
    shortage = box.shortage
    if shortage.asked_bytes is None or shortage.free_bytes is None or box.at_seconds is None:
        return None
    # Both clocks are this machine's wall clock, which may have been set in between.
    return FailedAllocation(
        age_seconds=round(max(time.time() - box.at_seconds, 0.0), 3),
        asked_bytes=shortage.asked_bytes,
        free_bytes=shortage.free_bytes,
        split=box.split,
    )


def read_file(path: Path, text: bytes) -> BlackBox:
    """A black box that the user names.

    Raises:
        KvdiagError: it is none, or damaged.

    """
    if len(text) > MAX_FILE_BYTES:
        raise KvdiagError(f"{path} has more than {MAX_FILE_BYTES >> 10} KiB: not a black box")
    try:
        return parse(text, origin=f"the black box {path.name}")
    except ValueError as error:
        raise KvdiagError(f"{path} is not a readable black box: {str(error)[:160]}") from error


def _whole(reported: dict[str, Any], name: str, *, most: int) -> int:
    value = reported.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not a number within 0..{most}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _gap(reason: str) -> Gap:
    return Gap(source=SOURCE, kind="failed", reason=reason)
