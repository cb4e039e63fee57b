"""What-ifs by hand: one layer of 64 KiB a block, weights given in bytes, and each lever with exactly what it gains."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import Overheads, generic_overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.fit.scenario import (
    CheckpointWeights,
    CountedWeights,
    GivenWeights,
    Lever,
    Scenario,
    block_waste_ratio,
    demand_grid,
    find_combinations,
    find_levers,
    rank_weights,
    scenario_budgets,
    scenario_plan,
)
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.weights.checkpoint import CheckpointTensor
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import WeightFormat, usual_quantization
from tests.unit.kv.by_hand import full, model
from tests.unit.kv.models import served

PAGE = 65_536
MODEL = replace(model(*(full(index) for index in range(4)), heads=8), max_context_tokens=4096)
OVERHEADS = Overheads(context_bytes=100, activation_bytes=20, graph_bytes=3, overhead_bytes=7, source="by hand")


def scenario(pool_blocks: int = 101, **changes: Any) -> Scenario:
    """10 requests of 160 tokens, 10 blocks each, on a GPU with so many blocks of 256 KiB left; half of it is used."""
    base = Scenario(
        architecture=MODEL,
        deployment=Deployment(),
        gpu_bytes=2 * (1000 + 130 + pool_blocks * 4 * PAGE),
        memory_fraction_ratio=0.5,
        weights=GivenWeights(total_bytes=1000),
        overheads=OVERHEADS,
        demand=Demand(context_tokens=160, requests=10),
    )
    return replace(base, **changes)


def lever(of: Scenario, name: str) -> Lever | None:
    """The lever of that name, where there is one."""
    return next((one for one in find_levers(of, scenario_plan(of)) if one.name == name), None)


def test_a_budget_has_all_parts() -> None:
    """Half of the GPU, less 1,000 bytes of weights and 130 of overheads, is 101 blocks to the byte."""
    (budget,) = scenario_budgets(scenario())

    assert (1000, 100, 20, 3, 7, 101 * 4 * PAGE) == (
        budget.weights_bytes,
        budget.context_bytes,
        budget.activation_bytes,
        budget.graph_bytes,
        budget.overhead_bytes,
        budget.pool_bytes,
    )
    assert (Outcome.TIGHT, 10, 0) == (
        scenario_plan(scenario()).outcome,
        scenario_plan(scenario()).max_requests,
        scenario_plan(scenario()).headroom_bytes,
    )


@pytest.mark.parametrize(
    ("deployment", "expected", "gpus"),
    [
        (Deployment(), [1001], 1),
        (Deployment(tensor_parallel=2), [501], 2),
        (Deployment(pipeline_parallel=2), [501, 501], 2),
        (Deployment(tensor_parallel=2, pipeline_parallel=4), [126] * 4, 8),
    ],
)
def test_given_weights_are_spread_over_layers_and_ranks(deployment: Deployment, expected: list[int], gpus: int) -> None:
    """1,001 bytes over 4 layers, each rank's share rounded up."""
    of = scenario(deployment=deployment, weights=GivenWeights(total_bytes=1001))

    assert expected == list(rank_weights(of))
    assert gpus == of.gpus


@pytest.mark.parametrize(("ranks", "expected"), [(1, 8), (8, 64), (16, 64), (128, 128)])
def test_the_widest_that_is_tried(ranks: int, expected: int) -> None:
    """Eight times as many GPUs, up to 64, and never fewer than there are."""
    assert expected == scenario(deployment=Deployment(tensor_parallel=ranks)).widest_gpus


@pytest.mark.parametrize(("context", "expected"), [(16, 0.0), (8, 0.5), (17, 15 / 32), (160, 0.0)])
def test_tails_of_blocks_are_wasted(context: int, expected: float) -> None:
    """17 tokens take two blocks of 16."""
    of = scenario(demand=Demand(context_tokens=context, requests=1))

    assert expected == pytest.approx(block_waste_ratio(of))


