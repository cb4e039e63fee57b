"""A server watched for as long as the daemon runs: sampled, its history kept and recorded, and diagnosed repeatedly.

`Watch` puts the parts together: `ServerTracker` finds the server, a `Sampler` reads it, `Retention` keeps its history,
`DiskRecorder` writes it, `LatestReadings` has the newest values and `DiagnosisSchedule` the newest diagnosis.
Everything happens in one event loop except what may take long: the driver, the agents' folder and the diagnosis have
threads of their own, so that none of them delays a sample.
"""

import asyncio
from collections.abc import Callable

import structlog

from kvdiag.diagnosis.limits import Limits
from kvdiag.engines.engine import EngineClient
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.latest import LatestReadings
from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.daemon.server_tracker import Finder, FoundServer, ServerTracker
from kvdiag.feeds.live.alternation import IN_TURN, Alternation, answer_in_turn
from kvdiag.feeds.live.sampling import Clock, HostReading, Pace, Sampler, Ticks, ticks
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.model import Facts, Gap, Lengths, Sample, Snapshot, SourceHealth
from kvdiag.sources import host
from kvdiag.sources.agents.allocator_files import AgentReading
from kvdiag.sources.http import Unreadable
from kvdiag.sources.worker_thread import ThreadedReader

_log = structlog.get_logger()

LENGTHS_PACE = 10
"""Engine samples for each read of its histograms."""

CLOCK_SECONDS = 1.0
"""How often the clock is checked, and how far it must have been set: NTP's corrections are smaller."""


