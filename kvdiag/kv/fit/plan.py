"""Will it fit: the memory budget of an engine, what a pool then serves, and what to change when it does not.

In this order: the budget of each stage's GPU, its pool, the blocks that the demand needs, the headroom of the worst
stage, then the most requests and the longest context that fit with the other one as demanded. A demand fits, fits
tightly or does not; tightly means with under a tenth of the pool free, or not with the most that estimated overheads
may come to. The budget follows vLLM v1/worker/gpu_worker.py::determine_available_memory: a fraction of the device's
total, less weights, context, activation and graphs, is the KV pool. Everything is per GPU and of its pipeline stage; a
plan is as good as its worst stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, MAX_TOKENS, check_range
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.layout.capacity import NULL_BLOCKS, Capacity, longest_context_tokens, pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture

_MAX_REQUESTS = 1 << 24
_MAX_TRAFFIC = 1_000_000_000
# From here on the normal distribution gives a Poisson quantile to within a request, and exp(-mean) is no longer tiny.
_NORMAL_FROM = 500.0
# v1/worker/gpu_worker.py, config/cache.py::CacheConfig.gpu_memory_utilization (0.90 before vLLM 0.20).
DEFAULT_MEMORY_FRACTION = 0.92


class Outcome(StrEnum):
    """The answer, worst last."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"


# Less room than this, as a share of the pool, is called tight.
TIGHT_HEADROOM_RATIO = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Overheads):
    """The memory of one GPU of one pipeline stage, in bytes, by use.

    `override_bytes` is the pool that --num-gpu-blocks-override or --kv-cache-memory-bytes sets, `None` without them.
    """

    total_bytes: int
    memory_fraction_ratio: float
    weights_bytes: int
    override_bytes: int | None = None

    def __post_init__(self) -> None:
        check_range("gpu", self.total_bytes, 1, MAX_BYTES)
        if not 0 < self.memory_fraction_ratio <= 1:
            raise KvModelError(
                f"memory_fraction is {self.memory_fraction_ratio}: it must be above 0 and at most 1", "memory_fraction"
            )

    @property
    def usable_bytes(self) -> int:
        """What the engine may take at all (v1/worker/utils.py::request_memory)."""
        return min(self.total_bytes, math.ceil(self.total_bytes * self.memory_fraction_ratio))

    @property
    def reserve_bytes(self) -> int:
        """What the fraction leaves to others."""
        return self.total_bytes - self.usable_bytes

    @property
    def shortfall_bytes(self) -> int:
        """Bytes missing before there is any pool; 0 where there is one."""
        return max(0, -self._rest)

    @property
    def pool_bytes(self) -> int:
        """The KV cache: what is left for it, or less with an override; 0 where the rest does not even fit."""
        return self.available_bytes if self.override_bytes is None else min(self.available_bytes, self.override_bytes)

    @property
    def available_bytes(self) -> int:
        """What is left for the KV cache, with an override or without."""
        return max(0, self._rest)

    @property
    def pool_range_bytes(self) -> tuple[int, int]:
        """The pool with the most and with the least that the overheads may come to; a pool set by hand stays."""
        if self.override_bytes is not None:
            return self.pool_bytes, self.pool_bytes
        return max(0, self._rest - self.more_bytes), max(0, self._rest + self.less_bytes)

    @property
    def unused_bytes(self) -> int:
        """What an override leaves of the memory available to the KV cache."""
        return self.available_bytes - self.pool_bytes

    @property
    def overrun_bytes(self) -> int:
        """What an override needs beyond the memory available to the KV cache; 0 where it fits."""
        return max(0, (self.override_bytes or 0) - self.available_bytes)

    @property
    def _rest(self) -> int:
        overheads = self.context_bytes + self.activation_bytes + self.graph_bytes + self.overhead_bytes
        return self.usable_bytes - self.weights_bytes - overheads


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served: so many requests at once, each of so many tokens."""

    context_tokens: int
    requests: int

    def __post_init__(self) -> None:
        check_range("context", self.context_tokens, 1, MAX_TOKENS)
        check_range("concurrency", self.requests, 1, _MAX_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a deployment gives for a demand.

    `max_requests` and `max_context_tokens` are what still fits with the other one as demanded. Headroom is of the stage
    with the least, negative by what is missing: for the demand, or for a pool set by hand where that is more.
    """

    outcome: Outcome
    demand: Demand
    capacity: Capacity
    budgets: tuple[Budget, ...]
    blocks_needed: int
    headroom_bytes: int
    max_requests: int
    max_context_tokens: int
    limiting_stage: int

    @property
    def keeps_cache(self) -> bool:
        """Whether the model keeps anything between steps; an encoder does not, and has neither blocks nor a longest
        context.
        """
        return any(self.capacity.bytes_per_block)

    @property
    def headroom_ratio(self) -> float:
        """Headroom as a share of the limiting stage's pool; without a cache, of what the engine may take."""
        budget = self.budgets[self.limiting_stage]
        whole = budget.pool_bytes if self.keeps_cache else budget.usable_bytes
        return self.headroom_bytes / whole if whole else -1.0

    @property
    def needed_bytes(self) -> int:
        """Pool bytes that the demand needs on the limiting stage, the null block included."""
        return (self.blocks_needed + NULL_BLOCKS) * self.capacity.bytes_per_block[self.limiting_stage]


