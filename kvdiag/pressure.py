"""Memory pressure of a server, 0..1: the figure behind alerts at 80 and 90 %. Pure.

An engine allocates its KV pool at start and never releases it, so the used share of a device is always high. Pressure
is the share of the pool in use, or the used share of the device without the pool's free bytes, whichever is higher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdiag.model import Facts, LedgerLine, Sample, without_mig_parents

OWN = ("kv_pool", "kv_held", "kv_free", "weights", "server_other")
"""Ledger lines that only the server's devices have."""

REUSABLE = ("torch_releasable", "torch_unused")


def pool_pressure(sample: Sample) -> float | None:
    """KV usage of the fullest engine; `None` where no engine reports it.

    It is 1 while requests wait for capacity: the scheduler reserves blocks for admitted requests, so a pool is full
    well below a usage of 1 (observed: 0.8, with five of eight requests waiting).
    """
    engines = sample.engines or ()
    if any(engine.requests_waiting_for_capacity for engine in engines):
        return 1.0
    return max((each for engine in engines if (each := engine.kv_usage_ratio) is not None), default=None)


def pressures(sample: Sample, facts: Facts, lines: Sequence[LedgerLine]) -> dict[str | None, float]:
    """The pressure on each of the server's devices by its UUID; `None` stands for devices that are not observed.

    `max(pool's usage, (used - reusable) / total)`, where reusable are the pool's free bytes, or without a
    pool the allocator's free bytes. Where the pool's size in bytes is unknown only its usage counts, because the used
    share of its device is always high. Devices that may not be the server's are left out.
    """
    usage = pool_pressure(sample)
    if facts.engine_name is None:
        return {}
    found: dict[str | None, float] = {}
    observed = False
    for device in without_mig_parents(sample.devices or ()):
        memory = device.memory
        sizes = {line.component: line.bytes for line in lines if line.uuid == device.uuid}
        if memory is None or not any(name in sizes for name in OWN):
            continue
        observed = True
        free = _reusable(sizes, usage, pooled=bool(facts.pools))
        shares = [] if usage is None else [usage]
        if free is not None:
            shares.append(min(max(memory.used_bytes - free, 0) / memory.total_bytes, 1.0))
        if shares:
            found[device.uuid] = max(shares)
    return found if observed or usage is None else {None: usage}


def _reusable(sizes: Mapping[str, int], usage: float | None, *, pooled: bool) -> int | None:
    if not pooled:
        return sum(sizes.get(name, 0) for name in REUSABLE)
    if "kv_free" in sizes:
        return sizes["kv_free"]
    return None if usage is None or "kv_pool" not in sizes else round(sizes["kv_pool"] * (1.0 - usage))
