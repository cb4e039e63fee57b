"""Plans to the byte: a model whose blocks can be reckoned by hand, on pools one byte larger and smaller than it needs.

Two full layers of 8 KV heads x 128 in bf16: K and V of a head take 512 bytes, a block of 16 tokens 16 x 8 x 512 bytes,
64 KiB, in each layer, and 128 KiB in both.
"""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.fit.plan import DEFAULT_MEMORY_FRACTION, Budget, Demand, Outcome, Plan, make_plan
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.layout.layers import CachelessLayer, LayerKind
from tests.unit.kv.by_hand import full, model
from tests.unit.kv.refused import refused

LAYER_BYTES = 64 << 10
BLOCK = 2 * LAYER_BYTES


MODEL = replace(model(full(0), full(1), heads=8), max_context_tokens=4096)
ENCODER = replace(
    MODEL, layers=tuple(CachelessLayer(index=index, kind=LayerKind.ENCODER_ONLY) for index in range(MODEL.depth))
)
STAGES = Deployment(pipeline_parallel=2)


def budget(pool_bytes: int, *, fraction: float = 1.0, weights_bytes: int = 1000) -> Budget:
    """A GPU with so much left after 1,000 bytes of weights, 100 of context, 20 of activation and 3 of graphs."""
    return Budget(
        total_bytes=1123 + pool_bytes,
        memory_fraction_ratio=fraction,
        weights_bytes=weights_bytes,
        context_bytes=100,
        activation_bytes=20,
        graph_bytes=3,
    )


def plan(*pools: int, context: int = 160, requests: int = 10, **options: Any) -> Plan:
    """The plan of the model, or of `architecture`, with these pools on its stages."""
    return make_plan(
        options.pop("architecture", MODEL),
        Deployment(pipeline_parallel=len(pools)),
        budgets=[budget(pool) for pool in pools],
        demand=Demand(context_tokens=context, requests=requests),
        **options,
    )


@pytest.mark.parametrize(
    ("spare_bytes", "outcome", "max_requests"),
    [(0, Outcome.TIGHT, 10), (1, Outcome.TIGHT, 10), (-1, Outcome.DOES_NOT_FIT, 9)],
)
def test_ten_requests_of_ten_blocks_need_101(spare_bytes: int, outcome: Outcome, max_requests: int) -> None:
    """One block is the engine's null block; a byte less is a whole block less."""
    actual = plan(101 * BLOCK + spare_bytes)

    assert (outcome, max_requests, spare_bytes) == (actual.outcome, actual.max_requests, actual.headroom_bytes)
    assert (100, 101 * BLOCK) == (actual.blocks_needed, actual.needed_bytes)


@pytest.mark.parametrize(("spare_bytes", "outcome"), [(0, Outcome.FITS), (-1, Outcome.TIGHT)])
def test_less_than_a_tenth_is_tight(spare_bytes: int, outcome: Outcome) -> None:
    """Of 10 blocks 8 requests of one block and the null block leave exactly a tenth."""
    actual = plan(10 * BLOCK + spare_bytes, context=16, requests=8)

    assert outcome == actual.outcome
    assert (BLOCK + spare_bytes) / (10 * BLOCK + spare_bytes) == actual.headroom_ratio


@pytest.mark.parametrize(("blocks", "max_requests", "max_context"), [(0, 0, 0), (1, 0, 0), (2, 1, 16), (3, 2, 32)])
def test_the_null_block_is_never_a_requests(blocks: int, max_requests: int, max_context: int) -> None:
    """A pool of one block serves no request, a pool of two blocks one request of 16 tokens."""
    actual = plan(blocks * BLOCK, context=16, requests=1)

    assert (max_requests, max_context) == (actual.max_requests, actual.max_context_tokens)


@pytest.mark.parametrize(
    ("promised", "demanded", "asked", "expected"),
    [
        (4096, 16, None, 4096),
        (4096, 8192, None, 8192),
        (None, 16, None, 16),
        (4096, 16, 100, 100),
        (4096, 16, 100_000, 16_000),
    ],
    ids=["config", "beyond the config", "a config without one", "asked for less", "asked for more than fits"],
)
def test_how_long_a_context_is_looked_for(
    promised: int | None, demanded: int, asked: int | None, expected: int
) -> None:
    """As long as the config promises or the demand is, unless asked otherwise; 1,000 blocks hold 16,000 tokens."""
    actual = plan(
        1001 * BLOCK,
        architecture=replace(MODEL, max_context_tokens=promised),
        context=demanded,
        requests=1,
        most_context_tokens=asked,
    )

    assert expected == actual.max_context_tokens


def test_a_stage_whose_weights_do_not_fit_stops_all() -> None:
    """Room on the first stage is of no use where the second cannot even load; 23 bytes are missing there."""
    actual = make_plan(
        MODEL,
        STAGES,
        budgets=[budget(1000 * LAYER_BYTES), budget(0, weights_bytes=1023)],
        demand=Demand(context_tokens=16, requests=1),
    )

    assert (Outcome.DOES_NOT_FIT, 0, 0) == (actual.outcome, actual.max_requests, actual.max_context_tokens)
    assert (1, -23 - 2 * LAYER_BYTES, -1.0) == (actual.limiting_stage, actual.headroom_bytes, actual.headroom_ratio)
    assert [0, 23] == [budget.shortfall_bytes for budget in actual.budgets]


