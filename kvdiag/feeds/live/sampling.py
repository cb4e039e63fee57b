"""Live sampling: engine, devices and host, each at its own pace, on drift-free ticks, into one growing timeline.

Each loop samples its own source alone, so that a hung driver call never delays the engine's samples. A tick is due at
its own time: a late one does not shift the others, and missed ones are counted. A read that fails or exceeds its time
limit is a gap, and the next tick tries again. Our own load is noted right before and after the engines answer, which
bounds what was resident at that moment. Times come from a clock that never runs backwards. Nothing is judged here.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from kvdiag.engines.engine import EngineClient
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.alternation import Alternation, UncountedLoads
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.formatting import format_duration
from kvdiag.model import Device, Facts, Gap, HostProcess, Load, Mark, Sample, Timeline
from kvdiag.sources import host
from kvdiag.sources.agents.agent_publication import devices_inside
from kvdiag.sources.agents.allocator_files import AgentReading
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

_log = structlog.get_logger()

Part = TypeVar("Part")
Reading = tuple[Part | None, tuple[Gap, ...]]
HostReading = Reading[tuple[HostProcess, ...]]

DRIVER_SECONDS = 1.0
"""NVML answers a memory query in some ten microseconds; a second means that the driver is stuck."""

AGENT_SECONDS = 1.0
"""The agents' files are read in under a millisecond each; a second means that their volume is stuck."""

HOST_SECONDS = 5.0
"""A process's command line is read under its memory lock, which a process that hangs in a driver keeps."""

DRIVER_STUCK = "the driver has not answered for {}: its samples are stale; check nvidia-smi"
AGENTS_STUCK = "the agents' folder has not answered for {}: its samples are stale; check its volume"
NVML_LOADING = "NVML has not answered yet ({}): its library takes seconds to load on a busy machine; check nvidia-smi"
"""While the library has never answered, it is unknown whether there is a driver."""

HOST_STUCK = "the host has not answered for {}: is a process stuck in a driver?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between samples. Device memory at 1 Hz, process lists at 0.2 Hz: NVML takes a driver-wide lock."""

    engine_seconds: float = 0.1
    device_seconds: float = 1.0
    process_seconds: float = 5.0
    agent_seconds: float = 1.0
    host_seconds: float = 5.0
    most_driver_ratio: float = 1.0
    """Share of the time that may be spent in the driver: after a slow call it is not called until that holds again."""


def since_boot_seconds() -> float:
    """Seconds of a clock that is never set, including time the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """Wall-clock seconds that only run forward: read once, then advanced by a clock that is never set."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = since_boot_seconds) -> None:
        """Anchor the steady clock to the wall clock."""
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()

    def now_seconds(self) -> float:
        """Seconds since the epoch."""
        return self._offset + self._steady()

    def steady_seconds(self) -> float:
        """Seconds for durations alone."""
        return self._steady()

    def set_seconds(self) -> float:
        """How far the wall clock has been set forward since it was read; negative if back."""
        # A delay between reading the two clocks looks like a difference; three delays in a row are unlikely.
        return min((self._wall() - self.now_seconds() for _ in range(3)), key=abs)

    def move(self, seconds: float) -> None:
        """Follow a wall clock that was set by so much: times from now on may precede earlier ones."""
        self._offset += seconds


@dataclass(slots=True)
class Ticks:
    """How often a loop was due, and how often it was skipped because an earlier run took too long."""

    due_total: int = 0
    missed_total: int = 0


async def ticks(seconds: float, counted: Ticks | None = None) -> AsyncIterator[int]:
    """Count ticks, each due at its own time: a late tick does not delay the next ones, missed ones are skipped."""
    loop = asyncio.get_running_loop()
    start, number, before = loop.time(), 0, -1
    while True:
        if counted is not None:
            counted.due_total += number - before
            counted.missed_total += number - before - 1
        yield number
        before = number
        number = max(number + 1, int((loop.time() - start) / seconds) + 1)
        await asyncio.sleep(start + number * seconds - loop.time())


