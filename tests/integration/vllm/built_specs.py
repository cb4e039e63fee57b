"""What vLLM's own models and its grouping make of a config: blocks and tokens of a pool.

Runs in vLLM's own Python: `ENV/bin/python built_specs.py CASES.json` prints one JSON object a case. Models are built
on the meta device, as registry_layers does; of several ranks, one rank's heads.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import registry_layers  # type: ignore[import-not-found]
from bare_layers import grouped_figures, print_figures, settings  # type: ignore[import-not-found]
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models import openpangu, registry
from vllm.triton_utils import triton
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_layout import KVCacheLayout

registry._LazyRegisteredModel.inspect_model_cls = (  # noqa: SLF001 - there is no public way
    lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())  # noqa: SLF001
)
if not hasattr(triton, "set_allocator"):
    triton.set_allocator = lambda *_: None
# As on Hopper.
flash_attn.flash_attn_supports_kv_cache_dtype = lambda *_, **__: True
# Computes with weights, which are not loaded; and the runner that a GPU has.
openpangu.OpenPanguSinkAttention.post_weight_load = lambda self: None
VllmConfig._get_v1_model_runner_unsupported_features = lambda self: []  # noqa: SLF001


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    config = settings(
        block=case["block_size"], cache_dtype="auto", context=case["context"], in_flight=case["in_flight"]
    )
    # The first that FlashAttention takes (v1/attention/backends/utils.py::resolve_kv_cache_layout).
    config.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout.LBHNC
    module = importlib.import_module(f"vllm.model_executor.models.{case['module']}")
    with patch.object(module, "get_tensor_model_parallel_world_size", lambda: case["ranks"]):
        built = registry_layers.specs(case["config"], block_size=case["block_size"], kv_cache_dtype=case["kv_dtype"])
    specs = {f"{number}": spec for number, spec in enumerate(built)}
    with set_current_vllm_config(config):
        made_figures: dict[str, Any] = grouped_figures(config, specs, case["pool_bytes"])
    return made_figures


if __name__ == "__main__":
    print_figures(figures)
