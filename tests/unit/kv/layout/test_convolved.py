"""Settings that vLLM does not serve Inkling, Qwen4-Exp and Voxtral Realtime with, and Inkling's draft modules."""

import json
from typing import Any

import pytest

from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.commands.fitting.vllm_settings import drafts_of
from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, check_kernels, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture, AttentionLayer
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.vectors import DATA

INKLING, QWEN, VOXTRAL = ("Inkling", "Qwen3.8-Flash-Next", "Voxtral-Mini-4B-Realtime")


def config_of(name: str) -> dict[str, Any]:
    """A published config."""
    found: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def architecture_of(name: str) -> Architecture:
    """A published model."""
    return parse_architecture(config_of(name))


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        (INKLING, {"kv_dtype": "fp8"}, "kv_dtype"),
        (INKLING, {"tensor_parallel": 16}, "tensor_parallel"),
        (INKLING, {"platform": Platform.CPU}, "platform"),
        (QWEN, {"kv_dtype": "fp8_e5m2"}, "kv_dtype"),
        (QWEN, {"pipeline_parallel": 2}, "pipeline_parallel"),
        (QWEN, {"speculative_tokens": 5}, "block_size"),
        (QWEN, {"hybrid_manager": False}, "hybrid_kv_cache_manager"),
        (VOXTRAL, {"pipeline_parallel": 2}, "pipeline_parallel"),
    ],
)
def test_what_is_not_served_is_refused(name: str, given: dict[str, Any], field: str) -> None:
    """By the setting that decides."""
    architecture, deployment = architecture_of(name), Deployment(**given)

    def served() -> None:
        check_kernels(architecture, deployment)
        deployed_layout(architecture, deployment)

    with pytest.raises(KvModelError) as caught:
        served()

    assert field == caught.value.field


@pytest.mark.parametrize("name", [INKLING, QWEN, VOXTRAL])
def test_weights_have_to_be_passed(name: str) -> None:
    """Streams, n-gram tables and the encoder are not counted."""
    with pytest.raises(KvModelError, match="--weights"):
        count_parameters(config_of(name), architecture_of(name))


def test_an_inkling_in_float16_is_refused() -> None:
    """Its convolutions' inputs are kept in bfloat16 alone."""
    with pytest.raises(KvModelError, match="bfloat16"):
        deployed_layout(parse_architecture(config_of(INKLING) | {"dtype": "float16"}), Deployment())


def test_inkling_builds_no_more_modules_than_drafts() -> None:
    """Of the checkpoint's eight; each is attention and the convolutions' inputs."""
    drafts = drafts_of(architecture_of(INKLING), FitOptions(num_speculative_tokens=3))

    assert 6 == len(drafts.layers)


def test_positions_of_several_axes_are_next_to_the_keys_of_the_ring() -> None:
    """Three 64-bit positions after a key of 128 elements; a model of text alone has the key."""
    text = config_of(QWEN)["text_config"] | {"architectures": ["Qwen4ExpForCausalLM"]}
    rings = [
        {layer.pool_row_bytes for layer in architecture.layers if isinstance(layer, AttentionLayer)}
        for architecture in (architecture_of(QWEN), parse_architecture(text))
    ]

    assert [{280}, {256}] == rings
