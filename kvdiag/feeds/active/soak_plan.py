"""What a soak will offer to this server: its warm-up, then idle and load cycles alternately. Pure."""

from dataclasses import dataclass, replace
from itertools import chain, permutations

from kvdiag.diagnosis.steps import SOAK
from kvdiag.feeds.active.load_generator import Speed
from kvdiag.feeds.active.step_plan import admitted, shortened
from kvdiag.formatting import format_duration
from kvdiag.model import Facts, Workload

MIN_SECONDS = 300.0
MAX_SECONDS = 7200.0

PAIR_SECONDS = 24.0
"""An idle cycle and a load cycle, each with some seconds of rest: memory that is freed late is back by then."""

MIN_PAIRS = 18
"""Fourteen with new content, so that two may be spoilt before fewer than twelve are left."""

MAX_PAIRS = 240

REPEATED_SHARE = 6
MIN_REPEATS = 4
"""One pair in so many repeats its contents, at the end, at least four: the first caches them, three are compared."""

DOSES = (1, 2, 4)
ORDERS = tuple(permutations(DOSES))
"""Each dose once in three cycles, in every order by turns: no drift can pass for a dose."""

LOAD_SHARE = 0.4
"""Share of a cycle that its load may take by the measured speed; in the rest memory is released."""

MIN_PROMPT_TOKENS = 16

RENEWED_MARGIN_SECONDS = 2.0
"""For some samples of current figures, where the engine's are late: a cycle waits until its tokens were counted, and
once more until the usage is of the time after them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """The warm-up, largest shape first, and the cycles, each of `cycle_seconds`; idle ones offer no requests."""

    warmup: tuple[Workload, ...]
    cycles: tuple[Workload, ...]
    cycle_seconds: float
    notes: tuple[str, ...]

    @property
    def requests(self) -> int:
        """Requests of everything."""
        return sum(load.requests for load in (*self.warmup, *self.cycles))

    @property
    def tokens(self) -> int:
        """Tokens of everything, prompts and outputs."""
        return sum(load.requests * (load.prompt_tokens + load.max_tokens) for load in (*self.warmup, *self.cycles))

    @property
    def seconds(self) -> float:
        """How long the cycles take."""
        return len(self.cycles) * self.cycle_seconds


def plan_soak(
    seconds: float, facts: Facts, speed: Speed | None = None, *, cycle_seconds: float | None = None
) -> SoakPlan:
    """A soak of so many seconds; `cycle_seconds` makes its cycles as long as that instead, and keeps their number."""
    late_seconds = facts.capabilities.late_seconds
    wait_seconds = late_seconds + facts.capabilities.renewed_seconds
    shortest = (wait_seconds + RENEWED_MARGIN_SECONDS) / (1.0 - LOAD_SHARE) if late_seconds else 0.0
    pair_seconds = max(PAIR_SECONDS, 2 * shortest)
    pairs = min(max(int(seconds / pair_seconds), MIN_PAIRS), MAX_PAIRS)
    length = max(seconds / (2 * pairs), shortest) if cycle_seconds is None else cycle_seconds
    most, output_tokens = max(DOSES) * SOAK.workload.requests, admitted(SOAK.workload, facts)[0].max_tokens
    limits = [
        (pool.usable_blocks // most * pool.block_tokens - output_tokens, "the largest load must fit in the pool")
        for pool in facts.pools
        if pool.sliding_window_tokens is None
    ]
    if speed is not None:
        tokens = int(LOAD_SHARE * length * speed.prompt_tokens_per_second / most)
        limits.append((tokens, "the server cannot process more in a cycle"))
    single, notes = shortened(SOAK.workload, facts, limits, least_tokens=MIN_PROMPT_TOKENS)
    repeats = max(pairs // REPEATED_SHARE, MIN_REPEATS)
    if 2 * pairs * length > seconds and cycle_seconds is None:
        age = format_duration(late_seconds)
        longer = f"{format_duration(2 * pairs * length)} instead of {format_duration(seconds)}"
        notes += (f"{longer}: the engine's figures may be {age} old, and each cycle waits for current ones",)
    idle = replace(single, requests=0, prompt_tokens=0, max_tokens=0)
    doses = [ORDERS[pair // len(DOSES) % len(ORDERS)][pair % len(DOSES)] for pair in range(pairs - repeats)]
    loads = [replace(single, requests=dose * single.requests) for dose in doses]
    largest = replace(single, requests=max(DOSES) * single.requests)
    loads += [replace(largest, repeated=True)] * repeats
    return SoakPlan(
        warmup=tuple(replace(single, requests=dose * single.requests) for dose in sorted(DOSES, reverse=True)),
        cycles=tuple(chain.from_iterable((idle, load) for load in loads)),
        cycle_seconds=length,
        notes=notes,
    )
