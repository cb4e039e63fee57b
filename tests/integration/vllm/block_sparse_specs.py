"""What vLLM's own MiniMax-M3 cache layers and its grouping make of a config: blocks and tokens of a pool.

Runs in vLLM's own Python: `ENV/bin/python block_sparse_specs.py CASES.json` prints one JSON object a case. The layers
are vLLM's own classes with only the attributes that their `get_kv_cache_spec` uses, at the block size that their
backends support.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import registry_layers  # type: ignore[import-not-found]  # stands in for torchvision, which images alone need
import torch
from bare_layers import grouped_figures, made, print_figures, settings  # type: ignore[import-not-found]
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

assert registry_layers.Finder in {type(one) for one in sys.meta_path}

from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache  # noqa: E402
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseBackend  # noqa: E402
from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention, _sparse_attention_layer_ids  # noqa: E402


def specs(case: dict[str, Any], config: Any) -> dict[str, Any]:
    """The spec of every cache layer of one rank."""
    text = case["config"]
    heads = max(1, text["num_key_value_heads"] // case["ranks"])
    dtype, form = (torch.uint8, "fp8") if case["kv_dtype"] == "fp8" else (torch.bfloat16, "auto")
    sparse = _sparse_attention_layer_ids(SimpleNamespace(**text))
    found = {}
    for number in range(text["num_hidden_layers"]):
        if number not in sparse:
            found[f"{number}"] = FullAttentionSpec(
                block_size=config.cache_config.block_size, num_kv_heads=heads, head_size=text["head_dim"], dtype=dtype
            )
            continue
        attention = made(
            MiniMaxM3SparseAttention,
            num_kv_heads=heads,
            head_dim=text["head_dim"],
            kv_cache_torch_dtype=dtype,
            kv_cache_dtype=form,
        )
        keys = MiniMaxM3IndexerCache(text["sparse_attention_config"]["sparse_index_dim"], f"{number}.keys")
        found[f"{number}"] = attention.get_kv_cache_spec(config)
        found[f"{number}.keys"] = keys.get_kv_cache_spec(config)
    return found


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    (block,) = MiniMaxM3SparseBackend.get_supported_kernel_block_sizes()
    config = settings(block=block, cache_dtype="auto", context=case["context"])
    with set_current_vllm_config(config):
        made_figures: dict[str, Any] = grouped_figures(config, specs(case, config), case["pool_bytes"])
    return made_figures


if __name__ == "__main__":
    print_figures(figures)
