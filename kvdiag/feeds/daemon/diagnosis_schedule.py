"""Diagnoses a growing history again and again, on a thread of its own and within a share of one core."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.feeds.live.sampling import Clock, ticks
from kvdiag.model import Diagnosis, Facts, Sample, Timeline
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
        subject: Callable[[], tuple[tuple[Sample, ...], Facts, Limits]],
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
        self.newest: Diagnosis | None = None
        self.made_seconds: float | None = None

    async def run(self) -> None:
        """Diagnose until cancelled."""
        rest_until_seconds = 0.0
        async for _ in ticks(self._every_seconds):
            begun_seconds = self._clock.steady_seconds()
            if self.newest is not None and begun_seconds < rest_until_seconds:
                continue
            self._cpu_seconds = 0.0
            await self._renew()
            rest_until_seconds = begun_seconds + min(self._cpu_seconds / self._cpu_ratio, MAX_REST_SECONDS)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def clear(self) -> None:
        """Forget the newest diagnosis: it is of another server."""
        self.newest = self.made_seconds = None

    def move(self, seconds: float) -> None:
        """Correct the time of the newest diagnosis after the clock was set."""
        if self.made_seconds is not None:
            self.made_seconds += seconds

    async def _renew(self) -> None:
        samples, facts, limits = self._subject()
        if not samples:
            return
        try:
            made = await self._made(samples, facts, limits)
        except Exception as error:  # noqa: BLE001  the old one stays, which its timestamp shows; sampling continues
            _log.error("diagnosis", reason=f"{type(error).__name__}: {error}")
            return
        if self._subject()[1] is not facts:
            return  # of the previous server
        if self.newest is None or made.worst != self.newest.worst:
            wrong = [finding.id for finding in made.findings if finding.status in ("suspect", "fault")]
            _log.info("diagnosis", worst=made.worst, findings=wrong)
        self.newest, self.made_seconds = made, self._clock.now_seconds()
        self._renewed()

    async def _made(self, samples: tuple[Sample, ...], facts: Facts, limits: Limits) -> Diagnosis:
        return await self._thread.ask(GIVEN_UP_SECONDS, samples=samples, facts=facts, limits=limits)

    def _diagnose(self, *, samples: tuple[Sample, ...], facts: Facts, limits: Limits) -> Diagnosis:
        """Count the CPU time of the thread: on a busy machine elapsed time is no measure of the cost."""
        begun_seconds = time.thread_time()
        try:
            return diagnose(Timeline(samples=samples), facts, limits)
        finally:
            self._cpu_seconds = time.thread_time() - begun_seconds
