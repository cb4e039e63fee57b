"""Timelines, which the diagnosis judges: samples and the marks of the test steps, in ascending time.

Every feed makes this one type, so that live runs, recordings and Prometheus histories are judged by the same rules. In
a sample, a part that was not due is `None` and one that could not be read is a `Gap`: only the second is a problem.
Marks are moments and not intervals, so that a run that was killed still has its beginnings; `spans` puts them together.
A timeline never changes, so that results computed from it can be kept with it (`Timeline.once`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

from kvdiag.model.allocation_profile import MemoryProfile
from kvdiag.model.block_owners import BlockOwners
from kvdiag.model.facts import Facts
from kvdiag.model.readings import Allocator, Device, Engine, Gap, HostProcess
from kvdiag.model.validation import Checked

Made = TypeVar("Made")

Phase = Literal["begin", "offer", "release", "end"]

ProbeKind = Literal["first", "same_salt", "other_salt", "first_unsalted", "other_unsalted"]
"""A new prompt with a salt of the first tenant's; the same again; the same with another tenant's salt; a new prompt
without a salt; the same from another tenant, without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Checked):
    """What kvdiag's own requests held when a sample was taken.

    `requests` are open, waiting ones included; `resident_tokens` has, for each that has produced its first token,
    the tokens whose keys and values the engine must hold: prompt + output - 1, since the token just sampled has not
    been through the model yet. `refreshed`: it is of the moment in which a small request had just made the engine's
    gauges move, whose count of requests may be of an older step.
    """

    requests: int
    resident_tokens: tuple[int, ...] = ()
    refreshed: bool | None = None

    def _problem(self) -> str | None:
        if len(self.resident_tokens) > self.requests:
            return f"{len(self.resident_tokens)} resident requests of {self.requests} open"
        return None


PARTS: Mapping[str, str] = {
    "engine": "engines",
    "nvml": "devices",
    "torch_allocator": "allocators",
    "host": "host",
    "block_census": "block_owners",
}
"""The part of a `Sample` that each source provides. What keeps, thins and shows samples goes through these."""


