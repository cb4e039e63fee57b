"""What an active run observes of a `World`, as a timeline, and its diagnosis.

`run(world)` marks and samples as kvdiag/feeds/active/step_runner.py does: engines at 10 Hz, devices apart from them
at 1 Hz (their processes every fifth time and in every settling), unjudged warm-up requests after the baseline, then
each step's cycles with a quiet lead-in and a settle-out.
"""

from collections.abc import Sequence

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rule import Rule
from kvdiag.diagnosis.steps import STEPS, Step
from kvdiag.model import (
    Diagnosis,
    Engine,
    Finding,
    Load,
    Mark,
    Outcome,
    Phase,
    Sample,
    StepResult,
    Timeline,
    Workload,
)
from tests.builders.answers import only
from tests.builders.gpus import gpu, rank_allocator
from tests.builders.values import NO_ANSWER, START_SECONDS
from tests.builders.worlds import World, facts

TICK = 10
"""One engine reading, in hundredths of a second."""

DEVICE_TICKS = 10
PROCESS_TICKS = 50
QUIET_TICKS = 13
SETTLE_TICKS = 3
HOLD_TICKS = 40

PREFILL_TOKENS_PER_TICK = 4096
TOKENS_PER_TICK = 16


def run(world: World | None = None) -> Timeline:
    """A whole active run against a world."""
    return _Run(world or World()).whole()


def judged(world: World | None = None) -> Diagnosis:
    """The diagnosis of an active run."""
    world = world or World()
    return diagnose(run(world), facts(world))


def of_run(judge: Rule, world: World) -> Finding:
    """The one finding of a rule on an active run."""
    return only(judge, run(world), facts(world))


def step_result(step: Step, world: World, timeline: Timeline | None = None) -> StepResult:
    """The result of a step on a world's run, or on another timeline of it."""
    return step.judge(run(world) if timeline is None else timeline, facts(world), DEFAULT_LIMITS)


class _OverError(Exception):
    """The run is cut short: no further samples."""


