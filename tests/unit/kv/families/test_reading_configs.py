"""What of a config decides besides its layers: where the language model is, its dtype, context and declared cache."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import given_architecture, parse_architecture, text_fields
from kvdiag.kv.families.registry import FAMILIES, TYPE_OF_ARCHITECTURE
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import AttentionLayer
from tests.unit.kv.refused import refused

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "holder", ["thinker_config", "text_config", "llm_config", "language_config", "text_model_config", "language_model"]
)
def test_where_multimodal_configs_keep_the_language_model(holder: str) -> None:
    """Under any of six names; an empty object under an earlier one says nothing."""
    wrapped = {"model_type": "a wrapper", holder: LLAMA}

    assert 4 == parse_architecture(wrapped).depth
    assert 4 == parse_architecture({"thinker_config": {}, **wrapped}).depth


@pytest.mark.parametrize(
    ("config", "depth", "heads"),
    [
        ({}, None, None),
        ({"n_layers": 3, "n_kv_heads": 8, "dim": 2048}, 3, 8),
        ({"config": {"n_layers": 3}}, 3, 32),
        ({"config": {"text": {"n_layers": 5, "n_kv_heads": 16}}}, 5, 16),
        ({"config": {"text": {}}}, 24, 32),
    ],
    ids=["nothing", "at the top", "in config", "in config.text", "an empty text"],
)
def test_moondream_keeps_its_own_under_config_text(
    config: dict[str, Any], depth: int | None, heads: int | None
) -> None:
    """24 layers of 32 KV heads by its class where the nested object leaves them out; without one it is refused."""
    config = {"model_type": "moondream3"} | config

    if depth is None:
        with pytest.raises(KvModelError):
            parse_architecture(config)
        return
    (first, *_) = parse_architecture(config).layers
    assert isinstance(first, AttentionLayer)
    assert (depth, heads) == (parse_architecture(config).depth, first.kv_heads)


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        ({}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float16"),
        ({"dtype": "float16"}, {}, "float16"),
        ({"dtype": "half"}, {}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, {}, "bfloat16"),
        ({"dtype": "torch.bfloat16"}, {}, "bfloat16"),
        ({"dtype": "float32"}, {}, "float16"),
        ({"dtype": "float"}, {}, "float16"),
        ({"dtype": "auto", "torch_dtype": "float16"}, {}, "float16"),
        ({"dtype": "auto"}, {}, "bfloat16"),
        ({}, {"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}, "bfloat16"),
    ],
)
def test_the_dtype_a_model_is_served_in(top: dict[str, str], text: dict[str, str], expected: str) -> None:
    """The top's, else the text config's, before torch_dtype; 32 bits are served in 16, a missing dtype as bfloat16."""
    assert expected == parse_architecture({**top, "text_config": {**LLAMA, **text}}).dtype


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**LLAMA, "dtype": "float64"}, "dtype"),
        ({"text_config": {**LLAMA, "torch_dtype": "torch.int8"}}, "text_config.torch_dtype"),
    ],
)
def test_a_dtype_that_no_model_is_served_in(config: dict[str, Any], field: str) -> None:
    """By the path of the field, without torch's prefix."""
    with refused(field):
        parse_architecture(config)


