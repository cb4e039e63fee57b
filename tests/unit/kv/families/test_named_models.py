"""Models that vLLM 0.32 serves from its own files: their layers as those files build them."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.deployment import Deployment, check_kernels, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import AttentionLayer, LayerKind
from tests.unit.kv.refused import refused

COHERE_ASR: dict[str, Any] = {
    "model_type": "cohere_asr",
    "architectures": ["CohereAsrForConditionalGeneration"],
    "encoder": {"n_heads": 8},
    "transf_decoder": {
        "config_dict": {"num_layers": 3, "hidden_size": 1024, "num_attention_heads": 8, "max_sequence_length": 1024}
    },
}
NEMOTRON_PARSE: dict[str, Any] = {
    "model_type": "nemotron_parse",
    "architectures": ["NemotronParseForConditionalGeneration"],
    "decoder": {"model_type": "mbart", "d_model": 1024, "decoder_layers": 10, "decoder_attention_heads": 16},
}
MINIMAX_M3: dict[str, Any] = {
    "model_type": "minimax_m3_text",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1], "sparse_index_dim": 128},
}
DOTS3_NOTE: dict[str, Any] = {
    "model_type": "dots3_note",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "swa_num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "swa_kv_lora_rank": 1024,
    "swa_qk_rope_head_dim": 64,
    "sliding_window_size": 512,
    "index_topk": 2048,
    "index_head_dim": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
PANGU: dict[str, Any] = {
    "architectures": ["PanguProMoEV2ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "param_sink_number": 128,
    "qk_nope_dim": 128,
    "qk_rope_dim": 64,
    "v_channels": 128,
}
DENOISING: dict[str, Any] = {
    "model_type": "diffusion_gemma_text",
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 8,
}


@pytest.mark.parametrize(("config", "layers", "heads"), [(COHERE_ASR, 3, (8, 128)), (NEMOTRON_PARSE, 10, (16, 64))])
def test_decoders_of_an_encoder_have_both_kinds_of_attention(
    config: dict[str, Any], layers: int, heads: tuple[int, int]
) -> None:
    """cohere_asr.py, nemotron_parse.py: self-attention and cross-attention in each decoder layer."""
    architecture = parse_architecture(config)

    assert {LayerKind.FULL: layers, LayerKind.CROSS_ATTENTION: layers} == dict(architecture.kinds)
    sizes = {(one.kv_heads, one.head_size) for one in architecture.layers if isinstance(one, AttentionLayer)}
    assert {heads} == sizes


def test_index_keys_are_whole_on_every_rank() -> None:
    """MiniMax-M3: 2 bytes of each of 128 sizes, with the rank's heads, in blocks of 128 tokens."""
    architecture = parse_architecture(MINIMAX_M3)
    layout = deployed_layout(architecture, Deployment(tensor_parallel=4, kv_dtype="fp8"))

    assert 128 * (4 * 2 * 128 + 3 * 2 * 128) == layout.bytes_per_block[0]
    assert 128 == layout.block_size_tokens


def test_a_selected_block_is_a_page() -> None:
    """No kernel selects parts of a page."""
    with refused("block_size"):
        check_kernels(parse_architecture(MINIMAX_M3), Deployment(block_size_tokens=64))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**MINIMAX_M3, "sparse_attention_config": None}, "sparse_attention_config"),
        ({**COHERE_ASR, "transf_decoder": {}}, "transf_decoder"),
        ({**DENOISING, "use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({**DENOISING, "per_layer_config": {"first": {"head_dim": 64}}}, "per_layer_config"),
        ({**PANGU, "param_sink_number": None}, "param_sink_number"),
        ({**PANGU, "kv_lora_rank": 512}, "kv_lora_rank"),
        ({**DOTS3_NOTE, "layer_types": None}, "layer_types"),
        ({**DOTS3_NOTE, "index_topk": None}, "index_topk"),
        ({**DOTS3_NOTE, "swa_kv_lora_rank": 256}, "swa_kv_lora_rank"),
        ({**DOTS3_NOTE, "mtp_layer_types": ["full_attention"] * 2}, "mtp_layer_types"),
    ],
)
def test_layers_that_a_config_leaves_out_are_refused(config: dict[str, Any], field: str) -> None:
    """The error names the field."""
    with refused(field):
        parse_architecture(config)


def test_windows_of_latent_rows_and_index_rows_share_blocks() -> None:
    """Dots3-note: the widest group is that of the layer without a window, rounded up to whole rows."""
    layout = deployed_layout(parse_architecture(DOTS3_NOTE), Deployment(compute_capability=90))

    assert (64 + 4) * 2 * 1088 == layout.bytes_per_block[0]
    assert 64 == layout.block_size_tokens


@pytest.mark.parametrize(
    ("deployment", "field"),
    [
        (Deployment(kv_dtype="fp8"), "kv_dtype"),
        (Deployment(compute_capability=100), "compute_capability"),
        (Deployment(platform=Platform.CPU), "compute_capability"),
        (Deployment(hybrid_manager=False), "hybrid_kv_cache_manager"),
        (Deployment(tensor_parallel=8), "tensor_parallel"),
    ],
)
def test_windows_of_latent_rows_are_hoppers_and_16_bits(deployment: Deployment, field: str) -> None:
    """VLLM has no other kernels for them, and does not start with the window's layers in full."""
    with refused(field):
        deployed_layout(parse_architecture(DOTS3_NOTE), deployment)


@pytest.mark.parametrize(
    ("deployment", "field"),
    [
        (Deployment(tensor_parallel=8), "tensor_parallel"),
        (Deployment(block_size_tokens=256), "block_size"),
        (Deployment(platform=Platform.CPU), "platform"),
        (Deployment(kv_dtype="fp8", compute_capability=80), "kv_dtype"),
        (Deployment(kv_dtype="int8_per_token_head"), "kv_dtype"),
    ],
)
def test_fixed_tokens_take_whole_blocks_and_flash_attention(deployment: Deployment, field: str) -> None:
    """Pangu Pro MoE V2: no KV head is copied, and the kernel is not chosen by the cache's format."""
    with refused(field):
        deployed_layout(parse_architecture(PANGU), deployment)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("FunASRForConditionalGeneration", "qwen3"), ("FireRedASR2ForConditionalGeneration", "qwen2")],
)
def test_speech_models_have_their_language_model_s_layers(name: str, model_type: str) -> None:
    """funasr.py, fireredasr2.py: their config class is that of the language model."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain = parse_architecture({"model_type": model_type, **sizes})

    assert plain.layers == parse_architecture({"model_type": "a", "architectures": [name], **sizes}).layers


def test_kimi_k3_has_kimi_linear_s_layers() -> None:
    """kimi_k3/nvidia/model.py builds both."""
    linear = {
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }
    text = {
        "num_hidden_layers": 3,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": linear | {"gate_lower_bound": -5.0},
    }
    whole = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}

    assert parse_architecture({"model_type": "kimi_linear", **text}).layers == parse_architecture(whole).layers
