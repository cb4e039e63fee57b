"""What a timeline shows of each process and device over hours, as series: gone through once, for every rule."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal, TypeVar

from kvdiag.diagnosis.banks import Series, Watched, watch
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import server_bytes, server_devices, server_uuids
from kvdiag.model import Device, Engine, Facts, HostProcess, Timeline, cuda_uuid

Key = TypeVar("Key", bound=Hashable)

Line = tuple[list[float], list[int]]
"""Times and bytes of one component, side by side."""

Readings = dict[Key, Line]
"""Those of each, by whatever names it."""


Part = Literal[
    "anonymous", "together", "resident", "live", "reserved", "unused", "outside", "server", "whole", "others"
]

GROUPS: tuple[tuple[Part, ...], ...] = (
    ("anonymous", "together", "resident"),
    ("live", "reserved", "unused", "outside"),
    ("server", "whole", "others"),
)
"""Components that are read together: what one of them lacks at the end is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whose bytes: the device as CUDA names it (empty on the host), and the process or device in words."""

    device_uuid: str
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What the engines did beside every other reading: since when they have been idle, and how full they were.

    `began_seconds` is the first reading after the engines' newest restart, `None` where they never restarted;
    `fresh` says that the first reading of all saw them before any request.
    """

    times_seconds: tuple[float, ...]
    idle_since_seconds: tuple[float, ...]
    load: tuple[float, ...]
    asleep: tuple[bool, ...]
    began_seconds: float | None
    fresh: bool

    def at(self, seconds: float, limits: Limits) -> Moment:
        """What the engines did at a moment, by their newest reading before it, if that is not too old."""
        place = bisect_right(self.times_seconds, seconds) - 1
        if place < 0 or seconds - self.times_seconds[place] > limits.engine_age_seconds:
            return UNTOLD
        idle = seconds - self.idle_since_seconds[place] >= limits.idle_settle_seconds
        return idle, self.load[place], self.asleep[place]


Moment = tuple[bool, float | None, bool]
"""Whether a reading is an idle one, the load beside it, and whether the engines slept."""

