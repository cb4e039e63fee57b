"""Step 1: nothing runs. The pool must be empty, and the device hold the server and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.diagnosis.blocks.step_accounting import unknown
from kvdiag.diagnosis.expected_footprint import explained_bytes
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.diagnosis.timeline_queries import (
    counted,
    floor_within,
    gap_reason,
    readable_bytes,
    server_devices,
    server_uuids,
)
from kvdiag.model import Facts, Quantity, Sample, Status, StepResult, Timeline, Workload

ID = "baseline"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """Blocks held and device bytes used while idle, against none and against what can be explained."""
    span = next(iter(timeline.spans(ID)), None)
    if span is None or span.end_seconds is None:
        return unknown(ID, "it did not run to its end" if span else "it did not run", span)
    floor = floor_within(timeline, span.begin_seconds, span.end_seconds, facts, limits)
    samples = timeline.between(span.begin_seconds, span.end_seconds)
    if floor is None:
        return unknown(ID, _not_settled(samples, gap_reason(timeline, facts, "engine"), limits), span)
    own = server_uuids(timeline, facts)
    devices = server_devices(floor.devices, own)
    unseen = [device for device in devices if device.memory is None]
    used = sum(device.memory.used_bytes for device in devices if device.memory is not None)
    # Where it cannot be told which of several GPUs are the server's, another tenant's bytes are not to be explained.
    explained = explained_bytes(devices, facts, limits) if own or len(devices) == 1 else None
    expected = (
        Quantity(name="blocks", value=0, unit="blocks"),
        Quantity(name="device_used_bytes", value=explained, unit="bytes"),
    )
    measured = (
        Quantity(name="blocks", value=floor.blocks, unit="blocks"),
        Quantity(name="device_used_bytes", value=used if devices and not unseen else None, unit="bytes"),
    )
    status: Status = "ok"
    parts: list[str] = []
    if floor.blocks is None:
        status, parts = "unknown", ["the pool's usage is not known or did not settle"]
    elif floor.blocks > 0:
        status, parts = "fault", [f"{counted(floor.blocks, 'block is', 'blocks are')} held while nothing runs"]
    else:
        parts = ["no block is held"]
    if unseen and _failed(samples):
        status = "unknown" if status == "ok" else status
        parts.append(f"memory of GPU {unseen[0].index} cannot be read")
    elif unseen:
        parts.append(f"GPU {unseen[0].index} does not tell its memory")
    elif not devices:
        parts.append("device memory is not seen")
    elif explained is not None and used > explained:
        status = "suspect" if status == "ok" else status
        parts.append(
            f"{readable_bytes(used)} of the device used, {readable_bytes(used - explained)} more than explained"
        )
    else:
        parts.append(f"{readable_bytes(used)} of the device used")
    return StepResult(
        id=ID, status=status, summary="; ".join(parts), expected=expected, measured=measured, notes=span.notes
    )


def _not_settled(within: Sequence[Sample], reason: str | None, limits: Limits) -> str:
    """Why samples show no idle floor: traffic, or too few readings to tell, for a reason where there is one."""
    samples = [one for one in within if one.engines]
    if any(sample.engines_idle is False for sample in samples):
        return "the server was never idle: other traffic"
    if any(sample.engines_idle is None for sample in samples):
        return "the engine does not tell whether it is idle"
    seen = counted(len(samples), "reading", "readings")
    few = f"{seen} saw the idle server, {limits.idle_samples} in a row are needed"
    return f"{few}: {reason}" if reason else few


def _failed(samples: Sequence[Sample]) -> bool:
    """Whether a device reading failed meanwhile; memory that a GPU never tells, as the host's own, is no failure."""
    return any(gap.source == "nvml" and gap.kind == "failed" for sample in samples for gap in sample.gaps)


STEP = Step(
    id=ID,
    title="Baseline: nothing runs",
    workload=Workload(requests=0, prompt_tokens=0, max_tokens=0, hold_seconds=4.0),
    cycles=1,
    judge=judge,
)
