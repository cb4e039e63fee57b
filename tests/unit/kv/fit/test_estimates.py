"""What a GPU needs besides weights and cache, where no measurement exists."""

from statistics import median
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import architecture_note, generic_overheads, vllm_overheads
from tests.unit.kv.pool_errors import pool_error_summary, pool_errors

GIB = 2**30
# Llama 3.1 8B.
SHAPE: dict[str, Any] = {"hidden_size": 4096, "feed_forward_size": 14_336, "vocabulary": 128_256}
# 35 % of a GiB for a CUDA context, and 45 % for NCCL each time that ranks double.
CONTEXT, NCCL = 375_809_638, 483_183_820


def test_the_rule_of_thumb_is_the_articles() -> None:
    """80 GB less 35 GB of weights, 1.5 GB of context and 2 GB of allocator leave 41.5 GB for a 70B model on 4 GPUs."""
    overheads = generic_overheads()

    assert 41_500_000_000 == 80_000_000_000 - 35_000_000_000 - overheads.context_bytes - overheads.activation_bytes
    assert (1_500_000_000, 0, 0) == (overheads.context_bytes, overheads.graph_bytes, overheads.overhead_bytes)


@pytest.mark.parametrize(
    ("terms", "activation_bytes"),
    [
        # A batch of 8,192 tokens, 16 bits each: 6 hidden sizes of 4,096 and 3 feed-forward sizes of 14,336.
        ({"tensor_parallel": 1, "batched_tokens": 8192}, 8192 * 2 * (24_576 + 43_008)),
        # Eight ranks divide the feed-forward block, and nothing else.
        ({"tensor_parallel": 8, "batched_tokens": 8192}, 8192 * 2 * (24_576 + 5_376)),
        # A small batch: three fp32 copies of 256 sequences' logits are more.
        ({"tensor_parallel": 1, "batched_tokens": 512}, 3 * 256 * 128_256 * 4),
    ],
)
def test_the_activation_is_the_larger_of_a_layer_and_sampling(terms: dict[str, Any], activation_bytes: int) -> None:
    """A quarter of a GiB comes on top."""
    assert activation_bytes + 268_435_456 == vllm_overheads(**SHAPE, **terms).activation_bytes


@pytest.mark.parametrize(("ranks", "doublings"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_ranks_that_talk_need_more_context(ranks: int, doublings: int) -> None:
    """NCCL's buffers grow with each doubling of the ranks, for engines that count from an empty device."""
    overheads = vllm_overheads(**SHAPE, tensor_parallel=ranks, batched_tokens=8192, whole_context=True)

    assert CONTEXT + doublings * NCCL == overheads.context_bytes


@pytest.mark.parametrize(("ranks", "outside_bytes"), [(1, GIB // 10), (2, GIB // 4), (16, GIB // 4)])
def test_memory_outside_torch_is_that_of_published_logs(ranks: int, outside_bytes: int) -> None:
    """VLLM counts what is taken after its first look at the device: 0.09 GiB, and 0.2 to 0.25 GiB on several GPUs."""
    assert outside_bytes == vllm_overheads(**SHAPE, tensor_parallel=ranks, batched_tokens=8192).context_bytes


def test_the_band_is_of_independent_parts() -> None:
    """Each part's deviation is squared: without graphs it is narrower, on several GPUs wider."""
    usual = vllm_overheads(**SHAPE, tensor_parallel=1, batched_tokens=8192)
    eager = vllm_overheads(**SHAPE, tensor_parallel=1, batched_tokens=8192, graphs=False)
    several = vllm_overheads(**SHAPE, tensor_parallel=2, batched_tokens=8192)

    activation = usual.activation_bytes
    assert abs(0.7 * activation - eager.less_bytes) < 0.01 * activation
    assert abs(1.5 * activation - eager.more_bytes) < 0.05 * activation
    assert eager.more_bytes < usual.more_bytes < several.more_bytes + several.activation_bytes
    assert (0, 0) == (generic_overheads().less_bytes, generic_overheads().more_bytes)


def test_estimated_pools_are_near_those_of_published_logs() -> None:
    """The median is right to 5 %, and most pools lie in the band."""
    found = pool_errors()

    assert len(found) >= 20
    assert 0.95 <= median(one.ratio for one in found) <= 1.05
    assert sum(one.inside for one in found) / len(found) >= 0.8
    assert "in the band" in pool_error_summary(found)


def test_graphs_take_half_a_gib_unless_there_are_none() -> None:
    """--enforce-eager captures no graphs; the default does. What is guessed says so."""
    usual = vllm_overheads(**SHAPE, tensor_parallel=1, batched_tokens=8192)
    eager = vllm_overheads(**SHAPE, tensor_parallel=1, batched_tokens=8192, graphs=False)

    assert (GIB // 2, 0, "estimate") == (usual.graph_bytes, eager.graph_bytes, usual.source)


def test_models_with_states_have_a_caution() -> None:
    """A scan in fp32 may double the activation of a hybrid model; a model of attention alone has no caution."""
    dense = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    mamba = {
        "model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "conv_kernel": 4,
        "expand": 2,
    }  # fmt: skip

    assert "" == architecture_note(parse_architecture(dense))
    assert "fp32" in architecture_note(parse_architecture(mamba))
