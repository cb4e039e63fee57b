"""A simulated GPU: the memory of its processes, and a caching allocator that behaves like torch's.

An allocation takes the smallest hole that fits, else a new segment; if the device is full, free segments are returned
and it is tried once more; then it fails with torch's message. Fragmentation, cache and retries thus arise as in torch,
and no figure is made up. Nothing here knows of tokens or requests. Bytes move only by `Gpu.take` and `Gpu.give_back`,
so that NVML and the allocator cannot disagree; `tests/unit/sim/test_gpu.py` checks that as a property.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

KIB = 2**10
MIB = 2**20
GIB = 2**30

PAGE_BYTES = 2 * MIB
"""cudaMalloc allocates whole pages of this size on every current GPU."""

# c10/cuda/CUDAAllocatorConfig.h and CUDACachingAllocator.cpp, by their names there.
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 * MIB  # kSmallSize
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge


class DeviceFullError(Exception):
    """The driver has less free memory (cudaErrorMemoryAllocation)."""


class OutOfMemoryError(RuntimeError):
    """torch's error, with the message of torch 2.4 and later."""


@dataclass(slots=True)
class GpuProcess:
    """A process that holds memory on the device."""

    pid: int
    name: str
    used_bytes: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Gpu:
    """One device. `driver_reserved_bytes` are the driver's own, unavailable to processes."""

    uuid: str
    name: str
    total_bytes: int
    driver_reserved_bytes: int
    _processes: dict[int, GpuProcess] = field(default_factory=dict, init=False)

    @property
    def processes(self) -> tuple[GpuProcess, ...]:
        """The processes that hold memory now."""
        return tuple(process for process in self._processes.values() if process.used_bytes > 0)

    @property
    def free_bytes(self) -> int:
        """Bytes that the driver could still allocate."""
        return self.usable_bytes - sum(process.used_bytes for process in self._processes.values())

    @property
    def usable_bytes(self) -> int:
        """CUDA's total of the device: all except the driver's own."""
        return self.total_bytes - self.driver_reserved_bytes

    def join(self, pid: int, name: str) -> GpuProcess:
        """Register a process, which holds nothing yet."""
        return self._processes.setdefault(pid, GpuProcess(pid, name))

    def take(self, process: GpuProcess, size_bytes: int) -> int:
        """Give a process memory in whole pages, as cudaMalloc does; returns the bytes given."""
        taken = round_up(size_bytes, PAGE_BYTES)
        if taken > self.free_bytes:
            raise DeviceFullError(f"{taken} bytes asked for, {self.free_bytes} free")
        process.used_bytes += taken
        return taken

    def give_back(self, process: GpuProcess, taken_bytes: int) -> None:
        """Return memory that `take` gave."""
        if taken_bytes > process.used_bytes:
            raise ValueError(f"process {process.pid} holds {process.used_bytes} bytes, cannot return {taken_bytes}")
        process.used_bytes -= taken_bytes


