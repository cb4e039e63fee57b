"""The exporter's page: one custom collector over the newest snapshot. Nothing here is ever set: what is gone is gone.

Names and labels are a contract with the rules and dashboards. Texts from outside are cut, cleaned and bounded in
number; vLLM's own series are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import kvdiag
from kvdiag.kv.served import block_bytes, pool_bytes
from kvdiag.ledger import ledger
from kvdiag.model import Allocator, Device, Diagnosis, Facts, Sample, Snapshot, Status
from kvdiag.pressure import pressures

MAX_LABEL_CHARACTERS = 128
MAX_PROCESSES = 64
"""Of one device, and of the server on the host: the largest."""

MAX_SERIES = 512
"""Of engines, devices and allocators each: more than any one server has."""

STATUSES: tuple[Status, ...] = ("ok", "suspect", "fault", "unknown")
_BADNESS: Mapping[Status, int] = {"ok": 0, "unknown": 1, "suspect": 2, "fault": 3}

T = TypeVar("T")
Row = tuple[tuple[str, ...], float]


class SnapshotCollector(Collector):
    """Turns the newest snapshot into metric families, each time it is asked."""

    def __init__(self, newest: Callable[[], Snapshot], names: Collection[str]) -> None:
        """Ask `newest` at each scrape, which must answer at once."""
        self._newest = newest
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """The families of the page; those that have series of these names, where any are asked for."""
        for family in families(self._newest()):
            if self._names:
                family.samples = [sample for sample in family.samples if sample.name in self._names]
            if family.samples or not self._names:
                yield family


def registry(newest: Callable[[], Snapshot], names: Collection[str] = ()) -> CollectorRegistry:
    """A registry of this collector alone, which is not asked when it is made; of some series, where they are named."""
    made = CollectorRegistry(auto_describe=False)
    made.register(SnapshotCollector(newest, names))
    return made


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Every family of a snapshot; series of what was not seen are left out."""
    yield _gauge("kvdiag_build_info", "Version of kvdiag.", ("version",), [((kvdiag.__version__,), 1.0)])
    yield from _device_families(snapshot.newest)
    yield from _ledger_families(snapshot)
    yield from _torch_families(snapshot.newest)
    yield from _engine_families(snapshot.newest, snapshot.facts)
    yield from _host_families(snapshot.newest)
    yield from _diagnosis_families(snapshot.diagnosis, snapshot.diagnosed_seconds)
    yield from _source_families(snapshot)


