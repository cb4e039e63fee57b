"""Settings and what follows from them: bounds, what contradicts itself, tokens in flight, the terms of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.deployment import Deployment, Platform, default_batched_tokens
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import RequestTerms, StateCacheMode
from kvdiag.kv.layout.residency import ServingTerms
from kvdiag.kv.model_error import KvModelError
from tests.unit.kv.by_hand import DENSE, HYBRID

MOST_TOKENS = 1 << 30


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


def test_a_request_without_images_or_sound_holds_nothing_of_an_encoder() -> None:
    """Tokens of an encoder are resident where they are named alone."""
    deployment = Deployment(max_encoder_tokens=4096)

    assert deployment.serving_terms(DENSE, encoder_tokens=0) == deployment.serving_terms(DENSE)
