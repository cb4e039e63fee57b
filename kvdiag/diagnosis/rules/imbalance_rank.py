"""imbalance.rank: one of an engine's ranks holds more than the others, and all of them pay for it in KV tokens.

Every rank gets as many blocks as the fullest one has room for (vllm/v1/core/kv_cache_utils.py takes the smallest
number over the workers). What a rank holds beyond the others is therefore missing in every rank's pool. Contexts that
other ranks have on its GPU are the exact sign; engines that share the traffic tell it by pools of unequal size.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.diagnosis.timeline_queries import (
    assigned_uuids,
    block_bytes,
    gap_reason,
    idle_floors,
    newest_devices,
    readable_bytes,
    server_bytes,
    server_devices,
    whole_number,
)
from kvdiag.model import Device, Evidence, Facts, Finding, KvPool, Timeline

ID = "imbalance.rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A GPU of the server: what its processes hold there, and how much each of them."""

    device: Device
    held_bytes: int
    processes_bytes: tuple[int, ...]
    pids: frozenset[int] = frozenset()


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare what the server holds of each of its GPUs while it is idle, and the pools of its engines."""
    if (uneven := _uneven_pools(timeline, facts, limits)) is not None:
        return (uneven,)
    own = assigned_uuids(timeline, facts)
    floors = idle_floors(timeline, facts, limits)
    devices = next((floor.devices for floor in reversed(floors) if floor.devices), None)
    if not own or devices is None:
        unknown = (
            "no reading of the GPUs while the server was idle" if own else "which GPUs are the server's is not visible"
        )
        return unseen(ID, gap_reason(timeline, facts, "nvml") or unknown)
    ranks = [rank for device in server_devices(devices, own) if (rank := _rank(device, facts)) is not None]
    if len(ranks) < len(own):
        return unseen(ID, "the bytes of one of the server's ranks are not told")
    if len(ranks) == 1:
        return (Finding(id=ID, status="ok", summary="one GPU: there is nothing to balance"),)
    if len(facts.pools) > 1:
        return unseen(ID, f"{len(facts.pools)} engines share the GPUs, and which is on which is not told")
    return (_compared(ranks, facts, limits),)


def _uneven_pools(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """Engines of one server have one model and one fraction: the one with the smaller pool lacks what a rank holds."""
    sizes = [(_pool_tokens(pool), pool) for pool in facts.pools]
    if not sizes:
        return None
    (least, small), (most, large) = min(sizes, key=_size), max(sizes, key=_size)
    if most - least <= limits.uneven_pools_ratio * most:
        return None
    held, usual = f"{whole_number(least)} tokens", whole_number(most)
    alike = _alike(timeline, facts)
    why = "holds more than the others" if alike else "holds more than the others, or has a smaller GPU"
    return Finding(
        id=ID,
        status="fault" if alike and most - least > limits.uneven_pools_fault_ratio * most else "suspect",
        summary=f"engine {small.engine} has a pool of {held}, engine {large.engine} one of {usual}: a rank of the "
        f"first {why}",
        evidence=(
            *(number(f"engine_{pool.engine}_pool", size, "tokens", "engine") for size, pool in sizes),
            number("kv_tokens_lost", most - least, "tokens", "computed"),
            number("share_of_the_larger", least / most, "ratio", "computed"),
        ),
    )


def _alike(timeline: Timeline, facts: Facts) -> bool:
    """Whether all of the server's GPUs are known, and of one size."""
    own = assigned_uuids(timeline, facts)
    devices = server_devices(newest_devices(timeline), own) if own else ()
    sizes = {None if device.memory is None else device.memory.total_bytes for device in devices}
    return len(devices) == len(own) > 1 and len(sizes) == 1 and None not in sizes


def _size(one: tuple[int, KvPool]) -> int:
    return one[0]


def _pool_tokens(pool: KvPool) -> int:
    return pool.usable_blocks * pool.block_tokens if pool.capacity_tokens is None else pool.capacity_tokens