def test_a_grid_goes_by_rows_of_contexts() -> None:
    """100 usable blocks: 10 requests of 10 blocks or 5 of 20 fit, and no more."""
    grid = demand_grid(scenario(), contexts=(160, 320), concurrencies=(5, 6, 10, 11))

    assert [[True, True, True, False], [True, False, False, False]] == [
        [plan.outcome is not Outcome.DOES_NOT_FIT for plan in row] for row in grid
    ]
    assert [(160, 5), (160, 6), (160, 10), (160, 11)] == [
        (plan.demand.context_tokens, plan.demand.requests) for plan in grid[0]
    ]
    limited = replace(scenario(), most_context_tokens=160)
    rows = demand_grid(limited, contexts=(160, 320), concurrencies=(5,))
    assert [160] == [row[0].demand.context_tokens for row in rows]


@pytest.mark.parametrize(
    ("name", "context", "requests", "change", "gained_blocks"),
    [
        ("fewer-sequences", 160, 10, None, 0),
        ("fewer-sequences", 160, 11, "--max-num-seqs 10", 10),
        ("fewer-sequences", 160, 30, "--max-num-seqs 10", 200),
        ("fewer-sequences", 1600, 2, "--max-num-seqs 1", 100),
        ("shorter-context", 160, 10, None, 0),
        ("shorter-context", 161, 10, "--max-model-len 160", 10),
        ("shorter-context", 1600, 10, "--max-model-len 160", 900),
    ],
)
def test_a_smaller_demand(name: str, context: int, requests: int, change: str | None, gained_blocks: int) -> None:
    """Where some fit and not all: 10 requests of 160 tokens, each of 10 blocks."""
    found = lever(scenario(demand=Demand(context_tokens=context, requests=requests)), name)

    assert (found and found.change, found.gained_bytes if found else 0) == (change, gained_blocks * 4 * PAGE)


def test_neither_where_nothing_fits() -> None:
    """One block is the null block: 0 requests and 0 tokens are no levers."""
    names = {found.name for found in find_levers(scenario(1), scenario_plan(scenario(1)))}

    assert not names & {"fewer-sequences", "shorter-context"}


@pytest.mark.parametrize(("context", "kept", "gained_blocks"), [(160, 32, 80), (2000, 400, 1000), (20, 4, 10)])
def test_eviction_keeps_a_fifth(context: int, kept: int, gained_blocks: int) -> None:
    """10 requests: of 10 blocks 2 are left, of 125 25, of 2 one."""
    found = lever(scenario(demand=Demand(context_tokens=context, requests=10)), "eviction-budget")

    assert found is not None
    assert (kept, gained_blocks * 4 * PAGE) == (found.plan.demand.context_tokens, found.gained_bytes)


@pytest.mark.parametrize(("context", "kept"), [(2, 1), (9, 1), (10, 2)])
def test_eviction_keeps_at_least_a_token(context: int, kept: int) -> None:
    """In blocks of one token: a fifth of 2 is none, and one is kept."""
    of = scenario(deployment=Deployment(block_size_tokens=1), demand=Demand(context_tokens=context, requests=10))
    found = lever(of, "eviction-budget")

    assert found is not None
    assert f"{kept} of {context} tokens" in found.change


def test_eviction_of_less_than_a_block_gains_nothing() -> None:
    """Of 4 tokens one is kept, in the same block: no lever."""
    assert lever(scenario(demand=Demand(context_tokens=4, requests=10)), "eviction-budget") is None


@pytest.mark.parametrize(
    ("kv_dtype", "gained_blocks"),
    [("auto", 101 / 2), ("float32", 2 * 101 * 3 / 4), ("fp8", None), ("int8_pth", None), ("int4", None)],
)
def test_an_8_bit_cache(kv_dtype: str, gained_blocks: float | None) -> None:
    """101 blocks at half, or a quarter, of their bytes; nothing to gain where they are 8 bits or less."""
    found = lever(scenario(deployment=Deployment(kv_dtype=kv_dtype)), "fp8-kv")

    assert gained_blocks == (None if found is None else found.gained_bytes / (4 * PAGE))
    assert found is None or "--kv-cache-dtype fp8" == found.change


