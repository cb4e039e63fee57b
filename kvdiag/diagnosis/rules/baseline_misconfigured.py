"""baseline.misconfigured: memory fraction, pool size or context length do not fit the device.

Checked in this order, and the worst is reported: the smallest pool against max_model_len (fault), the pool against
what the model's config gives, free memory while idle, the server's bytes above its budget when it started, and
their maximum far below it (suspect).
"""

from collections.abc import Iterable

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.memory_budget import allowance_bytes, budget_bytes, without_driver_bytes
from kvdiag.diagnosis.prescriptions import for_context, smaller_pool
from kvdiag.diagnosis.rule import SEVERITY, unknown
from kvdiag.diagnosis.timeline_queries import (
    NO_POOL,
    assigned_uuids,
    awake_since,
    gap_reason,
    pool_tokens,
    server_bytes,
    server_devices,
    server_uuids,
    serving_devices,
)
from kvdiag.formatting import format_bytes, format_number, format_ratio, signed
from kvdiag.kv.calibration.running_server import served
from kvdiag.model import Device, Evidence, Facts, Finding, KvPool, Prescription, Status, Timeline

ID = "baseline.misconfigured"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the pool with the longest request, and the idle device with the budget of the memory fraction."""
    if not facts.pools:
        return unknown(ID, gap_reason(timeline, facts, "engine") or NO_POOL)
    # Any engine may get the longest request: the smallest pool decides.
    pool = min(facts.pools, key=pool_tokens)
    found = [_pool_problem(pool, facts), _model_problem(pool, facts, limits)]
    own = assigned_uuids(timeline, facts)
    devices, missing = server_devices(serving_devices(timeline), own), None
    if not own and len(devices) > 1:
        missing = f"unknown which of {len(devices)} GPUs the server uses; run kvdiag in its PID namespace"
        devices = ()
    elif not devices or any(device.memory is None for device in devices):
        unread = "device memory was not read while the server was awake; run kvdiag where NVML works"
        missing = gap_reason(timeline, facts, "nvml") or unread
    found += [_device_problem(device, pool, facts, limits) for device in devices]
    if devices and (most := _most_used(timeline, own, facts, limits)) is not None:
        found.append(_below_budget(*most, pool, limits))
    problems = [problem for problem in found if problem is not None]
    evidence = (
        Evidence("capacity", pool.capacity_tokens, "tokens", "engine"),
        Evidence("max_model_len", facts.max_model_len_tokens, "tokens", "engine"),
        Evidence("max_concurrency_at_max_model_len", pool.max_concurrency, "requests", "engine"),
        Evidence("memory_fraction", pool.memory_fraction_ratio, "ratio", "engine"),
        *(part for device in devices for part in _device_evidence(device, pool, facts)),
    )
    if problems:
        status = max((severity for severity, _ in problems), key=SEVERITY.index)
        summary = "; ".join(text for severity, text in problems if severity == status)
        prescription = _prescription(timeline, facts, limits, pool, devices)
        return (Finding(ID, status, summary, evidence, prescription=prescription),)
    longest = _longest_request(pool, facts)
    if missing:
        return unknown(ID, f"{longest}the memory fraction was not checked: {missing}")
    known = {
        "context length": None not in (pool.capacity_tokens, facts.max_model_len_tokens),
        "memory fraction": pool.memory_fraction_ratio is not None,
    }
    checked = ["pool", *(name for name, is_known in known.items() if is_known)]
    matching = " and ".join(filter(None, (", ".join(checked[:-1]), checked[-1])))
    beyond = longest if pool_tokens(pool) < (facts.max_model_len_tokens or 0) else ""
    return (Finding(ID, "ok", f"{beyond}{matching} {'match' if checked[1:] else 'matches'} the device", evidence),)


def _prescription(
    timeline: Timeline, facts: Facts, limits: Limits, pool: KvPool, devices: Iterable[Device]
) -> Prescription | None:
    """What mends the worst of them: the pool that holds no request of the longest length, else the full device."""
    if facts.max_model_len_tokens and _pool_problem(pool, facts) is not None:
        return for_context(timeline, facts, limits, pool=pool, tokens=facts.max_model_len_tokens)
    free = min((device.memory.free_bytes for device in devices if device.memory is not None), default=None)
    if free is None or free >= limits.headroom_bytes:
        return None
    gain = f"{format_bytes(limits.headroom_bytes)} of the device stay free while idle"
    return smaller_pool(timeline, facts, limits, needed_bytes=limits.headroom_bytes - free, gain=gain)


def _longest_request(pool: KvPool, facts: Facts) -> str:
    """Whether the longest request fits, as the beginning of a sentence; some engines refuse those that do not."""
    longest, holds = facts.max_model_len_tokens, pool_tokens(pool)
    if longest is None:
        return ""
    if holds >= longest:
        return "the longest request fits the pool, but "
    return f"the pool holds {holds:,} of the {longest:,} tokens that a request may have; "


def _pool_problem(pool: KvPool, facts: Facts) -> tuple[Status, str] | None:
    longest = facts.max_model_len_tokens
    if longest is None or pool.capacity_tokens is None or pool.capacity_tokens >= longest:
        return None
    return "fault", f"a request may have {longest:,} tokens but the KV pool holds only {pool.capacity_tokens:,}"


def _model_problem(pool: KvPool, facts: Facts, limits: Limits) -> tuple[Status, str] | None:
    """A pool that is not what the model's config gives: missing blocks are requests that do not fit."""
    model = served(facts, pool)
    drift = None if isinstance(model, str) else model.drift(limits.model_drift_ratio)
    if drift is None:
        return None
    predicted, reported = (format_number(one.nominal) for one in (drift.predicted, drift.reported))
    figure = drift.figure.phrase.replace("block", facts.capabilities.unit)
    summary = f"the model's config gives {predicted} {figure}, the engine reports {reported}"
    off = signed(format_ratio(drift.drift_ratio))
    return "suspect", ": ".join((f"{summary} ({off})", *(one.text for one in drift.reasons[:1])))


