"""Makes SGLang report the state slots of a hybrid model, one a request, of which some are never released.

On a CPU no hybrid model generates: a dense one serves the requests, and the scheduler counts slots as well as tokens.
"""

import os
from dataclasses import replace
from typing import Any

LOST_SLOTS = "KVDIAG_TEST_LOST_SLOTS"
"""Of each request."""

SLOTS = 1024


def register() -> None:
    """Patch what the scheduler counts, before the server forks it."""
    from sglang.srt.managers.scheduler_components import batch_result_processor  # noqa: PLC0415
    from sglang.srt.managers.scheduler_components.pool_stats_observer import (  # noqa: PLC0415
        SchedulerPoolStatsObserver,
    )

    each = int(os.environ[LOST_SLOTS])
    lost = 0
    release, count = batch_result_processor.release_kv_cache, SchedulerPoolStatsObserver.get_pool_stats

    def forget(*arguments: Any, **more: Any) -> None:
        nonlocal lost
        release(*arguments, **more)
        lost += each

    def counted(observer: Any) -> Any:
        stats = count(observer)
        used = lost + bool(stats.full_num_used)
        return replace(
            stats,
            is_hybrid_ssm=True,
            mamba_num_used=used,
            mamba_usage=used / SLOTS,
            mamba_available_size=SLOTS - used,
            mamba_evictable_size=0,
        )

    batch_result_processor.release_kv_cache = forget
    SchedulerPoolStatsObserver.get_pool_stats = counted
