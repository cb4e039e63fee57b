"""Why reserved bytes are not live, from the allocator's segments and blocks. Pure.

    reserved = live + pending + private + releasable + stranded

pending: freed, but another stream may still use it. private: free in a private pool (CUDA graphs), unusable for others.
releasable: whole pages that the allocator can return to the driver. stranded: free blocks between live ones, usable
only by requests that fit into one of them.

Input as from `torch.cuda.memory_snapshot()` of torch 2.5 to 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MIB = 2**20
SMALL_PAGE_BYTES = 2 * MIB
LARGE_PAGE_BYTES = 20 * MIB
"""Pages of expandable segments: kSmallBuffer and kLargeBuffer of c10/core/AllocatorConfig.h."""

DRIVER_PAGE_BYTES = 2 * MIB
LARGE_REQUEST_BYTES = 10 * MIB
"""A request of this size gets its own segment, rounded up to 2 MiB; a smaller one takes a whole page."""

SMALL_REQUEST_BYTES = 1 * MIB

PINNED_BYTES = 20 * MIB
PINNED_LIVE_RATIO = 0.05
"""A segment with a smaller live share is called pinned: a few small tensors keep all of it reserved."""

REFERENCE_BYTES = 512 * MIB
"""The request that fragmentation is judged by if none has failed: a large activation."""

MAX_SIZES = 8
LIVE = "active_allocated"
FREE = "inactive"
# The documentation of memory_snapshot writes the second name, the library the first.
PENDING = ("active_pending_free", "active_awaiting_free")

Segment = Mapping[str, Any]


def segment_bytes(request_bytes: int, large_page_bytes: int = LARGE_PAGE_BYTES, *, expandable: bool = False) -> int:
    """Bytes that the allocator requests from the driver when no block fits; expandable segments grow by whole pages."""
    if request_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_PAGE_BYTES
    if request_bytes < LARGE_REQUEST_BYTES:
        return large_page_bytes
    page_bytes = large_page_bytes if expandable else DRIVER_PAGE_BYTES
    return -(-request_bytes // page_bytes) * page_bytes


def summarise(
    segments: Iterable[Segment],
    *,
    device: int,
    device_free_bytes: int | None,
    request_bytes: int = REFERENCE_BYTES,
    large_page_bytes: int = LARGE_PAGE_BYTES,
) -> dict[str, Any]:
    """One device's split of reserved bytes, and whether a request of `request_bytes` would fit.

    `unusable_ratio` is Gorman's index for that request: the share of the free bytes, in the driver or in the default
    pool, that it cannot use. It and `fits` are `None` if they depend on the driver's free bytes and these are unknown.

    Raises:
        KeyError, TypeError, ValueError: the segments do not have torch's format.
    """
    found = [_Segment(each, large_page_bytes) for each in segments if each["device"] == device]
    shared = [each for each in found if not each.private]
    # Small and large requests never share a segment.
    pool = [each for each in shared if each.large == (request_bytes > SMALL_REQUEST_BYTES)]
    # A block serves only its own stream: that with most of the pool's bytes is judged.
    held: Counter[Any] = Counter()
    for each in pool:
        held[each.stream] += each.reserved_bytes
    stream = max(held, key=held.__getitem__, default=None)
    usable = [block for each in pool if each.stream == stream for block in each.free]
    totals = _totals(found)
    pinned = [each for each in shared if each.pinned]
    sizes = Counter(size for each in found for size in each.live)
    needed_bytes = segment_bytes(request_bytes, large_page_bytes, expandable=any(each.expandable for each in pool))
    return {
        **totals,
        "segments": len(found),
        "blocks": sum(each.blocks for each in found),
        "expandable_segments": sum(each.expandable for each in found),
        "largest_free_block_bytes": max((size for size, _ in usable), default=0),
        "pinned_segments": len(pinned),
        "pinned_free_bytes": sum(size for each in pinned for size, _ in each.free),
        "pools": {
            name: {
                **_totals(members),
                "pinned_segments": sum(each.pinned for each in members),
                "largest_free_block_bytes": max((size for each in members for size, _ in each.free), default=0),
            }
            for name, members in (
                ("small", [each for each in shared if not each.large]),
                ("large", [each for each in shared if each.large]),
                ("private", [each for each in found if each.private]),
            )
        },
        "largest_live_blocks": [
            [size, count] for size, count in sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:MAX_SIZES]
        ],
        "request_bytes": request_bytes,
        **_room(usable, totals, request_bytes, needed_bytes, device_free_bytes),
    }


def _totals(segments: list[_Segment]) -> dict[str, int]:
    parts = ("reserved", "live", "pending", "private", "releasable", "stranded")
    return {f"{part}_bytes": sum(getattr(each, f"{part}_bytes") for each in segments) for part in parts}


class _Segment:
    """One segment by the state of its blocks. A free block is (its bytes, the bytes that the driver can have back)."""

    def __init__(self, segment: Segment, large_page_bytes: int) -> None:
        self.stream = segment["stream"]
        self.large = segment["segment_type"] == "large"
        self.expandable = bool(segment["is_expandable"])
        self.private = tuple(segment["segment_pool_id"]) != (0, 0)
        self.reserved_bytes = int(segment["total_size"])
        self.live: list[int] = []
        self.pending_bytes = 0
        self.free: list[tuple[int, int]] = []
        page_bytes = large_page_bytes if self.large else SMALL_PAGE_BYTES
        offset = 0
        for block in segment["blocks"]:
            size, state = int(block["size"]), block["state"]
            if state == FREE:
                self.free.append((size, self._releasable(offset, size, page_bytes)))
            elif state == LIVE:
                self.live.append(size)
            elif state in PENDING:
                self.pending_bytes += size
            else:
                raise ValueError(f"a block is {state!r}")
            offset += size
        if offset != self.reserved_bytes:
            raise ValueError(f"blocks of {offset} bytes in a segment of {self.reserved_bytes}")
        self.blocks = len(segment["blocks"])
        self.live_bytes = sum(self.live)
        free = sum(size for size, _ in self.free)
        self.private_bytes = free if self.private else 0
        self.releasable_bytes = 0 if self.private else sum(back for _, back in self.free)
        self.stranded_bytes = 0 if self.private else free - self.releasable_bytes

    def _releasable(self, offset: int, size: int, page_bytes: int) -> int:
        if not self.expandable:
            return size if size == self.reserved_bytes else 0
        # Mapped ranges begin on a page, and only pages that a block covers completely can be unmapped
        # (CUDACachingAllocator.cpp, ExpandableSegment::unmap).
        first, last = -(-offset // page_bytes), (offset + size) // page_bytes
        return max(last - first, 0) * page_bytes

    @property
    def pinned(self) -> bool:
        """Whether a few live bytes keep a large segment reserved."""
        held = self.live_bytes + self.pending_bytes
        return self.reserved_bytes >= PINNED_BYTES and 0 < held < PINNED_LIVE_RATIO * self.reserved_bytes


def _room(
    usable: list[tuple[int, int]],
    totals: Mapping[str, int],
    request_bytes: int,
    needed_bytes: int,
    device_free_bytes: int | None,
) -> dict[str, Any]:
    """Whether the request fits, and the share of the free bytes that it cannot use."""
    in_blocks = any(size >= request_bytes for size, _ in usable)
    if device_free_bytes is None:
        return {"fits": True if in_blocks else None, "unusable_ratio": None}
    driver_bytes = device_free_bytes + totals["releasable_bytes"]
    obtainable = driver_bytes >= needed_bytes
    reachable = driver_bytes if obtainable else 0
    for size, back in usable:
        if size >= request_bytes:
            # Its releasable part is counted among the driver's bytes already.
            reachable += size - back if obtainable else size
    free_bytes = driver_bytes + totals["stranded_bytes"]
    return {
        "fits": in_blocks or obtainable,
        "unusable_ratio": round(1 - reachable / free_bytes, 4) if free_bytes else 0.0,
    }
