"""Tiny random models, one for each kind of KV cache. Runs in vLLM's own Python: `ENV/bin/python tiny_models.py FOLDER`.

Each is as small as the CPU kernels take it: a few layers, a byte-level tokenizer, a vocabulary of 1,024.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

VOCABULARY_TOKENS = 1024
BOS, EOS = 0, 1
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
GROUPED_QUERY: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}
SLIDING_WINDOW_TOKENS = 1024


MODELS: dict[str, PreTrainedConfig] = {
    # Full attention in every layer: 2 x 4 layers x 2 heads x 64 x 2 bytes = 2,048 bytes a token.
    "llama": LlamaConfig(**COMMON, **GROUPED_QUERY, num_hidden_layers=4),
    # A sliding window in every layer.
    "mistral-sliding": MistralConfig(
        **COMMON, **GROUPED_QUERY, num_hidden_layers=4, sliding_window=SLIDING_WINDOW_TOKENS
    ),
    # Five sliding layers to one full layer.
    "gemma3": Gemma3TextConfig(
        **COMMON, **GROUPED_QUERY, num_hidden_layers=6, sliding_window=SLIDING_WINDOW_TOKENS, query_pre_attn_scalar=64
    ),
    # Multi-head latent attention, as DeepSeek V2; the CPU kernel takes no other head size than 512 + 64. Dense layers
    # only: experts add nothing to the KV cache.
    "mla": DeepseekV2Config(
        **COMMON,
        num_hidden_layers=2,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
    ),
}


def write_model(config: PreTrainedConfig, folder: Path) -> None:
    """Random weights, always the same ones, with config and tokenizer as a checkpoint has them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """One token a byte; the rest of the vocabulary is never produced by a text."""
    vocabulary = {"<s>": BOS, "</s>": EOS}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    while len(vocabulary) < VOCABULARY_TOKENS:
        vocabulary[f"<x{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    for name, config in MODELS.items():
        write_model(config, Path(sys.argv[1]) / name)
