"""baseline.foreign_memory: bytes on the server's devices that are not its own: a co-tenant, an orphan, a zombie."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import gap_reason, newest_devices, readable_bytes, server_devices, server_uuids
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Device, Evidence, Facts, Finding, Process, Timeline

ID = "baseline.foreign_memory"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Look at every process on the server's devices, and at the bytes that no process explains."""
    own = server_uuids(timeline, facts)
    readings = (server_devices(sample.devices, own) for sample in timeline.samples)
    devices = next((seen for seen in readings if any(device.processes is not None for device in seen)), None)
    if devices is None:
        if newest_devices(timeline) is None:
            return unseen(ID, gap_reason(timeline, facts, "nvml") or "no device was read")
        return unseen(ID, gap_reason(timeline, facts, "nvml") or "NVML lists no processes here")
    judged = [_judge_device(device, facts, limits) for device in devices]
    order = ("fault", "suspect", "unknown", "ok")
    return (min(judged, key=lambda finding: order.index(finding.status)),)


def _judge_device(device: Device, facts: Facts, limits: Limits) -> Finding:
    where = f"GPU {device.index}"
    if device.processes is None:
        return Finding(id=ID, status="unknown", summary=f"cannot tell: NVML lists no processes of {where}")
    others, certain = _others(device.processes, facts)
    if others is None:
        return Finding(
            id=ID,
            status="unknown",
            summary=f"cannot tell: {where} has {len(device.processes)} processes, and the server's are not seen",
        )
    known = [process for process in others if process.used_bytes is not None]
    foreign_bytes = sum(process.used_bytes or 0 for process in known)
    evidence: tuple[Evidence, ...] = (
        number("gpu", device.index, "index", "nvml"),
        number("foreign_bytes", foreign_bytes, "bytes", "nvml"),
        *(
            number(f"process {process.pid}", process.used_bytes, "bytes", f"nvml: {process.name or 'name not told'}")
            for process in others
        ),
    )
    unattributed = _unattributed_bytes(device)
    if unattributed is not None:
        evidence = (*evidence, number("held_by_no_process", unattributed, "bytes", "computed"))
    total = None if device.memory is None else device.memory.total_bytes
    if foreign_bytes >= limits.foreign_suspect_bytes:
        names = ", ".join(f"{process.name or 'process'} (pid {process.pid})" for process in known[:3])
        serious = total is not None and foreign_bytes >= limits.foreign_fault_ratio * total
        summary = f"{where}: {readable_bytes(foreign_bytes)} belong to {names}, not to the server"
        return Finding(id=ID, status="fault" if serious else "suspect", summary=summary, evidence=evidence)
    if unattributed is not None and unattributed >= limits.foreign_suspect_bytes:
        summary = (
            f"{where}: {readable_bytes(unattributed)} are held by no process that NVML lists (zombie, other container)"
        )
        return Finding(id=ID, status="suspect", summary=summary, evidence=evidence)
    if len(known) < len(others):
        summary = f"cannot tell: NVML does not say how much {len(others) - len(known)} other processes on {where} hold"
        return Finding(id=ID, status="unknown", summary=summary, evidence=evidence)
    if unattributed is None and (hidden := _unexplained_bytes(device)) >= limits.foreign_suspect_bytes:
        summary = f"cannot tell: NVML does not say whose {readable_bytes(hidden)} on {where} are, the server's or not"
        return Finding(id=ID, status="unknown", summary=summary, evidence=evidence)
    summary = f"{where}: nothing of note but the server" + (
        "" if certain else ", taken to be the only process there is"
    )
    return Finding(id=ID, status="ok", summary=summary, evidence=evidence)


def _others(processes: tuple[Process, ...], facts: Facts) -> tuple[list[Process] | None, bool]:
    """Processes that are not the server's, and whether that is certain; `None` where the server is not among them."""
    if facts.server_pids is not None and any(process.pid in facts.server_pids for process in processes):
        return [process for process in processes if process.pid not in facts.server_pids], True
    # Containers see host pids, or none: a lone process is the server's for want of anybody else.
    if len(processes) == 1:
        return [], False
    return None, False


def _unattributed_bytes(device: Device) -> int | None:
    """Used bytes that neither a process nor the driver explains; `None` where one of the figures is missing."""
    if device.memory is None or device.memory.driver_reserved_bytes is None or not device.processes:
        return None
    held = [process.used_bytes for process in device.processes]
    if None in held:
        return None
    known = sum(used for used in held if used is not None)
    return device.memory.used_bytes - device.memory.driver_reserved_bytes - known


def _unexplained_bytes(device: Device) -> int:
    """Used bytes that no figure explains, for want of the driver's share or of a process's size; 0 without memory."""
    if device.memory is None:
        return 0
    known = sum(process.used_bytes or 0 for process in device.processes or ())
    return device.memory.used_bytes - (device.memory.driver_reserved_bytes or 0) - known
