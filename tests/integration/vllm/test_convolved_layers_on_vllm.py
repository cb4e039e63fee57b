"""Pools of Inkling, Qwen4-Exp and Voxtral Realtime against vLLM 0.32's own cache layers and grouping."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.mistral_params import config_of_params
from kvdiag.kv.layout.deployment import Deployment
from tests.integration.vllm.spec_cases import own_figures
from tests.unit.kv.vectors import DATA

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("convolved_specs.py")
INKLING = json.loads((DATA / "configs" / "Inkling.json").read_text())
SMALL_INKLING = INKLING | {
    "text_config": INKLING["text_config"]
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "swa_num_attention_heads": 32,
        "local_layer_ids": [number for number in range(42) if (number + 1) % 6],
    }
}
QWEN = json.loads((DATA / "configs" / "Qwen3.8-Flash-Next.json").read_text())
ALONE = QWEN["text_config"] | {
    "architectures": ["Qwen4ExpForCausalLM"],
    "ple_layer_ids": [1, 2, 6],
    "indexer_compress_ratio": 8,
}
# mistralai/Voxtral-Mini-4B-Realtime-2602's params.json, the fields that decide the cache.
VOXTRAL = {
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "hidden_dim": 9216,
    "n_heads": 32,
    "n_kv_heads": 8,
    "vocab_size": 131_072,
    "sliding_window": 8192,
    "max_position_embeddings": 131_072,
    "multimodal": {
        "whisper_model_args": {
            "encoder_args": {
                "audio_encoding_args": {
                    "sampling_rate": 16_000,
                    "num_mel_bins": 128,
                    "hop_length": 160,
                    "window_size": 400,
                },
                "dim": 1280,
                "n_layers": 32,
                "head_dim": 64,
                "hidden_dim": 5120,
                "n_heads": 32,
                "vocab_size": 131_072,
                "causal": True,
                "pos_embed": "rope",
                "sliding_window": 750,
            },
            "downsample_args": {"downsample_factor": 4},
        }
    },
}


def case(model: str, config: dict[str, Any], **given: Any) -> dict[str, Any]:
    """A case with the usual settings where none is given."""
    usual = {
        "ranks": 1,
        "kv_dtype": "auto",
        "block_size": None,
        "context": 131_072,
        "in_flight": 16_384,
        "pool_bytes": 60 << 30,
        "drafts": 0,
        "draft_layers": 0,
        "axes": "text_config" in config,
    }
    return {"model": model, "config": config, **usual, **given}


CASES = {
    "inkling": case("inkling", INKLING),
    "inkling, 8 ranks": case("inkling", INKLING, ranks=8, context=1_000_000),
    "inkling, blocks of 64": case("inkling", INKLING, block_size=64),
    "inkling, short": case("inkling", INKLING, context=2_000, in_flight=4_096, pool_bytes=(7 << 30) + 12_345),
    "inkling, mtp": case("inkling", INKLING, drafts=1, draft_layers=1),
    "inkling, 3 drafters": case("inkling", INKLING, drafts=3, draft_layers=3, ranks=4),
    "small inkling": case("inkling", SMALL_INKLING, ranks=2),
    "qwen4": case("qwen4_exp", QWEN),
    "qwen4, 2 ranks": case("qwen4_exp", QWEN, ranks=2),
    "qwen4, 8 ranks": case("qwen4_exp", QWEN, ranks=8, context=262_144),
    "qwen4, fp8": case("qwen4_exp", QWEN, kv_dtype="fp8"),
    "qwen4, blocks of 64": case("qwen4_exp", QWEN, block_size=64),
    "qwen4, mtp": case("qwen4_exp", QWEN, drafts=2, draft_layers=1),
    "qwen4 of text": case("qwen4_exp", ALONE, ranks=4, pool_bytes=(11 << 30) + 54_321),
    "voxtral": case("voxtral_realtime", VOXTRAL),
    "voxtral, 2 ranks": case("voxtral_realtime", VOXTRAL, ranks=2, context=4_000),
    "voxtral, blocks of 64": case(
        "voxtral_realtime", VOXTRAL, block_size=64, in_flight=2_048, pool_bytes=(23 << 30) + 54_321
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_groups_and_capacity_are_the_engines_own(name: str, engine_figures: dict[str, dict[str, Any]]) -> None:
    """Groups, blocks, tokens and concurrency, from the published config and the flags."""
    given = CASES[name]
    config = config_of_params(given["config"]) if given["model"] == "voxtral_realtime" else given["config"]
    architecture = parse_architecture(config)
    # A drafter of Inkling is two layers: attention, and the convolutions' inputs.
    per_drafter = 2 if given["model"] == "inkling" else 1
    deployment = Deployment(
        tensor_parallel=given["ranks"],
        kv_dtype=given["kv_dtype"],
        block_size_tokens=given["block_size"],
        max_in_flight_tokens=given["in_flight"],
        speculative_tokens=given["drafts"],
        draft_layers=architecture.draft_layers[: given["draft_layers"] * per_drafter],
    )
    engine = {key: value for key, value in engine_figures[name].items() if key != "block_size"}
    assert engine == own_figures(given, architecture, deployment)
