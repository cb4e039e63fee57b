"""MiniMax-M3's attention that selects blocks, against vLLM's own cache layers for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment
from tests.integration.vllm.conftest import VllmHome
from tests.integration.vllm.spec_cases import own_figures

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("block_sparse_specs.py")
LIMIT_SECONDS = 300.0
CONTEXT_TOKENS, POOL_BYTES = 100_000, 40 << 30
CONFIG = {
    "model_type": "minimax_m3_text",
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "num_hidden_layers": 60,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_index_dim": 128},
}
ALL_SPARSE = CONFIG | {"sparse_attention_config": {"sparse_attention_freq": [1] * 60, "sparse_index_dim": 64}}
CASES: list[dict[str, Any]] = [
    {"config": config, "ranks": ranks, "kv_dtype": kv_dtype, "context": CONTEXT_TOKENS, "pool_bytes": POOL_BYTES}
    for config in (CONFIG, ALL_SPARSE)
    for ranks in (1, 4, 8)
    for kv_dtype in ("auto", "fp8")
]
WRAPPER = "MiniMaxM3SparseForConditionalGeneration"


def modelled(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's figures as kvdiag computes them, for the config as the model's and as a part of another's."""
    architecture = parse_architecture(
        {
            "model_type": "minimax_m3",
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "text_config": case["config"],
        }
    )
    deployment = Deployment(tensor_parallel=case["ranks"], kv_dtype=case["kv_dtype"])
    assert architecture == parse_architecture(case["config"])
    return own_figures(case, architecture, deployment)


def test_blocks_and_tokens_are_vllms(vllm: VllmHome, tmp_path: Path) -> None:
    """Of all layers' pages and of index keys, on every number of ranks and in both formats."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(CASES), encoding="utf-8")

    assert vllm.answers(PROGRAM, file, limit_seconds=LIMIT_SECONDS) == [modelled(case) for case in CASES]
