"""What vLLM's own layers, grouping and capacity make of a config and of flags, as on a GPU.

Runs in vLLM's own Python: `ENV/bin/python flag_capacities.py CASES.json` prints one JSON object a case. Models are
built on the meta device by vLLM's classes; the block size is aligned by the steps that GPUs have
(platforms/interface.py), with Triton's kernel sizes. A case's `environment` is set while it is built.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import replace, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.interface import Platform
from vllm.triton_utils import triton
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_layout import KVCacheLayout


def settings_of(case: dict[str, Any], folder: str) -> Any:
    """The engine's settings, with a GPU's block size of 16."""
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_num_batched_tokens=case["batched_tokens"],
        max_model_len=case["context"],
        **case["arguments"],
    )
    settings = arguments.create_engine_config()
    # What platforms/cpu.py changes and a GPU does not.
    settings.cache_config.block_size = case["arguments"].get("block_size", 16)
    settings.cache_config.kv_cache_layout = KVCacheLayout.LBNHC.name
    settings.scheduler_config.async_scheduling = case["arguments"].get("async_scheduling", True)
    if "mamba_ssm_cache_dtype" not in case["arguments"]:
        settings.cache_config.mamba_ssm_cache_dtype = "auto"
    return settings


def build(settings: Any) -> None:
    """Build the model, and the drafter where there is one with layers."""
    backends(initialize_model(settings))
    speculative = settings.speculative_config
    if speculative is not None and speculative.method in ("eagle", "eagle3"):
        backends(initialize_model(settings, model_config=speculative.draft_model_config))
    elif speculative is not None and speculative.method == "draft_model":
        # v1/spec_decode/draft_model.py::DraftModelProposer._create_draft_vllm_config
        block = settings.cache_config.block_size
        alone = replace(settings, model_config=speculative.draft_model_config, quant_config=None)
        settings.cache_config.block_size = block  # which platforms/cpu.py sets again
        with set_current_vllm_config(alone):
            backends(initialize_model(alone, prefix="draft_model"))


def backends(model: Any) -> None:
    """Give every attention layer the backend of a GPU."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.attn_backend = TritonAttentionBackend


def told(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures for a case."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, case.get("environment", {})):
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
        settings = settings_of(case, folder)
        with set_current_vllm_config(settings):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
            destroy_model_parallel()  # a model without experts has no group for them
            ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(settings.model_config.dtype), torch.device("meta"):
                build(settings)
            if settings.model_config.is_hybrid:
                Platform._align_hybrid_block_size(settings, TritonAttentionBackend)  # noqa: SLF001 - vLLM's own step
            if settings.cache_config.kv_cache_dtype_skip_layers:
                Platform._align_heterogeneous_kv_block_size(settings, TritonAttentionBackend)  # noqa: SLF001
            layers = settings.compilation_config.static_forward_context
            specs = {
                name: TritonAttentionBackend.customize_spec(spec) if isinstance(layer, Attention) else spec
                for name, layer in layers.items()
                if isinstance(layer, AttentionLayerBase)
                and not (isinstance(layer, Attention) and layer.kv_sharing_target_layer_name)
                and (spec := layer.get_kv_cache_spec(settings)) is not None
            }
            # As many ranks share a context as the case says; the specs do not depend on it.
            settings.parallel_config.decode_context_parallel_size = case.get("context_ranks", 1)
            made = kv_cache_utils.get_kv_cache_configs(settings, [specs], [case["pool_bytes"]])
            tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(settings, made[0])
    return {"num_blocks": made[0].num_blocks, "capacity_tokens": tokens, "max_concurrency": concurrency}


if __name__ == "__main__":
    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda *_: None
    for one in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.stdout.write(json.dumps(told(one)) + "\n")
        sys.stdout.flush()
