"""The memory audit: one sample and the facts → lines that add up to each device's used bytes, with explicit residuals.

Each line says whether it was measured (NVML), reported (by the engine) or computed. What no line explains is a line of
its own: `server_other` inside the server's processes, `unaccounted` outside every process.
"""

from __future__ import annotations

from kvdiag.kv.served import block_bytes, pool_bytes
from kvdiag.model import Device, Facts, LedgerLine, Process, Provenance, Sample, without_mig_parents

_ORIGINS: dict[Provenance, str] = {
    "reported": "the engine's kv_cache_memory_bytes",
    "computed": "its blocks, each as large as the model's config makes it",
}


def ledger(sample: Sample | None, facts: Facts) -> tuple[LedgerLine, ...]:
    """The lines of every device in a sample; without a device, what the engine alone tells of its pool (`gpu` None)."""
    seen = without_mig_parents((sample.devices if sample is not None else None) or ())
    devices = [device for device in seen if device.memory is not None]
    if not devices:
        return _engine_only(sample, facts)
    ranks = [device for device in devices if _shows_server(device, facts)]
    if not ranks and len(devices) == 1:
        ranks = devices  # containers often see host pids, or none: a lone device is taken to be the server's
    lines: list[LedgerLine] = []
    for device in devices:
        lines += _device_lines(device, facts, ranks=len(ranks) if device in ranks else 0)
    return tuple(lines)


def _shows_server(device: Device, facts: Facts) -> bool:
    return any(process.pid in (facts.server_pids or ()) for process in device.processes or ())


def _device_lines(device: Device, facts: Facts, *, ranks: int) -> list[LedgerLine]:
    memory = device.memory
    if memory is None:
        return []
    lines: list[LedgerLine] = []
    if memory.driver_reserved_bytes is not None:
        lines.append(_line(device, "driver_reserved", memory.driver_reserved_bytes, "measured"))
    processes = [process for process in device.processes or () if process.used_bytes is not None]
    shown = _shows_server(device, facts)
    own = [process for process in processes if _is_own(process, device, facts, ranks=ranks)]
    if own:
        lines += _server_lines(device, own, facts, ranks)
    elif ranks and (shown or not processes):
        lines += _parts(device, facts, ranks)
    # Where the server is one of several processes and it cannot be told which, none is called another's.
    component = "process" if ranks and not shown else "other_process"
    lines += [
        _line(device, component, process.used_bytes or 0, "measured", f"{process.name or 'process'} {process.pid}")
        for process in processes
        if process not in own
    ]
    rest = memory.used_bytes - sum(line.bytes for line in lines)
    detail = "no process that NVML lists" if own else "the server's own memory is not told apart"
    return [*lines, _line(device, "unaccounted", rest, "computed", detail)]


def _is_own(process: Process, device: Device, facts: Facts, *, ranks: int) -> bool:
    if _shows_server(device, facts):
        return process.pid in (facts.server_pids or ())
    # Containers often see host pids: a lone process on the server's device is taken to be the server.
    return ranks > 0 and len(device.processes or ()) == 1


def _server_lines(device: Device, own: list[Process], facts: Facts, ranks: int) -> list[LedgerLine]:
    parts = _parts(device, facts, ranks)
    held = sum(process.used_bytes or 0 for process in own)
    pids = ", ".join(str(process.pid) for process in own)
    rest = held - sum(line.bytes for line in parts)
    detail = f"context, activations, graphs, allocator cache of pid {pids}" if parts else f"all of pid {pids}"
    return [*parts, _line(device, "server_other", rest, "computed", detail)]


def _parts(device: Device, facts: Facts, ranks: int) -> list[LedgerLine]:
    """Pool and weights of one rank, as far as they are told."""
    lines = []
    engines = max(len(facts.pools), 1)
    size = pool_bytes(facts, facts.pools[0]) if facts.pools else None
    if size is not None:
        lines.append(_line(device, "kv_pool", *size, _ORIGINS[size[1]]))
    if facts.weights_bytes is not None:
        per_engine = max(ranks // engines, 1)
        lines.append(_line(device, "weights", facts.weights_bytes // per_engine, "computed", "size of the checkpoint"))
    return lines


def _engine_only(sample: Sample | None, facts: Facts) -> tuple[LedgerLine, ...]:
    """The pool by what the engine tells: held by requests, and free (cached prefixes count as free)."""
    lines: list[LedgerLine] = []
    usage = {engine.engine: engine.kv_usage_ratio for engine in (sample.engines if sample is not None else None) or ()}
    for pool in facts.pools:
        size, whole, ratio = block_bytes(facts, pool), pool_bytes(facts, pool), usage.get(pool.engine)
        if whole is None or size is None or ratio is None:
            continue
        held, source, detail = pool.used_blocks(ratio) * size[0], whole[1], f"engine {pool.engine}"
        lines.append(LedgerLine(gpu=None, component="kv_held", bytes=held, source=source, detail=detail))
        free = whole[0] - held
        lines.append(LedgerLine(gpu=None, component="kv_free", bytes=free, source=source, detail=detail))
    return tuple(lines)


def _line(device: Device, component: str, size: int, source: Provenance, detail: str = "") -> LedgerLine:
    return LedgerLine(gpu=device.index, uuid=device.uuid, component=component, bytes=size, source=source, detail=detail)
