"""torch's allocator as the agents inside the server's processes publish it: JSON files in one folder.

Names are matched, counts bounded, files opened by the rules of agent_folder.py, and every figure checked for its type
and range. What does not pass is a `Gap`, and the other files are read. What the agent writes stands in kvdiag/agent.
"""

import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvdiag.formatting import format_duration
from kvdiag.model import Allocator, BlockOwners, Gap
from kvdiag.sources.agents.agent_folder import ENDED, MAX_NAMES, RefusedError, Written, content, is_own
from kvdiag.sources.agents.agent_publication import Publication, parse, plain
from kvdiag.sources.agents.black_boxes import NewestBlackBoxes
from kvdiag.sources.agents.census_publication import aged

SOURCE = "torch_allocator"

NAME = re.compile(r"agent-([0-9]{1,10})-([0-9]{1,20})\.json", re.ASCII)
MAX_FILES = 128
"""A server of 16 engines with 8 workers each has fewer."""

MAX_READ_BYTES = 8 * 2**20
"""Of all files together, at each read: 128 of them have 400 KB, and 8 MiB take 0.1 s to parse."""

MAX_ALLOCATORS = 256
MAX_GAPS = 256
"""Of all files together: the daemon keeps five minutes of them in memory, one reading a second."""

STALE_PERIODS = 3.0
MIN_STALE_SECONDS = 3.0
FORGOTTEN_SECONDS = 600.0
"""A file not renewed for this long belongs to a server that exited long ago and is ignored."""

SPLIT_REQUEST = "summary-request"
SPLIT_REQUEST_SECONDS = 10.0
"""An agent inspects its blocks once a minute, and on request no more often than this."""


CENSUS = "block_census"
"""The source of gaps where an engine core does not count who holds its blocks."""


class AgentReading(NamedTuple):
    """What the agents of a server report; `None` where none does."""

    allocators: tuple[Allocator, ...] | None
    gaps: tuple[Gap, ...]
    block_owners: tuple[BlockOwners, ...] | None = None


