"""The page's families of devices, the ledger, torch's allocators, host memory, and whose process is whose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from kvdiag.ledger import ledger
from kvdiag.model import Allocator, Device, HostProcess, Process, Sample, Snapshot
from kvdiag.outputs.metrics.families import GPU, MAX_PROCESSES, Row, bounded, counter, gauge, gpu_labels
from kvdiag.pressure import pressures

RANKED = (*GPU, "process", "rank")


def device_families(newest: Sample) -> Iterator[Metric]:
    """What NVML tells of each device and of the processes on it."""
    devices = bounded(newest.devices)
    named = [((*gpu_labels(device), device.name), 1.0) for device in devices]
    yield gauge("kvdiag_gpu_info", "Name of the device; always 1.", (*GPU, "name"), named)
    for name, text in (
        ("total", "Memory of the device."),
        ("used", "Memory that nobody else can have: total - free, the driver's reservation among it."),
        ("free", "Free memory of the device."),
        ("driver_reserved", "Memory that the driver keeps for itself."),
    ):
        rows = [
            (gpu_labels(device), float(value))
            for device in devices
            if device.memory is not None and (value := getattr(device.memory, f"{name}_bytes")) is not None
        ]
        yield gauge(f"kvdiag_gpu_memory_{name}_bytes", text, GPU, rows)
    processes = [
        ((*gpu_labels(device), process.who), float(process.used_bytes or 0))
        for device in devices
        for process in _largest(device)
    ]
    text = "Memory of a process on the device, as NVML lists it."
    yield gauge("kvdiag_gpu_process_memory_bytes", text, (*GPU, "process"), processes)


def _largest(device: Device) -> list[Process]:
    told = [process for process in device.processes or () if process.used_bytes is not None]
    return sorted(told, key=lambda one: -(one.used_bytes or 0))[:MAX_PROCESSES]


def ledger_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Where every byte of each device is, and how full it really is."""
    lines = ledger(snapshot.newest, snapshot.facts)
    sums: dict[tuple[str, str, str], int] = {}
    for line in lines:
        key = ("" if line.gpu is None else str(line.gpu), line.uuid or "", line.component)
        sums[key] = sums.get(key, 0) + line.bytes
    text = "Parts that add up to the device's used bytes; `unaccounted` is what nothing explains."
    parts = [(key, float(size)) for key, size in sums.items()]
    yield gauge("kvdiag_memory_component_bytes", text, (*GPU, "component"), parts)
    indices = {device.uuid: str(device.index) for device in snapshot.newest.devices or ()}
    rows = [
        ((indices.get(uuid or "", ""), uuid or ""), ratio)
        for uuid, ratio in pressures(snapshot.newest, snapshot.facts, lines).items()
    ]
    text = (
        "How full it really is: the KV pool's usage, or the device without what can be used again, whichever is more."
    )
    yield gauge("kvdiag_memory_pressure_ratio", text, GPU, rows)
    thresholds = snapshot.pressure_thresholds
    text = "Memory pressure above which a person is to be warned, or called, as kvdiag was told."
    told = (
        []
        if thresholds is None
        else [(("warning",), thresholds.warning_ratio), (("critical",), thresholds.critical_ratio)]
    )
    yield gauge("kvdiag_memory_pressure_threshold_ratio", text, ("severity",), told)


