"""Blocks as they are deployed: their tokens and bytes, states next to attention, and the blocks that windows free."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, check_kernels, deployed_layout, processor_note
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture, Layer
from kvdiag.kv.layout.pages import PageKind
from tests.unit.kv.by_hand import DENSE, HYBRID, chunked, full, latent, model, sliding, state
from tests.unit.kv.refused import refused
from tests.unit.kv.vectors import DATA


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
    deployment = Deployment(block_size_tokens=block, platform=platform)

    if allowed:
        check_kernels(architecture, deployment)
        assert block is None or block <= (deployed_layout(architecture, deployment).groups[0].page.block_size_tokens)
        return
    with refused("block_size"):
        check_kernels(architecture, deployment)


LATENT, INDEXED = model(latent(0)), model(latent(0, indexer=132))


@pytest.mark.parametrize(
    ("architecture", "kv_dtype", "capability", "taken"),
    [
        (DENSE, "fp8_e5m2", 80, True),
        (DENSE, "int8_per_token_head", 90, True),
        (DENSE, "int8", 90, False),
        (DENSE, "nvfp4", 90, True),
        (DENSE, "nvfp4", 75, False),
        (DENSE, "nvfp4_4over6", 90, False),
        (DENSE, "nvfp4_4over6", 100, True),
        (model(replace(full(0), head_size=64)), "nvfp4", 90, False),
        (model(replace(full(0), head_size=64)), "nvfp4", 100, True),
        (model(replace(full(0), head_size=96)), "nvfp4", 100, False),
        (replace(DENSE, model_type="diffusion_gemma_text"), "nvfp4", 90, False),
        (LATENT, "fp8", 80, True),
        (LATENT, "fp8_e5m2", 100, False),
        (LATENT, "fp8_e5m2", None, True),
        (LATENT, "int8_per_token_head", None, False),
        (LATENT, "fp8_ds_mla", 90, False),
        (replace(LATENT, dtype="float32"), "auto", 90, False),
        (INDEXED, "fp8", 90, True),
        (INDEXED, "nvfp4_ds_mla", 90, False),
        (INDEXED, "nvfp4_ds_mla", 100, True),
        (INDEXED, "auto", 120, True),
        (INDEXED, "bfloat16", 120, False),
    ],
)
def test_formats_that_kernels_take(
    architecture: Architecture, kv_dtype: str, capability: int | None, taken: bool
) -> None:
    """The formats that vLLM 0.32's backends list for a GPU's generation; of an unknown GPU, those of AMD's, too."""
    deployment = Deployment(kv_dtype=kv_dtype, compute_capability=capability)

    if taken:
        check_kernels(architecture, deployment)
        return
    with refused("kv_dtype"):
        check_kernels(architecture, deployment)


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        (DENSE, {}, 16),
        (DENSE, {"platform": Platform.CPU}, 128),
        (model(latent(0)), {}, 16),
        (model(latent(0)), {"kv_dtype": "fp8"}, 64),
        (model(latent(0)), {"compute_capability": 80, "kv_dtype": "fp8"}, 16),
        (model(latent(0)), {"compute_capability": 100}, 32),
        (model(latent(0)), {"compute_capability": 103, "kv_dtype": "fp8"}, 32),
        (model(latent(0)), {"compute_capability": 120, "kv_dtype": "fp8"}, 16),
        (model(latent(0)), {"block_size_tokens": 32}, 32),
        (HYBRID, {}, 128),
        (HYBRID, {"block_size_tokens": 48}, 144),
        (HYBRID, {"block_size_tokens": 256}, 256),
        (model(full(0, 1), state(1, 32_768)), {}, 128),
        (model(full(0, 1), state(1, 32_769)), {}, 144),
        (model(full(0, 1), state(1, 10_000), state(2, 30_000)), {}, 128),
        (model(full(0, 1), state(1, 17_500)), {"platform": Platform.CPU}, 256),
        (model(latent(0), state(1, 100_000)), {}, 256),
        (model(state(0, 30_000)), {}, 16),
    ],
)
def test_tokens_of_a_block(architecture: Architecture, settings: dict[str, Any], expected: int) -> None:
    """With states a block is as many kernel blocks as the largest state needs: 16 tokens of one head take 8,192
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
    note = processor_note(architecture, Deployment(**settings))

    assert told == ("--block-size 16" in note)
    assert told == bool(note)


@pytest.mark.parametrize(
    ("architecture", "settings", "told"),
    [
        pytest.param(HYBRID, {"platform": Platform.CPU}, True, id="states on a CPU"),
        pytest.param(HYBRID, {"platform": Platform.CPU, "state_dtype": "float32"}, False, id="a format given"),
        pytest.param(HYBRID, {"platform": Platform.CUDA}, False, id="a GPU"),
        pytest.param(replace(HYBRID, state_dtype="float32"), {"platform": Platform.CPU}, False, id="one format anyway"),
    ],
)
def test_a_state_format_that_the_processor_decides_is_told(
    architecture: Architecture, settings: dict[str, Any], told: bool
) -> None:
    """Without AVX-512 BF16 a CPU keeps states in the model's format: a plan that cannot know says so, no other does."""
    assert told == ("--mamba-ssm-cache-dtype bfloat16" in processor_note(architecture, Deployment(**settings)))


