"""Settings and what follows from them: bounds, what contradicts itself, tokens in flight, the terms of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.layout.deployment import Deployment, Platform, default_batched_tokens
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.layout.pages import RequestTerms, StateCacheMode
from kvdiag.kv.layout.residency import ServingTerms
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
