"""baseline.duplicate_model: the idle server holds its weights more than once.

Beside a pool whose size is told, what is left of the server's bytes decides. A server without a pool, as one that keeps
its cache in torch, shows a copy where its memory rises by the weights once more, at one blow, and stays there.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.timeline_queries import (
    first_devices,
    gap_reason,
    readable_bytes,
    server_bytes,
    server_devices,
    server_uuids,
)
from kvdiag.kv.calibration.running_server import all_pools_bytes, bytes_problem
from kvdiag.model import Device, Evidence, Facts, Finding, Status, Timeline

ID = "baseline.duplicate_model"
LEVEL_READINGS = 2
"""As many equal readings say that a level stays; more of them say no more."""


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare what the server holds beyond its pool, before any load of ours, with one copy of its weights."""
    if not first_devices(timeline):
        return unseen(ID, gap_reason(timeline, facts, "nvml") or "no device was read")
    known = server_uuids(timeline, facts)
    there = next((seen for sample in timeline.samples if (seen := server_devices(sample.devices, known))), ())
    own = [one for device in there if (one := _first_with_server(timeline, device.uuid, facts)) is not None]
    pools = all_pools_bytes(facts)
    if facts.weights_bytes is None:
        return unseen(ID, "the size of the weights is not known (the model's files are not visible here)")
    if not facts.pools:
        return _without_pool(timeline, facts, limits)
    if pools is None:
        return unseen(ID, f"the engine does not report its pool's bytes, and {bytes_problem(facts)}")
    if not own or len(own) < len(there):
        return unseen(ID, "the server's own bytes on the device are not visible")
    copies = len(facts.pools)
    ranks = max(len(own) // copies, 1)
    pool_bytes = pools[0] * ranks
    weights = facts.weights_bytes * copies
    processes = sum(process.pid in (facts.server_pids or ()) for device in own for process in device.processes or ())
    allowance = limits.context_bytes * max(processes, 1) + sum(
        int(limits.activation_ratio * device.memory.total_bytes) for device in own if device.memory is not None
    )
    used = sum(server_bytes(device, facts.server_pids) or 0 for device in own)
    beyond = used - pool_bytes - weights
    evidence = (
        number("server_bytes", used, "bytes", "nvml"),
        number("pool_bytes", pool_bytes, "bytes", "engine" if pools[1] == "reported" else pools[1]),
        number("weights_bytes", weights, "bytes", "host: checkpoint files"),
        number("beyond_pool_and_weights", beyond, "bytes", "computed"),
        number("allowance", allowance, "bytes", "computed"),
    )
    extra_copies = (beyond - limits.least_context_bytes) // weights if weights else 0
    if extra_copies >= 1:
        extra = f"{readable_bytes(beyond)} beyond its pool and one copy of its weights ({readable_bytes(weights)})"
        if beyond <= allowance:
            # Context, activations and graphs of a small model weigh more than its weights.
            summary = f"cannot tell: {extra} may be a copy of them as well as ordinary overhead"
            return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
        status: Status = "fault" if weights >= limits.duplicate_certainty_ratio * allowance else "suspect"
        summary = f"the idle server holds {extra}: the weights are there {extra_copies + 1} times"
        return (Finding(id=ID, status=status, summary=summary, evidence=evidence),)
    summary = f"pool, one copy of the weights and {readable_bytes(beyond)} of overhead explain the server's memory"
    return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)


def _without_pool(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Weigh the server's bytes against its weights alone: less than two copies is one, more may be a cache."""
    weights, held = facts.weights_bytes or 0, _held_over_time(timeline, facts)
    if not held or not weights:
        return unseen(ID, "the engine does not report its KV pool")
    most, newest = max(held), held[-1]
    evidence: tuple[Evidence, ...] = (
        number("server_bytes", newest, "bytes", "nvml"),
        number("most_server_bytes", most, "bytes", "nvml"),
        number("weights_bytes", weights, "bytes", "host: checkpoint files"),
        number("copies_that_would_fit_in", round(most / weights, 2), "times", "computed"),
    )
    if most < 2 * weights:
        summary = f"the server holds {readable_bytes(most)}, less than its weights ({readable_bytes(weights)}) twice"
        return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)
    step = _copy_step(held, weights, limits)
    # An engine with a page takes a pool at start, whose size may be that of the weights by chance.
    if step is None or any(sample.engines for sample in timeline.samples):
        summary = (
            f"cannot tell: the engine does not report its KV pool, and the {readable_bytes(most)} that it holds are "
            f"{most / weights:.1f} times its weights: a cache, or a copy"
        )
        return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
    before, after = step
    summary = (
        f"the server held {readable_bytes(before)}, its weights once ({readable_bytes(weights)}), and then "
        f"{readable_bytes(after - before)} more at one blow: they are there twice, or a cache has their size"
    )
    evidence = (
        *evidence,
        number("held_before", before, "bytes", "nvml"),
        number("taken_at_one_blow", after - before, "bytes", "nvml"),
        number("taken_over_weights", round((after - before) / weights, 3), "ratio", "computed"),
    )
    return (Finding(id=ID, status="suspect", summary=summary, evidence=evidence),)


def _copy_step(held: list[int], weights: int, limits: Limits) -> tuple[int, int] | None:
    """The level of one copy and the level after it, where a step of another copy leads from the one to the other."""
    same_bytes = limits.copy_size_ratio * weights
    for level, before, after, later in zip(held, held[1:], held[2:], held[3:], strict=False):
        stays = abs(level - before) <= same_bytes and abs(after - later) <= same_bytes
        once = weights <= before <= weights + limits.context_bytes
        if stays and once and abs(after - before - weights) <= same_bytes:
            return before, after
    return None


def _held_over_time(timeline: Timeline, facts: Facts) -> list[int]:
    """The server's bytes on all its devices in every reading that lists its processes, where they change."""
    held: list[int] = []
    for sample in timeline.samples:
        sizes = [server_bytes(device, facts.server_pids) for device in sample.devices or ()]
        known = [size for size in sizes if size is not None]
        if known and (len(held) < LEVEL_READINGS or set(held[-LEVEL_READINGS:]) != {sum(known)}):
            held.append(sum(known))
    return held


def _first_with_server(timeline: Timeline, uuid: str, facts: Facts) -> Device | None:
    """A device in the first sample that shows the server's bytes on it."""
    for sample in timeline.samples:
        for device in sample.devices or ():
            if device.uuid == uuid and server_bytes(device, facts.server_pids) is not None:
                return device
    return None
