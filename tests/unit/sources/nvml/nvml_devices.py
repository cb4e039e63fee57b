"""GPUs of the NVML stand-in, and the devices and gaps that the source is to make of them."""

from dataclasses import replace

from kvdiag.model import Device, Gap, GapKind, Memory, Process
from tests.builders.answers import containing
from tests.stand_ins.nvml.stand_in import Gpu, Running, Slice

GIB = 2**30
MEMORY = "nvmlDeviceGetMemoryInfo*"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses*"

FULL = Gpu(uuid="GPU-full", total_bytes=80 * GIB, free_bytes=4 * GIB, reserved_bytes=GIB // 2)
EMPTY = Gpu(uuid="GPU-empty", total_bytes=80 * GIB, free_bytes=79 * GIB, reserved_bytes=GIB // 2)
CUT = Gpu(
    uuid="GPU-cut",
    total_bytes=80 * GIB,
    free_bytes=60 * GIB,
    slices=(
        Slice(
            slot=0,
            uuid="MIG-busy",
            total_bytes=10 * GIB,
            free_bytes=GIB,
            processes=(Running(pid=4242, used_bytes=8 * GIB, name="vllm"),),
        ),
        Slice(slot=3, uuid="MIG-idle", total_bytes=20 * GIB, free_bytes=20 * GIB, name="NVIDIA H100 MIG 2g.20gb"),
    ),
)


def seen(gpu: Gpu, index: int, *, processes: tuple[Process, ...] | None = None) -> Device:
    """The device that a GPU of the stand-in is to be read as."""
    memory = Memory(total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes, driver_reserved_bytes=gpu.reserved_bytes)
    return Device(uuid=gpu.uuid, index=index, name=gpu.name, memory=memory, processes=processes)


def seen_slices(gpu: Gpu, index: int, *, processes: bool = False) -> tuple[Device, ...]:
    """The devices that its slices are to be read as."""
    return tuple(
        Device(
            uuid=part.uuid,
            index=index,
            name=part.name,
            memory=Memory(total_bytes=part.total_bytes, free_bytes=part.free_bytes, driver_reserved_bytes=0),
            processes=tuple(Process(pid=p.pid, used_bytes=p.used_bytes, name=p.name) for p in part.processes)
            if processes
            else None,
            mig_parent_uuid=gpu.uuid,
        )
        for part in gpu.slices
    )


def seen_without_reservation(gpu: Gpu) -> Device:
    """The device where only version 1 of the memory struct is to be had."""
    return replace(seen(gpu, 0), memory=Memory(total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes))


def unread(gpu: Gpu, index: int, *, processes: tuple[Process, ...] | None = None) -> Device:
    """The device where no memory is to be had."""
    return Device(uuid=gpu.uuid, index=index, name=gpu.name, memory=None, processes=processes)


def gap(kind: GapKind, *parts: str) -> Gap:
    """A gap whose reason has these parts: the GPU, and NVML's own words."""
    return Gap(source="nvml", kind=kind, reason=containing(*parts))
