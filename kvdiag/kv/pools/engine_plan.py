"""What a plan for an engine without vLLM's block manager consists of, whichever engine it is.

An engine's module sizes its pools (`EnginePool`), lists what one GPU holds (`Part`), and states what a request may
need; `EnginePlan.outcome` compares the demand with it: fits, fits tightly, does not fit. Without a GPU there is no
outcome as long as the pools hold the demand. Levers are named by the engine's own flags.
"""

import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import TIGHT_HEADROOM_RATIO, Demand, Outcome

_TABLE: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "pool_types.json") or b"")
TITLES: Mapping[str, str] = _TABLE["titles"]
"""How engines are written."""

POOL_TYPES: Mapping[str, Sequence[str]] = _TABLE
"""Model types by what an engine does with their windows and states; the users of each list name its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """One pool on one GPU: how many units requests can hold, and all bytes of it, padding included.

    `streams` are llama.cpp's: each has so many units of its own.
    """

    name: str
    unit: str
    units: int
    bytes: int
    unit_tokens: int = 1
    streams: int = 1
    layers: int = 0
    k_bytes: int | None = None
    v_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What one use takes of a GPU; an estimate is marked."""

    name: str
    bytes: int
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the GPUs that a plan is for, and what a number of them makes of weights and overheads.

    `weights` gives the bytes of each pipeline stage on one GPU for a tensor- and a pipeline-parallel size, and for the
    ranks that divide attention; `overheads` the estimate for a tensor-parallel size and so many tokens in a step.
    """

    gpu_bytes: int
    weights: Callable[[int, int, int], tuple[int, ...]]
    overheads: Callable[[int, int], Overheads]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLever:
    """One changed flag: what it costs otherwise, and the outcome with it."""

    change: str
    price: str
    outcome: Outcome | None
    max_requests: int
    gained_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What an engine makes of a GPU and a demand. Bytes are of one GPU, that with the least headroom.

    `capacity_tokens` is the capacity of all data-parallel groups, each of which reports its own. `headroom_bytes` is
    what the demand leaves of the pools, negative by what is missing; `shortfall_bytes` is missing before there is any
    pool. `reserve_shortfall_bytes` is what activations and graphs are estimated to need beyond the memory outside the
    pools. `settings` are the resolved ones, defaults included.
    """

    engine: str
    demand: Demand
    pools: tuple[EnginePool, ...]
    capacity_tokens: int
    longest_request_tokens: int
    max_requests: int
    max_running_requests: int | None = None
    kv_bytes_per_token: float | None = None
    headroom_bytes: int = 0
    shortfall_bytes: int = 0
    reserve_shortfall_bytes: int = 0
    gpus: int = 1
    groups: int = 1
    gpu_bytes: int | None = None
    parts: tuple[Part, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    levers: tuple[EngineLever, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def pool_bytes(self) -> int:
        """All pools of one GPU."""
        return sum(pool.bytes for pool in self.pools)

    @property
    def admits_demand(self) -> bool:
        """Whether the pools hold the demand."""
        fits = self.demand.requests <= self.max_requests and self.demand.context_tokens <= self.longest_request_tokens
        return fits and not self.shortfall_bytes

    @property
    def outcome(self) -> Outcome | None:
        """The answer; None without a GPU as long as the pools hold the demand."""
        if not self.admits_demand:
            return Outcome.DOES_NOT_FIT
        if self.gpu_bytes is None:
            return None
        tight = self.headroom_bytes < TIGHT_HEADROOM_RATIO * self.pool_bytes
        return Outcome.TIGHT if tight or self.reserve_shortfall_bytes else Outcome.FITS


def helpful(plan: EnginePlan, tried: Iterable[tuple[str, str, EnginePlan | None]]) -> Iterator[EngineLever]:
    """Changed flags, what each costs otherwise, and the plan with it -> those with which the server starts, serves at
    least one request, and is better off: the demand fits, room for activations, headroom.
    """
    for change, price, better in tried:
        if better is None or not better.max_requests or better.shortfall_bytes or _merit(better) <= _merit(plan):
            continue
        yield EngineLever(
            change=change,
            price=price,
            outcome=better.outcome,
            max_requests=better.max_requests,
            gained_bytes=better.headroom_bytes - plan.headroom_bytes,
        )


def _merit(plan: EnginePlan) -> tuple[bool, bool, bool, int]:
    return (
        plan.admits_demand,
        not plan.shortfall_bytes,
        not plan.reserve_shortfall_bytes,
        plan.headroom_bytes,
    )
