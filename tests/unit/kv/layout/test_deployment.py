"""Settings and what follows from them: tokens in flight, the terms of a request, layers and heads of each rank."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.deployment import Deployment, default_batched_tokens, deployed_layout, stage_ends
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture, Layer, StateLayer
from kvdiag.kv.layout.pages import RequestTerms, StateCacheMode
from tests.unit.kv.by_hand import DENSE, HYBRID, full, latent, model, state
from tests.unit.kv.refused import refused


@pytest.mark.parametrize(
    ("gpu_bytes", "gpu", "expected"),
    [
        (24 << 30, "l4", 2_048),
        ((70 << 30) - 1, "NVIDIA H100", 2_048),
        (70 << 30, "NVIDIA H100", 8_192),
        (80 << 30, "NVIDIA A100-SXM4-80GB", 2_048),
        (80 << 30, "a100", 2_048),
        ((160 << 30) - 1, "MI300X", 8_192),
        (160 << 30, "MI300X", 16_384),
    ],
)
def test_tokens_batched_by_default(gpu_bytes: int, gpu: str, expected: int) -> None:
    """EngineArgs.get_batch_defaults: by the GPU's memory from 70 GiB and from 160 GiB on, an A100 as a small one."""
    assert expected == default_batched_tokens(gpu_bytes, gpu)


@pytest.mark.parametrize(
    ("settings", "steps", "tokens"),
    [
        ({}, 1, 2 * 2048),
        ({"platform": Platform.CPU}, 0, 2048),
        ({"async_scheduling": False}, 0, 2048),
        ({"async_scheduling": True, "platform": Platform.CPU}, 1, 2 * 2048),
        ({"pipeline_parallel": 4, "max_num_batched_tokens": 1000}, 1, 5000),
        ({"max_in_flight_tokens": 77}, 1, 77),
    ],
)
def test_tokens_in_flight(settings: dict[str, Any], steps: int, tokens: int) -> None:
    """Batches at a time x tokens of a batch: one for each stage, and one more with async scheduling, as on GPUs."""
    deployment = Deployment(**settings)

    assert (steps, tokens) == (deployment.steps_in_flight, deployment.in_flight_tokens)


def test_what_is_planned_and_what_is_held_have_the_settings_terms() -> None:
    """The engine plans an encoder's tokens by a step's, a request holds those that it has."""
    deployment = Deployment(
        tensor_parallel=8, decode_context_parallel=2, max_num_batched_tokens=4096, state_cache_mode=StateCacheMode.ALL
    )

    planned = RequestTerms(
        max_in_flight_tokens=8192,
        encoder_tokens=4096,
        steps_in_flight=1,
        decode_context_parallel=2,
        state_cache_mode=StateCacheMode.ALL,
    )

    assert planned == deployment.request_terms(DENSE)
    assert replace(planned, encoder_tokens=1500) == deployment.request_terms(DENSE, encoder_tokens=1500)


@pytest.mark.parametrize(
    ("architecture", "caching", "told", "expected"),
    [
        (HYBRID, True, None, StateCacheMode.ALIGN),
        (HYBRID, False, None, StateCacheMode.NONE),
        (DENSE, True, None, StateCacheMode.NONE),
        (HYBRID, True, StateCacheMode.NONE, StateCacheMode.NONE),
        (HYBRID, False, StateCacheMode.ALIGN, StateCacheMode.ALIGN),
    ],
)
def test_states_are_kept_where_prefixes_are(
    architecture: Architecture, caching: bool, told: StateCacheMode | None, expected: StateCacheMode
) -> None:
    """`align` where prefix caching runs on a model with states, unless the command line says otherwise."""
    assert expected is Deployment(prefix_caching=caching, state_cache_mode=told).resolved_state_cache_mode(architecture)


