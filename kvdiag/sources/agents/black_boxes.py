"""Black boxes: failed allocations as the agents record them (kvdiag/agent/black_box.py). Nothing in one is trusted.

Pure: `parse`. With I/O: `read_folder`, `read_file`, `NewestBlackBoxes`. In a folder the rules of publications hold:
names matched, links not followed, sizes and counts bounded, and what does not pass is a `Gap`. A file that is named may
lie anywhere. Boxes of this user or root are believed like logs; those of others only if /proc shows that their process
is that user's, else they are unverified.
"""

import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

from kvdiag.errors import KvdiagError
from kvdiag.model import MAX_BYTES, FailedAllocation, Gap
from kvdiag.model.codec import from_plain
from kvdiag.model.validation import Checked
from kvdiag.oom.account import Account
from kvdiag.oom.message import Shortage, parse_shortage
from kvdiag.sources.agents.agent_folder import (
    MAX_FILE_BYTES,
    MAX_NAMES,
    RefusedError,
    Written,
    content,
    is_own,
    refuse_future,
)
from kvdiag.sources.agents.agent_publication import MAX_DEVICES, Publication, check_format, plain, read_document
from kvdiag.sources.bounded_json import decode_object

SOURCE = "black_box"
FORMAT = 1
NAME = re.compile(r"oom-[0-9]{1,10}-[0-9]{1,20}-[0-9]{1,3}\.json", re.ASCII)
MAX_BOXES = 256
MAX_GPUS = 1024
MAX_LEAK_CHARACTERS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box(Checked):
    """The figures that torch passed to the agent, with the document of the process."""

    device: int
    asked_bytes: int
    allowed_bytes: int
    free_bytes: int

    MOST: ClassVar[Mapping[str, int]] = {"device": MAX_GPUS, "asked_bytes": 2**63}


def parse(
    text: str | bytes, *, origin: str = "the black box", show_request_ids: bool = False
) -> tuple[Account, Publication]:
    """The failure that a file's text describes, in exact bytes, and its process; `at_seconds` is a wall clock.

    That is an allocation, or, of a scheduler that its own check has ended, the count of its KV pool.

    Raises:
        ValueError: it is no black box that this version understands.
    """
    reported = decode_object(text)
    check_format(reported, "kvdiag_black_box", FORMAT)
    leak = reported.get("leak")
    box = None if leak is not None else from_plain(_Box, reported, lenient=True)
    document = reported.get("document")
    if not isinstance(document, dict):
        raise ValueError("it has no document")  # noqa: TRY004 - one kind of error for one kind of mistake
    devices = document.get("devices")
    own = [
        # torch before 2.4 does not report the device's identity, which nothing here needs.
        {**each, "uuid": each.get("uuid") or "unknown"}
        for each in (devices if isinstance(devices, list) else [])[:MAX_DEVICES]
        if isinstance(each, dict) and box is not None and each.get("index") == box.device
    ]
    # A publication except for its pace.
    publication = read_document(
        {**document, "devices": own[:1], "sequence": 0, "period_seconds": 1.0}, show_request_ids=show_request_ids
    )
    allocator = publication.allocators[0] if publication.allocators else None
    at = document.get("wall_seconds")
    at_seconds = float(at) if isinstance(at, int | float) and 0 <= at < 2**53 else None
    process = f"{publication.title} {publication.pid}"
    if box is None:
        if not isinstance(leak, str) or len(leak) > MAX_LEAK_CHARACTERS:
            raise ValueError("leak is not the text of an error")
        shortage = parse_shortage("kv_lost", plain(leak))
        counted = publication.block_owners
        lost = Account(
            origin=origin, exact=True, at_seconds=at_seconds, process=process, shortage=shortage, owners=counted
        )
        return lost, publication
    possible, total = box.asked_bytes <= MAX_BYTES, box.allowed_bytes
    account = Account(
        origin=origin,
        exact=True,
        at_seconds=at_seconds,
        process=process,
        rank=None if allocator is None else allocator.tensor_rank,
        shortage=Shortage(
            kind="torch" if possible else "absurd",
            message="",
            device=box.device,
            asked_bytes=box.asked_bytes if possible else None,
            free_bytes=min(box.free_bytes, total) if total else box.free_bytes,
            total_bytes=total or None,
            allocated_bytes=None if allocator is None else allocator.allocated_bytes,
            unallocated_bytes=None if allocator is None else allocator.unallocated_bytes,
            process_bytes=None if allocator is None else allocator.process_bytes,
        ),
        allocator=allocator,
        split=None if allocator is None else allocator.split,
    )
    return account, publication


