"""Settings and what follows from them: bounds, terms, pipeline stages, blocks beside states, what ranks can share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.architecture import parse_architecture
from kvdiag.kv.deployment import (
    Deployment,
    Platform,
    block_note,
    check_block_size,
    default_batched_tokens,
    deployed_layout,
    stage_ends,
)
from kvdiag.kv.errors import KvModelError
from kvdiag.kv.layers import Architecture, AttentionLayer, LatentLayer, Layer, LayerKind, StateLayer
from kvdiag.kv.pages import PageKind, RequestTerms, StateCacheMode
from kvdiag.kv.residency import ServingTerms
from kvdiag.kv.states import StateShape
from tests.kv.vectors import DATA

MOST_TOKENS = 1 << 30


def full(index: int, kv_heads: int = 8) -> AttentionLayer:
    """A layer of heads of 128, 512 bytes a token and head in bf16."""
    return AttentionLayer(index=index, kind=LayerKind.FULL, kv_heads=kv_heads, head_size=128, head_size_v=128)


def sliding(index: int) -> AttentionLayer:
    """The same with a window of 1,024."""
    return replace(full(index), kind=LayerKind.SLIDING, window_tokens=1024)


def chunked(index: int) -> AttentionLayer:
    """The same in chunks of 8,192."""
    return replace(full(index), kind=LayerKind.CHUNKED, chunk_tokens=8192)


def latent(index: int, indexer: int | None = None) -> LatentLayer:
    """A latent row of 576, of which DeepSeek-V3 has 61."""
    kind = LayerKind.MLA if indexer is None else LayerKind.MLA_DSA
    return LatentLayer(index=index, kind=kind, latent_size=576, indexer_row_bytes=indexer)


def state(index: int, elements: int) -> StateLayer:
    """A recurrent state of so many elements, 2 bytes each in bf16."""
    shape = StateShape(
        conv_channels=0,
        conv_steps=0,
        drafts_lengthen_conv=False,
        recurrent_heads=1,
        recurrent_head_elements=elements,
    )
    return StateLayer(index=index, kind=LayerKind.MAMBA2, state=shape)


def model(*layers: Layer, heads: int = 32) -> Architecture:
    """A model of these layers."""
    return Architecture(
        model_type="by_hand", depth=max(len(layers), 1), attention_heads=heads, layers=layers, dtype="bfloat16"
    )


DENSE = model(full(0), full(1))
HYBRID = model(full(0, kv_heads=1), state(1, 30_000))


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
    ("setting", "named", "least", "most"),
    [
        ("tensor_parallel", "tensor_parallel", 1, 4096),
        ("pipeline_parallel", "pipeline_parallel", 1, 4096),
        ("max_num_batched_tokens", "max_num_batched_tokens", 1, MOST_TOKENS),
        ("block_size_tokens", "block_size", 1, 1 << 20),
        ("kernel_block_tokens", "kernel_block_tokens", 1, 1 << 20),
        ("max_in_flight_tokens", "max_in_flight_tokens", 1, MOST_TOKENS),
        ("speculative_tokens", "num_speculative_tokens", 0, 1024),
    ],
)
def test_settings_have_bounds(setting: str, named: str, least: int, most: int) -> None:
    """Each end is a setting, what lies beyond it is refused, and the message says between what it must lie."""
    assert [least, most] == [getattr(Deployment(**{setting: value}), setting) for value in (least, most)]  # type: ignore[arg-type]
    for value in (least - 1, most + 1):
        with pytest.raises(
            KvModelError, match=f"{named} is {value}; it must lie between {least} and {most}$"
        ) as caught:
            Deployment(**{setting: value})  # type: ignore[arg-type]
        assert named == caught.value.field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel": 4, "decode_context_parallel": 4}, None),
        ({"tensor_parallel": 4, "decode_context_parallel": 3}, "decode_context_parallel"),
        ({"tensor_parallel": 4, "decode_context_parallel": 8}, "decode_context_parallel"),
        ({"decode_context_parallel": 0}, "decode_context_parallel"),
        ({"pipeline_parallel": 2, "pipeline_partition": (3, 1)}, None),
        ({"pipeline_parallel": 2, "pipeline_partition": (4,)}, "pipeline_partition"),
        ({"pipeline_parallel": 2, "pipeline_partition": (2, 1, 1)}, "pipeline_partition"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], field: str | None) -> None:
    """Context parallel divides the tensor-parallel ranks; a partition has one entry for each stage."""
    if field is None:
        assert settings == {name: getattr(Deployment(**settings), name) for name in settings}
        return
    with pytest.raises(KvModelError) as caught:
        Deployment(**settings)

    assert field == caught.value.field


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
    # GIVEN
    deployment = Deployment(**settings)

    # THEN
    assert (steps, tokens) == (deployment.steps_in_flight, deployment.in_flight_tokens)


def test_what_is_planned_and_what_is_held_have_the_settings_terms() -> None:
    """The engine plans an encoder's tokens by a step's, a request holds those that it has."""
    # GIVEN
    deployment = Deployment(
        tensor_parallel=8, decode_context_parallel=2, max_num_batched_tokens=4096, state_cache_mode=StateCacheMode.ALL
    )

    # THEN
    assert deployment.request_terms(DENSE) == RequestTerms(
        max_in_flight_tokens=8192,
        max_encoder_tokens=4096,
        decode_context_parallel=2,
        state_cache_mode=StateCacheMode.ALL,
    )
    assert deployment.serving_terms(DENSE, encoder_tokens=1500) == ServingTerms(
        prefill_chunk_tokens=4096,
        steps_in_flight=1,
        encoder_tokens=1500,
        decode_context_parallel=2,
        state_cache_mode=StateCacheMode.ALL,
    )
    assert [4096, 0, 1500] == [replace(deployment, max_encoder_tokens=told).encoder_tokens for told in (None, 0, 1500)]


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


@pytest.mark.parametrize(
    ("partition", "expected"),
    [((1, 3), (1, 4)), ((0, 4), (0, 4)), ((2, 3), None), ((2, 1), None), ((5, -1), None)],
)
def test_a_partition_of_ones_own(partition: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """VLLM_PP_LAYER_PARTITION must add up to the layers, and no stage has less than none."""
    # GIVEN
    deployment = Deployment(pipeline_parallel=2, pipeline_partition=partition)

    # THEN
    if expected is not None:
        assert expected == stage_ends(4, deployment)
        return
    with pytest.raises(KvModelError, match="does not add up to num_hidden_layers 4") as caught:
        stage_ends(4, deployment)
    assert "pipeline_partition" == caught.value.field


def test_a_drafter_lies_on_the_last_stage() -> None:
    """Two layers over two stages, and a draft layer of the same page on the second: 1 and 2 pages of 64 KiB a block."""
    # GIVEN
    deployment = Deployment(pipeline_parallel=2, draft_layers=(full(0),), speculative_tokens=1)

    # THEN
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
    # GIVEN
    architecture = model(full(0), heads=48)

    # THEN
    if heads is not None:
        layout = deployed_layout(architecture, Deployment(tensor_parallel=ranks))
        assert (heads * 512 * 16,) == layout.bytes_per_block
        return
    with pytest.raises(KvModelError, match="neither divides the 8 KV heads") as caught:
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
    # GIVEN
    deployment = Deployment(tensor_parallel=ranks, decode_context_parallel=shared)

    # THEN
    if allowed:
        assert 1 == len(deployed_layout(model(layer, heads=heads), deployment).groups)
        return
    with pytest.raises(KvModelError) as caught:
        deployed_layout(model(layer, heads=heads), deployment)
    expected = "tensor_parallel" if isinstance(layer, StateLayer) else "decode_context_parallel"
    assert expected == caught.value.field


def test_the_layer_with_the_most_kv_heads_decides_what_is_shared() -> None:
    """Over 16 ranks 8 heads are there twice and 2 heads 8 times: two ranks can share, four cannot."""
    # GIVEN
    architecture = model(full(0, kv_heads=8), full(1, kv_heads=2))

    # THEN
    shared = [Deployment(tensor_parallel=16, decode_context_parallel=ranks) for ranks in (2, 4)]
    assert 1 == len(deployed_layout(architecture, shared[0]).groups)
    with pytest.raises(KvModelError, match="for 8 KV heads"):
        deployed_layout(architecture, shared[1])


def test_the_ranks_that_context_parallel_needs_are_told() -> None:
    """2 x 8 KV heads."""
    with pytest.raises(KvModelError, match="needs a tensor_parallel of at least 16 for 8 KV heads"):
        deployed_layout(DENSE, Deployment(tensor_parallel=8, decode_context_parallel=2))


@pytest.mark.parametrize(
    ("architecture", "platform", "block", "allowed"),
    [
        (DENSE, Platform.CUDA, None, True),
        (DENSE, Platform.CUDA, 16, True),
        (DENSE, Platform.CUDA, 48, True),
        (DENSE, Platform.CUDA, 24, False),
        (DENSE, Platform.CPU, 8, False),
        (model(latent(0)), Platform.CUDA, 16, True),
        (model(latent(0, indexer=132)), Platform.CUDA, 128, True),
        (model(latent(0, indexer=132)), Platform.CUDA, 48, False),
        (model(latent(0, indexer=132)), Platform.CPU, 48, True),
        (model(state(0, 100)), Platform.CUDA, 24, True),
        (HYBRID, Platform.CUDA, 24, False),
    ],
)
def test_block_sizes_that_kernels_take(
    architecture: Architecture, platform: Platform, block: int | None, allowed: bool
) -> None:
    """Multiples of 16 tokens, of 64 where an indexer reads them on a GPU, and any where nothing attends."""
    # GIVEN
    deployment = Deployment(block_size_tokens=block, platform=platform)

    # THEN
    if allowed:
        check_block_size(architecture, deployment)
        assert block is None or block <= (deployed_layout(architecture, deployment).groups[0].page.block_size_tokens)
        return
    unit = 64 if LayerKind.MLA_DSA in architecture.kinds else 16
    with pytest.raises(KvModelError, match=f"block_size is {block}; .* multiples of {unit}$") as caught:
        check_block_size(architecture, deployment)
    assert "block_size" == caught.value.field


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        (DENSE, {}, 16),
        (DENSE, {"platform": Platform.CPU}, 128),
        (model(latent(0)), {}, 64),
        (model(latent(0)), {"block_size_tokens": 32}, 32),
        (HYBRID, {}, 128),
        (HYBRID, {"kernel_block_tokens": 64}, 128),
        (HYBRID, {"block_size_tokens": 48}, 144),
        (HYBRID, {"block_size_tokens": 48, "kernel_block_tokens": 32}, 160),
        (HYBRID, {"block_size_tokens": 256}, 256),
        (model(full(0, 1), state(1, 32_768)), {}, 128),
        (model(full(0, 1), state(1, 32_769)), {}, 144),
        (model(full(0, 1), state(1, 10_000), state(2, 30_000)), {}, 128),
        (model(full(0, 1), state(1, 17_500)), {"platform": Platform.CPU}, 256),
        (model(latent(0), state(1, 100_000)), {}, 256),
        (model(state(0, 30_000)), {}, 16),
    ],
    ids=[
        "GPU",
        "CPU",
        "latent",
        "asked for",
        "60,000 bytes of state",
        "blocks of a kernel of 64",
        "three blocks of 48",
        "144 in blocks of a kernel of 32",
        "asked for more than it takes",
        "exactly 8 blocks of 8,192 bytes",
        "two bytes more",
        "the largest state counts",
        "70,000 bytes of float32 on a CPU",
        "latent rows beside states go by 128",
        "states alone",
    ],
)
def test_tokens_of_a_block(architecture: Architecture, settings: dict[str, Any], expected: int) -> None:
    """Beside states a block is as many kernel blocks as the largest state fills: 16 tokens of one head take 8,192
    bytes, 128 tokens 65,536, and 128 latent rows 147,456.
    """
    assert expected == deployed_layout(architecture, Deployment(**settings)).groups[0].page.block_size_tokens


@pytest.mark.parametrize(
    ("architecture", "settings", "told"),
    [
        pytest.param(model(latent(0)), {"platform": Platform.CPU}, True, id="latent attention on a CPU"),
        pytest.param(model(full(0)), {"platform": Platform.CPU}, False, id="other attention"),
        pytest.param(model(latent(0)), {"platform": Platform.CUDA}, False, id="a GPU"),
        pytest.param(model(latent(0)), {"platform": Platform.CPU, "block_size_tokens": 16}, False, id="a size given"),
    ],
)
def test_a_block_size_that_the_processor_decides_is_told(
    architecture: Architecture, settings: dict[str, Any], told: bool
) -> None:
    """Without AMX a CPU keeps latent attention in blocks of 16: a plan that cannot know says so, no other does."""
    # WHEN
    note = block_note(architecture, Deployment(**settings))

    # THEN
    assert told == ("--block-size 16" in note)
    assert told == bool(note)


def test_states_are_padded_to_the_attention_beside_them() -> None:
    """60,000 bytes of state in pages of 128 tokens x 512 bytes; the null figures of a block are those of a page."""
    # GIVEN
    layout = deployed_layout(HYBRID, Deployment())

    # THEN
    assert {65_536} == {page.page_bytes for group in layout.groups for page in group.pages}
    assert (65_536,) == layout.bytes_per_block


@pytest.mark.parametrize(
    ("settings", "recurrent_bytes"),
    [
        ({}, 2),
        ({"state_dtype": "float32"}, 4),
        ({"state_dtype": "float16", "platform": Platform.CPU}, 2),
        ({"platform": Platform.CPU}, 4),
    ],
)
def test_bytes_of_a_state(settings: dict[str, Any], recurrent_bytes: int) -> None:
    """--mamba-ssm-cache-dtype, else the model's dtype; a CPU keeps recurrent states in float32 unless told."""
    layout = deployed_layout(model(state(0, 1000)), Deployment(**settings))

    assert (1000 * recurrent_bytes,) == layout.bytes_per_block


