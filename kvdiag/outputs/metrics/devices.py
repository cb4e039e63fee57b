"""The metrics of devices, the ledger, torch's allocators, host memory and processes."""

from collections.abc import Iterator

from kvdiag.ledger import ledger
from kvdiag.model import Allocator, Device, HostProcess, Process, Sample, Snapshot
from kvdiag.outputs.metrics.families import MAX_PROCESSES, Figures, Labels, Row, bounded, gpu_labels
from kvdiag.pressure import pressures


def device_figures(newest: Sample) -> Figures:
    """NVML's figures of each device and of the processes on it; host memory and ranks of the processes by name."""
    devices = bounded(newest.devices)
    return {
        "gpu_info": [((*gpu_labels(device), device.name), 1.0) for device in devices],
        "device memory": [(gpu_labels(device), device.memory) for device in devices],
        "device process": [((*gpu_labels(device), one.who), one) for device in devices for one in _largest(device)],
        "host process": [((process.who,), process) for process in _resident(newest)],
        "process_info": _process_rows(newest),
    }


def _largest(device: Device) -> list[Process]:
    known = [process for process in device.processes or () if process.used_bytes is not None]
    return sorted(known, key=lambda one: -(one.used_bytes or 0))[:MAX_PROCESSES]


def ledger_figures(snapshot: Snapshot) -> Figures:
    """Each device's used bytes by component, and memory pressure."""
    lines = ledger(snapshot.newest, snapshot.facts)
    sums: dict[Labels, float] = {}
    for line in lines:
        key = ("" if line.gpu is None else str(line.gpu), line.uuid or "", line.component)
        sums[key] = sums.get(key, 0.0) + line.bytes
    indices = {device.uuid: str(device.index) for device in snapshot.newest.devices or ()}
    ratios = pressures(snapshot.newest, snapshot.facts, lines)
    found = [((indices.get(uuid or "", ""), uuid or ""), ratio) for uuid, ratio in ratios.items()]
    limits = snapshot.pressure_thresholds
    known = () if limits is None else ((("warning",), limits.warning_ratio), (("critical",), limits.critical_ratio))
    return {
        "memory_component_bytes": sums.items(),
        "memory_pressure_ratio": found,
        "memory_pressure_unknown": [(labels, ratio is None) for labels, ratio in found],
        "memory_pressure_threshold_ratio": known,
    }


def torch_figures(newest: Sample) -> Figures:
    """The agents' figures of torch's allocators, and of the last allocation that failed in each."""
    allocators = [(_ranked(each, newest.devices), each) for each in bounded(newest.allocators)]
    failed = [(key, one.failure) for key, one in allocators if one.failure is not None]
    return {
        "allocator": allocators,
        "allocator split": [(key, one.split) for key, one in allocators],
        "failed allocation": failed,
        "oom_timestamp_seconds": [(key, newest.at_seconds - failure.age_seconds) for key, failure in failed],
    }


def _ranked(one: Allocator, devices: tuple[Device, ...] | None) -> Labels:
    device = next((device for device in devices or () if one.is_on(device)), None)
    gpu = ("", f"GPU-{one.device_uuid}") if device is None else gpu_labels(device)
    return (*gpu, one.who, _rank(one.tensor_rank))


def _rank(rank: int | None) -> str:
    return "" if rank is None else str(rank)


def _resident(newest: Sample) -> list[HostProcess]:
    return sorted(newest.host or (), key=lambda process: -process.resident_bytes)[:MAX_PROCESSES]


def _process_rows(newest: Sample) -> Iterator[Row]:
    """The rank of each process that other series name by the label `process`."""
    allocators = bounded(newest.allocators)
    ranks = {one.pid: one for one in allocators if one.pid_seen}
    named: list[tuple[str, int, Allocator | None]] = [(one.who, one.pid, one) for one in allocators]
    for device in bounded(newest.devices):
        named += [(one.who, one.pid, ranks.get(one.pid)) for one in _largest(device)]
    named += [(one.who, one.pid, ranks.get(one.pid)) for one in _resident(newest)]
    listed: set[str] = set()
    for name, pid, one in named:
        if name not in listed:
            listed.add(name)
            own = (None, None, None) if one is None else (one.tensor_rank, one.pipeline_rank, one.data_rank)
            yield (name, str(pid), *map(_rank, own)), 1.0