@pytest.mark.parametrize(
    ("ranks", "stages", "heads", "change", "price"),
    [
        (1, 1, 8, "--tensor-parallel-size 2", "2 GPUs instead of 1"),
        (4, 1, 8, "--tensor-parallel-size 8", "8 GPUs instead of 4"),
        (8, 1, 8, None, None),
        (8, 4, 64, "--tensor-parallel-size 16", "64 GPUs instead of 32"),
        (16, 4, 64, None, None),
    ],
    ids=["2", "8", "more than the heads", "64", "more than 64"],
)
def test_twice_the_ranks(ranks: int, stages: int, heads: int, change: str | None, price: str | None) -> None:
    """As long as they divide the heads, and up to 64 GPUs."""
    of = scenario(
        deployment=Deployment(tensor_parallel=ranks, pipeline_parallel=stages),
        architecture=replace(
            MODEL,
            attention_heads=heads,
            layers=tuple(replace(layer, kv_heads=heads) for layer in MODEL.layers),  # type: ignore[arg-type]
        ),
    )

    found = lever(of, "tensor-parallel")

    assert lever(of, "memory-fraction") is not None  # what comes after one that is refused
    assert (change, price) == (None if found is None else found.change, None if found is None else found.price)


@pytest.mark.parametrize(("fraction", "offered"), [(0.94, True), (0.95, False), (0.96, False)])
def test_a_higher_fraction(fraction: float, offered: bool) -> None:
    """Up to 0.95."""
    found = lever(scenario(memory_fraction_ratio=fraction), "memory-fraction")

    assert offered is (found is not None)
    assert found is None or ("--gpu-memory-utilization 0.95", 0.95) == (
        found.change,
        found.plan.budgets[0].memory_fraction_ratio,
    )


@pytest.mark.parametrize(
    ("weight_format", "expected"),
    [
        (WeightFormat.BF16, {"fp8-weights": "fp8 weights", "int4-weights": "int4 weights"}),
        (WeightFormat.FP8, {}),
        (None, {}),
    ],
    ids=["16 bits", "quantized", "given in bytes"],
)
def test_smaller_weights(weight_format: WeightFormat | None, expected: dict[str, str]) -> None:
    """Where they are counted and not quantized yet; 4 bits gain more than 8, 8 nearly half of 0.5 x 10^9 x 2 bytes."""
    config = served("qwen2.5-0.5b").config
    architecture = parse_architecture(config)
    weights = (
        GivenWeights(total_bytes=1000)
        if weight_format is None
        else CountedWeights(
            parameters=count_parameters(config, architecture), quantization=usual_quantization(weight_format)
        )
    )
    of = scenario(architecture=architecture, gpu_bytes=24 << 30, weights=weights)

    levers = {each.name: each for each in find_levers(of, scenario_plan(of)) if each.name.endswith("-weights")}

    assert expected == {name: each.change for name, each in levers.items()}
    if levers:
        assert levers["int4-weights"].gained_bytes > levers["fp8-weights"].gained_bytes > 250_000_000


def test_what_fits_comes_first_then_what_gains_most() -> None:
    """10,000 requests on 24 GiB: fewer or shorter ones fit, half the bytes or twice the GPUs are not enough."""
    of = scenario(demand=Demand(context_tokens=160, requests=10_000), overheads=generic_overheads(), gpu_bytes=24 << 30)
    *levers, last = find_levers(of, scenario_plan(of))
    assert [True] * len(levers) == [found.supported for found in levers]
    assert not last.supported
    fits = [found.plan.outcome is not Outcome.DOES_NOT_FIT for found in levers]
    gains = [found.gained_bytes for found in levers]

    assert sorted(fits, reverse=True) == fits
    assert {True, False} == set(fits)
    assert all(gain > 0 for gain in gains)
    first = fits.count(True)
    assert all(found.price and found.change for found in levers)
    assert [*sorted(gains[:first], reverse=True), *sorted(gains[first:], reverse=True)] == gains


