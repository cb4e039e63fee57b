"""A day of samples in little memory: the newest minutes in full, the older ones thinned. Pure.

Thinning only leaves out samples: none is averaged or moved in time, so that the rules judge values that were measured.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvdiag.feeds.daemon.interning import MINUTE_SECONDS, Interning
from kvdiag.model import PARTS, Facts, Sample, Timeline

MAX_LIVES = 16
"""Lives of a server that are kept, the newest: a crash loop makes one a minute."""

MAX_PARTS = 120_000
"""Engines, devices, processes, allocators and gaps of all thinned samples: with 8 GPUs a day has 50,000."""


class Retention:
    """The samples of one server through its lives, in ascending time, with the facts of its earlier lives.

    A day at 1 Hz with 8 GPUs would take 500 MB in full; five minutes in full and the rest thinned take 7 MB, or 15 MB
    if every figure changes each minute.
    """

    def __init__(self, *, whole_seconds: float = 300.0, all_seconds: float = 86_400.0) -> None:
        """Begin empty; samples are kept in full for `whole_seconds`, then thinned, and dropped after `all_seconds`."""
        self._whole_seconds = whole_seconds
        self._all_seconds = all_seconds
        self._whole: deque[Sample] = deque()
        self._thinned: deque[Sample] = deque()
        self._sharing = Interning()
        self._earlier: list[tuple[float, Facts]] = []

    def begin_life(self, at_seconds: float, before: Facts) -> None:
        """Keep the samples until a moment as those of a process with other facts, if it ever answered."""
        if all(sample.engines is None for sample in self.samples()):
            # That a part of the history is damaged remains true.
            damaged = [sample for sample in self.samples() if any(gap.source == "recorder" for gap in sample.gaps)]
            self.clear()
            self._whole.extend(damaged)
            return
        self._earlier = [*self._earlier, (at_seconds, before)][-MAX_LIVES:]
        if len(self._earlier) == MAX_LIVES:
            for kept in (self._thinned, self._whole):
                while kept and kept[0].at_seconds < self._earlier[0][0]:
                    kept.popleft()

    def load(self, samples: Iterable[Sample], earlier_facts: Iterable[tuple[float, Facts]] = ()) -> None:
        """Begin with the thinned samples of an earlier run, in ascending time, and the facts of its earlier lives."""
        self._thinned.extend(samples)
        self._earlier.extend(earlier_facts)

    def add(self, sample: Sample) -> tuple[Sample, ...]:
        """Add the newest sample, thin the minute that has become old, and drop samples that are too old.

        Returns the samples that were just thinned.
        """
        self._whole.append(sample)
        made: list[Sample] = []
        oldest_whole_seconds = sample.at_seconds - self._whole_seconds
        while (part := self._part_of(self._whole[0]))[0] + MINUTE_SECONDS <= oldest_whole_seconds:
            taken = []
            while self._part_of(self._whole[0]) == part:
                taken.append(self._whole.popleft())
            begins = not self._thinned or self._part_of(self._thinned[-1])[1] != part[1]
            parts = [self._sharing.sample(one) for one in thinned(taken, begins=begins)]
            self._thinned.extend(parts)
            made += parts
        over = sum(map(_parts, self._thinned)) - MAX_PARTS if made else 0
        while over > 0:
            over -= _parts(self._thinned.popleft())
        while self._thinned and self._thinned[0].at_seconds < sample.at_seconds - self._all_seconds:
            self._thinned.popleft()
        return tuple(made)

    def _part_of(self, sample: Sample) -> tuple[float, int]:
        """A sample's minute, and how many lives were over before it: no two are thinned into one."""
        return minute_of(sample), sum(until <= sample.at_seconds for until, _ in self._earlier)

    def move(self, seconds: float) -> None:
        """Correct all times after the clock was set by so much."""
        for kept in (self._thinned, self._whole):
            moved = [replace(sample, at_seconds=sample.at_seconds + seconds) for sample in kept]
            kept.clear()
            kept.extend(moved)
        self._earlier = [(until + seconds, facts) for until, facts in self._earlier]

    @property
    def thinned(self) -> tuple[Sample, ...]:
        """The thinned samples."""
        return tuple(self._thinned)

    @property
    def earlier_facts(self) -> tuple[tuple[float, Facts], ...]:
        """The facts of earlier lives, each with the time until which they held."""
        return tuple(self._earlier)

    def timeline(self) -> Timeline:
        """All samples, with the facts of earlier lives."""
        return Timeline(samples=self.samples(), earlier_facts=self.earlier_facts)

    def samples(self) -> tuple[Sample, ...]:
        """All samples."""
        return (*self._thinned, *self._whole)

    def clear(self) -> None:
        """Drop all samples: they were of another server."""
        self._whole.clear()
        self._thinned.clear()
        self._earlier.clear()


def _parts(sample: Sample) -> int:
    return sum(len(getattr(sample, part) or ()) for part in (*PARTS.values(), "gaps"))


def minute_of(sample: Sample) -> float:
    """The start of a sample's minute."""
    return sample.at_seconds // MINUTE_SECONDS * MINUTE_SECONDS


def thinned(minute: Sequence[Sample], *, begins: bool = False) -> tuple[Sample, ...]:
    """The samples that represent a minute, in order, each reduced to the parts for which it is kept.

    Of each part the newest sample; of the devices the newest that lists processes, if any does; of the engines also
    the fullest, and the last two in a row that were idle (a floor takes two that agree) with the one that ended that;
    every gap once, and the engines' again after their last answer, which may have been the server's. Where a life
    `begins`, also the first sample of each part, which is its start.
    """
    read = {
        part: [at for at, sample in enumerate(minute) if getattr(sample, part) is not None] for part in PARTS.values()
    }
    engines, devices = read["engines"], read["devices"]
    listed = [at for at in devices if any(device.processes is not None for device in minute[at].devices or ())]
    usage = {at: max((one.kv_usage_ratio or 0.0 for one in minute[at].engines or ()), default=0.0) for at in engines}
    fullest = sorted(engines, key=usage.__getitem__)[-1:]
    kept = {part: {*places[-1:]} for part, places in read.items()} | {
        "engines": {*engines[-1:], *_idle_pair(engines, minute), *fullest},
        "devices": {*(listed or devices)[-1:]},
    }
    if begins:
        kept = {part: places | {*read[part][:1]} for part, places in kept.items()}
    reported: set[tuple[str, str]] = set()
    found = []
    for at, sample in enumerate(minute):
        if engines[-1:] == [at - 1]:
            reported = {one for one in reported if one[0] != "engine"}
        gaps = tuple(gap for gap in sample.gaps if (gap.source, gap.kind) not in reported)
        reported.update((gap.source, gap.kind) for gap in gaps)
        parts: dict[str, Any] = {part: getattr(sample, part) if at in places else None for part, places in kept.items()}
        if gaps or any(value is not None for value in parts.values()):
            found.append(replace(sample, gaps=gaps, **parts))
    return tuple(found)


def _idle_pair(engines: list[int], minute: Sequence[Sample]) -> list[int]:
    """The last two samples in a row with every engine idle, and the next one, which ends the idle interval."""
    idle = [minute[at].engines_idle is True for at in engines]
    last = next((place for place in range(len(engines) - 1, 0, -1) if idle[place - 1] and idle[place]), None)
    return [] if last is None else engines[last - 1 : last + 2]