@pytest.mark.parametrize(("pools", "stage", "headroom_layers"), [((5, 9), 0, 2), ((9, 5), 1, 2), ((5, 5), 0, 2)])
def test_the_stage_with_the_least_room_limits(pools: tuple[int, ...], stage: int, headroom_layers: int) -> None:
    """One layer each: two requests of a block and the null block take 3 layers' pages of either pool."""
    actual = plan(*(pages * LAYER_BYTES for pages in pools), context=16, requests=2)

    assert (stage, headroom_layers * LAYER_BYTES) == (actual.limiting_stage, actual.headroom_bytes)
    assert (3 * LAYER_BYTES, 4) == (actual.needed_bytes, actual.max_requests)


@pytest.mark.parametrize("budgets", [[budget(BLOCK)], [budget(BLOCK)] * 3])
def test_each_stage_has_one_budget(budgets: list[Budget]) -> None:
    """Neither fewer nor more."""
    with refused("pipeline_parallel"):
        make_plan(MODEL, STAGES, budgets=budgets, demand=Demand(context_tokens=16, requests=1))


@pytest.mark.parametrize(
    ("rests", "outcome", "stage", "headroom_ratio"),
    [
        ((1_000_000 - 1123, 200_000), Outcome.FITS, 1, 200_000 / 201_123),
        ((125,), Outcome.FITS, 0, 125 / 1248),
        ((124,), Outcome.TIGHT, 0, 124 / 1247),
        ((0,), Outcome.TIGHT, 0, 0.0),
        ((5000, -1), Outcome.DOES_NOT_FIT, 1, -1 / 1122),
        ((-1, 5000), Outcome.DOES_NOT_FIT, 0, -1 / 1122),
    ],
)
def test_a_model_without_a_cache_needs_room_for_its_weights_alone(
    rests: tuple[int, ...], outcome: Outcome, stage: int, headroom_ratio: float
) -> None:
    """What is left is a share of what the engine may take; 0 left is tight and a byte short does not fit."""
    actual = plan(*rests, architecture=ENCODER)

    assert (outcome, stage, rests[stage], headroom_ratio) == (
        actual.outcome,
        actual.limiting_stage,
        actual.headroom_bytes,
        actual.headroom_ratio,
    )
    assert (False, 0, 0, 0, 0) == (
        actual.keeps_cache,
        actual.blocks_needed,
        actual.needed_bytes,
        actual.max_requests,
        actual.max_context_tokens,
    )


@pytest.mark.parametrize(
    ("total_bytes", "fraction", "usable_bytes"),
    [(1000, 1.0, 1000), (1000, 0.5, 500), (1001, 0.5, 501), (999, 0.001, 1), (80 << 30, 0.92, 79_027_398_247)],
)
def test_a_fraction_is_rounded_up(total_bytes: int, fraction: float, usable_bytes: int) -> None:
    """request_memory takes the ceiling: 0.92 x 85,899,345,920 = 79,027,398,246.4 and a byte is whole."""
    actual = Budget(
        total_bytes=total_bytes,
        memory_fraction_ratio=fraction,
        weights_bytes=0,
        context_bytes=0,
        activation_bytes=0,
        graph_bytes=0,
    )

    assert (usable_bytes, total_bytes - usable_bytes) == (actual.usable_bytes, actual.reserve_bytes)


@pytest.mark.parametrize(
    "part", ["weights_bytes", "context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes"]
)
def test_every_part_takes_from_the_pool(part: str) -> None:
    """7 bytes more of any of them are 7 bytes less of pool."""
    before = budget(500)

    assert 493 == replace(before, **{part: getattr(before, part) + 7}).pool_bytes


def test_a_budget_of_the_default_fraction_is_what_vllm_asks_for() -> None:
    """At its start vLLM prints "Desired GPU memory utilization is (0.92, 72.85 GiB)" on a GPU of 79.19 GiB."""
    total_bytes = round(79.19 * 2**30)
    usable = replace(budget(total_bytes - 1123), memory_fraction_ratio=DEFAULT_MEMORY_FRACTION).usable_bytes

    assert pytest.approx(72.85 * 2**30, rel=1e-4) == usable


@pytest.mark.parametrize(("more_blocks", "outcome"), [(0, Outcome.FITS), (9, Outcome.FITS), (10, Outcome.TIGHT)])
def test_a_demand_fits_only_where_the_whole_band_does(more_blocks: int, outcome: Outcome) -> None:
    """A pool of 20 blocks, of which 10 tokens' blocks and the null block are needed: with the most that the overheads
    may come to, 11 must be left, else it fits tightly.
    """
    band = replace(budget(20 * BLOCK), less_bytes=BLOCK, more_bytes=more_blocks * BLOCK)
    plan = make_plan(MODEL, Deployment(), budgets=[band], demand=Demand(context_tokens=160, requests=1))

    assert outcome is plan.outcome
    assert ((20 - more_blocks) * BLOCK, 21 * BLOCK) == plan.budgets[0].pool_range_bytes
