"""A whole what-if: model, deployment, GPU, weights, demand; its plan; and which changes would make it fit.

`find_levers` tries each single change. `find_combinations` tries GPUs, weight format and KV-cache format together, and
keeps a combination only if none that needs less fits as well. Each change makes a new scenario whose plan is computed
in full, because changes influence one another: more GPUs also shrink the weights of each. Changes that the model rules
out are left out; those that the GPU or vLLM does not support are listed last and never count as a solution.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Budget, Demand, Outcome, Plan, make_plan
from kvdiag.kv.layout.deployment import Deployment, deployed_layout, stage_ends
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.layout.residency import wasted_ratio
from kvdiag.kv.weights.adapter_slots import AdapterSlots
from kvdiag.kv.weights.checkpoint import CheckpointTensor, weights_from_config, weights_from_tensors
from kvdiag.kv.weights.linear_layers import Parameters
from kvdiag.kv.weights.quantization import Quantization, WeightFormat, usual_quantization

HIGHEST_FRACTION_RATIO = 0.95
"""The highest memory fraction that is tried where the device's free memory was not measured."""
_MAX_GPUS = 64
# A drafter's layers are on one stage, however many they are.
_ONE_STAGE = (1 << 16,)
_WIDER = (2, 4, 8)
_FP8_BITS = 8
# The eviction example of "KV memory in production": sinks, recent tokens and heavy hitters, 400 of 2,000 tokens.
EVICTION_KEEP_RATIO = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedWeights:
    """Weights known from the config alone."""

    parameters: Parameters
    quantization: Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """Weights known from a checkpoint's headers."""

    tensors: tuple[CheckpointTensor, ...]
    kv_heads: int
    tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWeights:
    """Weights given as one number, all ranks together."""

    total_bytes: int


WeightsSource = CountedWeights | CheckpointWeights | GivenWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a plan depends on."""

    architecture: Architecture
    deployment: Deployment
    gpu_bytes: int
    memory_fraction_ratio: float
    weights: WeightsSource
    overheads: Overheads
    demand: Demand
    pool_bytes: int | None = None
    """The pool of each GPU where --kv-cache-memory-bytes sets it in place of the memory fraction."""
    drafter: WeightsSource | None = None
    """The weights of another model that drafts: all on the last stage."""
    adapters: AdapterSlots | None = None
    """The slots of LoRA adapters."""
    host_weights_bytes: int = 0
    """Weights of each GPU that --cpu-offload-gb keeps in host memory."""
    most_context_tokens: int | None = None
    most_fraction_ratio: float = HIGHEST_FRACTION_RATIO
    unsupported_levers: frozenset[str] = frozenset()
    """Names of levers that the GPU has no kernels for."""
    estimate: Callable[[Deployment], Overheads] | None = None
    """The overheads of another deployment; `None` where they do not depend on it, or were measured."""

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.deployment.tensor_parallel * self.deployment.pipeline_parallel

    @property
    def exceeds_limit(self) -> bool:
        """Whether the engine refuses requests as long as the demand's, however large the pool is."""
        return self.most_context_tokens is not None and self.demand.context_tokens > self.most_context_tokens

    @property
    def widest_gpus(self) -> int:
        """The most GPUs that changes are tried with."""
        return max(self.gpus * factor for factor in (1, *_WIDER) if self.gpus * factor <= max(self.gpus, _MAX_GPUS))


BLOCKS_OPTION = "--num-gpu-blocks-override"
_EVICTION, _BY_MEMORY = "eviction-budget", "no-blocks-override"
FEWER, SHORTER, FRACTION, FP8, WIDER = (
    "fewer-sequences",
    "shorter-context",
    "memory-fraction",
    "fp8-kv",
    "tensor-parallel",
)
DEMAND_LEVERS = (FEWER, SHORTER)
"""The levers that serve less than was asked for."""

ORDER = tuple(Outcome)


