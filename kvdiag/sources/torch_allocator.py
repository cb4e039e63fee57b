"""torch's allocator as the agents inside the server's processes publish it: JSON files in one folder.

Rules of this file: nothing in the folder is trusted. Names are matched and never made into paths elsewhere, links are
not followed, pipes and devices not waited for, sizes and counts bounded, and every figure checked for its type and
range. What does not pass is a `Gap`, and the other files are read. What the agent writes stands in kvdiag/agent.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvdiag.model import (
    MAX_BYTES,
    MAX_COUNT,
    Allocator,
    Device,
    Gap,
    GapKind,
    Memory,
    Process,
    ReservedSplit,
)

SOURCE = "torch_allocator"
FORMAT = 1

NAME = re.compile(r"agent-([0-9]{1,10})-([0-9]{1,20})\.json", re.ASCII)
MAX_NAMES = 4096
MAX_FILES = 128
"""A server of 16 engines with 8 workers each has fewer."""

MAX_FILE_BYTES = 256 * 2**10
"""A publication of one GPU has 3 KB, of eight 20."""

STALE_PERIODS = 3.0
LEAST_STALE_SECONDS = 3.0
MAX_PERIOD_SECONDS = 3600.0
FORGOTTEN_SECONDS = 600.0
"""A file that nobody has renewed for so long is of a server that is long gone, and no news."""

SPLIT_REQUEST = "summary-request"
SPLIT_REQUEST_SECONDS = 10.0
"""An agent looks at its blocks once a minute, and no more often than this when it is asked."""

MAX_ERRORS = 8
MAX_REASON_CHARACTERS = 160

Reading = tuple[tuple[Allocator, ...] | None, tuple[Gap, ...]]


class Publication(NamedTuple):
    """One file's content: who published, how often, what it holds of each device, and what the agent could not read."""

    pid: int
    start_ticks: int
    pid_namespace: int | None
    title: str
    sequence: int
    period_seconds: float
    allocators: tuple[Allocator, ...]
    problems: tuple[str, ...]


class _RefusedError(Exception):
    """A file that is not read; the message says why."""