def test_outcomes_have_the_names_that_scripts_read() -> None:
    """In the JSON document."""
    assert ["fits", "tight", "does_not_fit"] == [
        scenario_plan(scenario(demand=Demand(context_tokens=160, requests=requests))).outcome.value
        for requests in (1, 10, 11)
    ]


@pytest.mark.parametrize("name", ["llama_70b", "gemma-3-27b", "qwen3.6-27b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_the_largest_demand_that_fits_fits_and_one_more_does_not(name: str) -> None:
    """max_requests and max_context_tokens are exact on both sides."""
    config = served(name).config
    architecture = parse_architecture(config)
    base = Scenario(
        architecture=architecture,
        deployment=Deployment(tensor_parallel=4),
        gpu_bytes=80_000_000_000,
        memory_fraction_ratio=0.92,
        weights=CountedWeights(
            parameters=count_parameters(config, architecture), quantization=usual_quantization(WeightFormat.BF16)
        ),
        overheads=generic_overheads(),
        demand=Demand(context_tokens=4096, requests=2),
        most_context_tokens=1 << 20,
    )
    plan = scenario_plan(base)

    def fits(context: int, requests: int) -> bool:
        demand = Demand(context_tokens=context, requests=requests)
        return scenario_plan(replace(base, demand=demand)).outcome is not Outcome.DOES_NOT_FIT

    assert fits(4096, plan.max_requests)
    assert not fits(4096, plan.max_requests + 1)
    assert fits(plan.max_context_tokens, 2)
    assert 1 << 20 == plan.max_context_tokens or not fits(plan.max_context_tokens + 1, 2)


def test_weights_of_a_checkpoint_are_spread_over_ranks() -> None:
    """800 stored bytes on four ranks."""
    tensors = (CheckpointTensor(name="model.layers.0.mlp.up_proj.weight", stored_bytes=800),)
    of = scenario(
        deployment=Deployment(tensor_parallel=4), weights=CheckpointWeights(tensors=tensors, kv_heads=8, tied=False)
    )

    assert [200] == list(rank_weights(of))


@pytest.mark.parametrize(
    ("unsupported", "expected"),
    [
        (
            (),
            [
                ("tensor-parallel+fp8-kv", "tight", "--tensor-parallel-size 2, --kv-cache-dtype fp8"),
                ("tensor-parallel", "tight", "--tensor-parallel-size 4"),
                ("tensor-parallel+fp8-kv", "fits", "--tensor-parallel-size 4, --kv-cache-dtype fp8"),
                ("tensor-parallel", "fits", "--tensor-parallel-size 8"),
            ],
        ),
        (
            ("fp8-kv",),
            [
                ("tensor-parallel", "tight", "--tensor-parallel-size 4"),
                ("tensor-parallel", "fits", "--tensor-parallel-size 8"),
            ],
        ),
    ],
    ids=["all", "no 8-bit cache"],
)
def test_changes_together(unsupported: tuple[str, ...], expected: list[tuple[str, str, str]]) -> None:
    """400 blocks are needed, 100 are there: four times as many fit tightly, eight times as many well."""
    crowd = Demand(context_tokens=160, requests=40)
    of = scenario(demand=crowd, unsupported_levers=frozenset(unsupported))

    found = find_combinations(of, scenario_plan(of))

    assert expected == [(one.name, one.plan.outcome.value, one.change) for one in found]
    assert ("fp8-kv" not in unsupported) == next(
        one.supported for one in find_levers(of, scenario_plan(of)) if one.name == "fp8-kv"
    )


def test_nothing_is_combined_where_one_change_is_enough() -> None:
    """150 blocks are needed, then 300, and 100 are there."""
    demands = (Demand(context_tokens=160, requests=15), Demand(context_tokens=160, requests=30))
    found = [find_combinations(of, scenario_plan(of)) for of in (scenario(demand=one) for one in demands)]

    assert [[], ["--tensor-parallel-size 2, --kv-cache-dtype fp8", "--tensor-parallel-size 4"]] == [
        [one.change for one in each] for each in found
    ]