class TimelineBuilder:
    """The growing timeline of a run: kept in memory, written to a trace if there is one, and awaited by the steps.

    A daemon keeps a day in little memory instead (`Retention`).
    """

    def __init__(self, trace: TraceWriter | None = None) -> None:
        """Begin empty; `trace` gets every sample and mark, and is closed by the caller."""
        self._trace = trace
        self._samples: list[Sample] = []
        self._marks: list[Mark] = []
        self._gaps: set[Gap] = set()
        self._news = asyncio.Event()

    def add(self, entry: Sample | Mark) -> None:
        """Append one sample or mark, which must be the newest of its kind, and wake waiting tasks.

        Raises:
            KvdiagError: the trace cannot be written.
        """
        if isinstance(entry, Sample):
            self._samples.append(entry)
            for gap in entry.gaps:
                tell = _log.debug if gap in self._gaps else _log.info
                tell("gap", source=gap.source, kind=gap.kind, reason=gap.reason)
            self._gaps.update(entry.gaps)
        else:
            self._marks.append(entry)
            _log.info("mark", step=entry.step, cycle=entry.cycle, phase=entry.phase)
        if self._trace is not None:
            self._trace.add(entry)
        self._news.set()
        self._news = asyncio.Event()

    def keep_in(self, trace: TraceWriter) -> None:
        """Write all entries so far to `trace`, and all further ones."""
        entries: list[Sample | Mark] = [*self._samples, *self._marks]
        for entry in entries:
            trace.add(entry)
        self._trace = trace

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(self._samples)

    def since(self, index: int) -> list[Sample]:
        """Samples from the `index`-th on; a negative index counts from the newest."""
        return self._samples[index:]

    def timeline(self) -> Timeline:
        """The timeline so far."""
        return Timeline(samples=tuple(self._samples), marks=tuple(self._marks))

    async def wait_for(self, done: Callable[[list[Sample]], bool], seconds: float) -> bool:
        """Wait until `done` holds of the samples from now on; False when `seconds` pass first."""
        first = self.count
        try:
            async with asyncio.timeout(seconds):
                while not done(self.since(first)):
                    await self._news.wait()
        except TimeoutError:
            return False
        return True


