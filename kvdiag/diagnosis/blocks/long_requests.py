"""A queue behind one request that is so long that no second fits the pool: not too many run at once.

Three figures say so together, none of them alone. One request runs wherever others wait; it leaves no room for another
one like it; and the requests that ended had so many tokens, by the engine's counters, that one takes much of the pool.
The last one separates length from leaked blocks, which are in no request's tokens. Preemptions need two requests: they
are never explained here.
"""

from dataclasses import dataclass
from itertools import compress

from kvdiag.diagnosis.blocks.queue_room import waiting_for_room
from kvdiag.diagnosis.engine_columns import EngineColumns, engine_columns
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import pool_tokens
from kvdiag.model import Facts, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRequests:
    """Requests of which one at a time takes the pool: their tokens on average, the pool's, and the most that wait."""

    mean_tokens: float
    capacity_tokens: int
    waiting: int


def one_fills_the_pool(timeline: Timeline, facts: Facts, limits: Limits) -> LongRequests | None:
    """The long requests behind which others wait; `None` where the queue has another cause, or that is not shown."""
    columns = engine_columns(timeline)
    if timeline.marks or len(facts.pools) != 1 or columns.only is None:
        return None
    # Few servers have a queue at all.
    queued = list(compress(columns.only, columns.total("requests_waiting")))
    preempted = columns.total("preemptions_total")
    if len(queued) < limits.long_samples or any((count or 0) > (preempted[0] or 0) for count in preempted):
        return None
    alone = [one for one in queued if one.requests_running == 1 and waiting_for_room(one, facts)]
    mean, capacity = _mean_tokens(columns), pool_tokens(facts.pools[0])
    if len(alone) < limits.long_alone_ratio * len(queued) or mean is None:
        return None
    if mean < limits.long_tokens_ratio * capacity:
        return None
    waiting = max(one.requests_waiting or 0 for one in queued)
    return LongRequests(mean_tokens=mean, capacity_tokens=capacity, waiting=waiting)


def _mean_tokens(columns: EngineColumns) -> float | None:
    """Tokens of a request that ended, on average; `None` where the engine does not count them, or none ended."""
    tokens, finished = columns.tokens, columns.total("requests_finished_total")
    first, last, begun, ended = tokens[0], tokens[-1], finished[0], finished[-1]
    if first is None or last is None or begun is None or ended is None or ended <= begun:
        return None
    return (last - first) / (ended - begun)