def test_states_are_padded_to_the_attention_beside_them() -> None:
    """60,000 bytes of state in pages of 128 tokens x 512 bytes; the null figures of a block are those of a page."""
    layout = deployed_layout(HYBRID, Deployment())

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
    """--mamba-ssm-cache-dtype, else the model's dtype; a CPU keeps recurrent states in float32 unless it is set."""
    layout = deployed_layout(model(state(0, 1000)), Deployment(**settings))

    assert (1000 * recurrent_bytes,) == layout.bytes_per_block


@pytest.mark.parametrize(
    ("shape_dtype", "model_dtype", "expected"), [(None, None, 2), (None, "float32", 4), ("float16", "float32", 2)]
)
def test_a_states_own_dtype_comes_before_the_models(
    shape_dtype: str | None, model_dtype: str | None, expected: int
) -> None:
    """A layer kind that fixes its state's dtype keeps it, with any mamba_ssm_dtype in the config."""
    layer = state(0, 1000)
    layer = replace(layer, state=replace(layer.state, recurrent_dtype=shape_dtype))

    layout = deployed_layout(replace(model(layer), state_dtype=model_dtype), Deployment())
    assert (1000 * expected,) == layout.bytes_per_block


def test_drafts_and_checkpoints_of_a_state_are_blocks_of_their_own() -> None:
    """3 drafts and a prefill checkpoint added to the running state and the aligned one: 2 + 3 + 1."""
    layer = state(0, 1000)
    architecture = model(replace(layer, state=replace(layer.state, prefill_checkpoints=1)))
    deployment = Deployment(speculative_tokens=3)

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
    """On by default, except for chunks with a drafter."""
    pages = [page for group in deployed_layout(model(*layers), Deployment(**settings)).groups for page in group.pages]

    assert kept is any(page.kind in (PageKind.SLIDING, PageKind.CHUNKED) for page in pages)


@pytest.mark.parametrize(
    ("drafts", "tokens", "retained"), [(0, 3, 0), (1, 3, 0), (2, 1, 0), (2, 2, 1), (2, 3, 2), (3, 2, 1)]
)
def test_tokens_kept_below_a_window_for_several_draft_modules(drafts: int, tokens: int, retained: int) -> None:
    """num_speculative_tokens - 1 where more than one module drafts, and in windows alone."""
    architecture = model(full(0), sliding(1))
    deployment = Deployment(draft_layers=(sliding(1),) * drafts, speculative_tokens=tokens)

    pages = [page for group in deployed_layout(architecture, deployment).groups for page in group.pages]

    assert {retained} == {page.retained_tokens for page in pages if page.kind is PageKind.SLIDING}
    assert {0} == {page.retained_tokens for page in pages if page.kind is PageKind.FULL}


def test_an_indexer_has_a_page_beside_each_latent_one() -> None:
    """DeepSeek-V3.2 in fp8_ds_mla: 61 x (656 + 132) = 48,068 bytes a token, 64 tokens a block."""
    architecture = parse_architecture(json.loads((DATA / "configs" / "DeepSeek-V3.2-Exp.json").read_text()))

    layout = deployed_layout(architecture, Deployment(kv_dtype="fp8_ds_mla", tensor_parallel=8))

    assert ((48_068 * 64,), (48_068,)) == (layout.bytes_per_block, layout.bytes_per_token())


@pytest.mark.parametrize("name", ["fp8", "int8_per_token_head", "fp8_per_token_head", "nvfp4"])
def test_a_cpu_keeps_one_plain_byte(name: str) -> None:
    """Its kernels pack neither scales nor halves: 128 elements of K and of V."""
    layout = deployed_layout(DENSE, Deployment(kv_dtype=name, platform=Platform.CPU))

    assert 256 == layout.groups[0].page.row_bytes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_dtype": "fp8"}, {656, 132}),
        ({"kv_dtype": "fp8_e4m3"}, {576, 132}),
        ({"compute_capability": 90}, {1_152, 132}),
        ({"compute_capability": 100, "kv_dtype": "fp8"}, {576, 132}),
        ({"compute_capability": 120}, {656, 132}),
    ],
)
def test_rows_of_sparse_latent_attention(settings: dict[str, Any], expected: set[int]) -> None:
    """Hopper and desktop Blackwell pack 8-bit rows with scales, but Hopper not fp8_e4m3; data-centre Blackwell does
    not.
    """
    layout = deployed_layout(model(replace(latent(0), indexer_row_bytes=132)), Deployment(**settings))

    assert expected == {page.row_bytes for group in layout.groups for page in group.pages}


def test_ampere_has_no_kernels_for_sparse_latent_attention() -> None:
    """VLLM finds no backend there."""
    with refused("compute_capability"):
        deployed_layout(model(replace(latent(0), indexer_row_bytes=132)), Deployment(compute_capability=80))


def test_a_checkpoints_fp8_has_plain_rows_on_hopper() -> None:
    """Where the flag is auto vLLM names it fp8_e4m3, which FlashMLA does not list."""
    architecture = replace(model(replace(latent(0), indexer_row_bytes=132)), declared_kv_dtype="fp8")
    layout = deployed_layout(architecture, Deployment())

    assert {576, 132} == {page.row_bytes for group in layout.groups for page in group.pages}
