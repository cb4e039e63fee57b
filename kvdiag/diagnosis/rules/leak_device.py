"""leak.device_torch and leak.device_non_torch: device memory that grows with every equal request and does not return.

A soak, where there was one, decides before the one-minute step's cycles: it detects smaller leaks, and its idle cycles
separate requests from what grows anyway. A timeline without steps goes to the growth estimator, as host memory does.

On an engine that takes its pool at start, device memory must stay flat under load. Judged on equal cycles after the
first ones, whose first-touch growth is normal (benign.warmup). NVML shows that the server's process grows; whether
torch's allocator or something outside it holds the bytes is only visible inside the process: where agents publish it,
the two are separated, and torch's leak shows long before it takes a page of the driver. Elsewhere growth gets the
verdict that it mostly is with that engine, and the other one is unknown.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvdiag.diagnosis.growth.attribution import (
    NO_TORCH,
    NON_TORCH,
    TORCH,
    device_growth,
    filling,
    torch_growth,
    undecided,
)
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.equal_cycles import (
    CYCLES,
    AllocatorGrowth,
    Climb,
    DeviceGrowth,
    allocator_growths,
    device_growths,
)
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.growth.sleep_floors import asleep_growth
from kvdiag.diagnosis.growth.soak_memory import finding, soaked, weightier
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import NO_DEVICES, first_devices, gap_reason
from kvdiag.engine_memory import runs_torch
from kvdiag.formatting import format_bytes, format_duration, format_holder
from kvdiag.model import Evidence, Facts, Finding, Status, Timeline, cuda_uuid

UNSTEADY = "but not steadily; run `kvdiag run --soak`"
SEE_PROCESSES = "run kvdiag in the server's PID namespace"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the device's bytes, and torch's, after each equal cycle; without steps judge them over hours.

    Until hours were observed, what would exhaust a device within the hour is unknown with that sentence, never healthy.
    An engine without torch has no leak of it.
    """
    found = _judge(timeline, facts, limits)
    return found if runs_torch(facts.engine_name) else tuple(NO_TORCH if one.id == TORCH else one for one in found)


def _judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    # A run's cycles decide what they can; without any, hours of samples do.
    if not timeline.marks:
        over_hours = torch_growth(timeline, facts, limits) or device_growth(timeline, facts, limits)
        found = over_hours or _by_cycles(timeline, facts, limits)
        is_growth = any(one.status in ("fault", "suspect") for one in found)
        if is_growth:
            return found
        asleep = asleep_growth(timeline, facts, limits, NON_TORCH)
        return undecided(asleep, facts) if asleep is not None else filling(timeline, facts, limits) or found
    found = _by_cycles(timeline, facts, limits)
    by_soak = _by_soak(timeline, facts, limits)
    return tuple(weightier(by_soak.get(one.id), one) for one in found)


