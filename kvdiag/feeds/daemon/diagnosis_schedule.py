"""Diagnoses a growing history again and again, on a thread of its own and within a share of one core."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import structlog

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.lives import Lifetime, lifetimes
from kvdiag.feeds.live.sampling import Clock, ticks
from kvdiag.model import Diagnosis, Facts, Timeline
from kvdiag.sources.worker_thread import ThreadedReader

_log = structlog.get_logger()

DIAGNOSIS_SECONDS = 10.0
MAX_DIAGNOSIS_RATIO = 0.003
"""Share of one core that the diagnosis may take, of the 1 % that the whole has: 0.3 s of CPU every 100 s."""

MAX_REST_SECONDS = 300.0
"""Between two diagnoses, however much CPU one takes."""

GIVEN_UP_SECONDS = 60.0
"""Timeout of one diagnosis: a day of eight GPUs takes a second."""


class DiagnosisSchedule:
    """The newest diagnosis. It is made every `every_seconds`, or as rarely as `cpu_ratio` of one core allows."""

    def __init__(
        self,
        subject: Callable[[], tuple[Timeline, Facts, Limits]],
        renewed: Callable[[], None],
        *,
        clock: Clock,
        every_seconds: float = DIAGNOSIS_SECONDS,
        cpu_ratio: float = MAX_DIAGNOSIS_RATIO,
    ) -> None:
        """Diagnose what `subject` returns at that moment, and call `renewed` after each diagnosis."""
        self._subject = subject
        self._renewed = renewed
        self._clock = clock
        self._every_seconds = every_seconds
        self._cpu_ratio = cpu_ratio
        self._thread: ThreadedReader[Diagnosis] = ThreadedReader(self._diagnose, "diagnosis")
        self._cpu_seconds = 0.0
        self._since: dict[tuple[str, str | None], list[float]] = {}
        self._misdated = False
        self.newest: Diagnosis | None = None
        self.made_seconds: float | None = None

    async def run(self) -> None:
        """Diagnose until cancelled."""
        rest_until_seconds = 0.0
        async for _ in ticks(self._every_seconds):
            begun_seconds = self._clock.steady_seconds()
            if self.newest is not None and begun_seconds < rest_until_seconds and not self._misdated:
                continue
            self._cpu_seconds = 0.0
            await self._renew()
            rest_until_seconds = begun_seconds + min(self._cpu_seconds / self._cpu_ratio, MAX_REST_SECONDS)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def clear(self) -> None:
        """Forget the newest diagnosis: it is of another process."""
        self.newest = self.made_seconds = None

    def move(self, seconds: float) -> None:
        """Correct all times after the clock was set by so much; those inside a diagnosis by making it again."""
        self._misdated = True
        if self.made_seconds is not None:
            self.made_seconds += seconds
        self._since = {who: [one + seconds for one in times] for who, times in self._since.items()}

    async def _renew(self) -> None:
        timeline, facts, limits = self._subject()
        if not timeline.samples:
            return
        self._misdated = False
        try:
            made = await self._made(timeline, facts, limits)
        except Exception as error:  # noqa: BLE001  the old one stays, which its timestamp shows; sampling continues
            _log.error("diagnosis", reason=f"{type(error).__name__}: {error}")
            _log.debug("mistake", exc_info=True)
            return
        if self._subject()[1] is not facts or self._misdated:
            return  # of the previous process, or dated by a clock that was set meanwhile
        made = self._dated(made)
        if self.newest is None or made.worst != self.newest.worst:
            wrong = [finding.id for finding in made.findings if finding.status in ("suspect", "fault")]
            _log.info("diagnosis", worst=made.worst, findings=wrong)
        self.newest, self.made_seconds = made, self._clock.now_seconds()
        self._renewed()

    async def _made(self, timeline: Timeline, facts: Facts, limits: Limits) -> Diagnosis:
        return await self._thread.ask(GIVEN_UP_SECONDS, timeline=timeline, facts=facts, limits=limits)

    def _dated(self, made: Diagnosis) -> Diagnosis:
        """The diagnosis with the time since when each suspect and fault of each life has been found."""
        before_seconds, lives = -math.inf, []
        since: dict[tuple[str, str | None], list[float]] = {}
        for life in made.lives:
            end_seconds = made.end_seconds if life.end_seconds is None else life.end_seconds
            found = []
            for one in life.findings:
                known = (at for at in self._since.get((one.id, one.holder), ()) if before_seconds < at <= end_seconds)
                at_seconds = next(known, one.since_seconds or end_seconds)
                since.setdefault((one.id, one.holder), []).append(at_seconds)
                found.append(replace(one, since_seconds=at_seconds))
            lives.append(replace(life, findings=tuple(found)))
            before_seconds = end_seconds
        self._since = since
        present = {(one.id, one.holder): one for one in lives[-1].findings}
        findings = tuple(present.get((one.id, one.holder), one) for one in made.findings)
        return replace(made, lives=tuple(lives), findings=findings)

    def _diagnose(self, *, timeline: Timeline, facts: Facts, limits: Limits) -> Diagnosis:
        """Count the CPU time of the thread: on a busy machine elapsed time is no measure of the cost."""
        begun_seconds = time.thread_time()
        try:
            made = diagnose(timeline, facts, limits)
            if self.newest is None and not self._since:
                for life in lifetimes(timeline, facts, limits):
                    for who, since_seconds in _first_found(life, limits):
                        self._since.setdefault(who, []).append(since_seconds)
            return made
        finally:
            timeline.forget()
            self._cpu_seconds += time.thread_time() - begun_seconds


def _first_found(life: Lifetime, limits: Limits) -> Iterator[tuple[tuple[str, str | None], float]]:
    """Since when each finding of a life holds, by bisection: an earlier run of the daemon left its samples only."""
    samples = life.timeline.samples

    @cache
    def found(count: int) -> dict[tuple[str, str | None], float]:
        timeline = Timeline(samples=samples[:count])
        past = diagnose(timeline, life.facts, limits).lives[-1].findings
        timeline.forget()
        return {(one.id, one.holder): one.since_seconds or samples[count - 1].at_seconds for one in past}

    for who in found(len(samples)):
        yield who, found(bisect_left(range(len(samples)), True, key=lambda count: who in found(count)))[who]
