"""vLLM's layers without their kernels, and the engine's settings as specs of caches and their grouping need them.

Imported by programs of this folder that run in vLLM's own Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms.interface import Platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec


def settings(*, block: int, cache_dtype: str, context: int, drafts: int = 0, in_flight: int = 2_048) -> Any:
    """The engine's settings; `drafts` and `in_flight` are tokens."""
    cache = SimpleNamespace(
        block_size=block,
        cache_dtype=cache_dtype,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
    )
    return SimpleNamespace(
        cache_config=cache,
        attention_config=SimpleNamespace(indexer_sparse_logits=False, hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=context, original_max_model_len=context),
        speculative_config=None,
        num_speculative_tokens=drafts,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=in_flight,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def case_settings(case: dict[str, Any]) -> Any:
    """The settings of a case with its ranks, its own draft layers and perhaps a block size given by hand."""
    found = settings(
        block=case["block_size"] or 16,
        cache_dtype=case["kv_dtype"],
        context=case["context"],
        drafts=case["drafts"],
        in_flight=case["in_flight"],
    )
    found.parallel_config.tensor_parallel_size = case["ranks"]
    found.cache_config.user_specified_block_size = case["block_size"] is not None
    found.cache_config.kv_cache_dtype_skip_layers = None
    if case["drafts"]:
        found.speculative_config = own_drafts(case["drafts"])
    return found


def own_drafts(tokens: int) -> Any:
    """The settings of a model's own draft layers. Dropping a block of theirs is about prefix caching, not sizes."""
    return SimpleNamespace(
        num_speculative_tokens=tokens, method="mtp", use_eagle=lambda: False, use_eagle_block_drop=lambda: False
    )


def pool_figures(config: Any, pool_bytes: int) -> dict[str, Any]:
    """Blocks and capacity of a pool of the layers that the settings have, as the worker asks them for their specs.

    The block size is first adapted to their backends (platforms/interface.py, worker/gpu/attn_utils.py).
    """
    specs = layer_specs(config)
    return {"block_size": config.cache_config.block_size, **grouped_figures(config, specs, pool_bytes)}


def layer_specs(config: Any) -> dict[str, Any]:
    """The specs of the layers that the settings have, after the block size is adapted to their backends."""
    Platform.update_block_size_for_backend(config)
    specs = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        specs[name] = spec
    return specs


def grouped_figures(config: Any, specs: dict[str, Any], pool_bytes: int) -> dict[str, Any]:
    """Blocks and capacity of a pool of these specs, as the engine groups them."""
    (made_config,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [pool_bytes])
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, made_config)
    return {
        "num_blocks": made_config.num_blocks,
        "groups": sorted(len(group.layer_names) for group in made_config.kv_cache_groups),
        "capacity_tokens": tokens,
        "max_concurrency": concurrency,
    }


def made(kind: Any, **attributes: Any) -> Any:
    """A layer of vLLM's class without its kernels."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def print_figures(figures: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Print the figures of each case in the file that is named, one JSON object a line."""
    for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.stdout.write(json.dumps(figures(case)) + "\n")
        sys.stdout.flush()
