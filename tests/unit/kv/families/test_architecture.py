"""config.json -> layers: kinds, aliases, nesting, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import LayerKind
from tests.unit.kv.refused import refused
from tests.unit.kv.vectors import DATA

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
KINDS = {
    "DeepSeek-V2-Lite": {"mla": 27},
    "DeepSeek-V3.2-Exp": {"mla_dsa": 61},
    "Kimi-K2": {"mla": 61},
    "Inkling": {"short_conv": 66, "sliding": 55, "full": 11},
    "LFM2-1.2B": {"short_conv": 10, "full": 6},
    "Llama-3.1-8B": {"full": 32},
    "Nemotron-3-Nano-30B-A3B": {"mamba2": 23, "no_cache": 23, "full": 6},
    "Nemotron-Nano-9B-v2": {"mamba2": 27, "full": 4, "no_cache": 25},
    "Qwen3-Next-80B-A3B": {"gated_delta_net": 36, "full": 12},
    "Qwen3.8-Flash-Next": {"gated_delta_net": 36, "short_conv": 1, "full": 12},
    "Qwen3.5-2B": {"gated_delta_net": 18, "full": 6},
    "Qwen3.6-27B": {"gated_delta_net": 48, "full": 16},
    "Voxtral-Mini-4B-Realtime": {"sliding": 58},
    "gemma-3-27b": {"sliding": 52, "full": 10},
    "gemma-4-31b": {"sliding": 50, "full": 10},
    "gpt-oss-120b": {"full": 18, "sliding": 18},
    "granite-4.0-h-1b": {"mamba2": 36, "full": 4},
    "whisper-large-v3": {"full": 32, "cross_attention": 32},
}


def kinds_of(config: dict[str, Any]) -> dict[str, int]:
    """How many layers of each kind a config has."""
    return {str(kind): count for kind, count in parse_architecture(config).kinds.items()}


@pytest.mark.parametrize(("name", "expected"), KINDS.items())
def test_kinds_of_served_models(name: str, expected: Any) -> None:
    """Each served model's layers are of the kinds that its vLLM model file builds."""
    assert expected == kinds_of(json.loads((DATA / "configs" / f"{name}.json").read_text()))


@pytest.mark.parametrize("path", sorted((DATA / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_config_of_the_dataset_parses_or_names_its_model_type(path: Path) -> None:
    """A config is understood, or refused by its model_type: nothing falls back silently."""
    config = json.loads(path.read_text())
    try:
        actual = sum(parse_architecture(config).kinds.values()) > 0
    except KvModelError as error:
        actual = error.field == "model_type" and "--kv-bytes-per-token" in str(error)

    assert actual


def test_a_text_config_two_levels_down_is_read() -> None:
    """Omni models keep the text config inside the thinker's."""
    nested = {"model_type": "omni", "thinker_config": {"model_type": "thinker", "text_config": LLAMA}}

    assert kinds_of(LLAMA) == kinds_of(nested)


def test_encoders_keep_no_cache() -> None:
    """A BERT-like model has layers and no cache."""
    architecture = parse_architecture({"model_type": "bert", "num_hidden_layers": 12, "num_attention_heads": 12})
    layout = deployed_layout(architecture, Deployment())

    assert ({LayerKind.ENCODER_ONLY: 12}, ()) == (architecture.kinds, layout.groups)


def test_unknown_architecture_says_what_to_pass() -> None:
    """An unknown model type names the field that decided so and the way out, and never gets the textbook formula."""
    with refused("model_type") as caught:
        parse_architecture({**LLAMA, "model_type": "quantum_llama", "architectures": ["QuantumLlama"]})
    assert "quantum_llama" in str(caught.value)
    assert "--kv-bytes-per-token" in str(caught.value)


def test_unknown_layer_type_says_what_to_pass() -> None:
    """A known model with an unknown layer type is refused, and the error names that field."""
    with pytest.raises(KvModelError) as caught:
        parse_architecture({**LLAMA, "layer_types": ["full_attention", "wormhole", "full_attention", "full_attention"]})

    assert ("layer_types", True) == (caught.value.field, "--kv-bytes-per-token" in str(caught.value))


def test_endless_nesting_is_refused() -> None:
    """A config nested beyond reason is refused, not followed."""
    config: dict[str, Any] = copy.deepcopy(LLAMA)
    for _ in range(50):
        config = {"model_type": "wrapper", "text_config": config}

    with pytest.raises(KvModelError):
        parse_architecture(config)
