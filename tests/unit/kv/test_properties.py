"""What must hold for every model and deployment."""

from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import generic_overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.fit.scenario import GivenWeights, Scenario, scenario_plan
from kvdiag.kv.layout.capacity import pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.residency import decode_blocks

settings.register_profile("kv", max_examples=60, deadline=None)
settings.load_profile("kv")

NAMES = ("full_attention", "sliding_attention")


@st.composite
def attention_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Dense and windowed models."""
    layers = draw(st.integers(1, 40))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 4])),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([32, 64, 128])),
        "hidden_size": 1024,
        "sliding_window": draw(st.sampled_from([64, 128, 1024])),
        "layer_types": draw(st.lists(st.sampled_from(NAMES), min_size=layers, max_size=layers)),
        "torch_dtype": "bfloat16",
    }


@st.composite
def hybrid_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Models with gated delta net layers."""
    heads = draw(st.sampled_from([4, 8, 16]))
    return {
        "model_type": "qwen3_next",
        "num_hidden_layers": draw(st.integers(4, 48)),
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": draw(st.sampled_from([2, 4, 8])),
        "head_dim": 128,
        "full_attention_interval": draw(st.integers(2, 4)),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "torch_dtype": "bfloat16",
    }


@st.composite
def latent_configs(draw: st.DrawFn) -> dict[str, Any]:
    """MLA models, with and without an indexer."""
    config: dict[str, Any] = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": draw(st.integers(1, 61)),
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "kv_lora_rank": draw(st.sampled_from([256, 512])),
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    if draw(st.booleans()):
        config |= {"index_topk": 2048, "index_head_dim": 128}
    else:
        config |= {"index_topk": None}
    return config


configs = st.one_of(attention_configs(), hybrid_configs(), latent_configs())
tokens = st.integers(1, 200_000)


def request_bytes(architecture: Architecture, deployment: Deployment, length: int) -> int:
    """Bytes that one request of that length is planned to take on one rank."""
    layout = deployed_layout(architecture, deployment)
    return layout.admission_blocks(length, deployment.request_terms(architecture)) * max(layout.bytes_per_block)


@given(configs, tokens, tokens)
def test_more_tokens_never_cost_less(config: dict[str, Any], first: int, second: int) -> None:
    """A longer request needs at least as many bytes."""
    architecture = parse_architecture(config)
    short, long = sorted((first, second))

    assert request_bytes(architecture, Deployment(), short) <= request_bytes(architecture, Deployment(), long)


dense_configs = attention_configs().map(lambda config: {**config, "layer_types": None, "sliding_window": None})


@given(st.one_of(latent_configs(), dense_configs), tokens)
def test_more_layers_never_cost_less(config: dict[str, Any], length: int) -> None:
    """One layer more of the same kind needs at least as many bytes."""
    deeper = {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}

    assert request_bytes(parse_architecture(config), Deployment(), length) <= request_bytes(
        parse_architecture(deeper), Deployment(), length
    )


@given(attention_configs(), tokens)
def test_more_heads_never_cost_less(config: dict[str, Any], length: int) -> None:
    """Twice the heads need at least as many bytes."""
    wider = {
        **config,
        "num_attention_heads": config["num_attention_heads"] * 2,
        "num_key_value_heads": config["num_key_value_heads"] * 2,
    }

    assert request_bytes(parse_architecture(config), Deployment(), length) <= request_bytes(
        parse_architecture(wider), Deployment(), length
    )


@given(st.one_of(attention_configs(), latent_configs()), tokens, st.sampled_from([1, 2, 4]))
def test_tensor_parallel_never_costs_more_per_rank(config: dict[str, Any], length: int, ranks: int) -> None:
    """Twice the ranks need no more bytes on each."""
    architecture = parse_architecture(config)
    assume(architecture.attention_heads % (2 * ranks) == 0)

    assert request_bytes(architecture, Deployment(tensor_parallel=2 * ranks), length) <= request_bytes(
        architecture, Deployment(tensor_parallel=ranks), length
    )


@given(hybrid_configs(), st.sampled_from([1, 2]))
def test_tensor_parallel_never_enlarges_a_hybrids_block(config: dict[str, Any], ranks: int) -> None:
    """A hybrid's page is no larger on twice the ranks (its block may be longer)."""
    architecture = parse_architecture(config)
    narrow, wide = (
        deployed_layout(architecture, Deployment(tensor_parallel=count)).bytes_per_block[0]
        for count in (ranks, 2 * ranks)
    )

    assert wide <= narrow


