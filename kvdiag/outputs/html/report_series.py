"""A Timeline as series to draw: what each source read, and when it failed. Judges nothing. Pure.

A reading that was due and failed is `None`; a part of a sample that was not due on its tick is no reading at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.model import Device, Facts, Sample, Timeline, without_mig_parents
from kvdiag.outputs.html.downsample import Run, pauses, runs

Values = list[float | None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device as first observed; `total_bytes` is `None` if it was never reported."""

    uuid: str
    who: str
    name: str
    total_bytes: int | None


class _Rows:
    """Readings while they are collected: a million of them for a day of eight GPUs.

    Readings in a row of the same figures are kept together, in one list for each figure.
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
            self._appends = [column.append for column in columns]
        for append, value in zip(self._appends, values, strict=True):
            append(value)
        self._times.append(at_seconds)

    def add_failure(self, sample: Sample, source: str) -> None:
        """A reading without figures, if the source was due in this sample and failed."""
        if any(gap.source == source and gap.kind == "failed" for gap in sample.gaps):
            self.add(sample.at_seconds, (), ())

    def whole(self) -> Readings:
        """All readings; a figure is `None` in those that do not have it."""
        length = len(self._times)
        figures: dict[str, Values] = {}
        for start, name, column in self._blocks:
            figures.setdefault(name, [None] * length)[start : start + len(column)] = column
        return Readings(times=tuple(self._times), figures=figures, breaks=pauses(self._times))


def devices(timeline: Timeline) -> tuple[tuple[Gpu, ...], Readings]:
    """The GPUs that were observed, and the used bytes of each by its UUID."""
    rows = _Rows()
    first: dict[str, Device] = {}
    totals: dict[str, int] = {}
    for sample in timeline.samples:
        if sample.devices is None:
            rows.add_failure(sample, "nvml")
            continue
        found = without_mig_parents(sample.devices) if sample.devices else ()
        names = tuple([device.uuid for device in found])
        memories = [device.memory for device in found]
        rows.add(sample.at_seconds, names, [None if one is None else one.used_bytes for one in memories])
        if not first.keys() >= set(names):
            first = {device.uuid: device for device in found} | first
        if not totals.keys() >= set(names):
            totals |= {name: one.total_bytes for name, one in zip(names, memories, strict=True) if one is not None}
    gpus = [
        Gpu(uuid=device.uuid, who=device.who, name=device.name, total_bytes=totals.get(device.uuid))
        for device in sorted(first.values(), key=lambda device: (device.index, device.uuid))
    ]
    return tuple(gpus), rows.whole()


def allocators(timeline: Timeline, facts: Facts) -> Readings:
    """Torch's bytes on a device, of all the server's processes: `reserved UUID`, `allocated UUID`, as CUDA has it."""
    rows = _Rows()
    for sample in timeline.samples:
        if sample.allocators is None:
            rows.add_failure(sample, "torch_allocator")
            continue
        sums: dict[str, int] = {}
        for one in sample.allocators:
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


def engines(timeline: Timeline, facts: Facts) -> Readings:
    """Blocks in use, by engine and in total; running and waiting requests; preemptions since the start."""
    rows = _Rows()
    pools = {pool.engine: pool for pool in facts.pools}
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for sample in timeline.samples:
        if sample.engines is None:
            rows.add_failure(sample, "engine")
            continue
        labels = tuple([engine.engine for engine in sample.engines])
        if labels not in known:
            each = [f"{figure} {label}" for label in labels for figure in ("usage", HELD)]
            known[labels] = (HELD, "running", "waiting", "preempted", *each)
        values: list[float | None] = [
            held_blocks(sample, facts),
            _sum([engine.requests_running for engine in sample.engines]),
            _sum([engine.requests_waiting for engine in sample.engines]),
            _sum([engine.preemptions_total for engine in sample.engines]),
        ]
        for engine in sample.engines:
            pool, usage = pools.get(engine.engine), engine.kv_usage_ratio
            values += (usage, None if pool is None or usage is None else pool.used_blocks(usage))
        rows.add(sample.at_seconds, known[labels], values)
    return rows.whole()


def host(timeline: Timeline) -> Readings:
    """Anonymous memory of each of the server's processes; resident memory if only that is reported."""
    rows = _Rows()
    for sample in timeline.samples:
        if sample.host is None:
            rows.add_failure(sample, "host")
            continue
        names = tuple([f"{one.name} {one.pid}" for one in sample.host])
        sizes = [(one.resident_bytes, one.anonymous_bytes) for one in sample.host]
        rows.add(sample.at_seconds, names, [held if own is None else own for held, own in sizes])
    return rows.whole()


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [one for one in counts if one is not None]
    return sum(known) if counts and len(known) == len(counts) else None
