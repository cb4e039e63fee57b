"""The active feed: offers each test step's workload, samples all the while, and marks the spans. It judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.observe import published_since
from kvdiag.diagnosis.step import Step
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live import Clock, Recorder, Sampler
from kvdiag.feeds.plan import PlannedStep, held_longer, plan
from kvdiag.feeds.requests import Requests, Speed
from kvdiag.model import Facts, Mark, Outcome, Phase, Sample, Timeline
from kvdiag.sources.http import NO_ANSWER

QUIET_SECONDS = 1.0
"""Watched for other traffic before anything is offered: two engine steps of the slowest server fit in."""

LEAD_IN_SAMPLES = 3
SETTLED_SAMPLES = 3
"""Idle readings in a row before and after a load. The diagnosis needs two that agree."""

WHOLE_LOAD_SAMPLES = DEFAULT_LIMITS.load_samples
"""Readings of a load with all its requests resident without which it is offered once more."""

CROWDED_SAMPLES = 3
"""Readings under load of which each has to show somebody waiting before a longer one is not tried."""

MOST_OFFERS = 3
"""Times that a load is offered, each time held longer, until it is seen whole. A server on a busy machine may take half
a second for a page, and its first requests are slow: a length that follows from them can be over between two pages."""

SETTLE_SECONDS = 10.0
"""Longest wait for the engine to become idle after a load; an abort is processed within a step (seen: 50 ms)."""

SLOW_SETTLE_SECONDS = 60.0
"""The same for a server that answers too slowly for its readings to tell by then whether it is idle."""

SETTLE_READINGS = 20
"""Readings of the engine after which it counts as busy, not as slow."""

IMPATIENT_SECONDS = 0.5

PUBLICATION_SECONDS = 3.0
"""An agent publishes once a second and is read once a second: what it tells of a moment is here two seconds later."""

RECENT_SAMPLES = 200
"""Some fifteen seconds of readings."""

STEP_SECONDS = 120.0
"""Longest that one load may take; then its requests are given up and the step is unknown."""

LOST_SAMPLES = 5
"""Failed readings in a row after which the server counts as gone and nothing more is offered."""

WARMUP = "warmup"
WARMUP_PROMPT_TOKENS = 512
WARMUP_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is happening, for a person who watches."""

    number: int
    steps: int
    title: str
    detail: str = ""


class ServerLostError(Exception):
    """The server stopped answering while the steps ran."""


