"""Flags of `vllm serve` that change the KV cache: `kvdiag fit` gives the capacity of vLLM 0.32's own layers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.cli import kvdiag
from tests.integration.vllm.conftest import VllmHome

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("flag_capacities.py")
ARCHITECTURES = Path(__file__).parent / "architectures"
LIMIT_SECONDS = 900.0
POOL_BYTES = 1 << 30
CONTEXT_TOKENS, BATCHED_TOKENS = 20_000, 2_048
FIGURES = ("num_blocks", "capacity_tokens", "max_concurrency")


@dataclass(frozen=True)
class Case:
    """A model with flags: as `fit` gets them, and as vLLM's own arguments."""

    model: str
    flags: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    context_ranks: int = 1
    changes: bool = True
    """Whether the flags change the capacity, which is then another than without them."""


GQA, WINDOWS, LATENT, STATES = "qwen3-gqa", "gemma3-five-of-six", "deepseek_v2-mla", "qwen3_next-gdn"
FP8 = {"kv_cache_dtype": "fp8"}
CASES = {
    "plain": Case(GQA, changes=False),
    "windows": Case(WINDOWS, changes=False),
    "latent": Case(LATENT, changes=False),
    "states": Case(STATES, changes=False),
    "fp8": Case(GQA, "--kv-cache-dtype fp8", FP8),
    "float32": Case(GQA, "--dtype float32", {"dtype": "float32"}),
    "half": Case(GQA, "--dtype half", {"dtype": "half"}, changes=False),
    "skipped layers": Case(
        GQA,
        "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 4",
        FP8 | {"kv_cache_dtype_skip_layers": ["0", "4"]},
    ),
    "skipped windows": Case(
        WINDOWS,
        "--kv-cache-dtype fp8 --kv_cache_dtype_skip_layers sliding_window",
        FP8 | {"kv_cache_dtype_skip_layers": ["sliding_window"]},
    ),
    "skipped layer of windows": Case(
        WINDOWS,
        "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0",
        FP8 | {"kv_cache_dtype_skip_layers": ["0"]},
    ),
    "state format": Case(STATES, "--mamba-cache-dtype float32", {"mamba_cache_dtype": "float32"}),
    "recurrent state format": Case(STATES, "--mamba-ssm-cache-dtype float32", {"mamba_ssm_cache_dtype": "float32"}),
    "state mode": Case(STATES, "--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    "no async scheduling": Case(WINDOWS, "--no-async-scheduling", {"async_scheduling": False}),
    "no hybrid manager": Case(WINDOWS, "--disable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": True}),
    "sequences and steps": Case(
        GQA,
        "--max-num-seqs 4 --enable-chunked-prefill",
        {"max_num_seqs": 4, "enable_chunked_prefill": True},
        changes=False,
    ),
    "whole heads": Case(LATENT, "", {}, {"VLLM_MLA_DISABLE": "1"}),
    "context ranks": Case(LATENT, "--tp 2 --decode-context-parallel-size 2", context_ranks=2),
    "n-grams": Case(
        STATES,
        '--speculative-config {"method":"ngram","num_speculative_tokens":3}',
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    "fast prefill": Case(GQA, "--kv-sharing-fast-prefill", {"kv_sharing_fast_prefill": True}, changes=False),
    "draft model": Case(
        GQA,
        '--speculative-config {"method":"draft_model","model":"DRAFT","num_speculative_tokens":2}',
        {"speculative_config": {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 2}},
    ),
    "eagle3": Case(
        GQA,
        "--spec-method eagle3 --spec-model EAGLE --spec-tokens 2",
        {"speculative_config": {"method": "eagle3", "model": "EAGLE", "num_speculative_tokens": 2}},
    ),
}
EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "draft_vocab_size": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def config_of(model: str) -> Any:
    """A model's config."""
    return json.loads((ARCHITECTURES / f"{model}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the configs of drafters, by the name that stands for each."""
    configs = {"DRAFT": config_of(GQA) | {"num_hidden_layers": 2, "num_key_value_heads": 4}, "EAGLE": EAGLE}
    folders = {}
    for name, config in configs.items():
        folder = tmp_path_factory.mktemp(name.lower())
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        folders[name] = str(folder)
    return folders


def named(text: str, drafters: dict[str, str]) -> str:
    """The text with the drafters' folders."""
    for name, folder in drafters.items():
        text = text.replace(name, folder)
    return text


@pytest.fixture(scope="module")
def reported(vllm: VllmHome, drafters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The capacity that vLLM computes for each case."""
    cases = [
        {
            "config": config_of(case.model),
            "arguments": json.loads(named(json.dumps(case.arguments), drafters)),
            "environment": case.environment,
            "context_ranks": case.context_ranks,
            "context": CONTEXT_TOKENS,
            "batched_tokens": BATCHED_TOKENS,
            "pool_bytes": POOL_BYTES,
        }
        for case in CASES.values()
    ]
    file = tmp_path_factory.mktemp("cases") / "cases.json"
    file.write_text(json.dumps(cases), encoding="utf-8")
    return dict(zip(CASES, vllm.answers(PROGRAM, file, limit_seconds=LIMIT_SECONDS), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_capacity_is_vllms(
    name: str, reported: dict[str, Any], drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, tokens and concurrency of a pool are the very numbers; flags that change nothing leave them."""
    case = CASES[name]
    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, value)
    result = kvdiag(
        *("fit", str(ARCHITECTURES / f"{case.model}.json"), "--kv-pool-bytes", str(POOL_BYTES)),
        *("--context", str(CONTEXT_TOKENS), "--max-num-batched-tokens", str(BATCHED_TOKENS), "--block-size", "16"),
        *("--output", "json", *named(case.flags, drafters).split()),
    )

    assert reported[name] == {figure: result.document[figure] for figure in FIGURES}
    plain = next(other for other, one in CASES.items() if one.model == case.model)
    assert case.changes is (reported[plain] != reported[name])
