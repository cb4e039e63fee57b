"""benign.warmup: device memory that grew with the first requests and stopped. Status ok, explained.

Lazily loaded kernels, cuBLAS workspaces (8 MiB at the first matmul) and the allocator's high-water mark come with the
first requests of a shape and stay: on a before/after test of one request they look like a leak.
"""

from __future__ import annotations

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.equal_cycles import device_growths
from kvdiag.diagnosis.growth.host_caches import filling
from kvdiag.diagnosis.growth.soak_memory import soaked
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import first_devices, floor_within, gap_reason
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Facts, Finding, Timeline

ID = "benign.warmup"
CYCLES = "single_request"
BASELINE = "baseline"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the baseline with the first cycles, and the first cycles with the later ones."""
    if not timeline.marks and (fills := filling(timeline, facts, limits, ID)) is not None:
        return (fills,)
    if not first_devices(timeline):
        unread = "no device memory was read; run kvdiag where NVML works"
        return unknown(ID, gap_reason(timeline, facts, "nvml") or unread)
    growths = device_growths(timeline, facts, limits, step=CYCLES)
    if not growths:
        if not timeline.marks:
            return unknown(ID, "the first requests after the start were not observed; run `kvdiag run` after a restart")
        return unknown(ID, "device memory was sampled after too few equal requests; pause traffic for the run")
    before = _before_first_request(timeline, facts, limits)
    largest = max(growths, key=lambda growth: growth.warmup_bytes + before.get(growth.uuid, 0))
    first_touch = largest.warmup_bytes + before.get(largest.uuid, 0)
    evidence = (
        Evidence("first_touch_growth", first_touch, "bytes", "nvml"),
        Evidence("growth_over_judged_cycles", largest.judged_bytes, "bytes", "nvml"),
        Evidence("judged_cycles", largest.judged_cycles, "cycles", "kvdiag"),
    )
    # In a soak the server's device memory may have been flat after all, or have stopped growing.
    soak = soaked(timeline, facts, limits)
    later = () if soak is None else soak.of(MemoryComponent.SERVER, MemoryComponent.DEVICE)
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


def _before_first_request(timeline: Timeline, facts: Facts, limits: Limits) -> dict[str, int]:
    """Growth by UUID between the baseline and the first cycle: what the unjudged warm-up requests brought."""
    baseline, cycles = timeline.spans(BASELINE), timeline.spans(CYCLES)
    if not baseline or not cycles:
        return {}
    start = floor_within(timeline, baseline[0].begin_seconds, baseline[0].end_seconds, facts, limits)
    end = floor_within(timeline, cycles[0].begin_seconds, cycles[0].offer_seconds, facts, limits)
    if start is None or end is None:
        return {}
    before, after = (
        {device.uuid: device.memory.used_bytes for device in floor.devices or () if device.memory is not None}
        for floor in (start, end)
    )
    return {uuid: after[uuid] - before[uuid] for uuid in after.keys() & before.keys()}
