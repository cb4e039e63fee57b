"""leak.device_torch and leak.device_non_torch: device memory that grows with every equal request and does not return.

On an engine that takes its pool at start, device memory must stay flat under load. Judged on equal cycles after the
first ones, whose first-touch growth is normal (benign.warmup). NVML shows that the server's process grows; whether
torch's allocator or something beside it holds the bytes is only visible inside the process.
"""

from __future__ import annotations

from kvdiag.diagnosis.device_growth import DeviceGrowth, device_growths
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import first_devices, gap_reason, readable_bytes
from kvdiag.diagnosis.rule import number
from kvdiag.model import Evidence, Facts, Finding, Status, Timeline

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"
CYCLES = "single_request"
UNDECIDED = "NVML cannot tell torch's allocations from others of the process; torch's allocator statistics would"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the device's bytes after each equal cycle of the single-request step."""
    if not first_devices(timeline):
        return _both("unknown", f"cannot tell: {gap_reason(timeline, facts, 'nvml') or 'no device memory was read'}")
    growths = device_growths(timeline, facts, limits, step=CYCLES)
    if not growths:
        needed = limits.judged_cycles + 2
        return _both("unknown", f"cannot tell: {needed} equal cycles with device readings after each are needed")
    # The server's own leak on one GPU is not to be hidden by a neighbour that grows faster on another.
    worst = max(growths, key=lambda one: (one.leaking and one.owner != "neighbour", one.bytes_per_cycle))
    if worst.owner == "neighbour":
        amount = f"{readable_bytes(worst.judged_bytes)} in {worst.judged_cycles} cycles"
        return _both("unknown", f"cannot tell: another process grows on GPU {worst.gpu} ({amount})", worst)
    if not worst.rose:
        sentence = (
            f"device memory is flat over {worst.judged_cycles} equal cycles; "
            f"{readable_bytes(worst.smallest_visible_bytes)} per request would show"
        )
        return _both("ok", sentence, worst)
    if not worst.leaking:
        amount = f"{readable_bytes(worst.judged_bytes)} in {worst.judged_cycles} cycles"
        return _both("unknown", f"cannot tell: device memory rose {amount}, but not steadily", worst)
    if worst.owner == "unseen" and (worst.idle_bytes or 0) >= limits.device_quantum_bytes:
        amount = f"{readable_bytes(worst.idle_bytes or 0)} before any request"
        return _both("unknown", f"cannot tell: GPU {worst.gpu} grows while nothing runs, too ({amount})", worst)
    whose = "the server's process" if worst.owner == "server" else "device memory (whose process is not visible)"
    summary = (
        f"GPU {worst.gpu}: {whose} grows {readable_bytes(worst.bytes_per_cycle)} with each request and does not return"
    )
    return (
        Finding(id=TORCH, status="unknown", summary=f"cannot tell: {UNDECIDED}"),
        Finding(id=NON_TORCH, status="fault", summary=f"{summary}; {UNDECIDED}", evidence=_evidence(worst)),
    )


def _both(status: Status, summary: str, growth: DeviceGrowth | None = None) -> tuple[Finding, ...]:
    evidence = () if growth is None else _evidence(growth)
    return tuple(Finding(id=leak, status=status, summary=summary, evidence=evidence) for leak in (TORCH, NON_TORCH))


def _evidence(growth: DeviceGrowth) -> tuple[Evidence, ...]:
    return (
        number("gpu", growth.gpu, "index", "nvml"),
        number("growth_per_cycle", growth.bytes_per_cycle, "bytes", "nvml"),
        number("growth_over_judged_cycles", growth.judged_bytes, "bytes", "nvml"),
        number("judged_cycles", growth.judged_cycles, "cycles", "kvdiag"),
        number("rising_cycles", growth.rising_cycles, "cycles", "nvml"),
        number("first_touch_growth", growth.warmup_bytes, "bytes", "nvml"),
        number("smallest_visible_leak", growth.smallest_visible_bytes, "bytes per request", "computed"),
        number("held_by", growth.owner, "", "nvml"),
    )
