"""The attention backend, block size and cache format that vLLM chooses for latent attention on each GPU generation.

Runs in vLLM's own Python: `ENV/bin/python latent_blocks.py` prints one JSON object a case. The ranking of backends and
what each supports are vLLM's; only whether a library is installed is taken as given.
"""

# ruff: noqa: E402 - stand-ins come before what imports them

from __future__ import annotations

import json
import math
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch

# Compiled for GPUs alone, and asked for nothing here.
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules[name] = types.ModuleType(name)

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms import cuda
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import fa_utils

fa_utils.__getattr__ = lambda name: None  # its kernels

from vllm.v1.attention.backends.mla import flashattn_mla
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

DEFAULT_BLOCK_TOKENS = 16
LATENT_SIZE = 576
flashattn_mla.flash_attn_supports_mla = lambda: True
for name in ("flashinfer", "flashinfer.decode", "flashinfer.mla", "flashinfer.utils"):
    # Not before the rest of vLLM is there, which asks whether it is installed.
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], "__getattr__", lambda name: None)  # noqa: B010


def chosen(capability: DeviceCapability, kv_dtype: str, *, indexed: bool) -> Any:
    """The first backend of the ranking that takes the model on such a GPU."""
    ranking = cuda._get_backend_priorities(  # noqa: SLF001 - there is no public way
        use_mla=True, device_capability=capability, num_heads=128, kv_cache_dtype=kv_dtype, head_size=LATENT_SIZE
    )
    for one in ranking:
        try:
            backend = one.get_class()
        except (ImportError, AssertionError):
            continue  # CUTLASS takes GPU memory where it is imported; FlashInfer is ranked before it
        takes = (
            backend.is_sparse() == indexed
            and backend.supports_compute_capability(capability)
            and backend.supports_kv_cache_dtype(kv_dtype)
            and backend.supports_head_size(LATENT_SIZE)
        )
        if takes:
            return backend
    return None


def block_tokens(backend: Any, *, indexed: bool) -> int:
    """The block of platforms/interface.py::_preferred_block_size_for_backends."""
    if not indexed:
        found: int = backend.get_preferred_block_size(DEFAULT_BLOCK_TOKENS)
        return found
    sizes = [
        min(size.base if isinstance(size, MultipleOf) else size for size in one.get_supported_kernel_block_sizes())
        for one in (backend, DeepseekV32IndexerBackend)
    ]
    return math.lcm(*sizes)


def main() -> None:
    """Print a line for each generation, format and kind of latent attention."""
    text = SimpleNamespace(qk_nope_head_dim=128, index_topk=2048)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16))
    with set_current_vllm_config(config):
        for major in (8, 9, 10, 12):
            for kv_dtype in ("auto", "fp8", "fp8_e4m3"):
                for indexed in (False, True):
                    backend = chosen(DeviceCapability(major, 0), kv_dtype, indexed=indexed)
                    told: dict[str, Any] = {"capability": 10 * major, "kv_dtype": kv_dtype, "indexed": indexed}
                    if backend is not None:
                        told["block"] = block_tokens(backend, indexed=indexed)
                        told["format"] = (
                            mla_attention._canonicalize_sparse_mla_kv_cache_dtype(backend, kv_dtype)  # noqa: SLF001
                            if indexed
                            else kv_dtype
                        )
                        told["backend"] = backend.get_name()
                    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
