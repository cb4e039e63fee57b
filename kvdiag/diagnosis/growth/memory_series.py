"""The memory of each process and device over hours, as one series per component: read once, for every rule.

A timeline's samples hold one source's values each. One pass sorts them into series by component and owner, at most
four a minute; the engines' load is looked up for each value. A series ends with its process: values of another
process under the same number are a series of their own. Before a series is judged, the beginning of its life is left
out (kernels, graphs and pools come with it) and so is the time in which the engines slept, whose weights are elsewhere.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, repeat
from operator import attrgetter
from typing import Any

from kvdiag.diagnosis.engine_columns import EngineColumns, Totals, engine_columns
from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.components import torch_components
from kvdiag.diagnosis.growth.estimator import assess
from kvdiag.diagnosis.growth.growth_evidence import Assessment, Series
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import assigned_uuids, server_bytes, server_devices, server_uuids
from kvdiag.model import Device, Facts, HostProcess, Timeline, cuda_uuid

Points = tuple[list[float], list[int]]
"""Times in seconds and bytes of one component, side by side."""

GROUPS: tuple[tuple[Part, ...], ...] = (
    (Part.HOST_ANONYMOUS, Part.HOST_TOGETHER, Part.HOST_RESIDENT),
    (Part.TORCH_LIVE, Part.TORCH_RESERVED, Part.TORCH_UNUSED, Part.OUTSIDE_TORCH),
    (Part.SERVER, Part.DEVICE, Part.OTHERS),
)
"""Components that one source reads together: an owner that lacks the newest of them has exited."""


_MEDIA = attrgetter("media_queries_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """Whose bytes: the device as CUDA names it (empty on the host), and the process or device in words."""

    device_uuid: str
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alongside:
    """What the engines did when a source was read: their load and the work done, at the times they were awake.

    `awake` says which of the times read those are, `None` for all. `load` and `work` are `None` where no engine
    reports them.
    """

    read_seconds: Sequence[float]
    times_seconds: Sequence[float]
    awake: Sequence[bool] | None
    load: Sequence[float] | None
    work: Sequence[float] | None
    known: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActivity:
    """What the engines did, sample by sample: their load, the work done, and whether any of them slept.

    The load is the sum of the pools' usage where they report it, else of running requests; the work is their tokens
    since the first sample. `fresh`: the first sample preceded any request. `media`: whether the cache of
    images and other media has ever been asked; `None` where the engines do not count that.
    """

    times_seconds: Sequence[float]
    load: Sequence[float]
    work: Sequence[float]
    asleep: Sequence[bool]
    fresh: bool
    media: bool | None = None

    def at(self, seconds: float, limits: GrowthLimits) -> tuple[float | None, bool]:
        """The load and the sleep at a moment, by the newest sample before it, if that is not too old."""
        place = bisect_right(self.times_seconds, seconds) - 1
        if place < 0 or seconds - self.times_seconds[place] > limits.engine_age_seconds:
            return None, False
        return self.load[place], self.asleep[place]

    def alongside(self, read_seconds: Sequence[float], limits: GrowthLimits) -> Alongside:
        """The engines at each of some ascending times, without those at which they slept."""
        own, most_seconds, load, work = self.times_seconds, limits.engine_age_seconds, self.load, self.work
        times = read_seconds
        first = bisect_left(own, times[0]) if times else 0
        places: Sequence[int] = range(first, first + len(times))
        recent = places
        # A source that is read together with the engines has their times.
        if list(own[first : first + len(times)]) != list(times):
            places = [bisect_right(own, seconds) - 1 for seconds in times]
            recent = [
                place if place >= 0 and seconds - own[place] <= most_seconds else -1
                for seconds, place in zip(times, places, strict=True)
            ]
        awake = None
        if True in self.asleep:
            awake = [place < 0 or not self.asleep[place] for place in recent]
            times = list(compress(times, awake))
            places, recent = list(compress(places, awake)), list(compress(recent, awake))
        reported = any(place >= 0 for place in recent)
        worked = bool(work) and work[-1] > 0.0
        return Alongside(
            read_seconds=read_seconds,
            times_seconds=times,
            awake=awake,
            load=[load[place] if place >= 0 else 0.0 for place in recent] if reported else None,
            work=[work[place] if place > 0 else work[0] for place in places] if worked else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeries:
    """The series of every component that some source reports, in bytes, by owner."""

    engines: EngineActivity
    points: Mapping[Part, Mapping[MemoryOwner, Points]]
    started_seconds: float | None
    limits: GrowthLimits
    _assessed: dict[Part, dict[MemoryOwner, Assessment]] = field(default_factory=dict)
    _alongside: list[Alongside] = field(default_factory=list)

    def assessed(self, part: Part) -> Mapping[MemoryOwner, Assessment]:
        """A component of every owner that was there to the end, judged by the estimator."""
        if part not in self._assessed:
            self._assessed[part] = self._assess(part)
        return self._assessed[part]

    def grown_bytes(self, part: Part, owner: MemoryOwner) -> int:
        """What a component holds beyond its first sample."""
        _, sizes = self.points[part][owner]
        return max(sizes[-1] - sizes[0], 0)

    def _assess(self, part: Part) -> dict[MemoryOwner, Assessment]:
        limits = self.limits
        group = next(group for group in GROUPS if part in group)
        lines = [line for one in group for line in self.points[one].values()]
        first = min((times[0] for times, _ in lines), default=0.0)
        last = max((times[-1] for times, _ in lines), default=0.0)
        served = self.engines.times_seconds[0] if self.engines.times_seconds else None
        started = -math.inf if self.started_seconds is None else limits.after_warmup(self.started_seconds, last)
        assessed = {}
        for owner, line in self.points[part].items():
            times, _ = line
            if last - times[-1] > limits.reading_age_seconds:
                continue
            # Where its beginning was observed, what comes with a beginning is left out; else the gates have to do.
            begun = self.engines.fresh or times[0] - first > limits.reading_age_seconds
            since = max(limits.after_warmup(times[0], times[-1]) if begun else times[0], started)
            assessed[owner] = assess(self._awake(line, since, part), limits, served)
        return assessed

    def _awake(self, line: Points, since_seconds: float, part: Part) -> Series:
        """The samples since a moment with the load at each, without those of engines asleep."""
        first = bisect_left(line[0], since_seconds)
        read, sizes = line[0][first:], line[1][first:]
        # A source reads all its devices or processes at the same times.
        if not self._alongside or self._alongside[-1].read_seconds != read:
            self._alongside[:] = [self.engines.alongside(read, self.limits)]
        beside = self._alongside[-1]
        return Series(
            times_seconds=beside.times_seconds,
            sizes_bytes=sizes if beside.awake is None else list(compress(sizes, beside.awake)),
            load=beside.load,
            work=beside.work,
            collected=part.collected,
            shared=beside.known,
        )


def memory_series(timeline: Timeline, facts: Facts, limits: Limits) -> MemorySeries:
    """The series of a timeline, read once."""
    key = ("memory_series", facts.server_pids, facts.device_uuids, facts.started_seconds, limits.growth)
    return timeline.once(key, lambda: _Gathering(timeline, facts, limits.growth).series())


class _Gathering:
    """One pass over a timeline."""

    def __init__(self, timeline: Timeline, facts: Facts, limits: GrowthLimits) -> None:
        self._timeline, self._facts = timeline, facts
        self._own = server_uuids(timeline, facts)
        self._assigned = assigned_uuids(timeline, facts)
        self._limits = limits
        self._points: dict[Part, dict[Hashable, Points]] = {part: {} for group in GROUPS for part in group}
        self._owners: dict[Hashable, MemoryOwner] = {}
        self._lines: dict[Hashable, Points] = {}
        """Of processes, by what distinguishes them."""

        self._boards: dict[Hashable, tuple[Points, ...]] = {}
        """The server's bytes, the others' and all of each device."""

    def series(self) -> MemorySeries:
        """Everything that the samples show."""
        self._gather_devices()
        self._gather_allocators()
        self._gather_host()
        return MemorySeries(
            engines=engine_activity(self._timeline),
            points={part: self._by_owner(part) for part in self._points},
            started_seconds=self._facts.started_seconds,
            limits=self._limits,
        )

    def _gather_devices(self) -> None:
        # With samples each second every fifth lists processes, and the others say nothing of the server's.
        kept, least_seconds = dict[Hashable, float](), self._limits.reading_seconds
        devices: tuple[Device, ...] | None = None
        board: tuple[str, int] | None = None
        figures: list[tuple[Points, int]] | None = None
        for sample in self._timeline.samples:
            if not sample.devices:
                continue
            if sample.devices is not devices:
                board = sample.devices[0].uuid, len(sample.devices)
            if (before := kept.get(board)) is not None and sample.at_seconds - before < least_seconds:
                continue
            # Values that stay the same for hours are often one object.
            if sample.devices is not devices:
                devices = sample.devices
                figures = self._devices(devices)
            if figures is not None:
                kept[board] = sample.at_seconds
                _add(figures, sample.at_seconds)

    def _gather_allocators(self) -> None:
        kept, least_seconds = dict[Hashable, float](), self._limits.reading_seconds
        for sample in self._timeline.samples:
            if not sample.allocators:
                continue
            source = sample.allocators[0].pid, len(sample.allocators)
            if (before := kept.get(source)) is not None and sample.at_seconds - before < least_seconds:
                continue
            kept[source] = sample.at_seconds
            for each in sample.allocators:
                if not each.may_be_of(self._facts.server_pids):
                    continue
                key = each.identity
                if key not in self._owners:
                    self._owners[key] = MemoryOwner(device_uuid=each.device_uuid.lower(), who=each.who)
                published = [(self._line(part, key), size) for part, size in torch_components(each)]
                _add(published, sample.at_seconds)

    def _gather_host(self) -> None:
        kept, least_seconds = dict[Hashable, float](), self._limits.reading_seconds
        for sample in self._timeline.samples:
            if not sample.host:
                continue
            source = sample.host[0].pid, len(sample.host)
            if (before := kept.get(source)) is not None and sample.at_seconds - before < least_seconds:
                continue
            kept[source] = sample.at_seconds
            self._add_host(sample.host, sample.at_seconds)

    def _devices(self, devices: tuple[Device, ...]) -> list[tuple[Points, int]] | None:
        """The series of the server's devices and their bytes; `None` for a sample that does not list its processes."""
        if self._own and all(device.processes is None for device in devices):
            return None
        found = []
        for device in server_devices(devices, self._assigned):
            key = (device.uuid, device.index)
            if (lines := self._boards.get(key)) is None:
                self._owners[key] = MemoryOwner(device_uuid=cuda_uuid(device.uuid), who=f"GPU {device.index}")
                lines = tuple(self._line(part, key) for part in (Part.SERVER, Part.OTHERS, Part.DEVICE))
                self._boards[key] = lines
            server, others, whole = lines
            size = server_bytes(device, self._facts.server_pids)
            used = None if device.memory is None else device.memory.used_bytes
            if size is not None:
                found.append((server, size))
                if used is not None:
                    found.append((others, used - size if used > size else 0))
            elif used is not None and not self._own:
                # Of devices that are known to be shared the whole says nothing of the server.
                found.append((whole, used))
        return found

    def _add_host(self, processes: tuple[HostProcess, ...], at_seconds: float) -> None:
        """Add the processes' bytes to their series."""
        for process in processes:
            size = process.anonymous_bytes
            key = process.pid, process.name, size is None
            if (line := self._lines.get(key)) is None:
                one = process.pid, process.name
                self._owners.setdefault(one, MemoryOwner(device_uuid="", who=process.who))
                line = self._line(Part.HOST_RESIDENT if size is None else Part.HOST_ANONYMOUS, one)
                self._lines[key] = line
            line[0].append(at_seconds)
            line[1].append(process.resident_bytes if size is None else size)
        if len(processes) == 1:
            return
        sizes = [process.anonymous_bytes for process in processes]
        if None not in sizes:
            together = ("together", *(process.pid for process in processes))
            who = f"the server's {len(processes)} processes together"
            self._owners.setdefault(together, MemoryOwner(device_uuid="", who=who))
            _add([(self._line(Part.HOST_TOGETHER, together), sum(filter(None, sizes)))], at_seconds)

    def _line(self, part: Part, key: Hashable) -> Points:
        lines = self._points[part]
        if (line := lines.get(key)) is None:
            line = lines[key] = ([], [])
        return line

    def _by_owner(self, part: Part) -> dict[MemoryOwner, Points]:
        """The series of a part; of processes under one name and number the newest counts."""
        lines = sorted((one for one in self._points[part].items() if one[1][0]), key=lambda one: one[1][0][-1])
        return {self._owners[key]: line for key, line in lines}


