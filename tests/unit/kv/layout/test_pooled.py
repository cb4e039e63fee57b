"""GLM-5-Next: latent rows, pooled index keys, rings and states in one block, as vLLM 0.32 makes them."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.capacity import pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform
from tests.unit.kv.refused import refused

# Without layers, the class fills in those of GLM-5.3-Flash.
FLASH = {
    "model_type": "glm5_next_text",
    "num_hidden_layers": 45,
    "hidden_size": 4096,
    "max_position_embeddings": 1 << 20,
}


@pytest.mark.parametrize(
    ("settings", "block", "blocks", "tokens"),
    [
        ({}, 4_608, 1_230, 3_838_537),
        ({"tensor_parallel": 2}, 2_560, 2_214, 4_464_513),
        ({"kv_dtype": "fp8"}, 8_704, 1_292, 5_839_483),
        ({"compute_capability": 100, "tensor_parallel": 2, "kv_dtype": "fp8"}, 4_608, 2_431, 7_586_572),
        ({"compute_capability": 120, "tensor_parallel": 4}, 3_072, 2_735, 6_763_809),
        ({"block_size_tokens": 6_144}, 6_144, 923, 3_456_555),
    ],
    ids=["16 bits", "2 ranks", "8 bits", "8 bits on B200", "desktop Blackwell", "blocks of 6,144"],
)
def test_blocks_and_tokens_are_vllms(settings: dict[str, Any], block: int, blocks: int, tokens: int) -> None:
    """The engine's own figures for 60 GiB (tests/integration/vllm/test_sparse_hybrids_on_vllm.py)."""
    architecture = parse_architecture(FLASH)
    deployment = Deployment(max_in_flight_tokens=16_384, **settings)
    layout = deployed_layout(architecture, deployment)
    terms = deployment.request_terms(architecture)
    capacity = pool_capacity(layout, pool_bytes=60 << 30, context_tokens=131_072, terms=terms)

    assert (block, blocks, tokens) == (layout.block_size_tokens, capacity.num_blocks, capacity.capacity_tokens)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"compute_capability": 100, "kv_dtype": "fp8_ds_mla"}, "kv_dtype"),
        ({"skip_layers": frozenset({"3"}), "kv_dtype": "fp8"}, "kv_cache_dtype_skip_layers"),
        ({"platform": Platform.CPU}, "platform"),
        ({"hybrid_manager": False}, "hybrid_kv_cache_manager"),
    ],
    ids=["packed rows on B200", "two formats", "CPU", "no hybrid manager"],
)
def test_what_is_not_known_is_refused(settings: dict[str, Any], field: str) -> None:
    """The error names the setting."""
    with refused(field):
        deployed_layout(parse_architecture(FLASH), Deployment(**settings))


@pytest.mark.parametrize(
    ("fields", "checkpoints"),
    [
        ({}, 1),
        ({"linear_lower_bound": None}, 0),
        ({"linear_lower_bound": None, "linear_attn_config": {"head_dim": 128}}, 1),
        ({"linear_attn_config": {"head_dim": 64}}, 0),
    ],
    ids=["default", "no bound", "bound by the older form", "other heads"],
)
def test_checkpoints_are_those_of_a_bounded_gate(fields: dict[str, object], checkpoints: int) -> None:
    """FlashKDA needs one, and heads of 128 (glm5next/common/kda.py::_resolve_kda_prefill_backend)."""
    state = parse_architecture({**FLASH, **fields}).layers[0]

    assert checkpoints == state.state.prefill_checkpoints  # type: ignore[union-attr]


def test_without_an_indexer_a_layer_is_plain_latent_attention() -> None:
    """Nothing is packed then."""
    assert not parse_architecture({**FLASH, "index_topk": None}).is_packed


def test_no_other_engine_s_pools_are_planned_for_it() -> None:
    """SGLang and llama.cpp keep neither pooled keys nor a ring."""
    assert parse_architecture(FLASH).is_vllms_alone