def parse(text: str | bytes) -> Publication:
    """One file's text as values. A device with impossible figures becomes a problem; the others stay.

    Raises:
        ValueError: it is no publication that this version understands.

    """
    try:
        told = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(told, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for one kind of mistake
    version = _whole(told, "kvdiag_agent", least=1)
    if version > FORMAT:
        raise ValueError(f"written in format {version}, this kvdiag reads {FORMAT}: use a newer kvdiag")
    who = _part(told, "process")
    title = _text(who, "title") or "process"
    problems = [f"{name}: {reason}" for name, reason in islice(_part(told, "errors").items(), MAX_ERRORS)]
    allocators = []
    for device in _list(told, "devices")[:MAX_FILES]:
        try:
            allocators.append(_allocator(device, told, who, title))
        except ValueError as problem:
            problems.append(str(problem))
    return Publication(
        pid=_whole(who, "pid", least=1, most=2**22),
        start_ticks=_whole(who, "start_ticks"),
        pid_namespace=_maybe(who, "pid_namespace"),
        title=title,
        sequence=_whole(told, "sequence"),
        period_seconds=_seconds(told, "period_seconds", MAX_PERIOD_SECONDS),
        allocators=tuple(allocators),
        problems=tuple(_plain(problem) for problem in problems),
    )


def devices_inside(allocators: tuple[Allocator, ...] | None) -> tuple[Device, ...] | None:
    """The GPUs as NVML shows them inside the server's processes, where it always may; `None` where none tells.

    For a kvdiag that has no NVML of its own. `index` counts the GPUs that are told, and only the processes that publish
    are listed.
    """
    known = [each for each in allocators or () if each.memory is not None]
    uuids = sorted({each.device_uuid for each in known})
    devices = []
    for index, uuid in enumerate(uuids):
        here = [each for each in known if each.device_uuid == uuid]
        freshest = min(here, key=lambda each: each.age_seconds)
        processes = [Process(pid=each.pid, used_bytes=each.process_bytes, name=each.title) for each in here]
        devices.append(
            Device(
                uuid=f"GPU-{uuid}",
                index=index,
                name="GPU",
                memory=freshest.memory,
                processes=tuple(sorted(processes, key=lambda process: process.pid)),
            )
        )
    return tuple(devices) or None


def _allocator(device: Any, told: Mapping[str, Any], who: Mapping[str, Any], title: str) -> Allocator:
    if not isinstance(device, dict):
        raise ValueError("a device is not an object")  # noqa: TRY004 - as above
    if device.get("uuid") is None:
        raise ValueError("torch does not tell which GPU it uses (torch before 2.4 cannot)")
    torch, ranks, statistics = _part(told, "torch"), _part(told, "ranks"), _part(device, "statistics")
    settings, pools = _part(torch, "settings"), _part(statistics, "private_pools")
    expandable = settings.get("expandable_segments")
    memory, used = _driver(_part(device, "driver"), [_maybe(who, "pid"), *_list(who, "namespace_pids")])
    return Allocator(
        device_uuid=_text(device, "uuid"),
        pid=_whole(who, "pid", least=1, most=2**22),
        pid_seen=False,
        start_ticks=_whole(who, "start_ticks"),
        age_seconds=0.0,
        allocated_bytes=_whole(_part(statistics, "allocated_bytes"), "current", most=MAX_BYTES),
        reserved_bytes=_whole(_part(statistics, "reserved_bytes"), "current", most=MAX_BYTES),
        active_bytes=_maybe(_part(statistics, "active_bytes"), "current"),
        requested_bytes=_maybe(_part(statistics, "requested_bytes"), "current"),
        inactive_split_bytes=_maybe(_part(statistics, "inactive_split_bytes"), "current"),
        private_pools_bytes=_maybe(pools, "reserved_bytes"),
        alloc_retries_total=_maybe(statistics, "num_alloc_retries"),
        ooms_total=_maybe(statistics, "num_ooms"),
        backend=_text(torch, "backend") or None,
        expandable_segments=expandable if isinstance(expandable, bool) else None,
        process_bytes=used,
        memory=memory,
        split=_split(device.get("fragmentation"), _seconds(told, "monotonic_seconds")),
        title=title,
        tensor_rank=_maybe(ranks, "tensor"),
        pipeline_rank=_maybe(ranks, "pipeline"),
        data_rank=_maybe(ranks, "data"),
    )


def _split(told: Any, now_seconds: float) -> ReservedSplit | None:
    if told is None:
        return None
    if not isinstance(told, dict):
        raise ValueError("fragmentation is not an object")  # noqa: TRY004 - as above
    fits, ratio = told.get("fits"), told.get("unusable_ratio")
    names = ("reserved", "live", "pending", "private", "releasable", "stranded", "largest_free_block", "pinned_free")
    return ReservedSplit(
        age_seconds=max(now_seconds - _seconds(told, "at_monotonic_seconds"), 0.0),
        pinned_segments=_whole(told, "pinned_segments"),
        request_bytes=_whole(told, "request_bytes", most=MAX_BYTES),
        fits=fits if isinstance(fits, bool) else None,
        unusable_ratio=None if ratio is None else _seconds(told, "unusable_ratio"),
        **{f"{name}_bytes": _whole(told, f"{name}_bytes", most=MAX_BYTES) for name in names},
    )


def _driver(told: Mapping[str, Any], own_pids: list[Any]) -> tuple[Memory | None, int | None]:
    """The device's memory, and the bytes of the process that published, found among those that NVML lists."""
    memory = None
    if "total_bytes" in told:
        memory = Memory(
            total_bytes=_whole(told, "total_bytes", most=MAX_BYTES),
            free_bytes=_whole(told, "free_bytes", most=MAX_BYTES),
            driver_reserved_bytes=_maybe(told, "driver_reserved_bytes"),
        )
    used: dict[int, Any] = {}
    for entry in _list(told, "processes"):
        if not (isinstance(entry, list) and len(entry) == len(("pid", "bytes")) and type(entry[0]) is int):
            raise ValueError("the process list is not pairs of a process id and its bytes")
        used[entry[0]] = entry[1]
    # A container is often told the host's process ids: a lone process is then taken to be this one.
    lone = next(iter(used)) if len(used) == 1 else None
    own = next((pid for pid in own_pids if type(pid) is int and pid in used), lone)
    if own is None or used[own] is None:
        return memory, None
    return memory, _whole({"bytes": used[own]}, "bytes", most=MAX_BYTES)


class TorchAllocatorSource:
    """The folder of a server's agents. What a file held before is remembered, to notice that it is renewed no more."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Touch nothing yet."""
        self._folder = folder
        self._clock = clock
        self._renewed: dict[str, tuple[int, float]] = {}
        self._asked_at_seconds = float("-inf")

    def read(self) -> Reading:
        """What each process with an agent holds of each device; `None` where no agent tells anything."""
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            reason = f"no folder of agents at {self._folder} ({error.strerror}): see `kvdiag agent install --help`"
            return None, (_gap("absent", reason),)
        try:
            return self._read(folder)
        except OSError as error:
            return None, (_gap("failed", f"the agents' folder cannot be read: {error.strerror}"),)
        finally:
            os.close(folder)

    def _read(self, folder: int) -> Reading:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMES) if NAME.fullmatch(entry.name))
        gaps: list[Gap] = []
        if len(names) > MAX_FILES:
            gaps.append(_gap("failed", f"{len(names)} agent files, of which the first {MAX_FILES} are read"))
        names = names[:MAX_FILES]
        self._renewed = {name: seen for name, seen in self._renewed.items() if name in names}
        found: list[Allocator] = []
        living = 0
        for name in names:
            try:
                publication, age_seconds = self._publication(folder, name)
            except (_RefusedError, ValueError) as problem:
                gaps.append(_gap("failed", f"{name}: {_plain(str(problem))}"))
                continue
            if age_seconds > FORGOTTEN_SECONDS:
                continue
            who = f"{publication.title} {publication.pid}"
            seen = _is_the_process(publication)
            if seen is False:
                gaps.append(_gap("absent", f"{who} has ended; its file is {age_seconds:.0f} s old"))
                continue
            if age_seconds > max(STALE_PERIODS * publication.period_seconds, LEAST_STALE_SECONDS):
                state = "lives, and its agent is stuck" if seen else "died, or its agent is stuck"
                gaps.append(_gap("failed", f"{who} has published nothing for {age_seconds:.0f} s: it {state}"))
                continue
            living += 1
            gaps += [_gap("failed", f"{who}: {problem}") for problem in publication.problems]
            found += [
                replace(allocator, age_seconds=round(age_seconds, 3), pid_seen=seen is True)
                for allocator in publication.allocators
            ]
        if any(each.split is None or each.split.reserved_bytes != each.reserved_bytes for each in found):
            self._ask_for_splits(folder)
        if living and not found:
            gaps.append(_gap("absent", "no process that has an agent holds GPU memory through torch"))
        elif not names:
            reason = f"no agent publishes in {self._folder}: has the server been started with it on its PYTHONPATH?"
            gaps.append(_gap("absent", reason))
        return tuple(found) if living else None, tuple(gaps)

    def _ask_for_splits(self, folder: int) -> None:
        """Have the agents look at their blocks again, where kvdiag may write in their folder; where not, they will."""
        now_seconds = self._clock()
        if now_seconds - self._asked_at_seconds < SPLIT_REQUEST_SECONDS:
            return
        self._asked_at_seconds = now_seconds
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError):
            file = os.open(SPLIT_REQUEST, flags, 0o640, dir_fd=folder)
            try:
                # When it was last written is the request; there is nothing in it.
                os.utime(file)
            finally:
                os.close(file)

    def _publication(self, folder: int, name: str) -> tuple[Publication, float]:
        text, written_seconds = _content(folder, name)
        publication = parse(text)
        if name != f"agent-{publication.pid}-{publication.start_ticks}.json":
            raise _RefusedError(f"it says that it is process {publication.pid}'s")
        # A clock that was set would make every file young or old: what counts as well is when it last changed here.
        now_seconds = self._clock()
        known = self._renewed.get(name)
        if known is None or known[0] != publication.sequence:
            known = self._renewed[name] = (publication.sequence, now_seconds)
        return publication, max(time.time() - written_seconds, now_seconds - known[1], 0.0)