def label(text: object) -> str:
    """A label's value: printable, and bounded in length."""
    shown = str(text)[:MAX_LABEL_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in shown)


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in _distinct(rows):
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in _distinct(rows):
        family.add_metric(values, value)
    return family


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Each set of labels once: what is cut may be the same, and a page that repeats a series is refused whole."""
    seen: set[tuple[str, ...]] = set()
    for values, value in islice(rows, MAX_SERIES * MAX_PROCESSES):
        cleaned = tuple(label(each) for each in values)
        if cleaned not in seen:
            seen.add(cleaned)
            yield cleaned, value


def _first(values: Iterable[T] | None) -> list[T]:
    return list(islice(values or (), MAX_SERIES))


GPU = ("gpu", "uuid")


def _device_families(newest: Sample) -> Iterator[Metric]:
    devices = _first(newest.devices)
    for name, text in (
        ("total", "Memory of the device."),
        ("used", "Memory that nobody else can have: total - free, the driver's reservation among it."),
        ("free", "Free memory of the device."),
        ("driver_reserved", "Memory that the driver keeps for itself."),
    ):
        rows = [
            (_gpu(device), float(value))
            for device in devices
            if device.memory is not None and (value := getattr(device.memory, f"{name}_bytes")) is not None
        ]
        yield _gauge(f"kvdiag_gpu_memory_{name}_bytes", text, GPU, rows)
    processes = [
        ((*_gpu(device), f"{process.name or 'process'} {process.pid}"), float(process.used_bytes or 0))
        for device in devices
        for process in sorted(device.processes or (), key=lambda one: -(one.used_bytes or 0))[:MAX_PROCESSES]
        if process.used_bytes is not None
    ]
    text = "Memory of a process on the device, as NVML lists it."
    yield _gauge("kvdiag_gpu_process_memory_bytes", text, (*GPU, "process"), processes)


def _gpu(device: Device) -> tuple[str, str]:
    return str(device.index), device.uuid


def _ledger_families(snapshot: Snapshot) -> Iterator[Metric]:
    lines = ledger(snapshot.newest, snapshot.facts)
    sums: dict[tuple[str, str, str], int] = {}
    for line in lines:
        key = ("" if line.gpu is None else str(line.gpu), line.uuid or "", line.component)
        sums[key] = sums.get(key, 0) + line.bytes
    text = "Parts that add up to the device's used bytes; `unaccounted` is what nothing explains."
    parts = [(key, float(size)) for key, size in sums.items()]
    yield _gauge("kvdiag_memory_component_bytes", text, (*GPU, "component"), parts)
    indices = {device.uuid: str(device.index) for device in snapshot.newest.devices or ()}
    rows = [
        ((indices.get(uuid or "", ""), uuid or ""), ratio)
        for uuid, ratio in pressures(snapshot.newest, snapshot.facts, lines).items()
    ]
    text = (
        "How full it really is: the KV pool's usage, or the device without what can be used again, whichever is more."
    )
    yield _gauge("kvdiag_memory_pressure_ratio", text, GPU, rows)


def _torch_families(newest: Sample) -> Iterator[Metric]:
    labels = (*GPU, "process", "rank")
    allocators = [(_allocator(each, newest.devices), each) for each in _first(newest.allocators)]
    for name, text in (
        ("allocated", "Bytes that live in torch's allocator."),
        ("reserved", "Bytes that torch's allocator has taken from the driver."),
        ("requested", "Bytes that were asked for, without the allocator's rounding."),
        ("inactive_split", "Free bytes beside others in use, as torch counts them."),
    ):
        rows = [(key, float(size)) for key, each in allocators if (size := getattr(each, f"{name}_bytes")) is not None]
        yield _gauge(f"kvdiag_torch_{name}_bytes", text, labels, rows)
    for name, text in (
        ("releasable", "Reserved bytes that the driver could have back."),
        ("stranded", "Free bytes beside live blocks, that only a request which fits can use."),
    ):
        rows = [(key, float(getattr(one.split, f"{name}_bytes"))) for key, one in allocators if one.split is not None]
        yield _gauge(f"kvdiag_torch_{name}_bytes", text, labels, rows)
    for name, text in (
        ("alloc_retries", "Allocations that torch had to flush its cache for."),
        ("ooms", "Allocations that failed for want of memory."),
    ):
        rows = [(key, float(count)) for key, one in allocators if (count := getattr(one, f"{name}_total")) is not None]
        yield _counter(f"kvdiag_torch_{name}", text, labels, rows)


def _allocator(one: Allocator, devices: tuple[Device, ...] | None) -> tuple[str, ...]:
    device = next((device for device in devices or () if one.is_on(device)), None)
    gpu = ("", f"GPU-{one.device_uuid}") if device is None else _gpu(device)
    rank = "" if one.tensor_rank is None else str(one.tensor_rank)
    return (*gpu, f"{one.title or 'process'} {one.pid}", rank)


def _engine_families(newest: Sample, facts: Facts) -> Iterator[Metric]:
    labels = ("engine",)
    pools = _first(facts.pools) if newest.engines else []
    sizes = {pool.engine: pool_bytes(facts, pool) for pool in pools}
    blocks = {pool.engine: block_bytes(facts, pool) for pool in pools}
    yield _gauge(
        "kvdiag_kv_pool_bytes",
        "Bytes of the engine's KV pool on one rank.",
        labels,
        [((engine,), float(size[0])) for engine, size in sizes.items() if size is not None],
    )
    engines = _first(newest.engines)
    used = []
    for engine in engines:
        pool, size = facts.pool(engine.engine), blocks.get(engine.engine)
        if pool is not None and size is not None and engine.kv_usage_ratio is not None:
            used.append(((engine.engine,), float(pool.used_blocks(engine.kv_usage_ratio) * size[0])))
    yield _gauge("kvdiag_kv_used_bytes", "Bytes of the pool that requests hold, on one rank.", labels, used)
    for name, field, text in (
        ("kv_usage_ratio", "kv_usage_ratio", "Share of the pool that requests hold, as the engine tells it."),
        ("requests_running", "requests_running", "Requests that run."),
        ("requests_waiting", "requests_waiting", "Requests that wait."),
    ):
        rows = [((one.engine,), float(value)) for one in engines if (value := getattr(one, field)) is not None]
        yield _gauge(f"kvdiag_{name}", text, labels, rows)
    for name, field, text in (
        ("kv_capacity_tokens", "capacity_tokens", "Tokens that the pool holds, as the engine tells it."),
        ("requests_max_concurrency", "max_concurrency", "Requests of the longest context that the pool holds at once."),
    ):
        rows = [((pool.engine,), float(value)) for pool in pools if (value := getattr(pool, field)) is not None]
        yield _gauge(f"kvdiag_{name}", text, labels, rows)
    per_token = []
    for pool in pools:
        size = sizes[pool.engine]
        if size is not None and pool.capacity_tokens:
            per_token.append(((pool.engine,), size[0] / pool.capacity_tokens))
    text = "Bytes of the pool for each token of its capacity, on one rank."
    yield _gauge("kvdiag_kv_bytes_per_token", text, labels, per_token)


def _host_families(newest: Sample) -> Iterator[Metric]:
    processes = sorted(newest.host or (), key=lambda process: -process.resident_bytes)[:MAX_PROCESSES]
    for name, text in (
        ("resident", "Resident host memory of the server's process."),
        ("anonymous", "The process's own host memory, without file-backed pages."),
    ):
        rows = [
            ((f"{process.name} {process.pid}",), float(size))
            for process in processes
            if (size := getattr(process, f"{name}_bytes")) is not None
        ]
        yield _gauge(f"kvdiag_host_{name}_bytes", text, ("process",), rows)


def _diagnosis_families(diagnosis: Diagnosis | None, at_seconds: float | None) -> Iterator[Metric]:
    worst: dict[str, Status] = {}
    left: dict[str, float] = {}
    for finding in diagnosis.findings if diagnosis is not None else ():
        known = worst.get(finding.id)
        if known is None or _BADNESS[finding.status] > _BADNESS[known]:
            worst[finding.id] = finding.status
        for one in finding.evidence:
            if one.name == "time_to_exhaustion" and isinstance(one.value, int | float):
                left[finding.id] = min(left.get(finding.id, one.value), one.value)
    rows = [((verdict, status), float(status == found)) for verdict, found in worst.items() for status in STATUSES]
    yield _gauge("kvdiag_finding", "1 for the status that a verdict has, 0 for the others.", ("id", "status"), rows)
    text = "How long the room lasts at the growth that was found."
    exhaustion = [((verdict,), seconds) for verdict, seconds in left.items()]
    yield _gauge("kvdiag_time_to_exhaustion_seconds", text, ("id",), exhaustion)
    moments = [] if at_seconds is None else [((), at_seconds)]
    yield _gauge("kvdiag_diagnosis_timestamp_seconds", "When the diagnosis was made, since the epoch.", (), moments)


def _source_families(snapshot: Snapshot) -> Iterator[Metric]:
    labels, sources = ("source",), snapshot.sources
    up = [((one.source,), float(one.up)) for one in sources]
    yield _gauge("kvdiag_source_up", "Whether the newest reading of a source succeeded.", labels, up)
    errors = [((one.source,), float(one.errors_total)) for one in sources]
    yield _counter("kvdiag_source_errors", "Readings of a source that failed.", labels, errors)
    took = [((one.source,), one.duration_seconds) for one in sources if one.duration_seconds is not None]
    yield _gauge("kvdiag_sample_duration_seconds", "How long the newest reading of a source took.", labels, took)
    text = "When the newest sample was taken, since the epoch."
    moments = [((), snapshot.newest.at_seconds)] if snapshot.newest.at_seconds else []
    yield _gauge("kvdiag_sample_timestamp_seconds", text, (), moments)
