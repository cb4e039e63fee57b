"""A soak against the embedded server with feed, server and clock in one event loop that jumps instead of waiting.

Twelve minutes of samples then take as long as their work: the default plan can be run through, and a short one in a
test. Everything but the clock is what `kvdiag run` uses; the GPU is read in the loop's own thread, as no other thread
can wait for the loop.
"""

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx2

from kvdiag.diagnosis.steps import STEPS
from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.active.load_generator import DEFAULT_TOKEN_IDS, Requests
from kvdiag.feeds.active.soak_plan import plan_soak
from kvdiag.feeds.active.step_runner import ActiveFeed, Progress
from kvdiag.feeds.live.sampling import Clock, HostReading, Pace, Sampler, TimelineBuilder
from kvdiag.feeds.live.server_facts import gather_facts, read_facts
from kvdiag.model import Device, Facts, Memory, Process, Timeline
from kvdiag.sim.gpu import Gpu
from kvdiag.sim.http_server import HttpServer
from kvdiag.sim.scenarios import Scenario
from kvdiag.sim.vllm_api import VllmApi
from kvdiag.sources import host
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.http import HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.unit.feeds.daemon.virtual_time import now_seconds, run

T = TypeVar("T")


class _Host:
    """This host, read at once: virtual time does not wait for threads."""

    async def ask(self, _: float, **kwargs: Any) -> Facts:
        """As its reader does."""
        return read_facts(**kwargs)


@dataclass(slots=True)
class _Processes:
    """The server's processes as they were first: this one grows by the samples of the run, which it keeps."""

    reading: HostReading | None = None

    async def ask(self, _: float, **kwargs: Any) -> HostReading:
        """Their memory."""
        self.reading = self.reading or host.read(**kwargs)
        return self.reading


@dataclass(slots=True)
class _Nvml:
    """The simulated GPU, read at once."""

    gpu: Gpu
    answered: bool = True

    async def ask(self, timeout_seconds: float, *, processes: bool) -> DeviceReading:
        """The device now."""
        gpu = self.gpu
        listed = tuple(Process(pid=one.pid, used_bytes=one.used_bytes, name=one.name) for one in gpu.processes)
        memory = Memory(
            total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes, driver_reserved_bytes=gpu.driver_reserved_bytes
        )
        device = Device(uuid=gpu.uuid, index=0, name=gpu.name, memory=memory, processes=listed if processes else None)
        return (device,), ()


class _Inline(ThreadPoolExecutor):
    """Threads that are none: the loop's clock would run on while they work."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class _LoopClock(Clock):
    def now_seconds(self) -> float:
        return 1_000.0 + now_seconds()


def soak_run(
    scenario: Scenario,
    *,
    seconds: float = 300.0,
    cycle_seconds: float | None = None,
    all_steps: bool = False,
    pace: Pace | None = None,
    reports: list[Progress] | None = None,
) -> tuple[Timeline, Facts]:
    """The baseline, or all steps, and a soak of this many seconds, against a scenario."""
    with tempfile.TemporaryDirectory(prefix="kvdiag-soak-") as folder:
        work = _soaked(
            scenario,
            Path(folder),
            steps=len(STEPS) if all_steps else 1,
            seconds=seconds,
            cycle_seconds=cycle_seconds,
            pace=pace or Pace(engine_seconds=0.2),
            reports=[] if reports is None else reports,
        )
        return run(work)


async def _soaked(
    scenario: Scenario,
    root: Path,
    *,
    steps: int,
    seconds: float,
    cycle_seconds: float | None,
    pace: Pace,
    reports: list[Progress],
) -> tuple[Timeline, Facts]:
    asyncio.get_running_loop().set_default_executor(_Inline())
    scenario.model.write(root, max_positions=scenario.max_model_len_tokens)
    api = VllmApi(scenario, root)
    server = HttpServer(api.handle)
    url = f"http://127.0.0.1:{await server.start(0)}"
    engine = asyncio.create_task(api.engine.run())
    recorder = TimelineBuilder()
    try:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            source = ENGINE.open(HttpReader(client))
            facts, _ = await gather_facts(source, url, cast("ThreadedReader[Facts]", _Host()))
            requests = Requests(client, facts.model or "", DEFAULT_TOKEN_IDS, engine=ENGINE)
            feed = ActiveFeed(
                steps=STEPS[:steps],
                sampler=Sampler(
                    engine=source,
                    nvml=cast("ThreadedReader[DeviceReading]", _Nvml(api.engine.gpu)),
                    processes=cast("ThreadedReader[HostReading]", _Processes()),
                    facts=facts,
                    record=recorder.add,
                    pace=pace,
                    clock=_LoopClock(),
                    load=requests.load,
                ),
                requests=requests,
                recorder=recorder,
                progress=reports.append,
                soak=partial(plan_soak, seconds, facts, cycle_seconds=cycle_seconds),
            )
            return await feed.run(), facts
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await server.stop()
