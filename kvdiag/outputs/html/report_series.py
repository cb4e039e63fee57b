"""A Timeline as series to draw: what each source read, and when it failed. Judges nothing. Pure.

There is one function for each source, because each has times of its own. A sample that was due and failed is `None`,
which breaks the line; a part of a sample that was not due on its tick is left out. A total of all engines is
`None` if one of them does not report its part. Report and status page draw the same series, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.model import PARTS, Device, Facts, Sample, Timeline, without_mig_parents
from kvdiag.outputs.html.downsample import Run, pauses, runs

Values = list[float | None]

MAX_COLUMNS = 50_000
"""Of one source: each figure counts again whenever the set of figures changes. The older columns are left out."""

MAX_FIGURES = 2048
"""Of one source, those read last: a server that renames its engines at each read would take a gigabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Figures of one source by their names, all at the same times."""

    times: tuple[float, ...]
    figures: Mapping[str, Sequence[float | None]]
    breaks: tuple[int, ...]

    def runs(self, name: str) -> tuple[Run, ...]:
        """One figure, cut where it was not read."""
        return runs(self.times, self.figures[name], self.breaks)

    def divided(self, wholes: Mapping[str, int | None]) -> Readings:
        """Each figure as a ratio of its whole; `None` where that is not known."""
        figures = {
            name: [value / whole if value is not None and (whole := wholes[name]) else None for value in values]
            for name, values in self.figures.items()
        }
        return replace(self, figures=figures)


class _Rows:
    """Samples while they are collected: a million of them for a day of eight GPUs.

    Samples in a row of the same figures are kept together, in one list for each figure.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._names: tuple[str, ...] | None = None
        self._appends: list[Callable[[float | None], None]] = []
        self._blocks: list[tuple[int, str, Values]] = []

    def add(self, at_seconds: float, names: tuple[str, ...], values: Iterable[float | None]) -> None:
        """One reading; no names where it failed."""
        if names != self._names:
            self._names = names
            columns: list[Values] = [[] for _ in names]
            self._blocks += [(len(self._times), name, column) for name, column in zip(names, columns, strict=True)]
            # An engine that is renamed at each read adds its columns each time.
            del self._blocks[:-MAX_COLUMNS]
            self._appends = [column.append for column in columns]
        for append, value in zip(self._appends, values, strict=True):
            append(value)
        self._times.append(at_seconds)

    def read(self, timeline: Timeline, source: str) -> Iterator[Sample]:
        """The samples that have a source's part; where it was due and failed, a sample without figures is added."""
        for sample in timeline.samples:
            if getattr(sample, PARTS[source]) is not None:
                yield sample
            elif any(gap.source == source and gap.kind != "absent" for gap in sample.gaps):
                self.add(sample.at_seconds, (), ())

    def whole(self) -> Readings:
        """All samples; a figure is `None` in those that do not have it."""
        length = len(self._times)
        newest = sorted(self._blocks, key=lambda block: -block[0])
        kept = set(islice(dict.fromkeys(name for _, name, _ in newest), MAX_FIGURES))
        figures: dict[str, Values] = {}
        for start, name, column in self._blocks:
            if name in kept:
                figures.setdefault(name, [None] * length)[start : start + len(column)] = column
        return Readings(times=tuple(self._times), figures=figures, breaks=pauses(self._times))


def devices(timeline: Timeline) -> tuple[tuple[Device, ...], Readings]:
    """The GPUs that were observed, as their memory was first read, and the used bytes of each by its UUID."""
    rows = _Rows()
    first: dict[str, Device] = {}
    known: set[str] = set()
    for sample in rows.read(timeline, "nvml"):
        found = without_mig_parents(sample.devices or ())
        names = tuple([device.uuid for device in found])
        memories = [device.memory for device in found]
        rows.add(sample.at_seconds, names, [None if one is None else one.used_bytes for one in memories])
        if not known.issuperset(names):
            first |= {device.uuid: device for device in found if device.uuid not in known}
            known |= {device.uuid for device in found if device.memory is not None}
    readings = rows.whole()
    listed = sorted(first.values(), key=lambda device: (device.index, device.uuid))
    return tuple(device for device in listed if device.uuid in readings.figures), readings


def allocators(timeline: Timeline, facts: Facts) -> Readings:
    """Torch's bytes on a device, of all the server's processes: `reserved UUID`, `allocated UUID`, as CUDA has it."""
    rows = _Rows()
    for sample in rows.read(timeline, "torch_allocator"):
        sums: dict[str, int] = {}
        for one in sample.allocators or ():
            if one.may_be_of(facts.server_pids):
                uuid = one.device_uuid.lower()
                for name, size in (("reserved", one.reserved_bytes), ("allocated", one.allocated_bytes)):
                    sums[f"{name} {uuid}"] = sums.get(f"{name} {uuid}", 0) + size
        rows.add(sample.at_seconds, tuple(sums), sums.values())
    return rows.whole()


def failures(timeline: Timeline) -> tuple[float, ...]:
    """When allocations of torch failed, as the agents report them, each once."""
    found: dict[tuple[int, int], float] = {}
    for sample in timeline.samples:
        for one in sample.allocators or ():
            if one.failure is not None:
                at_seconds = sample.at_seconds - one.failure.age_seconds
                found.setdefault((one.pid, round(at_seconds / 10.0)), at_seconds)
    return tuple(sorted(found.values()))


HELD = "held"
"""The blocks in use, of all engines together."""

IDLE, IDLE_USAGE = "idle held", "idle usage "
"""The same, and each engine's usage, when it was last idle: what stays in use shows apart from what is released. Gauges
that move only when a request ends never show an idle pool.
"""


def engines(timeline: Timeline, facts: Facts) -> Readings:
    """Blocks in use, by engine and in total; running and waiting requests; preemptions since the start."""
    rows = _Rows()
    pools = {pool.engine: pool for pool in facts.pools}
    known: tuple[str, ...] = ()
    names: tuple[str, ...] = (HELD, IDLE, "running", "waiting", "preempted")
    floors: dict[str, float | None] = {}
    for sample in rows.read(timeline, "engine"):
        labels = tuple([engine.engine for engine in sample.engines or ()])
        if labels != known:
            each = [name for label in labels for name in (f"usage {label}", f"{HELD} {label}", f"{IDLE_USAGE}{label}")]
            known, names = labels, (*names[:5], *each)
        held = held_blocks(sample, facts)
        if sample.engines_idle and not facts.capabilities.on_completion:
            floors[IDLE] = held
        values: list[float | None] = [
            held,
            floors.get(IDLE),
            sample.total("requests_running"),
            sample.total("requests_waiting"),
            sample.total("preemptions_total"),
        ]
        for engine in sample.engines or ():
            pool, usage = pools.get(engine.engine), engine.kv_usage_ratio
            if engine.idle and not facts.capabilities.on_completion:
                floors[engine.engine] = usage
            values += (usage, None if pool is None or usage is None else pool.used_blocks(usage))
            values.append(floors.get(engine.engine))
        rows.add(sample.at_seconds, names, values)
    return rows.whole()


def host(timeline: Timeline) -> Readings:
    """Anonymous memory of each of the server's processes; resident memory if only that is reported."""
    rows = _Rows()
    for sample in rows.read(timeline, "host"):
        names = tuple([one.who for one in sample.host or ()])
        sizes = [(one.resident_bytes, one.anonymous_bytes) for one in sample.host or ()]
        rows.add(sample.at_seconds, names, [held if own is None else own for held, own in sizes])
    return rows.whole()
