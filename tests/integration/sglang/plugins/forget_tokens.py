"""Makes SGLang's allocator forget the last tokens of each free, as a scheduler path that leaks would.

How many stands in a variable of the environment. It works without the radix cache, which frees in pieces of its own.
"""

import os
from collections.abc import Callable
from typing import Any

FORGOTTEN_TOKENS = "KVDIAG_TEST_FORGOTTEN_TOKENS"


def register() -> None:
    """Patch the allocator, before the server forks its schedulers."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: PLC0415 - the server's own Python

    forgotten = int(os.environ[FORGOTTEN_TOKENS])
    free: Callable[[Any, Any], None] = TokenToKVPoolAllocator.free
    TokenToKVPoolAllocator.free = lambda pool, indices: free(pool, indices[:-forgotten])
