"""What vLLM itself makes of a model's config: its pool's figures, and the blocks that requests really hold.

Runs in vLLM's own Python: `ENV/bin/python capacities.py CONFIG.json …` prints one JSON object a config. The engine is
vLLM's own, with its scheduler and its block pool; only the weights are made up.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

MAX_MODEL_LEN_TOKENS = 20_000
# From within the first block to a prompt of several chunks; each crosses the end of a block of 128 while it decodes.
PROMPTS_TOKENS = (120, 2_040, 5_110)
GENERATED_TOKENS = 20


def told(config: Path) -> dict[str, Any]:
    """An engine's figures for a config, and its blocks after each step of one request at a time."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")
        engine = LLM(
            folder,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN_TOKENS,
            load_format="dummy",
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
        )
    core = engine.llm_engine.engine_core.engine_core
    settings = core.vllm_config
    cache = settings.cache_config
    return {
        "pool_bytes": cache.kv_cache_memory_bytes,
        "max_num_batched_tokens": settings.scheduler_config.max_num_batched_tokens,
        "num_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "state_dtype": cache.mamba_ssm_cache_dtype,
        "has_amx": torch.cpu._is_amx_tile_supported(),  # noqa: SLF001 - vLLM's own question
        "capacity_tokens": cache.kv_cache_size_tokens,
        "max_concurrency": cache.kv_cache_max_concurrency,
        "steps": {prompt: held(engine.llm_engine, core, prompt) for prompt in PROMPTS_TOKENS},
    }


def held(engine: Any, core: Any, prompt_tokens: int) -> list[tuple[int, int]]:
    """After each step of one request: tokens with a slot in the cache, and blocks that it holds."""
    pool = core.scheduler.kv_cache_manager.block_pool
    sampling = SamplingParams(max_tokens=GENERATED_TOKENS, ignore_eos=True, temperature=0, detokenize=False)
    # Prompts share no prefix: a cached block would be referenced instead of allocated.
    tokens = [300 + (prompt_tokens + index * index) % 500 for index in range(prompt_tokens)]
    engine.add_request(str(prompt_tokens), {"prompt_token_ids": tokens}, sampling)
    steps: list[tuple[int, int]] = []
    while engine.has_unfinished_requests():
        engine.step()
        # One block is the null block; a cached block that no request references counts as free.
        blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        steps += [(request.num_computed_tokens, blocks) for request in core.scheduler.requests.values()]
    return steps


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(json.dumps(told(Path(name))) + "\n")
        sys.stdout.flush()
        gc.collect()
