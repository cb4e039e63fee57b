"""baseline.duplicate_model: the idle server holds its weights more than once.

With a pool of known size, the rest of the server's bytes decides: a second copy is there where it exceeds one copy
plus a CUDA context, and is certain where the weights are much larger than all ordinary overhead. The first sample is
from before any load, the newest shows what is still there: the lower of the two counts. A server without a
pool (one that keeps its cache in torch) shows a copy where its memory rises once by the size of the weights, in one
step, and stays there.
"""

from collections.abc import Iterable

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions import memory_won_back
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import (
    NO_POOL,
    first_devices,
    gap_reason,
    server_bytes,
    server_devices,
    server_uuids,
)
from kvdiag.formatting import format_bytes, format_number
from kvdiag.kv.calibration.running_server import all_pools_bytes, bytes_problem
from kvdiag.model import Device, Evidence, Facts, Finding, Sample, Status, Timeline

ID = "baseline.duplicate_model"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the server's bytes beyond its pool, before any load of ours, with one copy of its weights."""
    if not first_devices(timeline):
        return unknown(ID, gap_reason(timeline, facts, "nvml") or "no device was read; run kvdiag where NVML works")
    known = server_uuids(timeline, facts)
    there = next((found for sample in timeline.samples if (found := server_devices(sample.devices, known))), ())
    own = [one for device in there if (one := _least_with_server(timeline, device.uuid, facts)) is not None]
    pools = all_pools_bytes(facts)
    if facts.weights_bytes is None:
        return unknown(ID, "the size of the weights is not known; run kvdiag where the model's files are")
    if not facts.pools:
        return _without_pool(timeline, facts, limits)
    if pools is None:
        return unknown(ID, f"the engine does not report the bytes of its pool, and {bytes_problem(facts)}")
    if not own or len(own) < len(there):
        return unknown(ID, "the server's bytes on the device are not reported; run kvdiag in its PID namespace")
    copies = len(facts.pools)
    ranks = max(len(own) // copies, 1)
    pool_bytes = pools[0] * ranks
    weights = facts.weights_bytes * copies
    processes = sum(len(facts.own_processes(device)) for device in own)
    allowance = limits.context_bytes * max(processes, 1) + sum(
        int(limits.activation_ratio * device.memory.total_bytes) for device in own if device.memory is not None
    )
    used = sum(server_bytes(device, facts.server_pids) or 0 for device in own)
    beyond = used - pool_bytes - weights
    evidence = (
        Evidence("server_bytes", used, "bytes", "nvml"),
        Evidence("pool_bytes", pool_bytes, "bytes", "engine" if pools[1] == "reported" else pools[1]),
        Evidence("weights_bytes", weights, "bytes", "host: checkpoint files"),
        Evidence("unexplained", beyond, "bytes", "computed"),
        Evidence("allowance", allowance, "bytes", "computed"),
    )
    extra_copies = (beyond - limits.min_context_bytes) // weights if weights else 0
    if extra_copies >= 1:
        extra = f"{format_bytes(beyond)} beyond its pool and one copy of its weights ({format_bytes(weights)})"
        if extra_copies > limits.max_extra_copies:
            what = f"more than {limits.max_extra_copies + 1} copies take; check that it serves these files"
            return (Finding(ID, "unknown", f"the idle server uses {extra}, {what}", evidence),)
        if beyond <= allowance:
            # Context, activations and graphs of a small model weigh more than its weights.
            either = "a second copy, or ordinary overhead; look for two 'Model loading took' lines in its log"
            return (Finding(ID, "unknown", f"the idle server uses {extra}: {either}", evidence),)
        status: Status = "fault" if weights >= limits.duplicate_certainty_ratio * allowance else "suspect"
        summary = f"the idle server uses {extra}: the weights are loaded {extra_copies + 1} times"
        change = "load the model once"
        cost = "a restart of the server, without a second engine, a drafter of the same size or a reload in place"
        fix = memory_won_back(facts, change=change, cost=cost, size_bytes=extra_copies * weights // max(len(own), 1))
        return (Finding(ID, status, summary, evidence, prescription=fix),)
    rest = f"one copy of the weights and {format_bytes(beyond)} of overhead"
    summary = f"at its lowest, the server's memory was its pool, {rest}"
    if beyond > allowance:
        summary += f" (usually at most {format_bytes(allowance)}): more than usual, but too little for a second copy"
    return (Finding(ID, "ok", summary, evidence),)


def _without_pool(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the server's bytes with its weights alone: less than two copies is one, more may be a cache."""
    weights, held = facts.weights_bytes or 0, _held_over_time(timeline, facts)
    if not held or not weights:
        return unknown(ID, NO_POOL)
    most, newest = max(held), held[-1]
    evidence: tuple[Evidence, ...] = (
        Evidence("server_bytes", newest, "bytes", "nvml"),
        Evidence("max_server_bytes", most, "bytes", "nvml"),
        Evidence("weights_bytes", weights, "bytes", "host: checkpoint files"),
        Evidence("ratio_to_weights", round(most / weights, 2), "times", "computed"),
    )
    if most - weights < weights:
        summary = f"the server uses {format_bytes(most)}, less than twice its weights ({format_bytes(weights)})"
        return (Finding(ID, "ok", summary, evidence),)
    step = _copy_step(held, weights, limits)
    # An engine with metrics takes a pool at start, whose size may equal that of the weights by chance.
    if step is None or any(sample.engines for sample in timeline.samples):
        summary = (
            f"the engine does not report its KV pool, and uses {format_bytes(most)}, {format_number(most / weights)} "
            "times its weights: a cache, or a second copy; look for two 'Model loading took' lines in its log"
        )
        return (Finding(ID, "unknown", summary, evidence),)
    before, after = step
    summary = (
        f"the server used {format_bytes(before)}, enough for one copy of its weights ({format_bytes(weights)}), then "
        f"{format_bytes(after - before)} more in one step: a second copy, or a cache of the same size"
    )
    evidence += (
        Evidence("before_step", before, "bytes", "nvml"),
        Evidence("step", after - before, "bytes", "nvml"),
        Evidence("step_to_weights", round((after - before) / weights, 3), "ratio", "computed"),
    )
    return (Finding(ID, "suspect", summary, evidence),)


def _copy_step(held: list[int], weights: int, limits: Limits) -> tuple[int, int] | None:
    """The level of one copy and the level after it, where one step of another copy leads from one to the other."""
    same_bytes = limits.copy_size_ratio * weights
    for level, before, after, later in zip(held, held[1:], held[2:], held[3:], strict=False):
        stays = abs(level - before) <= same_bytes and abs(after - later) <= same_bytes
        once = weights <= before <= weights + limits.context_bytes
        if stays and once and abs(after - before - weights) <= same_bytes:
            return before, after
    return None


def _held_over_time(timeline: Timeline, facts: Facts) -> list[int]:
    """The server's bytes on all its devices in every sample that lists its processes."""
    found: list[int] = []
    devices: tuple[Device, ...] | None = None
    known: list[int] = []
    for sample in timeline.samples:
        # Values that stay the same for hours are often one object.
        if sample.devices is not devices:
            devices = sample.devices
            sizes = (server_bytes(device, facts.server_pids) for device in devices or ())
            known = [size for size in sizes if size is not None]
        if known:
            found.append(sum(known))
    return found


def _least_with_server(timeline: Timeline, uuid: str, facts: Facts) -> Device | None:
    """The first or the newest sample of a device that lists the server, whichever has fewer of its bytes."""

    def first(samples: Iterable[Sample]) -> list[Device]:
        devices: tuple[Device, ...] | None = None
        for sample in samples:
            if sample.devices is devices:
                continue
            devices = sample.devices
            for device in devices or ():
                if device.uuid == uuid and server_bytes(device, facts.server_pids) is not None:
                    return [device]
        return []

    both = (*first(timeline.samples), *first(reversed(timeline.samples)))
    return min(both, key=lambda one: server_bytes(one, facts.server_pids) or 0, default=None)
