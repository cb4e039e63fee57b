"""Makes SGLang lose tokens with each aborted request, as a path of the scheduler that only aborts take would."""

import os
from typing import Any

FORGOTTEN_TOKENS = "KVDIAG_TEST_FORGOTTEN_TOKENS"


def register() -> None:
    """Patch what releases a request's tokens, before the server forks its schedulers."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 - the server's own Python
    from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: PLC0415

    forgotten = int(os.environ[FORGOTTEN_TOKENS])
    release = batch_result_processor.release_kv_cache

    def forget(req: Any, tree_cache: Any, **more: Any) -> None:
        release(req, tree_cache, **more)
        if isinstance(req.finished_reason, FINISH_ABORT):
            # As many are taken again, for no request.
            tree_cache.token_to_kv_pool_allocator.alloc(forgotten)

    batch_result_processor.release_kv_cache = forget
