"""Which profile is near enough: by the GPU's total, what a newer one replaces, and what makes another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.profiles import MOST_PROFILES, find_profile, model_key, with_profile
from kvdiag.kv.families.architecture import parse_architecture
from tests.unit.kv.calibration.profiled import LLAMA, MODEL, PROFILE, QUERY


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"gpu_total_bytes": 1_050_000}, True),
        ({"gpu_total_bytes": 1_050_001}, False),
        ({"gpu_total_bytes": 950_000}, True),
        ({"gpu_total_bytes": 949_999}, False),
        ({"gpu_name": None}, True),
        ({"max_num_batched_tokens": None}, True),
    ],
)
def test_a_gpu_of_about_the_same_total_will_do(change: dict[str, Any], found: bool) -> None:
    """To 5 % of the plan's; a profile without a batch size or a GPU's name fits any."""
    assert found is (
        find_profile([replace(PROFILE, **change)], replace(QUERY, max_num_batched_tokens=8192)) is not None
    )


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({}, True),
        ({"date": "2026-03-01", "context_bytes": 11, "gpu_total_bytes": 990_000}, True),
        ({"gpu_name": "h200"}, False),
        ({"gpu_name": None}, False),
        ({"model": replace(MODEL, digest="another")}, False),
        ({"model": replace(MODEL, name="another")}, True),
        ({"tensor_parallel": 1}, False),
        ({"pipeline_parallel": 2}, False),
        ({"max_num_batched_tokens": 4096}, False),
    ],
)
def test_what_a_newer_profile_replaces(change: dict[str, Any], replaced: bool) -> None:
    """One of the same GPU, model, ranks and batch; GPUs without a name are told apart by their totals."""
    new = replace(PROFILE, **change)

    assert ((new,) if replaced else (PROFILE, new)) == with_profile([PROFILE], new)
    nameless = replace(PROFILE, gpu_name=None)
    assert 2 == len(with_profile([nameless], replace(nameless, gpu_total_bytes=999_999)))


def test_the_oldest_profile_goes_first() -> None:
    """Of 4,096 by date, wherever it stands."""
    many = [
        replace(PROFILE, pipeline_parallel=number, date=f"{9999 - number:04}") for number in range(1, MOST_PROFILES + 1)
    ]

    kept = with_profile(many, replace(PROFILE, tensor_parallel=4))

    # THEN the profile with the highest number has the oldest date
    assert (MOST_PROFILES, {MOST_PROFILES}) == (
        len(kept),
        {each.pipeline_parallel for each in many} - {each.pipeline_parallel for each in kept[:-1]},
    )


def digest(config: dict[str, Any]) -> str:
    """The digest of a config."""
    return model_key(config, parse_architecture(config), name="x").digest


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 31},
        {"num_attention_heads": 64, "head_dim": 128},
        {"num_key_value_heads": 4},
        {"hidden_size": 8192},
        {"moe_intermediate_size": 1024},
        {"quantization_config": {"quant_method": "awq"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_what_decides_weights_and_activation_makes_another_model(change: dict[str, Any]) -> None:
    """Depth, heads, widths, and how it is quantized."""
    assert digest(LLAMA) != digest(LLAMA | change)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (
            {"model_type": "bloom", "n_layer": 24, "n_head": 16, "n_embed": 1024, "vocab_size": 250880},
            {"n_embed": 1536},
        ),
        (
            {"model_type": "moondream3", "config": {"text": {"dim": 2048, "n_layers": 24, "n_heads": 32}}},
            {"config": {"text": {"dim": 1024, "n_layers": 24, "n_heads": 32}}},
        ),
    ],
    ids=["BLOOM 560M and 1B1", "Moondream"],
)
def test_a_width_makes_another_model_whatever_its_field_is_called(
    config: dict[str, Any], width: dict[str, Any]
) -> None:
    """Two sizes of a family may be as deep as each other, with as many heads."""
    assert digest(config) != digest(config | width)


@pytest.mark.parametrize(
    "change", [{"quantization_config": {"bits": 4}}, {"quantization_config": {}}, {"rope_theta": 1e6}]
)
def test_what_does_not_decide_leaves_the_model_the_same(change: dict[str, Any]) -> None:
    """A quantization that names no method is none."""
    assert digest(LLAMA) == digest(LLAMA | change)


def test_a_key_is_short() -> None:
    """16 hex digits, and a name of 512 characters at most."""
    key = model_key(LLAMA, parse_architecture(LLAMA), name="n" * 600)

    assert (16, 512) == (len(key.digest), len(key.name))
    assert int(key.digest, 16) >= 0
