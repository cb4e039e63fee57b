"""Whether an engine's pool has room for one more request like those that run, and which requests wait for it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Engine, Facts


def have_room(engines: Sequence[Engine], facts: Facts, limits: Limits) -> bool:
    """Whether the pool surely had room each time for one more request, twice as large as those that run."""
    room = [_room(one, facts) for one in engines]
    least_ratio, least_requests = limits.preempted_room_ratio, limits.preempted_room_requests
    return all(one and one.ratio > least_ratio and one.requests > least_requests for one in room)


def is_reset(rise: Sequence[Engine], count: float, facts: Facts) -> bool:
    """Whether all that ran was preempted at once, without a queue, while the pool had room for one more request."""
    before = rise[0]
    if _room(before, facts) is None or count != before.requests_running or before.requests_waiting:
        return False
    # All may have ended by the last sample: nothing runs.
    return all(room is None or room.requests >= 1.0 for room in (_room(one, facts) for one in rise))


class _Room(NamedTuple):
    """The free share of an engine's pool, and how many more requests of the mean size of those that run it holds."""

    ratio: float
    requests: float


def _room(engine: Engine, facts: Facts) -> _Room | None:
    pool, usage, running = facts.pool(engine.engine), engine.kv_usage_ratio, engine.requests_running
    if usage is None or not running or (pool is None and facts.capabilities.blocks):
        return None
    # An engine that reports no size has a share all the same.
    total, held = (1.0, usage) if pool is None else (pool.usable_blocks, pool.used_blocks(usage))
    free = total - held
    return _Room(free / total, free * running / held if held else math.inf) if total else None


def waiting_for_room(engine: Engine, facts: Facts) -> int:
    """Requests that wait while the engine's pool has no room for one more like those that run, or that it paused.

    Where as many run as the engine lets run at once, they wait for that: the limit is set to what the pool holds.

    Of an engine that counts no preemptions, what waits for capacity is what it paused for lack of blocks
    (TensorRT-LLM's num_paused_requests).
    """
    pool, running = facts.pool(engine.engine), engine.requests_running or 0
    limit = None if pool is None else pool.max_requests
    waiting = 0 if limit is not None and running >= limit else engine.requests_waiting or 0
    paused = 0 if engine.preemptions_total is not None else engine.requests_waiting_for_capacity or 0
    room = _room(engine, facts) if waiting else None
    return paused if room is None or room.requests >= 1.0 else max(waiting, paused)
