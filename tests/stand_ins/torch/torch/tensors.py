"""Tensors without data, in blocks that are given out, cut, kept and merged as torch's caching allocator does.

As c10/cuda/CUDACachingAllocator.cpp: the smallest free block that fits, split where enough of it is left; else a
segment of the driver; else the cache is flushed, observers are called and OutOfMemoryError is raised. Expandable
segments are one segment that grows, in pieces once pages of it were given back.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from . import driver
from .world import ACTIVE, FREE, MIB, WORLD, OutOfMemoryError

ROUNDING = 512
SMALL, LARGE = 1 * MIB, 10 * MIB
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB
DEFAULT = (0, 0)
_pool = [DEFAULT]


class Tensor:
    """A block for as long as it lives."""

    def __init__(self, size_bytes: int) -> None:
        """Take the block."""
        self._block = _take(max(-(-size_bytes // ROUNDING), 1) * ROUNDING)

    def __del__(self) -> None:
        # A tensor that found no room has no block.
        if hasattr(self, "_block"):
            _give(self._block)

    def add_(self, other: float) -> Tensor:
        """A kernel that does nothing."""
        return self


def empty(size_bytes: int, *, dtype: Any = None, device: str = "cpu") -> Tensor:
    """A tensor of bytes on the GPU."""
    if not WORLD.initialised:
        WORLD.initialised = True
        driver.show()
    return Tensor(size_bytes)


class graph:  # noqa: N801 - torch's name
    """While a CUDA graph is captured, blocks come from a pool of its own."""

    def __init__(self, cuda_graph: object) -> None:
        """Capture nothing yet."""

    def __enter__(self) -> None:
        _pool.append((0, len(_pool)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _pool.append(DEFAULT)


class CUDAGraph:
    """A graph that does nothing."""

    def replay(self) -> None:
        """Do nothing."""


def _take(size: int) -> dict[str, Any]:
    large = size > SMALL
    found = _fitting(size, large=large) or _from_driver(size, large=large)
    if found is None:
        _flush()
        WORLD.retries += 1
        found = _from_driver(size, large=large)
    if found is None:
        WORLD.ooms += 1
        for observer in WORLD.observers:
            observer(0, size, WORLD.total_bytes, driver.free_bytes())
        raise OutOfMemoryError(_message(size))
    segment, block = found
    _cut(segment, block, size, least=SMALL if large else ROUNDING - 1)
    block["state"] = ACTIVE
    block["frames"] = WORLD.frames()
    driver.show()
    return block


def _fitting(size: int, *, large: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    kind = "large" if large else "small"
    fits = [
        (segment, block)
        for segment in WORLD.segments
        if segment["segment_type"] == kind and segment["segment_pool_id"] == _pool[-1]
        for block in segment["blocks"]
        if block["state"] == FREE and block["size"] >= size
    ]
    return min(fits, key=lambda each: each[1]["size"], default=None)


def _from_driver(size: int, *, large: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    page = LARGE_PAGE if large else SMALL_PAGE
    total = -(-size // page) * page if size < LARGE or WORLD.expandable else -(-size // SMALL_PAGE) * SMALL_PAGE
    if total > driver.free_bytes():
        return None
    grown = [
        each
        for each in WORLD.segments
        if each["is_expandable"] and (each["segment_type"] == "large") == large and each["segment_pool_id"] == _pool[-1]
    ]
    if grown:
        segment = grown[-1]
        segment["total_size"] += total
        segment["blocks"].append(_block(total))
        return segment, segment["blocks"][-1]
    WORLD.segment((total, FREE), pool=_pool[-1], large=large, expandable=WORLD.expandable)
    return WORLD.segments[-1], WORLD.segments[-1]["blocks"][0]


def _cut(segment: dict[str, Any], block: dict[str, Any], size: int, *, least: int) -> None:
    rest = block["size"] - size
    if rest > least:
        block["size"] = size
        segment["blocks"].insert(_place(segment, block) + 1, _block(rest))


def _give(block: dict[str, Any]) -> None:
    segment = next(each for each in WORLD.segments if any(one is block for one in each["blocks"]))
    block["state"] = FREE
    place = _place(segment, block)
    blocks = segment["blocks"]
    for first in (place, place - 1):
        if 0 <= first < len(blocks) - 1 and blocks[first]["state"] == blocks[first + 1]["state"] == FREE:
            blocks[first]["size"] += blocks.pop(first + 1)["size"]


def _flush() -> None:
    """Give the driver back what it can have: whole segments, and whole pages of those that expand."""
    kept = []
    for segment in WORLD.segments:
        if segment["is_expandable"]:
            kept += _without_free_pages(segment)
        elif any(block["state"] != FREE for block in segment["blocks"]):
            kept.append(segment)
    WORLD.segments = kept
    driver.show()


def _without_free_pages(segment: dict[str, Any]) -> list[dict[str, Any]]:
    page = LARGE_PAGE if segment["segment_type"] == "large" else SMALL_PAGE
    parts: list[list[dict[str, Any]]] = [[]]
    offset = 0
    for block in segment["blocks"]:
        first, last = -(-offset // page), (offset + block["size"]) // page
        if block["state"] == FREE and last > first:
            end = offset + block["size"]
            parts[-1] += [_block(first * page - offset)] if first * page > offset else []
            parts.append([_block(end - last * page)] if end > last * page else [])
        else:
            parts[-1].append(block)
        offset += block["size"]
    return [
        {**segment, "blocks": blocks, "total_size": sum(block["size"] for block in blocks)}
        for blocks in parts
        if blocks
    ]


def _place(segment: dict[str, Any], block: dict[str, Any]) -> int:
    return next(place for place, each in enumerate(segment["blocks"]) if each is block)


def _block(size: int) -> dict[str, Any]:
    return {"address": 0, "size": size, "requested_size": size, "state": FREE, "frames": []}


def _message(size: int) -> str:
    held = [(block["size"], block["state"]) for segment in WORLD.segments for block in segment["blocks"]]
    live = sum(size for size, state in held if state == ACTIVE)
    unused = sum(size for size, state in held if state != ACTIVE)
    return (
        f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU 0 has a total capacity of "
        f"{WORLD.total_bytes / MIB:.2f} MiB of which {driver.free_bytes() / MIB:.2f} MiB is free. Of the allocated "
        f"memory {live / MIB:.2f} MiB is allocated by PyTorch, and {unused / MIB:.2f} MiB is reserved by PyTorch but "
        "unallocated."
    )