UNTOLD: Moment = (False, None, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The series of every component that some source tells, in bytes.

    On the host the anonymous bytes of each process, of all together while they are the same ones, and the resident
    bytes of those whose anonymous ones are not told. By torch what lives, what is reserved, what of it does not live,
    and what the process holds beside torch. On each device the server's own bytes, all bytes, and those that are not
    the server's.
    """

    engines: Company
    anonymous: Readings[Holder]
    together: Readings[Holder]
    resident: Readings[Holder]
    live: Readings[Holder]
    reserved: Readings[Holder]
    unused: Readings[Holder]
    outside: Readings[Holder]
    server: Readings[Holder]
    whole: Readings[Holder]
    others: Readings[Holder]

    moments: Mapping[float, Moment]
    started_seconds: float | None
    _known: dict[str, dict[Holder, Watched]]

    def watched(self, part: Part, limits: Limits) -> Mapping[Holder, Watched]:
        """A component of everything that was there to the end, on every bank, beside the engines."""
        if part not in self._known:
            group = next(group for group in GROUPS if part in group)
            seen = [series for name in group for series in getattr(self, name).values()]
            # What comes with a beginning is left out, where that is told.
            since = -math.inf if self.started_seconds is None else self.started_seconds + limits.warmup_seconds
            self._known[part] = watch_all(getattr(self, part), seen, self.engines, self.moments, limits, since)
        return self._known[part]

    def grown_bytes(self, part: Part, holder: Holder) -> int:
        """What a component holds beyond its first reading."""
        series: Readings[Holder] = getattr(self, part)
        _, sizes = series[holder]
        return max(sizes[-1] - sizes[0], 0)

    def grew(self, part: Part, least_bytes: int) -> bool:
        """Whether a component of anything moved by so much at all: most do not, and need no test."""
        series: Readings[Holder] = getattr(self, part)
        return any(max(sizes) - min(sizes) >= least_bytes for _, sizes in series.values())


def history(timeline: Timeline, facts: Facts, limits: Limits) -> History:
    """The series of a timeline, gone through once."""
    key = ("history", facts.server_pids, facts.device_uuids, facts.started_seconds, limits)
    return timeline.once(key, lambda: _Gathering(timeline, facts, limits).history())


class _Gathering:
    """One pass over a timeline."""

    def __init__(self, timeline: Timeline, facts: Facts, limits: Limits) -> None:
        self._timeline = timeline
        self._pids = facts.server_pids
        self._own = server_uuids(timeline, facts)
        self._assigned = frozenset(facts.device_uuids or ())
        self._started_seconds = facts.started_seconds
        self._least = limits.watched_seconds
        self._limits = limits
        self._kept: dict[Hashable, float] = {}
        self._series: dict[str, dict[Hashable, Line]] = {}
        self._names: dict[Hashable, Holder] = {}

    def history(self) -> History:
        """Everything that the samples show."""
        for sample in self._timeline.samples:
            at_seconds = sample.at_seconds
            if sample.devices:
                self._devices(sample.devices, at_seconds)
            if sample.allocators and self._due(("torch", sample.allocators[0].pid, len(sample.allocators)), at_seconds):
                for each in sample.allocators:
                    if not each.may_be_of(self._pids):
                        continue
                    key = each.identity
                    if key not in self._names:
                        self._names[key] = Holder(device_uuid=each.device_uuid.lower(), who=each.who)
                    self._add("live", key, at_seconds, each.allocated_bytes)
                    self._add("reserved", key, at_seconds, each.reserved_bytes)
                    self._add("unused", key, at_seconds, each.reserved_bytes - each.allocated_bytes)
                    if each.outside_torch_bytes is not None:
                        self._add("outside", key, at_seconds, each.outside_torch_bytes)
            if sample.host and self._due(("host", sample.host[0].pid, len(sample.host)), at_seconds):
                self._together(sample.host, at_seconds)
                for process in sample.host:
                    key_of = (process.pid, process.name)
                    if key_of not in self._names:
                        self._names[key_of] = Holder(device_uuid="", who=process.who)
                    size = process.anonymous_bytes
                    if size is None:
                        self._add("resident", key_of, at_seconds, process.resident_bytes)
                    else:
                        self._add("anonymous", key_of, at_seconds, size)
        parts = {name: self._named(name) for group in GROUPS for name in group}
        engines = company(self._timeline)
        moments: dict[float, Moment] = {}
        for times, _ in (line for part in parts.values() for line in part.values()):
            for seconds in times:
                if seconds not in moments:
                    moments[seconds] = engines.at(seconds, self._limits)
        return History(engines=engines, moments=moments, started_seconds=self._started_seconds, _known={}, **parts)

    def _devices(self, devices: tuple[Device, ...], at_seconds: float) -> None:
        source = (devices[0].uuid, len(devices))
        if at_seconds - self._kept.get(source, -math.inf) < self._least:
            return
        # Of readings at each second every fifth lists processes, and the others tell nothing of the server's.
        if self._own and all(device.processes is None for device in devices):
            return
        self._kept[source] = at_seconds
        for device in server_devices(devices, self._own or self._assigned):
            key = (device.uuid, device.index)
            if key not in self._names:
                self._names[key] = Holder(device_uuid=cuda_uuid(device.uuid), who=f"GPU {device.index}")
            size = server_bytes(device, self._pids)
            used = None if device.memory is None else device.memory.used_bytes
            if size is not None:
                self._add("server", key, at_seconds, size)
                if used is not None:
                    self._add("others", key, at_seconds, max(used - size, 0))
            elif used is not None and not self._own:
                # Of devices that are known to be shared the whole says nothing of the server.
                self._add("whole", key, at_seconds, used)

    def _together(self, processes: tuple[HostProcess, ...], at_seconds: float) -> None:
        sizes = [process.anonymous_bytes for process in processes]
        if len(sizes) > 1 and None not in sizes:
            key = ("together", *(process.pid for process in processes))
            self._names.setdefault(key, Holder(device_uuid="", who=f"the server's {len(sizes)} processes together"))
            self._add("together", key, at_seconds, sum(size for size in sizes if size is not None))

    def _due(self, source: Hashable, at_seconds: float) -> bool:
        """Whether a source's reading is far enough from its last for a minute's median to gain by it."""
        if at_seconds - self._kept.get(source, -math.inf) < self._least:
            return False
        self._kept[source] = at_seconds
        return True

    def _add(self, part: str, key: Hashable, at_seconds: float, size_bytes: int) -> None:
        lines = self._series.get(part)
        if lines is None:
            lines = self._series[part] = {}
        line = lines.get(key)
        if line is None:
            line = lines[key] = ([], [])
        line[0].append(at_seconds)
        line[1].append(size_bytes)

    def _named(self, part: str) -> Readings[Holder]:
        """The series of a part by their holders, a process of the same name and number anew apart from the old."""
        lines = sorted(self._series.get(part, {}).items(), key=lambda one: one[1][0][-1])
        return {self._names[key]: line for key, line in lines}


def company(timeline: Timeline) -> Company:
    """The engines over a whole timeline, in one pass."""
    times: list[float] = []
    idle_since: list[float] = []
    load: list[float] = []
    asleep: list[bool] = []
    began: float | None = None
    tokens: dict[str, int] = {}
    fresh = False
    since = math.inf
    newest: tuple[Engine, ...] = ()
    for sample in timeline.samples:
        engines = sample.engines
        if engines is None:
            continue
        at_seconds = sample.at_seconds
        idle, full, sleeps = bool(engines), 0.0, False
        for engine in engines:
            running, usage, count = engine.requests_running, engine.kv_usage_ratio, engine.prompt_tokens_total
            idle = idle and running == 0 and engine.requests_waiting == 0
            full += (running or 0) if usage is None else usage
            sleeps = sleeps or bool(engine.asleep)
            # Counters begin at 0 with the process: memory of the one before is nothing to compare with.
            if count is not None:
                began = at_seconds if count < tokens.get(engine.engine, 0) else began
                tokens[engine.engine] = count
        if not times:
            fresh = _unused(engines)
        newest = engines
        since = min(since, at_seconds) if idle else math.inf
        times.append(at_seconds)
        idle_since.append(since)
        load.append(full)
        asleep.append(sleeps)
    return Company(
        times_seconds=tuple(times),
        idle_since_seconds=tuple(idle_since),
        load=tuple(load),
        asleep=tuple(asleep),
        began_seconds=began,
        # A counter that never moves tells nothing.
        fresh=fresh and not _unused(newest),
    )


def _unused(engines: tuple[Engine, ...]) -> bool:
    """Whether engines have not generated a token yet: their server has just begun."""
    counts = [engine.generation_tokens_total for engine in engines]
    return bool(counts) and all(count == 0 for count in counts)


def watch_all(
    readings: Mapping[Key, Line],
    seen: Sequence[Line],
    beside: Company,
    moments: Mapping[float, Moment],
    limits: Limits,
    since_seconds: float = -math.inf,
) -> dict[Key, Watched]:
    """Every component that was there to the end of all that was `seen` with it, on every bank, beside the engines.

    Nothing before `since_seconds` counts.
    """
    first = min((times[0] for times, _ in seen), default=0.0)
    last = max((times[-1] for times, _ in seen), default=0.0)
    served = beside.times_seconds[0] if beside.times_seconds else None
    watched = {}
    for key, line in readings.items():
        times, _ = line
        if last - times[-1] > limits.reading_age_seconds:
            continue
        # Where its beginning was seen, what comes with a beginning is left out; elsewhere the banks' gates have to do.
        born = max(times[0], beside.began_seconds or times[0])
        begun = beside.fresh or born - first > limits.reading_age_seconds
        start = max(born + limits.warmup_seconds if begun else born, since_seconds)
        watched[key] = watch(_series(line, start, moments), limits, served)
    return watched


def _series(line: Line, start_seconds: float, moments: Mapping[float, Moment]) -> Series:
    """The readings since a start beside the engines, without those of engines asleep: their weights are elsewhere."""
    first = bisect_left(line[0], start_seconds)
    times, sizes = line[0][first:], line[1][first:]
    beside = [moments[seconds] for seconds in times]
    awake = [not asleep for _, _, asleep in beside]
    if not all(awake):
        times, sizes, beside = (list(compress(each, awake)) for each in (times, sizes, beside))  # type: ignore[assignment]
    load = [each for _, each, _ in beside]
    told = any(each is not None for each in load)
    return Series(
        times_seconds=tuple(times),
        sizes_bytes=tuple(sizes),
        idle=tuple([idle for idle, _, _ in beside]),
        load=tuple([each or 0.0 for each in load]) if told else None,
    )