def torch_families(newest: Sample) -> Iterator[Metric]:
    """What the agents tell of torch's allocators, and of the newest allocation that each failed to make."""
    allocators = [(_ranked(each, newest.devices), each) for each in bounded(newest.allocators)]
    for name, text in (
        ("allocated", "Bytes that live in torch's allocator."),
        ("reserved", "Bytes that torch's allocator has taken from the driver."),
        ("requested", "Bytes that were asked for, without the allocator's rounding."),
        ("inactive_split", "Free bytes beside others in use, as torch counts them."),
    ):
        rows = [(key, float(size)) for key, each in allocators if (size := getattr(each, f"{name}_bytes")) is not None]
        yield gauge(f"kvdiag_torch_{name}_bytes", text, RANKED, rows)
    for name, text in (
        ("releasable", "Reserved bytes that the driver could have back."),
        ("stranded", "Free bytes beside live blocks, that only a request which fits can use."),
    ):
        rows = [(key, float(getattr(one.split, f"{name}_bytes"))) for key, one in allocators if one.split is not None]
        yield gauge(f"kvdiag_torch_{name}_bytes", text, RANKED, rows)
    for name, text in (
        ("alloc_retries", "Allocations that torch had to flush its cache for."),
        ("ooms", "Allocations that failed for want of memory."),
    ):
        rows = [(key, float(count)) for key, one in allocators if (count := getattr(one, f"{name}_total")) is not None]
        yield counter(f"kvdiag_torch_{name}", text, RANKED, rows)
    yield from _failures(allocators, newest.at_seconds)


def _failures(allocators: list[tuple[tuple[str, ...], Allocator]], at_seconds: float) -> Iterator[Metric]:
    failed = [(key, one.failure) for key, one in allocators if one.failure is not None]
    for name, text, rows in (
        (
            "timestamp_seconds",
            "When the process last failed to get memory, since the epoch.",
            [(key, at_seconds - failure.age_seconds) for key, failure in failed],
        ),
        (
            "asked_bytes",
            "What the allocation that failed last had asked for.",
            [(key, float(failure.asked_bytes)) for key, failure in failed],
        ),
        (
            "free_bytes",
            "What was free on the device when it failed.",
            [(key, float(failure.free_bytes)) for key, failure in failed],
        ),
    ):
        yield gauge(f"kvdiag_oom_{name}", text, RANKED, rows)


def _ranked(one: Allocator, devices: tuple[Device, ...] | None) -> tuple[str, ...]:
    device = next((device for device in devices or () if one.is_on(device)), None)
    gpu = ("", f"GPU-{one.device_uuid}") if device is None else gpu_labels(device)
    return (*gpu, one.who, _rank(one.tensor_rank))


def _rank(rank: int | None) -> str:
    return "" if rank is None else str(rank)


def host_families(newest: Sample) -> Iterator[Metric]:
    """Host memory of the server's processes."""
    processes = _resident(newest)
    for name, text in (
        ("resident", "Resident host memory of the server's process."),
        ("anonymous", "The process's own host memory, without file-backed pages."),
    ):
        rows = [
            ((_of_host(process),), float(size))
            for process in processes
            if (size := getattr(process, f"{name}_bytes")) is not None
        ]
        yield gauge(f"kvdiag_host_{name}_bytes", text, ("process",), rows)


def _resident(newest: Sample) -> list[HostProcess]:
    return sorted(newest.host or (), key=lambda process: -process.resident_bytes)[:MAX_PROCESSES]


def _of_host(process: HostProcess) -> str:
    return f"{process.name} {process.pid}"


def process_families(newest: Sample) -> Iterator[Metric]:
    """Which rank each process is that another series names by its label `process`."""
    allocators = bounded(newest.allocators)
    ranks = {one.pid: one for one in allocators if one.pid_seen}
    named: list[tuple[str, int, Allocator | None]] = [(one.who, one.pid, one) for one in allocators]
    for device in bounded(newest.devices):
        named += [(one.who, one.pid, ranks.get(one.pid)) for one in _largest(device)]
    named += [(_of_host(one), one.pid, ranks.get(one.pid)) for one in _resident(newest)]
    yield gauge(
        "kvdiag_process_info",
        "Process id and ranks of what other series name by `process`, where they are told; always 1.",
        ("process", "pid", "rank", "pipeline_rank", "data_rank"),
        _process_rows(named),
    )


def _process_rows(named: Iterable[tuple[str, int, Allocator | None]]) -> Iterator[Row]:
    seen: set[str] = set()
    for name, pid, one in named:
        if name not in seen:
            seen.add(name)
            ranks = ("", "", "") if one is None else (one.tensor_rank, one.pipeline_rank, one.data_rank)
            yield (name, str(pid), *("" if rank is None else str(rank) for rank in ranks)), 1.0
