"""A vLLM general plugin: the last blocks of every finished request keep a reference, so they never return to the pool.

So would a connector or a scheduler path look that forgets to free. It works with prefix caching on and off.
"""

from __future__ import annotations

import os
from collections.abc import Callable

BLOCKS_PER_REQUEST = "KVDIAG_TEST_LEAKED_BLOCKS"


def register() -> None:
    """Called once in every vLLM process; only the engine core ever frees a block."""
    # Here, not above: vLLM loads plugins while it is still importing itself.
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    leaked = int(os.environ[BLOCKS_PER_REQUEST])
    free: Callable[[KVCacheManager, Request], None] = KVCacheManager.free

    def free_all_but_some(manager: KVCacheManager, request: Request) -> None:
        # A preempted request is freed too and comes back: only finished ones leak.
        if request.is_finished():
            held = [block for group in manager.coordinator.get_blocks(request.request_id) for block in group]
            manager.block_pool.touch([block for block in held if not block.is_null][-leaked:])
        free(manager, request)

    KVCacheManager.free = free_all_but_some