def leak_of_cycles(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """The leak that the equal cycles show; `None` where they show none, or a soak saw the growth stop."""
    judged = {one.id: one.status for one in judge(timeline, facts, limits)}
    by_cycles = _by_cycles(timeline, facts, limits)
    return next((one for one in by_cycles if one.status == "fault" and judged[one.id] != "ok"), None)


def _by_soak(timeline: Timeline, facts: Facts, limits: Limits) -> dict[str, Finding]:
    """The findings of a soak, of the components that it read; empty where there was none, or none could be judged."""
    soak = soaked(timeline, facts, limits)
    torch = finding(TORCH, soak.of(MemoryComponent.TORCH_LIVE), limits)
    non_torch = finding(NON_TORCH, soak.of(MemoryComponent.OUTSIDE_TORCH), limits)
    whole = finding(NON_TORCH, soak.of(MemoryComponent.SERVER, MemoryComponent.DEVICE), limits)
    if torch is None and non_torch is None and whole is not None:
        # NVML alone: what is flat is flat in torch, too; what grows may be torch's.
        if whole.status == "ok":
            return {TORCH: replace(whole, id=TORCH), NON_TORCH: whole}
        torch, non_torch = undecided(whole, facts)
    return {one.id: one for one in (torch, non_torch) if one is not None}


def _by_cycles(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    inside = allocator_growths(timeline, facts, limits)
    if inside:
        live = [(one, one.live) for one in inside]
        torch = _of_processes(TORCH, live, MemoryComponent.TORCH_LIVE, limits.torch_quantum_bytes)
        outside = [(one, one.outside) for one in inside if one.outside is not None]
        if len(outside) < len(inside):
            return torch, _outside_torch_by_device(inside, timeline, facts, limits)
        part = MemoryComponent.OUTSIDE_TORCH
        return torch, _of_processes(NON_TORCH, outside, part, limits.device_quantum_bytes)
    if not first_devices(timeline):
        return _both("unknown", gap_reason(timeline, facts, "nvml") or NO_DEVICES)
    growths = device_growths(timeline, facts, limits)
    if not growths:
        few = f"device memory was sampled after fewer than {limits.cycles.judged_cycles + 2} equal requests"
        hours = format_duration(limits.growth.window_hours[0] * HOUR_SECONDS)
        short = f"no test run was made, and less than {hours} of device samples is usable"
        run = f"run the test steps (`kvdiag run`), or sample for {hours}"
        cycles = len(timeline.spans(CYCLES))
        enough = cycles >= limits.cycles.judged_cycles + 2
        how = "pause traffic for the run" if enough else "run `kvdiag run --soak`" if cycles else run
        return _both("unknown", f"{few if timeline.marks else short}; {how}")
    # The server's own leak on one GPU is not to be hidden by another process's faster growth on another.
    most = max(growths, key=lambda one: (one.leaking and one.owner != "another process", one.bytes_per_cycle))
    where, evidence, grown = f"GPU {most.gpu}", _evidence(most, limits), _amount(most)
    if most.owner == "another process":
        return _both("unknown", f"another process on {where} grows ({grown}); stop it and repeat the run", evidence)
    if not most.rose:
        return _both("ok", _flat("device memory is", most.judged_cycles, limits.device_quantum_bytes), evidence)
    if not most.leaking:
        return _both("unknown", f"device memory rose {grown}, {UNSTEADY}", evidence)
    if most.owner == "unknown" and (most.idle_bytes or 0) >= limits.device_quantum_bytes:
        while_idle = f"{format_bytes(most.idle_bytes or 0)} before any request"
        return _both("unknown", f"{where}: memory also grows while idle ({while_idle}); {SEE_PROCESSES}", evidence)
    hidden = "device memory (whose process is not visible)"
    whose = "memory of the server's process" if most.owner == "server" else hidden
    summary = f"{where}: {whose} {_grows(most.bytes_per_cycle)}"
    return undecided(Finding(NON_TORCH, "fault", summary, evidence), facts)


def _of_processes(
    verdict: str, climbs: Sequence[tuple[AllocatorGrowth, Climb]], part: MemoryComponent, limit_bytes: int
) -> Finding:
    """Torch's allocated bytes, exact to the 512 bytes that it counts by, or memory outside torch."""
    most, climb = max(climbs, key=lambda one: (one[1].leaking, one[1].bytes_per_cycle))
    evidence = _climb(most, climb, part.removeprefix("torch_"))
    if climb.leaking:
        summary = f"{format_holder(most.who)}: {part.label} {_grows(climb.bytes_per_cycle)}"
        return Finding(verdict, "fault", summary, evidence, holder=most.who)
    if not climb.rose:
        return Finding(verdict, "ok", _flat(f"{part.label} is", climb.judged_cycles, limit_bytes), evidence)
    if climb.rising_cycles == 1 and verdict == TORCH:
        # To the 512 bytes, most runs allocate some table or workspace late.
        summary = f"{part.label} rose once, {_amount(climb)}: an event, not a leak"
        return Finding(TORCH, "ok", summary, evidence)
    return Finding(verdict, "unknown", f"{part.label} rose {_amount(climb)}, {UNSTEADY}", evidence)


def _outside_torch_by_device(
    inside: tuple[AllocatorGrowth, ...], timeline: Timeline, facts: Facts, limits: Limits
) -> Finding:
    """Where no process's bytes are reported: what its device grew by, less what torch reserved."""
    growths = [one for one in device_growths(timeline, facts, limits) if one.owner != "another process"]
    reserved: Counter[str] = Counter()
    for one in inside:
        reserved[one.device_uuid.lower()] += one.reserved.judged_bytes
    non_torch = [(one, one.judged_bytes - reserved[cuda_uuid(one.uuid)]) for one in growths]
    if not non_torch:
        unread = f"the bytes of the server's processes are not reported; {SEE_PROCESSES}"
        return Finding(NON_TORCH, "unknown", gap_reason(timeline, facts, "nvml") or unread)
    most, rest = max(non_torch, key=lambda one: one[1])
    where, amount = f"GPU {most.gpu}", f"{format_bytes(rest)} in {most.judged_cycles} equal requests"
    status: Status
    if rest < limits.device_quantum_bytes:
        summary, status = f"{where}: memory grows by no more than torch reserves: flat outside torch", "ok"
    elif most.leaking:
        summary = f"{where}: memory outside torch grows with each request and is not released: {amount}"
        status = "fault"
    else:
        summary, status = f"{where}: memory outside torch rose {amount}, {UNSTEADY}", "unknown"
    return Finding(NON_TORCH, status, summary, _evidence(most, limits))


def _amount(growth: DeviceGrowth | Climb) -> str:
    return f"{format_bytes(growth.judged_bytes)} in {growth.judged_cycles} equal requests"


def _grows(bytes_per_cycle: float) -> str:
    return f"grows {format_bytes(bytes_per_cycle)} with each request and is not released"


def _flat(what: str, cycles: int, limit_bytes: int) -> str:
    limit = f"detection limit {format_bytes(limit_bytes)} per request"
    return f"{what} flat over the last {cycles} equal requests ({limit})"


def _climb(growth: AllocatorGrowth, climb: Climb, what: str) -> tuple[Evidence, ...]:
    return (
        Evidence("process", growth.who, "holder", "torch"),
        Evidence(f"{what}_growth_per_request", climb.bytes_per_cycle, "bytes", "torch"),
        Evidence(f"{what}_growth_over_judged_requests", climb.judged_bytes, "bytes", "torch"),
        Evidence("judged_requests", climb.judged_cycles, "requests", "kvdiag"),
        Evidence("rising_requests", climb.rising_cycles, "requests", "torch"),
        Evidence("warmup_growth", climb.warmup_bytes, "bytes", "torch"),
        Evidence("reserved_growth_over_judged_requests", growth.reserved.judged_bytes, "bytes", "torch"),
    )


def _both(status: Status, summary: str, evidence: tuple[Evidence, ...] = ()) -> tuple[Finding, ...]:
    return tuple(Finding(leak, status, summary, evidence) for leak in (TORCH, NON_TORCH))


def _evidence(growth: DeviceGrowth, limits: Limits) -> tuple[Evidence, ...]:
    return (
        Evidence("gpu", growth.gpu, "index", "nvml"),
        Evidence("growth_per_request", growth.bytes_per_cycle, "bytes", "nvml"),
        Evidence("growth_over_judged_requests", growth.judged_bytes, "bytes", "nvml"),
        Evidence("judged_requests", growth.judged_cycles, "requests", "kvdiag"),
        Evidence("rising_requests", growth.rising_cycles, "requests", "nvml"),
        Evidence("warmup_growth", growth.warmup_bytes, "bytes", "nvml"),
        Evidence("smallest_detectable_leak", limits.device_quantum_bytes, "bytes per request", "computed"),
        Evidence("holder", growth.owner, "holder", "nvml"),
    )
