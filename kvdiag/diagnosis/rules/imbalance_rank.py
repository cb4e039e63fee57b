"""imbalance.rank: one of an engine's ranks uses more memory than the others, which costs all of them KV tokens.

Every rank gets as many blocks as the fullest one has room for (vllm/v1/core/kv_cache_utils.py takes the minimum over
the workers), so what one rank uses beyond the others is missing in every rank's pool. Decided in this order: engines
of one server with pools of unequal size; further processes of the server on the fullest GPU (contexts of other ranks,
the exact sign); the fullest rank against the median of the others, more strictly where those agree. The ranks of a
server that was never idle run the same steps, so their medians over the newer half of the samples are compared.
"""

import math
from dataclasses import dataclass
from statistics import median_high

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions import memory_won_back
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import (
    assigned_uuids,
    block_bytes,
    gap_reason,
    idle_floors,
    newest_devices,
    pool_tokens,
    server_bytes,
    server_devices,
)
from kvdiag.formatting import format_bytes, format_count, plural
from kvdiag.model import (
    MAX_COUNT,
    Device,
    Evidence,
    Facts,
    Finding,
    ImbalanceFigures,
    Prescription,
    Process,
    Sample,
    Timeline,
)

ID = "imbalance.rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A GPU of the server: the bytes used there, and its processes, the largest first."""

    device: Device
    held_bytes: int
    processes: tuple[Process, ...]


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare the server's bytes on each of its GPUs while it is idle, and the pools of its engines."""
    if (uneven := _uneven_pools(timeline, facts, limits)) is not None:
        return (uneven,)
    own = assigned_uuids(timeline, facts)
    if len(own) == 1 and server_devices(newest_devices(timeline), own):
        return (Finding(ID, "ok", "one GPU visible: nothing to balance"),)
    floors = idle_floors(timeline, facts, limits)
    readings = [floor.devices for floor in reversed(floors) if floor.devices]
    if own and not readings and (busy := _busy(timeline, own, facts, limits)) is not None and not facts.pools[1:]:
        return (_compared(busy, facts, limits),)
    if not own or not readings:
        idle = "the GPUs were not read while the server was idle; pause traffic for a moment"
        whose = "the server's GPUs are not known; run kvdiag in its PID namespace"
        return unknown(ID, gap_reason(timeline, facts, "nvml") or (idle if own else whose))
    # A short interval may have no process lists, which are read less often: the newest one that has them decides.
    every = ([_rank(device, facts) for device in server_devices(devices, own)] for devices in readings)
    ranks = next((known for each in every if len(known := [one for one in each if one]) >= len(own)), None)
    if ranks is None:
        return unknown(ID, "the memory of one of the server's ranks is not reported; run kvdiag in its PID namespace")
    if len(facts.pools) > 1:
        which = f"which GPU belongs to which of the {len(facts.pools)} engines is not known"
        return unknown(ID, f"{which}; ranks can be compared only where a server runs one engine")
    return (_compared(ranks, facts, limits),)


