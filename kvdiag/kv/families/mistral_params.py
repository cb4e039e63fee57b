"""Mistral's own params.json -> the config.json that vLLM makes of it (transformers_utils/configs/mistral.py)."""

from collections.abc import Mapping
from typing import Any

from kvdiag.errors import KvModelError

_NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "tied_embeddings": "tie_word_embeddings",
}
_EXPERT_NAMES = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "route_every_n": "moe_layer_freq",
}
_ENCODER_NAMES = {
    "dim": "d_model",
    "head_dim": "encoder_head_dim",
    "n_heads": "encoder_attention_heads",
    "n_layers": "encoder_layers",
    "sliding_window": "sliding_window",
}
_MAX_CONTEXT_TOKENS = 128_000
"""Where the file states no length."""


def config_of_params(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model from its params.json.

    Raises:
        KvModelError: it is that of another kind of model, or in a format that vLLM does not read.
    """
    if params.get("model_type") == "mamba":
        raise KvModelError("params.json of a Mamba model is not read: pass a config.json", "model_type")
    config: dict[str, Any] = {_NAMES.get(name, name): value for name, value in params.items()}
    config.setdefault("max_position_embeddings", _MAX_CONTEXT_TOKENS)
    # Only the config class of Mistral 7B has a window by default.
    config.setdefault("sliding_window", None)
    experts = config.pop("moe", None)
    latent = bool(config.get("qk_nope_head_dim"))
    if latent and not experts:
        experts = {"num_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": config.get("num_hidden_layers")}
    if isinstance(experts, Mapping) and experts.get("num_shared_experts"):
        config |= {_EXPERT_NAMES[name]: value for name, value in experts.items() if name in _EXPERT_NAMES}
        config |= {"model_type": "deepseek_v3", "architectures": ["MistralLarge3ForCausalLM"]}
    elif isinstance(experts, Mapping):
        config |= {"num_local_experts": experts.get("num_experts"), "model_type": "mixtral"}
        config |= {"num_experts_per_tok": experts.get("num_experts_per_tok"), "architectures": ["MixtralForCausalLM"]}
    else:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    quantization = config.pop("quantization", None)
    if isinstance(quantization, Mapping):
        config["quantization_config"] = _quantization(quantization)
    multimodal = config.pop("multimodal", None)
    whisper = multimodal.get("whisper_model_args") if isinstance(multimodal, Mapping) else None
    encoder = whisper.get("encoder_args") if isinstance(whisper, Mapping) else None
    if isinstance(whisper, Mapping) and isinstance(encoder, Mapping):
        return _with_encoder(config, encoder, whisper)
    return config


def _with_encoder(
    config: Mapping[str, Any], encoder: Mapping[str, Any], whisper: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Voxtral; a causal encoder keeps a cache (_remap_mistral_audio_args)."""
    if not encoder.get("causal"):
        return {"model_type": "voxtral", "architectures": ["VoxtralForConditionalGeneration"], "text_config": config}
    downsampling = whisper.get("downsample_args")
    audio = {_ENCODER_NAMES[name]: value for name, value in encoder.items() if name in _ENCODER_NAMES}
    audio["block_pool_size"] = downsampling.get("downsample_factor") if isinstance(downsampling, Mapping) else None
    return {
        "model_type": "voxtral",
        "architectures": ["VoxtralRealtimeGeneration"],
        "text_config": {**config, "model_type": "voxtral_realtime_text"},
        "audio_config": audio,
    }


def _quantization(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if given.get("qformat_weight") == "fp8_e4m3":
        return {"quant_method": "fp8"}
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    if method != "compressed-tensors":
        raise KvModelError("quantization of params.json is in no format that vLLM reads", "quantization")
    return {**given, "quant_method": method}
