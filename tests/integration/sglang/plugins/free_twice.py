"""Makes SGLang's allocator take the last tokens of each free twice, as a path that releases a request twice would.

It works without the radix cache, which frees in pieces of its own.
"""

from collections.abc import Callable
from typing import Any

FREED_TWICE_TOKENS = 7


def register() -> None:
    """Patch the allocator, before the server forks its schedulers."""
    import torch  # noqa: PLC0415 - the server's own Python
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: PLC0415 - the server's own Python

    free: Callable[[Any, Any], None] = TokenToKVPoolAllocator.free
    TokenToKVPoolAllocator.free = lambda pool, indices: free(
        pool, torch.cat((indices, indices[-FREED_TWICE_TOKENS:])) if len(indices) else indices
    )
