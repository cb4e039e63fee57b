"""KV-cache number formats: bytes of one head of one token."""

from collections.abc import Callable
from typing import Any

import pytest

from kvdiag.kv.layout.dtypes import KV_DTYPE_NAMES, model_dtype_bytes, resolve_kv_dtype
from tests.unit.kv.refused import refused

LATENT = 576


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", 1152),
        ("fp8", 576),
        ("fp8_ds_mla", 656),
        ("nvfp4_ds_mla", 352),
        ("int8_per_token_head", 584),
        ("int4_per_token_head", 296),
    ],
)
def test_bytes_of_one_latent_row(name: str, expected: Any) -> None:
    """An MLA row of 512 + 64 elements is stored once, without a factor of two."""
    assert expected == resolve_kv_dtype(name, model_dtype="bfloat16").latent_bytes(latent_size=LATENT)


def test_auto_is_what_the_checkpoint_declares() -> None:
    """A checkpoint that declares an fp8 cache gets one unless the user asks for another."""
    declared = resolve_kv_dtype("auto", model_dtype="bfloat16", declared="fp8")
    asked = resolve_kv_dtype("bfloat16", model_dtype="bfloat16", declared="fp8")

    assert ("fp8", "bfloat16") == (declared.name, asked.name)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fp8_ds_mla", lambda dtype: dtype.head_bytes(head_size=128, head_size_v=128)),
        ("fp8_ds_mla", lambda dtype: dtype.latent_bytes(latent_size=320)),
        ("nvfp4", lambda dtype: dtype.latent_bytes(latent_size=576)),
    ],
)
def test_formats_refuse_layers_they_do_not_exist_for(name: str, call: Callable[..., Any]) -> None:
    """A packed latent format refuses per-head layers and other row sizes, and nvfp4 refuses latent rows."""
    dtype = resolve_kv_dtype(name, model_dtype="bfloat16")

    with refused("kv_dtype"):
        call(dtype)


def test_unknown_format_names_the_known_ones() -> None:
    """An unknown name is an error that lists what is known."""
    with refused("kv_dtype"):
        resolve_kv_dtype("fp7", model_dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "keys_and_values", "expected"),
    [
        ("auto", (192, 128), 640),
        ("float32", (192, 128), 1280),
        ("fp8_inc", (192, 128), 320),
        ("int8_pth", (192, 128), 192 + 128 + 8),
        ("fp8_pth", (192, 128), 192 + 128 + 8),
        ("int4_pth", (192, 128), 96 + 64 + 8),
        ("int4_per_token_head", (65, 65), 32 + 32 + 8),
        ("nvfp4", (192, 128), 96 + 12 + 64 + 8),
        ("nvfp4_4over6", (128, 128), 144),
        ("nvfp4", (24, 24), 2 * (12 + 1)),
    ],
)
def test_keys_and_values_are_packed_each(name: str, keys_and_values: tuple[int, int], expected: int) -> None:
    """A scale for each of 16 elements of NVFP4, 4 bytes for K and for V of a token; half a byte is none."""
    dtype = resolve_kv_dtype(name, model_dtype="bfloat16")

    assert expected == dtype.head_bytes(head_size=keys_and_values[0], head_size_v=keys_and_values[1])


@pytest.mark.parametrize(
    ("given", "resolved", "bits"),
    [
        ("half", "float16", 16),
        ("fp16", "float16", 16),
        ("bf16", "bfloat16", 16),
        ("fp32", "float32", 32),
        ("float", "float32", 32),
        ("int4", "int4_per_token_head", 4),
        ("int8_pth", "int8_per_token_head", 8),
        ("fp8_pth", "fp8_per_token_head", 8),
        ("int4_pth", "int4_per_token_head", 4),
        ("nvfp4", "nvfp4", 4),
        ("nvfp4_4over6", "nvfp4_4over6", 4),
        ("fp8_ds_mla", "fp8_ds_mla", 8),
        ("nvfp4_ds_mla", "nvfp4_ds_mla", 4),
        ("fp8_inc", "fp8_inc", 8),
        ("int8", "int8", 8),
    ],
)
def test_short_names_and_widths(given: str, resolved: str, bits: int) -> None:
    """What people type, the engine's own name for it, and the bits of an element; auto by the model, and its names."""
    dtype = resolve_kv_dtype(given, model_dtype="bfloat16")

    assert (resolved, bits, resolved) == (
        dtype.name,
        dtype.element_bits,
        resolve_kv_dtype("auto", model_dtype=given).name,
    )
    assert {given, resolved} <= set(KV_DTYPE_NAMES)


@pytest.mark.parametrize(("name", "size"), [("float16", 2), ("half", 2), ("bfloat16", 2), ("float32", 4), ("float", 4)])
def test_bytes_of_a_models_elements(name: str, size: int) -> None:
    """By torch's names."""
    assert size == model_dtype_bytes(name)


def test_a_dtype_that_no_model_is_served_in() -> None:
    """The message lists those that are."""
    with refused("dtype"):
        model_dtype_bytes("int8")