class Watch:
    """One server's history, newest samples and newest diagnosis. `run` writes it, `snapshot` returns it.

    It starts before the server does, outlives it, and follows the next one at the same place as another life.
    """

    def __init__(
        self,
        finder: Finder,
        *,
        agents: ThreadedReader[AgentReading] | None,
        limits: Limits,
        tick_seconds: float = 1.0,
        recorder: DiskRecorder | None = None,
        schedule: Callable[..., DiagnosisSchedule] = DiagnosisSchedule,
        clock: Clock | None = None,
        retention: Retention | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            finder: finds the server, again and again, and has its GPUs until it reports which are its own.
            agents: the allocators inside the server's processes; `None` where there is no agent.
            limits, tick_seconds: the thresholds of diagnoses, and the interval of samples.
            recorder: gets every sample; what it has kept of an earlier run is continued. `None` keeps nothing on disk.
            clock, retention: the time of samples, and the history in memory.
            schedule: makes the schedule of diagnoses from their subject, a callback and the clock.
        """
        self.limits = limits
        """Of diagnoses from now on."""
        self._finder = finder
        self._agents = agents
        self._processes: ThreadedReader[HostReading] = ThreadedReader(host.read, "host")
        self._pace = Pace(
            engine_seconds=tick_seconds,
            device_seconds=tick_seconds,
            process_seconds=5 * tick_seconds,
            agent_seconds=tick_seconds,
            host_seconds=tick_seconds,
            most_driver_ratio=0.1,
        )
        self._clock = clock or Clock()
        self._clock_set_total = 0
        self._recorder = recorder
        self._retention = retention or Retention()
        self._latest = LatestReadings()
        self._server = ServerTracker(finder, retry_seconds=tick_seconds)
        self._diagnoses = schedule(
            lambda: (self._retention.timeline(), self._server.facts, self.limits),
            self._renewed,
            clock=self._clock,
        )
        self._sampler: Sampler | None = None
        self._engine: EngineClient | None = None
        self._lengths: Lengths | None = None
        self._counted: dict[str, Ticks] = {}
        self._alternation = Alternation()
        self._changed = asyncio.Event()
        self._elsewhere: Finder | None = None
        self._snapshot: Snapshot | None = None
        self._restore()

    async def run(self) -> None:
        """Watch until cancelled. Each part guards itself: an error of this class ends the daemon."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._diagnoses.run())
                group.create_task(self._follow())
                group.create_task(self._follow_clock())
                group.create_task(self._measure_lengths())
        finally:
            self._diagnoses.close()
            self._processes.close()

    def look_elsewhere(self, finder: Finder) -> None:
        """Leave the server for another one."""
        self._elsewhere = self._finder = finder
        self._changed.set()

    def read_agents(self, agents: ThreadedReader[AgentReading] | None) -> None:
        """Read other agents from now on, or none; those before are closed once nothing reads them any more."""
        self._agents = agents
        self._changed.set()

    async def contradiction(self) -> str | None:
        """Why a look of seconds may show several servers as one; `None` if it does not."""
        diagnosis = self._diagnoses.newest
        restarted = diagnosis is not None and len(diagnosis.lives) > 1
        if restarted or (self._engine is not None and await answer_in_turn(self._engine)):
            return IN_TURN
        return None

    def snapshot(self) -> Snapshot:
        """Everything known now; the same value until something changes."""
        if self._snapshot is None:
            durations = {} if self._sampler is None else self._sampler.durations_seconds
            self._snapshot = Snapshot(
                state=self._server.state,
                facts=self._server.facts,
                newest=self._latest.sample(),
                sources=(*self._latest.sources(durations, self._counted), *self._own_health()),
                diagnosis=self._diagnoses.newest,
                diagnosed_seconds=self._diagnoses.made_seconds,
                engines_seconds=self._latest.engines_seconds(),
                down_since_seconds=self._server.down_since_seconds,
                lengths=self._lengths,
                pressure_thresholds=self.limits.pressure,
            )
        return self._snapshot

    def history(self) -> tuple[Sample, ...]:
        """The server's samples: the newest minutes as they came, the older ones thinned."""
        return self._retention.samples()

    def add(self, entry: Sample) -> None:
        """Take the newest sample, from whichever source."""
        if self._recorder is not None:
            self._recorder.add(entry)
        self._keep(entry)
        for gap in self._latest.add(entry):
            _log.info("gap", source=gap.source, kind=gap.kind, reason=gap.reason)
        self._server.add(entry)
        self._renewed()

    def _keep(self, sample: Sample) -> None:
        thinned = self._retention.add(sample)
        if self._recorder is not None:
            self._recorder.keep(thinned)

    def _renewed(self) -> None:
        self._snapshot = None

    def _restore(self) -> None:
        if self._recorder is None:
            return
        before, self._recorder.before = self._recorder.before, None
        if before is not None:
            self._retention.load(before.thinned, before.earlier_facts)
            samples = reversed((*before.thinned, *before.tail))
            self._server.restore(before.facts, next((one for one in samples if one.engines is not None), None))
            self._recorder.order(SegmentStore.clock_was_set, before.clock_set_seconds)
        self._record_lives()
        for sample in () if before is None else before.tail:
            self._keep(sample)

    def _record_lives(self) -> None:
        """Record the history again, and what follows, with the facts of all lives."""
        if self._recorder is not None:
            self._recorder.order(SegmentStore.begin, self._server.facts, self._retention.earlier_facts)
            self._recorder.order(SegmentStore.renew_history, self._retention.thinned)

    def _own_health(self) -> tuple[SourceHealth, ...]:
        """The health of the recorder, and of the clock once it has been set."""
        found = []
        if self._recorder is not None:
            up = self._recorder.problem is None
            found.append(SourceHealth(source="recorder", up=up, errors_total=self._recorder.lost_total))
        if self._clock_set_total:
            found.append(SourceHealth(source="clock", up=True, errors_total=self._clock_set_total))
        return tuple(found)

    async def _follow_clock(self) -> None:
        """Move everything that is dated with a clock that was set, so that durations stay what they were."""
        async for _ in ticks(CLOCK_SECONDS):
            seconds = self._clock.set_seconds()
            if abs(seconds) < CLOCK_SECONDS:
                continue
            for dated in (self._clock, self._retention, self._latest, self._diagnoses, self._server):
                dated.move(seconds)
            if self._recorder is not None:
                self._recorder.order(SegmentStore.clock_was_set, seconds)
            self._record_lives()
            self._clock_set_total += 1
            self._renewed()
            _log.warning("clock", set_seconds=round(seconds, 1), reason="moved the history by the same time")

    async def _measure_lengths(self) -> None:
        """Read the lengths of finished requests, rarely: they change slowly and their histograms are long."""
        async for _ in ticks(LENGTHS_PACE * self._pace.engine_seconds):
            lengths = None
            if self._engine is not None and self._server.state == "serving":
                try:
                    lengths = await self._engine.lengths()
                except Unreadable:
                    pass  # the sampler reports why
                except Exception:  # noqa: BLE001  an unforeseen error must not end the daemon
                    _log.debug("mistake", exc_info=True)
            if lengths != self._lengths:
                self._lengths = lengths
                self._renewed()

    async def _follow(self) -> None:
        """Read the server until it is another one or is read otherwise, then start a new sampler."""
        found: FoundServer | None = None
        while True:
            self._engine = None if found is None else found.engine
            self._sampler = Sampler(
                engine=self._engine,
                nvml=self._finder.nvml if found is None else found.nvml,
                agents=self._agents,
                processes=self._processes,
                facts=self._server.facts,
                record=self.add,
                pace=self._pace,
                clock=self._clock,
                load=lambda: None,
                counted=self._counted,
                alternation=self._alternation,
            )
            async with asyncio.TaskGroup() as group:
                search = self._server.first(self._absent) if found is None else self._server.next()
                searching, changed = group.create_task(search), group.create_task(self._changed.wait())
                sampling = group.create_task(self._sampler.run())
                await asyncio.wait((searching, changed), return_when=asyncio.FIRST_COMPLETED)
                for task in (searching, changed, sampling):
                    task.cancel()
            if (left := self._sampler.agents) is not None and left is not self._agents:
                left.close()
            self._changed.clear()
            if self._elsewhere is not None:
                self._server.leave(self._elsewhere)
                self._elsewhere, found, self._latest = None, None, LatestReadings()
                self._alternation = Alternation()
                self._retention.clear()
                self._take(Facts())
            elif not searching.cancelled():
                found = searching.result()
                self._take(found.facts)

    def _absent(self, reason: str) -> None:
        known = self._server.has_answered
        gap = Gap("engine", "failed", reason) if known else Gap("engine", "absent", f"no answer yet: {reason}")
        self.add(Sample(at_seconds=self._clock.now_seconds(), gaps=(gap,)))

    def _take(self, facts: Facts) -> None:
        before = self._server.facts
        began_seconds = self._server.take(facts, self._clock.now_seconds())
        if began_seconds is not None:
            self._retention.begin_life(began_seconds, before)
            self._diagnoses.clear()
            self._record_lives()
        elif self._recorder is not None:
            self._recorder.order(SegmentStore.begin, facts, self._retention.earlier_facts)
        self._renewed()
        if facts.url is not None:
            _log.info("watches", url=facts.url, model=facts.model, version=facts.engine_version, pids=facts.server_pids)
