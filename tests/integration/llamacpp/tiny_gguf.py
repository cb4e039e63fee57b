"""Writes tiny random GGUF models of five architectures, with a vocabulary of words and bytes, by PyPI's `gguf` alone.

`tiny_gguf.py FOLDER` writes one file for each: llama (full attention), gemma3 (sliding windows), lfm2 (short
convolutions and attention), mamba (states alone), deepseek2 (latent attention).
"""

import sys
from pathlib import Path

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter, TokenType

LAYERS, EMBD, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2, 64, 2, 1, 32, 64
VOCABULARY, TRAINED, WINDOW = 640, 32768, 64
KV_LORA, ROPE, Q_LORA = 32, 16, 32
STATE, INNER, KERNEL = 8, 128, 4


class Model:
    """One file being written."""

    def __init__(self, folder: Path, arch: str, *, layers: int = LAYERS) -> None:
        """Write the vocabulary and what every architecture has."""
        self.writer = writer = GGUFWriter(str(folder / f"{arch}.gguf"), arch)
        self.layers = layers
        self._random = np.random.default_rng(0)
        writer.add_name(f"tiny-{arch}")
        writer.add_file_type(1)
        writer.add_vocab_size(VOCABULARY)
        writer.add_context_length(TRAINED)
        writer.add_embedding_length(EMBD)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(FEED_FORWARD)
        # A vocabulary of SentencePiece's kind: special tokens, bytes, and words of ASCII letters.
        tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
        kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
        words = [chr(97 + letter) for letter in range(26)]
        words += [f"\u2581{one}{two}" for one in "bcdfghklmnpqrstv" for two in words]
        tokens += [word.encode() for word in words[: VOCABULARY - len(tokens)]]
        kinds += [TokenType.NORMAL] * (VOCABULARY - len(kinds))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * VOCABULARY)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(False)
        self.matrix("token_embd.weight", VOCABULARY, EMBD)

    def matrix(self, name: str, *shape: int) -> None:
        """A tensor of small random numbers."""
        exact = len(shape) == 1 or "ssm" in name or "conv" in name
        kind = np.float32 if exact else np.float16
        self.writer.add_tensor(name, (self._random.standard_normal(shape) * 0.02).astype(kind))

    def ones(self, *names: str, size: int = EMBD) -> None:
        """Norms that leave everything as it is."""
        for name in names:
            self.writer.add_tensor(name, np.ones(size, np.float32))

    def attention(self, block: str) -> None:
        """Queries, keys, values and output of one layer."""
        self.matrix(f"{block}.attn_q.weight", HEADS * HEAD_DIM, EMBD)
        self.matrix(f"{block}.attn_k.weight", KV_HEADS * HEAD_DIM, EMBD)
        self.matrix(f"{block}.attn_v.weight", KV_HEADS * HEAD_DIM, EMBD)
        self.matrix(f"{block}.attn_output.weight", EMBD, HEADS * HEAD_DIM)

    def feed_forward(self, block: str) -> None:
        """The feed-forward part of one layer."""
        self.ones(f"{block}.ffn_norm.weight")
        self.matrix(f"{block}.ffn_gate.weight", FEED_FORWARD, EMBD)
        self.matrix(f"{block}.ffn_up.weight", FEED_FORWARD, EMBD)
        self.matrix(f"{block}.ffn_down.weight", EMBD, FEED_FORWARD)

    def heads(self, kv_heads: int | list[int] = KV_HEADS) -> None:
        """The numbers of attention."""
        self.writer.add_head_count(HEADS)
        self.writer.add_head_count_kv(kv_heads)
        self.writer.add_layer_norm_rms_eps(1e-6)

    def close(self) -> None:
        """Write all of it."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _llama(folder: Path) -> None:
    model = Model(folder, "llama")
    model.heads()
    model.writer.add_key_length(HEAD_DIM)
    model.writer.add_value_length(HEAD_DIM)
    model.writer.add_rope_dimension_count(HEAD_DIM)
    model.ones("output_norm.weight")
    model.matrix("output.weight", VOCABULARY, EMBD)
    for layer in range(model.layers):
        block = f"blk.{layer}"
        model.ones(f"{block}.attn_norm.weight")
        model.attention(block)
        model.feed_forward(block)
    model.close()


def _gemma3(folder: Path) -> None:
    """Every sixth layer is full, the others have a window."""
    model = Model(folder, "gemma3", layers=6)
    model.heads()
    model.writer.add_key_length(HEAD_DIM)
    model.writer.add_value_length(HEAD_DIM)
    model.writer.add_sliding_window(WINDOW)
    model.writer.add_rope_freq_base(1e6)
    model.ones("output_norm.weight")
    for layer in range(model.layers):
        block = f"blk.{layer}"
        model.ones(f"{block}.attn_norm.weight", f"{block}.post_attention_norm.weight", f"{block}.post_ffw_norm.weight")
        model.ones(f"{block}.attn_q_norm.weight", f"{block}.attn_k_norm.weight", size=HEAD_DIM)
        model.attention(block)
        model.feed_forward(block)
    model.close()


def _lfm2(folder: Path) -> None:
    """Every second layer attends, the others keep a short convolution's state."""
    model = Model(folder, "lfm2")
    model.heads([KV_HEADS if layer % 2 else 0 for layer in range(model.layers)])
    model.writer.add_shortconv_l_cache(3)
    model.ones("token_embd_norm.weight")
    for layer in range(model.layers):
        block = f"blk.{layer}"
        model.ones(f"{block}.attn_norm.weight")
        if layer % 2:
            model.attention(block)
            model.ones(f"{block}.attn_q_norm.weight", f"{block}.attn_k_norm.weight", size=HEAD_DIM)
        else:
            model.matrix(f"{block}.shortconv.conv.weight", EMBD, 3)
            model.matrix(f"{block}.shortconv.in_proj.weight", 3 * EMBD, EMBD)
            model.matrix(f"{block}.shortconv.out_proj.weight", EMBD, EMBD)
        model.feed_forward(block)
    model.close()


