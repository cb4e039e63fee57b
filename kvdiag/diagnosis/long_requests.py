"""Queues behind one or two requests that fill the pool: their context is what there is no room for, not their number.

Taken from the samples in which requests wait: how many run there, and how much of the pool each of them holds.
"""

from dataclasses import dataclass
from statistics import median

from kvdiag.formatting import plural
from kvdiag.model import Timeline

FEW = 2
LARGE_RATIO = 0.4
"""Requests that fill a pool by their length, and the share of it that each holds: two of them leave no room for a third
one."""

MOST_RATIO = 0.75
"""Share of the samples with a queue in which they do: in the others the last of them has just begun or ended."""

FEWEST_SAMPLES = 10
"""Samples with a queue without which its cause is not decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRequests:
    """Requests that fill the pool while others wait: how many run, the share of each, and the most that wait."""

    running: int
    share_ratio: float
    waiting: int

    @property
    def requests(self) -> str:
        """Their number in words."""
        return plural(self.running, "request")


def filled_by_few(timeline: Timeline) -> LongRequests | None:
    """The long requests behind which others wait; `None` where the queue has another cause, or the load is kvdiag's."""
    if timeline.marks:
        return None
    queued = [one for sample in timeline.samples for one in sample.engines or () if one.requests_waiting]
    known = [
        (one.requests_running, one.kv_usage_ratio / one.requests_running, one.requests_waiting or 0)
        for one in queued
        if one.requests_running and one.kv_usage_ratio is not None
    ]
    large = [one for one in known if one[0] <= FEW and one[1] >= LARGE_RATIO]
    if len(large) < max(MOST_RATIO * len(queued), FEWEST_SAMPLES):
        return None
    return LongRequests(
        running=max(running for running, _, _ in large),
        share_ratio=median(share for _, share, _ in large),
        waiting=max(waiting for _, _, waiting in large),
    )
