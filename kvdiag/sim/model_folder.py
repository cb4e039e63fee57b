"""The simulated server's model: its shape, its size, and its folder on disk, where the weights are a sparse file."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BFLOAT16_BYTES = 2
SAFETENSORS_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header, little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Llama-like decoder in bfloat16 with tied embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def kv_elements_per_token_per_layer(self) -> int:
        """Numbers in key and value of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, as a Hugging Face checkpoint has them."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.self_attn.q_proj.weight", (query, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (key, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (key, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, query)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)

    def write(self, folder: Path, *, max_positions: int) -> None:
        """Write config.json and model.safetensors; the latter has its true size and header, and no data blocks."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in self.tensors():
            start, end = end, end + math.prod(shape) * BFLOAT16_BYTES
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as weights:
            weights.write(len(text).to_bytes(SAFETENSORS_LENGTH_BYTES, "little") + text)
            weights.truncate(SAFETENSORS_LENGTH_BYTES + len(text) + end)
