"""Check the GPUs: whether NVML answers, how fast, and shows their memory and processes."""

from collections.abc import Collection, Mapping, Sequence

from kvdiag.checks.check import Check
from kvdiag.formatting import format_bytes, format_duration, plural
from kvdiag.model import Device, Gap, without_mig_parents

SLOW_SECONDS = 0.1
"""Reading eight GPUs takes a few milliseconds; the daemon reads once a second."""

IDLE_BYTES = 2**30
"""More than an idle GPU's driver takes for itself (some 0.5 GiB on a large one)."""

NO_GPU = frozenset({"", "void", "none"})
"""Values of NVIDIA_VISIBLE_DEVICES by which NVIDIA's container runtime gives no GPU (libnvidia-container, README)."""

RUN_IN_CONTAINER = "run the container with the NVIDIA runtime, NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES="


def container(environment: Mapping[str, str], nodes: Collection[str]) -> Check:
    """Check the container runtime's settings and the device files (`nodes`, names in /dev)."""
    gpus = sorted(name for name in nodes if name.removeprefix("nvidia").isdecimal())
    visible = environment.get("NVIDIA_VISIBLE_DEVICES")
    abilities = environment.get("NVIDIA_DRIVER_CAPABILITIES")
    parts = [f"{plural(len(gpus), 'device file')} /dev/nvidia*" if gpus else "no device file /dev/nvidia0"]
    parts += [f"NVIDIA_VISIBLE_DEVICES={visible}"] if visible is not None else []
    parts += [f"NVIDIA_DRIVER_CAPABILITIES={abilities}"] if abilities is not None else []
    found = ", ".join(parts)
    if visible is not None and visible.strip().lower() in NO_GPU:
        fix = "set NVIDIA_VISIBLE_DEVICES to `all` or to the UUIDs of the server's GPUs"
        return Check("gpu.container", "fail", found, fix)
    if abilities is not None and not {"utility", "all"} & {each.strip() for each in abilities.split(",")}:
        fix = "add utility to NVIDIA_DRIVER_CAPABILITIES: NVML needs it"
        return Check("gpu.container", "fail", found, fix)
    if not gpus:
        fix = f"{RUN_IN_CONTAINER}utility; on a host, load the NVIDIA kernel module"
        return Check("gpu.container", "warn", found, fix)
    return Check("gpu.container", "pass", found)


def driver(devices: Sequence[Device] | None, gaps: Sequence[Gap], took_seconds: float | None) -> Check:
    """Check whether NVML answers, with how many GPUs, and how fast (`None`: a simulated server has no driver)."""
    if not devices:
        why, _, fix = (gaps[0].reason if gaps else "the NVIDIA driver lists no GPU").partition("; ")
        return Check("gpu.driver", "fail", why, fix or f"{RUN_IN_CONTAINER}utility")
    names = dict.fromkeys(device.name for device in devices)
    found = f"{plural(len(devices), 'device', 'devices')} ({', '.join(names)})"
    if took_seconds is None:
        return Check("gpu.driver", "pass", found)
    found += f", read in {format_duration(took_seconds)}"
    if took_seconds > SLOW_SECONDS:
        fix = "the driver is slow: start nvidia-persistenced and check `dmesg` for Xid errors"
        return Check("gpu.driver", "warn", found, fix)
    return Check("gpu.driver", "pass", found)


def memory(devices: Sequence[Device] | None, gaps: Sequence[Gap]) -> Check:
    """Check whether each GPU reports its memory."""
    if not devices:
        return Check("gpu.memory", "skip", "no GPU visible")
    blind = [device for device in without_mig_parents(tuple(devices)) if device.memory is None]
    if blind:
        reason = "; ".join(gap.reason for gap in gaps) or f"{len(blind)} of {len(devices)} GPUs report no memory"
        return Check("gpu.memory", "fail", reason, "check whether `nvidia-smi -q -d MEMORY` reads it on the host")
    seen = [device.memory for device in devices if device.memory is not None]
    used, total = (sum(one.used_bytes for one in seen), sum(one.total_bytes for one in seen))
    found = f"{format_bytes(used)} of {format_bytes(total)} used"
    if any(one.driver_reserved_bytes is None for one in seen):
        fix = "upgrade the driver to R510 or newer: older ones count their own reservation as used memory"
        return Check("gpu.memory", "warn", found, fix)
    return Check("gpu.memory", "pass", found)


def processes(devices: Sequence[Device] | None, here: Collection[int]) -> Check:
    """Check whether GPU processes are listed, with their memory, and are in this PID namespace (`here`)."""
    if not devices:
        return Check("gpu.processes", "skip", "no GPU visible")
    lists = [device.processes for device in devices if device.processes is not None]
    if not lists:
        fix = "run on the host: WSL and some vGPUs do not list processes"
        return Check("gpu.processes", "warn", "no GPU lists its processes", fix)
    listed = [process for one in lists for process in one]
    used = sum((device.memory.used_bytes for device in devices if device.memory is not None), 0)
    if not listed:
        found = f"no process listed, {format_bytes(used)} used"
        if used < IDLE_BYTES * len(devices):
            return Check("gpu.processes", "pass", found)
        fix = "share the server's PID namespace (shareProcessNamespace: true, or hostPID: true) to list them"
        return Check("gpu.processes", "warn", found, fix)
    silent = sum(process.used_bytes is None for process in listed)
    foreign = sum(process.pid not in here for process in listed)
    found = f"{plural(len(listed), 'process holds', 'processes hold')} memory"
    if silent:
        fix = "share the host's PID namespace (hostPID: true) to read their memory"
        return Check("gpu.processes", "warn", f"{found}; NVML does not report how much for {silent}", fix)
    if foreign:
        fix = "share their PID namespace (shareProcessNamespace: true, or hostPID: true) to identify them"
        return Check("gpu.processes", "warn", f"{found}, {foreign} outside this PID namespace", fix)
    return Check("gpu.processes", "pass", found)
