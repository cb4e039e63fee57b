"""A stand-in for torch, not torch: CUDA that exists only in `world.py`, for a process that has no GPU.

Names, signatures and the shapes of what is returned are those of torch 2.13 (torch/cuda/memory.py, and
c10/core/CachingDeviceAllocator.h for the statistics).
"""

from __future__ import annotations

from types import SimpleNamespace

from . import _C, cuda, driver, tensors, world

__all__ = ["_C", "OutOfMemoryError", "cuda", "driver", "empty", "tensors", "uint8", "version", "world"]
__version__ = "2.13.0+standin"

version = SimpleNamespace(cuda="13.0")
uint8 = "uint8"
empty = tensors.empty

OutOfMemoryError = world.OutOfMemoryError
