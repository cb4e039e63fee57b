"""The agents' files in live sampling: read at their own pace, and never waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import httpx2

from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.live.sampling import (
    AllocatorReading,
    Clock,
    DeviceReading,
    Pace,
    Sampler,
    TimelineBuilder,
    read_agents,
)
from kvdiag.model import Allocator, Facts, Gap, Memory, Sample
from kvdiag.sources.agent_publication import devices_inside
from kvdiag.sources.http import HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.answers import containing
from tests.fixtures.hostile import refused_port

LONG_SECONDS = 60.0
HELD = Allocator(
    device_uuid="1", pid=7, pid_seen=True, start_ticks=1, age_seconds=0.2, allocated_bytes=5, reserved_bytes=6
)


def sampled(
    reader: ThreadedReader[AllocatorReading],
    enough: Callable[[list[Sample]], bool],
    read_devices: Callable[..., DeviceReading] = lambda **_: (None, ()),
) -> list[Sample]:
    """Samples that the agents were due in, until there are enough."""

    async def work(port: int) -> list[Sample]:
        recorder = TimelineBuilder()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as client:
            sampler = Sampler(
                engine=ENGINE.open(HttpReader(client)),
                nvml=ThreadedReader(read_devices, "nvml"),
                agents=reader,
                facts=Facts(),
                recorder=recorder,
                pace=Pace(engine_seconds=LONG_SECONDS, device_seconds=LONG_SECONDS, agent_seconds=0.02),
                clock=Clock(),
                load=lambda: None,
            )
            sampling = asyncio.create_task(sampler.run())
            try:
                assert await recorder.wait_for(lambda seen: enough(told(seen)), LONG_SECONDS)
            finally:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
        return told(recorder.since(0))

    with refused_port() as port:
        return asyncio.run(work(port))


def told(samples: list[Sample]) -> list[Sample]:
    """Samples that the agents were due in."""
    return [one for one in samples if one.allocators or any(gap.source == "torch_allocator" for gap in one.gaps)]


def test_agents_are_read_at_their_pace() -> None:
    """Each reading of the folder is a sample of its own, with its gaps."""
    gap = Gap("torch_allocator", "failed", "agent-1-1.json: not a file")

    samples = sampled(ThreadedReader(lambda: ((HELD,), (gap,)), "agents"), lambda seen: len(seen) >= 3)

    assert {((HELD,), (gap,), None, None)} == {(one.allocators, one.gaps, one.engines, one.devices) for one in samples}


def test_without_a_driver_the_gpus_are_those_of_the_agents() -> None:
    """Where there is no NVML here, what it tells inside the server makes the devices; where it only failed, nothing."""
    inside = replace(HELD, memory=Memory(total_bytes=9, free_bytes=2), process_bytes=7)
    absent = Gap("nvml", "absent", "no libnvidia-ml.so.1 here")

    def seen(gap: Gap, enough: Callable[[list[Sample]], bool]) -> Sample:
        read_agents: ThreadedReader[AllocatorReading] = ThreadedReader(lambda: ((inside,), ()), "agents")
        return sampled(read_agents, enough, lambda **_: (None, (gap,)))[-1]

    without = seen(absent, lambda samples: samples[-1:] != [] and samples[-1].devices is not None)
    failing = seen(replace(absent, kind="failed"), lambda samples: len(samples) >= 10)

    assert (devices_inside((inside,)), None) == (without.devices, failing.devices)


def test_volume_that_hangs_is_a_gap() -> None:
    """A folder on a file system that does not answer is said, and not waited for."""
    release = threading.Event()

    def hang() -> AllocatorReading:
        release.wait(LONG_SECONDS)
        return None, ()

    try:
        found, gaps = asyncio.run(read_agents(ThreadedReader(hang, "agents"), 0.05))
    finally:
        release.set()

    reason = containing("the agents' folder", "0 s")
    assert (None, (Gap("torch_allocator", "failed", reason),)) == (found, gaps)
