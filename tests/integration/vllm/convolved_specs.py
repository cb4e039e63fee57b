"""What vLLM makes of models whose layers keep more than K and V per token: blocks and tokens of a pool.

Runs in vLLM's own Python: `ENV/bin/python convolved_specs.py CASES.json` prints one JSON object a case. The layers are
vLLM's own classes, made by their constructors where these need no kernels, and else with only the attributes that their
`get_kv_cache_spec` uses. Backends, the cache's layout, block size, grouping and capacity are vLLM's.
"""

# ruff: noqa: E402 - stand-ins come before what imports them

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# Compiled for GPUs alone, and asked for nothing here.
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules[name] = types.ModuleType(name)

import registry_layers  # type: ignore[import-not-found]  # stands in for torchvision, which images alone need
import torch
from bare_layers import (  # type: ignore[import-not-found]
    case_settings,
    grouped_figures,
    layer_specs,
    made,
    print_figures,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.models import ModelRegistry

assert registry_layers.Finder in {type(one) for one in sys.meta_path}

for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
    # Not before the rest of vLLM is there, which asks whether it is installed.
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], "__getattr__", lambda name: lambda *_: None)  # noqa: B010

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models import whisper_causal
from vllm.models.inkling.nvidia import sconv_swa_attn
from vllm.models.inkling.nvidia.attention import InklingAttention
from vllm.models.qwen4_exp.common import qsa_cache
from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpForCausalLM
from vllm.models.qwen4_exp.nvidia.ple_layer import Qwen4ExpPLELayer
from vllm.models.qwen4_exp.nvidia.qsa import Qwen4ExpQSAAttention, Qwen4ExpQSAFlashAttentionBackend
from vllm.transformers_utils.configs.mistral import adapt_config_dict
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout


def inkling(config: Any, case: dict[str, Any]) -> None:
    """Inkling: attention of two sizes, and the window of the convolutions' inputs of every layer."""
    text, mtp = SimpleNamespace(**case["config"]["text_config"]), case["config"].get("mtp_config", {})
    ranks = case["ranks"]
    local = [number in text.local_layer_ids for number in range(text.num_hidden_layers)]
    local += [number in mtp["local_layer_ids"] for number in range(case["draft_layers"])]
    for number, is_local in enumerate(local):
        heads = text.swa_num_key_value_heads if is_local else text.num_key_value_heads
        size = text.swa_head_dim if is_local else text.head_dim
        with patch.object(sconv_swa_attn, "get_tensor_model_parallel_world_size", lambda: ranks):
            sconv_swa_attn.InklingConvState(
                num_kv_heads=heads,
                head_dim=size,
                hidden_size=text.hidden_size,
                kernel_size=text.sconv_kernel_size,
                prefix=f"{number}.conv_state",
            )
        config.compilation_config.static_forward_context[f"{number}.attn"] = made(
            InklingAttention,
            is_local=is_local,
            local_extent=text.sliding_window_size if is_local else None,
            num_kv_heads=max(1, heads // ranks),
            head_dim=size,
            kv_cache_torch_dtype=torch.bfloat16,
        )


def qwen4_exp(config: Any, case: dict[str, Any]) -> None:
    """Qwen4-Exp: gated delta net, the n-gram layers' convolution, and attention with pooled index keys and a ring."""
    text, cache = config.model_config.hf_text_config, config.cache_config
    layers, ranks = config.compilation_config.static_forward_context, case["ranks"]
    common = {"model_config": config.model_config, "cache_config": cache}
    for number in range(text.num_hidden_layers + case["draft_layers"]):
        backbone = number < text.num_hidden_layers
        if backbone and number + 1 in text.ple_layer_ids:
            layers[f"{number}.ple"] = made(
                Qwen4ExpPLELayer,
                hc_hidden_size=text.hidden_size * text.hc_count,
                conv_state_len=(text.ple_conv_kernel_size - 1) * text.ngram_size,
                num_spec_tokens=case["drafts"],
                **common,
            )
        if backbone and text.layer_types[number] == "linear_attention":
            layers[f"{number}.linear"] = made(
                QwenGatedDeltaNetAttention,
                tp_size=ranks,
                num_k_heads=text.linear_num_key_heads,
                num_v_heads=text.linear_num_value_heads,
                head_k_dim=text.linear_key_head_dim,
                head_v_dim=text.linear_value_head_dim,
                conv_kernel_size=text.linear_conv_kernel_dim,
                num_spec=case["drafts"],
                **common,
            )
            continue
        caches = {"vllm_config": config, "cache_config": cache, "compress_ratio": text.indexer_compress_ratio}
        caches |= {"head_size": text.indexer_head_dim, "dtype": torch.bfloat16}
        qsa_cache.QSAKeyStateCache(cache_rope_positions=case["axes"], prefix=f"{number}.raw", **caches)
        qsa_cache.QSACompressedKeyCache(prefix=f"{number}.keys", **caches)
        layers[f"{number}.attn"] = made(
            Qwen4ExpQSAAttention,
            attn_backend=Qwen4ExpQSAFlashAttentionBackend,
            num_kv_heads=max(1, text.num_key_value_heads // ranks),
            head_dim=text.head_dim,
            kv_cache_dtype=cache.cache_dtype,
            kv_cache_torch_dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, config.model_config),
        )


def voxtral_realtime(config: Any, case: dict[str, Any]) -> None:
    """Voxtral Realtime by its params.json: Ministral, and an encoder with several positions for each token."""
    made_config = adapt_config_dict(case["config"], {})
    text, audio = made_config.text_config, made_config.audio_config
    assert ["VoxtralRealtimeGeneration"] == made_config.architectures
    pool = audio.block_pool_size
    backend = whisper_causal.create_whisper_attention_backend_with_block_pooling(
        FlashAttentionBackend, pool, audio.sliding_window
    )
    dtype = {"kv_cache_dtype": "auto", "kv_cache_torch_dtype": torch.bfloat16, "attn_type": "decoder"}
    layers = config.compilation_config.static_forward_context
    for number in range(audio.encoder_layers):
        size = audio.encoder_head_dim
        layers[f"encoder.{number}"] = made(
            whisper_causal.WhisperCausalAttentionWithBlockPooling,
            attn_backend=backend,
            block_pool_size=pool,
            sliding_window=audio.sliding_window,
            num_kv_heads=audio.encoder_attention_heads // case["ranks"],
            head_size=size,
            head_size_v=size,
            **dtype,
        )
    for number in range(text.num_hidden_layers):
        layers[f"{number}"] = made(
            Attention,
            attn_backend=FlashAttentionBackend,
            sliding_window=text.sliding_window,
            num_kv_heads=max(1, text.num_key_value_heads // case["ranks"]),
            head_size=text.head_dim,
            head_size_v=text.head_dim,
            **dtype,
        )


MODELS = {"inkling": inkling, "qwen4_exp": qwen4_exp, "voxtral_realtime": voxtral_realtime}


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    config = case_settings(case)
    text = SimpleNamespace(**case["config"].get("text_config", case["config"]))
    config.num_prefill_lookahead_tokens = case["drafts"] if case["draft_layers"] > 1 else 0
    config.kv_transfer_config = None
    for name, value in {
        "skip_page_size_padded": None,
        "kv_cache_layout": None,
        "mamba_cache_mode": "align",
        "mamba_block_size": case["context"],
        "mamba_page_size_padded": None,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": getattr(text, "mamba_ssm_dtype", "auto"),
        "use_replayssm": False,
    }.items():
        setattr(config.cache_config, name, value)
    for name, value in {
        "hf_text_config": text,
        "dtype": torch.bfloat16,
        "is_hybrid": case["model"] == "qwen4_exp",
        "use_mla": False,
        "architecture": None,
        "get_num_kv_heads": lambda _: max(1, text.num_key_value_heads // case["ranks"]),
        "get_head_size": lambda: text.head_dim,
    }.items():
        setattr(config.model_config, name, value)
    ModelRegistry.resolve_model_cls = lambda *_, **__: (Qwen4ExpForCausalLM, "")
    with set_current_vllm_config(config):
        MODELS[case["model"]](config, case)
        specs = layer_specs(config)
        backends = {layer.get_attn_backend() for layer in config.compilation_config.static_forward_context.values()}
        supported = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        layout = resolve_kv_cache_layout(config, [supported], specs.values())
        config.cache_config.get_resolved_kv_cache_layout = lambda: layout
        made_figures: dict[str, Any] = grouped_figures(config, specs, case["pool_bytes"])
    return {"block_size": config.cache_config.block_size, **made_figures}


if __name__ == "__main__":
    print_figures(figures)