def make_plan(
    architecture: Architecture,
    deployment: Deployment,
    *,
    budgets: Sequence[Budget],
    demand: Demand,
    most_context_tokens: int | None = None,
) -> Plan:
    """Weigh a demand against the pools that the budgets leave. `budgets` has one entry per pipeline stage. The engine
    refuses requests beyond `most_context_tokens`, so a longer demand does not fit into any pool.
    """
    layout = deployed_layout(architecture, deployment)
    ranks = layout.ranks if layout.groups else len(budgets)
    if len(budgets) != ranks:
        raise KvModelError(f"{len(budgets)} budgets for {ranks} pipeline stages", "pipeline_parallel")
    terms = deployment.request_terms(architecture)
    pools = tuple(one.pool_bytes if one.override_bytes is None else one.override_bytes for one in budgets)
    if layout.groups:
        capacity = pool_capacity(layout, pool_bytes=pools, context_tokens=demand.context_tokens, terms=terms)
    else:
        # A model that keeps no KV cache: weights and overheads decide alone.
        capacity = Capacity(
            num_blocks=0, bytes_per_block=(0,) * ranks, context_tokens=demand.context_tokens, blocks_per_request=0
        )
    override = deployment.blocks_override
    if override is not None and layout.groups:
        capacity = replace(capacity, num_blocks=override)
        sizes = [override * size for size in capacity.bytes_per_block]
        budgets = [replace(one, override_bytes=size) for one, size in zip(budgets, sizes, strict=True)]
    needed = capacity.blocks_per_request * demand.requests
    # The stage with the least headroom: pool bytes less what the demand and the null block take.
    headroom, limiting = min(
        (_headroom_bytes(one, (needed + NULL_BLOCKS) * size), stage)
        for stage, (one, size) in enumerate(zip(budgets, capacity.bytes_per_block, strict=True))
    )
    usable = max(0, capacity.num_blocks - NULL_BLOCKS)
    # An override that the memory does not hold ends in an out-of-memory error when the pool is allocated.
    loads = not any(one.shortfall_bytes or one.overrun_bytes for one in budgets)
    served = most_context_tokens is None or demand.context_tokens <= most_context_tokens
    context = 0
    if usable and loads:
        context = longest_context_tokens(
            layout,
            num_blocks=capacity.num_blocks,
            most_tokens=most_context_tokens or max(architecture.max_context_tokens or 0, demand.context_tokens),
            terms=terms,
            requests=demand.requests,
        )
    plan = Plan(
        outcome=Outcome.FITS if loads and served and needed <= usable else Outcome.DOES_NOT_FIT,
        demand=demand,
        capacity=capacity,
        budgets=tuple(budgets),
        blocks_needed=needed,
        headroom_bytes=headroom,
        max_requests=capacity.whole_requests if loads and served else 0,
        max_context_tokens=context,
        limiting_stage=limiting,
    )
    if plan.outcome is not Outcome.FITS:
        return plan
    tight = plan.headroom_ratio < TIGHT_HEADROOM_RATIO
    if not tight and any(one.more_bytes for one in budgets):
        most = [replace(one, overhead_bytes=one.overhead_bytes + one.more_bytes, more_bytes=0) for one in budgets]
        worst = make_plan(
            architecture, deployment, budgets=most, demand=demand, most_context_tokens=most_context_tokens
        )
        tight = worst.outcome is Outcome.DOES_NOT_FIT
    return replace(plan, outcome=Outcome.TIGHT) if tight else plan


