"""What vLLM's own DeepSeek-V4 cache layers and its grouping make of a config: blocks and bytes of a pool.

Runs in vLLM's own Python: `ENV/bin/python compressed_specs.py CASES.json` prints one JSON object a case. The layers are
vLLM's own classes with only the attributes that their `get_kv_cache_spec` uses; the kernels need a GPU, the specs do
not.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from bare_layers import grouped_figures, made, print_figures, settings  # type: ignore[import-not-found]
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache


def layers(case: dict[str, Any], config: Any) -> dict[str, Any]:
    """Every cache layer of the model, in the order in which vLLM registers them."""
    text, found = case["config"], {}
    version = "deepseek_v41" if text["model_type"] == "deepseek_v41" else "deepseek_v4"
    attention = importlib.import_module(f"vllm.models.{version}.attention")
    states = importlib.import_module(f"vllm.models.{version}.compressor").CompressorStateCache
    shared = version == "deepseek_v41"
    head, index = text["head_dim"], text["index_head_dim"]
    index_row = index + index // 128 * 4
    common = {"cache_config": config.cache_config, "kv_cache": torch.tensor([])}
    packed = {"kv_cache_dtype": "fp8_ds_mla", "head_dim": head, "kv_page_alignment": 576}
    for number in range(text["num_hidden_layers"] + case["draft_layers"]):
        backbone = number < text["num_hidden_layers"]
        ratio = text["compress_ratios"][number] if backbone else 0
        source = backbone and (number in text["kv_source_layer_ids"] if shared else ratio > 1)
        indexed = source and (number in text["index_source_layer_ids"] if shared else ratio == 4)
        if indexed:
            found[f"{number}.indexer"] = made(
                attention.DeepseekV4IndexerCache,
                head_dim=index_row,
                dtype=torch.uint8,
                compress_ratio=ratio,
                sparse_logits=False,
                rocm_mxfp4=False,
                **common,
            )
            if not shared:
                found[f"{number}.indexer.state"] = states(
                    2 * 2 * index, torch.float32, ratio, f"{number}.indexer.state"
                )
        found[f"{number}.swa"] = made(
            DeepseekV4SWACache,
            head_dim=head,
            window_size=text["sliding_window"],
            dtype=torch.uint8,
            block_size=32 if shared else 64,
            packed_bytes_per_token=584,
            packed_page_alignment=576,
            bounded_replay=False,
            **common,
        )
        if not source:
            continue
        own = SimpleNamespace(**packed, compress_ratio=ratio, is_kv_source=True, compressed_bytes_per_token=584)
        found[f"{number}"] = _Bound(attention, own)
        if shared and ratio > 1:
            found[f"{number}.state"] = states(2 * head, torch.float32, f"{number}.state")
        elif not shared:
            found[f"{number}.state"] = states(2 * (1 + (ratio == 4)) * head, torch.float32, ratio, f"{number}.state")
    return found


class _Bound:
    """The spec of vLLM's attention layer, asked of an object with the attributes it uses."""

    def __init__(self, attention: Any, own: Any) -> None:
        self._ask = attention.DeepseekV4Attention.get_kv_cache_spec
        self._own = own

    def get_kv_cache_spec(self, config: Any) -> Any:
        """The layer's spec."""
        return self._ask(self._own, config)


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    config = settings(
        block=case["block_size"],
        cache_dtype="fp8_ds_mla",
        context=case["context"],
        drafts=case["drafts"],
        in_flight=case["in_flight"],
    )
    with set_current_vllm_config(config):
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers(case, config).items()}
    made_figures: dict[str, Any] = grouped_figures(config, specs, case["pool_bytes"])
    return made_figures


if __name__ == "__main__":
    print_figures(figures)