class _Change(NamedTuple):
    """A change of one thing, what it costs otherwise, and the scenario with it."""

    name: str
    change: str
    price: str
    made: Callable[[Scenario], Scenario]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change, or several together, what they cost otherwise, and the plan with them."""

    name: str
    change: str
    price: str
    plan: Plan
    gained_bytes: int
    supported: bool = True
    """Whether the engine can do it, on that GPU."""


def rank_weights(scenario: Scenario, *, attention_ranks: int | None = None) -> tuple[int, ...]:
    """Weight bytes of each pipeline stage on one of its GPUs. `attention_ranks` divide attention and embedding where
    they are fewer than those that divide the rest; a size alone is divided evenly.
    """
    ranks = scenario.deployment.tensor_parallel
    split: dict[str, Any] = {"tensor_parallel": ranks, "attention_parallel": attention_ranks or ranks}
    ends = stage_ends(scenario.architecture.depth, scenario.deployment)
    stages = list(_stage_weights(scenario.weights, ends, split))
    if scenario.drafter is not None:
        stages[-1] += sum(_stage_weights(scenario.drafter, _ONE_STAGE, split))
    slots = (0,) * len(ends) if scenario.adapters is None else scenario.adapters.stage_bytes(ranks, ends)
    return tuple(weights + held for weights, held in zip(stages, slots, strict=True))


def _stage_weights(weights: WeightsSource, ends: tuple[int, ...], split: Mapping[str, Any]) -> tuple[int, ...]:
    match weights:
        case CountedWeights(parameters=parameters, quantization=quantization):
            return weights_from_config(parameters, quantization=quantization, stage_ends=ends, **split)
        case CheckpointWeights(tensors=tensors, kv_heads=kv_heads, tied=tied):
            return weights_from_tensors(tensors, stage_ends=ends, **split, kv_heads=kv_heads, tied=tied)
        case GivenWeights(total_bytes=total):
            parts = ends[-1] * split["tensor_parallel"]
            return tuple(ceil_div(total * (end - start), parts) for start, end in pairwise((0, *ends)))


def scenario_budgets(scenario: Scenario) -> tuple[Budget, ...]:
    """The budget of one GPU of each stage."""
    return tuple(
        Budget(
            total_bytes=scenario.gpu_bytes,
            memory_fraction_ratio=1.0 if scenario.pool_bytes is not None else scenario.memory_fraction_ratio,
            weights_bytes=max(0, weights_bytes - scenario.host_weights_bytes),
            override_bytes=scenario.pool_bytes,
            **asdict(scenario.overheads),
        )
        for weights_bytes in rank_weights(scenario)
    )


def scenario_plan(scenario: Scenario) -> Plan:
    """The plan of a scenario."""
    return make_plan(
        scenario.architecture,
        scenario.deployment,
        budgets=scenario_budgets(scenario),
        demand=scenario.demand,
        most_context_tokens=scenario.most_context_tokens,
    )


def block_waste_ratio(scenario: Scenario) -> float:
    """The share of one request's blocks that holds no token at the end of its context: tails, short groups, padding."""
    deployment = scenario.deployment
    terms = deployment.request_terms(scenario.architecture)
    layout = deployed_layout(scenario.architecture, deployment)
    return wasted_ratio(layout, resident_tokens=scenario.demand.context_tokens, terms=terms)


def demand_grid(
    scenario: Scenario, *, contexts: Sequence[int], concurrencies: Sequence[int]
) -> tuple[tuple[Plan, ...], ...]:
    """Plans over context x concurrency, one row per context up to the model's limit."""
    return tuple(
        tuple(
            scenario_plan(replace(scenario, demand=Demand(context_tokens=context, requests=requests)))
            for requests in concurrencies
        )
        for context in contexts
        if context <= (scenario.most_context_tokens or context)
    )


def find_levers(scenario: Scenario, plan: Plan) -> tuple[Lever, ...]:
    """Every single change that helps: those that make it fit first, then by bytes gained; unsupported ones last. Of a
    demand that the engine refuses, only shorter requests.
    """
    if scenario.exceeds_limit:
        shorter = (one for one in _demand_changes(scenario, plan) if one.name == SHORTER)
        return tuple(lever for one in shorter if (lever := _tried(scenario, plan, (one,))) is not None)
    changes = (*_cache_formats(scenario), *_demand_changes(scenario, plan), *_wider(scenario, 2))
    changes += tuple(_weight_formats(scenario))
    if scenario.deployment.blocks_override is not None:
        price = "vLLM then sizes the pool by the memory that is left for it"
        changes += (_Change(_BY_MEMORY, f"without {BLOCKS_OPTION}", price, _served(blocks_override=None)),)
    if scenario.pool_bytes is None and scenario.memory_fraction_ratio < (most := scenario.most_fraction_ratio):
        price = "leaves less room for spikes and other processes"
        change = f"--gpu-memory-utilization {most:g}"
        changes += (_Change(FRACTION, change, price, _with(memory_fraction_ratio=most)),)
    tried = (_tried(scenario, plan, (one,)) for one in changes)
    levers = [one for one in tried if one is not None and one.gained_bytes > 0]
    return tuple(
        sorted(
            levers,
            key=lambda one: (not one.supported, one.plan.outcome is Outcome.DOES_NOT_FIT, -one.gained_bytes, one.name),
        )
    )


