"""The active feed: runs the test steps against a server while a sampler reads it. It judges nothing.

In this order: wait until the server is idle, or refuse; warm it up, which also measures its speed; offer each step's
workload on a span of its own, again and held longer if it was too short to be sampled whole; then the soak, if asked
for. Between loads it waits until the engine is idle, so that each span ends in memory that can be compared. If the
server stops answering, the timeline ends there and the remaining steps are unknown.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from kvdiag.diagnosis.growth.soak_memory import SOAK_WARMUP, disturbance
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import ISOLATION, SOAK, Step
from kvdiag.diagnosis.timeline_queries import renewed, samples_needed
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active.idle_wait import RECENT_SAMPLES, SLOW_SETTLE_SECONDS, IdleWait, ServerLostError
from kvdiag.feeds.active.load_generator import Speed, within
from kvdiag.feeds.active.run_timeline import (
    crowded,
    engine_samples,
    unfinished,
)
from kvdiag.feeds.active.soak_plan import SoakPlan
from kvdiag.feeds.active.step_plan import PlannedStep, fits_together, plan, repeated
from kvdiag.formatting import format_duration, plural
from kvdiag.model import MemoryProfile, Outcome, Sample, Timeline, Workload
from kvdiag.sources.http import NO_ANSWER

QUIET_SAMPLES = 15
"""Samples without other traffic before anything is offered: 1.4 seconds, into which two engine steps of the slowest
server fit. Counted in samples, because a server that answers slowly also runs its requests slowly."""

MAX_OFFERS = 3
"""Times that a load is offered, each time held longer, until it is sampled whole. A server on a busy machine may take
half a second for its metrics, and its first requests are slow: a load whose length follows from them can fall between
two scrapes."""

STEP_SECONDS = 120.0
"""Longest that one load may take; then its requests are given up and the step is unknown."""

MAX_READ_SECONDS = 2.0
"""How long the engine is read at an interval of the load's own: a load that lasts longer has samples enough."""

SPOILT_CYCLES = 3
"""Cycles of a soak in a row with other traffic or failed requests, after which it ends."""

SETTLING_SECONDS = 1.0
"""Of a cycle of a soak, for its samples: five of the engine, one of the host and one of the devices."""

LATE_RATIO = 1.5
"""Of a soak's planned time: on a server that is slower than it was measured no further cycle begins then."""

NOTHING = Outcome(completed=0, failed=0, prompt_tokens=0, generated_tokens=0)
"""The outcome of a cycle without requests."""

