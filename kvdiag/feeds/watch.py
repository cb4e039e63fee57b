"""A server watched for as long as it takes: sampled, its history kept, diagnosed again and again, lost and found.

Everything happens in one event loop but what may take long: the driver, the agents' folder and the diagnosis have
threads of their own, so that neither holds up a sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live import AllocatorReading, Clock, DeviceReading, Pace, Sampler, ticks
from kvdiag.feeds.newest import Newest
from kvdiag.feeds.tiers import Tiers
from kvdiag.kv.served import all_pools_bytes
from kvdiag.model import Diagnosis, Facts, Gap, Sample, ServerState, Snapshot, Timeline
from kvdiag.sources.patience import Patient, StillBusy
from kvdiag.sources.vllm import VllmSource

_log = structlog.get_logger()

DIAGNOSIS_SECONDS = 10.0
MOST_DIAGNOSIS_RATIO = 0.01
"""Share of one core that the diagnosis may take: one that takes 0.2 s is made every 20 s."""

GIVEN_UP_SECONDS = 60.0
"""For one diagnosis: a day of eight GPUs takes a second."""

LOST_SEARCH_SECONDS = 10.0


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
class Found:
    """A server that answers: who it is, its metrics, and the NVML that shows its GPUs."""

    facts: Facts
    vllm: VllmSource
    nvml: Patient[DeviceReading]


class Watch:
    """One server's history, newest readings and newest diagnosis. `run` fills it, `snapshot` shows it."""

    def __init__(
        self,
        *,
        find: Callable[[], Awaitable[Found]],
        nvml: Patient[DeviceReading],
        agents: Patient[AllocatorReading] | None,
        limits: Limits,
        pace: Pace,
        diagnosis_seconds: float | None = None,
    ) -> None:
        """Read nothing yet. `find` looks for the server, and raises KvdiagError with the reason while there is none.

        Who gives `diagnosis_seconds` gets a diagnosis as often as that, whatever it costs. `nvml` shows this machine's
        GPUs, until a server says which are its own.
        """
        self._find = find
        self._nvml = nvml
        self._agents = agents
        self._limits = limits
        self._pace = pace
        self._diagnosis_seconds = diagnosis_seconds or DIAGNOSIS_SECONDS
        self._diagnosis_ratio = MOST_DIAGNOSIS_RATIO if diagnosis_seconds is None else 1.0
        self._judge: Patient[Diagnosis] = Patient(self._diagnose, "diagnosis")
        self._clock = Clock()
        self._tiers = Tiers()
        self._newest = Newest()
        self._sampler: Sampler | None = None
        self._state: ServerState = "starting"
        self._facts = Facts()
        self._tokens: dict[str, int] = {}
        self._anew = False
        self._returned = asyncio.Event()
        self._diagnosis: Diagnosis | None = None
        self._diagnosed_seconds: float | None = None
        self._snapshot: Snapshot | None = None

    async def run(self) -> None:
        """Watch for ever, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._diagnose_for_ever())
                group.create_task(self._follow())
        finally:
            self._judge.close()

    def snapshot(self) -> Snapshot:
        """All that is known now; the same value until something new is."""
        if self._snapshot is None:
            durations = {} if self._sampler is None else self._sampler.durations_seconds
            self._snapshot = Snapshot(
                state=self._state,
                facts=self._facts,
                newest=self._newest.sample(),
                sources=self._newest.sources(durations),
                diagnosis=self._diagnosis,
                diagnosed_seconds=self._diagnosed_seconds,
            )
        return self._snapshot

    def history(self) -> tuple[Sample, ...]:
        """What is kept of the server's samples: the newest minutes whole, the older ones thinned."""
        return self._tiers.samples()

    def add(self, entry: Sample) -> None:
        """Take the newest sample, from whichever source."""
        self._tiers.add(entry)
        for news in self._newest.add(entry):
            _log.info("gap", source=news.source, kind=news.kind, reason=news.reason)
        self._snapshot = None
        if entry.engines is not None:
            if self._began_anew(entry):
                self._anew = True
            if self._anew or self._state == "lost":
                self._returned.set()
            self._become("serving")
        elif self._state == "serving" and any(gap.source == "vllm" for gap in entry.gaps):
            self._become("lost")

    def _became_another(self, facts: Facts) -> bool:
        """Whether these are the facts of another server, or of the same one started anew."""
        before = self._facts
        if before.server_pids and facts.server_pids:
            return not {*before.server_pids} & {*facts.server_pids}
        return replace(before, gaps=(), server_pids=None) != replace(facts, gaps=(), server_pids=None)

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
        found: Found | None = None
        while True:
            self._sampler = Sampler(
                vllm=None if found is None else found.vllm,
                nvml=self._nvml if found is None else found.nvml,
                agents=self._agents,
                facts=self._facts,
                recorder=self,
                pace=self._pace,
                clock=self._clock,
                load=lambda: None,
            )
            async with asyncio.TaskGroup() as group:
                sampling = group.create_task(self._sampler.run())
                found = await (self._first() if found is None else self._next())
                sampling.cancel()
            self._now_watches(found.facts)

    async def _first(self) -> Found:
        """The server, once there is one. Until then each attempt leaves its reason as what is absent yet."""
        async for _ in ticks(self._pace.engine_seconds):
            try:
                return await self._found()
            except KvdiagError as error:
                gap = Gap(source="vllm", kind="absent", reason=f"starting: {error}")
                self.add(Sample(at_seconds=self._clock.now_seconds(), gaps=(gap,)))
        raise AssertionError("ticks never end")

    async def _next(self) -> Found:
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

    async def _found(self) -> Found:
        found = await self._find()
        # The cost model of a new server takes some 0.1 s; afterwards its answers are remembered.
        await asyncio.to_thread(all_pools_bytes, found.facts)
        return found

    def _now_watches(self, facts: Facts) -> None:
        if self._anew or self._became_another(facts):
            # The one before would be judged by the facts of this one.
            self._tiers.clear()
            self._diagnosis = self._diagnosed_seconds = None
        self._facts, self._snapshot, self._anew = facts, None, False
        self._tokens.clear()
        _log.info("watches", url=facts.url, model=facts.model, version=facts.engine_version, pids=facts.server_pids)

    async def _diagnose_for_ever(self) -> None:
        rest_until_seconds = 0.0
        async for _ in ticks(self._diagnosis_seconds):
            begun_seconds = self._clock.now_seconds()
            if begun_seconds < rest_until_seconds:
                continue
            await self._diagnose_once()
            took_seconds = self._clock.now_seconds() - begun_seconds
            rest_until_seconds = begun_seconds + took_seconds / self._diagnosis_ratio

    async def _diagnose_once(self) -> None:
        facts, samples = self._facts, self._tiers.samples()
        if not samples:
            return
        try:
            made = await self._judge.ask(GIVEN_UP_SECONDS, samples=samples, facts=facts)
        except StillBusy as busy:
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
        return diagnose(Timeline(samples=samples), facts, self._limits)
