"""A server watched for as long as it takes: sampled, its history kept, diagnosed again and again, lost and found.

Everything happens in one event loop but what may take long: the driver, the agents' folder and the diagnosis have
threads of their own, so that neither holds up a sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.engines.engine import EngineClient
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.latest import LatestReadings
from kvdiag.feeds.daemon.retention import Keep, Retention
from kvdiag.feeds.live.sampling import AllocatorReading, Clock, DeviceReading, HostReading, Pace, Sampler, Ticks, ticks
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.restore import Before, same_server
from kvdiag.kv.calibration.running_server import all_pools_bytes
from kvdiag.model import Diagnosis, Facts, Gap, Lengths, Sample, ServerState, Snapshot, SourceHealth, Timeline
from kvdiag.sources import host
from kvdiag.sources.http import Unreadable
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

_log = structlog.get_logger()

DIAGNOSIS_SECONDS = 10.0
MOST_DIAGNOSIS_RATIO = 0.003
"""Share of one core that the diagnosis may take, of the 1 % that the whole has: 0.3 s of CPU every 100 s."""

MOST_REST_SECONDS = 300.0
"""Between two diagnoses, however much CPU one takes."""

GIVEN_UP_SECONDS = 60.0
"""For one diagnosis: a day of eight GPUs takes a second."""

LOST_SEARCH_SECONDS = 10.0

LENGTHS_PACE = 10
"""Readings of the engine for each of its histograms."""

CLOCK_SECONDS = 1.0
"""How often the clock is looked at, and how far it must have been set: what NTP does stays within that."""


def pace_of(tick_seconds: float) -> Pace:
    """Everything at the same pace, but process lists at a fifth of it; a slow driver is asked a tenth of the time."""
    return Pace(
        engine_seconds=tick_seconds,
        device_seconds=tick_seconds,
        process_seconds=5 * tick_seconds,
        agent_seconds=tick_seconds,
        host_seconds=tick_seconds,
        most_driver_ratio=0.1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server that answers: who it is, its metrics, and the NVML that shows its GPUs."""

    facts: Facts
    engine: EngineClient
    nvml: ThreadedReader[DeviceReading]


