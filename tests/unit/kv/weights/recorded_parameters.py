"""Records how many parameters transformers' models have, in data/parameters.json for test_recorded_parameters.py.

Run by hand, with a Python that has torch and transformers: `python tests/unit/kv/weights/recorded_parameters.py`.
The models are small, of sizes that hardly divide one another, so that a mixed-up size shows; torch keeps them on its
meta device.
What a config leaves out is left to its class.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

OUT = Path(__file__).parents[1] / "data" / "parameters.json"
Config = dict[str, Any]

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|layer|blocks)\.(\d+)\.(.+)$")
# Which group a parameter of a layer belongs to, by its name there: the first that is found counts.
_GROUPS = (
    ("norm", r"(norm|ln_?)\w*\.(\d\.)?(weight|bias)$"),
    ("convolution", r"conv1d|conv\.conv\.|_conv\.|_conv1d"),
    ("decay", r"a_log$"),
    ("bias", r"bias$"),
    # Vectors, and scales of single heads or experts.
    ("scalars", r"self_attn\.(a$|dt)|\.d$|sinks|scal|alpha|beta|eps$|shared_expert_gate|residual|token_type"),
    ("streams", r"altup"),
    ("router", r"\.router\.|\.gate\.(weight|wg\.weight)$|\bgate\.weight$|router"),
    ("shared", r"shared_experts?\.|shared_mlp\."),
    ("experts", r"experts?\.|block_sparse_moe\.(input|output)_linear|fc[12]_latent_proj"),
    ("per_layer", r"per_layer|laurel"),
    ("state", r"mamba\.|linear_attn\.|conv\.(in|out)_proj|mixer\.(in|out|x|dt)_proj|^linear\."),
    ("kv", r"(attn|attention|mixer|self)\.(k_proj|v_proj|key|value)\.weight$"),
    ("attention", r"attn|attention|mixer\.(q|o)_proj"),
    ("dense", r"mlp|feed_forward|ffn|fc1|fc2|fc_in|fc_out|dense|intermediate|output|mixer\.(up|down)"),
)  # fmt: skip
_OUTSIDE = (
    ("bias", r"bias$|z_l_init"),
    ("norm", r"norm|ln_f"),
    ("encoder", r"encoder\.(layers|conv|embed)"),
    ("head", r"lm_head|embed_out"),
    ("pooler", r"^pooler"),
    ("streams", r"altup"),
    ("per_layer", r"per_layer"),
    ("positions", r"wpe|position"),
    ("token_types", r"token_type"),
    ("embedding", r"embed|wte"),
)
_CLASSES = {
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"), transformers.AutoModel),
}

_BASE: Config = {
    "vocab_size": 211, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 86, "max_position_embeddings": 97,
}  # fmt: skip
_LATENT: Config = {
    "num_key_value_heads": 6, "q_lora_rank": 22, "kv_lora_rank": 26, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4,
    "v_head_dim": 13,
}  # fmt: skip
_DEEPSEEK: Config = {
    **_LATENT, "n_routed_experts": 4, "n_shared_experts": 3, "moe_intermediate_size": 34, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_SPARSE: Config = {
    **_DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk": 8, "index_head_dim": 18,
    "index_n_heads": 5,
}  # fmt: skip
_DELTA: Config = {
    "head_dim": 14, "linear_conv_kernel_dim": 5, "linear_key_head_dim": 7, "linear_value_head_dim": 9,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA: Config = {
    "mamba_n_heads": 10, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 11, "mamba_d_conv": 5,
    "mamba_expand": 2,
}  # fmt: skip
_GRANITE: Config = {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 46}
_NEMOTRON: Config = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp"], "head_dim": 14, "ssm_state_size": 11,
    "mamba_num_heads": 10, "mamba_head_dim": 12, "n_groups": 2, "conv_kernel": 5, "n_routed_experts": 5,
    "n_shared_experts": 1, "moe_intermediate_size": 34, "moe_shared_expert_intermediate_size": 46,
    "num_experts_per_tok": 2,
}  # fmt: skip
_SSM: Config = {
    "vocab_size": 211, "hidden_size": 60, "state_size": 11, "num_hidden_layers": 3, "expand": 2, "conv_kernel": 5,
}  # fmt: skip
_ZAMBA: Config = {
    **_MAMBA, "num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "hybrid_layer_ids": [1, 3, 4], "num_mem_blocks": 2, "n_mamba_heads": 10, "mamba_headdim": 12, "mamba_ngroups": 2,
    "num_key_value_heads": 6, "attention_head_dim": 20, "attention_hidden_size": 120, "adapter_rank": 16,
}  # fmt: skip
_GPT: Config = {"vocab_size": 211, "n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 97}
_TWO_KINDS = ["sliding_attention", "full_attention", "full_attention"]
# Plain ones: grouped queries, with and without a head size of its own.
_HIDDEN_HEADS = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "glm", "glm4", "granite",
    "granite_swa", "helium", "hyperclovax", "llama", "ministral3", "mistral", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "phi", "phi3", "qwen2", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
_OWN_HEADS = ("gemma", "gemma2", "gemma3_text", "hunyuan_v1_dense", "ministral", "qwen3")
# Every head has K and V.
_ALL_HEADS = ("bert", "biogpt", "gpt_neox", "modernbert", "nomic_bert", "persimmon", "roberta", "xlm-roberta")
_EXPERTS: Config = {"head_dim": 14, "num_experts_per_tok": 2}


def configs() -> dict[str, Config]:
    """The models that are recorded: names, each with what its config.json would say."""
    chosen: dict[str, Config] = {name: {} for name in _HIDDEN_HEADS}
    # Its output matrix takes the width for heads times head size, which are the same in the one that is published.
    chosen["helium"] = {"head_dim": 10}
    chosen |= {name: {"head_dim": 14} for name in _OWN_HEADS}
    chosen |= {name: {"num_key_value_heads": None} for name in _ALL_HEADS}
    chosen |= {
        "llama-tied": {"tie_word_embeddings": True},
        "llama-biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 14},
        "gemma-untied": {"tie_word_embeddings": False, "head_dim": 14},
        "mixtral": {"num_local_experts": 5},
        "phimoe": {"num_local_experts": 5},
        "minimax_m2": {**_EXPERTS, "num_local_experts": 5},
        "gpt_oss": {**_EXPERTS, "num_local_experts": 5},
        "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
        "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 2},
        "granitemoe": {"num_local_experts": 5},
        "granitemoe_swa": {"num_local_experts": 5},
        "granitemoeshared": {"num_local_experts": 5, "shared_intermediate_size": 46},
        "aria_text": {"moe_num_experts": 5, "moe_num_shared_experts": 3},
        "afmoe": {
            **_EXPERTS, "num_experts": 5, "num_shared_experts": 3, "moe_intermediate_size": 34, "num_dense_layers": 1
        },
        "cohere2_moe": {**_EXPERTS, "num_experts": 5, "num_shared_experts": 3},
        "ernie4_5_moe": {
            "moe_num_experts": 5, "moe_num_shared_experts": 3, "moe_intermediate_size": 34, "moe_layer_start_index": 1,
            "moe_layer_end_index": 1, "moe_k": 2,
        },
        "exaone_moe": {
            "num_experts": 5, "num_shared_experts": 3, "moe_intermediate_size": 34, "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
        "hunyuan_v1_moe": {"head_dim": 14, "num_experts": 5, "moe_topk": 2, "num_shared_expert": [1, 1, 1]},
        "hy_v3": {
            **_EXPERTS, "num_experts": 5, "num_shared_experts": 3, "moe_intermediate_size": 34,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "laguna": {
            **_EXPERTS, "num_experts": 5, "moe_intermediate_size": 34, "shared_expert_intermediate_size": 46,
            "num_attention_heads_per_layer": [6, 9, 6],
        },
        "glm4_moe": {
            **_EXPERTS, "n_routed_experts": 5, "n_shared_experts": 3, "moe_intermediate_size": 34,
            "first_k_dense_replace": 2,
        },
        # transformers has twice the KV heads in sliding layers, whatever their number; vLLM reads it.
        "mimo_v2_flash": {
            **_EXPERTS, "v_head_dim": 10, "swa_v_head_dim": 10, "swa_num_key_value_heads": 6,
            "layer_types": _TWO_KINDS, "n_routed_experts": 5, "moe_intermediate_size": 34,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "qwen2_moe": {
            "num_experts": 5, "moe_intermediate_size": 34, "shared_expert_intermediate_size": 46, "mlp_only_layers": [1]
        },
        "qwen3_moe": {**_EXPERTS, "num_experts": 5, "moe_intermediate_size": 34, "decoder_sparse_step": 2},
        "llama4_text": {
            "head_dim": 14, "intermediate_size": 34, "intermediate_size_mlp": 86, "num_local_experts": 5,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 64,
        },
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v2-whole-query": {**_DEEPSEEK, "q_lora_rank": None},
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v32": _SPARSE,
        "axk1": _DEEPSEEK,
        "glm4_moe_lite": {**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "glm_moe_dsa": _SPARSE,
        # transformers gives experts that do nothing matrices as well; vLLM does not (longcat_flash.py).
        "longcat_flash": {
            **_LATENT, "num_hidden_layers": None, "intermediate_size": None, "num_layers": 3, "ffn_hidden_size": 86,
            "n_routed_experts": 4, "zero_expert_num": 0, "expert_ffn_hidden_size": 34, "moe_topk": 2,
        },
        "minicpm3": _LATENT,
        "kimi_linear": {
            **_LATENT, "q_lora_rank": None, "max_position_embeddings": None, "num_experts": 4, "num_shared_experts": 3,
            "moe_intermediate_size": 34, "num_experts_per_token": 2, "first_k_dense_replace": 1,
            "linear_attn_config": {
                "kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 5, "head_dim": 8,
                "short_conv_kernel_size": 5,
            },
        },
        "qwen3_next": {
            **_DELTA, "num_experts": 5, "moe_intermediate_size": 34, "shared_expert_intermediate_size": 46
        },
        "qwen3_5_text": _DELTA,
        "qwen3_5_moe_text": {
            **_DELTA, "intermediate_size": None, "num_experts": 5, "moe_intermediate_size": 34,
            "shared_expert_intermediate_size": 46,
        },
        "olmo_hybrid": {**_DELTA, "head_dim": None, "linear_num_key_heads": 6, "linear_num_value_heads": 6},
        "bamba": {**_MAMBA, "attn_layer_indices": [1]},
        "falcon_h1": {**_MAMBA, "head_dim": 14, "mamba_d_ssm": 120},
        "granitemoehybrid": {**_GRANITE, "num_local_experts": 5},
        "granitemoehybrid-dense": {**_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0},
        "jamba": {
            "num_experts": 5, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 3,
            "attn_layer_offset": 1, "mamba_d_state": 11, "mamba_d_conv": 5, "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        "nemotron_h": {**_NEMOTRON, "num_hidden_layers": None},
        "nemotron_h-latent": {**_NEMOTRON, "num_hidden_layers": None, "moe_latent_size": 28},
        "zamba2": _ZAMBA,
        "zamba2-adapters": {**_ZAMBA, "use_shared_attention_adapter": True},
        "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5, "block_multiple_of": 16},
        "lfm2-as-is": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        "lfm2_moe": {
            "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5, "num_experts": 5,
            "num_dense_layers": 1, "moe_intermediate_size": 34,
        },
        "gemma3n_text": {
            "head_dim": 14, "intermediate_size": [86, 86, 86], "hidden_size_per_layer_input": 12, "laurel_rank": 5,
            "altup_num_inputs": 3, "vocab_size_per_layer_input": 199, "num_kv_shared_layers": 1,
            "layer_types": _TWO_KINDS, "activation_sparsity_pattern": [0.0, 0.0, 0.0],
        },
        "gemma4_text": {
            "head_dim": 14, "global_head_dim": 18, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 199, "use_double_wide_mlp": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
        },
        "gemma4_text-experts": {
            "head_dim": 14, "global_head_dim": 18, "hidden_size_per_layer_input": 0, "num_experts": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "enable_moe_block": True,
            "top_k_experts": 2, "moe_intermediate_size": 34,
        },
        "hrm_text": {
            "num_key_value_heads": None, "num_hidden_layers": 2, "num_layers_per_stack": 2, "H_cycles": 2,
            "L_cycles": 3, "head_dim": 10,
        },
    }  # fmt: skip
    found = {name: {"model_type": name.partition("-")[0], **_BASE, **own} for name, own in chosen.items()}
    found["xlm-roberta"]["model_type"] = "xlm-roberta"
    found |= {
        "mamba": {"model_type": "mamba", **_SSM, "time_step_rank": 8},
        "falcon_mamba": {"model_type": "falcon_mamba", **_SSM, "time_step_rank": 8},
        "mamba-auto": {"model_type": "mamba", **_SSM, "time_step_rank": "auto"},
        "mamba2": {"model_type": "mamba2", **_SSM, "num_heads": 10, "head_dim": 12, "n_groups": 2},
        "gpt2": {"model_type": "gpt2", **_GPT},
        "gpt2-inner": {"model_type": "gpt2", **_GPT, "n_inner": 86},
        "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT, "multi_query": True},
        "gptj": {"model_type": "gptj", **_GPT, "rotary_dim": 4},
        "codegen": {"model_type": "codegen", **_GPT, "n_head": 4, "rotary_dim": 4},
        "gpt_neo": {
            "model_type": "gpt_neo", "vocab_size": 211, "hidden_size": 60, "num_layers": 2, "num_heads": 6,
            "max_position_embeddings": 97, "attention_types": [[["global", "local"], 1]],
        },
        "bloom": {"model_type": "bloom", "vocab_size": 211, "hidden_size": 60, "n_layer": 3, "n_head": 6},
        "falcon": {
            "model_type": "falcon", "vocab_size": 211, "hidden_size": 60, "num_hidden_layers": 3,
            "num_attention_heads": 6,
        },
        "falcon-new": {
            "model_type": "falcon", "vocab_size": 211, "hidden_size": 60, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_kv_heads": 3, "new_decoder_architecture": True, "ffn_hidden_size": 86,
        },
        "opt": {
            "model_type": "opt", "vocab_size": 211, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6,
            "ffn_dim": 86, "max_position_embeddings": 97, "word_embed_proj_dim": 60,
        },
        "dbrx": {
            "model_type": "dbrx", "vocab_size": 211, "d_model": 60, "n_heads": 6, "n_layers": 3, "max_seq_len": 97,
            "attn_config": {"kv_n_heads": 3, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 34, "moe_num_experts": 5, "moe_top_k": 2},
        },
        "whisper": {
            "model_type": "whisper", "vocab_size": 211, "d_model": 60, "encoder_layers": 2,
            "encoder_attention_heads": 6, "decoder_layers": 3, "decoder_attention_heads": 6, "decoder_ffn_dim": 86,
            "encoder_ffn_dim": 74, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 40,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        },
    }  # fmt: skip
    return {
        # A latent query may be null; elsewhere that stands for a field that the model does not have.
        name: {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
        for name, config in found.items()
    }


def recorded(config: Config) -> dict[str, Any]:
    """The groups of one model: outside its layers, and in each of them."""
    # Some classes' own padding token lies beyond so small a vocabulary.
    fields = {"pad_token_id": 0} | {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(config["model_type"], **fields)
        model = _CLASSES.get(config["model_type"], transformers.AutoModelForCausalLM).from_config(made)
    outside: Counter[str] = Counter()
    layers: dict[tuple[str, int], Counter[str]] = {}
    for name, parameter in model.named_parameters():
        found = _LAYER.search(name)
        if name.startswith("pooler") or "model.encoder." in name or found is None:
            outside[_group(_OUTSIDE, name)] += parameter.numel()
        else:
            place = (name[: found.start(1)], int(found.group(1)))
            layers.setdefault(place, Counter())[_group(_GROUPS, found.group(2))] += parameter.numel()
    return {"outside": dict(outside), "layers": [dict(layers[place]) for place in sorted(layers)]}


def _group(groups: tuple[tuple[str, str], ...], name: str) -> str:
    group = next((group for group, expression in groups if re.search(expression, name.lower())), None)
    if group is None:
        raise ValueError(f"{name} belongs to no group")
    return group


def main() -> None:
    """Records every model."""
    transformers.logging.set_verbosity_error()
    models = {name: {"config": config, **recorded(config)} for name, config in configs().items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(model)}" for name, model in models.items()]
    versions = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    OUT.write_text(f'{{"versions": {versions}, "models": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
