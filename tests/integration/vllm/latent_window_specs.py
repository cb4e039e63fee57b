"""What vLLM's own Dots3-note cache layers and its grouping make of a config: blocks and tokens of a pool.

Runs in vLLM's own Python: `ENV/bin/python latent_window_specs.py CASES.json` prints one JSON object a case. The layers
are vLLM's own classes with only the attributes that their `get_kv_cache_spec` uses, adapted by their own backends.
"""

# ruff: noqa: E402 - stand-ins come before what imports them

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import registry_layers  # type: ignore[import-not-found]  # stands in for torchvision, which images alone need
import torch
from bare_layers import grouped_figures, made, print_figures, settings  # type: ignore[import-not-found]

assert registry_layers.Finder in {type(one) for one in sys.meta_path}

# Compiled for GPUs alone, and asked for nothing here.
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules[name] = types.ModuleType(name)
for name in ("vllm.third_party.deep_gemm", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], "__getattr__", lambda name: lambda *_: None)  # noqa: B010

from vllm.v1.attention.backends import fa_utils

fa_utils.__getattr__ = lambda name: lambda *_: None

from vllm.config import set_current_vllm_config
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.dots3_note.nvidia.attention import Dots3NotePaddedSparseBackend, Dots3NoteTritonMLABackend
from vllm.models.dots3_note.nvidia.model import Dots3NotePaddedMLAAttention
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec


class Named(SimpleNamespace):
    """A config as the engine's override of drafters' configs changes it."""

    def update(self, values: dict[str, Any]) -> None:
        """Set fields."""
        vars(self).update(values)


def layer_types(case: dict[str, Any]) -> list[str]:
    """The layers' types, with those of the drafter where there are drafts."""
    text = case["config"]
    config = Named(**text)
    if case["draft_layers"]:
        SpeculativeConfig.hf_config_override(config)
    types_of_layers: list[str] = config.layer_types
    return types_of_layers[: text["num_hidden_layers"] + case["draft_layers"]]


def specs(case: dict[str, Any], config: Any) -> dict[str, Any]:
    """The spec of every cache layer of one rank."""
    text, found = case["config"], {}
    size = text["swa_kv_lora_rank"] + text["swa_qk_rope_head_dim"]
    common = {"kv_cache_dtype": "auto", "non_causal_multi_token_decode": False}
    for number, name in enumerate(layer_types(case)):
        if name == "sliding_attention":
            layer = made(
                MLAAttention, head_size=size, sliding_window=text["sliding_window_size"], indexer=None, **common
            )
            layer.attn_backend = Dots3NoteTritonMLABackend
        else:
            layer = made(
                Dots3NotePaddedMLAAttention,
                head_size=text["kv_lora_rank"] + text["qk_rope_head_dim"],
                physical_head_size=size,
                sliding_window=None,
                indexer=object(),
                **common,
            )
            layer.attn_backend = Dots3NotePaddedSparseBackend
            head = text["index_head_dim"]
            rows = DeepseekV32IndexerCache(head + head // 128 * 4, torch.uint8, f"{number}.keys", config.cache_config)
            found[f"{number}.keys"] = customize_attention_spec(rows.get_attn_backend(), rows.get_kv_cache_spec(config))
        found[f"{number}"] = customize_attention_spec(layer.attn_backend, layer.get_kv_cache_spec(config))
    return found


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    config = settings(
        block=case["block_size"], cache_dtype="auto", context=case["context"], in_flight=case["in_flight"]
    )
    (layout,) = Dots3NotePaddedSparseBackend.supported_kv_cache_layouts()
    config.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout(layout)
    config.model_config.dtype = torch.bfloat16
    # config/vllm.py: several MTP modules read the tokens below a window again.
    config.num_prefill_lookahead_tokens = case["drafts"] if case["draft_layers"] > 1 else 0
    with set_current_vllm_config(config):
        made_figures: dict[str, Any] = grouped_figures(config, specs(case, config), case["pool_bytes"])
    return made_figures


if __name__ == "__main__":
    print_figures(figures)
