"""leak.device_torch and leak.device_non_torch: device memory that grows with every equal request and does not return.

A soak, where there was one, decides before the one-minute step's cycles: it sees smaller leaks, and its idle cycles
tell requests from what grows anyway. A timeline without steps goes to the growth estimator, as host memory does.

On an engine that takes its pool at start, device memory must stay flat under load. Judged on equal cycles after the
first ones, whose first-touch growth is normal (benign.warmup). NVML shows that the server's process grows; whether
torch's allocator or something outside it holds the bytes is only visible inside the process: where agents publish it,
the two are told apart, and torch's leak shows long before it fills a page of the driver. Elsewhere growth is called by
what it mostly is with that engine, and the other one is unknown.
"""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.growth.attribution import (
    NON_TORCH,
    TORCH,
    UNDECIDED,
    device_growth,
    likely_and_other,
    torch_growth,
)
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.equal_cycles import AllocatorGrowth, Climb, DeviceGrowth, allocator_growths, device_growths
from kvdiag.diagnosis.growth.soak_memory import soaked
from kvdiag.diagnosis.growth.soak_verdicts import finding, weightier
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.timeline_queries import first_devices, gap_reason
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Facts, Finding, Status, Timeline, cuda_uuid

CYCLES = "single_request"

_HELD_BY = {"server": "server", "neighbour": "another process", "unseen": "unknown"}
"""Whose bytes grew, as evidence names it."""


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the device's bytes, and torch's, after each equal cycle; without steps judge them over hours."""
    # A run's cycles decide what they can; without any, hours of readings do.
    if not timeline.marks:
        over_hours = torch_growth(timeline, facts, limits) or device_growth(timeline, facts, limits)
        if over_hours:
            return over_hours
    found = _by_cycles(timeline, facts, limits)
    by_soak = _by_soak(timeline, facts, limits)
    return tuple(weightier(by_soak.get(one.id), one) for one in found)


def _by_soak(timeline: Timeline, facts: Facts, limits: Limits) -> dict[str, Finding]:
    """What a soak says, of the components that it read; empty where there was none, or none that could be judged."""
    soak = soaked(timeline, facts, limits)
    if soak is None:
        return {}
    torch = finding(TORCH, soak.of(MemoryComponent.TORCH_LIVE), limits)
    beside = finding(NON_TORCH, soak.of(MemoryComponent.OUTSIDE_TORCH), limits)
    whole = finding(NON_TORCH, soak.of(MemoryComponent.SERVER, MemoryComponent.DEVICE), limits)
    if torch is None and beside is None and whole is not None:
        # NVML alone: whatever is flat is flat in torch, too; what grows may be torch's.
        if whole.status == "ok":
            return {TORCH: replace(whole, id=TORCH), NON_TORCH: whole}
        likely, other = likely_and_other(facts.engine_name)
        told = replace(whole, id=likely, summary=f"{whole.summary}; {UNDECIDED}")
        return {other: Finding(id=other, status="unknown", summary=UNDECIDED), likely: told}
    return {one.id: one for one in (torch, beside) if one is not None}


def _by_cycles(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    inside = allocator_growths(timeline, facts, limits, step=CYCLES)
    if inside:
        return _of_torch(inside, limits), _beside_torch(inside, timeline, facts, limits)
    if not first_devices(timeline):
        return _missing(gap_reason(timeline, facts, "nvml") or "no device memory was read")
    growths = device_growths(timeline, facts, limits, step=CYCLES)
    if not growths:
        needed = limits.cycles.judged_cycles + 2
        instead = "" if timeline.marks else f", or take {limits.growth.window_hours[0]:.0f} h of samples"
        sentence = f"fewer than {needed} equal cycles with device samples; pause traffic for the run{instead}"
        return _missing(sentence)
    # The server's own leak on one GPU is not to be hidden by a neighbour that grows faster on another.
    worst = max(growths, key=lambda one: (one.leaking and one.owner != "neighbour", one.bytes_per_cycle))
    if worst.owner == "neighbour":
        amount = f"{format_bytes(worst.judged_bytes)} in {worst.judged_cycles} cycles"
        return _both("unknown", f"another process grows on GPU {worst.gpu} ({amount})", worst)
    if not worst.rose:
        sentence = (
            f"device memory is flat over {worst.judged_cycles} equal cycles "
            f"(detection limit {format_bytes(worst.smallest_visible_bytes)} per request)"
        )
        return _both("ok", sentence, worst)
    if not worst.leaking:
        amount = f"{format_bytes(worst.judged_bytes)} in {worst.judged_cycles} cycles"
        return _both("unknown", f"device memory rose {amount}, but not steadily", worst)
    if worst.owner == "unseen" and (worst.idle_bytes or 0) >= limits.device_quantum_bytes:
        amount = f"{format_bytes(worst.idle_bytes or 0)} before any request"
        return _both("unknown", f"GPU {worst.gpu} also grows while idle ({amount})", worst)
    whose = (
        "memory of the server's process" if worst.owner == "server" else "device memory (whose process is not visible)"
    )
    summary = (
        f"GPU {worst.gpu}: {whose} grows {format_bytes(worst.bytes_per_cycle)} with each request and is not released"
    )
    likely, other = likely_and_other(facts.engine_name)
    told = Finding(id=likely, status="fault", summary=f"{summary}; {UNDECIDED}", evidence=_evidence(worst))
    untold = Finding(id=other, status="unknown", summary=UNDECIDED)
    return (told, untold) if likely == TORCH else (untold, told)


def _missing(reason: str) -> tuple[Finding, ...]:
    return *unseen(TORCH, reason), *unseen(NON_TORCH, reason)


def _of_torch(inside: tuple[AllocatorGrowth, ...], limits: Limits) -> Finding:
    """What lives in torch, to the 512 bytes that it counts by."""
    worst = max(inside, key=lambda one: (one.live.leaking, one.live.bytes_per_cycle))
    evidence = _climb(worst, worst.live, "live")
    if worst.live.leaking:
        amount = format_bytes(worst.live.bytes_per_cycle)
        summary = f"{worst.who}: torch's allocated memory grows {amount} with each request and is not released"
        return Finding(id=TORCH, status="fault", summary=summary, evidence=evidence, holder=worst.who)
    if worst.live.rose:
        amount = f"{format_bytes(worst.live.judged_bytes)} in {worst.live.judged_cycles} cycles"
        if worst.live.rising_cycles == 1:
            # Seen to the 512 bytes, some table or workspace is made late in most runs.
            summary = f"torch's allocated memory rose once, {amount}: an event, not a leak"
            return Finding(id=TORCH, status="ok", summary=summary, evidence=evidence)
        summary = f"torch's allocated memory rose {amount}, but not steadily"
        return Finding(id=TORCH, status="unknown", summary=summary, evidence=evidence)
    summary = (
        f"torch's allocated memory is flat over {worst.live.judged_cycles} equal cycles "
        f"(detection limit {format_bytes(limits.torch_quantum_bytes)} per request)"
    )
    return Finding(id=TORCH, status="ok", summary=summary, evidence=evidence)


def _beside_torch(inside: tuple[AllocatorGrowth, ...], timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    """What the server's processes hold that torch does not count, as their own NVML tells inside them."""
    climbs = [(one, one.outside) for one in inside if one.outside is not None]
    if len(climbs) < len(inside):
        return _beside_torch_by_device(inside, timeline, facts, limits)
    worst, climb = max(climbs, key=lambda one: (one[1].leaking, one[1].bytes_per_cycle))
    evidence = _climb(worst, climb, "outside_torch")
    if climb.leaking:
        amount = format_bytes(climb.bytes_per_cycle)
        summary = f"{worst.who} grows {amount} with each request outside torch, and it is not released"
        return Finding(id=NON_TORCH, status="fault", summary=summary, evidence=evidence, holder=worst.who)
    if climb.rose:
        amount = f"{format_bytes(climb.judged_bytes)} in {climb.judged_cycles} cycles"
        summary = f"outside torch the process rose {amount}, but not steadily"
        return Finding(id=NON_TORCH, status="unknown", summary=summary, evidence=evidence)
    summary = (
        f"outside torch the process is flat over {climb.judged_cycles} equal cycles "
        f"(detection limit {format_bytes(limits.device_quantum_bytes)} per request)"
    )
    return Finding(id=NON_TORCH, status="ok", summary=summary, evidence=evidence)