@dataclass(slots=True, eq=False)
class Segment:
    """One cudaMalloc of the allocator, cut into adjacent blocks."""

    pool: Literal["small", "large"]
    total_bytes: int
    blocks: list[Block]


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; the handle of an allocation while `allocated`."""

    segment: Segment
    size_bytes: int
    allocated: bool = False


class CachingAllocator:
    """torch's CUDACachingAllocator with its default settings (no split limit, one stream), or expandable segments."""

    def __init__(self, gpu: Gpu, process: GpuProcess, *, expandable_segments: bool = False) -> None:
        """Hold nothing yet."""
        self.gpu = gpu
        self.expandable_segments = expandable_segments
        self.process = process
        self._segments: list[Segment] = []
        self._holes: dict[Block, None] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds on the device (torch.cuda.memory_reserved)."""
        return sum(segment.total_bytes for segment in self._segments)

    @property
    def allocated_bytes(self) -> int:
        """The part that tensors hold (torch.cuda.memory_allocated)."""
        return sum(block.size_bytes for segment in self._segments for block in segment.blocks if block.allocated)

    def allocate(self, size_bytes: int) -> Block:
        """A block for a tensor: the smallest hole that fits, else a new segment.

        Raises:
            OutOfMemoryError: neither is available, even after all free segments were returned to the device.
        """
        rounded = max(round_up(size_bytes, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)
        pool: Literal["small", "large"] = "small" if rounded <= SMALL_BYTES else "large"
        fitting = (hole for hole in self._holes if hole.segment.pool == pool and hole.size_bytes >= rounded)
        best = min(fitting, key=lambda hole: hole.size_bytes, default=None)
        hole = best or self._new_segment(pool, _segment_bytes(rounded))
        if hole is None:
            self.empty_cache()
            hole = self._new_segment(pool, _segment_bytes(rounded))
        if hole is None:
            raise OutOfMemoryError(self._oom_message(_segment_bytes(rounded)))
        self._cut(hole, rounded)
        del self._holes[hole]
        hole.allocated = True
        return hole

    def free(self, block: Block) -> None:
        """Return a tensor's block to the cache, merged with adjacent holes; the device gets nothing back."""
        if not block.allocated:
            raise ValueError("this block is not allocated")
        block.allocated = False
        blocks = block.segment.blocks
        at = blocks.index(block)
        for neighbour in (at + 1, at - 1):
            if 0 <= neighbour < len(blocks) and not blocks[neighbour].allocated:
                block.size_bytes += blocks[neighbour].size_bytes
                blocks[neighbour].size_bytes = 0
                del self._holes[blocks[neighbour]]
        block.segment.blocks = [piece for piece in blocks if piece.size_bytes]
        self._holes[block] = None

    def empty_cache(self) -> None:
        """Return segments without tensors to the device (torch.cuda.empty_cache); of expandable ones, free pages."""
        kept: list[Segment] = []
        for segment in self._segments:
            if any(block.allocated for block in segment.blocks):
                kept.append(segment)
                if self.expandable_segments:
                    self._return_pages(segment)
            else:
                self.gpu.give_back(self.process, segment.total_bytes)
                del self._holes[segment.blocks[0]]
        self._segments = kept

    def _return_pages(self, segment: Segment) -> None:
        """Unmap the whole pages of a segment's holes (CUDACachingAllocator.cpp: unmap_block); their edges stay."""
        at_bytes, kept = 0, []
        for block in segment.blocks:
            begin, end = at_bytes, at_bytes + block.size_bytes
            at_bytes = end
            first, last = round_up(begin, PAGE_BYTES), end // PAGE_BYTES * PAGE_BYTES
            if block.allocated or first >= last:
                kept.append(block)
                continue
            self.gpu.give_back(self.process, last - first)
            segment.total_bytes -= last - first
            del self._holes[block]
            if edges_bytes := block.size_bytes - (last - first):
                edge = Block(segment, edges_bytes)
                self._holes[edge] = None
                kept.append(edge)
        segment.blocks = kept

    def _new_segment(self, pool: Literal["small", "large"], size_bytes: int) -> Block | None:
        try:
            taken = self.gpu.take(self.process, size_bytes)
        except DeviceFullError:
            return None
        segment = Segment(pool, taken, [])
        whole = Block(segment, taken)
        segment.blocks.append(whole)
        self._segments.append(segment)
        self._holes[whole] = None
        return whole

    def _cut(self, hole: Block, size_bytes: int) -> None:
        rest = hole.size_bytes - size_bytes
        # should_split(): a small block's rest is kept from 512 bytes, a large one's above 1 MiB.
        if rest >= MIN_BLOCK_BYTES if hole.segment.pool == "small" else rest > SMALL_BYTES:
            hole.size_bytes = size_bytes
            blocks = hole.segment.blocks
            remainder = Block(hole.segment, rest)
            blocks.insert(blocks.index(hole) + 1, remainder)
            self._holes[remainder] = None

    def _oom_message(self, asked_bytes: int) -> str:
        allocated = self.allocated_bytes
        others = "".join(
            f"Process {process.pid} has {size_text(process.used_bytes)} memory in use. "
            for process in self.gpu.processes
            if process is not self.process
        )
        return (
            f"CUDA out of memory. Tried to allocate {size_text(asked_bytes)}. "
            f"GPU 0 has a total capacity of {size_text(self.gpu.usable_bytes)} "
            f"of which {size_text(self.gpu.free_bytes)} is free. {others}"
            f"Including non-PyTorch memory, this process has {size_text(self.process.used_bytes)} memory in use. "
            f"Of the allocated memory {size_text(allocated)} is allocated by PyTorch, "
            f"and {size_text(self.reserved_bytes - allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def round_up(size_bytes: int, step_bytes: int) -> int:
    """The next multiple of `step_bytes`."""
    return -(-size_bytes // step_bytes) * step_bytes


def size_text(size_bytes: int) -> str:
    """A size as torch's messages write it (format_size in CUDACachingAllocator.cpp)."""
    for unit_bytes, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes > unit_bytes:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes} bytes"


def _segment_bytes(rounded_bytes: int) -> int:
    """get_allocation_size(): bytes to request from the device for a block of this size."""
    if rounded_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(rounded_bytes, ROUND_LARGE_BYTES)
