"""A queue behind one long request: called by its length, and only where all three figures show it."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.blocks.long_requests import one_fills_the_pool
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules import capacity_concurrency, capacity_long_context
from kvdiag.model import Facts, Sample, Timeline
from tests.builders.answers import only
from tests.builders.values import engine, pool

POOL = pool()
CAPACITY = POOL.usable_blocks * POOL.block_tokens
FACTS = Facts(url="http://127.0.0.1:8000", engine_name="vllm", pools=(POOL,))


def queue(
    *, usage: float = 0.8, running: int = 1, request_ratio: float = 0.8, preempted: int = 0, samples: int = 30
) -> Timeline:
    """Requests of a share of the pool's tokens, one of which ends each minute, with two that wait."""
    busy = replace(engine(usage=usage, running=running), requests_waiting=2)
    return Timeline(
        samples=tuple(
            Sample(
                at_seconds=60.0 * number,
                engines=(
                    replace(
                        busy,
                        prompt_tokens_total=round(request_ratio * CAPACITY) * number,
                        generation_tokens_total=0,
                        requests_finished_total=number,
                        preemptions_total=preempted * number,
                    ),
                ),
            )
            for number in range(samples)
        )
    )


def test_one_long_request_at_a_time_is_its_length() -> None:
    """A suspect of long_context with its figures, and nothing of concurrency."""
    timeline = queue()
    found = one_fills_the_pool(timeline, FACTS, DEFAULT_LIMITS)
    assert found is not None
    assert (round(0.8 * CAPACITY), CAPACITY, 2) == (round(found.mean_tokens), found.capacity_tokens, found.waiting)
    assert "suspect" == only(capacity_long_context.judge, timeline, FACTS).status
    assert "ok" == only(capacity_concurrency.judge, timeline, FACTS).status


@pytest.mark.parametrize(
    "timeline",
    [
        queue(running=2),
        queue(preempted=1),
        queue(request_ratio=0.05),
        queue(usage=0.3),
        queue(samples=5),
    ],
    ids=["two run", "preempted", "leaked blocks", "room for another", "too few samples"],
)
def test_any_other_queue_is_not(timeline: Timeline) -> None:
    """Two at once, preemptions, short requests behind leaked blocks, and seats that are taken are not explained."""
    assert one_fills_the_pool(timeline, FACTS, DEFAULT_LIMITS) is None
    assert "suspect" != only(capacity_long_context.judge, timeline, FACTS).status
