"""GGUF headers: what is read, and what is refused."""

import struct
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.pools.gguf_header import CutShortError, parse_gguf_header, row_bytes
from kvdiag.kv.pools.gguf_layers import cells_of_gguf
from tests.unit.sources.gguf_files import SETTINGS, TENSORS, gguf


def test_what_a_header_says() -> None:
    """Settings, lengths of lists, bytes of tensors by name and by number format."""
    header = parse_gguf_header(gguf())

    assert header.values["gemma3.attention.head_count_kv"] == [2] * 12
    assert header.lengths == {"gemma3.attention.head_count_kv": 12, "tokenizer.ggml.tokens": 3}
    assert header.tensor_bytes == {
        "token_embd.weight": 256 * 384 * 2,
        "blk.0.attn_q.weight": 256 * 256 * 34 // 32,
        "output.weight": 1024,
    }
    assert header.formats == {"f16": 256 * 384 * 2, "q8_0": 256 * 256 * 34 // 32, "f32": 1024}


def test_every_cut_is_cut_short() -> None:
    """A header without its end is not an error of the file: more of it may come."""
    whole = gguf()

    for length in range(24, len(whole)):
        with pytest.raises(CutShortError):
            parse_gguf_header(whole[:length])


@pytest.mark.parametrize(
    "content",
    [
        b"GGML" + bytes(40),
        gguf(version=1),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 40),
        gguf({}, [("a", (1,) * 5, 0)]),
        gguf({}, [("a", (31,), 8)]),
        gguf({}, [("a", (1 << 62, 1 << 62), 0)]),
        gguf({}, [("a", (1,), 99)]),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 13),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQQ", 1, b"a", 9, 8, 5, (1 << 64) - 1) + bytes(40),
        b"GGUF" + struct.pack(">IQQ", 3, 1, 1),
    ],
)
def test_what_is_refused(content: bytes) -> None:
    """Another format, other versions, the other byte order, impossible counts, lengths, shapes and types."""
    with pytest.raises(KvModelError):
        parse_gguf_header(content)


@pytest.mark.parametrize(
    "changed",
    [
        {"general.architecture": "unheard-of"},
        {"general.architecture": "deepseek4"},
        {"gemma3.block_count": 0},
        {"gemma3.block_count": 100_000},
        {"gemma3.attention.head_count_kv": [2]},
        {"gemma3.attention.head_count_kv": [0] * 12},
        {"gemma3.attention.head_count_kv": [2] * 11 + [0]},
        {"gemma3.attention.head_count": 0},
        {"gemma3.attention.sliding_window": "512"},
    ],
)
def test_models_that_are_refused(changed: dict[str, Any]) -> None:
    """An unknown architecture is no plain one, and an impossible setting names itself."""
    with pytest.raises(KvModelError):
        cells_of_gguf(parse_gguf_header(gguf({**SETTINGS, **changed}, TENSORS)))


def test_rows_of_every_format() -> None:
    """Bytes of 64 elements by cache type (ggml.c::type_traits)."""
    sizes = {
        "f32": 256,
        "f16": 128,
        "bf16": 128,
        "q8_0": 68,
        "q5_1": 48,
        "q5_0": 44,
        "q4_1": 40,
        "q4_0": 36,
        "iq4_nl": 36,
    }

    assert sizes == {name: row_bytes(name, 64) for name in sizes}
    with pytest.raises(KvModelError):
        row_bytes("q8_0", 48)