@given(st.one_of(attention_configs(), latent_configs()), tokens)
def test_fp8_never_costs_more_than_16_bits(config: dict[str, Any], length: int) -> None:
    """An fp8 cache needs no more bytes than a bf16 one in blocks of the same size, where there are kernels for it."""
    architecture = parse_architecture(config)
    # Packed rows of sparse latent attention have 576 elements.
    assume("index_topk" not in config or config["index_topk"] is None or config["kv_lora_rank"] == 512)

    eight, sixteen = (
        request_bytes(architecture, Deployment(kv_dtype=name, block_size_tokens=64), length)
        for name in ("fp8", "bfloat16")
    )
    assert eight <= sixteen


@given(configs, st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_larger_pool_never_holds_less(config: dict[str, Any], first: int, second: int) -> None:
    """More bytes give at least as many blocks and tokens."""
    architecture = parse_architecture(config)
    layout = deployed_layout(architecture, Deployment())
    small, large = (
        pool_capacity(layout, pool_bytes=pool, context_tokens=8192, terms=Deployment().request_terms(architecture))
        for pool in sorted((first, second))
    )

    assert small.num_blocks <= large.num_blocks
    assert small.capacity_tokens <= large.capacity_tokens


@given(attention_configs(), st.integers(1, 20_000), st.sampled_from([256, 512, 2048]))
def test_no_request_ever_holds_more_than_was_planned(config: dict[str, Any], length: int, batch: Any) -> None:
    """Decoding stays within the admission bound."""
    architecture = parse_architecture(config)
    deployment = Deployment(max_num_batched_tokens=batch, async_scheduling=False)
    layout = deployed_layout(architecture, deployment)
    serving = deployment.request_terms(architecture, encoder_tokens=0)
    planned = layout.admission_blocks(length, deployment.request_terms(architecture))

    assert decode_blocks(layout, resident_tokens=length, terms=serving) <= planned


@given(configs, st.integers(1, 4096), st.integers(20, 400), st.integers(1, 64))
def test_the_plans_maximum_fits_and_one_more_does_not(
    config: dict[str, Any], context: int, gib: int, requests: int
) -> None:
    """plan(max_requests) fits and plan(max_requests + 1) does not; likewise for the context."""
    architecture = parse_architecture(config)
    scenario = Scenario(
        architecture=architecture,
        deployment=Deployment(),
        gpu_bytes=gib << 30,
        memory_fraction_ratio=0.9,
        weights=GivenWeights(total_bytes=10 << 30),
        overheads=generic_overheads(),
        demand=Demand(context_tokens=context, requests=requests),
        most_context_tokens=1 << 22,
    )
    plan = scenario_plan(scenario)

    def fits(**change: int) -> bool:
        demand = replace(scenario.demand, **change)
        return scenario_plan(replace(scenario, demand=demand)).outcome is not Outcome.DOES_NOT_FIT

    assume(plan.max_requests < 1 << 20)
    assert 0 == plan.max_requests or fits(requests=plan.max_requests)
    assert not fits(requests=plan.max_requests + 1)
    assert 0 == plan.max_context_tokens or fits(context_tokens=plan.max_context_tokens)
    assert 1 << 22 == plan.max_context_tokens or not fits(context_tokens=plan.max_context_tokens + 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    """
    model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim sliding_window layer_types
    text_config quantization_config torch_dtype kv_lora_rank index_topk linear_num_key_heads hybrid_override_pattern
    block_configs layer_types_count
    """.split()  # noqa: SIM905 - as a list it has three times the lines
)
TYPES = st.sampled_from(
    ["llama", "mistral", "deepseek_v3", "qwen3_next", "nemotron_h", "gemma4_text", "whisper", "lfm2"]
)


@settings(max_examples=300)
@given(TYPES, st.dictionaries(FIELDS, json_values, max_size=6))
def test_no_config_gets_past_the_reader_but_as_a_model_or_one_error(model_type: str, changes: dict[str, Any]) -> None:
    """Any config is an architecture or a KvModelError of one line: no other error is raised."""
    config = {"model_type": model_type, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4} | changes
    lines = 1
    try:
        deployed_layout(parse_architecture(config), Deployment())
    except KvModelError as error:
        lines = len(str(error).splitlines()) if error.field else 0

    assert 1 == lines
