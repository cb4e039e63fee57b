"""Drivers of every age: what old ones lack, and machines that have none at all."""

from __future__ import annotations

import ctypes.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdiag.model import Process
from kvdiag.sources.nvml import NvmlSource
from tests.fixtures.require import require
from tests.stand_ins.nvml.client import Client
from tests.stand_ins.nvml.stand_in import LIBRARY_NAME, Failure, Running, StandIn, State, build, compiler
from tests.unit.sources.nvml_devices import FULL, GIB, PROCESSES, gap, seen, seen_without_reservation


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("code", [3, 13, 25])
def test_second_memory_version_is_refused(stand_in: StandIn, client: Client, code: int) -> None:
    """Where version 2 of the memory struct is refused, version 1 tells all but the driver's reservation."""
    stand_in.show(State(gpus=(FULL,), failures=(Failure("nvmlDeviceGetMemoryInfo_v2", code),)))

    assert ((seen_without_reservation(FULL),), ()) == client.read()


@pytest.mark.nvml_stand_in
def test_old_driver(tmp_path: Path) -> None:
    """A driver from before memory version 2 and process version 3 is read by what it has."""
    require(compiler() is not None, "a C compiler (cc)")
    missing = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
    stand_in = StandIn(build(tmp_path, without=missing), tmp_path / "state")
    stand_in.show(State(gpus=(replace(FULL, processes=(Running(pid=1, used_bytes=GIB),)),)))

    with Client(stand_in.environment()) as client:
        actual = client.read(processes=True)

    assert ((replace(seen_without_reservation(FULL), processes=(Process(pid=1, used_bytes=GIB),)),), ()) == actual


@pytest.mark.nvml_stand_in
def test_driver_from_before_mig(stand_in: StandIn, client: Client) -> None:
    """A driver that knows neither MIG nor the process lists nor the process names of today is still read."""
    missing = (PROCESSES, "nvmlDeviceGetMaxMigDeviceCount", "nvmlSystemGetProcessName")
    stand_in.show(State(gpus=(FULL,), failures=tuple(Failure(function, 13) for function in missing)))

    assert ((seen(FULL, 0),), (gap("absent", "GPU-full", "Function Not Found"),)) == client.read(processes=True)


@pytest.mark.nvml_stand_in
def test_driver_without_gpus(stand_in: StandIn, client: Client) -> None:
    """A driver that lists nothing gives an empty tuple, and a gap that says why that may be."""
    stand_in.show(State())

    assert ((), (gap("absent", "no GPU"),)) == client.read()


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["no file", "no library in it"])
def test_machine_without_nvml(tmp_path: Path, content: bytes | None) -> None:
    """Without NVIDIA's library there are no GPUs here: absent, not failed, and what to do about it in a container."""
    if content is not None:
        (tmp_path / LIBRARY_NAME).write_bytes(content)
    elif ctypes.util.find_library("nvidia-ml"):
        pytest.skip("NVIDIA driver present")
    nothing = StandIn(tmp_path / LIBRARY_NAME, tmp_path / "state")

    with Client(nothing.environment()) as client:
        actual = client.read()

    assert (None, (gap("absent", "libnvidia-ml.so.1", "NVIDIA_DRIVER_CAPABILITIES=utility"),)) == actual


def test_library_object_needs_only_what_it_has() -> None:
    """An object with a few of pynvml's names stands for it: what it lacks is what its driver lacks."""
    library = SimpleNamespace(
        NVMLError=LookupError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: FULL.uuid,
        nvmlDeviceGetName=lambda handle: FULL.name,
        nvmlDeviceGetMemoryInfo=lambda handle, version=None: SimpleNamespace(total=80 * GIB, free=4 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=GIB)],
    )

    actual = NvmlSource(library).read(processes=True)

    assert ((replace(seen_without_reservation(FULL), processes=(Process(pid=7, used_bytes=GIB),)),), ()) == actual
