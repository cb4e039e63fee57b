"""The longest request of a model against vLLM 0.32's own derivation: what it serves by default, and accepts at most."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands.fitting.request_length import parsed_object, refused_length, with_overrides
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.sources.model_files import ModelFiles, read_model
from tests.integration.vllm.conftest import VllmHome
from tests.unit.kv.models import catalogue

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("context_limits.py")
LIMIT_SECONDS = 600.0
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1_000,
}
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8_192}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40_960}
PHI3 = {
    **LLAMA,
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4_096,
    "pad_token_id": 0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "max_position_embeddings": 131_072,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1_024,
    "head_dim": 64,
}
BERT = {
    **SIZES,
    "model_type": "bert",
    "architectures": ["BertModel"],
    "max_position_embeddings": 512,
    "position_embedding_type": "absolute",
}


def yarn(**parameters: object) -> dict[str, object]:
    """The parameters of YaRN by four."""
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8_192, **parameters}


def published(name: str) -> dict[str, Any]:
    """The config of a model of the catalogue."""
    entry = catalogue().find(name)
    assert entry is not None
    return dict(entry.config)


def case(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A case with nothing else where nothing else is given."""
    return {"config": config, "beside": {}, "overrides": {}, "disable_sliding_window": False, **settings}


CASES = {
    "plain": case(LLAMA),
    "linear": case({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": case({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.5}}),
    "yarn, length before scaling": case({**LLAMA, "rope_scaling": yarn()}),
    "yarn, length after scaling": case({**LLAMA, "rope_scaling": yarn(), "max_position_embeddings": 32_768}),
    "yarn, new name": case({**QWEN3, "rope_parameters": yarn(rope_theta=1e6)}),
    "llama3": case(
        {
            **LLAMA,
            "max_position_embeddings": 131_072,
            "rope_scaling": yarn(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        }
    ),
    "longrope": case(PHI3),
    "gemma3": case(GEMMA3),
    "a tokenizer's length in the config": case({**LLAMA, "model_max_length": 4_096}),
    "a longer one": case({**LLAMA, "model_max_length": 16_384}),
    "smallest of several": case({**LLAMA, "max_sequence_length": 3_000, "seq_length": 5_000}),
    "windows off": case(
        {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4_096},
        disable_sliding_window=True,
    ),
    "windows on": case(
        {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4_096}
    ),
    "learned positions": case(
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 1_024, "n_layer": 2, "n_head": 4,
         "n_embd": 256, "vocab_size": 1_000}
    ),
    "encoder": case(BERT, beside={"sentence_bert_config.json": {"max_seq_length": 256}}),
    "encoder, tokenizer": case(BERT, beside={"tokenizer_config.json": {"model_max_length": 128}}),
    "overrides": case(LLAMA, overrides={"max_position_embeddings": 65_536}),
    "overrides, linear": case(
        LLAMA, overrides={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    ),
    "mla": case({"architectures": ["DeepseekV3ForCausalLM"], **published("deepseek-v3")}),
    "mixed windows": case({"architectures": ["GptOssForCausalLM"], **published("gpt-oss-20b")}),
}  # fmt: skip


def limits(given: dict[str, Any], folder: Path) -> Any:
    """The model's architecture as `kvdiag fit` reads it, and its files."""
    folder.mkdir(exist_ok=True)
    for name, content in {"config.json": given["config"], **given["beside"]}.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    files = read_model(str(folder))
    config = with_overrides(files.config, given["overrides"])
    windows = not given["disable_sliding_window"]
    return parse_architecture(config, beside=files.limits, sliding_window=windows), files


def answers(vllm: VllmHome, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The engine's answers, one for each case."""
    given = folder / "cases.json"
    given.write_text(json.dumps(cases), encoding="utf-8")
    return vllm.answers(PROGRAM, given, limit_seconds=LIMIT_SECONDS)


def test_limits_are_the_engines_own(vllm: VllmHome, tmp_path: Path) -> None:
    """The length by default, the longest that is accepted, and the next one, which is refused."""
    asked, expected = [], {}
    for name, given in CASES.items():
        architecture, _ = limits(given, tmp_path / name)
        longest = architecture.accepted_context_tokens
        asked.append({**given, "lengths": [longest, longest + 1]})
        expected[name] = {"default": architecture.max_context_tokens, "accepted": [True, False]}

    assert expected == dict(zip(CASES, answers(vllm, asked, tmp_path), strict=True))


def test_the_advised_override_is_accepted(vllm: VllmHome, tmp_path: Path) -> None:
    """With the RoPE scaling that the refusal names, the engine and kvdiag both accept the length."""
    architecture, files = limits(CASES["plain"], tmp_path / "plain")
    line = refused_length(files, architecture, 100_000, "vllm")
    overrides = dict(parsed_object(line.split("'")[1], "hf-overrides"))

    (answer,) = answers(vllm, [case(LLAMA, overrides=overrides, lengths=[100_000])], tmp_path)
    changed = ModelFiles(origin="", config=with_overrides(LLAMA, overrides))

    assert [True] == answer["accepted"]
    assert "" == refused_length(changed, parse_architecture(changed.config), 100_000, "vllm")
