"""What vLLM makes of models with sparse attention and recurrent states: blocks and tokens of a pool.

Runs in vLLM's own Python: `ENV/bin/python sparse_hybrid_specs.py CASES.json` prints one JSON object a case. The layers
are vLLM's own classes with only the attributes that their `get_kv_cache_spec` uses; backends, block size, grouping and
capacity are vLLM's. Only whether a library is installed is taken as given.
"""

# ruff: noqa: E402 - stand-ins come before what imports them

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

# Compiled for GPUs alone, and asked for nothing here.
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules[name] = types.ModuleType(name)

import registry_layers  # type: ignore[import-not-found]  # stands in for torchvision, which images alone need
import torch
from bare_layers import case_settings, made, pool_figures, print_figures  # type: ignore[import-not-found]
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    _canonicalize_sparse_mla_kv_cache_dtype,
)
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import cuda, current_platform
from vllm.platforms.interface import DeviceCapability

assert registry_layers.Finder in {type(one) for one in sys.meta_path}

from vllm.models.glm5next.common import attention as glm_attention
from vllm.models.glm5next.common import kda as glm_kda
from vllm.models.glm5next.common.model import Glm5NextForCausalLM
from vllm.utils import flashinfer
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90

KERNELS = ("flashinfer", "flashinfer.decode", "flashinfer.mla", "flashinfer.utils")
FLASH_ATTENTION = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
for name in (*KERNELS, *FLASH_ATTENTION):
    # Not before the rest of vLLM is there, which asks whether it is installed.
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], "__getattr__", lambda name: None)  # noqa: B010
flashinfer_mla_sparse_sm90.has_flashinfer_sm90_nope_mla = lambda: True
flashinfer.has_flashinfer_sparse_mla_sm120 = lambda: True


def latent_backend(config: Any, capability: DeviceCapability) -> Any:
    """The first backend of the ranking for sparse latent attention that takes the model on such a GPU."""
    text, form = config.model_config.hf_text_config, config.cache_config.cache_dtype
    size = text.kv_lora_rank + text.qk_rope_head_dim
    ranking = cuda._get_backend_priorities(  # noqa: SLF001 - there is no public way
        use_mla=True, device_capability=capability, num_heads=64, kv_cache_dtype=form, head_size=size
    )
    for one in ranking:
        if not one.name.endswith(("_SPARSE", "_SM90", "_SM120")):
            continue
        backend = one.get_class()
        takes = (
            backend.supports_compute_capability(capability)
            and backend.supports_kv_cache_dtype(form)
            and backend.supports_head_size(size)
        )
        if takes and not backend.supports_combination(
            size, torch.bfloat16, form, None, True, False, True, False, capability
        ):
            return backend
    raise LookupError(form)


def glm5_next(config: Any, capability: DeviceCapability, case: dict[str, Any]) -> None:
    """GLM-5-Next: Kimi delta attention, and latent attention with pooled index keys and a ring."""
    text, cache = config.model_config.hf_text_config, config.cache_config
    backend = latent_backend(config, capability)
    cache.cache_dtype = _canonicalize_sparse_mla_kv_cache_dtype(backend, cache.cache_dtype)
    glm_kda.current_platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: capability)
    prefill = glm_kda._resolve_kda_prefill_backend(  # noqa: SLF001 - there is no public way
        "auto", text.linear_head_dim, torch.bfloat16, text.linear_lower_bound
    )
    layers = config.compilation_config.static_forward_context
    for number in range(text.num_hidden_layers + case["draft_layers"]):
        if number < text.num_hidden_layers and text.layer_types[number] == "linear_attention":
            layers[f"{number}"] = made(
                glm_kda.Glm5NextLinearAttention,
                num_heads=text.linear_num_heads,
                head_dim=text.linear_head_dim,
                conv_size=text.linear_conv_kernel_dim,
                tp_size=config.parallel_config.tensor_parallel_size,
                num_spec=config.num_speculative_tokens,
                model_config=config.model_config,
                cache_config=cache,
                kda_prefill_backend=prefill,
            )
            continue
        size, pool = text.index_head_dim, text.index_kpool
        glm_attention.Glm5NextIndexerCache(
            head_dim=size + size // 128 * 4,
            dtype=torch.uint8,
            prefix=f"{number}.keys",
            cache_config=cache,
            index_kpool=pool,
        )
        glm_attention.Glm5NextTailCache(
            head_dim=size, dtype=torch.bfloat16, prefix=f"{number}.tail", cache_config=cache, index_kpool=pool
        )
        layers[f"{number}"] = made(
            MLAAttention,
            attn_backend=backend,
            kv_cache_dtype=cache.cache_dtype,
            head_size=text.kv_lora_rank + text.qk_rope_head_dim,
            sliding_window=None,
            indexer=None,
            non_causal_multi_token_decode=False,
        )


MODELS = {"glm5_next_text": (glm5_next, Glm5NextForCausalLM)}


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    major = case["capability"] // 10
    type(current_platform).is_device_capability_family = classmethod(lambda _cls, family, _=0: family // 10 == major)
    text = SimpleNamespace(**case["config"])
    build, model = MODELS[text.model_type]
    ModelRegistry.resolve_model_cls = lambda *_, **__: (model, "")
    config = case_settings(case)
    config.parallel_config.prefill_context_parallel_size = 1
    for name, value in {
        "mamba_cache_mode": case["state_mode"],
        "mamba_block_size": case["context"],
        "mamba_page_size_padded": None,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "use_replayssm": False,
    }.items():
        setattr(config.cache_config, name, value)
    latent = getattr(text, "kv_lora_rank", None)
    for name, value in {
        "hf_text_config": text,
        "dtype": torch.bfloat16,
        "is_hybrid": True,
        "use_mla": latent is not None,
        "architecture": text.architectures[0],
        "get_num_kv_heads": lambda _: 1 if latent else max(1, text.num_key_value_heads // case["ranks"]),
        "get_head_size": lambda: text.head_dim if latent is None else latent + text.qk_rope_head_dim,
    }.items():
        setattr(config.model_config, name, value)
    with set_current_vllm_config(config):
        build(config, DeviceCapability(major, 0), case)
        made_figures: dict[str, Any] = pool_figures(config, case["pool_bytes"])
    return made_figures


if __name__ == "__main__":
    print_figures(figures)