@pytest.mark.parametrize(
    ("depth", "stages", "expected"),
    [
        (32, 1, (32,)),
        (32, 4, (8, 16, 24, 32)),
        (5, 2, (3, 5)),
        (10, 4, (2, 5, 8, 10)),
        (11, 4, (3, 6, 9, 11)),
        (61, 8, (7, 14, 22, 30, 38, 46, 54, 61)),
        (3, 3, (1, 2, 3)),
    ],
)
def test_layers_of_each_stage(depth: int, stages: int, expected: tuple[int, ...]) -> None:
    """get_pp_indices: what does not divide goes to the stages before the last, one each, from the back."""
    assert expected == stage_ends(depth, Deployment(pipeline_parallel=stages))


def test_a_drafter_lies_on_the_last_stage() -> None:
    """Two layers over two stages, and a draft layer of the same page on the second: 1 and 2 pages of 64 KiB a block."""
    deployment = Deployment(pipeline_parallel=2, draft_layers=(full(0),), speculative_tokens=1)

    assert (65_536, 131_072) == deployed_layout(DENSE, deployment).bytes_per_block


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel": 32}, None),
        ({"tensor_parallel": 6}, "tensor_parallel"),
        ({"tensor_parallel": 64}, "tensor_parallel"),
        ({"pipeline_parallel": 2}, None),
        ({"pipeline_parallel": 3}, "pipeline_parallel"),
    ],
)
def test_ranks_divide_heads_and_stages_have_layers(settings: dict[str, Any], field: str | None) -> None:
    """32 query heads and 2 layers."""
    if field is None:
        assert 1 == len(deployed_layout(DENSE, Deployment(**settings)).groups)
        return
    with refused(field):
        deployed_layout(DENSE, Deployment(**settings))


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (48, 1), (6, None), (12, None)])
def test_kv_heads_of_a_rank(ranks: int, heads: int | None) -> None:
    """8 KV heads are divided or, over more ranks than heads, repeated; 6 and 12 do neither."""
    architecture = model(full(0), heads=48)

    if heads is not None:
        layout = deployed_layout(architecture, Deployment(tensor_parallel=ranks))
        assert (heads * 512 * 16,) == layout.bytes_per_block
        return
    with refused("tensor_parallel"):
        deployed_layout(architecture, Deployment(tensor_parallel=ranks))


@pytest.mark.parametrize(
    ("layer", "heads", "ranks", "shared", "allowed"),
    [
        (full(0, kv_heads=8), 32, 8, 1, True),
        (full(0, kv_heads=8), 32, 8, 2, False),
        (full(0, kv_heads=8), 32, 16, 2, True),
        (full(0, kv_heads=2), 32, 16, 8, True),
        (full(0, kv_heads=2), 32, 16, 16, False),
        (full(0, kv_heads=3), 12, 12, 2, True),
        (full(0, kv_heads=3), 12, 12, 3, False),
        (latent(0), 128, 8, 8, True),
        (state(0, 48), 32, 2, 2, False),
    ],
)
def test_decode_context_parallel_shares_copies_of_kv_heads(
    layer: Layer, heads: int, ranks: int, shared: int, allowed: bool
) -> None:
    """Over 16 ranks 2 KV heads are there 8 times: as many ranks can share a request's tokens, if the query heads of
    each divide; a latent row is on every rank. A state of one head is not divided at all.
    """
    deployment = Deployment(tensor_parallel=ranks, decode_context_parallel=shared)

    if allowed:
        assert 1 == len(deployed_layout(model(layer, heads=heads), deployment).groups)
        return
    with pytest.raises(KvModelError) as caught:
        deployed_layout(model(layer, heads=heads), deployment)
    expected = "tensor_parallel" if isinstance(layer, StateLayer) else "decode_context_parallel"
    assert expected == caught.value.field


def test_the_layer_with_the_most_kv_heads_decides_what_is_shared() -> None:
    """Over 16 ranks 8 heads are there twice and 2 heads 8 times: two ranks can share, four cannot."""
    architecture = model(full(0, kv_heads=8), full(1, kv_heads=2))

    shared = [Deployment(tensor_parallel=16, decode_context_parallel=ranks) for ranks in (2, 4)]
    assert 1 == len(deployed_layout(architecture, shared[0]).groups)
    with pytest.raises(KvModelError):
        deployed_layout(architecture, shared[1])
