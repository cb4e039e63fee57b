"""config.json -> layers: kinds, aliases, nesting, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import AttentionLayer, LayerKind
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
    "LFM2-1.2B": {"short_conv": 10, "full": 6},
    "Llama-3.1-8B": {"full": 32},
    "Nemotron-3-Nano-30B-A3B": {"mamba2": 23, "no_cache": 23, "full": 6},
    "Nemotron-Nano-9B-v2": {"mamba2": 27, "full": 4, "no_cache": 25},
    "Qwen3-Next-80B-A3B": {"gated_delta_net": 36, "full": 12},
    "Qwen3.5-2B": {"gated_delta_net": 18, "full": 6},
    "Qwen3.6-27B": {"gated_delta_net": 48, "full": 16},
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
    """A known model with a layer type nobody knows is refused by that field."""
    with pytest.raises(KvModelError) as caught:
        parse_architecture({**LLAMA, "layer_types": ["full_attention", "wormhole", "full_attention", "full_attention"]})

    assert ("layer_types", True) == (caught.value.field, "--kv-bytes-per-token" in str(caught.value))


BAD: dict[str, tuple[Any, str]] = {
    "not an object": ([], "config"),
    "empty": ({}, "model_type"),
    "no depth": ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, "num_hidden_layers"),
    "negative depth": ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers"),
    "no heads": ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads"),
    "layer types not strings": ({**LLAMA, "layer_types": [1, 2, 3, 4]}, "layer_types"),
    "layer types not a list": ({**LLAMA, "layer_types": "full"}, "layer_types"),
    "a million layer types": ({**LLAMA, "layer_types": ["full_attention"] * 1_000_000}, "layer_types"),
    "text config not an object": ({**LLAMA, "text_config": 7}, "text_config"),
    "dtype nobody serves": ({**LLAMA, "torch_dtype": "float8"}, "torch_dtype"),
    "mla without a rank": ({**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": "512"}, "kv_lora_rank"),
    "nested model type not a string": ({**LLAMA, "model_type": 3}, "model_type"),
}


@pytest.mark.parametrize(("config", "field"), BAD.values(), ids=BAD.keys())
def test_bad_configs_are_one_line_that_names_the_field(config: dict[str, Any], field: str) -> None:
    """A config that is not a model, or contradicts itself, gives one short line with the field's name."""
    with refused(field) as caught:
        parse_architecture(config)
    assert 1 == len(str(caught.value).splitlines())
    assert len(str(caught.value)) < 300


def test_endless_nesting_is_refused() -> None:
    """A config nested beyond reason is refused, not followed."""
    config: dict[str, Any] = copy.deepcopy(LLAMA)
    for _ in range(50):
        config = {"model_type": "wrapper", "text_config": config}

    with pytest.raises(KvModelError):
        parse_architecture(config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"text_config": {}}, "model_type"),
        ({"model_type": "never_seen", "text_config": {}}, "model_type"),
        ({"model_type": "never_seen", "text_config": {"hidden_size": 64}}, "model_type"),
        ({"text_config": {"model_type": "never_seen"}}, "text_config.model_type"),
        ({"model_type": "llama", "text_config": {}, "hidden_size": -1, "num_hidden_layers": 2}, "hidden_size"),
        ({"model_type": "llama", "text_config": {}, "num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_field_is_named_where_it_stands(config: dict[str, Any], field: str) -> None:
    """An empty nested config holds nothing, so that what is wrong stands at the top."""
    with refused(field):
        parse_architecture(config)


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_size"),
    [
        # A quarter of the query heads: BitNet 2B4T without the field would cost four times as much.
        ({"model_type": "bitnet", "num_hidden_layers": 30, "hidden_size": 2560, "num_attention_heads": 20}, 5, 128),
        ({"model_type": "qwen2_5_omni_thinker", "text_config": {"model_type": "qwen2_5_omni_text"}}, 4, 128),
        ({"model_type": "step3_vl", "text_config": {"model_type": "step3_text"}}, 1, 256),
        ({"model_type": "step3p5", "num_hidden_layers": 2, "hidden_size": 5120, "num_attention_groups": 4}, 4, 128),
        # gemma-3-4b.
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34,
                                                  "hidden_size": 2560, "sliding_window": 1024}}, 4, 256),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_heads_that_a_config_leaves_out_are_the_classs(config: dict[str, Any], kv_heads: int, head_size: int) -> None:
    """Published configs leave KV heads and head size to their config class."""
    layer = parse_architecture(config).layers[0]

    assert isinstance(layer, AttentionLayer)
    assert (kv_heads, head_size) == (layer.kv_heads, layer.head_size)
