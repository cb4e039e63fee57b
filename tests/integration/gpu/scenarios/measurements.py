"""What the agent costs its server: a publication, the lock, steps of a loop; and what kvdiag itself holds of a GPU."""

import asyncio
import os
import sys
from pathlib import Path

from kvdiag.feeds.live.sampling import Clock, TimelineBuilder
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Device, Facts
from tests.integration.gpu.figures import Figure, at_most, exactly
from tests.integration.gpu.scenario import Measurement, Run, judged
from tests.integration.gpu.stage import POOL_BYTES, WEIGHTS_BYTES, StageError, sampling, subject
from tests.quality.bench.steps import Steps, compared

PUBLICATIONS = 300
WINDOWS = 24
WINDOW_SECONDS = 3.0
BRIEF = {"publications": 20, "windows": 4, "window_seconds": 0.1}

PUBLISH_SECONDS = 100e-6
GIL_SECONDS = 50e-6
LOOP_RATIO = 0.001


async def _costs(run: Run) -> tuple[Figure, ...]:
    usual = {"publications": PUBLICATIONS, "windows": WINDOWS, "window_seconds": WINDOW_SECONDS}
    # No folder: the one agent is that which is measured.
    async with subject(run.python, run.work, "cost", published=None, env={}) as process:
        await process.tell("start", weights_bytes=WEIGHTS_BYTES, pool_bytes=POOL_BYTES)
        told = await process.tell("cost", folder=str(run.work / "cost"), **(BRIEF if run.brief else usual))
    steps = compared(
        Steps(tuple(told["steps_nanoseconds"]["with"])), Steps(tuple(told["steps_nanoseconds"]["without"]))
    )
    return (
        at_most("publication", told["wall_seconds"] * 1e6, PUBLISH_SECONDS * 1e6, "us"),
        Figure(name="publication, processor time", value=told["busy_seconds"] * 1e6, unit="us"),
        at_most("interpreter held", told["gil_seconds"] * 1e6, GIL_SECONDS * 1e6, "us"),
        at_most("loop slowdown", steps.slower_ratio, LOOP_RATIO, "ratio"),
        at_most("steps delayed by the agent", steps.held_up_ratio, LOOP_RATIO, "ratio"),
        Figure(name="steps delayed without it", value=steps.held_up_anyway_ratio, unit="ratio"),
        Figure(name="step without the agent", value=steps.usual_seconds * 1e6, unit="us"),
        Figure(name="steps", value=steps.count, unit="steps"),
    )


COST = Measurement(name="cost", about="a publication a second beside a loop of small kernels", measure=_costs)


READINGS = 3
LIMIT_SECONDS = 60.0
USED = """
from kvdiag.sources.nvml import NvmlSource
print(sum(one.memory.used_bytes for one in NvmlSource().read(processes=False)[0] if one.memory))
"""


async def _held_by_kvdiag(run: Run) -> tuple[Figure, ...]:
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


DAEMON = Measurement(name="daemon", about="kvdiag reads NVML and holds nothing", measure=_held_by_kvdiag)
