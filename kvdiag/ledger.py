"""The memory audit: one sample and the facts → lines that add up to each device's used bytes, with explicit residuals.

Each line says whether it was measured (NVML, torch), reported (by the engine) or computed. What no line explains is a
line of its own: `server_other` inside the server's processes, `unaccounted` outside every process. With agents in
the server's processes, these are split further, each level with its own rest:

    server's processes = torch's reserved bytes + outside_torch + server_other
    torch's reserved bytes = weights + KV pool + torch_other + torch_pending + torch_private + torch_releasable
                             + torch_stranded (or torch_unused, where the agent does not report the last three)

Where the bytes of an engine's pool are unknown, torch_other holds the pool too, and is called torch_with_kv_pool.
"""

from dataclasses import replace

from kvdiag.kv.calibration.running_server import block_bytes, pool_bytes
from kvdiag.model import Allocator, Device, Facts, KvPool, LedgerLine, Provenance, Sample, without_mig_parents

_ORIGINS: dict[Provenance, str] = {
    "reported": "the engine's kv_cache_memory_bytes",
    "computed": "blocks times the block size from the model's config",
}

_LARGE = (("kv_pool", "KV pool"), ("weights", "weights"))
"""Components that count in the server's rest where their size is unknown, with their name there."""

_FREE = {
    "pending": "freed by torch, still in use by another CUDA stream",
    "private": "free in pools of CUDA graphs",
    "releasable": "cache that torch can release to the driver",
    "stranded": "free, between live blocks",
}
"""The parts of torch's reserved bytes that hold no tensor, as an agent breaks them down."""


def ledger(sample: Sample | None, facts: Facts) -> tuple[LedgerLine, ...]:
    """The lines of every device in a sample; without a device, the pool as the engine reports it (`gpu` None)."""
    sample = sample or Sample(at_seconds=0.0)
    devices = [device for device in without_mig_parents(sample.devices or ()) if device.memory is not None]
    if not devices:
        return _engine_only(sample, facts)
    ranks = [device for device in devices if facts.own_processes(device)]
    if not ranks and len(devices) == 1:
        ranks = devices  # containers often see host pids, or none: a lone device is taken to be the server's
    lines: list[LedgerLine] = []
    for device in devices:
        lines += _device_lines(device, sample, facts, ranks=len(ranks) if device in ranks else 0)
    return tuple(lines)


def _device_lines(device: Device, sample: Sample, facts: Facts, *, ranks: int) -> list[LedgerLine]:
    memory = device.memory
    if memory is None:
        return []
    lines: list[LedgerLine] = []
    if memory.driver_reserved_bytes is not None:
        lines.append(_line(device, "driver_reserved", memory.driver_reserved_bytes, "measured"))
    processes = [process for process in device.processes or () if process.used_bytes is not None]
    shown = facts.own_processes(device)
    # Containers often see host pids: a lone process on the server's device is taken to be the server.
    alone = not shown and ranks > 0 and len(device.processes or ()) == 1
    own = [process for process in processes if alone or process.pid in (facts.server_pids or ())]
    allocators = _allocators(device, sample, facts)
    sizes = [each.process_bytes for each in allocators if each.process_bytes is not None]
    if own:
        held = sum(process.used_bytes or 0 for process in own)
        pids = ", ".join(str(process.pid) for process in own)
        lines += _server_lines(device, held, pids, allocators, sample, facts, ranks)
    elif ranks and allocators and not processes:
        # In a container whose NVML lists no process, the agents still report their own.
        held = sum(sizes) if len(sizes) == len(allocators) else sum(each.reserved_bytes for each in allocators)
        pids = ", ".join(str(each.pid) for each in allocators)
        lines += _server_lines(device, held, pids, allocators, sample, facts, ranks)
    elif ranks and (shown or not processes):
        lines += _parts(device, facts, ranks)
    # If the server is one of several processes and it is unknown which, none counts as another process.
    component = "process" if ranks and not shown else "other_process"
    for process in processes:
        if process not in own:
            name = f"{process.name or 'process'} (pid {process.pid})"
            lines.append(_line(device, component, process.used_bytes or 0, "measured", name))
    rest = memory.used_bytes - sum(line.bytes for line in lines)
    detail = "no listed process holds it" if own else "NVML does not report the server's memory"
    return [*lines, _line(device, "unaccounted", rest, "computed", detail)]


def _allocators(device: Device, sample: Sample, facts: Facts) -> list[Allocator]:
    """The server's allocators on a device; none where one of them counts bytes that are not on it."""
    found = [each for each in sample.allocators or () if each.is_on(device) and each.may_be_of(facts.server_pids)]
    return [] if any(each.outside_driver for each in found) else found


def _server_lines(
    device: Device, held: int, pids: str, allocators: list[Allocator], sample: Sample, facts: Facts, ranks: int
) -> list[LedgerLine]:
    parts = _parts(device, facts, ranks)
    if not allocators:
        rest = held - sum(line.bytes for line in parts)
        inside = ", ".join((*_unknown(parts), "CUDA context", "activations", "graphs", "allocator cache and all else"))
        detail = f"{inside} of pid {pids}" if parts else f"all memory of pid {pids}"
        return [*parts, _line(device, "server_other", rest, "computed", detail)]
    reserved = sum(each.reserved_bytes for each in allocators)
    unknown = _unknown(parts) if facts.engine_name else []
    lines = _torch_lines(device, allocators, _pool_apart(parts, sample, facts), reserved, unknown)
    outside = [each.outside_torch_bytes for each in allocators]
    outside_bytes = sum(size or 0 for size in outside) if None not in outside else max(held - reserved, 0)
    lines.append(
        _line(device, "outside_torch", outside_bytes, "computed", f"CUDA context, modules, NCCL, graphs of pid {pids}")
    )
    rest = held - reserved - outside_bytes
    return [*lines, _line(device, "server_other", rest, "computed", "difference of samples taken at different times")]


