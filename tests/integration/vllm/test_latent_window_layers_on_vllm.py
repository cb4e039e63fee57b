"""Dots3-note's windows of latent rows with sparse attention, against vLLM's own cache layers and grouping."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment
from tests.integration.vllm.spec_cases import own_figures

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("latent_window_specs.py")
# Rows of 1,088 and 576 elements, which the kernels are for; vLLM's source has no number of layers.
CONFIG = {
    "model_type": "dots3_note",
    "architectures": ["Dots3NoteForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "swa_kv_lora_rank": 1024,
    "swa_qk_rope_head_dim": 64,
    "sliding_window_size": 512,
    "index_topk": 2048,
    "index_head_dim": 128,
    "max_position_embeddings": 262_144,
    "num_nextn_predict_layers": 1,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
}
UNEVEN = CONFIG | {
    "num_hidden_layers": 29,
    "sliding_window_size": 4096,
    "layer_types": ["full_attention", *(["sliding_attention"] * 5 + ["full_attention"]) * 4, *["full_attention"] * 4],
}
SPARSE_DRAFTER = CONFIG | {"num_nextn_predict_layers": 2, "mtp_layer_types": ["full_attention", "sliding_attention"]}


def case(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A case with the usual settings where none is given."""
    usual = {"context": 131_072, "in_flight": 16_384, "pool_bytes": 40 << 30, "block_size": 64, "ranks": 1}
    return {"config": config, "drafts": 0, "draft_layers": 0, **usual, **settings}


CASES = {
    "plain": case(CONFIG),
    "two ranks": case(CONFIG, ranks=2),
    "blocks of two kernel blocks": case(CONFIG, block_size=128),
    "short": case(CONFIG, context=3_000, in_flight=4_096),
    "one drafter": case(CONFIG, drafts=1, draft_layers=1),
    "two drafters": case(SPARSE_DRAFTER, drafts=3, draft_layers=2),
    "uneven": case(UNEVEN, in_flight=2_048),
    "uneven, large blocks": case(UNEVEN, block_size=256, pool_bytes=(17 << 30) + 12_345),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_groups_and_capacity_are_the_engines_own(name: str, engine_figures: dict[str, dict[str, Any]]) -> None:
    """Rows padded to one size, index rows next to them, in blocks that are whole rows apart."""
    given = CASES[name]
    architecture = parse_architecture(given["config"])
    deployment = Deployment(
        tensor_parallel=given["ranks"],
        block_size_tokens=None if given["block_size"] == CASES["plain"]["block_size"] else given["block_size"],
        max_in_flight_tokens=given["in_flight"],
        speculative_tokens=given["drafts"],
        draft_layers=architecture.draft_layers[: given["draft_layers"]],
    )
    assert engine_figures[name] == own_figures(given, architecture, deployment)
