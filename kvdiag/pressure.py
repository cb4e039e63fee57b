"""How full a server's memory really is, 0..1: the figure behind alerts at 80 and 90 %. Pure.

An engine takes its KV pool at start and gives none of it back, so that the device's own used share says nothing: what
counts is the pool's share that requests hold, and what is left of the device beside the pool's free bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdiag.model import Facts, LedgerLine, Sample, without_mig_parents

OWN = ("kv_pool", "kv_held", "kv_free", "weights", "server_other")
"""Lines of the ledger that a device of the server's has, and no other."""

REUSABLE = ("torch_releasable", "torch_unused")


def pool_pressure(sample: Sample) -> float | None:
    """The fullest engine's share of its pool that requests hold; `None` where no engine tells.

    Requests that wait for room make it 1: the scheduler keeps blocks back for what it has admitted, so that a pool is
    full well below a usage of 1 (seen: 0.8, with five of eight requests waiting).
    """
    engines = sample.engines or ()
    if any(engine.requests_waiting_for_capacity for engine in engines):
        return 1.0
    return max((each for engine in engines if (each := engine.kv_usage_ratio) is not None), default=None)


def pressures(sample: Sample, facts: Facts, lines: Sequence[LedgerLine]) -> dict[str | None, float]:
    """The pressure on each of the server's devices by its UUID; `None` stands for devices that are not seen.

    `max(pool's usage, (used - reusable) / total)`, where reusable are the pool's free bytes, or what the allocator
    could use again or give back where there is no pool. A pool whose bytes are not known is told by its usage alone:
    its device's used share would always be high. Devices that cannot be told to be the server's are left out.
    """
    usage = pool_pressure(sample)
    if facts.engine_name is None:
        return {}
    found: dict[str | None, float] = {}
    seen = False
    for device in without_mig_parents(sample.devices or ()):
        memory = device.memory
        sizes = {line.component: line.bytes for line in lines if line.uuid == device.uuid}
        if memory is None or not any(name in sizes for name in OWN):
            continue
        seen = True
        free = _reusable(sizes, usage, pooled=bool(facts.pools))
        told = [] if usage is None else [usage]
        if free is not None:
            told.append(min(max(memory.used_bytes - free, 0) / memory.total_bytes, 1.0))
        if told:
            found[device.uuid] = max(told)
    return found if seen or usage is None else {None: usage}


def _reusable(sizes: Mapping[str, int], usage: float | None, *, pooled: bool) -> int | None:
    if not pooled:
        return sum(sizes.get(name, 0) for name in REUSABLE)
    if "kv_free" in sizes:
        return sizes["kv_free"]
    return None if usage is None or "kv_pool" not in sizes else round(sizes["kv_pool"] * (1.0 - usage))
