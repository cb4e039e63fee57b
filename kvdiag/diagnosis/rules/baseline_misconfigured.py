"""baseline.misconfigured: memory fraction, pool size or context length that do not fit the device."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import first_devices, gap_reason, readable_bytes, server_devices, server_uuids
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.kv.served import served
from kvdiag.model import Device, Facts, Finding, KvPool, Status, Timeline

ID = "baseline.misconfigured"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the pool with the longest request, and the idle device with the budget the fraction gives."""
    pool = next(iter(facts.pools), None)
    if pool is None:
        return unseen(ID, gap_reason(timeline, facts, "vllm") or "the engine does not report its KV pool")
    # Any engine may get the longest request: the smallest pool decides.
    pool = min(facts.pools, key=lambda pool: pool.capacity_tokens or pool.usable_blocks * pool.block_tokens)
    found = [_pool_problem(pool, facts), _model_problem(pool, facts, limits)]
    own = server_uuids(timeline, facts)
    devices = server_devices(first_devices(timeline), own)
    if devices and not own and len(devices) > 1:
        missing, devices = f"which of {len(devices)} GPUs are the server's is not visible", ()
    elif not devices or any(device.memory is None for device in devices):
        missing = gap_reason(timeline, facts, "nvml") or "no device memory was read"
    else:
        missing = ""
    found += [_device_problem(device, pool, facts, limits) for device in devices]
    problems = [problem for problem in found if problem is not None]
    evidence = (
        number("capacity", pool.capacity_tokens, "tokens", "vllm"),
        number("max_model_len", facts.max_model_len_tokens, "tokens", "vllm"),
        number("max_concurrency_at_max_model_len", pool.max_concurrency, "requests", "vllm"),
        number("memory_fraction", pool.memory_fraction_ratio, "ratio", "vllm"),
        *(
            number(f"gpu_{device.index}_free", device.memory.free_bytes, "bytes", "nvml")
            for device in devices
            if device.memory is not None
        ),
    )
    if problems:
        status: Status = "fault" if any(severity == "fault" for severity, _ in problems) else "suspect"
        summary = "; ".join(text for _, text in problems)
        return (Finding(id=ID, status=status, summary=summary, evidence=evidence),)
    if missing:
        fits = "the pool fits the longest request, but whether the memory fraction fits the device is not visible"
        return unseen(ID, f"{fits}: {missing}")
    return (Finding(id=ID, status="ok", summary="pool, context length and device fit together", evidence=evidence),)


def _pool_problem(pool: KvPool, facts: Facts) -> tuple[Status, str] | None:
    longest = facts.max_model_len_tokens
    if longest is None or pool.capacity_tokens is None or pool.capacity_tokens >= longest:
        return None
    return (
        "fault",
        f"the pool holds {pool.capacity_tokens:,} tokens, one request may ask for {longest:,}: it can never be served",
    )


def _model_problem(pool: KvPool, facts: Facts, limits: Limits) -> tuple[Status, str] | None:
    """A pool that is not what the model's config makes of it: blocks that are missing are requests that do not fit."""
    model = served(facts, pool)
    drift = None if isinstance(model, str) else model.drift(limits.model_drift_ratio)
    if drift is None:
        return None
    predicted, reported = (_count(one.nominal) for one in (drift.predicted, drift.reported))
    told = f"its model's config gives {predicted} {drift.title}, the engine reports {reported}"
    told += f" ({drift.drift_ratio:+.1%})"
    return "suspect", ": ".join((told, *drift.reasons[:1]))


def _count(value: float) -> str:
    return f"{value:,.2f}" if value % 1 else f"{value:,.0f}"


def _device_problem(device: Device, pool: KvPool, facts: Facts, limits: Limits) -> tuple[Status, str] | None:
    if device.memory is None:
        return None
    memory, where = device.memory, f"GPU {device.index}"
    if memory.free_bytes < limits.headroom_bytes:
        return (
            "suspect",
            f"{where}: only {readable_bytes(memory.free_bytes)} free while idle: the next transient allocation fails",
        )
    # The fraction says nothing about the device when the pool was sized by hand.
    if pool.memory_fraction_ratio is None or pool.pool_bytes is not None:
        return None
    budget = pool.memory_fraction_ratio * memory.total_bytes
    others = sum(
        process.used_bytes or 0
        for process in device.processes or ()
        if facts.server_pids is not None and process.pid not in facts.server_pids
    )
    used = memory.used_bytes - others
    if used > budget + limits.over_budget_ratio * memory.total_bytes:
        over = readable_bytes(used - budget)
        return "suspect", f"{where}: {over} used beyond the {pool.memory_fraction_ratio:.0%} the server was given"
    if used < limits.under_budget_ratio * budget:
        return (
            "suspect",
            f"{where}: {readable_bytes(used)} used of the {readable_bytes(budget)} that the server was given",
        )
    return None
