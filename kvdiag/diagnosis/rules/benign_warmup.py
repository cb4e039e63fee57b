"""benign.warmup: memory that grew with the first requests, or is a filling cache, and is no leak. Status ok, explained.

Lazily loaded kernels, cuBLAS workspaces (8 MiB at the first matmul) and the allocator's high-water mark come with the
first requests of a shape and stay: on a before/after test of one request they look like a leak. Decided in this order:
without test steps, a host cache filling within its reported size limit; then device memory over equal cycles: still
growing is unknown, unless a soak shows that it stopped; growth before the judged cycles is ok, with the part of it that
stayed in use to the end: torch's cache of a large step is released again when an allocation fails.
"""

from collections import Counter

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.equal_cycles import BASELINE, CYCLES, device_growths, floors_after_cycles
from kvdiag.diagnosis.growth.host_caches import filling
from kvdiag.diagnosis.growth.soak_memory import soaked
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import (
    NO_DEVICES,
    IdleFloor,
    first_devices,
    floor_within,
    gap_reason,
    idle_floors,
)
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Facts, Finding, Timeline

ID = "benign.warmup"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the baseline with the first cycles, and the first cycles with the later ones."""
    if not timeline.marks and (fills := filling(timeline, facts, limits, ID)) is not None:
        return (fills,)
    if not first_devices(timeline):
        return unknown(ID, gap_reason(timeline, facts, "nvml") or NO_DEVICES)
    growths = device_growths(timeline, facts, limits)
    if not growths:
        if cycles := timeline.spans(CYCLES):
            few = "device memory was sampled after too few equal requests"
            enough = len(cycles) >= limits.cycles.judged_cycles + 2
            return unknown(ID, f"{few}; {'pause traffic for the run' if enough else 'run `kvdiag run --soak`'}")
        how = "run the test steps (`kvdiag run`) after a restart"
        return unknown(ID, f"warm-up is judged only over equal requests; {how}")
    floors = floors_after_cycles(timeline, facts, limits)
    baseline = next(iter(timeline.spans(BASELINE)), None)
    start = baseline and floor_within(timeline, baseline.begin_seconds, baseline.end_seconds, facts, limits)
    # What the unjudged requests before the first cycle brought, and what was released after the last.
    before, since = _grown(start or floors[0], floors[0]), _grown(floors[-1], idle_floors(timeline, facts, limits)[-1])
    lasting = {one.uuid: one.warmup_bytes + before[one.uuid] + min(since[one.uuid], 0) for one in growths}
    largest = max(growths, key=lambda growth: lasting[growth.uuid])
    first_touch = lasting[largest.uuid]
    evidence = (
        Evidence("warmup_growth", first_touch, "bytes", "nvml"),
        Evidence("growth_over_judged_requests", largest.judged_bytes, "bytes", "nvml"),
        Evidence("judged_requests", largest.judged_cycles, "requests", "kvdiag"),
    )
    # In a soak the server's device memory may have been flat after all, or have stopped growing.
    later = soaked(timeline, facts, limits).of(MemoryComponent.SERVER, MemoryComponent.DEVICE)
    stopped = bool(later) and all(one.soaked.shape in ("flat", "ended") for one in later)
    if any(growth.rose for growth in growths) and not stopped:
        summary = "device memory is still growing; a longer run shows whether it stops"
        return (Finding(ID, "unknown", summary, evidence),)
    first_touch += sum(growth.judged_bytes for growth in growths if growth.uuid == largest.uuid and growth.rose)
    if first_touch < limits.device_quantum_bytes:
        # Without evidence: there is no growth to explain.
        return (Finding(ID, "ok", "device memory did not grow"),)
    grown = f"grew {format_bytes(first_touch)} with the first requests, then stopped"
    return (Finding(ID, "ok", f"GPU {largest.gpu}: {grown}: warm-up, not a leak", evidence),)


def _grown(start: IdleFloor, end: IdleFloor) -> Counter[str]:
    """Growth by UUID from one floor to another; 0 where either has no memory of a device."""
    before, after = (
        {device.uuid: device.memory.used_bytes for device in floor.devices or () if device.memory is not None}
        for floor in (start, end)
    )
    return Counter({uuid: after[uuid] - before[uuid] for uuid in after.keys() & before.keys()})
