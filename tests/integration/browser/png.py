"""A browser's picture as rows of pixels: PNG of eight bits a channel, without interlacing, by the standard library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

Pixel = tuple[int, int, int]

SIGNATURE_BYTES = 8


def pixels(picture: bytes) -> list[list[Pixel]]:
    """Red, green and blue of each pixel, row by row (PNG specification, 9.2: filters)."""
    width, height, channels, data = _unpacked(picture)
    stride = width * channels
    above = bytearray(stride)
    rows = []
    for row in range(height):
        start = row * (stride + 1)
        line = bytearray(data[start + 1 : start + 1 + stride])
        _restore(data[start], line, above, channels)
        rows.append([(line[at], line[at + 1], line[at + 2]) for at in range(0, stride, channels)])
        above = line
    return rows


def _unpacked(picture: bytes) -> tuple[int, int, int, bytes]:
    chunks = dict(_chunks(picture))
    width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (8, 0) == (depth, interlaced)
    return width, height, {2: 3, 6: 4}[color], zlib.decompress(chunks[b"IDAT"])


def _chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = SIGNATURE_BYTES
    data = b""
    while at < len(picture):
        length, kind = struct.unpack(">I4s", picture[at : at + 8])
        body = picture[at + 8 : at + 8 + length]
        data += body if kind == b"IDAT" else b""
        yield (kind, data if kind == b"IDAT" else body)
        at += length + 12


def _restore(kind: int, line: bytearray, above: bytearray, channels: int) -> None:
    for at in range(len(line)):
        left = line[at - channels] if at >= channels else 0
        up = above[at]
        corner = above[at - channels] if at >= channels else 0
        line[at] = (line[at] + _predicted(kind, left, up, corner)) & 0xFF


def _predicted(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 4:
        guess = left + up - corner
        return min((left, up, corner), key=lambda one: abs(guess - one))
    return (0, left, up, (left + up) // 2)[kind]
