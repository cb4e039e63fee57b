"""A whole what-if: model, deployment, GPU, weights, demand; its plan; and the single changes that would make it fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Budget, Demand, Outcome, Plan, make_plan
from kvdiag.kv.layout.deployment import Deployment, deployed_layout, stage_ends
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.layout.residency import wasted_ratio
from kvdiag.kv.weights.checkpoint import CheckpointTensor, weights_from_config, weights_from_tensors
from kvdiag.kv.weights.linear_layers import Parameters
from kvdiag.kv.weights.quantization import Quantization, WeightFormat, usual_quantization

_HIGHER_FRACTION_RATIO = 0.95
_MAX_GPUS = 64
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
    most_context_tokens: int | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.deployment.tensor_parallel * self.deployment.pipeline_parallel


_EVICTION = "eviction-budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One single change, what it costs otherwise, and the plan with it."""

    name: str
    change: str
    price: str
    plan: Plan
    gained_bytes: int
    supported: bool = True
    """Whether the engine can do it."""


def rank_weights(scenario: Scenario) -> tuple[int, ...]:
    """Weight bytes of each pipeline stage on one of its GPUs."""
    ranks = scenario.deployment.tensor_parallel
    ends = stage_ends(scenario.architecture.depth, scenario.deployment)
    match scenario.weights:
        case CountedWeights(parameters=parameters, quantization=quantization):
            return weights_from_config(parameters, quantization=quantization, tensor_parallel=ranks, stage_ends=ends)
        case CheckpointWeights(tensors=tensors, kv_heads=kv_heads, tied=tied):
            return weights_from_tensors(tensors, tensor_parallel=ranks, stage_ends=ends, kv_heads=kv_heads, tied=tied)
        case GivenWeights(total_bytes=total):
            parts = scenario.architecture.depth * ranks
            return tuple(ceil_div(total * (end - start), parts) for start, end in pairwise((0, *ends)))


def scenario_budgets(scenario: Scenario) -> tuple[Budget, ...]:
    """The budget of one GPU of each stage."""
    return tuple(
        Budget(
            total_bytes=scenario.gpu_bytes,
            memory_fraction_ratio=scenario.memory_fraction_ratio,
            weights_bytes=weights_bytes,
            context_bytes=scenario.overheads.context_bytes,
            activation_bytes=scenario.overheads.activation_bytes,
            graph_bytes=scenario.overheads.graph_bytes,
            overhead_bytes=scenario.overheads.overhead_bytes,
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
    terms = deployment.serving_terms(scenario.architecture, encoder_tokens=deployment.max_num_batched_tokens)
    layout = deployed_layout(scenario.architecture, deployment)
    return wasted_ratio(layout, resident_tokens=scenario.demand.context_tokens, serving=terms)


def demand_grid(
    scenario: Scenario, *, contexts: Sequence[int], concurrencies: Sequence[int]
) -> tuple[tuple[Plan, ...], ...]:
    """Plans over context x concurrency, one row per context."""
    return tuple(
        tuple(
            scenario_plan(replace(scenario, demand=Demand(context_tokens=context, requests=requests)))
            for requests in concurrencies
        )
        for context in contexts
    )


def find_levers(scenario: Scenario, plan: Plan) -> tuple[Lever, ...]:
    """Every single change that helps: those that make it fit first, then by bytes gained; unsupported ones last."""
    levers = []
    for name, change, price, changed in _changes(scenario, plan):
        try:
            better = scenario_plan(changed)
        except KvModelError:
            # Not possible: a TP that divides nothing, a format MLA lacks.
            continue
        gained = better.headroom_bytes - plan.headroom_bytes
        if gained > 0:
            supported = name != _EVICTION
            lever = Lever(name=name, change=change, price=price, plan=better, gained_bytes=gained, supported=supported)
            levers.append(lever)
    return tuple(
        sorted(
            levers,
            key=lambda one: (not one.supported, one.plan.outcome is Outcome.DOES_NOT_FIT, -one.gained_bytes, one.name),
        )
    )


def _changes(scenario: Scenario, plan: Plan) -> Iterator[tuple[str, str, str, Scenario]]:
    """Name, change, price and changed scenario of every lever."""
    architecture, deployment = scenario.architecture, scenario.deployment
    if deployment.resolved_kv_dtype(architecture).element_bits > _FP8_BITS:
        price = "half the bytes per token; slight accuracy loss; the attention kernel must support it"
        changed = replace(scenario, deployment=replace(deployment, kv_dtype="fp8"))
        yield "fp8-kv", "--kv-cache-dtype fp8", price, changed
    yield from _demand_changes(scenario, plan)
    if scenario.gpus * 2 <= _MAX_GPUS:
        ranks = deployment.tensor_parallel * 2
        wider = replace(scenario, deployment=replace(deployment, tensor_parallel=ranks))
        price = f"{wider.gpus} GPUs instead of {scenario.gpus}"
        yield "tensor-parallel", f"--tensor-parallel-size {ranks}", price, wider
    weights = scenario.weights
    if isinstance(weights, CountedWeights) and not weights.quantization.quantizes:
        for weight_format, price in (
            (WeightFormat.FP8, "needs a quantized checkpoint; slight accuracy loss"),
            (WeightFormat.INT4, "needs a quantized checkpoint; some accuracy loss, slower at large batches"),
        ):
            changed = replace(scenario, weights=replace(weights, quantization=usual_quantization(weight_format)))
            yield f"{weight_format}-weights", f"{weight_format} weights", price, changed
    if scenario.memory_fraction_ratio < _HIGHER_FRACTION_RATIO:
        price = "leaves less room for spikes and other processes"
        changed = replace(scenario, memory_fraction_ratio=_HIGHER_FRACTION_RATIO)
        yield "memory-fraction", f"--gpu-memory-utilization {_HIGHER_FRACTION_RATIO}", price, changed


def _demand_changes(scenario: Scenario, plan: Plan) -> Iterator[tuple[str, str, str, Scenario]]:
    demand = scenario.demand
    if 0 < plan.max_requests < demand.requests:
        price = f"{demand.requests - plan.max_requests:,} of {demand.requests:,} requests must wait"
        fewer = replace(scenario, demand=replace(demand, requests=plan.max_requests))
        yield "fewer-sequences", f"--max-num-seqs {plan.max_requests}", price, fewer
    if 0 < plan.max_context_tokens < demand.context_tokens:
        price = f"vLLM rejects requests of more than {plan.max_context_tokens:,} tokens"
        shorter = replace(scenario, demand=replace(demand, context_tokens=plan.max_context_tokens))
        yield "shorter-context", f"--max-model-len {plan.max_context_tokens}", price, shorter
    kept = max(1, int(demand.context_tokens * EVICTION_KEEP_RATIO))
    change = f"KV eviction to {kept:,} of {demand.context_tokens:,} tokens"
    price = "vLLM 0.32 does not support it; it makes attention approximate"
    yield _EVICTION, change, price, replace(scenario, demand=replace(demand, context_tokens=kept))
