"""Mistral's params.json is read as vLLM reads it; a GGUF file is refused with the way to go."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.mistral_params import config_of_params
from kvdiag.kv.layout.layers import LayerKind
from kvdiag.sources.model_files import read_model

DENSE: dict[str, Any] = {
    "dim": 4096,
    "n_layers": 4,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 128,
    "hidden_dim": 14336,
    "vocab_size": 32768,
}
LATENT = {**DENSE, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize("whole", [False, True])
def test_a_folder_with_params_alone_has_that_model(tmp_path: Path, *, whole: bool) -> None:
    """Without a window of its own it has none; the file itself can be passed, too."""
    (tmp_path / "params.json").write_text(json.dumps(DENSE), encoding="utf-8")
    files = read_model(str(tmp_path if whole else tmp_path / "params.json"), offline=True)
    architecture = parse_architecture(files.config)

    assert {LayerKind.FULL: 4} == dict(architecture.kinds)
    assert (32, 128_000) == (architecture.attention_heads, architecture.max_context_tokens)


def test_a_config_json_counts_first(tmp_path: Path) -> None:
    """As for vLLM."""
    (tmp_path / "params.json").write_text(json.dumps(DENSE), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")

    assert {"model_type": "llama"} == dict(read_model(str(tmp_path), offline=True).config)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"sliding_window": [1024, None]}, {LayerKind.SLIDING: 2, LayerKind.FULL: 2}),
        ({"sliding_window": 1024}, {LayerKind.SLIDING: 4}),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2}}, {LayerKind.FULL: 4}),
        (LATENT, {LayerKind.MLA: 4}),
        ({"multimodal": {"whisper_model_args": {"encoder_args": {}}}}, {LayerKind.FULL: 4}),
    ],
)
def test_kinds_of_layers(change: dict[str, Any], kinds: dict[LayerKind, int]) -> None:
    """Windows in a list repeat over the layers; latent attention is DeepSeek's."""
    assert kinds == dict(parse_architecture(config_of_params({**DENSE, **change})).kinds)


def test_experts_are_in_the_layers_of_the_model() -> None:
    """Mistral Large 3 has dense layers first."""
    experts = {"num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "expert_hidden_dim": 64}
    config = config_of_params({**LATENT, "moe": {**experts, "num_experts_per_tok": 2}})

    assert ["MistralLarge3ForCausalLM"] == config["architectures"]
    assert (4, 1, 64) == tuple(
        config[name] for name in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size")
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"quantization": {"qformat_weight": "int3"}}, "quantization"),
        ({"multimodal": {"whisper_model_args": {"encoder_args": {"causal": True}}}}, "downsample_factor"),
    ],
)
def test_other_models_are_refused(change: dict[str, Any], field: str) -> None:
    """By the field that decides."""
    with pytest.raises(KvModelError) as caught:
        parse_architecture(config_of_params({**DENSE, **change}))

    assert field == caught.value.field


def test_a_format_of_weights_is_kept() -> None:
    """As vLLM names it."""
    config = config_of_params({**DENSE, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}})

    assert "fp8" == config["quantization_config"]["quant_method"]


def test_a_gguf_file_is_refused_with_the_way_to_go(tmp_path: Path) -> None:
    """Its config and its size for vLLM, or llama.cpp."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(KvdiagError) as caught:
        read_model(str(path), offline=True)

    assert "--weights 64" in str(caught.value)
    assert "--engine llamacpp" in str(caught.value)