@pytest.mark.parametrize(
    ("shape_dtype", "model_dtype", "expected"), [(None, None, 2), (None, "float32", 4), ("float16", "float32", 2)]
)
def test_a_states_own_dtype_comes_before_the_models(
    shape_dtype: str | None, model_dtype: str | None, expected: int
) -> None:
    """A layer kind that fixes its state's dtype keeps it, whatever mamba_ssm_dtype the config names."""
    # GIVEN
    layer = state(0, 1000)
    layer = replace(layer, state=replace(layer.state, recurrent_dtype=shape_dtype))

    # THEN
    layout = deployed_layout(replace(model(layer), state_dtype=model_dtype), Deployment())
    assert (1000 * expected,) == layout.bytes_per_block


def test_drafts_and_checkpoints_of_a_state_are_blocks_of_their_own() -> None:
    """3 drafts and a prefill checkpoint beside the running state and the aligned one: 2 + 3 + 1."""
    # GIVEN
    layer = state(0, 1000)
    architecture = model(replace(layer, state=replace(layer.state, prefill_checkpoints=1)))
    deployment = Deployment(speculative_tokens=3)

    # THEN
    layout = deployed_layout(architecture, deployment)
    assert 6 == layout.admission_blocks(1, deployment.request_terms(architecture))