def _device_problem(device: Device, pool: KvPool, facts: Facts, limits: Limits) -> tuple[Status, str] | None:
    if device.memory is None:
        return None
    memory, where = device.memory, f"GPU {device.index}"
    if memory.free_bytes < limits.headroom_bytes:
        free = format_bytes(memory.free_bytes)
        return "suspect", f"{where}: only {free} free while idle; the next transient allocation may fail"
    budget = budget_bytes(memory, pool)
    if budget is None:
        return None
    server = server_bytes(device, facts.server_pids)
    used = without_driver_bytes(memory) if server is None else server
    over = used - budget - allowance_bytes(device, memory, facts, limits)
    beyond, share = format_bytes(used - budget), f"{format_ratio(pool.memory_fraction_ratio or 0.0)} budget"
    if over > 0 and server is None:
        whose = "unidentified processes; run kvdiag in the server's PID namespace"
        return "unknown", f"{where}: {beyond} used above the {share} by {whose}"
    if over > 0:
        return "suspect", f"{where}: the server uses {beyond} more than its {share}"
    return None


def _most_used(timeline: Timeline, own: frozenset[str], facts: Facts, limits: Limits) -> tuple[Device, int] | None:
    """The server's fullest device when the server used the most of it, and how much; samples a minute apart."""
    listed, due, most = bool(server_uuids(timeline, facts)), awake_since(timeline) or 0.0, None
    before: tuple[Device, ...] | None = None
    known = False
    for sample in timeline.samples:
        if not sample.devices or sample.at_seconds < due:
            continue
        if sample.devices is before:
            # The same object: the server uses what it did.
            due = sample.at_seconds + limits.process_lists_apart_seconds if known else due
            continue
        before, known = sample.devices, False
        for device in server_devices(sample.devices, own):
            held = server_bytes(device, facts.server_pids)
            if held is None and not listed and device.memory is not None:
                held = without_driver_bytes(device.memory)
            if held is not None:
                known = True
                due = sample.at_seconds + limits.process_lists_apart_seconds
                most = (device, held) if most is None or held > most[1] else most
    return most


def _below_budget(device: Device, used: int, pool: KvPool, limits: Limits) -> tuple[Status, str] | None:
    """A server that at no time used what its fraction gives: something else sized the pool.

    Every rank gets the pool of the fullest one, so that the others may hold less.
    """
    budget = None if device.memory is None else budget_bytes(device.memory, pool)
    if budget is None or used >= limits.under_budget_ratio * budget:
        return None
    share = format_ratio(used / budget)
    most = f"the server uses at most {format_bytes(used)} of its {format_bytes(budget)} budget ({share})"
    return "suspect", f"GPU {device.index}: {most}"


def _device_evidence(device: Device, pool: KvPool, facts: Facts) -> tuple[Evidence, ...]:
    if device.memory is None:
        return ()
    gpu, memory = f"gpu_{device.index}", device.memory
    return (
        Evidence(f"{gpu}_free", memory.free_bytes, "bytes", "nvml"),
        Evidence(f"{gpu}_used_by_server", server_bytes(device, facts.server_pids), "bytes", "nvml"),
        Evidence(f"{gpu}_used_by_processes", without_driver_bytes(memory), "bytes", "nvml"),
        Evidence(f"{gpu}_budget", budget_bytes(memory, pool), "bytes", "computed"),
        Evidence(f"{gpu}_driver_reserved", memory.driver_reserved_bytes, "bytes", "nvml"),
    )