def read_folder(path: Path, *, show_request_ids: bool = False) -> tuple[tuple[Account, ...], tuple[Gap, ...]]:
    """Every black box in an agent's folder, the oldest first.

    Raises:
        KvdiagError: the folder cannot be read.
    """
    boxes: list[Account] = []
    gaps: list[Gap] = []
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES) if NAME.fullmatch(entry.name))
        if len(names) > MAX_BOXES:
            gaps.append(Gap(SOURCE, "failed", f"{len(names)} black boxes, only the first {MAX_BOXES} are read"))
        for name in names[:MAX_BOXES]:
            try:
                boxes.append(_of_anyone(content(folder, name), name, show_request_ids=show_request_ids))
            except (RefusedError, ValueError) as problem:
                gaps.append(Gap(SOURCE, "failed", f"{name}: {plain(str(problem))}"))
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
        self._read: dict[str, tuple[int, Account | Gap]] = {}

    def read(
        self, folder: int, names: Sequence[str], users: Mapping[tuple[int, int], int]
    ) -> tuple[dict[Owner, FailedAllocation], tuple[Gap, ...]]:
        """The newest box of each of these processes; boxes of others, which may have exited long ago, are ignored.

        `users` has, by id and start of a process, whose file its publication is: its boxes have to be the same user's.
        """
        whose = {f"oom-{pid}-{start}-": user for (pid, start), user in users.items()}
        wanted = {name: begin for name in names if NAME.fullmatch(name) and (begin := _process(name)) in whose}
        self._read = {name: self._box(folder, name, whose[begin]) for name, begin in islice(wanted.items(), MAX_BOXES)}
        newest: dict[Owner, Account] = {}
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

    def _box(self, folder: int, name: str, user: int) -> tuple[int, Account | Gap]:
        try:
            changed_at = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns
            known = self._read.get(name)
            if known is not None and known[0] == changed_at:
                return known
            return changed_at, _own(content(folder, name), name, user)
        except (OSError, RefusedError, ValueError) as problem:
            return 0, Gap(SOURCE, "failed", f"{name}: {plain(str(problem))}")


def _own(written: Written, name: str, user: int) -> Account:
    """A black box of the process in its name and of that process's user; RefusedError or ValueError if it is not."""
    if written.owner != user:
        raise RefusedError(f"written by user {written.owner}, but the process publishes as user {user}")
    if written.group_writable:
        raise RefusedError("its group may write it, so its author is unknown")
    return _of_process(written, name)[0]


def _of_anyone(written: Written, name: str, *, show_request_ids: bool) -> Account:
    """A black box, marked where nothing shows that it is its process's; RefusedError or ValueError as `_own`."""
    box, publication = _of_process(written, name, show_request_ids=show_request_ids)
    if {written.owner, written.folder_owner} <= {0, os.geteuid()}:
        verified = not written.group_writable
    else:
        verified, _ = is_own(written, publication)
    return box if verified else replace(box, origin=f"the unverified black box {name}", unverified=True)


def _of_process(written: Written, name: str, *, show_request_ids: bool = False) -> tuple[Account, Publication]:
    """A black box that has already been written, and its process, which its name has to agree with."""
    box, publication = parse(written.text, origin=f"the black box {name}", show_request_ids=show_request_ids)
    if NAME.fullmatch(name) and _process(name) != f"oom-{publication.pid}-{publication.start_ticks}-":
        raise RefusedError(f"it claims to be from process {publication.pid}")
    refuse_future(box.at_seconds or 0.0)
    return box, publication


def _process(name: str) -> str:
    """Return the prefix of a black box's file name, which names its process."""
    return name[: name.rindex("-") + 1]


def _failure(box: Account) -> FailedAllocation | None:
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


def read_file(path: Path, text: bytes, *, show_request_ids: bool = False) -> Account:
    """A black box that the user names.

    Raises:
        KvdiagError: it is none, or damaged.
    """
    if len(text) > MAX_FILE_BYTES:
        raise KvdiagError(f"{path} has more than {MAX_FILE_BYTES >> 10} KiB: not a black box")
    try:
        about = path.stat()
        writable = bool(about.st_mode & stat.S_IWOTH)
        written = Written(text, about.st_mtime, writable, about.st_uid, about.st_uid)
        return _of_anyone(written, path.name, show_request_ids=show_request_ids)
    except (OSError, RefusedError, ValueError) as error:
        raise KvdiagError(f"{path} is not a readable black box: {str(error)[:160]}") from error