@pytest.mark.parametrize(
    ("layers", "settings", "kept"),
    [
        ((full(0), sliding(1)), {}, True),
        ((full(0), sliding(1)), {"hybrid_manager": False}, False),
        ((full(0), chunked(1)), {}, True),
        ((full(0), chunked(1)), {"draft_layers": (full(0),)}, False),
        ((full(0), chunked(1)), {"draft_layers": (full(0),), "hybrid_manager": True}, True),
        ((full(0), sliding(1)), {"draft_layers": (full(0),)}, True),
    ],
)
def test_when_windows_and_chunks_give_blocks_back(
    layers: tuple[Layer, ...], settings: dict[str, Any], kept: bool
) -> None:
    """Unless told otherwise always, but for chunks with a drafter."""
    # WHEN
    pages = [page for group in deployed_layout(model(*layers), Deployment(**settings)).groups for page in group.pages]

    # THEN
    assert kept is any(page.kind in (PageKind.SLIDING, PageKind.CHUNKED) for page in pages)


@pytest.mark.parametrize(
    ("drafts", "tokens", "retained"), [(0, 3, 0), (1, 3, 0), (2, 1, 0), (2, 2, 1), (2, 3, 2), (3, 2, 1)]
)
def test_tokens_kept_below_a_window_for_several_draft_modules(drafts: int, tokens: int, retained: int) -> None:
    """num_speculative_tokens - 1 where more than one module drafts, and in windows alone."""
    # GIVEN
    architecture = model(full(0), sliding(1))
    deployment = Deployment(draft_layers=(sliding(1),) * drafts, speculative_tokens=tokens)

    # WHEN
    pages = [page for group in deployed_layout(architecture, deployment).groups for page in group.pages]

    # THEN
    assert {retained} == {page.retained_tokens for page in pages if page.kind is PageKind.SLIDING}
    assert {0} == {page.retained_tokens for page in pages if page.kind is PageKind.FULL}


def test_an_indexer_has_a_page_beside_each_latent_one() -> None:
    """DeepSeek-V3.2 in fp8_ds_mla: 61 x (656 + 132) = 48,068 bytes a token, 64 tokens a block."""
    # GIVEN
    architecture = parse_architecture(json.loads((DATA / "configs" / "DeepSeek-V3.2-Exp.json").read_text()))

    # WHEN
    layout = deployed_layout(architecture, Deployment(kv_dtype="fp8_ds_mla", tensor_parallel=8))

    # THEN
    assert ((48_068 * 64,), (48_068,)) == (layout.bytes_per_block, layout.bytes_per_token())


def test_a_request_without_images_or_sound_holds_nothing_of_an_encoder() -> None:
    """Tokens of an encoder are resident where they are named alone."""
    deployment = Deployment(max_encoder_tokens=4096)

    assert deployment.serving_terms(DENSE, encoder_tokens=0) == deployment.serving_terms(DENSE)
