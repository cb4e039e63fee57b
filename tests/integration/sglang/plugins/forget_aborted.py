"""Makes SGLang lose tokens with each aborted request, as a path of the scheduler that only aborts take would."""

import os
from typing import Any

FORGOTTEN_TOKENS = "KVDIAG_TEST_FORGOTTEN_TOKENS"


def register() -> None:
    """Patch what releases a request's tokens, before the server forks its schedulers."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 - the server's own Python
    from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: PLC0415
    from sglang.srt.mem_cache.common import evict_from_tree_cache  # noqa: PLC0415

    forgotten = int(os.environ[FORGOTTEN_TOKENS])
    release = batch_result_processor.release_kv_cache

    def forget(req: Any, tree_cache: Any, **more: Any) -> None:
        release(req, tree_cache, **more)
        if isinstance(req.finished_reason, FINISH_ABORT):
            # As many are taken again, for no request. Cached prefixes may have all, and what is evicted in the midst of
            # a batch would be free only after it.
            allocator = tree_cache.token_to_kv_pool_allocator
            group, allocator.free_group = allocator.free_group, None
            evict_from_tree_cache(tree_cache, forgotten)
            allocator.alloc(forgotten)
            allocator.free_group = group

    batch_result_processor.release_kv_cache = forget
