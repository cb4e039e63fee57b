"""baseline.foreign_memory: bytes on the server's devices that are not its own: a co-tenant, an orphan, a zombie.

Each device is judged over the samples that list the server's processes, since before its start and after its exit
every process is foreign. In this order: other processes' bytes now, bytes of no listed process, sizes that NVML does
not report (unknown), and another process that was there while the pool was sized and has since exited (suspect). The
worst device is the finding; where it is not a fault and no test steps ran, growth of other processes outweighs it.
Where NVML lists no processes, what a device of the server holds beyond the server's budget is judged over time.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from kvdiag.diagnosis.growth.attribution import others_growth
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.memory_series import memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.memory_budget import allowance_bytes, budget_bytes
from kvdiag.diagnosis.prescriptions import memory_won_back
from kvdiag.diagnosis.rule import unknown, worst
from kvdiag.diagnosis.timeline_queries import (
    gap_reason,
    lists_processes,
    newest_devices,
    server_devices,
    server_uuids,
)
from kvdiag.formatting import format_bytes, format_duration, plural
from kvdiag.model import Device, Evidence, Facts, Finding, Process, Timeline, cuda_uuid

ID = "baseline.foreign_memory"


class _Listing(NamedTuple):
    """A device's process list at one time."""

    at_seconds: float
    device: Device

    def others(self, facts: Facts) -> tuple[Process, ...]:
        """The processes that are not the server's."""
        own = facts.server_pids or ()
        return tuple([process for process in self.device.processes or () if process.pid not in own])


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at every process on the server's devices, and at bytes of no process."""
    histories = _histories(timeline, facts, limits)
    if not histories:
        missing = "NVML lists no processes here; run kvdiag in the host's PID namespace"
        if newest_devices(timeline) is None:
            missing = "no device was read; run kvdiag where NVML works"
        if (beyond := _beyond_budget(timeline, facts, limits)) is not None:
            return (beyond,)
        return unknown(ID, gap_reason(timeline, facts, "nvml") or missing)
    served = bool(facts.pools) or any(sample.engines for sample in timeline.samples)
    judged = [_judge_history(history, facts, limits, served=served) for history in histories]
    found = worst(judged)
    if found.status != "fault" and not timeline.marks:
        return (others_growth(timeline, facts, limits, ID) or found,)
    return (found,)