def _content(folder: int, name: str) -> tuple[bytes, float]:
    """A file's bytes, and when it was written."""
    try:
        # Not following links, and not waiting for the other end of a pipe.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise _RefusedError(f"cannot be opened: {error.strerror}") from error
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise _RefusedError("not a file")
        if about.st_mode & stat.S_IWOTH:
            raise _RefusedError("anybody may write it, so nobody's word is in it")
        if not _may_publish(about, os.fstat(folder)):
            raise _RefusedError(f"user {about.st_uid} wrote it, who is neither the folder's owner nor kvdiag's user")
        if about.st_size > MAX_FILE_BYTES:
            raise _RefusedError(f"of {about.st_size} bytes, where {MAX_FILE_BYTES} are the most")
        # The agent never writes into a file that is there: what comes in one piece is all.
        return os.read(file, MAX_FILE_BYTES), about.st_mtime
    except OSError as error:
        raise _RefusedError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def _may_publish(about: os.stat_result, folder: os.stat_result) -> bool:
    """Where only some can write in the folder, they can be believed; where all can, those who could change it anyway.

    Volumes of Kubernetes are writable by all of the pod, with a group that their files get and kvdiag is in.
    """
    if not folder.st_mode & stat.S_IWOTH or about.st_uid in (0, os.geteuid(), folder.st_uid):
        return True
    groups = {os.getegid(), *os.getgroups()}
    return bool(folder.st_mode & stat.S_ISGID) and about.st_gid == folder.st_gid and about.st_gid in groups