def _rank(device: Device, facts: Facts) -> _Rank | None:
    held = server_bytes(device, facts.server_pids)
    if (
        held is None
        and device.processes is None
        and device.memory is not None
        and device.uuid in (facts.device_uuids or ())
    ):
        # What was assigned to the server alone is its own, the driver's share apart.
        whole = device.memory.used_bytes - (device.memory.driver_reserved_bytes or 0)
        return _Rank(device=device, held_bytes=whole, processes_bytes=())
    if held is None:
        return None
    own = [one for one in device.processes or () if one.pid in (facts.server_pids or ())]
    return _Rank(
        device=device,
        held_bytes=held,
        processes_bytes=tuple(sorted((one.used_bytes or 0 for one in own), reverse=True)),
        pids=frozenset(one.pid for one in own),
    )


def _compared(ranks: list[_Rank], facts: Facts, limits: Limits) -> Finding:
    fullest = max(ranks, key=lambda rank: rank.held_bytes)
    # Of two the higher: where one rank alone holds less, the others are what is usual.
    usual = median_high([rank.held_bytes for rank in ranks if rank is not fullest])
    lost_bytes = fullest.held_bytes - usual
    contexts = fullest.processes_bytes[1:]
    block = block_bytes(facts)
    tokens = lost_bytes // block * facts.pools[0].block_tokens if block and facts.pools else None
    evidence: tuple[Evidence, ...] = (
        *(number(f"gpu_{rank.device.index}_held", rank.held_bytes, "bytes", "nvml") for rank in ranks),
        number("beyond_the_others", lost_bytes, "bytes", "computed"),
        number("held_by_further_processes", sum(contexts), "bytes", "nvml"),
        number("kv_tokens_lost", tokens, "tokens", "computed"),
    )
    price = "" if tokens is None else f", which costs the pool {whole_number(tokens)} tokens"
    gpu = fullest.device.index
    if _crowded(fullest, ranks, limits):
        summary = (
            f"GPU {gpu} has {len(contexts)} more of the server's processes than its rank, with "
            f"{readable_bytes(sum(contexts))}: contexts of other ranks{price}"
        )
        # Processes that have GPUs of their own are ranks: nothing of them belongs here.
        ranks_too = len(fullest.pids & frozenset().union(*(one.pids for one in ranks if one is not fullest)))
        certain = ranks_too >= len(contexts) and sum(contexts) > limits.standing_out_bytes
        return Finding(id=ID, status="fault" if certain else "suspect", summary=summary, evidence=evidence)
    if lost_bytes <= _even_bytes(fullest, ranks, limits):
        summary = f"{len(ranks)} ranks hold the same, to within {readable_bytes(lost_bytes)}"
        return Finding(id=ID, status="ok", summary=summary, evidence=evidence)
    unseen_one = "" if fullest.processes_bytes else "; whose processes hold it is not visible"
    summary = f"the rank on GPU {gpu} holds {readable_bytes(lost_bytes)} more than the others{price}{unseen_one}"
    certain = _agree(fullest, ranks, limits) and lost_bytes > limits.imbalance_fault_ratio * _total_bytes(fullest)
    return Finding(id=ID, status="fault" if certain else "suspect", summary=summary, evidence=evidence)


def _even_bytes(fullest: _Rank, ranks: list[_Rank], limits: Limits) -> float:
    """What a rank may hold beyond the others: less where those agree with one another, so that it stands out."""
    usual = max(limits.imbalance_ratio * _total_bytes(fullest), limits.foreign_suspect_bytes)
    return min(usual, limits.standing_out_bytes) if _agree(fullest, ranks, limits) else usual


def _agree(fullest: _Rank, ranks: list[_Rank], limits: Limits) -> bool:
    """Whether enough other ranks hold the same: those of a pipeline's stages do not."""
    others = [rank.held_bytes for rank in ranks if rank is not fullest]
    return len(others) >= limits.agreeing_ranks and max(others) - min(others) < limits.foreign_suspect_bytes


def _total_bytes(rank: _Rank) -> int:
    return rank.device.memory.total_bytes if rank.device.memory is not None else 0


def _crowded(fullest: _Rank, ranks: list[_Rank], limits: Limits) -> bool:
    """Whether a GPU has further processes of the server beside its rank's, which the other GPUs have not.

    A context that is smaller than any is none; two engines on one GPU are no imbalance where every GPU has two.
    """
    beside = sum(fullest.processes_bytes[1:])
    fewest = min(len(rank.processes_bytes) for rank in ranks)
    more = fullest.held_bytes - min(rank.held_bytes for rank in ranks)
    return len(fullest.processes_bytes) > fewest and min(beside, more) >= limits.foreign_suspect_bytes