def _add(figures: Iterable[tuple[Points, int]], at_seconds: float) -> None:
    for (times, sizes), size_bytes in figures:
        times.append(at_seconds)
        sizes.append(size_bytes)


def engine_activity(timeline: Timeline) -> EngineActivity:
    """The engines over a whole timeline, in one pass."""
    columns = engine_columns(timeline)
    read = columns.samples
    generated = columns.total("generation_tokens_total")
    return EngineActivity(
        times_seconds=columns.times_seconds,
        load=columns.loads,
        work=list(accumulate(_worked(columns.tokens))),
        asleep=(
            [sample.asleep for sample in read]
            if columns.only is None
            else [engine.asleep is True for engine in columns.only]
        ),
        media=_media(columns),
        # A counter that never moves says nothing.
        fresh=bool(read) and generated[0] == 0 != generated[-1],
    )


def _media(columns: EngineColumns) -> bool | None:
    """Whether media were looked up, by the newest sample that counts them: of a server of text there are none."""
    if columns.only is not None:
        newest = next((each for each in map(_MEDIA, reversed(columns.only)) if each is not None), None)
        return None if newest is None else bool(newest)
    for sample in reversed(columns.samples):
        counts = [one.media_queries_total for one in sample.engines or () if one.media_queries_total is not None]
        if counts:
            return any(counts)
    return None


def _worked(tokens: Totals) -> Iterator[float]:
    """Tokens that the engines counted since the sample before; a counter that restarts at 0 adds nothing."""
    if tokens.count(None) == len(tokens):
        yield from repeat(0.0, len(tokens))
        return
    before: int | None = None
    for now in tokens:
        yield 0.0 if now is None or before is None or now <= before else float(now - before)
        before = before if now is None else now