def _is_the_process(publication: Publication) -> bool | None:
    """Whether the process that published lives; `None` where it is in a pid namespace that cannot be seen from here."""
    try:
        if publication.pid_namespace != Path("/proc/self/ns/pid").stat().st_ino:
            return None
        told = Path(f"/proc/{publication.pid}/stat").read_bytes()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    with suppress(IndexError, ValueError):
        # proc_pid_stat(5): the name may hold anything; the start is the 22nd field. Ids are used again, starts not.
        state, *fields = told.rpartition(b")")[2].split()
        return state != b"Z" and int(fields[18]) == publication.start_ticks
    return None


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside another; an empty one where it is left out."""
    part = told.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004 - one kind of error for one kind of mistake
    return part


def _list(told: Mapping[str, Any], name: str) -> list[Any]:
    part = told.get(name)
    if part is None:
        return []
    if not isinstance(part, list):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004 - as above
    return part


def _whole(told: Mapping[str, Any], name: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
    value = told.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not a number within {least}..{most}")
    return value


def _maybe(told: Mapping[str, Any], name: str) -> int | None:
    return None if told.get(name) is None else _whole(told, name)


def _seconds(told: Mapping[str, Any], name: str, most: float = float(MAX_COUNT)) -> float:
    value = told.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not a number within 0..{most:g}")
    return float(value)


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text")  # noqa: TRY004 - as above
    return _plain(value)[:64]


def _plain(text: str) -> str:
    """Text from outside as it may stand in a sentence."""
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_REASON_CHARACTERS]


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _gap(kind: GapKind, reason: str) -> Gap:
    return Gap(source=SOURCE, kind=kind, reason=reason)