def _beside_torch_by_device(
    inside: tuple[AllocatorGrowth, ...], timeline: Timeline, facts: Facts, limits: Limits
) -> Finding:
    """Where no process's bytes are told: what its device grew by, less what torch reserved."""
    growths = [one for one in device_growths(timeline, facts, limits, step=CYCLES) if one.owner != "neighbour"]
    reserved = {one.device_uuid.lower(): 0 for one in inside}
    for one in inside:
        reserved[one.device_uuid.lower()] += one.reserved.judged_bytes
    beside = [(one, one.judged_bytes - reserved.get(cuda_uuid(one.uuid), 0)) for one in growths]
    if not beside:
        reason = gap_reason(timeline, facts, "nvml") or "the bytes of the server's processes are not reported"
        return Finding(id=NON_TORCH, status="unknown", summary=f"{reason}")
    worst, rest = max(beside, key=lambda one: one[1])
    if rest < limits.device_quantum_bytes:
        summary = f"GPU {worst.gpu} grows by no more than torch reserves: outside torch it is flat"
        return Finding(id=NON_TORCH, status="ok", summary=summary, evidence=_evidence(worst))
    amount = f"{format_bytes(rest)} in {worst.judged_cycles} cycles"
    if worst.leaking:
        summary = f"GPU {worst.gpu} grows with each request and is not released, {amount} of it outside torch"
        return Finding(id=NON_TORCH, status="fault", summary=summary, evidence=_evidence(worst))
    summary = f"outside torch GPU {worst.gpu} rose {amount}, but not steadily"
    return Finding(id=NON_TORCH, status="unknown", summary=summary, evidence=_evidence(worst))