def find_combinations(scenario: Scenario, plan: Plan) -> tuple[Lever, ...]:
    """The least changes of GPUs, weight format and KV-cache format that make it fit together, fewest GPUs first.

    Of two combinations that fit equally well, one that needs no less of anything than the other is left out; single
    changes are left to `find_levers`.
    """
    gpus = (None, *(one for factor in _WIDER for one in _wider(scenario, factor)))
    axes = (gpus, (None, *_weight_formats(scenario)), (None, *_cache_formats(scenario)))
    kept: list[tuple[tuple[int, ...], Lever]] = []
    if scenario.exceeds_limit:
        return ()
    for place in product(*(range(len(axis)) for axis in axes)):
        chosen = tuple(change for axis, at in zip(axes, place, strict=True) if (change := axis[at]) is not None)
        lever = _tried(scenario, plan, chosen) if chosen else None
        if lever is None or not lever.supported or ORDER.index(lever.plan.outcome) >= ORDER.index(plan.outcome):
            continue
        less = [one for at, one in kept if all(low <= high for low, high in zip(at, place, strict=True))]
        if all(ORDER.index(lever.plan.outcome) < ORDER.index(one.plan.outcome) for one in less):
            kept.append((place, lever))
    return tuple(one for place, one in kept if sum(map(bool, place)) > 1 or place[0] > 1)


def _tried(scenario: Scenario, plan: Plan, changes: Sequence[_Change]) -> Lever | None:
    """Changes made together, against the plan without them; `None` where they are not possible."""
    changed = scenario
    try:
        for one in changes:
            changed = one.made(changed)
        better = scenario_plan(changed)
    except KvModelError:
        return None  # a TP that divides nothing, a format MLA lacks
    names = [one.name for one in changes]
    has_kernels = scenario.unsupported_levers.isdisjoint(names)
    prices = [one.price if len(changes) == 1 else f"{one.change}: {one.price}" for one in changes]
    return Lever(
        name="+".join(names),
        change=", ".join(one.change for one in changes),
        price="; ".join(prices) if has_kernels else "this GPU has no kernels for it",
        plan=better,
        gained_bytes=better.headroom_bytes - plan.headroom_bytes,
        supported=has_kernels and _EVICTION not in names,
    )


def _cache_formats(scenario: Scenario) -> Iterator[_Change]:
    if scenario.deployment.resolved_kv_dtype(scenario.architecture).element_bits > _FP8_BITS:
        price = "half the bytes per token, slight accuracy loss; the attention kernel must support it"
        yield _Change(FP8, "--kv-cache-dtype fp8", price, _served(kv_dtype="fp8"))


def _wider(scenario: Scenario, factor: int) -> Iterator[_Change]:
    if scenario.gpus * factor <= _MAX_GPUS:
        ranks = scenario.deployment.tensor_parallel * factor
        price = f"{scenario.gpus * factor} GPUs instead of {scenario.gpus}"
        change = f"--tensor-parallel-size {ranks}"
        yield _Change(WIDER, change, price, _served(tensor_parallel=ranks))


def _weight_formats(scenario: Scenario) -> Iterator[_Change]:
    weights = scenario.weights
    if not isinstance(weights, CountedWeights) or weights.quantization.quantizes:
        return
    for weight_format, price in (
        (WeightFormat.FP8, "needs a quantized checkpoint, slight accuracy loss"),
        (WeightFormat.INT4, "needs a quantized checkpoint, some accuracy loss, slower at large batches"),
    ):
        quantized = replace(weights, quantization=usual_quantization(weight_format))
        yield _Change(f"{weight_format}-weights", f"{weight_format} weights", price, _with(weights=quantized))


def _demand_changes(scenario: Scenario, plan: Plan) -> Iterator[_Change]:
    demand = scenario.demand
    if 0 < plan.max_requests < demand.requests:
        price = f"{demand.requests - plan.max_requests:,} of {demand.requests:,} requests must wait"
        change = f"--max-num-seqs {plan.max_requests}"
        yield _Change(FEWER, change, price, _with(demand=replace(demand, requests=plan.max_requests)))
    if 0 < plan.max_context_tokens < demand.context_tokens:
        price = f"vLLM rejects requests of more than {plan.max_context_tokens:,} tokens"
        shorter = replace(demand, context_tokens=plan.max_context_tokens)
        yield _Change(SHORTER, f"--max-model-len {plan.max_context_tokens}", price, _with(demand=shorter))
    kept = max(1, int(demand.context_tokens * EVICTION_KEEP_RATIO))
    change = f"KV eviction, keeping {kept:,} of {demand.context_tokens:,} tokens"
    price = "vLLM 0.32 does not support it; it makes attention approximate"
    yield _Change(_EVICTION, change, price, _with(demand=replace(demand, context_tokens=kept)))


def _with(**fields: Any) -> Callable[[Scenario], Scenario]:
    return lambda scenario: replace(scenario, **fields)


def _served(**fields: Any) -> Callable[[Scenario], Scenario]:
    def served(scenario: Scenario) -> Scenario:
        deployment = replace(scenario.deployment, **fields)
        overheads = scenario.overheads if scenario.estimate is None else scenario.estimate(deployment)
        return replace(scenario, deployment=deployment, overheads=overheads)

    return served
