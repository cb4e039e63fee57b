"""Memory pressure of a server, 0..1: the figure behind alerts at 80 and 90 %. Pure.

An engine allocates its KV pool at start and never releases it, so the used share of a device is always high. Pressure
is the share of the pool in use, or the used share of the device without the pool's free bytes, whichever is higher.
"""

from collections.abc import Mapping, Sequence

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Facts, LedgerLine, Sample, without_mig_parents

OWN = ("kv_pool", "kv_held", "kv_free", "weights", "server_other")
"""Ledger lines that only the server's devices have."""

UNKNOWN = "unknown: the size of the KV pool in bytes is not known; run kvdiag where it can read the model's files"

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


def pressures(sample: Sample, facts: Facts, lines: Sequence[LedgerLine]) -> dict[str | None, float | None]:
    """The pressure on each of the server's devices by its UUID; the key `None` is for devices that are not observed.

    `max(pool's usage, (used - reusable) / total)`, where reusable are the pool's free bytes, or where the engine shows
    no pool the allocator's free bytes. Where the pool's size in bytes is unknown, pressure lies between its usage and
    the used share of the device: `None`, unless both are about the same, the pool is filling, or the device is full;
    so too where the driver does not answer. Devices that may not be the server's are left out.
    """
    usage = pool_pressure(sample)
    if facts.engine_name is None:
        return {}
    found: dict[str | None, float | None] = {}
    observed = False
    for device in without_mig_parents(sample.devices or ()):
        memory = device.memory
        sizes = {line.component: line.bytes for line in lines if line.uuid == device.uuid}
        if memory is None or not any(name in sizes for name in OWN):
            continue
        observed = True
        free = _reusable(sizes, usage, pooled=bool(facts.pools) or usage is not None)
        if free is not None:
            share = min(max(memory.used_bytes - free, 0) / memory.total_bytes, 1.0)
            found[device.uuid] = max(share, usage or 0.0)
        elif memory.occupied_ratio >= DEFAULT_LIMITS.full_device_ratio:
            found[device.uuid] = max(memory.occupied_ratio, usage or 0.0)
        elif usage is not None:
            # A filling pool is reported, although the pressure may be higher.
            filling = usage >= min(memory.occupied_ratio, DEFAULT_LIMITS.pressure.warning_ratio)
            found[device.uuid] = usage if filling else None
    if observed:
        return found
    if any(gap.source == "nvml" and gap.kind == "failed" for gap in sample.gaps):
        return {None: usage if usage is not None and usage >= DEFAULT_LIMITS.pressure.warning_ratio else None}
    return {} if usage is None else {None: usage}


def _reusable(sizes: Mapping[str, int], usage: float | None, *, pooled: bool) -> int | None:
    if not pooled:
        return sum(sizes.get(name, 0) for name in REUSABLE)
    if "kv_free" in sizes:
        return sizes["kv_free"]
    return None if usage is None or "kv_pool" not in sizes else round(sizes["kv_pool"] * (1.0 - usage))
