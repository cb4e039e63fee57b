"""imbalance.rank: one of an engine's ranks holds more than the others, and all of them pay for it in KV tokens.

Every rank gets as many blocks as the fullest one has room for (vllm/v1/core/kv_cache_utils.py takes the smallest
number over the workers). What a rank holds beyond the mean is therefore missing in every rank's pool.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import (
    block_bytes,
    gap_reason,
    idle_floors,
    readable_bytes,
    server_bytes,
    server_devices,
    server_uuids,
    whole_number,
)
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Device, Evidence, Facts, Finding, Timeline

ID = "imbalance.rank"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare what the server holds of each of its GPUs while it is idle."""
    own = server_uuids(timeline, facts)
    floors = idle_floors(timeline, facts, limits)
    devices = next((floor.devices for floor in reversed(floors) if floor.devices), None)
    if not own or devices is None:
        return unseen(ID, gap_reason(timeline, facts, "nvml") or "which GPUs are the server's is not visible")
    ranks = [(device, server_bytes(device, facts.server_pids)) for device in server_devices(devices, own)]
    held = [(device, size) for device, size in ranks if size is not None]
    if len(held) < len(own):
        return unseen(ID, "the bytes of one of the server's ranks are not told")
    if len(held) == 1:
        return (Finding(id=ID, status="ok", summary="one GPU: there is nothing to balance"),)
    if len(facts.pools) > 1:
        return unseen(ID, f"{len(facts.pools)} engines share the GPUs, and which is on which is not told")
    return (_compared(held, facts, limits),)


def _compared(held: list[tuple[Device, int]], facts: Facts, limits: Limits) -> Finding:
    fullest, most = max(held, key=lambda rank: rank[1])
    lost_bytes = most - sum(size for _, size in held) // len(held)
    block = block_bytes(facts)
    tokens = lost_bytes // block * facts.pools[0].block_tokens if block and facts.pools else None
    evidence: tuple[Evidence, ...] = (
        *(number(f"gpu_{device.index}_held", size, "bytes", "nvml") for device, size in held),
        number("beyond_the_mean", lost_bytes, "bytes", "computed"),
        number("kv_tokens_lost", tokens, "tokens", "computed"),
    )
    total = fullest.memory.total_bytes if fullest.memory is not None else 0
    if lost_bytes <= limits.imbalance_ratio * total:
        summary = f"{len(held)} ranks hold the same, to within {readable_bytes(lost_bytes)}"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    price = "" if tokens is None else f", which costs the pool {whole_number(tokens)} tokens"
    summary = f"the rank on GPU {fullest.index} holds {readable_bytes(lost_bytes)} more than the mean{price}"
    return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
