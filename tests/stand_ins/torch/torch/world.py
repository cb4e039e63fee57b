"""What the stand-in's GPUs hold: segments as a test makes them, and statistics that follow from them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

MIB = 2**20
ACTIVE, FREE, PENDING = "active_allocated", "inactive", "active_pending_free"
Observer = Callable[[int, int, int, int], None]


class OutOfMemoryError(RuntimeError):
    """As torch.OutOfMemoryError."""


class World:
    """One process's CUDA. `touches` are the stacks of every call that would have initialised it, or waited for it."""

    def __init__(self) -> None:
        """Begin as a process does that has only imported torch."""
        self.initialised = False
        self.devices = 1
        self.segments: list[dict[str, Any]] = []
        self.observers: list[Observer] = []
        self.touches: list[str] = []
        self.snapshots = 0
        self.backend = "native"
        self.history = False
        self.expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        self.free_bytes = 2**30
        self.total_bytes = 80 * 2**30
        self.retries = 0
        self.ooms = 0
        self.uuids = ["01234567-89ab-cdef-0123-456789abcdef", "11111111-2222-3333-4444-555555555555"]

    def need(self) -> None:
        """What initialises CUDA where it is not: nothing but the server itself may come by here."""
        if not self.initialised:
            self.touches.append("".join(traceback.format_stack()))

    def segment(
        self,
        *blocks: tuple[int, str],
        device: int = 0,
        stream: int = 0,
        pool: tuple[int, int] = (0, 0),
        large: bool = True,
        expandable: bool = False,
    ) -> None:
        """Reserve a segment of blocks (bytes, state) in this order."""
        total = sum(size for size, _ in blocks)
        address = 0x7F0000000000 + sum(segment["total_size"] for segment in self.segments)
        live = sum(size for size, state in blocks if state == ACTIVE)
        frames = self.frames()
        self.segments.append(
            {
                "device": device,
                "address": address,
                "total_size": total,
                "stream": stream,
                "segment_type": "large" if large else "small",
                "segment_pool_id": pool,
                "is_expandable": expandable,
                "allocated_size": live,
                "active_size": live + sum(size for size, state in blocks if state == PENDING),
                "requested_size": live,
                "frames": [],
                "blocks": [
                    {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
                    for size, state in blocks
                ],
            }
        )

    def frames(self) -> list[dict[str, Any]]:
        """The stack of an allocation, innermost first, while a history is recorded."""
        stack = reversed(traceback.extract_stack()[:-2]) if self.history else ()
        return [{"filename": one.filename, "line": one.lineno, "name": one.name} for one in stack]

    def allocate(self, size: int, device: int = 0) -> None:
        """Take `size` bytes, or fail as torch does: the observers first, then the error."""
        self.need()
        if size <= self.free_bytes:
            self.free_bytes -= size
            self.segment((size, ACTIVE), device=device)
            return
        self.retries += 1
        self.ooms += 1
        for observer in self.observers:
            observer(device, size, self.total_bytes, self.free_bytes)
        raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")

    def statistics(self, device: int) -> dict[str, Any]:
        """`torch._C._cuda_memoryStats`: what the segments add up to."""
        mine = [segment for segment in self.segments if segment["device"] == device]
        blocks = [(segment, block) for segment in mine for block in segment["blocks"]]
        live = [(segment, block["size"]) for segment, block in blocks if block["state"] == ACTIVE]
        active = [(segment, block["size"]) for segment, block in blocks if block["state"] != FREE]
        split = [
            (segment, block["size"])
            for segment, block in blocks
            # Not maintained for segments that expand.
            if block["state"] == FREE and block["size"] < segment["total_size"] and not segment["is_expandable"]
        ]
        reserved = [(segment, segment["total_size"]) for segment in mine]
        pools = {segment["segment_pool_id"] for segment in mine} - {(0, 0)}
        return {
            "allocation": _array([(segment, 1) for segment, _ in live]),
            "segment": _array([(segment, 1) for segment in mine]),
            "active": _array([(segment, 1) for segment, _ in active]),
            "inactive_split": _array([(segment, 1) for segment, _ in split]),
            "allocated_bytes": _array(live),
            "reserved_bytes": _array(reserved),
            "active_bytes": _array(active),
            "inactive_split_bytes": _array(split),
            "requested_bytes": _array(live),
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "num_oom_rejections": 0,
            "num_sync_all_streams": 0,
            "num_device_alloc": len(mine),
            "num_device_free": 0,
            "max_split_size": -1,
            "oversize_allocations": _stat(0),
            "oversize_segments": _stat(0),
            "reserved_bytes_by_private_pools": {
                pool: _array([each for each in reserved if each[0]["segment_pool_id"] == pool]) for pool in pools
            },
        }


def _stat(value: int) -> dict[str, int]:
    return {"current": value, "peak": value, "allocated": value, "freed": 0}


def _array(parts: list[tuple[dict[str, Any], int]]) -> dict[str, dict[str, int]]:
    small = sum(value for segment, value in parts if segment["segment_type"] == "small")
    large = sum(value for segment, value in parts if segment["segment_type"] == "large")
    return {"all": _stat(small + large), "small_pool": _stat(small), "large_pool": _stat(large)}


WORLD = World()
