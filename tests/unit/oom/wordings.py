"""How allocators, drivers, libraries, vLLM and the kernel say that memory ran out, with the figures of each text."""

import json
from pathlib import Path

import pytest

GIB = 2**30
NEW = (
    "CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 140.75 MiB is "
    "free. Process 3270336 has 78.96 GiB memory in use. Of the allocated memory 68.83 GiB is allocated by "
    "PyTorch, with "
    "660.00 MiB allocated in private pools (e.g., CUDA Graphs), and 331.08 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management"
)
ASYNC = (
    "torch.cuda.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 9.64 GiB\nRequested               : 1.49 MiB\nDevice limit            : 39.39 GiB\n"
    "Free (according to CUDA): 3.06 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
    "                        : 17179869184.00 GiB"
)


def gib(size: float) -> int:
    """Bytes of a size that is printed in GiB."""
    return int(size * GIB)


FORMS = tuple(
    pytest.param(form["text"], form["figures"], id=form["about"])
    for form in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)
"""A text and the figures that it has, its kind among them."""
