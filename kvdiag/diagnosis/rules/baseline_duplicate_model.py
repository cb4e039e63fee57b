"""baseline.duplicate_model: the idle server holds its weights more than once."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import (
    first_devices,
    gap_reason,
    readable_bytes,
    server_bytes,
    server_devices,
    server_uuids,
)
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.kv.served import all_pools_bytes, bytes_problem
from kvdiag.model import Facts, Finding, Status, Timeline

ID = "baseline.duplicate_model"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare what the server holds beyond its pool, before any load of ours, with one copy of its weights."""
    if not first_devices(timeline):
        return unseen(ID, gap_reason(timeline, facts, "nvml") or "no device was read")
    known = server_uuids(timeline, facts)
    own = next((seen for sample in timeline.samples if (seen := server_devices(sample.devices, known))), ())
    held = [_server_bytes(timeline, device.uuid, facts) for device in own]
    pools = all_pools_bytes(facts)
    if facts.weights_bytes is None:
        return unseen(ID, "the size of the weights is not known (the model's files are not visible here)")
    if not facts.pools:
        return unseen(ID, "the engine does not report its KV pool")
    if pools is None:
        return unseen(ID, f"the engine does not report its pool's bytes, and {bytes_problem(facts)}")
    if not held or None in held:
        return unseen(ID, "the server's own bytes on the device are not visible")
    copies = len(facts.pools)
    ranks = max(len(own) // copies, 1)
    pool_bytes = pools[0] * ranks
    weights = facts.weights_bytes * copies
    processes = sum(process.pid in (facts.server_pids or ()) for device in own for process in device.processes or ())
    allowance = limits.context_bytes * max(processes, 1) + sum(
        int(limits.activation_ratio * device.memory.total_bytes) for device in own if device.memory is not None
    )
    used = sum(size for size in held if size is not None)
    beyond = used - pool_bytes - weights
    evidence = (
        number("server_bytes", used, "bytes", "nvml"),
        number("pool_bytes", pool_bytes, "bytes", "vllm" if pools[1] == "reported" else pools[1]),
        number("weights_bytes", weights, "bytes", "host: checkpoint files"),
        number("beyond_pool_and_weights", beyond, "bytes", "computed"),
        number("allowance", allowance, "bytes", "computed"),
    )
    extra_copies = (beyond - limits.least_context_bytes) // weights if weights else 0
    if extra_copies >= 1:
        extra = f"{readable_bytes(beyond)} beyond its pool and one copy of its weights ({readable_bytes(weights)})"
        if weights < allowance and beyond <= allowance:
            # Context, activations and graphs of a small model weigh more than its weights.
            summary = f"cannot tell: {extra} may be a copy of them as well as ordinary overhead"
            return (Finding(id=ID, status="unknown", summary=summary, evidence=evidence),)
        status: Status = "fault" if weights >= limits.duplicate_certainty_ratio * allowance else "suspect"
        summary = f"the idle server holds {extra}: the weights are there {extra_copies + 1} times"
        return (Finding(id=ID, status=status, summary=summary, evidence=evidence),)
    summary = f"pool, one copy of the weights and {readable_bytes(beyond)} of overhead explain the server's memory"
    return (Finding(id=ID, status="ok", summary=summary, evidence=evidence),)


def _server_bytes(timeline: Timeline, uuid: str, facts: Facts) -> int | None:
    """The server's bytes on a device in the first sample that shows them."""
    for sample in timeline.samples:
        for device in sample.devices or ():
            if device.uuid == uuid and (found := server_bytes(device, facts.server_pids)) is not None:
                return found
    return None