WARMUP = "warmup"
PROFILE = "profile"
WARMUP_PROMPT_TOKENS = 512
WARMUP_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The step in progress, for the terminal."""

    number: int
    steps: int
    title: str
    detail: str = ""


@dataclass(kw_only=True)
class ActiveFeed(IdleWait):
    """Runs the steps against one server while a sampler reads it.

    `begin` is called when the server is not refused, before anything is offered; `soak` plans what follows the steps,
    for a server of that speed; `profile` begins profiles of what grew in the soak, `None` where nothing did; `instead`
    runs in the place of all that, after the warm-up.
    """

    steps: tuple[Step, ...]
    progress: Callable[[Progress], None]
    begin: Callable[[], None] = lambda: None
    soak: Callable[[Speed | None], SoakPlan] | None = None
    profile: Callable[[Timeline], Awaitable[tuple[MemoryProfile, ...]] | None] | None = None
    instead: Callable[[Speed | None, Callable[[str], None]], Awaitable[None]] | None = None

    async def run(self) -> Timeline:
        """The timeline of all steps in order, up to the moment at which the server stops answering.

        Raises:
            KvdiagError: the server has other traffic, or refuses or does not finish the first request, or the trace
                cannot be written.
        """
        sampling = asyncio.create_task(self.sampler.run())
        offering = asyncio.create_task(self._offer_all())
        try:
            done, _ = await asyncio.wait({sampling, offering}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    raise _alone(error)
        except ServerLostError:
            pass  # the samples until then are judged; the steps that did not run are unknown
        finally:
            offering.cancel()
            sampling.cancel()
            await asyncio.gather(sampling, offering, return_exceptions=True)
        return self.recorder.timeline()

    async def _offer_all(self) -> None:
        await self._wait_for_quiet()
        self.begin()
        if self.instead is not None:
            tell = partial(self._tell, 1, 1, ISOLATION.title)
            tell("warming up")
            await self.instead(await self._warm_up(), tell)
            return
        total = len(self.steps) + (self.soak is not None)
        measured: list[Speed | None] = []

        async def warmed_up(number: int, title: str) -> Speed | None:
            if not measured:
                self._tell(number, total, title, "warming up")
                measured.append(await self._warm_up())
            return measured[0]

        newest = engine_samples(self.recorder.since(0))[-1:]
        moved = self.sampler.facts.capabilities.on_completion
        if moved or (not self.sampler.facts.forced and all(one.engines_idle is None for one in newest)):
            # Engines of a data-parallel server have no gauges before their first request.
            await warmed_up(1, self.steps[0].title)
        for number, step in enumerate(self.steps, start=1):
            if step.workload.requests == 0:
                self._tell(number, total, step.title)
                self._mark(step.id, 0, "begin")
                await self.sampler.read_devices(processes=True)
                await asyncio.sleep(step.workload.hold_seconds)
                await self._settle()
                self._mark(step.id, 0, "end")
            else:
                (planned,) = plan((step,), self.sampler.facts, await warmed_up(number, step.title))
                await self._run_step(planned, number, total)
        if self.soak is not None:
            soak = self.soak(await warmed_up(total, SOAK.title))
            await self._run_soak(soak, total)
            making = None if self.profile is None else self.profile(self.recorder.timeline())
            if making is not None:
                self._tell(total, total, SOAK.title, "profiling what grew")
                await self._profile(making, soak)

    async def _profile(self, making: Awaitable[tuple[MemoryProfile, ...]], soak: SoakPlan) -> None:
        """Repeat the soak's largest load until the profiles are made, which become a sample."""
        made = asyncio.ensure_future(making)
        try:
            for cycle in count():
                if made.done():
                    break
                self._mark(PROFILE, cycle, "begin", workload=soak.warmup[0])
                self._mark(PROFILE, cycle, "offer")
                outcome = await self._load(soak.warmup[0])
                self._mark(PROFILE, cycle, "release", outcome=outcome)
                self._mark(PROFILE, cycle, "end")
                if outcome.failed:
                    await asyncio.wait({made}, timeout=1.0)
            profiles = await made
        finally:
            made.cancel()
        # A server that is lost meanwhile has its profiles all the same.
        self.recorder.add(Sample(at_seconds=self.sampler.clock.now_seconds(), profiles=profiles))
        await self._settle()

    async def _run_soak(self, soak: SoakPlan, number: int) -> None:
        """The warm-up and the cycles, until they are spoilt or late: what there is by then is judged."""
        for cycle, workload in enumerate(soak.warmup):
            self._mark(SOAK_WARMUP, cycle, "begin", workload=workload)
            self._mark(SOAK_WARMUP, cycle, "offer")
            self._mark(SOAK_WARMUP, cycle, "release", outcome=await self._load(workload))
            await self._settle()
            self._mark(SOAK_WARMUP, cycle, "end")
        spoilt, latest = 0, self.sampler.clock.now_seconds() + LATE_RATIO * soak.seconds
        for cycle, workload in enumerate(soak.cycles):
            left = format_duration((len(soak.cycles) - cycle) * soak.cycle_seconds)
            detail = f"cycle {cycle + 1} of {len(soak.cycles)}, {left} left"
            self._tell(number, number, SOAK.title, detail)
            await self._soak_cycle(workload, cycle, soak)
            span = self.recorder.timeline().spans(SOAK.id)[-1]
            spoilt = spoilt + 1 if disturbance(self.recorder.timeline(), span, self.sampler.facts) else 0
            if spoilt >= SPOILT_CYCLES or self.sampler.clock.now_seconds() > latest:
                return

    async def _soak_cycle(self, workload: Workload, cycle: int, soak: SoakPlan) -> None:
        """One cycle of the planned length, with a sample of every source at its end."""
        late_seconds = self.sampler.facts.capabilities.late_seconds
        settling_seconds = min(SETTLING_SECONDS, soak.cycle_seconds / 2.0) + late_seconds
        rest_seconds = self.sampler.clock.now_seconds() + soak.cycle_seconds - settling_seconds
        self._mark(SOAK.id, cycle, "begin", workload=workload, notes=() if cycle else soak.notes)
        self._mark(SOAK.id, cycle, "offer")
        outcome = NOTHING
        if workload.requests:
            outcome = await self._load(workload)
            self._mark(SOAK.id, cycle, "release", outcome=outcome)
        await self._checked_wait(lambda _: False, max(rest_seconds - self.sampler.clock.now_seconds(), 0.0))
        if not workload.requests:
            self._mark(SOAK.id, cycle, "release", outcome=outcome)
        await self.sampler.read_host()
        small_tokens = await self._settle(publications=True)
        self._mark(SOAK.id, cycle, "end", outcome=_with_small_requests(outcome, small_tokens))

    async def _wait_for_quiet(self) -> None:
        """Refuse if other clients' requests would be measured as ours."""
        first = self.recorder.count

        def watched(_: list[Sample]) -> bool:
            return len(engine_samples(self.recorder.since(first))) >= QUIET_SAMPLES or self._lost()

        await self.recorder.wait_for(watched, SLOW_SETTLE_SECONDS)
        read = self.recorder.since(first)
        samples = engine_samples(read)
        if any(sample.asleep for sample in samples):
            raise KvdiagError("the engine is asleep, without its pool and weights on the GPU: wake it up first")
        if self.sampler.facts.forced or not samples:
            return
        if (unreadable := next((gap.reason for sample in samples for gap in sample.gaps), None)) is not None:
            raise KvdiagError(f"the server's metrics cannot be used: {unreadable}")
        busy = max((sample.open_requests for sample in samples), default=0)
        if busy or samples[0].tokens_total != samples[-1].tokens_total:
            what = (
                plural(busy, "request runs or waits", "requests run or wait") if busy else "tokens are being generated"
            )
            raise KvdiagError(
                f"the server has other traffic ({what}), which the steps would count as their own; "
                "stop it, or pass --force: most steps then become unknown"
            )

    async def _warm_up(self) -> Speed | None:
        """Send requests that are not judged: lazily loaded kernels and workspaces look like a leak on the first one.

        Returns the measured speed. Two an engine, since gauges of an engine that never ran may be absent.
        """
        longest = self.sampler.facts.max_model_len_tokens or WARMUP_PROMPT_TOKENS + WARMUP_OUTPUT_TOKENS
        output = min(WARMUP_OUTPUT_TOKENS, max(longest // 4, 1))
        prompt = min(WARMUP_PROMPT_TOKENS, max(longest - output, 1))
        speed: Speed | None = None
        for cycle in range(2 * max(len(self.sampler.facts.pools), 1)):
            self._mark(WARMUP, cycle, "begin")
            self._mark(WARMUP, cycle, "offer")
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    measured = await self.requests.measure(prompt, output)
            except TimeoutError:
                raise KvdiagError(
                    f"the server did not finish one request of {prompt} tokens in {format_duration(STEP_SECONDS)}"
                ) from None
            if isinstance(measured, str):
                if measured.startswith("HTTP 4"):
                    raise KvdiagError(f"the server refuses completions: {measured[:200]}")
                if measured == NO_ANSWER:
                    # Every further request would be waited for as long.
                    reason = unfinished(measured, self.recorder.since(-RECENT_SAMPLES), self.sampler.facts)
                    raise KvdiagError(f"a completion of {prompt} tokens failed: {reason}")
                return None
            speed = measured
            small = int(self.sampler.facts.capabilities.on_completion)
            outcome = Outcome(completed=1, failed=0, prompt_tokens=prompt, generated_tokens=output, refreshes=small)
            self._mark(WARMUP, cycle, "release", outcome=outcome)
            self._mark(WARMUP, cycle, "end")
        return speed

    async def _run_step(self, planned: PlannedStep, number: int, total: int) -> None:
        """Run all cycles, and more than planned if the load was not sampled whole; only the last cycles are judged."""
        judged, whole, offers, cycle, first = False, True, 1, 0, 0
        while cycle < planned.cycles or (not judged and cycle < MAX_OFFERS):
            detail = f"cycle {cycle + 1} of {planned.cycles}" if planned.cycles > 1 else ""
            if not (judged or whole) and offers < MAX_OFFERS:
                waited = any(one.total("requests_waiting") for one in self.recorder.since(first))
                planned = repeated(planned, self.sampler.facts, waited=waited)
                detail = f"{detail}, repeated".removeprefix(", ")
                offers += 1
            self._tell(number, total, planned.step.title, detail)
            first = self.recorder.count
            whole = await self._run_cycle(planned, cycle)
            # The first of several cycles is not judged.
            judged = judged or (whole and (cycle > 0 or planned.cycles == 1))
            cycle += 1

    async def _run_cycle(self, planned: PlannedStep, cycle: int) -> bool:
        """Offer a workload on a span of its own; return whether the next cycle can run as planned.

        That is so if enough samples have all of its requests resident, or offering it for longer would not help.
        """
        step, first = planned.step.id, self.recorder.count
        self._mark(step, cycle, "begin", workload=planned.workload, notes=planned.notes)
        # Growth over cycles is judged by what there was before the first and after each.
        small_tokens = await self._settle(publications=planned.cycles > 1 and cycle == 0, current=cycle == 0)
        self._mark(step, cycle, "offer")
        outcome = await self._load(planned.workload, read_seconds=planned.read_seconds)
        facts, sampled = self.sampler.facts, self.recorder.since(first)
        errors = tuple(dict.fromkeys(unfinished(error, sampled, facts) for error in outcome.errors))
        outcome = replace(outcome, errors=errors)
        self._mark(step, cycle, "release", outcome=outcome)
        small_tokens += await self._settle(publications=planned.cycles > 1)
        self._mark(step, cycle, "end", outcome=_with_small_requests(outcome, small_tokens))
        samples = self.recorder.since(first)
        whole = [sample for sample in renewed(samples, facts) if sample.sees_whole(planned.workload.requests)]
        enough = len(whole) >= samples_needed(facts, DEFAULT_LIMITS)
        is_limited = cycle > 0 and crowded(samples) and fits_together(planned.workload, facts)
        return outcome.failed > 0 or enough or is_limited

    async def _load(self, workload: Workload, *, read_seconds: float | None = None) -> Outcome:
        """Offer a workload; with `read_seconds`, read the engine at that interval, not only at the sampler's ticks."""
        offering = asyncio.ensure_future(within(STEP_SECONDS, self.requests.offer(workload), workload.requests))
        clock = self.sampler.clock
        until_seconds = clock.steady_seconds() + MAX_READ_SECONDS
        try:
            while read_seconds is not None and clock.steady_seconds() < until_seconds:
                if (await asyncio.wait({offering}, timeout=read_seconds))[0]:
                    break
                await self.sampler.read_engine(between_ticks=True)
            return await offering
        finally:
            offering.cancel()

    def _tell(self, number: int, total: int, title: str, detail: str = "") -> None:
        self.progress(Progress(number=number, steps=total, title=title, detail=detail))


def _with_small_requests(outcome: Outcome, small_tokens: int) -> Outcome | None:
    """A span's outcome with the prompt tokens of the small requests that its waits took; `None` without any."""
    return replace(outcome, prompt_tokens=outcome.prompt_tokens + small_tokens) if small_tokens else None


def _alone(error: BaseException) -> BaseException:
    """The first error of an exception group, in which a task group raises even a single one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
