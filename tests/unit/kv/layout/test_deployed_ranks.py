"""What lies on each stage and rank: layers, drafters, KV heads, and what decode context parallel can share."""

from __future__ import annotations

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.deployment import Deployment, deployed_layout, stage_ends
from kvdiag.kv.layout.layers import Layer, StateLayer
from tests.unit.kv.by_hand import DENSE, full, latent, model, state


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


@pytest.mark.parametrize(
    ("partition", "expected"),
    [((1, 3), (1, 4)), ((0, 4), (0, 4)), ((2, 3), None), ((2, 1), None), ((5, -1), None)],
)
def test_a_partition_of_ones_own(partition: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """VLLM_PP_LAYER_PARTITION must add up to the layers, and no stage has less than none."""
    deployment = Deployment(pipeline_parallel=2, pipeline_partition=partition)

    if expected is not None:
        assert expected == stage_ends(4, deployment)
        return
    with pytest.raises(KvModelError) as caught:
        stage_ends(4, deployment)
    assert "pipeline_partition" == caught.value.field


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
    with pytest.raises(KvModelError) as caught:
        deployed_layout(DENSE, Deployment(**settings))

    assert field == caught.value.field


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (48, 1), (6, None), (12, None)])
def test_kv_heads_of_a_rank(ranks: int, heads: int | None) -> None:
    """8 KV heads are divided or, over more ranks than heads, repeated; 6 and 12 do neither."""
    architecture = model(full(0), heads=48)

    if heads is not None:
        layout = deployed_layout(architecture, Deployment(tensor_parallel=ranks))
        assert (heads * 512 * 16,) == layout.bytes_per_block
        return
    with pytest.raises(KvModelError) as caught:
        deployed_layout(architecture, Deployment(tensor_parallel=ranks))
    assert "tensor_parallel" == caught.value.field


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
    ids=[
        "not shared",
        "no copies",
        "two copies",
        "eight copies",
        "more than the copies",
        "four query heads in two",
        "four query heads in three",
        "latent",
        "states",
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


def test_the_ranks_that_context_parallel_needs_are_told() -> None:
    """2 x 8 KV heads."""
    with pytest.raises(KvModelError):
        deployed_layout(DENSE, Deployment(tensor_parallel=8, decode_context_parallel=2))