@dataclass(kw_only=True)
class Sampler:
    """Reads every source at its interval until it is cancelled. Each sample has the part of one source alone.

    Args:
        engine, nvml, agents: the server's metrics, its devices, the allocators inside it; `None` is not read.
        processes: the server's processes on this host, read if `facts` names them.
        facts: the server.
        record: takes each sample as it comes; a `KvdiagError` of its own ends the sampler.
        pace, clock: the interval of each source in seconds, and the time of each sample.
        load: our own requests at this moment; `None` where there are none.
        counted: ticks of each source so far, which are added to.
        alternation: what is known of servers that answer in turn at this address.

    A source that fails, or does not answer in time, is a sample with a `Gap`; no other source waits for it.
    """

    engine: EngineClient | None
    nvml: ThreadedReader[DeviceReading]
    agents: ThreadedReader[AgentReading] | None = None
    processes: ThreadedReader[HostReading] = field(default_factory=lambda: ThreadedReader(host.read, "host"))
    facts: Facts
    record: Callable[[Sample], None]
    pace: Pace
    clock: Clock
    load: Callable[[], Load | None]
    counted: dict[str, Ticks] = field(default_factory=dict)
    alternation: Alternation = field(default_factory=Alternation)
    durations_seconds: dict[str, float] = field(default_factory=dict, init=False)
    """Duration of the newest read of each source."""
    _driver_absent: bool = field(default=False, init=False)
    _loads: UncountedLoads = field(default_factory=UncountedLoads, init=False)
    _reading_engine: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._device_loop())
            if self.engine is not None:
                group.create_task(self._loop("engine", self.pace.engine_seconds, self.read_engine))
            if self.facts.server_pids is not None:
                group.create_task(self._loop("host", self.pace.host_seconds, self.read_host))
            if self.agents is not None:
                group.create_task(self._loop("torch_allocator", self.pace.agent_seconds, self._read_agents))

    async def _loop(self, source: str, seconds: float, read: Callable[[], Awaitable[None]]) -> None:
        async for _ in ticks(seconds, self._ticks(source)):
            with self._own_mistakes(source):
                await read()

    async def _device_loop(self) -> None:
        every = max(round(self.pace.process_seconds / self.pace.device_seconds), 1)
        rest_until_seconds = listed = -1.0
        async for number in ticks(self.pace.device_seconds, self._ticks("nvml")):
            begun_seconds = self.clock.steady_seconds()
            if begun_seconds < rest_until_seconds:
                continue
            # By the interval, not by the tick: the tick that would list processes may have been skipped.
            processes = number // every > listed
            listed = number // every
            with self._own_mistakes("nvml"):
                await self.read_devices(processes=processes)
            # A call times out after DRIVER_SECONDS: beyond that, on a busy machine, the delay is our own.
            took_seconds = min(self.clock.steady_seconds() - begun_seconds, DRIVER_SECONDS)
            rest_until_seconds = begun_seconds + took_seconds / self.pace.most_driver_ratio

    async def _read_agents(self) -> None:
        if self.agents is None:
            return
        with self._timed("torch_allocator"):
            allocators, gaps, block_owners = await read_agents(self.agents, AGENT_SECONDS)
        self.record(
            Sample(
                at_seconds=self.clock.now_seconds(),
                devices=devices_inside(allocators) if self._driver_absent else None,
                allocators=allocators,
                block_owners=block_owners,
                gaps=gaps,
            )
        )

    @contextlib.contextmanager
    def _own_mistakes(self, source: str) -> Iterator[None]:
        """An unforeseen error of a source becomes a gap; a KvdiagError, which the trace raises, ends the sampler."""
        try:
            yield
        except KvdiagError:
            raise
        except Exception as error:  # noqa: BLE001
            _log.debug("mistake", source=source, exc_info=True)
            reason = f"internal error while reading it ({type(error).__name__}); please report it with a log of -vv"
            self.record(Sample(at_seconds=self.clock.now_seconds(), gaps=(Gap(source, "failed", reason),)))

    async def read_host(self) -> None:
        """Sample the server's processes on the host, if they are known."""
        if self.facts.server_pids is not None:
            with self._timed("host"):
                stuck = ("host", HOST_STUCK)
                processes, gaps = await _in_time(self.processes, HOST_SECONDS, stuck, pids=self.facts.server_pids)
            self.record(Sample(at_seconds=self.clock.now_seconds(), host=processes, gaps=gaps))

    async def read_engine(self, *, between_ticks: bool = False) -> None:
        """Sample the engines, with the load of our own requests right before and after.

        Whether the server counts that load is decided by the samples of the ticks alone, whose number is a time.
        """
        if self.engine is None:
            return
        # One read at a time: an earlier answer that is recorded later shows counters that fall, as after a restart.
        async with self._reading_engine:
            before = self.load()
            with self._timed("engine"):
                reading = await self.engine.read()
            engines, gaps = self.alternation.check(reading, self.clock.steady_seconds())
            now_seconds, after = self.clock.now_seconds(), self.load()
            sample = Sample(at_seconds=now_seconds, engines=engines, load=after, load_before=before, gaps=gaps)
            self.record(sample if between_ticks else self._loads.check(sample, self.facts.capabilities))

    async def read_devices(self, *, processes: bool) -> None:
        """Sample the devices; a driver that does not answer in time is a gap, not a wait."""
        with self._timed("nvml"):
            stuck = DRIVER_STUCK if self.nvml.answered else NVML_LOADING
            devices, gaps = await _in_time(self.nvml, DRIVER_SECONDS, ("nvml", stuck), processes=processes)
        self.nvml.answered = self.nvml.answered or devices is not None
        self._driver_absent = driver_absent(devices, gaps)
        self.record(Sample(at_seconds=self.clock.now_seconds(), devices=devices, gaps=gaps))

    @contextlib.contextmanager
    def _timed(self, source: str) -> Iterator[None]:
        """Note how long a read takes, also if it fails: otherwise the last successful duration would be reported."""
        begun_seconds = self.clock.steady_seconds()
        try:
            yield
        finally:
            self.durations_seconds[source] = self.clock.steady_seconds() - begun_seconds

    def _ticks(self, source: str) -> Ticks:
        return self.counted.setdefault(source, Ticks())


def driver_absent(devices: tuple[Device, ...] | None, gaps: tuple[Gap, ...]) -> bool:
    """Whether NVML is absent here: a sidecar often has none, and the agents report the server's own."""
    return not devices and any(gap.kind == "absent" for gap in gaps)


async def read_agents(agents: ThreadedReader[AgentReading], timeout_seconds: float) -> AgentReading:
    """Read the agents' files once; a volume that does not answer in time is a gap, not a wait."""
    try:
        return await agents.ask(timeout_seconds)
    except ReadTimeout as busy:
        reason = AGENTS_STUCK.format(format_duration(busy.since_seconds))
        return AgentReading(None, (Gap("torch_allocator", "failed", reason),))


async def _in_time(
    reader: ThreadedReader[Reading[Part]], timeout_seconds: float, stuck: tuple[str, str], **arguments: object
) -> Reading[Part]:
    """Read once; a read that takes too long is a gap of the source and for the reason in `stuck`."""
    try:
        return await reader.ask(timeout_seconds, **arguments)
    except ReadTimeout as busy:
        source, reason = stuck
        return None, (Gap(source, "failed", reason.format(format_duration(busy.since_seconds))),)
