"""Budgets, plans, traffic and levers."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import generic_overheads, vllm_overheads
from kvdiag.kv.fit.plan import DEFAULT_MEMORY_FRACTION, Budget, Demand, Outcome, Traffic, traffic_from_histogram
from kvdiag.kv.fit.scenario import (
    CheckpointWeights,
    CountedWeights,
    GivenWeights,
    Scenario,
    demand_grid,
    find_levers,
    rank_weights,
    scenario_budgets,
    scenario_plan,
)
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.weights.checkpoint import CheckpointTensor
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import WeightFormat, usual_quantization
from tests.unit.kv.models import served

GB = 1_000_000_000
BUDGET = Budget(
    total_bytes=80 * GB,
    memory_fraction_ratio=0.92,
    weights_bytes=35 * GB,
    context_bytes=GB,
    activation_bytes=2 * GB,
    graph_bytes=GB,
)


def scenario(
    name: str = "llama_70b", *, ranks: int = 4, context: int = 8192, requests: int = 32, **changes: Any
) -> Scenario:
    """A catalogue model on GPUs of 80 GB."""
    config = served(name).config
    architecture = parse_architecture(config)
    base = Scenario(
        architecture=architecture,
        deployment=Deployment(tensor_parallel=ranks),
        gpu_bytes=80 * GB,
        memory_fraction_ratio=0.92,
        weights=CountedWeights(
            parameters=count_parameters(config, architecture), quantization=usual_quantization(WeightFormat.BF16)
        ),
        overheads=generic_overheads(),
        demand=Demand(context_tokens=context, requests=requests),
    )
    return replace(base, **changes)


def test_a_budget_adds_up() -> None:
    """Total = reserve + weights + context + activation + graphs + pool."""
    parts = (BUDGET.reserve_bytes, 35 * GB, GB, 2 * GB, GB, BUDGET.pool_bytes)

    assert 80 * GB == sum(parts)
    assert BUDGET.pool_bytes == 34_600_000_000


def test_weights_that_do_not_fit_leave_no_pool() -> None:
    """The shortfall says how much is missing before there is any cache."""
    budget = replace(BUDGET, weights_bytes=75 * GB)

    assert (0, 5_400_000_000) == (budget.pool_bytes, budget.shortfall_bytes)


def test_a_budget_of_the_default_fraction_is_what_vllm_asks_for() -> None:
    """At its start vLLM prints "Desired GPU memory utilization is (0.92, 72.85 GiB)" on a GPU of 79.19 GiB."""
    budget = replace(BUDGET, total_bytes=round(79.19 * 2**30), memory_fraction_ratio=DEFAULT_MEMORY_FRACTION)

    assert pytest.approx(72.85 * 2**30, rel=1e-4) == budget.usable_bytes


def test_a_plan_that_fits() -> None:
    """70B at TP 4 serves 32 requests of 8,192 tokens on 80 GB, with the headroom its pool leaves."""
    plan = scenario_plan(scenario())

    assert Outcome.FITS == plan.outcome
    assert plan.headroom_bytes == plan.budgets[0].pool_bytes - plan.needed_bytes
    assert plan.max_requests >= 32
    assert plan.max_context_tokens >= 8192


def test_a_plan_that_does_not_fit() -> None:
    """A thousand such requests do not, and what fits instead is said."""
    plan = scenario_plan(scenario(requests=1000))

    assert (Outcome.DOES_NOT_FIT, True) == (plan.outcome, plan.headroom_bytes < 0)
    assert 0 < plan.max_requests < 1000
    assert 0 < plan.max_context_tokens < 8192


def test_weights_alone_may_not_fit() -> None:
    """70B on one GPU of 80 GB has no pool, no request and no context."""
    plan = scenario_plan(scenario(ranks=1))

    assert (Outcome.DOES_NOT_FIT, 0, 0) == (plan.outcome, plan.max_requests, plan.max_context_tokens)
    assert -1.0 == plan.headroom_ratio


def test_little_room_is_tight() -> None:
    """The last request that fits leaves less than a tenth of the pool."""
    most = scenario_plan(scenario()).max_requests

    assert Outcome.TIGHT == scenario_plan(scenario(requests=most)).outcome


@pytest.mark.parametrize(
    ("requests", "outcome"), [(1, "fits"), (None, "tight"), (1000, "does_not_fit")], ids=["one", "the most", "too many"]
)
def test_outcomes_are_said_in_these_words(requests: int | None, outcome: str) -> None:
    """Scripts that read the document go by them."""
    most = scenario_plan(scenario()).max_requests

    assert outcome == scenario_plan(scenario(requests=most if requests is None else requests)).outcome.value


@pytest.mark.parametrize("name", ["llama_70b", "gemma-3-27b", "qwen3.6-27b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_the_largest_demand_that_fits_fits_and_one_more_does_not(name: str) -> None:
    """max_requests and max_context_tokens are exact on both sides."""
    base = scenario(name, context=4096, requests=2, most_context_tokens=1 << 20)
    plan = scenario_plan(base)

    def fits(context: int, requests: int) -> bool:
        demand = Demand(context_tokens=context, requests=requests)
        return scenario_plan(replace(base, demand=demand)).outcome is not Outcome.DOES_NOT_FIT

    assert fits(4096, plan.max_requests)
    assert not fits(4096, plan.max_requests + 1)
    assert fits(plan.max_context_tokens, 2)
    assert 1 << 20 == plan.max_context_tokens or not fits(plan.max_context_tokens + 1, 2)


def test_pipeline_stages_are_planned_by_the_worst() -> None:
    """With the output layer on the last stage, that stage has the least room."""
    plan = scenario_plan(scenario(deployment=Deployment(tensor_parallel=2, pipeline_parallel=2), requests=8))
    rooms = [budget.pool_bytes for budget in plan.budgets]

    assert 2 == len(rooms)
    assert min(rooms) == rooms[plan.limiting_stage]


def test_levers_that_fit_come_first_and_the_largest_of_them_first() -> None:
    """The levers are ordered, each gains, and each states a price."""
    base = scenario(requests=200)
    plan = scenario_plan(base)
    levers = find_levers(base, plan)
    keys = [(lever.plan.outcome is Outcome.DOES_NOT_FIT, -lever.gained_bytes) for lever in levers]

    assert sorted(keys) == keys
    assert {"fp8-kv", "fewer-sequences", "shorter-context", "tensor-parallel", "fp8-weights", "memory-fraction"} <= {
        lever.name for lever in levers
    }
    assert all(lever.price and lever.change and lever.gained_bytes > 0 for lever in levers)


def test_fewer_sequences_and_shorter_context_fit_by_themselves() -> None:
    """The two levers on demand name exactly what fits."""
    base = scenario(requests=200)
    plan = scenario_plan(base)
    outcomes = {lever.name: lever.plan.outcome for lever in find_levers(base, plan)}

    assert Outcome.DOES_NOT_FIT not in (outcomes["fewer-sequences"], outcomes["shorter-context"])


def test_no_lever_where_a_change_is_impossible() -> None:
    """A TP step that divides nothing, a cache that is fp8 already and a fraction at its top are not offered."""
    base = scenario(
        "qwen2.5-0.5b",
        ranks=2,
        deployment=Deployment(tensor_parallel=2, kv_dtype="fp8"),
        requests=100_000,
        memory_fraction_ratio=0.97,
    )
    names = {lever.name for lever in find_levers(base, scenario_plan(base))}

    assert not names & {"fp8-kv", "tensor-parallel", "memory-fraction"}


def test_eviction_keeps_400_of_2000_tokens() -> None:
    """The eviction lever plans for a fifth of the context."""
    base = scenario(context=2000, requests=5000)
    lever = next(lever for lever in find_levers(base, scenario_plan(base)) if lever.name == "eviction-budget")

    assert (400, True) == (lever.plan.demand.context_tokens, "400 of 2,000" in lever.change)


def test_a_grid_has_a_plan_for_each_pair() -> None:
    """Context x concurrency, in the order asked, and more of either never turns a miss into a fit."""
    grid = demand_grid(scenario(), contexts=(2048, 8192, 32_768), concurrencies=(1, 16, 256))
    fits = [[plan.outcome is not Outcome.DOES_NOT_FIT for plan in row] for row in grid]

    assert [2048, 8192, 32_768] == [row[0].demand.context_tokens for row in grid]
    assert all(row == sorted(row, reverse=True) for row in fits)


def test_littles_law() -> None:
    """Two requests a second that stay 10 seconds are 20 at a time."""
    traffic = Traffic(requests_per_second=2, prompt_tokens=1000, output_tokens=200, seconds_per_output_token=0.05)

    assert (20.0, 1200) == (traffic.mean_requests, traffic.peak_tokens)


@pytest.mark.parametrize(
    ("mean", "ratio", "expected"),
    [(20.0, 0.5, 20), (20.0, 0.99, 31), (0.1, 0.99, 1), (1000.0, 0.99, 1074), (50_000, 0.99, 50_521)],
)
def test_traffic_is_planned_above_its_mean(mean: float, ratio: float, expected: Any) -> None:
    """The number present is Poisson: its quantiles are those of tables, by sum or for large means by the normal."""
    traffic = Traffic(requests_per_second=mean, prompt_tokens=1, output_tokens=1, seconds_per_output_token=1)

    assert expected == pytest.approx(traffic.requests_at(ratio), abs=1)


def test_a_histogram_is_its_means() -> None:
    """Nine short requests and a long one have the lengths of their average; the long one is present for longer."""
    traffic = traffic_from_histogram(
        [(100, 50, 9), (1100, 550, 1)], requests_per_second=1, seconds_per_output_token=0.1
    )

    assert (200, 100, 975) == (traffic.prompt_tokens, traffic.output_tokens, traffic.peak_tokens)


def test_weights_from_a_checkpoint_and_from_one_number() -> None:
    """A checkpoint's tensors and a total are both spread over ranks and stages."""
    tensors = (CheckpointTensor(name="model.layers.0.mlp.up_proj.weight", stored_bytes=800, elements=400),)
    checkpoint = scenario(weights=CheckpointWeights(tensors=tensors, kv_heads=8, tied=False))
    given = scenario(
        weights=GivenWeights(total_bytes=140 * GB),
        deployment=Deployment(tensor_parallel=2, pipeline_parallel=2),
    )

    assert [200] == [weights.weights_bytes for weights in rank_weights(checkpoint)]
    assert [35 * GB] * 2 == [weights.weights_bytes for weights in rank_weights(given)]


def test_budgets_per_stage_are_asked_for() -> None:
    """One budget per pipeline stage, no more and no fewer."""
    base = scenario(deployment=Deployment(tensor_parallel=2, pipeline_parallel=2))

    assert 2 == len(scenario_budgets(base))


def test_estimates_grow_with_batch_and_ranks() -> None:
    """More batched tokens need more activation, more ranks more context."""
    small = vllm_overheads(
        hidden_size=4096, feed_forward_size=14_336, vocabulary=128_256, tensor_parallel=1, batched_tokens=8192
    )
    large = vllm_overheads(
        hidden_size=4096, feed_forward_size=14_336, vocabulary=128_256, tensor_parallel=8, batched_tokens=65_536
    )

    assert small.activation_bytes < large.activation_bytes
    assert small.context_bytes < large.context_bytes