def _beyond_budget(timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """The server's device that is fullest beyond the budget, where no process is listed; `None` where none is.

    An engine takes its memory at its start: what came later, at once and to stay, while nothing restarted, is another
    process's. Bytes beyond the budget that came otherwise are unknown.
    """
    if not facts.pools or not facts.device_uuids:
        return None
    pool, found = facts.pools[0], []
    newest = {device.uuid: device for device in newest_devices(timeline) or ()}
    series = memory_series(timeline, facts, limits).points[MemoryComponent.DEVICE]
    for device in (newest.get(uuid) for uuid in facts.device_uuids):
        memory = None if device is None else device.memory
        budget = None if memory is None else budget_bytes(memory, pool)
        if device is None or memory is None or budget is None:
            continue
        lines = (line for owner, line in series.items() if owner.device_uuid == cuda_uuid(device.uuid))
        times, sizes = next(lines, ([], []))
        recent = sizes[bisect_left(times, (times or [0.0])[-1] - limits.beyond_budget_seconds) :]
        allowed = budget + allowance_bytes(device, memory, facts, limits) + (memory.driver_reserved_bytes or 0)
        if not recent or min(recent) - allowed < limits.foreign_suspect_bytes:
            continue
        found.append((min(recent) - (memory.driver_reserved_bytes or 0) - budget, device, times, sizes, budget))
    if not found:
        return None
    beyond, device, times, sizes, budget = max(found, key=lambda one: one[0])
    raised, place = _largest_rise(sizes)
    evidence = (
        Evidence("gpu", device.index, "index", "nvml"),
        Evidence("over_budget", beyond, "bytes", "computed"),
        Evidence("budget", budget, "bytes", "computed"),
        Evidence("largest_step", raised, "bytes", "nvml"),
    )
    summary = f"GPU {device.index}: {format_bytes(beyond)} in use above the budget of the server"
    how = "run kvdiag in the host's PID namespace to see whose"
    if raised < limits.raised_at_once_ratio * beyond:
        return Finding(ID, "unknown", f"{summary}, of processes that NVML does not list; {how}", evidence)
    ago = format_duration(times[-1] - times[place])
    summary = (
        f"{summary}; {format_bytes(raised)} came at once {ago} before the last sample, and nothing restarted; {how}"
    )
    return Finding(ID, "suspect", summary, evidence, since_seconds=times[place])


def _largest_rise(sizes: Sequence[int]) -> tuple[int, int]:
    """The largest rise between three samples and the next three, and where it was: a spike of one sample is none."""
    rises = (
        (min(sizes[place : place + 3]) - max(sizes[place - 3 : place]), place) for place in range(3, len(sizes) - 2)
    )
    return max(rises, default=(0, 0))


def _histories(timeline: Timeline, facts: Facts, limits: Limits) -> list[tuple[_Listing, ...]]:
    """Each device's process lists, a minute apart, and the newest two; only with the server where it is listed."""
    if not lists_processes(timeline):
        return []
    own = server_uuids(timeline, facts)
    pids = frozenset(facts.server_pids or ()) if own else frozenset[int]()
    kept = defaultdict[str, dict[float, _Listing]](dict)
    newest = defaultdict[str, deque[_Listing]](lambda: deque(maxlen=2))
    dark: dict[str, _Listing] = {}
    last = timeline.samples[-1].at_seconds if timeline.samples else 0.0
    due = 0.0
    for sample in timeline.samples:
        # A day of eight GPUs has 140,000 process lists, most of them the same.
        if sample.devices is None or due > sample.at_seconds <= last - limits.process_lists_apart_seconds:
            continue
        keep = sample.at_seconds >= due
        for device in server_devices(sample.devices, own):
            one = _Listing(at_seconds=sample.at_seconds, device=device)
            if device.processes is None:
                dark[device.uuid] = one
            elif not pids or any(process.pid in pids for process in device.processes):
                newest[device.uuid].append(one)
                if keep:
                    kept[device.uuid][sample.at_seconds] = one
                    due = sample.at_seconds + limits.process_lists_apart_seconds
    if not newest:
        return []
    for uuid, pair in newest.items():
        kept[uuid].update({one.at_seconds: one for one in pair})
    never = [(one,) for uuid, one in dark.items() if uuid not in kept]
    return [*(tuple(readings[at] for at in sorted(readings)) for readings in kept.values()), *never]


def _judge_history(history: tuple[_Listing, ...], facts: Facts, limits: Limits, *, served: bool) -> Finding:
    """One device: as it is now, else another process that it had while the server was there."""
    newest = history[-1]
    listed = Counter(process.pid for one in history for process in one.others(facts))
    stay = frozenset(pid for pid, times in listed.items() if times >= min(len(history), 2))
    unlisted = [_unattributed_bytes(one.device) for one in history[-2:]]
    # Memory and process list are two questions to the driver: between them a server that starts takes gigabytes.
    unattributed = None if None in unlisted else min(size for size in unlisted if size is not None)
    now = _judge_device(newest, facts, limits, stay=stay, unattributed=unattributed, served=served)
    if now.status in {"fault", "suspect"} or facts.server_pids is None:
        return now
    most = max(history, key=lambda one: _held(one, facts, stay))
    held = _held(most, facts, stay)
    if held < limits.foreign_suspect_bytes or not facts.own_processes(most.device):
        return now
    ended_seconds_ago = newest.at_seconds - max(
        one.at_seconds for one in history if _held(one, facts, stay) >= held / 2
    )
    names = _names([one for one in most.others(facts) if one.pid in stay])
    until = f"until {format_duration(ended_seconds_ago)} before the last sample"
    evidence = (
        Evidence("gpu", newest.device.index, "index", "nvml"),
        Evidence("foreign_bytes", held, "bytes", "nvml"),
        Evidence("foreign_bytes_now", _held(newest, facts, stay), "bytes", "nvml"),
        Evidence("ended_seconds_ago", ended_seconds_ago, "seconds", "nvml"),
    )
    summary = f"GPU {newest.device.index}: other processes used {format_bytes(held)} ({names}) {until}"
    return Finding(ID, "suspect", summary, evidence)


def _held(one: _Listing, facts: Facts, stay: frozenset[int]) -> int:
    return sum(process.used_bytes or 0 for process in one.others(facts) if process.pid in stay)


def _names(processes: list[Process]) -> str:
    return ", ".join(f"{process.name or 'process'} (pid {process.pid})" for process in processes[:3])


def _judge_device(
    listing: _Listing, facts: Facts, limits: Limits, *, stay: frozenset[int], unattributed: int | None, served: bool
) -> Finding:
    device, where = listing.device, f"GPU {listing.device.index}"
    if device.processes is None:
        return Finding(ID, "unknown", f"NVML lists no processes on {where}; run kvdiag in the host's PID namespace")
    if not device.processes and not served and facts.server_pids is None:
        return _nobody(device, limits)
    is_listed = bool(facts.own_processes(device))
    # Containers see host pids, or none: while a server answers, the only process must be its own.
    if not is_listed and not (served and len(device.processes) == 1):
        which = f"not known which of {plural(len(device.processes), 'process', 'processes')} on {where}"
        return Finding(ID, "unknown", f"{which} belong to the server; run kvdiag in its PID namespace")
    others = [process for process in listing.others(facts) if is_listed and process.pid in stay]
    known = [process for process in others if process.used_bytes is not None]
    foreign_bytes = sum(process.used_bytes or 0 for process in known)
    evidence: tuple[Evidence, ...] = (
        Evidence("gpu", device.index, "index", "nvml"),
        Evidence("foreign_bytes", foreign_bytes, "bytes", "nvml"),
        *(
            Evidence(f"process {process.pid}", process.used_bytes, "bytes", f"nvml: {process.name or 'name unknown'}")
            for process in others
        ),
    )
    if unattributed is not None:
        evidence = (*evidence, Evidence("unattributed", unattributed, "bytes", "computed"))
    total = None if device.memory is None else device.memory.total_bytes
    if foreign_bytes >= limits.foreign_suspect_bytes:
        serious = total is not None and foreign_bytes >= limits.foreign_fault_ratio * total
        summary = f"{where}: other processes use {format_bytes(foreign_bytes)}: {_names(known)}"
        change, cost = f"move or stop {_names(known)}", "the work of the other processes"
        fix = memory_won_back(facts, change=change, cost=cost, size_bytes=foreign_bytes)
        return Finding(ID, "fault" if serious else "suspect", summary, evidence, prescription=fix)
    if unattributed is not None and unattributed >= limits.foreign_suspect_bytes:
        unlisted = f"{format_bytes(unattributed)} used by no process that NVML lists"
        return Finding(ID, "suspect", f"{where}: {unlisted} (a zombie, or another container)", evidence)
    if len(known) < len(others):
        silent = f"the memory of {plural(len(others) - len(known), 'other process', 'other processes')} on {where}"
        return Finding(ID, "unknown", f"NVML does not report {silent}; run kvdiag as root on the host", evidence)
    if unattributed is None and (hidden := _unexplained_bytes(device)) >= limits.foreign_suspect_bytes:
        silent = f"which process uses {format_bytes(hidden)} on {where}"
        return Finding(ID, "unknown", f"NVML does not report {silent}; run kvdiag as root on the host", evidence)
    assumed = "" if is_listed else " (assumed: the GPU's only process is the server)"
    summary = f"{where}: only the server uses significant memory{assumed}"
    return Finding(ID, "ok", summary, evidence)


def _nobody(device: Device, limits: Limits) -> Finding:
    """A device without any process, where no server runs whose processes could be hidden."""
    where, hidden = f"GPU {device.index}", _unexplained_bytes(device)
    reserved = None if device.memory is None else device.memory.driver_reserved_bytes
    evidence = (
        Evidence("gpu", device.index, "index", "nvml"),
        Evidence("unattributed", hidden, "bytes", "computed"),
        Evidence("driver_reserved", reserved, "bytes", "nvml"),
    )
    if reserved is None:
        summary = f"the driver's reservation on {where} is not reported; nvidia-smi on the host lists processes"
        return Finding(ID, "unknown", summary, evidence)
    if hidden >= limits.foreign_suspect_bytes:
        unlisted = f"{format_bytes(hidden)} used although no process is listed and no server runs"
        return Finding(ID, "suspect", f"{where}: {unlisted}: a zombie, or a process that only the host lists", evidence)
    return Finding(ID, "ok", f"{where}: no significant memory in use", evidence)


def _unattributed_bytes(device: Device) -> int | None:
    """Used bytes of neither a process nor the driver; `None` where one of the figures is missing."""
    if device.memory is None or device.memory.driver_reserved_bytes is None or not device.processes:
        return None
    complete = all(process.used_bytes is not None for process in device.processes)
    return _unexplained_bytes(device) if complete else None


def _unexplained_bytes(device: Device) -> int:
    """Used bytes that no figure explains, with missing figures taken as 0; 0 where memory is not reported."""
    if device.memory is None:
        return 0
    known = sum(process.used_bytes or 0 for process in device.processes or ())
    return device.memory.used_bytes - (device.memory.driver_reserved_bytes or 0) - known
