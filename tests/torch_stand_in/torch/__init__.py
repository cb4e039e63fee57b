"""A stand-in for torch, not torch: CUDA that exists only in `world.py`, for a process that has no GPU.

Names, signatures and the shapes of what is returned are those of torch 2.13 (torch/cuda/memory.py, and
c10/core/CachingDeviceAllocator.h for the statistics).
"""

from __future__ import annotations

from . import _C, cuda, world

__all__ = ["_C", "OutOfMemoryError", "cuda", "world"]
__version__ = "2.13.0+standin"

OutOfMemoryError = world.OutOfMemoryError