class Watch:
    """One server's history, newest readings and newest diagnosis. `run` fills it, `snapshot` shows it."""

    def __init__(
        self,
        *,
        find: Callable[[], Awaitable[FoundServer]],
        nvml: ThreadedReader[DeviceReading],
        agents: ThreadedReader[AllocatorReading] | None,
        limits: Limits,
        pace: Pace,
        diagnosis_seconds: float = DIAGNOSIS_SECONDS,
        diagnosis_ratio: float = MOST_DIAGNOSIS_RATIO,
        recorder: DiskRecorder | None = None,
        before: Before | None = None,
        clock: Clock | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Read nothing yet. `find` looks for the server, and raises KvdiagError with the reason while there is none.

        A diagnosis is made every `diagnosis_seconds`, or as seldom as it takes no more than `diagnosis_ratio` of the
        time. `nvml` shows this machine's GPUs, until a server says which are its own. What is seen is given to
        `recorder`, and what it has kept of an earlier run, `before`, is what this one goes on from.
        """
        self._find = find
        self._nvml = nvml
        self._agents = agents
        self._processes: ThreadedReader[HostReading] = ThreadedReader(host.read, "host")
        self.limits = limits
        """Of diagnoses from now on."""
        self._pace = pace
        self._diagnosis_seconds = diagnosis_seconds
        self._diagnosis_ratio = diagnosis_ratio
        self._judge: ThreadedReader[Diagnosis] = ThreadedReader(self._diagnose, "diagnosis")
        self._clock = clock or Clock()
        self._clock_set_total = 0
        self._recorder = recorder
        self._tiers = Retention(keep)
        self._newest = LatestReadings()
        self._sampler: Sampler | None = None
        self._engine: EngineClient | None = None
        self._lengths: Lengths | None = None
        self._counted: dict[str, Ticks] = {}
        self._state: ServerState = "starting"
        self._facts = Facts()
        self._tokens: dict[str, int] = {}
        self._anew = False
        self._returned = asyncio.Event()
        self._changed = asyncio.Event()
        self._elsewhere = False
        self._diagnosis: Diagnosis | None = None
        self._diagnosed_seconds: float | None = None
        self._diagnosis_cpu_seconds = 0.0
        self._snapshot: Snapshot | None = None
        self._go_on(before)

    async def run(self) -> None:
        """Watch for ever, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._diagnose_for_ever())
                group.create_task(self._follow())
                group.create_task(self._mind_the_clock())
                group.create_task(self._measure_lengths())
        finally:
            self._judge.close()
            self._processes.close()

    def look_elsewhere(self, find: Callable[[], Awaitable[FoundServer]], nvml: ThreadedReader[DeviceReading]) -> None:
        """Leave the server for another one."""
        self._find, self._nvml, self._elsewhere = find, nvml, True
        self._changed.set()

    def ask_agents(self, agents: ThreadedReader[AllocatorReading] | None) -> None:
        """Read other agents from now on, or none."""
        self._agents = agents
        self._changed.set()

    def snapshot(self) -> Snapshot:
        """All that is known now; the same value until something new is."""
        if self._snapshot is None:
            durations = {} if self._sampler is None else self._sampler.durations_seconds
            self._snapshot = Snapshot(
                state=self._state,
                facts=self._facts,
                newest=self._newest.sample(),
                sources=(*self._newest.sources(durations, self._counted), *self._own_health()),
                diagnosis=self._diagnosis,
                diagnosed_seconds=self._diagnosed_seconds,
                engines_seconds=self._newest.engines_seconds(),
                lengths=self._lengths,
                pressure_thresholds=self.limits.pressure,
            )
        return self._snapshot

    def history(self) -> tuple[Sample, ...]:
        """What is kept of the server's samples: the newest minutes whole, the older ones thinned."""
        return self._tiers.samples()

    def add(self, entry: Sample) -> None:
        """Take the newest sample, from whichever source."""
        old = self._tiers.add(entry)
        if self._recorder is not None:
            self._recorder.add(entry)
            self._recorder.keep(old)
        for news in self._newest.add(entry):
            _log.info("gap", source=news.source, kind=news.kind, reason=news.reason)
        self._snapshot = None
        if entry.engines is not None:
            if self._began_anew(entry):
                self._anew = True
            if self._anew or self._state == "lost":
                self._returned.set()
            self._become("serving")
        elif self._state == "serving" and any(gap.source == "engine" for gap in entry.gaps):
            self._become("lost")

    def _go_on(self, before: Before | None) -> None:
        """Begin where an earlier run has ended."""
        if before is None:
            if self._recorder is not None:
                self._recorder.renew_history(())
            return
        self._facts = before.facts
        self._tiers.load(before.thinned)
        if self._recorder is not None:
            self._recorder.begin(before.facts)
            self._recorder.renew_history(before.thinned)
        for sample in before.tail:
            old = self._tiers.add(sample)
            if self._recorder is not None:
                self._recorder.keep(old)
        for sample in reversed((*before.thinned, *before.tail)):
            if sample.engines is not None:
                self._began_anew(sample)
                break

    def _own_health(self) -> tuple[SourceHealth, ...]:
        """How the recorder does, and the clock once it has been set."""
        found = []
        if self._recorder is not None:
            up = self._recorder.problem is None
            found.append(SourceHealth(source="recorder", up=up, errors_total=self._recorder.lost_total))
        if self._clock_set_total:
            found.append(SourceHealth(source="clock", up=True, errors_total=self._clock_set_total))
        return tuple(found)

    async def _mind_the_clock(self) -> None:
        """Where the clock is set, what it has told before is moved with it, so that durations stay what they were."""
        async for _ in ticks(CLOCK_SECONDS):
            seconds = self._clock.set_seconds()
            if abs(seconds) < CLOCK_SECONDS:
                continue
            self._clock.follow(seconds)
            self._tiers.move(seconds)
            self._newest.move(seconds)
            if self._diagnosed_seconds is not None:
                self._diagnosed_seconds += seconds
            if self._recorder is not None:
                self._recorder.clock_was_set(seconds)
                self._recorder.renew_history(self._tiers.thinned)
            self._clock_set_total += 1
            self._snapshot = None
            _log.warning("clock", set_seconds=round(seconds, 1), reason="moved the history by the same time")

    async def _measure_lengths(self) -> None:
        """What finished requests were like changes slowly, and its histograms are long: seldom read."""
        async for _ in ticks(LENGTHS_PACE * self._pace.engine_seconds):
            lengths = None
            if self._engine is not None and self._state == "serving":
                try:
                    lengths = await self._engine.lengths()
                except Unreadable:
                    pass  # the sampler tells why
                except Exception:  # noqa: BLE001  what nobody foresaw is no reason to end
                    _log.debug("mistake", exc_info=True)
            if lengths != self._lengths:
                self._lengths, self._snapshot = lengths, None

    def _became_another(self, facts: Facts) -> bool:
        """Whether these are the facts of another server, or of the same one started anew."""
        before = self._facts
        if before.server_pids and facts.server_pids:
            return not {*before.server_pids} & {*facts.server_pids}
        return not same_server(before, facts)

    def _began_anew(self, sample: Sample) -> bool:
        """Whether an engine's counter has fallen: counters begin at 0 with their process."""
        fell = False
        for engine in sample.engines or ():
            if (count := engine.prompt_tokens_total) is not None:
                fell = fell or count < self._tokens.get(engine.engine, 0)
                self._tokens[engine.engine] = count
        return fell

    def _become(self, state: ServerState) -> None:
        if state != self._state:
            self._state = state
            _log.info("server", state=state, url=self._facts.url)

    async def _follow(self) -> None:
        found: FoundServer | None = None
        while True:
            self._engine = None if found is None else found.engine
            self._sampler = Sampler(
                engine=self._engine,
                nvml=self._nvml if found is None else found.nvml,
                agents=self._agents,
                processes=self._processes,
                facts=self._facts,
                recorder=self,
                pace=self._pace,
                clock=self._clock,
                load=lambda: None,
                counted=self._counted,
            )
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._first() if found is None else self._next())
                changed = group.create_task(self._changed.wait())
                others = (group.create_task(self._sampler.run()), changed)
                await asyncio.wait((looking, changed), return_when=asyncio.FIRST_COMPLETED)
                for task in (looking, *others):
                    task.cancel()
            self._changed.clear()
            if self._elsewhere:
                self._elsewhere, found = False, None
                self._state, self._anew, self._newest = "starting", True, LatestReadings()
                self._now_watches(Facts())
            elif not looking.cancelled():
                found = looking.result()
                self._now_watches(found.facts)

    async def _first(self) -> FoundServer:
        """The server, once there is one. Until then each attempt leaves its reason as what is absent yet."""
        async for _ in ticks(self._pace.engine_seconds):
            try:
                return await self._found()
            except KvdiagError as error:
                gap = Gap("engine", "absent", f"starting: {error}")
                self.add(Sample(at_seconds=self._clock.now_seconds(), gaps=(gap,)))
        raise AssertionError("ticks never end")

    async def _next(self) -> FoundServer:
        """The server again, once it is another or has other facts: it was lost and came back, or began anew."""
        while True:
            try:
                async with asyncio.timeout(LOST_SEARCH_SECONDS):
                    await self._returned.wait()
            except TimeoutError:
                if self._state != "lost":
                    continue
            self._returned.clear()
            try:
                found = await self._found()
            except KvdiagError as error:
                _log.debug("search", reason=str(error))
                if self._state == "serving":
                    await asyncio.sleep(self._pace.engine_seconds)
                    self._returned.set()
                continue
            if self._anew or found.facts != self._facts:
                return found

    async def _found(self) -> FoundServer:
        try:
            found = await self._find()
        except KvdiagError:
            raise
        except Exception as error:  # what nobody foresaw is no reason to end
            _log.debug("mistake", exc_info=True)
            reason = (
                f"internal error while searching for it ({type(error).__name__}); please report it with a log of -vv"
            )
            raise KvdiagError(reason) from error
        # The cost model of a new server takes some 0.1 s; afterwards its answers are remembered.
        await asyncio.to_thread(all_pools_bytes, found.facts)
        return found

    def _now_watches(self, facts: Facts) -> None:
        if self._anew or self._became_another(facts):
            # The one before would be judged by the facts of this one.
            self._tiers.clear()
            self._tokens.clear()
            self._diagnosis = self._diagnosed_seconds = None
            if self._recorder is not None:
                self._recorder.renew_history(())
        self._facts, self._snapshot, self._anew = facts, None, False
        if self._recorder is not None:
            self._recorder.begin(facts)
        if facts.url is not None:
            _log.info("watches", url=facts.url, model=facts.model, version=facts.engine_version, pids=facts.server_pids)

    async def _diagnose_for_ever(self) -> None:
        rest_until_seconds = 0.0
        async for _ in ticks(self._diagnosis_seconds):
            begun_seconds = self._clock.steady_seconds()
            if self._diagnosis is not None and begun_seconds < rest_until_seconds:
                continue
            self._diagnosis_cpu_seconds = 0.0
            await self._diagnose_once()
            rest_seconds = min(self._diagnosis_cpu_seconds / self._diagnosis_ratio, MOST_REST_SECONDS)
            rest_until_seconds = begun_seconds + rest_seconds

    async def _diagnose_once(self) -> None:
        facts, samples = self._facts, self._tiers.samples()
        if not samples:
            return
        try:
            made = await self._judge.ask(GIVEN_UP_SECONDS, samples=samples, facts=facts)
        except ReadTimeout as busy:
            _log.warning("diagnosis", reason=str(busy))
            return
        except Exception as error:  # noqa: BLE001  one that fails is not renewed, which its timestamp shows; sampling goes on
            _log.error("diagnosis", reason=f"{type(error).__name__}: {error}")
            return
        if self._facts is not facts:
            return  # of the server before
        if self._diagnosis is None or made.worst != self._diagnosis.worst:
            wrong = [finding.id for finding in made.findings if finding.status in ("suspect", "fault")]
            _log.info("diagnosis", worst=made.worst, findings=wrong)
        self._diagnosis, self._diagnosed_seconds = made, self._clock.now_seconds()
        self._snapshot = None

    def _diagnose(self, *, samples: tuple[Sample, ...], facts: Facts) -> Diagnosis:
        """Counts the CPU time of its thread: on a busy machine the time until the answer says nothing of the cost."""
        begun_seconds = time.thread_time()
        try:
            return diagnose(Timeline(samples=samples), facts, self.limits)
        finally:
            self._diagnosis_cpu_seconds = time.thread_time() - begun_seconds