def _busy(timeline: Timeline, own: frozenset[str], facts: Facts, limits: Limits) -> list[_Rank] | None:
    """Each rank with the median of what it used while all of them used something; `None` with too few samples."""
    every: list[tuple[Sample, list[int]]] = []
    due, samples = -math.inf, timeline.samples
    is_long = bool(samples) and samples[-1].at_seconds - samples[0].at_seconds > limits.metrics_window_seconds
    # The median of a day needs no sample a second.
    apart_seconds = limits.growth.reading_seconds if is_long else 0.0
    for sample in samples:
        if not sample.devices or sample.at_seconds < due:
            continue
        held = _held_by_rank(sample, own, facts)
        if held is not None and len(held) >= max(len(own), 2):
            every.append((sample, held))
            due = sample.at_seconds + apart_seconds
    newer = every[len(every) // 2 :]
    if len(newer) < limits.busy_rank_samples:
        return None
    last = server_devices(newer[-1][0].devices, own)
    usual = (median_high(held[place] for _, held in newer) for place in range(len(last)))
    return [_as_rank(device, size, facts) for device, size in zip(last, usual, strict=True)]


def _held_by_rank(sample: Sample, own: frozenset[str], facts: Facts) -> list[int] | None:
    """The bytes of each rank in a sample; `None` where one of them uses nothing, or is not known."""
    found = []
    for device in server_devices(sample.devices, own):
        held = _held_bytes(device, facts)
        if not held:
            return None
        found.append(held)
    return found


def _uneven_pools(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """Engines of one server share model and fraction: a smaller pool lacks what one of its ranks uses."""
    sizes = [(pool_tokens(pool), pool) for pool in facts.pools]
    if not sizes:
        return None
    (least, small), (most, large) = (extreme(sizes, key=lambda one: one[0]) for extreme in (min, max))
    if most - least <= limits.uneven_pools_ratio * most:
        return None
    own = assigned_uuids(timeline, facts)
    devices = server_devices(newest_devices(timeline), own) if own else ()
    totals = {None if device.memory is None else device.memory.total_bytes for device in devices}
    alike = len(devices) == len(own) > 1 and len(totals) == 1 and None not in totals
    why = "" if alike else ", or has a smaller GPU"
    certain = alike and most - least > limits.uneven_pools_fault_ratio * most
    summary = (
        f"engine {small.engine} has a pool of {format_count(least)} tokens, engine {large.engine} one of "
        f"{format_count(most)}: a rank of engine {small.engine} uses more than the others{why}"
    )
    evidence = (
        *(Evidence(f"engine_{pool.engine}_pool", size, "tokens", "engine") for size, pool in sizes),
        Evidence("kv_tokens_lost", most - least, "tokens", "computed"),
        Evidence("pool_ratio", least / most, "ratio", "computed"),
    )
    figures = ImbalanceFigures(lost_tokens=most - least)
    return Finding(ID, "fault" if certain else "suspect", summary, evidence, imbalance=figures)


def _rank(device: Device, facts: Facts) -> _Rank | None:
    held = _held_bytes(device, facts)
    return None if held is None else _as_rank(device, held, facts)


def _as_rank(device: Device, held_bytes: int, facts: Facts) -> _Rank:
    own = sorted(facts.own_processes(device), key=lambda one: one.used_bytes or 0, reverse=True)
    return _Rank(device=device, held_bytes=held_bytes, processes=tuple(own))


def _held_bytes(device: Device, facts: Facts) -> int | None:
    if device.processes is None and device.memory is not None and device.uuid in (facts.device_uuids or ()):
        # All of a device that is assigned to the server alone is its own, except the driver's share.
        return device.memory.used_bytes - (device.memory.driver_reserved_bytes or 0)
    return server_bytes(device, facts.server_pids)


def _compared(ranks: list[_Rank], facts: Facts, limits: Limits) -> Finding:
    fullest = max(ranks, key=lambda rank: rank.held_bytes)
    # Of two the higher: where one rank alone uses less, the others are the norm.
    others = [rank.held_bytes for rank in ranks if rank is not fullest]
    usual = median_high(others)
    lost_bytes = fullest.held_bytes - usual
    contexts = [one.used_bytes for one in fullest.processes[1:] if one.used_bytes is not None]
    block = block_bytes(facts)
    tokens = min(lost_bytes // block * facts.pools[0].block_tokens, MAX_COUNT) if block and facts.pools else None
    figures = ImbalanceFigures(excess_bytes=lost_bytes, lost_tokens=tokens)
    evidence: tuple[Evidence, ...] = (
        *(Evidence(f"gpu_{rank.device.index}_held", rank.held_bytes, "bytes", "nvml") for rank in ranks),
        Evidence("excess", lost_bytes, "bytes", "computed"),
        Evidence("extra_process_bytes", sum(contexts), "bytes", "nvml"),
        Evidence("kv_tokens_lost", tokens, "tokens", "computed"),
    )
    price = "" if tokens is None else f", which costs the pool {format_count(tokens)} tokens"
    gpu = fullest.device.index
    # Bytes below the smallest CUDA context do not count; two engines on every GPU are no imbalance.
    further = len(fullest.processes) > min(len(rank.processes) for rank in ranks)
    more_bytes = min(sum(contexts), fullest.held_bytes - min(rank.held_bytes for rank in ranks))
    if further and more_bytes >= limits.foreign_suspect_bytes:
        summary = (
            f"GPU {gpu} runs {plural(len(contexts), 'further process', 'further processes')} of the server with "
            f"{format_bytes(sum(contexts))}: CUDA contexts of other ranks{price}"
        )
        # Processes that have GPUs of their own are ranks: they should use nothing here.
        elsewhere = {one.pid for rank in ranks if rank is not fullest for one in rank.processes}
        ranks_too = len(elsewhere & {one.pid for one in fullest.processes})
        certain = ranks_too >= len(contexts) and sum(contexts) > limits.standing_out_bytes
        fix = _balanced(facts, lost_bytes, tokens, "start each rank with its own GPU alone visible")
        return Finding(ID, "fault" if certain else "suspect", summary, evidence, imbalance=figures, prescription=fix)
    even_bytes = max(limits.imbalance_ratio * _total_bytes(fullest), limits.foreign_suspect_bytes)
    # Enough other ranks use the same: the stages of a pipeline do not.
    spread_bytes = max(limits.foreign_suspect_bytes, limits.agreeing_ratio * lost_bytes)
    agree = len(others) >= limits.agreeing_ranks and max(others) - min(others) < spread_bytes
    if lost_bytes <= (min(even_bytes, limits.standing_out_bytes) if agree else even_bytes):
        summary = f"no rank stands out: the fullest is {format_bytes(lost_bytes)} above the median of the others"
        return Finding(ID, "ok", summary, evidence, imbalance=figures)
    hidden = "" if fullest.processes else "; its processes are not visible here"
    summary = f"the rank on GPU {gpu} uses {format_bytes(lost_bytes)} more than the others{price}{hidden}"
    certain = agree and lost_bytes > limits.imbalance_fault_ratio * _total_bytes(fullest)
    fix = _balanced(facts, lost_bytes, tokens, "move what the fullest rank alone holds to another GPU")
    return Finding(ID, "fault" if certain else "suspect", summary, evidence, imbalance=figures, prescription=fix)


def _balanced(facts: Facts, excess_bytes: int, tokens: int | None, change: str) -> Prescription:
    """What balanced ranks are worth on every one of them; how stages are divided only where they are reported."""
    partition = typed(facts.engine_name, "stage_partition")
    if facts.pipeline_parallel in (None, 1) or partition is None:
        cost = "a restart of the server"
        return memory_won_back(facts, change=change, cost=cost, size_bytes=excess_bytes, tokens=tokens)
    how = "the startup log has the layers and weights of each"
    return Prescription(missing=(f"{partition}: what the layers of each stage take is not reported; {how}",))


def _total_bytes(rank: _Rank) -> int:
    return rank.device.memory.total_bytes if rank.device.memory is not None else 0