class TorchAllocatorSource:
    """Reads the folder of a server's agents, and notices files that are no longer renewed."""

    def __init__(
        self, folder: Path, *, show_request_ids: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Touch nothing yet; request ids are hashed unless `show_request_ids`."""
        self._folder = folder
        self._show_request_ids = show_request_ids
        self._clock = clock
        self._renewed: dict[str, tuple[int, float]] = {}
        self._boxes = NewestBlackBoxes()
        self._asked_at_seconds = float("-inf")

    def read(self) -> AgentReading:
        """The allocator statistics of each process and device; `None` if no agent publishes."""
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            reason = f"no folder of agents at {self._folder} ({error.strerror}): see `kvdiag agent install --help`"
            return AgentReading(None, (Gap(SOURCE, "absent", reason),))
        try:
            return self._read(folder)
        except OSError as error:
            reason = f"the agents' folder cannot be read: {error.strerror}"
            return AgentReading(None, (Gap(SOURCE, "failed", reason),))
        finally:
            os.close(folder)

    def _read(self, folder: int) -> AgentReading:
        with os.scandir(folder) as entries:
            present = sorted(entry.name for entry in islice(entries, MAX_NAMES))
        names = [name for name in present if NAME.fullmatch(name)]
        gaps: list[Gap] = []
        if len(present) == MAX_NAMES:
            gaps.append(Gap(SOURCE, "failed", f"{MAX_NAMES} or more files in the folder: the others are not read"))
        if len(names) > MAX_FILES:
            gaps.append(Gap(SOURCE, "failed", f"{len(names)} agent files, only the first {MAX_FILES} are read"))
        names = names[:MAX_FILES]
        self._renewed = {name: seen for name, seen in self._renewed.items() if name in names}
        found: list[Allocator] = []
        block_owners: list[BlockOwners] = []
        living = 0
        left_bytes = MAX_READ_BYTES
        owners: dict[tuple[int, int], int] = {}
        for name in names:
            if len(found) > MAX_ALLOCATORS or len(gaps) > MAX_GAPS:
                gaps.insert(0, Gap(SOURCE, "failed", f"more figures than a server has: {name} and later are not read"))
                break
            try:
                written = content(folder, name)
                left_bytes -= len(written.text)
                publication, age_seconds = self._publication(name, written, left_bytes)
                verified, owner = is_own(written, publication)
            except (RefusedError, ValueError) as problem:
                gaps.append(Gap(SOURCE, "failed", f"{name}: {plain(str(problem))}"))
                continue
            if age_seconds > FORGOTTEN_SECONDS:
                continue
            who = f"{publication.title} {publication.pid}"
            if owner == ENDED:
                gaps.append(
                    Gap(SOURCE, "absent", f"{who} exited; its file is {format_duration(age_seconds)} old; see its log")
                )
                continue
            if age_seconds > max(STALE_PERIODS * publication.period_seconds, MIN_STALE_SECONDS):
                state = "exited, or its agent is stuck" if owner is None else "is running, but its agent is stuck"
                silent = f"{who} has published nothing for {format_duration(age_seconds)}"
                gaps.append(Gap(SOURCE, "failed", f"{silent}: it {state}; see its log"))
                continue
            living += 1
            owners[publication.pid, publication.start_ticks] = written.owner
            gaps += [Gap(SOURCE, "failed", f"{who}: {problem}") for problem in publication.problems]
            unverified = None if verified else True
            if publication.census_problem is not None:
                gaps.append(Gap(CENSUS, "failed", f"{who}: {publication.census_problem}"))
            if publication.requests_problem is not None:
                gaps.append(
                    Gap(CENSUS, "absent", f"{who}: requests were not looked at: {publication.requests_problem}")
                )
            if (owned := publication.block_owners) is not None:
                block_owners.append(replace(aged(owned, age_seconds), unverified=unverified))
            found += [
                replace(
                    allocator,
                    age_seconds=round(age_seconds, 3),
                    pid_seen=owner is not None,
                    unverified=unverified,
                )
                for allocator in publication.allocators
            ]
        del found[MAX_ALLOCATORS:], gaps[MAX_GAPS:]
        failures, refused = self._boxes.read(folder, present, owners)
        gaps += refused[:MAX_GAPS]
        found = [replace(each, failure=failures.get(each.identity)) for each in found]
        if any(each.split is None or each.split.reserved_bytes != each.reserved_bytes for each in found):
            self._ask_for_splits(folder)
        if living and not found:
            gaps.append(Gap(SOURCE, "absent", "no process with an agent holds GPU memory through torch"))
        elif not names:
            reason = f"no agent publishes in {self._folder}: was the server started with it on its PYTHONPATH?"
            gaps.append(Gap(SOURCE, "absent", reason))
        return AgentReading(tuple(found) if living else None, tuple(gaps), tuple(block_owners) or None)

    def _ask_for_splits(self, folder: int) -> None:
        """Ask the agents to inspect their blocks now, if kvdiag may write in their folder."""
        now_seconds = self._clock()
        if now_seconds - self._asked_at_seconds < SPLIT_REQUEST_SECONDS:
            return
        self._asked_at_seconds = now_seconds
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError):
            file = os.open(SPLIT_REQUEST, flags, 0o640, dir_fd=folder)
            try:
                about = os.fstat(file)
                if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                    # The modification time is the request; the file is empty.
                    os.utime(file)
            finally:
                os.close(file)

    def _publication(self, name: str, written: Written, left_bytes: int) -> tuple[Publication, float]:
        if left_bytes < 0:
            raise RefusedError(f"not read: the files have more than {MAX_READ_BYTES >> 20} MiB together")
        publication = parse(written.text, show_request_ids=self._show_request_ids)
        if name != f"agent-{publication.pid}-{publication.start_ticks}.json":
            raise RefusedError(f"it claims to be from process {publication.pid}")
        # File times depend on the wall clock, which may be set: also count from the last change observed here.
        now_seconds = self._clock()
        known = self._renewed.get(name)
        if known is None or known[0] != publication.sequence:
            known = self._renewed[name] = (publication.sequence, now_seconds)
        return publication, max(time.time() - written.at_seconds, now_seconds - known[1], 0.0)