EngineCount = Literal[
    "requests_running",
    "requests_waiting",
    "preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "requests_finished_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "running_output_tokens",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Checked):
    """Everything read at one moment. A part not due on this tick is `None`; one that could not be read is a `Gap`.

    `load` is what our own requests held right after the engines answered, `load_before` right before the request.
    `profiles` are those of the server's processes, made just before.
    """

    at_seconds: float
    engines: tuple[Engine, ...] | None = None
    devices: tuple[Device, ...] | None = None
    allocators: tuple[Allocator, ...] | None = None
    host: tuple[HostProcess, ...] | None = None
    block_owners: tuple[BlockOwners, ...] | None = None
    load: Load | None = None
    load_before: Load | None = None
    gaps: tuple[Gap, ...] = ()
    profiles: tuple[MemoryProfile, ...] | None = None

    @property
    def engine_refused(self) -> str | None:
        """Why the engines' answer was not used; `None` where it was, or none came."""
        if self.engines is not None:
            return None
        return next((gap.reason for gap in self.gaps if gap.source == "engine" and gap.kind == "refused"), None)

    @property
    def answered(self) -> bool:
        """Whether the engines answered, be the answer used or refused."""
        return self.engines is not None or self.engine_refused is not None

    @property
    def engines_idle(self) -> bool | None:
        """Whether every engine is idle; `None` if one does not report it or was not read."""
        # Every sample of a day passes through here several times.
        engines = self.engines or ()
        if len(engines) == 1:
            return engines[0].idle
        idle = [engine.idle for engine in engines]
        if False in idle:
            return False
        return True if idle and None not in idle else None

    @property
    def asleep(self) -> bool:
        """Whether any engine sleeps."""
        return True in [engine.asleep for engine in self.engines or ()]

    def total(self, *names: EngineCount) -> int | None:
        """The sum of some figures of all engines; `None` where one is not reported, or no engine was read."""
        counts = [getattr(engine, name) for engine in self.engines or () for name in names]
        return sum(counts) if counts and None not in counts else None

    @property
    def tokens_total(self) -> int | None:
        """Prompt and generated tokens of all engines; `None` where one is not reported."""
        return self.total("prompt_tokens_total", "generation_tokens_total")

    @property
    def open_requests(self) -> int:
        """Requests of all clients that run or wait in the engines, as far as they are reported."""
        return sum((engine.requests_running or 0) + (engine.requests_waiting or 0) for engine in self.engines or ())

    def sees_whole(self, requests: int) -> bool:
        """Whether all `requests` of a load of our own were resident in the engines while they were read."""
        # A preempted request has had its first token, and waits: its tokens are no longer resident.
        if self.engines is None or any(engine.requests_waiting for engine in self.engines):
            return False
        running = [engine.requests_running for engine in self.engines]
        after, before = self.load, self.load_before
        # On a busy machine the end of a stream is read late: the engine's own count is as old as its usage.
        counted = None not in running and not (after is not None and after.refreshed)
        if counted and sum(count or 0 for count in running) < requests:
            return False
        return (
            after is not None
            and len(after.resident_tokens) == requests
            and (before is None or len(before.resident_tokens) == requests)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How one request of the isolation probe tests the prefix cache; `other_key`: with another tenant's API key."""

    kind: ProbeKind
    other_key: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Checked):
    """Requests that a test step offers at once: unique random prompts, all generating `max_tokens`.

    `hold_seconds` is how long all of them should be resident together, so that several samples show them. `repeated`:
    the prompts and salts are the same for each such workload. `probe`: one request, of the tenant that it names.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    hold_seconds: float = 0.0
    repeated: bool = False
    probe: Probe | None = None

    @property
    def tokens_per_request(self) -> int:
        """Tokens a finished request has in the KV cache at its peak (the last sampled one is never stored)."""
        return max(self.prompt_tokens + self.max_tokens - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Checked):
    """The outcome of a step's requests. `errors` are the distinct messages of those that failed, bounded in length.

    `first_token_seconds` is the time to the first token, of a single request whose time is judged. `refreshes`: small
    requests in addition, sent because the engine's gauges move when a request ends.
    """

    completed: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    errors: tuple[str, ...] = ()
    first_token_seconds: float | None = None
    refreshes: int = 0

    @property
    def requests(self) -> int:
        """All that were sent."""
        return self.completed + self.failed + self.refreshes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark(Checked):
    """A moment of a test step, by its phase.

    `begin`: its lead-in begins; `offer`: its load is offered; `release`: its last request is over; `end`: it has
    settled.
    """

    at_seconds: float
    step: str
    cycle: int
    phase: Phase
    workload: Workload | None = None
    outcome: Outcome | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One cycle of one test step, put together from its marks; what never happened is `None`."""

    step: str
    cycle: int
    begin_seconds: float
    offer_seconds: float | None = None
    release_seconds: float | None = None
    end_seconds: float | None = None
    workload: Workload | None = None
    outcome: Outcome | None = None
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the span ran to its end."""
        return self.end_seconds is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Samples and marks in ascending time: the input of the diagnosis, from any feed.

    `earlier_facts` are facts that differed, each with the time until which they held.
    """

    samples: tuple[Sample, ...]
    marks: tuple[Mark, ...] = ()
    earlier_facts: tuple[tuple[float, Facts], ...] = ()
    _times: Sequence[float] = field(init=False, repr=False, compare=False)
    _known: dict[Hashable, object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse times that are not ascending."""
        times = [sample.at_seconds for sample in self.samples]
        for name, series in (("samples", times), ("marks", [mark.at_seconds for mark in self.marks])):
            # Sorting what is in order costs one comparison each.
            if series != sorted(series):
                raise ValueError(f"Timeline: {name} are not in ascending time")
        object.__setattr__(self, "_times", times)
        object.__setattr__(self, "_known", {})

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, computed once for this timeline and cached under `key`."""
        if key not in self._known:
            self._known[key] = make()
        return cast("Made", self._known[key])

    def forget(self) -> None:
        """Drop what `once` cached: some of it refers to the timeline, which would outlive its last use."""
        self._known.clear()

    def between(self, start_seconds: float, end_seconds: float) -> tuple[Sample, ...]:
        """Samples with start <= time <= end."""
        return self.samples[bisect_left(self._times, start_seconds) : bisect_right(self._times, end_seconds)]

    def spans(self, step: str | None = None) -> tuple[Span, ...]:
        """The test steps' spans in order of their beginnings, those of `step` alone where it is named."""
        spans: dict[tuple[str, int], Span] = {}
        for mark in self.marks:
            if step is not None and mark.step != step:
                continue
            begun = Span(step=mark.step, cycle=mark.cycle, begin_seconds=mark.at_seconds)
            known = spans.get((mark.step, mark.cycle), begun)
            reached = {} if mark.phase == "begin" else {f"{mark.phase}_seconds": mark.at_seconds}
            spans[mark.step, mark.cycle] = replace(
                known,
                workload=mark.workload or known.workload,
                outcome=mark.outcome or known.outcome,
                notes=known.notes + mark.notes,
                **reached,  # type: ignore[arg-type]  # a time by its name
            )
        return tuple(spans.values())
