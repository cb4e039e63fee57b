"""A Timeline as series to draw: what each source read, and where it did not. Judges nothing. Pure.

A reading that was due and failed is `None`; a part of a sample that was not due on its tick is no reading at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from kvdiag.diagnosis.observe import held_blocks
from kvdiag.model import Device, Engine, Facts, Sample, Timeline, without_mig_parents
from kvdiag.outputs.envelope import Run, pauses, runs

Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Figures of one source by their names, all at the same times."""

    times: tuple[float, ...]
    figures: Mapping[str, Sequence[float | None]]
    breaks: tuple[int, ...]

    def runs(self, name: str) -> tuple[Run, ...]:
        """One figure in the runs in which it was read."""
        return runs(self.times, self.figures[name], self.breaks)

    def latest(self, name: str, at_seconds: float) -> float | None:
        """The newest value that is known at a moment."""
        told = [
            value
            for time, value in zip(self.times, self.figures[name], strict=True)
            if value is not None and time <= at_seconds
        ]
        return told[-1] if told else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device as it was first seen; `total_bytes` is the newest that was told."""

    uuid: str
    index: int
    name: str
    total_bytes: int | None


@dataclass(slots=True, kw_only=True)
class _Columns:
    """Readings while they are collected: a figure that begins later, or is not told, is `None`."""

    times: list[float] = field(default_factory=list)
    figures: dict[str, Values] = field(default_factory=dict)

    def add(self, at_seconds: float, told: Iterable[tuple[str, float | None]]) -> None:
        length = len(self.times)
        self.times.append(at_seconds)
        for name, value in told:
            values = self.figures.setdefault(name, [])
            if len(values) > length:  # told twice: the first counts
                continue
            if len(values) < length:
                values.extend(repeat(None, length - len(values)))
            values.append(value)

    def whole(self) -> Readings:
        length = len(self.times)
        for values in self.figures.values():
            values.extend(repeat(None, length - len(values)))
        return Readings(times=tuple(self.times), figures=self.figures, breaks=pauses(self.times))


def devices(timeline: Timeline) -> tuple[tuple[Gpu, ...], Readings]:
    """The GPUs that were seen, and the used bytes of each by its UUID."""
    columns = _Columns()
    first: dict[str, Device] = {}
    totals: dict[str, int] = {}
    for sample in timeline.samples:
        if sample.devices is None:
            if _failed(sample, "nvml"):
                columns.add(sample.at_seconds, ())
            continue
        told: list[tuple[str, float | None]] = []
        for device in without_mig_parents(sample.devices):
            memory = device.memory
            if device.uuid not in first:
                first[device.uuid] = device
            if memory is not None:
                totals[device.uuid] = memory.total_bytes
            told.append((device.uuid, None if memory is None else memory.used_bytes))
        columns.add(sample.at_seconds, told)
    gpus = [
        Gpu(uuid=uuid, index=device.index, name=device.name, total_bytes=totals.get(uuid))
        for uuid, device in first.items()
    ]
    return tuple(sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))), columns.whole()


def allocators(timeline: Timeline, facts: Facts) -> tuple[Readings, Readings]:
    """What torch has reserved, and what lives in it, of all the server's processes on a device by CUDA's UUID."""
    reserved, allocated = _Columns(), _Columns()
    for sample in timeline.samples:
        if sample.allocators is None:
            if _failed(sample, "torch_allocator"):
                reserved.add(sample.at_seconds, ())
                allocated.add(sample.at_seconds, ())
            continue
        held: dict[str, int] = {}
        live: dict[str, int] = {}
        for one in sample.allocators:
            if one.may_be_of(facts.server_pids):
                uuid = one.device_uuid.lower()
                held[uuid] = held.get(uuid, 0) + one.reserved_bytes
                live[uuid] = live.get(uuid, 0) + one.allocated_bytes
        reserved.add(sample.at_seconds, held.items())
        allocated.add(sample.at_seconds, live.items())
    return reserved.whole(), allocated.whole()


def failures(timeline: Timeline) -> tuple[float, ...]:
    """When an allocation of torch's failed, as the agents tell it, each once."""
    found: dict[tuple[int, int], float] = {}
    for sample in timeline.samples:
        for one in sample.allocators or ():
            if one.failure is not None:
                at_seconds = sample.at_seconds - one.failure.age_seconds
                found.setdefault((one.pid, round(at_seconds / 10.0)), at_seconds)
    return tuple(sorted(found.values()))


HELD = "held"
"""The blocks that requests hold in all engines together."""


def engines(timeline: Timeline, facts: Facts) -> Readings:
    """Blocks held, by engine and all together; requests running and waiting; what was preempted since the start."""
    columns = _Columns()
    for sample in timeline.samples:
        if sample.engines is None:
            if _failed(sample, "vllm"):
                columns.add(sample.at_seconds, ())
            continue
        told: list[tuple[str, float | None]] = [
            (HELD, held_blocks(sample, facts)),
            ("running", _sum(sample, lambda engine: engine.requests_running)),
            ("waiting", _sum(sample, lambda engine: engine.requests_waiting)),
            ("preempted", _sum(sample, lambda engine: engine.preemptions_total)),
        ]
        for engine in sample.engines:
            pool, usage = facts.pool(engine.engine), engine.kv_usage_ratio
            told.append((f"usage {engine.engine}", usage))
            told.append((f"held {engine.engine}", None if pool is None or usage is None else pool.used_blocks(usage)))
        columns.add(sample.at_seconds, told)
    return columns.whole()


def host(timeline: Timeline) -> Readings:
    """Anonymous memory of each of the server's processes (all that is resident, where only that is told)."""
    columns = _Columns()
    for sample in timeline.samples:
        if sample.host is None:
            if _failed(sample, "host"):
                columns.add(sample.at_seconds, ())
            continue
        columns.add(
            sample.at_seconds,
            (
                (f"{one.name} {one.pid}", one.resident_bytes if one.anonymous_bytes is None else one.anonymous_bytes)
                for one in sample.host
            ),
        )
    return columns.whole()


def _sum(sample: Sample, figure: Callable[[Engine], int | None]) -> int | None:
    told = [figure(engine) for engine in sample.engines or ()]
    return None if None in told or not told else sum(value or 0 for value in told)


def _failed(sample: Sample, source: str) -> bool:
    return any(gap.source == source and gap.kind == "failed" for gap in sample.gaps)