def _mamba(folder: Path) -> None:
    model = Model(folder, "mamba")
    writer, rank = model.writer, EMBD // 16
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    model.ones("output_norm.weight")
    for layer in range(model.layers):
        block = f"blk.{layer}"
        model.ones(f"{block}.attn_norm.weight")
        model.matrix(f"{block}.ssm_in.weight", 2 * INNER, EMBD)
        model.matrix(f"{block}.ssm_conv1d.weight", INNER, KERNEL)
        model.matrix(f"{block}.ssm_conv1d.bias", INNER)
        model.matrix(f"{block}.ssm_x.weight", rank + 2 * STATE, INNER)
        model.matrix(f"{block}.ssm_dt.weight", INNER, rank)
        model.matrix(f"{block}.ssm_dt.bias", INNER)
        writer.add_tensor(f"{block}.ssm_a", -np.ones((INNER, STATE), np.float32))
        model.ones(f"{block}.ssm_d", size=INNER)
        model.matrix(f"{block}.ssm_out.weight", EMBD, INNER)
    model.close()


def _deepseek2(folder: Path) -> None:
    model = Model(folder, "deepseek2")
    writer = model.writer
    model.heads(1)
    writer.add_key_length(KV_LORA + ROPE)
    writer.add_value_length(KV_LORA)
    writer.add_key_length_mla(HEAD_DIM + ROPE)
    writer.add_value_length_mla(HEAD_DIM)
    writer.add_kv_lora_rank(KV_LORA)
    writer.add_q_lora_rank(Q_LORA)
    writer.add_rope_dimension_count(ROPE)
    writer.add_leading_dense_block_count(model.layers)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(FEED_FORWARD)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX)
    model.ones("output_norm.weight")
    model.matrix("output.weight", VOCABULARY, EMBD)
    for layer in range(model.layers):
        block = f"blk.{layer}"
        model.ones(f"{block}.attn_norm.weight")
        model.matrix(f"{block}.attn_q_a.weight", Q_LORA, EMBD)
        model.ones(f"{block}.attn_q_a_norm.weight", size=Q_LORA)
        model.matrix(f"{block}.attn_q_b.weight", HEADS * (HEAD_DIM + ROPE), Q_LORA)
        model.matrix(f"{block}.attn_kv_a_mqa.weight", KV_LORA + ROPE, EMBD)
        model.ones(f"{block}.attn_kv_a_norm.weight", size=KV_LORA)
        model.matrix(f"{block}.attn_k_b.weight", HEADS, KV_LORA, HEAD_DIM)
        model.matrix(f"{block}.attn_v_b.weight", HEADS, HEAD_DIM, KV_LORA)
        model.matrix(f"{block}.attn_output.weight", EMBD, HEADS * HEAD_DIM)
        model.feed_forward(block)
    model.close()


ARCHITECTURES = {"llama": _llama, "gemma3": _gemma3, "lfm2": _lfm2, "mamba": _mamba, "deepseek2": _deepseek2}

if __name__ == "__main__":
    for write in ARCHITECTURES.values():
        write(Path(sys.argv[1]))
