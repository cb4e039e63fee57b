"""A whole what-if: model, deployment, GPU, weights, demand; its plan; and the single changes that would make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Budget, Demand, Outcome, Plan, make_plan
from kvdiag.kv.layout.deployment import Deployment, deployed_layout, stage_ends
from kvdiag.kv.layout.dtypes import resolve_kv_dtype
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.kv.layout.residency import wasted_ratio
from kvdiag.kv.weights.checkpoint import CheckpointTensor, weights_from_config, weights_from_tensors
from kvdiag.kv.weights.linear_layers import Parameters
from kvdiag.kv.weights.quantization import Quantization, WeightFormat, usual_quantization

_HIGHER_FRACTION_RATIO = 0.95
_MOST_GPUS = 64
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One single change, what it costs otherwise, and the plan with it."""

    name: str
    change: str
    price: str
    plan: Plan
    gained_bytes: int


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
            starts = (0, *ends[:-1])
            parts = scenario.architecture.depth * ranks
            return tuple(ceil_div(total * (end - start), parts) for start, end in zip(starts, ends, strict=True))


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
    terms = deployment.serving_terms(scenario.architecture, encoder_tokens=deployment.encoder_tokens)
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
    """Every single change that helps: those that make it fit first, then by bytes gained."""
    levers = [
        *_cache_format_levers(scenario, plan),
        *_demand_levers(scenario, plan),
        *_parallel_levers(scenario, plan),
        *_weight_levers(scenario, plan),
        *_fraction_levers(scenario, plan),
    ]
    helping = [lever for lever in levers if lever.gained_bytes > 0]
    return tuple(
        sorted(
            helping,
            key=lambda lever: (lever.plan.outcome is Outcome.DOES_NOT_FIT, -lever.gained_bytes, lever.name),
        )
    )


def _lever(base: Plan, changed: Scenario, *, name: str, change: str, price: str) -> list[Lever]:
    """The lever; None where the change is not possible (a TP that divides nothing, a format MLA lacks)."""
    try:
        plan = scenario_plan(changed)
    except KvModelError:
        return []
    gained = plan.headroom_bytes - base.headroom_bytes
    return [Lever(name=name, change=change, price=price, plan=plan, gained_bytes=gained)]


def _cache_format_levers(scenario: Scenario, plan: Plan) -> list[Lever]:
    architecture, deployment = scenario.architecture, scenario.deployment
    current = resolve_kv_dtype(
        deployment.kv_dtype, model_dtype=architecture.dtype, declared=architecture.declared_kv_dtype
    )
    if current.element_bits <= _FP8_BITS:
        return []
    changed = replace(scenario, deployment=replace(deployment, kv_dtype="fp8"))
    return _lever(
        plan,
        changed,
        name="fp8-kv",
        change="--kv-cache-dtype fp8",
        price="halves the cache; slight accuracy loss; the attention kernel must support it",
    )


def _demand_levers(scenario: Scenario, plan: Plan) -> list[Lever]:
    found: list[Lever] = []
    demand = scenario.demand
    if 0 < plan.max_requests < demand.requests:
        fewer = replace(scenario, demand=replace(demand, requests=plan.max_requests))
        found += _lever(
            plan,
            fewer,
            name="fewer-sequences",
            change=f"--max-num-seqs {plan.max_requests}",
            price=f"{demand.requests - plan.max_requests:,} of {demand.requests:,} requests must wait",
        )
    if 0 < plan.max_context_tokens < demand.context_tokens:
        shorter = replace(scenario, demand=replace(demand, context_tokens=plan.max_context_tokens))
        found += _lever(
            plan,
            shorter,
            name="shorter-context",
            change=f"--max-model-len {plan.max_context_tokens}",
            price=f"vLLM rejects requests of more than {plan.max_context_tokens:,} tokens",
        )
    kept = max(1, int(demand.context_tokens * EVICTION_KEEP_RATIO))
    evicted = replace(scenario, demand=replace(demand, context_tokens=kept))
    found += _lever(
        plan,
        evicted,
        name="eviction-budget",
        change=f"KV eviction to {kept:,} of {demand.context_tokens:,} tokens",
        price="attention becomes approximate; the engine must support eviction (vLLM 0.32 does not)",
    )
    return found


def _parallel_levers(scenario: Scenario, plan: Plan) -> list[Lever]:
    deployment = scenario.deployment
    if scenario.gpus * 2 > _MOST_GPUS:
        return []
    ranks = deployment.tensor_parallel * 2
    wider = replace(scenario, deployment=replace(deployment, tensor_parallel=ranks))
    return _lever(
        plan,
        wider,
        name="tensor-parallel",
        change=f"--tensor-parallel-size {ranks}",
        price=f"{wider.gpus} GPUs instead of {scenario.gpus}",
    )


def _weight_levers(scenario: Scenario, plan: Plan) -> list[Lever]:
    weights = scenario.weights
    if not isinstance(weights, CountedWeights) or weights.quantization.quantizes:
        return []
    found: list[Lever] = []
    for weight_format, price in (
        (WeightFormat.FP8, "needs a quantized checkpoint; slight accuracy loss"),
        (WeightFormat.INT4, "needs a quantized checkpoint; some accuracy loss, slower at large batches"),
    ):
        changed = replace(scenario, weights=replace(weights, quantization=usual_quantization(weight_format)))
        found += _lever(plan, changed, name=f"{weight_format}-weights", change=f"{weight_format} weights", price=price)
    return found


def _fraction_levers(scenario: Scenario, plan: Plan) -> list[Lever]:
    if scenario.memory_fraction_ratio >= _HIGHER_FRACTION_RATIO:
        return []
    changed = replace(scenario, memory_fraction_ratio=_HIGHER_FRACTION_RATIO)
    return _lever(
        plan,
        changed,
        name="memory-fraction",
        change=f"--gpu-memory-utilization {_HIGHER_FRACTION_RATIO}",
        price="leaves less room for spikes and other processes",
    )
