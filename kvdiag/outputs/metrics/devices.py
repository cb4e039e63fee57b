"""The metrics of devices, the ledger, torch's allocators, host memory and processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from kvdiag.ledger import ledger
from kvdiag.model import Allocator, Device, HostProcess, Process, Sample, Snapshot
from kvdiag.outputs.metrics.families import GPU, MAX_PROCESSES, Row, bounded, counter, gauge, gpu_labels
from kvdiag.pressure import pressures

RANKED = (*GPU, "process", "rank")


def device_families(newest: Sample) -> Iterator[Metric]:
    """NVML's figures of each device and of the processes on it."""
    devices = bounded(newest.devices)
    named = [((*gpu_labels(device), device.name), 1.0) for device in devices]
    yield gauge("kvdiag_gpu_info", "Name of the device; always 1.", (*GPU, "name"), named)
    for name, text in (
        ("total", "Total memory of the device."),
        ("used", "Used memory (total - free), including the driver's reservation."),
        ("free", "Free memory of the device."),
        ("driver_reserved", "Memory reserved by the driver."),
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
    known = [process for process in device.processes or () if process.used_bytes is not None]
    return sorted(known, key=lambda one: -(one.used_bytes or 0))[:MAX_PROCESSES]


def ledger_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Each device's used bytes by component, and memory pressure."""
    lines = ledger(snapshot.newest, snapshot.facts)
    sums: dict[tuple[str, str, str], int] = {}
    for line in lines:
        key = ("" if line.gpu is None else str(line.gpu), line.uuid or "", line.component)
        sums[key] = sums.get(key, 0) + line.bytes
    text = "Used bytes of the device by component; `unaccounted` is the unexplained rest."
    parts = [(key, float(size)) for key, size in sums.items()]
    yield gauge("kvdiag_memory_component_bytes", text, (*GPU, "component"), parts)
    indices = {device.uuid: str(device.index) for device in snapshot.newest.devices or ()}
    rows = [
        ((indices.get(uuid or "", ""), uuid or ""), ratio)
        for uuid, ratio in pressures(snapshot.newest, snapshot.facts, lines).items()
    ]
    text = "Memory pressure: the higher of the KV pool's usage and the device's usage without reusable bytes."
    yield gauge("kvdiag_memory_pressure_ratio", text, GPU, rows)
    thresholds = snapshot.pressure_thresholds
    text = "Memory pressure above which a warning or a critical alert fires, as configured."
    rows_by_severity = (
        []
        if thresholds is None
        else [(("warning",), thresholds.warning_ratio), (("critical",), thresholds.critical_ratio)]
    )
    yield gauge("kvdiag_memory_pressure_threshold_ratio", text, ("severity",), rows_by_severity)


def torch_families(newest: Sample) -> Iterator[Metric]:
    """The agents' figures of torch's allocators, and of the last allocation that failed in each."""
    allocators = [(_ranked(each, newest.devices), each) for each in bounded(newest.allocators)]
    for name, text in (
        ("allocated", "Bytes allocated by torch: live tensors."),
        ("reserved", "Bytes that torch's allocator has reserved from the driver."),
        ("requested", "Bytes requested from torch's allocator, before rounding."),
        ("inactive_split", "Free bytes in split blocks, as torch counts them."),
    ):
        rows = [(key, float(size)) for key, each in allocators if (size := getattr(each, f"{name}_bytes")) is not None]
        yield gauge(f"kvdiag_torch_{name}_bytes", text, RANKED, rows)
    for name, text in (
        ("releasable", "Reserved bytes that torch can return to the driver."),
        ("stranded", "Free bytes between live blocks, usable only by allocations that fit."),
    ):
        rows = [(key, float(getattr(one.split, f"{name}_bytes"))) for key, one in allocators if one.split is not None]
        yield gauge(f"kvdiag_torch_{name}_bytes", text, RANKED, rows)
    for name, text in (
        ("alloc_retries", "Allocations for which torch flushed its cache."),
        ("ooms", "Allocations that failed because the GPU was out of memory."),
    ):
        rows = [(key, float(count)) for key, one in allocators if (count := getattr(one, f"{name}_total")) is not None]
        yield counter(f"kvdiag_torch_{name}", text, RANKED, rows)
    yield from _failures(allocators, newest.at_seconds)


def _failures(allocators: list[tuple[tuple[str, ...], Allocator]], at_seconds: float) -> Iterator[Metric]:
    failed = [(key, one.failure) for key, one in allocators if one.failure is not None]
    for name, text, rows in (
        (
            "timestamp_seconds",
            "Time of the process's last failed allocation, since the epoch.",
            [(key, at_seconds - failure.age_seconds) for key, failure in failed],
        ),
        (
            "asked_bytes",
            "Size of the last failed allocation.",
            [(key, float(failure.asked_bytes)) for key, failure in failed],
        ),
        (
            "free_bytes",
            "Free memory of the device when the last allocation failed.",
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
        ("anonymous", "Anonymous host memory of the server's process, without file-backed pages."),
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
    """The rank of each process that other series name by the label `process`."""
    allocators = bounded(newest.allocators)
    ranks = {one.pid: one for one in allocators if one.pid_seen}
    named: list[tuple[str, int, Allocator | None]] = [(one.who, one.pid, one) for one in allocators]
    for device in bounded(newest.devices):
        named += [(one.who, one.pid, ranks.get(one.pid)) for one in _largest(device)]
    named += [(_of_host(one), one.pid, ranks.get(one.pid)) for one in _resident(newest)]
    yield gauge(
        "kvdiag_process_info",
        "Process id and ranks of each `process` label, as far as they are reported; always 1.",
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
