"""The pool of DeepSeek-V4 and V4.1 against vLLM 0.32's own cache layers, grouping and capacity."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment
from tests.integration.vllm.spec_cases import own_figures

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("compressed_specs.py")
FIELDS = {
    "num_attention_heads": 64,
    "hidden_size": 4096,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 1_048_576,
}
FLASH = {
    **FIELDS,
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4],
    "num_nextn_predict_layers": 1,
}
DEEPER = {
    **FIELDS,
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4],
}
UNINDEXED = {**FIELDS, "model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": [0, 128, 128, 0]}
SHARED = {
    **FIELDS,
    "model_type": "deepseek_v41",
    "num_hidden_layers": 40,
    "compress_ratios": [0, 0, *([1] * 18), *([2] * 20)],
    "kv_source_layer_ids": [2, 8, 14, 20, 26, 32],
    "index_source_layer_ids": [2, 8, 14, 20, 23, 26, 32],
}


def case(config: dict[str, Any], **settings: int) -> dict[str, Any]:
    """A case with the usual settings where none is given."""
    usual = {"context": 131_072, "in_flight": 16_384, "pool_bytes": 80 << 30, "block_size": 256}
    return {"config": config, "drafts": 0, "draft_layers": 0, **usual, **settings}


CASES = {
    "flash": case(FLASH),
    "flash, short": case(FLASH, context=30_000, in_flight=4_096),
    "flash, long steps": case(FLASH, in_flight=131_072),
    "flash, mtp": case(FLASH, drafts=1, draft_layers=1),
    "deeper": case(DEEPER),
    "no indexer": case(UNINDEXED),
    "shared caches": case(SHARED),
    "shared caches, drafts": case(SHARED, drafts=7),
    "shared caches, small blocks": case(SHARED, block_size=128),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_groups_and_capacity_are_the_engines_own(name: str, engine_figures: dict[str, dict[str, Any]]) -> None:
    """Of the same layers and bytes the model makes the engine's groups, blocks, tokens and concurrency."""
    given = CASES[name]
    architecture = parse_architecture(given["config"])
    deployment = Deployment(
        kv_dtype="fp8",
        block_size_tokens=given["block_size"],
        max_in_flight_tokens=given["in_flight"],
        speculative_tokens=given["drafts"],
        draft_layers=architecture.draft_layers[: given["draft_layers"]],
    )
    assert engine_figures[name] == own_figures(given, architecture, deployment)
