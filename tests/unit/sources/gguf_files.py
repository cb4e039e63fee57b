"""GGUF files written by hand: a header, and no weights."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

SETTINGS: Mapping[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 12,
    "gemma3.context_length": 32_768,
    "gemma3.embedding_length": 256,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": [2] * 12,
    "gemma3.attention.key_length": 64,
    "gemma3.attention.value_length": 64,
    "gemma3.attention.sliding_window": 512,
    "tokenizer.ggml.tokens": ["a", "bc", ""],
}
TENSORS = (("token_embd.weight", (256, 384), 1), ("blk.0.attn_q.weight", (256, 256), 8), ("output.weight", (256,), 0))
_TEXT, _ARRAY, _WHOLE = 8, 9, 4


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, list):
        kind = _TEXT if isinstance(value[0], str) else _WHOLE
        items = b"".join(_text(one) if kind == _TEXT else struct.pack("<I", one) for one in value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    return struct.pack("<II", _WHOLE, value)


def gguf(
    settings: Mapping[str, Any] = SETTINGS,
    tensors: Sequence[tuple[str, Sequence[int], int]] = TENSORS,
    *,
    version: int = 3,
) -> bytes:
    """A GGUF header with these settings and tensors (name, shape, number format)."""
    content = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(settings))
    content += b"".join(_text(key) + _value(value) for key, value in settings.items())
    for name, shape, kind in tensors:
        content += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, 0)
    return content
