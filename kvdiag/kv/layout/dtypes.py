"""KV-cache number formats: what one head of one token takes in bytes.

The names are the ones of vLLM's `--kv-cache-dtype` (config/cache.py::CacheDType) and the short forms users write.
Packing is decided by the attention backend: v1/attention/backends/triton_attn.py::customize_spec (per token and head),
flashinfer.py::customize_spec (NVFP4), mla_attention.py::MLAAttention.get_kv_cache_spec (ds_mla).
"""

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvdiag.errors import KvModelError

# One fp32 scale for K and one for V with each head's data (triton_attn.py::customize_spec).
_INLINE_SCALES_BYTES = 8
# Opaque rows: 512 fp8 + 16 scales + 128 bf16 rope; nvfp4 form (mla_attention.py::MLAAttention.get_kv_cache_spec).
_DS_MLA_ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_DS_MLA_LATENT_SIZE = 576
# Without RoPE that part of a row is left empty (mla/flashmla_sparse.py::FlashMLASparseBackend.supports_combination).
_DS_MLA_PLAIN_SIZE, _DS_MLA_PLAIN_FORMAT = 512, "fp8_ds_mla"

MODEL_DTYPE_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}


class KvPacking(StrEnum):
    """How the bytes of one head of one token are put together."""

    PLAIN = "plain"
    PER_TOKEN_HEAD = "per_token_head"  # noqa: S105 - a token of text
    NVFP4 = "nvfp4"
    DS_MLA = "ds_mla"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDtype:
    """One KV-cache number format, resolved (never `auto`)."""

    name: str
    packing: KvPacking
    element_bits: int

    def head_bytes(self, *, head_size: int, head_size_v: int) -> int:
        """Bytes that K and V of one head of one token take (AttentionSpec.state_content_size_bytes)."""
        match self.packing:
            case KvPacking.PLAIN:
                return (head_size + head_size_v) * self.element_bits // 8
            case KvPacking.PER_TOKEN_HEAD:
                return sum(size * self.element_bits // 8 for size in (head_size, head_size_v)) + _INLINE_SCALES_BYTES
            case KvPacking.NVFP4:
                # utils/torch_utils.py::nvfp4_kv_cache_full_dim: packed halves and one fp8 scale per 16 elements.
                return sum(size // 2 + size // 16 for size in (head_size, head_size_v))
            case KvPacking.DS_MLA:
                raise KvModelError(f"kv_dtype {self.name} is for MLA models only: pass --kv-dtype fp8", "kv_dtype")

    def latent_bytes(self, *, latent_size: int) -> int:
        """Bytes of one token's latent row in an MLA layer (MLAAttentionSpec, MLACommonBackend.customize_spec)."""
        match self.packing:
            case KvPacking.PLAIN | KvPacking.PER_TOKEN_HEAD:
                return self.head_bytes(head_size=latent_size, head_size_v=0)
            case KvPacking.DS_MLA:
                plain = (latent_size, self.name) == (_DS_MLA_PLAIN_SIZE, _DS_MLA_PLAIN_FORMAT)
                if latent_size != _DS_MLA_LATENT_SIZE and not plain:
                    raise KvModelError(
                        f"kv_dtype {self.name} needs kv_lora_rank + qk_rope_head_dim of 512 + 64, not {latent_size}",
                        "kv_dtype",
                    )
                return _DS_MLA_ROW_BYTES[self.name]
            case KvPacking.NVFP4:
                raise KvModelError(
                    "kv_dtype nvfp4 does not support MLA: pass --kv-dtype nvfp4_ds_mla or fp8", "kv_dtype"
                )


_TABLE: Mapping[str, Mapping[str, Any]] = json.loads(pkgutil.get_data(__package__, "kv_dtypes.json") or b"")
_DTYPES: Mapping[str, KvDtype] = {
    name: KvDtype(name=name, packing=KvPacking(packing), element_bits=bits)
    for name, (packing, bits) in _TABLE["formats"].items()
}
_ALIASES: Mapping[str, str] = _TABLE["aliases"]
KV_DTYPE_NAMES: tuple[str, ...] = ("auto", *_DTYPES, *_ALIASES)


def resolve_kv_dtype(name: str, *, model_dtype: str, declared: str | None = None) -> KvDtype:
    """The format that `--kv-cache-dtype NAME` gives.

    `auto` is what the checkpoint declares, else the model's own dtype
    (utils/torch_utils.py::resolve_kv_cache_dtype_string, kv_cache_dtype_str_to_dtype).
    """
    chosen = (declared or model_dtype) if name == "auto" else name
    chosen = _ALIASES.get(chosen, chosen)
    if chosen not in _DTYPES:
        raise KvModelError(f"unknown kv_dtype {name!r}: pass one of {', '.join(KV_DTYPE_NAMES)}", "kv_dtype")
    return _DTYPES[chosen]


def model_dtype_bytes(name: str) -> int:
    """Bytes of one element of a model dtype; vLLM runs a float32 checkpoint in 16 bits."""
    if name not in MODEL_DTYPE_BYTES:
        raise KvModelError(f"unknown dtype {name!r}: pass one of {', '.join(MODEL_DTYPE_BYTES)}", "dtype")
    return MODEL_DTYPE_BYTES[name]