@pytest.mark.parametrize(
    "name",
    [
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_sequence_length",
        "max_target_positions",
        "max_context",
    ],
)
def test_the_longest_context_under_its_names(name: str) -> None:
    """MPT, GPT-2, ChatGLM, Whisper and others call it otherwise."""
    assert 777 == parse_architecture({**LLAMA, "max_position_embeddings": None, name: 777}).max_context_tokens


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"model_type": "a wrapper", "architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"model_type": "a wrapper", "architectures": ["NeverSeen", "Qwen2ForCausalLM"]}, "qwen2"),
        ({"architectures": ["Qwen2ForCausalLM"], "text_config": {"architectures": ["LlamaForCausalLM"]}}, "llama"),
        ({"architectures": ["LlamaForCausalLM"], "text_config": {"architectures": ["NeverSeen"]}}, "llama"),
        ({"model_type": "qwen2", "text_config": {"model_type": "llama"}}, "llama"),
        ({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]}, "qwen2"),
    ],
)
def test_the_type_of_a_model(config: dict[str, Any], expected: str) -> None:
    """Its model_type where that is known, the language model's first; else an entry of architectures."""
    shape = {name: value for name, value in LLAMA.items() if name != "model_type"}
    filled = dict(config)
    if "text_config" in filled:
        filled["text_config"] = shape | filled["text_config"]
    else:
        filled = shape | filled

    assert expected == parse_architecture(filled).model_type


def test_every_class_that_is_known_has_a_reader() -> None:
    """Every entry of architectures leads to a type that has a reader."""
    assert set(TYPE_OF_ARCHITECTURE.values()) <= set(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(("gpt_neo", name) for name in ("num_layers", "hidden_size")),
        *(("gpt2", name) for name in ("n_layer", "n_embd")),
        *(("dbrx", name) for name in ("n_layers", "d_model")),
        *(("moondream3", "dim"), ("llama", "intermediate_size"), ("llama", "num_hidden_layers")),
    ],
)
def test_depth_and_widths_are_assumed_in_nested_configs_alone(model_type: str, name: str) -> None:
    """By whichever name the class has for them."""
    lacking = {"model_type": model_type}
    nested = {"model_type": model_type, "text_config": lacking, "config": {"text": lacking}}
    assert [True, False] == [text_fields(config).raw(name) is None for config in (lacking, nested)]


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size"])
def test_depth_and_width_are_never_made_up(missing: str) -> None:
    """A config of its own must say them; one that is nested may be written as a difference from its class."""
    # gemma3_text has 26 layers of 2,304 by transformers' Gemma3TextConfig
    config = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 1152, "sliding_window": 512}
    lacking = {name: value for name, value in config.items() if name != missing}

    assert text_fields(lacking).raw(missing) is None
    assert {"num_hidden_layers": 26, "hidden_size": 2304}[missing] == text_fields({"text_config": lacking}).raw(missing)
    assert config[missing] == text_fields({"text_config": config}).raw(missing)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "nvfp4"}, "nvfp4"),
        ({"kv_cache_quant_algo": "INT8"}, None),
        ({"kv_cache_scheme": {"num_bits": 8}}, "fp8"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "nvfp4"),
        ({"kv_cache_scheme": {"num_bits": 16}}, None),
        ({"kv_cache_scheme": {"num_bits": "8"}}, None),
        ({"kv_cache_scheme": {"num_bits": [8]}}, None),
        ({"kv_cache_scheme": {}}, None),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quantization": {}, "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo": "FP8"}, "nvfp4"),
    ],
)
@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_cache_that_a_checkpoint_declares(
    quantization: dict[str, Any], expected: str | None, name: str, nested: bool
) -> None:
    """8 bits are fp8 and 4 are nvfp4, in ModelOpt's words or compressed-tensors', at the top or in the text config."""
    config = LLAMA | {name: quantization}

    assert expected == parse_architecture({"text_config": config} if nested else config).declared_kv_dtype


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_cost_that_is_given_is_the_same_on_every_rank(ranks: int) -> None:
    """--kv-bytes-per-token 70,272 with an 8-bit cache, blocks of 64 tokens."""
    architecture = given_architecture(bytes_per_token=70_272)

    layout = deployed_layout(architecture, Deployment(kv_dtype="fp8", tensor_parallel=ranks))

    assert ((70_272,), (70_272 * 64,)) == (layout.bytes_per_token(), layout.bytes_per_block)
    assert (1, 0, "bfloat16", "given") == (
        architecture.depth,
        architecture.attention_heads,
        architecture.dtype,
        architecture.model_type,
    )
