"""A vLLM general plugin: the last blocks of every finished request keep a reference, so they never return to the pool.

So would a connector or a scheduler path look that forgets to free. It works with prefix caching on and off. How many
blocks of a request are kept stands in a file, which a test may write and remove while the server works: without it, or
with 0, nothing is kept, and what was kept before is released as the next request finishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCKS_PER_REQUEST_FILE = "KVDIAG_TEST_LEAKED_BLOCKS"


def register() -> None:
    """Called once in every vLLM process; only the engine core ever frees a block."""
    # Here, not above: vLLM loads plugins while it is still importing itself.
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    wanted = Path(os.environ[BLOCKS_PER_REQUEST_FILE])
    kept: list[Any] = []
    free: Callable[[KVCacheManager, Request], None] = KVCacheManager.free

    def free_all_but_some(manager: KVCacheManager, request: Request) -> None:
        leaked = int(wanted.read_text() or 0) if wanted.exists() else 0
        if not leaked and kept:
            manager.block_pool.free_blocks(kept)
            kept.clear()
        # A preempted request is freed too and is scheduled again: only finished ones leak.
        if leaked and request.is_finished():
            held = [block for group in manager.coordinator.get_blocks(request.request_id) for block in group]
            last = [block for block in held if not block.is_null][-leaked:]
            manager.block_pool.touch(last)
            kept.extend(last)
        free(manager, request)

    KVCacheManager.free = free_all_but_some