def _headroom_bytes(budget: Budget, needed_bytes: int) -> int:
    room = budget.pool_bytes - needed_bytes
    if budget.overrun_bytes:
        room = min(room, -budget.overrun_bytes)
    return room - budget.shortfall_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that arrive: how many a second, how long they are on average, and how long each stays.

    `present_tokens` is the mean full length of the requests present at a moment, at least 1, where it is known: long
    requests stay longer, so it exceeds the mean length of arriving requests.
    """

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float
    seconds_per_output_token: float
    seconds_to_first_token: float = 0.0
    present_tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_second", "prompt_tokens", "output_tokens", "seconds_per_output_token"):
            value = getattr(self, name)
            if not 0 < value <= _MAX_TRAFFIC:
                raise KvModelError(f"{name} is {value:g}: it must be above 0 and at most {_MAX_TRAFFIC:g}", name)
        check_range("seconds_to_first_token", self.seconds_to_first_token, 0, _MAX_TRAFFIC)
        if self.present_tokens is not None:
            check_range("present_tokens", self.present_tokens, 1, 2 * _MAX_TRAFFIC)

    @property
    def seconds_in_system(self) -> float:
        """How long one request holds its blocks."""
        return self.seconds_to_first_token + self.output_tokens * self.seconds_per_output_token

    @property
    def mean_requests(self) -> float:
        """Requests in the system on average, arrivals x stay (Little, A proof for the queuing formula, 1961)."""
        return self.requests_per_second * self.seconds_in_system

    @property
    def peak_tokens(self) -> int:
        """Tokens of one request at its end."""
        known = self.present_tokens
        return math.ceil(self.prompt_tokens + self.output_tokens if known is None else known)

    def requests_at(self, quantile_ratio: float) -> int:
        """Requests that are not exceeded for that share of the time: arrivals are Poisson and each stays for its own
        time, so the number present is Poisson too (the M/G/infinity queue).
        """
        if not 0 < quantile_ratio < 1:
            raise KvModelError(f"quantile is {quantile_ratio}: it must be above 0 and below 1", "quantile")
        mean = self.mean_requests
        if mean > _NORMAL_FROM:
            # Imported here alone: statistics takes as long to load as a plan to make, and few plans have such traffic.
            from statistics import NormalDist  # noqa: PLC0415

            return math.ceil(NormalDist(mean, math.sqrt(mean)).inv_cdf(quantile_ratio))
        term = math.exp(-mean)
        count, total = 0, term
        while total < quantile_ratio:
            count += 1
            term *= mean / count
            total += term
        return max(1, count)


def traffic_from_histogram(
    lengths: Sequence[tuple[float, float, float]],
    *,
    requests_per_second: float,
    seconds_per_output_token: float,
    seconds_to_first_token: float = 0.0,
) -> Traffic:
    """Traffic from (prompt tokens, output tokens, weight) entries. What counts for the requests at once is the mean
    stay; what counts for their blocks is the length of those present, each weighted by its stay.
    """
    total = sum(weight for _, _, weight in lengths)
    if not lengths or not 0 < total < math.inf or any(min(entry) < 0 for entry in lengths):
        raise KvModelError("lengths must not be empty or negative, and must have a total weight above 0", "lengths")
    traffic = Traffic(
        requests_per_second=requests_per_second,
        prompt_tokens=sum(prompt * weight for prompt, _, weight in lengths) / total,
        output_tokens=sum(output * weight for _, output, weight in lengths) / total,
        seconds_per_output_token=seconds_per_output_token,
        seconds_to_first_token=seconds_to_first_token,
    )
    present = sum(
        (prompt + output) * weight * (seconds_to_first_token + output * seconds_per_output_token)
        for prompt, output, weight in lengths
    )
    return replace(traffic, present_tokens=present / total / traffic.seconds_in_system)
