"""Block size and cache format of latent attention by GPU generation, against vLLM 0.32's own ranking of backends."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.dtypes import resolve_kv_dtype
from tests.integration.vllm.conftest import VllmHome

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("latent_blocks.py")
LIMIT_SECONDS = 300.0
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "hidden_size": 7_168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
INDEXED = {**LATENT, "model_type": "deepseek_v32", "index_topk": 2_048, "index_head_dim": 128}


def modelled(case: dict[str, Any]) -> tuple[int, int] | None:
    """The block size and the bytes of a latent row; None where no kernel takes the model."""
    architecture = parse_architecture(INDEXED if case["indexed"] else LATENT)
    deployment = Deployment(kv_dtype=case["kv_dtype"], compute_capability=case["capability"])
    try:
        layout = deployed_layout(architecture, deployment)
    except KvModelError:
        return None
    pages = [page for group in layout.groups for page in group.pages if page.variant != "indexer"]
    return layout.block_size_tokens or 0, pages[0].row_bytes


def test_block_and_format_are_those_of_the_chosen_backend(vllm: VllmHome) -> None:
    """From Ampere to desktop Blackwell, in 16 and 8 bits by both names, dense and sparse."""
    cases = vllm.answers(PROGRAM, limit_seconds=LIMIT_SECONDS)
    expected = {}
    for case in cases:
        name = f"{case['capability']} {case['kv_dtype']} {case['indexed']}"
        row = resolve_kv_dtype(case["format"], model_dtype="bfloat16") if "format" in case else None
        expected[name] = None if row is None else (case["block"], row.latent_bytes(latent_size=576))

    assert 24 == len(cases)
    assert expected == {f"{case['capability']} {case['kv_dtype']} {case['indexed']}": modelled(case) for case in cases}
