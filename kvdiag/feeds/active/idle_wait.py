"""Waiting until the engine is idle between loads, so that each span ends in memory that can be compared.

An idle engine takes no step, so gauges that its last step left behind stay until the next one. Where a server runs
several API processes, each writes the gauges, and the newest write counts (vLLM, v1/metrics/loggers.py, multiprocess
mode `mostrecent`): one that lags on a busy host overwrites the figures of the last step with those of an earlier one.
Small requests then make the engines take another step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvdiag.diagnosis.blocks.stall import same_work, shows_steps
from kvdiag.diagnosis.timeline_queries import published_since
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active.run_timeline import MarkedRun, engine_samples, idle_streak, is_engine_reading
from kvdiag.feeds.live.alternation import SEVERAL_SERVERS
from kvdiag.model import Sample

SETTLED_SAMPLES = 3
"""Idle samples in a row before and after a load. The diagnosis needs two that agree."""

SETTLE_SECONDS = 10.0
"""Longest wait for the engine to become idle after a load; an abort is processed within a step (measured: 50 ms)."""

SLOW_SETTLE_SECONDS = 60.0
"""The same for a server that answers too slowly to show by then whether it is idle."""

SETTLE_READINGS = 20
"""Engine samples after which it counts as busy, not as slow."""

IMPATIENT_SECONDS = 0.5

MAX_REFRESHES = 3
"""Times that small requests are sent to an engine whose gauges stand still: theirs may be left behind, too."""

PUBLICATION_SECONDS = 3.0
"""An agent publishes once a second and is read once a second: its figures of a moment arrive two seconds later."""

RECENT_SAMPLES = 200
"""Some fifteen seconds of samples."""

LOST_SAMPLES = 5
"""Failed samples in a row after which the server counts as lost and nothing more is offered."""


class ServerLostError(Exception):
    """The server stopped answering while the steps ran."""


@dataclass(kw_only=True)
class IdleWait(MarkedRun):
    """A run that waits for an idle engine."""

    _settle_seconds: float = field(default=SETTLE_SECONDS, init=False)

    async def _settle(self, *, publications: bool = False, current: bool = True) -> int:
        """Wait until the engine has been idle for some samples, with one sample of the devices among them.

        With `publications`, also until the server's agents, if there are any, have published since then; with
        `current`, until figures that the engine reports late are of this idle interval. Returns the prompt tokens of
        the small requests that it took.
        """
        first = self.recorder.count
        late_seconds = self.sampler.facts.capabilities.late_seconds if current else 0.0
        current_seconds = self.sampler.clock.now_seconds() + late_seconds

        def settled(_: list[Sample]) -> bool:
            is_current = not late_seconds or self.sampler.clock.now_seconds() >= current_seconds
            return is_current and idle_streak(self.recorder.since(first)) >= SETTLED_SAMPLES

        def reported(_: list[Sample]) -> bool:
            return settled([]) or len(engine_samples(self.recorder.since(first))) >= SETTLE_READINGS

        small_tokens = 0
        is_patient = self._settle_seconds == SETTLE_SECONDS
        if not await self._checked_wait(settled, self._settle_seconds + late_seconds) and is_patient:
            await self._checked_wait(reported, SLOW_SETTLE_SECONDS - SETTLE_SECONDS)
            for _ in range(MAX_REFRESHES):
                if settled([]) or not self._stands_still(first):
                    break
                engines = max(len(self.sampler.facts.pools), 1)
                answered_tokens = await self.requests.refresh(engines, self._settle_seconds)
                small_tokens += answered_tokens
                if not answered_tokens:
                    break  # the engines are paused or hang: further requests would stay open as well
                await self._checked_wait(settled, self._settle_seconds)
            if not settled([]):
                # There is other traffic: every further wait would take as long without success.
                self._settle_seconds = IMPATIENT_SECONDS
        if not any(sample.devices for sample in self.recorder.since(first) if sample.engines_idle):
            await self.sampler.read_devices(processes=True)
        if publications and any(sample.allocators for sample in self.recorder.since(-RECENT_SAMPLES)):
            quiet_seconds = self.sampler.clock.now_seconds()
            await self._checked_wait(
                lambda samples: any(one.allocators and published_since(one, quiet_seconds) for one in samples),
                PUBLICATION_SECONDS,
            )
        # One more engine sample, so that these samples lie inside the idle interval.
        await self._checked_wait(lambda samples: idle_streak(samples) >= 1, self._settle_seconds)
        return small_tokens

    def _stands_still(self, first: int) -> bool:
        """Whether the gauges show requests, of which no step has done anything in the newest samples."""
        newest = engine_samples(self.recorder.since(first))[-SETTLE_READINGS:]
        return (
            len(newest) == SETTLE_READINGS
            and shows_steps(self.sampler.facts)
            and newest[-1].open_requests > 0
            and same_work(newest[0], newest[-1])
        )

    async def _checked_wait(self, done: Callable[[list[Sample]], bool], seconds: float) -> bool:
        found = await self.recorder.wait_for(lambda samples: done(samples) or self._lost(), seconds)
        if self._lost():
            raise ServerLostError
        return found

    def _lost(self) -> bool:
        newest = self.recorder.since(-1)
        if several := next((gap.reason for one in newest for gap in one.gaps if gap.reason in SEVERAL_SERVERS), None):
            # The samples so far may be of any of them.
            raise KvdiagError(several)
        readings = [sample for sample in self.recorder.since(-8 * LOST_SAMPLES) if is_engine_reading(sample)]
        last = readings[-LOST_SAMPLES:]
        return len(last) == LOST_SAMPLES and all(sample.engines is None for sample in last)
