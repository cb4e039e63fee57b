"""A soak as kvdiag observes it, from the memory that each component holds after each cycle. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvdiag.feeds.active.soak_plan import plan_soak
from kvdiag.model import Allocator, Device, Facts, HostProcess, Mark, Outcome, Phase, Sample, Timeline, Workload
from tests.builders.values import GIB, KIB, MIB, SERVER_PID, START_SECONDS, allocator, device, engine, pool, process
from tests.builders.worlds import World, facts

LOADS = plan_soak(720.0, Facts()).cycles
"""The cycles of the default soak: an idle one, a load, and so on."""

REQUESTS = [load.requests for load in LOADS]

Levels = Sequence[int]
"""Bytes after each cycle, beyond what was there before the first."""


def after_requests(each: float, loads: Sequence[Workload] = LOADS) -> list[int]:
    """What is there after each cycle where every request leaves so much behind."""
    levels, level = [], 0.0
    for load in loads:
        level += each * load.requests
        levels.append(int(level))
    return levels


def after_cycles(each: float, loads: Sequence[Workload] = LOADS) -> list[int]:
    """The same where every cycle does, idle or not."""
    return [int(each * (number + 1)) for number in range(len(loads))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a soak is to observe; a component that is `None` is not reported."""

    loads: Sequence[Workload] = LOADS
    server: Levels | None = field(default_factory=lambda: [0] * len(LOADS))
    server_reported: bool = True
    others: Levels = ()
    live: Levels | None = None
    cache: Levels = ()
    beside: Levels | None = None
    host: Levels | None = None
    blocks: Levels = ()
    other_prompts: Collection[int] = ()
    """Cycles in which another client's prompt is counted, too."""
    failing: Collection[int] = ()
    last_cycle: int | None = None
    """The cycle in which everything ends."""


def facts_of() -> Facts:
    """What is known of the server."""
    return facts(World())


def soak(seen: Seen) -> Timeline:
    """The timeline."""
    return _Soak(seen).whole()


def _at(levels: Levels, place: int) -> int:
    return levels[place] if levels else 0


class _Soak:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._samples: list[Sample] = []
        self._marks: list[Mark] = []
        self._now = START_SECONDS
        self._prompt_tokens = 0

    def whole(self) -> Timeline:
        for place, load in enumerate(self._seen.loads):
            self._mark(place, "begin", workload=load)
            self._mark(place, "offer")
            self._engine(place)
            if place == self._seen.last_cycle:
                break
            failed = load.requests if place in self._seen.failing else 0
            done = load.requests - failed
            self._prompt_tokens += done * load.prompt_tokens + 100 * (place in self._seen.other_prompts)
            outcome = Outcome(
                completed=done,
                failed=failed,
                prompt_tokens=done * load.prompt_tokens,
                generated_tokens=done * load.max_tokens,
                errors=("HTTP 500: internal error",) if failed else (),
            )
            self._mark(place, "release", outcome=outcome)
            for _ in range(3):
                self._engine(place)
            self._readings(place)
            self._engine(place)
            self._mark(place, "end")
        return Timeline(samples=tuple(self._samples), marks=tuple(self._marks))

    def _engine(self, place: int) -> None:
        usage = _at(self._seen.blocks, place) / pool().usage_blocks
        page = engine(usage=usage, prompt_tokens=self._prompt_tokens)
        self._add(lambda now: Sample(at_seconds=now, engines=(page,)))

    def _readings(self, place: int) -> None:
        seen = self._seen
        if seen.server is not None:
            held = self._device(place, seen.server)
            self._add(lambda now: Sample(at_seconds=now, devices=(held,)))
        if seen.live is not None:
            inside = self._allocator(place, seen.live)
            self._add(lambda now: Sample(at_seconds=now, allocators=(inside,)))
        if seen.host is not None:
            size = GIB + seen.host[place]
            core = HostProcess(pid=SERVER_PID, name="VLLM::EngineCore", resident_bytes=size + GIB, anonymous_bytes=size)
            self._add(lambda now: Sample(at_seconds=now, host=(core,)))

    def _device(self, place: int, server: Levels) -> Device:
        own = 16 * GIB + server[place]
        listed = (process(SERVER_PID, own),) if self._seen.server_reported else None
        return device(used_bytes=own + GIB + _at(self._seen.others, place), processes=listed)

    def _allocator(self, place: int, live: Levels) -> Allocator:
        allocated = 8 * GIB + live[place]
        reserved = allocated + GIB + _at(self._seen.cache, place)
        beside = None if self._seen.beside is None else reserved + GIB + self._seen.beside[place]
        return allocator(
            allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=beside, title="VLLM::EngineCore"
        )

    def _add(self, sample: Callable[[float], Sample]) -> None:
        self._now += 0.1
        self._samples.append(sample(self._now))

    def _mark(
        self, cycle: int, phase: Phase, *, workload: Workload | None = None, outcome: Outcome | None = None
    ) -> None:
        self._now += 0.01
        self._marks.append(
            Mark(at_seconds=self._now, step="soak", cycle=cycle, phase=phase, workload=workload, outcome=outcome)
        )


NONE = [0] * len(LOADS)

SOAKS: Mapping[str, Seen] = MappingProxyType(
    {
        "healthy": Seen(live=NONE, beside=NONE, host=NONE),
        "NVML alone": Seen(),
        "nothing but blocks": Seen(server=None),
        "torch leaks": Seen(live=after_requests(64 * KIB), beside=NONE, host=NONE),
        "blocks leak": Seen(blocks=after_requests(1)),
        "host leaks": Seen(host=after_requests(MIB)),
        "in idle, too": Seen(server=after_cycles(4 * MIB)),
        "a neighbour": Seen(others=after_cycles(4 * MIB)),
        "other traffic": Seen(other_prompts=range(5, 60)),
        "requests fail": Seen(failing=range(5, 60)),
        "cut short": Seen(last_cycle=20),
    }
)
"""One soak of every kind."""
