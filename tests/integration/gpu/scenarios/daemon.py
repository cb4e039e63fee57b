"""kvdiag itself on the GPU: it reads, and holds nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kvdiag.feeds.live.sampling import Clock, TimelineBuilder
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Device, Facts
from tests.integration.gpu.figures import Figure, exactly
from tests.integration.gpu.scenario import Measurement, Run, judged
from tests.integration.gpu.stage import StageError, sampling

READINGS = 3
LIMIT_SECONDS = 60.0
USED = """
from kvdiag.sources.nvml import NvmlSource
print(sum(one.memory.used_bytes for one in NvmlSource().read(processes=False)[0] if one.memory))
"""


async def _measure(run: Run) -> tuple[Figure, ...]:
    before_bytes = await _used_by_a_process_that_has_ended()
    recorder, facts = TimelineBuilder(), Facts()
    with TraceWriter(run.trace, facts) as writer:
        recorder = TimelineBuilder(writer)
        async with sampling(recorder, Clock(), facts, None, lambda: 0) as sampler:
            await recorder.wait_for(
                lambda samples: sum(bool(one.devices) for one in samples) >= READINGS, LIMIT_SECONDS
            )
            await sampler.read_devices(processes=True)
    readings = [sample.devices for sample in judged(run.trace).timeline.samples if sample.devices]
    if not readings:
        raise StageError("NVML shows no device")
    return (
        exactly("GPU memory that appeared with kvdiag", _used(readings[-1]) - before_bytes, 0, "bytes"),
        exactly("kvdiag among the GPU's processes", str(os.getpid() in _pids(readings)), "False"),
        exactly("libcuda loaded in kvdiag", str("libcuda.so" in _maps()), "False"),
    )


async def _used_by_a_process_that_has_ended() -> int:
    """What the GPUs held before this process has asked anything."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", USED, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    if process.returncode or not told.strip().isdigit():
        raise StageError("the GPUs cannot be read through NVML")
    return int(told)


def _maps() -> str:
    return Path("/proc/self/maps").read_text()


def _used(devices: tuple[Device, ...]) -> int:
    return sum(device.memory.used_bytes for device in devices if device.memory is not None)


def _pids(readings: list[tuple[Device, ...]]) -> set[int]:
    return {process.pid for devices in readings for device in devices for process in device.processes or ()}


SCENARIO = Measurement(name="daemon", about="kvdiag reads NVML and holds nothing", measure=_measure)