def _unknown(parts: list[LedgerLine]) -> list[str]:
    """The large components whose size is unknown, in words."""
    known = {line.component for line in parts}
    return [name for component, name in _LARGE if component not in known]


def _torch_lines(
    device: Device, allocators: list[Allocator], parts: list[LedgerLine], reserved: int, unknown: list[str]
) -> list[LedgerLine]:
    """Lines that add up to the reserved bytes; the split counts only where nothing was reserved or freed since."""
    splits = [each.split for each in allocators if each.split is not None]
    if len(splits) == len(allocators) and sum(split.reserved_bytes for split in splits) == reserved:
        free = [
            (f"torch_{name}", sum(getattr(split, f"{name}_bytes") for split in splits), detail)
            for name, detail in _FREE.items()
        ]
    else:
        live = sum(each.allocated_bytes for each in allocators)
        active = sum(each.allocated_bytes if each.active_bytes is None else each.active_bytes for each in allocators)
        free = [
            ("torch_pending", active - live, _FREE["pending"]),
            ("torch_unused", reserved - active, "cache, graph pools, fragments; the agent does not separate them"),
        ]
    rest = reserved - sum(line.bytes for line in parts) - sum(size for _, size, _ in free)
    # An engine's pool that no line has is in the rest, and mostly is the rest: it must not be read as activations.
    other = "torch_with_kv_pool" if "KV pool" in unknown else "torch_other"
    inside = ", ".join((*unknown, "activations, workspaces"))
    return [
        *parts,
        _line(device, other, rest, "computed", f"{inside} and other live torch memory"),
        *(_line(device, component, size, "measured", detail) for component, size, detail in free),
    ]


def _pool_apart(parts: list[LedgerLine], sample: Sample, facts: Facts) -> list[LedgerLine]:
    """Split the pool into blocks in use and free blocks, where one engine reports it; cached prefixes count as free."""
    engines = sample.engines or ()
    whole = next((line for line in parts if line.component == "kv_pool"), None)
    size = block_bytes(facts, facts.pools[0]) if len(facts.pools) == 1 else None
    if whole is None or size is None or len(engines) != 1 or engines[0].kv_usage_ratio is None:
        return parts
    held = min(facts.pools[0].used_blocks(engines[0].kv_usage_ratio) * size[0], whole.bytes)
    detail = f"{whole.detail}; {_free_detail(facts.pools[0])}"
    apart = [
        replace(whole, component="kv_held", bytes=held),
        replace(whole, component="kv_free", bytes=whole.bytes - held, detail=detail),
    ]
    return [*apart, *(line for line in parts if line is not whole)]


def _free_detail(pool: KvPool) -> str:
    """How free blocks are described: vLLM has no gauge for those that still cache a prefix, and counts both as free.

    A cached block that no request holds stands in the queue of free ones (vllm/v1/core/block_pool.py::BlockPool).
    """
    if pool.prefix_caching is False:
        return "empty: prefix caching is off"
    return "empty, or caching prefixes"


def _parts(device: Device, facts: Facts, ranks: int) -> list[LedgerLine]:
    """Pool and weights of one rank, as far as they are known."""
    lines = []
    engines = max(len(facts.pools), 1)
    size = pool_bytes(facts, facts.pools[0]) if facts.pools else None
    if size is not None:
        lines.append(_line(device, "kv_pool", *size, _ORIGINS[size[1]]))
    if facts.weights_bytes is not None:
        per_engine = max(ranks // engines, 1)
        lines.append(_line(device, "weights", facts.weights_bytes // per_engine, "computed", "size of the checkpoint"))
    return lines


def _engine_only(sample: Sample, facts: Facts) -> tuple[LedgerLine, ...]:
    """The pool as the engine reports it: in use by requests, and free (cached prefixes count as free), or whole."""
    lines: list[LedgerLine] = []
    usage = {engine.engine: engine.kv_usage_ratio for engine in sample.engines or ()}
    for pool in facts.pools:
        size, whole, ratio = block_bytes(facts, pool), pool_bytes(facts, pool), usage.get(pool.engine)
        if whole is None or ratio is None:
            continue
        provenance, detail = whole[1], f"engine {pool.engine}"
        if size is None:
            # Windows and states are among its bytes: what a block in use takes is not known.
            lines.append(
                LedgerLine(gpu=None, component="kv_pool", bytes=whole[0], provenance=provenance, detail=detail)
            )
            continue
        held = pool.used_blocks(ratio) * size[0]
        lines.append(LedgerLine(gpu=None, component="kv_held", bytes=held, provenance=provenance, detail=detail))
        free = whole[0] - held
        detail = f"{detail}: {_free_detail(pool)}"
        lines.append(LedgerLine(gpu=None, component="kv_free", bytes=free, provenance=provenance, detail=detail))
    return tuple(lines)


def _line(device: Device, component: str, size: int, provenance: Provenance, detail: str = "") -> LedgerLine:
    return LedgerLine(
        gpu=device.index, uuid=device.uuid, component=component, bytes=size, provenance=provenance, detail=detail
    )
