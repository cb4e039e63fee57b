"""Reads the header of a GGUF file: settings, and the size of every tensor. Weights are never read.

The format is that of ggml docs/gguf.md, versions 2 and 3, little-endian: magic, version, counts, key-value pairs,
tensor descriptions. The header may come from anyone: counts, lengths and types are checked before they are used. A
header of which the end is missing is `CutShortError`, so that a reader of files can fetch more.
"""

import json
import pkgutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS, _MAX_TEXT, _MAX_DIMENSIONS = 1 << 16, 1 << 18, 1 << 24, 1 << 24, 4
_MAX_KEPT_ITEMS = 1 << 16
"""Of all lists of numbers; longer ones belong to the vocabulary, and only their length is kept."""

_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, struct.Struct] = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    int(number): (name, elements, size)
    for number, (name, elements, size) in json.loads(pkgutil.get_data(__package__, "ggml_types.json") or b"").items()
}
"""Name, elements and bytes of a block of each number format (ggml.c::type_traits)."""

BLOCKS: Mapping[str, tuple[int, int]] = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}


class CutShortError(Exception):
    """The bytes end before the header does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """One file's settings, lengths of its long lists, and the bytes of its tensors by name."""

    values: Mapping[str, Any]
    lengths: Mapping[str, int]
    tensor_bytes: Mapping[str, int]
    formats: Mapping[str, int]
    """Bytes of tensors by number format."""


def row_bytes(name: str, elements: int) -> int:
    """Bytes of a row of so many elements (ggml.c::ggml_row_size).

    Raises:
        KvModelError: the format is unknown, or its blocks do not divide the row.
    """
    if name not in BLOCKS:
        raise KvModelError(f"unknown number format {name[:40]!a}: pass one of f16, q8_0, q4_0", "kv_dtype")
    block, size = BLOCKS[name]
    if elements % block:
        raise KvModelError(f"{name} needs rows of a multiple of {block} elements, not {elements}", "kv_dtype")
    return elements // block * size


def parse_gguf_header(content: bytes) -> GgufHeader:
    """The header at the start of a GGUF file.

    Raises:
        CutShortError: `content` ends before the header.
        KvModelError: it is no GGUF file, or one that cannot be used.
    """
    try:
        return _parse(content)
    except struct.error:
        raise CutShortError from None


def _parse(content: bytes) -> GgufHeader:
    if content[:4] != MAGIC:
        raise KvModelError("not a GGUF file", "gguf")
    version, tensors, keys = struct.unpack_from("<IQQ", content, 4)
    if version not in _VERSIONS:
        raise KvModelError(f"GGUF version {version} is not supported: only 2 and 3, little-endian", "gguf")
    if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
        raise KvModelError(f"the GGUF header claims {tensors:,} tensors and {keys:,} settings", "gguf")
    reader = _Reader(content, 24)
    values: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for _ in range(keys):
        key = reader.text()
        kind = reader.number(4)
        if kind == _ARRAY:
            kept, lengths[key] = reader.array()
            if kept is not None:
                values[key] = kept
        else:
            values[key] = reader.value(kind)
    sizes: dict[str, int] = {}
    formats: dict[str, int] = {}
    for _ in range(tensors):
        name, size, kind_name = reader.tensor()
        sizes[name] = sizes.get(name, 0) + size
        formats[kind_name] = formats.get(kind_name, 0) + size
    return GgufHeader(values=values, lengths=lengths, tensor_bytes=sizes, formats=formats)


class _Reader:
    """A position in the bytes of a header; struct.error at their end."""

    def __init__(self, content: bytes, position: int) -> None:
        self._content = content
        self._position = position
        self._items_left = _MAX_KEPT_ITEMS

    def number(self, kind: int) -> Any:
        packed = _NUMBERS[kind]
        (value,) = packed.unpack_from(self._content, self._position)
        self._position += packed.size
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _NUMBERS:
            raise KvModelError(f"the GGUF header has a value of unknown type {kind}", "gguf")
        return self.number(kind)

    def text(self) -> str:
        length = self._length(_MAX_TEXT)
        start = self._position
        self._skip(length)
        return self._content[start : start + length].decode("utf-8", "replace")

    def array(self) -> tuple[list[Any] | None, int]:
        """A list's entries, None for what is long or text; and its length."""
        kind = self.number(4)
        length = self._length(_MAX_ITEMS)
        if kind == _STRING:
            self._skip_texts(length)
            return None, length
        if kind not in _NUMBERS:
            raise KvModelError(f"the GGUF header has a list of unknown type {kind}", "gguf")
        start, packed = self._position, _NUMBERS[kind]
        self._skip(length * packed.size)
        if length > self._items_left:
            return None, length
        self._items_left -= length
        return [one for (one,) in packed.iter_unpack(self._content[start : self._position])], length

    def tensor(self) -> tuple[str, int, str]:
        """A tensor's name, bytes and number format."""
        name = self.text()
        dimensions = self.number(4)
        if dimensions > _MAX_DIMENSIONS:
            raise KvModelError(f"tensor {name[:80]!a} has {dimensions} dimensions", "gguf")
        shape = [self.number(10) for _ in range(dimensions)]
        kind = self.number(4)
        self.number(10)
        if kind not in TENSOR_TYPES:
            raise KvModelError(f"tensor {name[:80]!a} has the unknown number format {kind}", "gguf")
        format_name, block, size = TENSOR_TYPES[kind]
        stored = prod(shape) // block * size
        if stored > MAX_BYTES or prod(shape) % block:
            raise KvModelError(f"tensor {name[:80]!a} has the impossible shape {shape}", "gguf")
        return name, stored, format_name

    def _length(self, most: int) -> int:
        return self._checked(self.number(10), most)

    @staticmethod
    def _checked(length: int, most: int) -> int:
        if length > most:
            raise KvModelError(f"the GGUF header has a text or list of {length:,} entries", "gguf")
        return length

    def _skip(self, length: int) -> None:
        self._position += length
        if self._position > len(self._content):
            raise CutShortError

    def _skip_texts(self, count: int) -> None:
        """Past the strings of a vocabulary, of which there are hundreds of thousands."""
        content, position = self._content, self._position
        unpack = _NUMBERS[10].unpack_from
        for _ in range(count):
            (length,) = unpack(content, position)
            position += 8 + self._checked(length, _MAX_TEXT)
        self._position = position
        self._skip(0)