def _climb(growth: AllocatorGrowth, climb: Climb, what: str) -> tuple[Evidence, ...]:
    return (
        Evidence("process", growth.who, "", "torch"),
        Evidence(f"{what}_growth_per_cycle", climb.bytes_per_cycle, "bytes", "torch"),
        Evidence(f"{what}_growth_over_judged_cycles", climb.judged_bytes, "bytes", "torch"),
        Evidence("judged_cycles", climb.judged_cycles, "cycles", "kvdiag"),
        Evidence("rising_cycles", climb.rising_cycles, "cycles", "torch"),
        Evidence("first_touch_growth", climb.warmup_bytes, "bytes", "torch"),
        Evidence("reserved_growth_over_judged_cycles", growth.reserved.judged_bytes, "bytes", "torch"),
    )


def _both(status: Status, summary: str, growth: DeviceGrowth | None = None) -> tuple[Finding, ...]:
    evidence = () if growth is None else _evidence(growth)
    return tuple(Finding(id=leak, status=status, summary=summary, evidence=evidence) for leak in (TORCH, NON_TORCH))


def _evidence(growth: DeviceGrowth) -> tuple[Evidence, ...]:
    return (
        Evidence("gpu", growth.gpu, "index", "nvml"),
        Evidence("growth_per_cycle", growth.bytes_per_cycle, "bytes", "nvml"),
        Evidence("growth_over_judged_cycles", growth.judged_bytes, "bytes", "nvml"),
        Evidence("judged_cycles", growth.judged_cycles, "cycles", "kvdiag"),
        Evidence("rising_cycles", growth.rising_cycles, "cycles", "nvml"),
        Evidence("first_touch_growth", growth.warmup_bytes, "bytes", "nvml"),
        Evidence("smallest_visible_leak", growth.smallest_visible_bytes, "bytes per request", "computed"),
        Evidence("held_by", _HELD_BY[growth.owner], "", "nvml"),
    )