class ActiveFeed:
    """Runs the steps against one server while a sampler reads it."""

    def __init__(
        self,
        *,
        steps: tuple[Step, ...],
        facts: Facts,
        sampler: Sampler,
        requests: Requests,
        recorder: Recorder,
        clock: Clock,
        progress: Callable[[Progress], None],
    ) -> None:
        """Keep the parts; nothing is offered yet."""
        self._steps = steps
        self._facts = facts
        self._sampler = sampler
        self._requests = requests
        self._recorder = recorder
        self._clock = clock
        self._progress = progress
        self._impatient = False

    async def run(self) -> Timeline:
        """All steps in order; what was seen so far where the server stops answering.

        Raises:
            KvdiagError: the server has other traffic, or refuses or does not finish the first request, or the trace
                cannot be written.

        """
        sampling = asyncio.create_task(self._sampler.run())
        offering = asyncio.create_task(self._offer_all())
        try:
            done, _ = await asyncio.wait({sampling, offering}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    raise _alone(error)
        except ServerLostError:
            pass  # what was seen until then is judged; the steps that did not run are unknown
        finally:
            offering.cancel()
            sampling.cancel()
            await asyncio.gather(sampling, offering, return_exceptions=True)
        return self._recorder.timeline()

    async def _offer_all(self) -> None:
        await self._wait_for_quiet()
        total = len(self._steps)
        planned: tuple[PlannedStep, ...] = ()
        if not self._facts.forced and _engine_samples(self._recorder.since(0))[-1].engines_idle is None:
            # Engines of a data-parallel server have no gauges before their first request: no baseline without them.
            self._tell(1, total, self._steps[0].title, "warming up")
            planned = plan(self._steps, self._facts, await self._warm_up())
        for number, step in enumerate(self._steps, start=1):
            if step.workload.requests == 0:
                self._tell(number, total, step.title)
                await self._hold_still(step)
                continue
            if not planned:
                self._tell(number, total, step.title, "warming up")
                planned = plan(self._steps, self._facts, await self._warm_up())
            await self._run_step(next(one for one in planned if one.step is step), number, total)

    async def _wait_for_quiet(self) -> None:
        """Refuse where somebody else's requests would be measured as ours."""
        first = self._recorder.count
        seen = await self._recorder.wait_for(lambda samples: len(_engine_samples(samples)) >= LEAD_IN_SAMPLES, 10.0)
        await asyncio.sleep(QUIET_SECONDS)
        samples = _engine_samples(self._recorder.since(first))
        if any(engine.asleep for sample in samples for engine in sample.engines or ()):
            raise KvdiagError("the engine is asleep, its pool and weights are not on the device: wake it up first")
        if self._facts.forced or not seen:
            return
        if (unreadable := next((gap.reason for sample in samples for gap in sample.gaps), None)) is not None:
            raise KvdiagError(f"the server's own figures cannot be used: {unreadable}")
        busy = max((_open_requests(sample) for sample in samples), default=0)
        if busy or _tokens(samples[0]) != _tokens(samples[-1]):
            what = f"{busy} requests run or wait" if busy else "tokens are being generated"
            raise KvdiagError(
                f"the server has other traffic ({what}): the steps would measure it as theirs; "
                "stop it, or pass --force and accept that most steps cannot tell"
            )

    async def _warm_up(self) -> Speed | None:
        """Requests that nobody judges: lazily loaded kernels and workspaces look like a leak on the first one.

        They tell how fast the server is; two an engine, since gauges of an engine that never ran may be absent.
        """
        longest = self._facts.max_model_len_tokens or WARMUP_PROMPT_TOKENS + WARMUP_OUTPUT_TOKENS
        output = min(WARMUP_OUTPUT_TOKENS, max(longest // 4, 1))
        prompt = min(WARMUP_PROMPT_TOKENS, max(longest - output, 1))
        speed: Speed | None = None
        for cycle in range(2 * max(len(self._facts.pools), 1)):
            self._mark(WARMUP, cycle, "begin")
            self._mark(WARMUP, cycle, "offer")
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    measured = await self._requests.measure(prompt, output)
            except TimeoutError:
                raise KvdiagError(
                    f"the server did not finish one request of {prompt} tokens in {STEP_SECONDS:.0f} s"
                ) from None
            if isinstance(measured, str):
                if measured.startswith("HTTP 4"):
                    raise KvdiagError(f"the server refuses completions: {measured[:200]}")
                if measured == NO_ANSWER:
                    # Every further request would be waited for as long.
                    raise KvdiagError(f"a completion of {prompt} tokens brings nothing: {measured}")
                return None
            speed = measured
            outcome = Outcome(completed=1, failed=0, prompt_tokens=prompt, generated_tokens=output)
            self._mark(WARMUP, cycle, "release", outcome=outcome)
            self._mark(WARMUP, cycle, "end")
        return speed

    async def _hold_still(self, step: Step) -> None:
        """A span with no load at all."""
        self._mark(step.id, 0, "begin")
        await self._sampler.read_devices(processes=True)
        await asyncio.sleep(step.workload.hold_seconds)
        await self._settle()
        self._mark(step.id, 0, "end")

    async def _run_step(self, planned: PlannedStep, number: int, total: int) -> None:
        """All cycles, and more than planned where the load was not seen; what is judged comes after the longer ones."""
        seen, cycle = False, 0
        while cycle < planned.cycles or (not seen and cycle < MOST_OFFERS):
            detail = f"cycle {cycle + 1} of {planned.cycles}" if planned.cycles > 1 else ""
            if 0 < cycle < MOST_OFFERS and not seen:
                planned, detail = held_longer(planned, self._facts), f"{detail} held longer".strip()
            self._tell(number, total, planned.step.title, detail)
            seen = await self._run_cycle(planned, cycle) or seen
            cycle += 1

    async def _run_cycle(self, planned: PlannedStep, cycle: int) -> bool:
        """Offer a workload on a span of its own; whether it was seen, or offering it for longer would not help.

        Seen is a load that enough readings saw with all of its requests resident.
        """
        step, first = planned.step.id, self._recorder.count
        self._mark(step, cycle, "begin", planned=planned)
        # Growth over cycles is judged by what there was before the first and after each.
        await self._settle(publications=planned.cycles > 1 and cycle == 0)
        self._mark(step, cycle, "offer")
        outcome = await self._load(planned)
        self._mark(step, cycle, "release", outcome=outcome)
        await self._settle(publications=planned.cycles > 1)
        self._mark(step, cycle, "end")
        samples = self._recorder.since(first)
        whole = [sample for sample in samples if sample.sees_whole(planned.workload.requests)]
        return outcome.failed > 0 or len(whole) >= WHOLE_LOAD_SAMPLES or (cycle > 0 and _crowded(samples))

    async def _load(self, planned: PlannedStep) -> Outcome:
        try:
            async with asyncio.timeout(STEP_SECONDS):
                return await self._requests.offer(planned.workload)
        except TimeoutError:
            return Outcome(
                completed=0,
                failed=planned.workload.requests,
                prompt_tokens=0,
                generated_tokens=0,
                errors=(f"given up after {STEP_SECONDS:.0f} s",),
            )

    @property
    def _settle_seconds(self) -> float:
        return IMPATIENT_SECONDS if self._impatient else SETTLE_SECONDS

    async def _settle(self, *, publications: bool = False) -> None:
        """Wait until the engine has been idle for some readings, with one reading of the devices among them.

        With `publications`, also until the server's agents, where there are any, have told of this quiet.
        """
        first = self._recorder.count

        def settled(_: list[Sample]) -> bool:
            return _idle_streak(self._recorder.since(first)) >= SETTLED_SAMPLES

        def told(_: list[Sample]) -> bool:
            samples = self._recorder.since(first)
            return _idle_streak(samples) >= SETTLED_SAMPLES or len(_engine_samples(samples)) >= SETTLE_READINGS

        if not await self._checked_wait(settled, self._settle_seconds) and not self._impatient:
            await self._checked_wait(told, SLOW_SETTLE_SECONDS - SETTLE_SECONDS)
            # Other traffic, then: every further wait would be as long and as much in vain.
            self._impatient = _idle_streak(self._recorder.since(first)) < SETTLED_SAMPLES
        if not any(sample.devices for sample in self._recorder.since(first) if sample.engines_idle):
            await self._sampler.read_devices(processes=True)
        if publications and any(sample.allocators for sample in self._recorder.since(-RECENT_SAMPLES)):
            quiet_seconds = self._clock.now_seconds()
            await self._checked_wait(
                lambda samples: any(one.allocators and published_since(one, quiet_seconds) for one in samples),
                PUBLICATION_SECONDS,
            )
        # One more engine reading, so that these readings lie inside the idle stretch.
        await self._checked_wait(lambda samples: _idle_streak(samples) >= 1, self._settle_seconds)

    async def _checked_wait(self, done: Callable[[list[Sample]], bool], seconds: float) -> bool:
        found = await self._recorder.wait_for(lambda samples: done(samples) or self._lost(), seconds)
        if self._lost():
            raise ServerLostError
        return found

    def _lost(self) -> bool:
        """Whether the engine's last readings all failed."""
        readings = [sample for sample in self._recorder.since(-8 * LOST_SAMPLES) if _is_engine_reading(sample)]
        last = readings[-LOST_SAMPLES:]
        return len(last) == LOST_SAMPLES and all(sample.engines is None for sample in last)

    def _mark(
        self,
        step: str,
        cycle: int,
        phase: Phase,
        *,
        planned: PlannedStep | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        self._recorder.add(
            Mark(
                at_seconds=self._clock.now_seconds(),
                step=step,
                cycle=cycle,
                phase=phase,
                workload=None if planned is None else planned.workload,
                outcome=outcome,
                notes=() if planned is None else planned.notes,
            )
        )

    def _tell(self, number: int, total: int, title: str, detail: str = "") -> None:
        self._progress(Progress(number=number, steps=total, title=title, detail=detail))


def _alone(error: BaseException) -> BaseException:
    """The first error of a task group's, which hands even a single one on in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _crowded(samples: list[Sample]) -> bool:
    """Whether some of our requests waited as long as the load lasted: held longer they would wait longer."""
    loaded = [sample for sample in _engine_samples(samples) if _open_requests(sample)]
    waiting = [sample for sample in loaded if any(engine.requests_waiting for engine in sample.engines or ())]
    return len(loaded) >= CROWDED_SAMPLES and len(waiting) == len(loaded)


def _is_engine_reading(sample: Sample) -> bool:
    return sample.engines is not None or any(gap.source == "vllm" for gap in sample.gaps)


def _engine_samples(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.engines is not None]


def _idle_streak(samples: list[Sample]) -> int:
    """How many of the newest engine readings in a row show idle engines and no request of ours."""
    streak = 0
    for sample in reversed(samples):
        if not _is_engine_reading(sample):
            continue
        if not sample.engines_idle or (sample.load is not None and sample.load.requests):
            break
        streak += 1
    return streak


def _open_requests(sample: Sample) -> int:
    return sum((engine.requests_running or 0) + (engine.requests_waiting or 0) for engine in sample.engines or ())


def _tokens(sample: Sample) -> int:
    return sum(
        (engine.prompt_tokens_total or 0) + (engine.generation_tokens_total or 0) for engine in sample.engines or ()
    )
