import os

import pynvml
import pytest

from kvdiag.sim import SCENARIOS, Drill, RemoteNvml
from kvdiag.sim.gpu import GIB, MIB
from kvdiag.sources.nvml import NvmlSource
from tests.unit.sim.conftest import Serve


def test_the_source_reads_it_like_any_other_nvml(serve: Serve) -> None:
    """The NVML source gets a device whose memory adds up, and the server's process under its real id."""
    _, nvml = serve("healthy")
    source = NvmlSource(nvml)

    devices, gaps = source.read(processes=True)
    source.close()

    assert () == gaps
    assert devices is not None
    (device,) = devices
    assert device.memory is not None
    assert device.processes is not None
    (process,) = device.processes
    assert (24 * GIB, 464 * MIB) == (device.memory.total_bytes, device.memory.driver_reserved_bytes)
    assert (os.getpid(), device.memory.used_bytes - 464 * MIB) == (process.pid, process.used_bytes)


def test_both_versions_of_memory_agree(shared: str) -> None:
    """Version 1 counts the driver's reservation as used, version 2 apart; total and free are the same."""
    nvml = RemoteNvml(shared)
    old = nvml.nvmlDeviceGetMemoryInfo(0)
    new = nvml.nvmlDeviceGetMemoryInfo(0, version=pynvml.nvmlMemory_v2)
    assert isinstance(new, pynvml.c_nvmlMemory_v2_t)
    assert (old.total, old.free) == (new.total, new.free)
    assert old.total == old.used + old.free == new.reserved + new.used + new.free


def test_what_is_not_simulated_is_not_supported(shared: str) -> None:
    """Other functions of pynvml fail as on a device that lacks them; constants and error classes are pynvml's own."""
    nvml = RemoteNvml(shared)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetTemperature(0, 0)
    assert pynvml.NVMLError is nvml.NVMLError
    assert pynvml.NVML_ERROR_GPU_IS_LOST == nvml.NVML_ERROR_GPU_IS_LOST
    assert not hasattr(nvml, "nvmlNoSuchFunction")


def test_wrong_arguments_are_refused(shared: str) -> None:
    """An index, a structure version or a process that is not there gives NVML's own error."""
    nvml = RemoteNvml(shared)

    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(pynvml.NVMLError) as mismatch:
        nvml.nvmlDeviceGetMemoryInfo(0, version=7)
    with pytest.raises(pynvml.NVMLError_NotFound):
        nvml.nvmlSystemGetProcessName(1)
    assert pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH == mismatch.value.value


def test_a_stopped_drill_has_no_nvml() -> None:
    """When the drill has ended, a read fails with NVML's unknown error instead of hanging."""
    with Drill(SCENARIOS["healthy"]) as drill:
        nvml = RemoteNvml(drill.url)
        nvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_Unknown):
        nvml.nvmlDeviceGetMemoryInfo(0)
