"""Step 1: nothing runs. The pool must be empty, and the device must hold the server and nothing else.

Blocks in use while idle are a fault. Used bytes beyond what pool, weights and an allowance explain are suspect; memory
that a GPU of the server failed to report makes the step unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.diagnosis.blocks.step_accounting import unknown
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.diagnosis.timeline_queries import floor_within, gap_reason, server_devices, server_uuids
from kvdiag.formatting import format_bytes, plural
from kvdiag.kv.calibration.running_server import all_pools_bytes
from kvdiag.model import Device, Facts, Quantity, Sample, Status, StepResult, Timeline, Workload

ID = "baseline"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Compare blocks in use while idle with 0, and used device bytes with what can be explained."""
    span = next(iter(timeline.spans(ID)), None)
    if span is None or span.end_seconds is None:
        return unknown(ID, "the step did not finish" if span else "the step did not run", span)
    floor = floor_within(timeline, span.begin_seconds, span.end_seconds, facts, limits)
    samples = timeline.between(span.begin_seconds, span.end_seconds)
    if floor is None:
        return unknown(ID, _not_settled(samples, gap_reason(timeline, facts, "engine"), limits), span)
    own = server_uuids(timeline, facts)
    devices = server_devices(floor.devices, own)
    dark = [device for device in devices if device.memory is None]
    used = sum(device.memory.used_bytes for device in devices if device.memory is not None)
    # Where the server's GPUs are not known, other tenants' bytes cannot be explained.
    explained = explained_bytes(devices, facts, limits) if own or len(devices) == 1 else None
    expected = (Quantity("blocks", 0, "blocks"), Quantity("device_used_bytes", explained, "bytes"))
    measured = (
        Quantity("blocks", floor.blocks, "blocks"),
        Quantity("device_used_bytes", used if devices and not dark else None, "bytes"),
    )
    status: Status = "ok"
    parts: list[str] = []
    if floor.blocks is None:
        status, parts = "unknown", ["the pool's usage is not reported or did not settle"]
    elif floor.blocks > 0:
        status, parts = "fault", [f"{plural(floor.blocks, 'block is', 'blocks are')} in use while idle"]
    else:
        parts = ["no block is in use"]
    # Memory that a GPU never reports is no failure.
    if dark and any(gap.source == "nvml" and gap.kind == "failed" for sample in samples for gap in sample.gaps):
        status = "unknown" if status == "ok" else status
        parts.append(f"GPU {dark[0].index}'s memory could not be read")
    elif dark:
        parts.append(f"GPU {dark[0].index} does not report its memory")
    elif not devices:
        parts.append("device memory is not visible")
    elif explained is not None and used > explained:
        status = "suspect" if status == "ok" else status
        parts.append(f"{format_bytes(used)} of GPU memory used, {format_bytes(used - explained)} unexplained")
    else:
        parts.append(f"{format_bytes(used)} of GPU memory used")
    return StepResult(ID, status, "; ".join(parts), expected=expected, measured=measured, notes=span.notes)


def _not_settled(within: Sequence[Sample], reason: str | None, limits: Limits) -> str:
    """Why there is no idle floor: other traffic, or too few samples, with the reason where there is one."""
    samples = [one for one in within if one.engines]
    if any(sample.engines_idle is False for sample in samples):
        return "the server was never idle (other traffic); pause traffic for the run"
    if any(sample.engines_idle is None for sample in samples):
        return "the engine does not report running and waiting requests; check its /metrics"
    few = f"{plural(len(samples), 'idle sample')}; {limits.idle_samples} in a row are needed"
    return f"{few}: {reason}" if reason else few


def explained_bytes(devices: Sequence[Device], facts: Facts, limits: Limits) -> int | None:
    """Most bytes that can be explained over all of a server's devices; `None` where pool or weights are not known.

    Weights are counted once over all ranks, the pool once per rank. The allowance is a CUDA context and a share of the
    device for activations, CUDA graphs and allocator cache. It is never more than there is.
    """
    memories = [device.memory for device in devices if device.memory is not None]
    pools = all_pools_bytes(facts)
    if not memories or facts.weights_bytes is None or pools is None:
        return None
    copies = len(facts.pools)
    # One engine on several devices is tensor parallel, each rank with a pool of this size; engines share devices out.
    pool_bytes = pools[0] * max(len(memories) // copies, 1)
    reserved = sum(memory.driver_reserved_bytes or 0 for memory in memories)
    allowance = sum(limits.context_bytes + int(limits.activation_ratio * memory.total_bytes) for memory in memories)
    room_bytes = sum(memory.total_bytes for memory in memories)
    return min(pool_bytes + copies * facts.weights_bytes + reserved + allowance, room_bytes)


STEP = Step(
    id=ID,
    title="Baseline: no requests, the pool must be empty",
    workload=Workload(requests=0, prompt_tokens=0, max_tokens=0, hold_seconds=4.0),
    cycles=1,
    judge=judge,
)
