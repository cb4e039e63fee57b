"""The bytes of LoRA slots, by hand."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.weights.adapter_slots import adapter_slots

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def slots_of(config: dict[str, Any], ranks: int = 1, ends: tuple[int, ...] = (4,)) -> tuple[int, ...]:
    """Three slots of rank 16 in 16 bits."""
    slots = adapter_slots(config, parse_architecture(config), count=3, rank=16, dtype="auto")
    return slots.stage_bytes(ranks, ends)


def test_each_matrix_has_its_slots() -> None:
    """A layer reads or makes the residual's 256 seven times, a query's 256 twice, two KV heads of 32 twice, and 512
    three times; the embedding and the output layer have the vocabulary and the width.
    """
    layer = 7 * 256 + 2 * 256 + 2 * 64 + 3 * 512

    assert ((4 * layer + 2 * 1256) * 3 * 16 * 2,) == slots_of(LLAMA)


def test_ranks_divide_one_matrix_of_each_pair() -> None:
    """Two KV heads are copied to four ranks, one each; embedding and output layer are first and last, and whole."""
    layer = 7 * 256 + 2 * 64 + 2 * 32 + 3 * 128

    assert ((2 * layer + 1256) * 3 * 16 * 2,) * 2 == slots_of(LLAMA, 4, (2, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlavaForConditionalGeneration"]},
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
        {"vocab_size": 300_000},
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any]) -> None:
    """Towers, layers in one piece, and a vocabulary that vLLM refuses."""
    with pytest.raises(KvModelError):
        slots_of(LLAMA | change)
