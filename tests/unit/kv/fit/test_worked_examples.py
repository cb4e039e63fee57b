"""Worked examples of published articles, to the byte."""

from dataclasses import replace
from typing import Any

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import generic_overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.fit.scenario import GivenWeights, Scenario, scenario_budgets, scenario_plan
from kvdiag.kv.layout.capacity import plan_layout, pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms

TERMS = RequestTerms(max_in_flight_tokens=2048, encoder_tokens=0)


def llama(layers: int, *, kv_heads: int = 8, heads: int = 64, head_size: int = 128) -> dict[str, Any]:
    """A Llama-like config of so many layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": heads * head_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "torch_dtype": "bfloat16",
    }


def request_bytes(config: dict[str, Any], *, tokens: int, requests: int = 1) -> int:
    """Pool bytes that requests of so many tokens take."""
    layout = deployed_layout(parse_architecture(config), Deployment())
    return requests * layout.admission_blocks(tokens, TERMS) * layout.bytes_per_block[0]


def test_the_bill_of_one_request() -> None:
    """80 layers of 8 KV heads of 128 at 8,192 tokens in bf16 take 2,684,354,560 bytes."""
    assert 2_684_354_560 == request_bytes(llama(80), tokens=8192)


def test_the_bill_doubles_with_traffic() -> None:
    """Eight and sixteen such requests take 20 and 40 GiB."""
    eight = request_bytes(llama(80), tokens=8192, requests=8)
    assert (20 << 30, 40 << 30) == (eight, request_bytes(llama(80), tokens=8192, requests=16))


def test_four_requests_of_a_smaller_model_and_their_doubling() -> None:
    """32 layers x 8 heads x 128 x 4,096 tokens x 4 requests in bf16 take 2 GiB; twice the requests take twice that."""
    config = llama(32, heads=32)
    four = request_bytes(config, tokens=4096, requests=4)
    eight = request_bytes(config, tokens=4096, requests=8)

    assert (2 * 32 * 8 * 128 * 4096 * 4 * 2, 2 * four) == (four, eight)


def test_the_pool_of_the_production_article() -> None:
    """50 GB at 0.5 MB a token are 100,000 tokens and 6,250 blocks of 16."""
    page = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=1, row_bytes=500_000)

    capacity = pool_capacity(plan_layout([page]), pool_bytes=50_000_000_000, context_tokens=16, terms=TERMS)

    assert (6250, 100_000) == (capacity.num_blocks, capacity.capacity_tokens)


def test_a_7b_model_costs_half_a_mebibyte_a_token() -> None:
    """32 layers of 32 heads of 128 in 16 bits are 524,288 bytes a token, the article's 0.5 MB."""
    layout = deployed_layout(parse_architecture(llama(32, kv_heads=32, heads=32)), Deployment())

    assert (524_288,) == layout.bytes_per_token()


def test_70b_at_tp_4_on_80_gb() -> None:
    """140 GB of weights over four GPUs of 80 GB leave 41.5 GB each for the cache, 506,560 tokens at 81,920 bytes."""
    scenario = Scenario(
        architecture=parse_architecture(llama(80)),
        deployment=Deployment(tensor_parallel=4),
        gpu_bytes=80_000_000_000,
        memory_fraction_ratio=1.0,
        weights=GivenWeights(total_bytes=140_000_000_000),
        overheads=generic_overheads(),
        demand=Demand(context_tokens=8192, requests=61),
    )

    pool = scenario_budgets(scenario)[0].pool_bytes
    plan = scenario_plan(scenario)
    one_more = scenario_plan(replace(scenario, demand=Demand(context_tokens=8192, requests=62)))

    assert (41_500_000_000, 31_661, 61) == (pool, plan.capacity.num_blocks, plan.max_requests)
    assert (Outcome.TIGHT, Outcome.DOES_NOT_FIT) == (plan.outcome, one_more.outcome)
