"""A machine with one server that sleeps, restarts and sends garbage as a test says, and a watch over it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import httpx2

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.engines.engine import Identity
from kvdiag.engines.vllm import ENGINE
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.live.sampling import Clock
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.model import Device, Diagnosis, Facts, Status, Timeline
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.http import HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.finders import Finding
from tests.builders.values import GIB, SERVER_PID, device, pool, process
from tests.builders.worlds import World, facts
from tests.unit.feeds.daemon.virtual_time import now_seconds, run

HOUR_SECONDS = 3600.0
BEGUN_SECONDS = 1_770_000_000.0
SLEEPING_BYTES = 2 * GIB
AWAKE_BYTES = 20 * GIB


def page(text: str) -> httpx2.Response:
    """An answer that is read from the wire."""

    async def wire() -> AsyncIterator[bytes]:
        yield text.encode()

    return httpx2.Response(200, content=wire())


@dataclass(slots=True)
class Place:
    """A machine with one server on it, of which everything can be changed while it is watched."""

    up: bool = True
    asleep: bool = False
    model: str = "one"
    usable_blocks: int | None = 6144
    """`None` while the server does not report its pool."""

    nonsense: bool = False
    prompt_tokens: int = 0
    version: str | None = None
    """What the server says that it is; `None` if it is not asked."""

    beside_tokens: int | None = None
    """The prompt tokens of a second server, to which a load balancer sends half of the requests."""

    beside_engine: str = "vllm"
    balancer: random.Random = field(default_factory=lambda: random.Random(7))  # noqa: S311 - a draw, no secret
    usage: float = 0.0
    gpus: int = 1
    pids: bool = False
    """Whether a search finds the server's processes."""

    pid: int = SERVER_PID

    other_bytes: int = 0
    """Of another process on its GPU."""

    driver_seconds: float = 0.0
    asked: list[bool] = field(default_factory=list)
    """Of each question to the driver, whether it was for the processes too."""

    asked_engine_total: int = 0

    @property
    def identity(self) -> Identity | None:
        """What a search learns of the server."""
        if self.version is None:
            return None
        return Identity(
            version=self.version, model=self.model, root=None, max_model_len_tokens=None, server_header=None
        )

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """The engine's metrics now, or what it is."""
        if request.url.path == "/version":
            return page(json.dumps({"version": self.version}))
        if request.url.path == "/v1/models":
            return page(json.dumps({"data": [{"id": self.model}]}))
        self.asked_engine_total += 1
        if not self.up:
            raise httpx2.ConnectError("nobody listens")
        if self.nonsense:
            return page(f"{self.asked_engine_total} }}{{ never twice the same \n\0")
        self.prompt_tokens += 1
        beside = self.beside_tokens is not None and self.balancer.random() < 0.5
        engine = self.beside_engine if beside else "vllm"
        lines = [
            f'{engine}:{name}{{engine="0"}} {value}'
            for name, value in (
                ("kv_cache_usage_perc", self.usage),
                ("num_requests_running", 0),
                ("num_requests_waiting", 0),
                ("prompt_tokens_total", self.beside_tokens if beside else self.prompt_tokens),
            )
        ]
        lines.append(f'{engine}:engine_sleep_state{{engine="0",sleep_state="awake"}} {int(not self.asleep)}')
        return page("\n".join(lines) + "\n")

    def devices(self) -> tuple[Device, ...]:
        """The GPUs now, of which the server has the first."""
        used_bytes = SLEEPING_BYTES if self.asleep else AWAKE_BYTES
        processes = [process(SERVER_PID, used_bytes - GIB // 2)]
        processes += [process(SERVER_PID + 1, self.other_bytes)] if self.other_bytes else []
        return (
            device(used_bytes=used_bytes + self.other_bytes, processes=tuple(processes)),
            *(device(number, used_bytes=GIB // 2, processes=()) for number in range(1, self.gpus)),
        )


class Driver(ThreadedReader[DeviceReading]):
    """A driver that takes as long as the place says, on the loop's clock."""

    def __init__(self, place: Place) -> None:
        """Start with no calls made."""
        super().__init__(lambda processes: (place.devices(), ()), "nvml")
        self._place = place

    async def ask(self, timeout_seconds: float, **kwargs: object) -> DeviceReading:
        """The device sample, however late."""
        self._place.asked.append(bool(kwargs["processes"]))
        await asyncio.sleep(self._place.driver_seconds)
        return self._place.devices(), ()


class Inline(DiagnosisSchedule):
    """Diagnoses within the loop, whose clock would run on while a thread works; keeps every worst status."""

    said: ClassVar[list[Status]] = []

    async def _made(self, timeline: Timeline, facts: Facts, limits: Limits) -> Diagnosis:
        made = self._diagnose(timeline=timeline, facts=facts, limits=limits)
        self.said.append(made.worst)
        return made


def watching(
    place: Place,
    script: Callable[[Watch], Awaitable[None]],
    *,
    retention: Retention | None = None,
    pace: float = 60.0,
    recorder: DiskRecorder | None = None,
    begun_seconds: float = BEGUN_SECONDS,
) -> Watch:
    """A watch during a script that changes the place."""

    async def work() -> Watch:
        client = httpx2.AsyncClient(base_url="http://place", transport=httpx2.MockTransport(place.answer))
        driver = Driver(place)

        async def find() -> FoundServer:
            if not place.up or place.nonsense:
                raise KvdiagError("nobody listens")
            known = replace(
                facts(World(server_seen=False)),
                model=place.model,
                pools=() if place.usable_blocks is None else (pool(usable_blocks=place.usable_blocks),),
            )
            if place.pids:
                known = replace(known, server_pids=(place.pid,))
            if place.version is not None:
                known = replace(known, engine_version=place.version)
            return FoundServer(
                facts=known, engine=ENGINE.open(HttpReader(client)), nvml=driver, identity=place.identity
            )

        Inline.said.clear()
        watch = Watch(
            Finding(find, driver),
            agents=None,
            limits=DEFAULT_LIMITS,
            schedule=partial(Inline, every_seconds=pace),
            clock=Clock(wall=lambda: begun_seconds + now_seconds(), steady=now_seconds),
            retention=retention,
            recorder=recorder,
        )
        task = asyncio.create_task(watch.run())
        await script(watch)
        if task.done():
            await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()
        return watch

    return run(work())
