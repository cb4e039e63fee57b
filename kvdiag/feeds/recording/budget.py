"""Limits what is kept of a recording: all of a small one; the older part of a large one is thinned to minutes.

A recording may unpack to a thousand times its size. Three things are limited, for all files of one folder together:
bytes after unpacking, values, and memory, which is estimated from the text of each line. The first two are counted
before a line is decoded and are errors; memory is relieved by thinning, as a daemon thins its own history, and is an
error only if that is not enough, or with test steps, which cannot be judged from minutes.
"""

from dataclasses import dataclass, field
from itertools import chain, groupby

from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.retention import minute_of, thinned
from kvdiag.model import Gap, Mark, Sample
from kvdiag.sources.bounded_json import most_values

MAX_BYTES = 512 * 2**20
"""Unpacked. A day of 8 GPUs at 1 Hz takes 200 MB."""

MAX_VALUES = 16_000_000
"""A day of 8 GPUs, or two of one; reading so many takes up to a minute."""

LINE_VALUES = 16
"""Cost of reading a line, in values, on top of its own values."""

MAX_MEMORY_BYTES = 320 * 2**20
"""Six hours of 8 GPUs as they came, or a soak of two hours; days in minutes take less."""

THINNED_RATIO = 0.3
"""Share of that memory for samples thinned to minutes."""

WORK_BYTES = 16 * 2**20
"""Samples are buffered up to this size before they are thinned."""

ENTRY_BYTES, OBJECT_BYTES, LIST_BYTES, VALUE_BYTES = 512, 96, 64, 36
"""Memory of a sample, and of each object, list and value in it, slightly more than measured."""

WIDE_CHARACTER_BYTES = 4
"""A text with one character beyond Latin takes so much for each of its characters."""

MAX_NAMES = 512
"""Engines and devices of one recording."""

MAX_PARTS = 1024
"""Engines, devices and allocators of one sample."""

MAX_PIDS = 16_384
"""Processes of one recording: a GPU may have many short-lived ones."""


class TooLongError(KvdiagError):
    """A recording that exceeds a limit."""


THINNED = Gap(
    "recorder",
    "absent",
    "too long to keep whole: its older part is thinned to one-minute samples, like a daemon's history",
)


@dataclass(slots=True)
class Budget:
    """The rest of the limits while a recording is read."""

    unpacked_bytes: int = MAX_BYTES
    values: int = MAX_VALUES
    memory_bytes: int = MAX_MEMORY_BYTES
    work_bytes: int = WORK_BYTES
    thinned_bytes: int = field(init=False)
    """Memory for thinned samples."""

    def __post_init__(self) -> None:
        """Reserve a part of the memory for thinned samples."""
        self.thinned_bytes = round(self.memory_bytes * THINNED_RATIO)

    def take(self, line: bytes) -> None:
        """Count a line as it is read.

        Raises:
            TooLongError: a limit is exceeded.
        """
        self.unpacked_bytes -= len(line)
        self.values -= LINE_VALUES + most_values(line)
        if self.unpacked_bytes < 0:
            raise TooLongError(f"longer than {MAX_BYTES >> 20} MiB unpacked")
        if self.values < 0:
            raise TooLongError(f"more than {MAX_VALUES:,} values")


def memory_bytes(line: bytes) -> int:
    """The approximate memory of a line's sample; never much less than it takes."""
    text = len(line) * (1 if line.isascii() and b"\\u" not in line else WIDE_CHARACTER_BYTES)
    objects, lists, values = line.count(b"{"), line.count(b"["), line.count(b",")
    return ENTRY_BYTES + text + OBJECT_BYTES * objects + LIST_BYTES * lists + VALUE_BYTES * values


class Kept:
    """The samples and marks of one file, each in ascending time, within a budget."""

    def __init__(self, budget: Budget) -> None:
        """Begin empty."""
        self._budget = budget
        self._whole: list[tuple[Sample, int]] = []
        self._whole_bytes = 0
        self._thinned: list[tuple[Sample, int]] = []
        self._thinned_bytes = 0
        self._names: set[str] = set()
        self._pids: set[int] = set()
        self.last: Sample | None = None
        self.marks: list[Mark] = []

    def mark(self, mark: Mark, size_bytes: int) -> None:
        """Take the newest mark.

        Raises:
            TooLongError: there is no room for it.
        """
        self.marks.append(mark)
        self._budget.memory_bytes -= size_bytes
        if self._budget.memory_bytes < self._budget.work_bytes:
            raise TooLongError("its marks need too much memory")

    def add(self, sample: Sample, size_bytes: int) -> None:
        """Take the newest sample.

        Raises:
            TooLongError: it does not fit even when thinned, or it has more devices or processes than any server.
        """
        self._refuse_crowds(sample)
        self.last = sample
        self._whole.append((sample, size_bytes))
        self._whole_bytes += size_bytes
        room_bytes = self._budget.memory_bytes - self._thinned_bytes
        if self._whole_bytes > max(room_bytes - self._budget.thinned_bytes, self._budget.work_bytes):
            self._thin()
            if self._thinned_bytes > self._budget.memory_bytes - self._budget.work_bytes:
                raise TooLongError("it needs too much memory even when thinned to one-minute samples")

    def _refuse_crowds(self, sample: Sample) -> None:
        for device in sample.devices or ():
            self._names.add(device.uuid)
            self._pids.update(process.pid for process in device.processes or ())
        self._names.update(engine.engine for engine in sample.engines or ())
        self._names.update(allocator.device_uuid for allocator in sample.allocators or ())
        self._names.update(owners.engine for owners in sample.block_owners or ())
        self._pids.update(process.pid for process in sample.host or ())
        self._pids.update(allocator.pid for allocator in sample.allocators or ())
        parts = (sample.engines, sample.devices, sample.allocators, sample.block_owners)
        if len(self._names) > MAX_NAMES or sum(len(part or ()) for part in parts) > MAX_PARTS:
            raise TooLongError(f"more than {MAX_NAMES} engines and devices")
        if len(self._pids) > MAX_PIDS:
            raise TooLongError(f"more than {MAX_PIDS:,} processes")

    def _thin(self) -> None:
        sizes = {sample.at_seconds: size for sample, size in self._whole}
        for _, minute in groupby((sample for sample, _ in self._whole), minute_of):
            self._thinned += [(sample, sizes[sample.at_seconds]) for sample in thinned(list(minute))]
        self._thinned_bytes = sum(size for _, size in self._thinned)
        self._whole, self._whole_bytes = [], 0

    @property
    def is_whole(self) -> bool:
        """Whether no sample was thinned."""
        return not self._thinned

    def samples(self) -> tuple[Sample, ...]:
        """All that is kept; its memory is taken from the budget.

        Raises:
            TooLongError: it has test steps, which cannot be judged from thinned samples.
        """
        if self.marks and self._thinned:
            raise TooLongError("it needs too much memory, and test steps cannot be judged from one-minute samples")
        self._budget.memory_bytes -= self._whole_bytes + self._thinned_bytes
        return tuple(sample for sample, _ in chain(self._thinned, self._whole))