class _Run:
    """A run under way: the memory and blocks in use on the server and its devices, and the samples so far."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._samples: list[Sample] = []
        self._marks: list[Mark] = []
        self._now = 0
        self._ticks = 0
        self._lost = False
        self._passing = 0
        engines = max(len(world.pools), 1)
        self._leaked = [0] * engines
        self._prompt_tokens = [0] * engines
        self._generated_tokens = [0] * engines
        self._preemptions = 0
        self._requests = 0
        self._settlings = 0

    def whole(self) -> Timeline:
        """All steps, or as many as the world lets through."""
        try:
            self._idle(QUIET_TICKS)
            for one in STEPS:
                if one.workload.requests == 0:
                    self._hold_still(one.id)
                    self._warm_up()
                else:
                    for cycle in range(one.cycles + (one.id in self._world.again)):
                        self._cycle(one.id, cycle, self._world.workloads.get(one.id, one.workload))
        except _OverError:
            pass
        return Timeline(samples=tuple(self._samples), marks=tuple(self._marks))

    def _hold_still(self, name: str) -> None:
        self._mark(name, 0, "begin")
        self._read_devices(processes=True)
        self._idle(HOLD_TICKS)
        self._settle()
        self._mark(name, 0, "end")

    def _warm_up(self) -> None:
        for cycle in range(2 * max(len(self._world.pools), 1)):
            workload = Workload(requests=1, prompt_tokens=512, max_tokens=32)
            self._mark("warmup", cycle, "begin")
            self._mark("warmup", cycle, "offer")
            outcome = self._load("warmup", workload)
            self._mark("warmup", cycle, "release", outcome=outcome)
            self._mark("warmup", cycle, "end")

    def _cycle(self, name: str, cycle: int, workload: Workload) -> None:
        self._mark(name, cycle, "begin", workload=workload, notes=self._world.notes)
        self._settle()
        self._mark(name, cycle, "offer")
        outcome = self._load(name, workload, cycle)
        self._mark(name, cycle, "release", outcome=outcome)
        self._settle()
        self._mark(name, cycle, "end")

    def _load(self, name: str, workload: Workload, cycle: int = 0) -> Outcome:
        world = self._world
        if name == world.cut_short_in:
            self._engines(self._held([workload.prompt_tokens]), running=workload.requests)
            raise _OverError
        if name == world.lost_in:
            self._lost = True
        text = "connection refused" if self._lost else world.failing.get(name)
        looking = name not in world.unseen and (cycle > 0 or name not in world.again)
        self._passing = int(name in world.passing)
        at_once = min(world.resident_at_once or workload.requests, workload.requests)
        done = 0
        while done < workload.requests and text is None:
            batch = min(at_once, workload.requests - done)
            waiting = workload.requests - done - batch
            self._prefill(workload, batch, waiting, looking=looking)
            if name == "concurrent":
                self._preemptions += world.preemptions if not done else 0
            self._decode(workload, batch, waiting, looking=looking)
            done += batch
        if text is not None and not self._lost:
            self._prefill(workload, workload.requests, 0, looking=looking)
        self._passing = 0
        for number in range(done):
            at = number % len(self._leaked)
            self._leaked[at] += world.leaked_blocks_per_request
            self._prompt_tokens[at] += workload.prompt_tokens
            self._generated_tokens[at] += workload.max_tokens
        self._requests += done
        self._prompt_tokens[0] += world.other_prompt_tokens.get(name, 0)
        return Outcome(
            completed=done,
            failed=workload.requests - done,
            prompt_tokens=done * workload.prompt_tokens,
            generated_tokens=done * workload.max_tokens,
            errors=() if text is None else (text,),
        )

    def _prefill(self, workload: Workload, batch: int, waiting: int, *, looking: bool) -> None:
        total = batch * workload.prompt_tokens
        for computed in range(PREFILL_TOKENS_PER_TICK, total, PREFILL_TOKENS_PER_TICK):
            parts = [
                min(max(computed - number * workload.prompt_tokens, 0), workload.prompt_tokens)
                for number in range(batch)
            ]
            held = self._held([part for part in parts if part])
            self._tick(held, running=batch, waiting=waiting, open_requests=batch + waiting, looking=looking)

    def _decode(self, workload: Workload, batch: int, waiting: int, *, looking: bool) -> None:
        for generated in range(1, workload.max_tokens, TOKENS_PER_TICK):
            resident = [workload.prompt_tokens + generated - 1] * batch
            self._tick(
                self._held(resident),
                running=batch,
                waiting=waiting,
                open_requests=batch + waiting,
                resident=tuple(resident),
                looking=looking,
            )

    def _held(self, resident: Sequence[int]) -> list[int]:
        """Blocks of each engine that requests with so many tokens hold, dealt out in turn."""
        held = [0] * len(self._leaked)
        for number, tokens in enumerate(resident):
            at = number % len(held)
            if self._world.pools:
                one = self._world.pools[at]
                held[at] += -(-tokens // one.block_tokens) + self._world.extra_blocks_per_request
                if one.sliding_window_tokens is not None:
                    held[at] -= max(tokens - one.sliding_window_tokens + 1, 0) // one.block_tokens
        return held

    def _idle(self, ticks: int) -> None:
        for _ in range(ticks):
            self._tick([0] * len(self._leaked), running=0)

    def _settle(self) -> None:
        self._settlings += 1
        self._idle(SETTLE_TICKS)
        self._read_devices(processes=True)
        self._idle(1)

    def _tick(
        self,
        held: Sequence[int],
        *,
        running: int,
        waiting: int = 0,
        open_requests: int = 0,
        resident: tuple[int, ...] = (),
        looking: bool = True,
    ) -> None:
        """One engine reading, and after it the devices' where one is due."""
        if self._lost:
            for _ in range(5):
                self._add(Sample(at_seconds=self._time(), load=Load(requests=0), gaps=(NO_ANSWER,)))
            raise _OverError
        if looking:
            self._engines(
                held, running=running, waiting=waiting, load=Load(requests=open_requests, resident_tokens=resident)
            )
        self._now += TICK
        self._ticks += 1
        if self._ticks % DEVICE_TICKS == 1:
            self._read_devices(processes=self._ticks % PROCESS_TICKS == 1)

    def _engines(self, held: Sequence[int], *, running: int, waiting: int = 0, load: Load | None = None) -> None:
        world = self._world
        page = []
        for number in range(len(self._leaked)):
            ours = sum(1 for request in range(running) if request % len(self._leaked) == number)
            usage = None
            if world.pools and world.usage_reported:
                one = world.pools[number]
                null = one.usage_blocks - one.usable_blocks
                kept = self._leaked[number] + world.held_at_start_blocks
                kept += self._late() + 200 * self._passing if number == 0 else 0
                usage = min((held[number] + kept + null) / one.usage_blocks, 1.0)
                if waiting:
                    usage = max(usage, 1 - 1 / one.usage_blocks)
            page.append(
                Engine(
                    engine=str(number) if not world.pools else world.pools[number].engine,
                    kv_usage_ratio=usage,
                    requests_running=ours + world.busy + (self._passing if number == 0 else 0),
                    requests_waiting=waiting if number == 0 else 0,
                    requests_waiting_for_capacity=waiting if number == 0 else 0,
                    preemptions_total=self._preemptions if number == 0 else 0,
                    prompt_tokens_total=self._prompt_tokens[number],
                    generation_tokens_total=self._generated_tokens[number],
                    prefix_queries_total=self._prompt_tokens[number],
                    prefix_hits_total=0,
                )
            )
        self._add(Sample(at_seconds=self._time(), engines=tuple(page), load=load or Load(requests=0)))

    def _late(self) -> int:
        late = self._world.late_blocks
        return late[min(self._settlings, len(late)) - 1] if late and self._settlings else 0

    def _read_devices(self, *, processes: bool) -> None:
        world = self._world
        if world.agents:
            held = tuple(rank_allocator(world, index, requests=self._requests) for index in range(world.gpus))
            self._add(Sample(at_seconds=self._time(), allocators=held))
        if world.nvml is not None:
            self._add(Sample(at_seconds=self._time(), gaps=(world.nvml,)))
            return
        indices = sorted({*range(world.gpus), *world.foreign})
        at_seconds = self._time()
        devices = tuple(
            gpu(world, index, requests=self._requests, run_centiseconds=self._now, processes=processes)
            for index in indices
        )
        self._add(Sample(at_seconds=at_seconds, devices=devices))

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def _mark(
        self,
        name: str,
        cycle: int,
        phase: Phase,
        *,
        workload: Workload | None = None,
        outcome: Outcome | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._marks.append(
            Mark(
                at_seconds=self._time(),
                step=name,
                cycle=cycle,
                phase=phase,
                workload=workload,
                outcome=outcome,
                notes=notes,
            )
        )

    def _time(self) -> float:
        """A moment later than every one before."""
        self._now += 1
        return START_SECONDS + self._now / 100
