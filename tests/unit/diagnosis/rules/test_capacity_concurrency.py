from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.capacity_concurrency import judge
from kvdiag.model import Evidence, Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import NO_ANSWER, engine, holding, pool, seen
from tests.builders.worlds import SMALL_POOL, World, facts

ONE_POOL = Facts(pools=(pool(),))
FULL = World(pools=(SMALL_POOL,), max_model_len_tokens=17_600, resident_at_once=7)


def verdict(timeline: Timeline, of: Facts = ONE_POOL) -> Finding:
    """The rule's one finding."""
    (found,) = judge(timeline, of, DEFAULT_LIMITS)
    return found


def test_requests_that_push_one_another_out_are_a_fault() -> None:
    """Preemptions are counted, and set against how many of the step's requests the pool holds."""
    # A pool for seven of ten requests, and five preemptions
    world = replace(FULL, preemptions=5)
    actual = verdict(run(world), facts(world))
    expected = Finding(
        id="capacity.concurrency",
        status="fault",
        summary=ANY_TEXT,
        evidence=(
            Evidence(name="preemptions", value=5, unit="requests", source="engine"),
            Evidence(name="max_waiting", value=3, unit="requests", source="engine"),
            Evidence(name="max_running", value=7, unit="requests", source="engine"),
            Evidence(name="max_usage", value=1099 / 1100, unit="ratio", source="engine"),
            Evidence(name="capacity", value=17_600, unit="tokens", source="engine"),
        ),
    )

    assert expected == actual


def test_requests_that_wait_for_room_are_suspect() -> None:
    """Without a preemption, waiting with a full pool is a capacity problem all the same."""
    # Three requests that wait until the other seven are done
    actual = verdict(run(FULL), facts(FULL))

    assert "suspect" == actual.status


def test_ten_requests_with_room_for_all_are_ok() -> None:
    """A healthy server runs all ten at once."""
    # A healthy server
    actual = verdict(run(), facts(World()))

    assert ("ok", 10) == (actual.status, evidence(actual)["max_running"])


@pytest.mark.parametrize(
    "timeline",
    [
        seen(NO_ANSWER, NO_ANSWER),
        seen(engine(preemptions=None), engine(preemptions=None)),
        seen(*[engine()] * 9),
        seen(*[holding(40, running=1)] * 9),
        run(World(cut_short_in="single_request")),
    ],
    ids=["no answer", "no counter", "idle", "one request", "stopped before the concurrent step"],
)
def test_without_requests_at_the_same_time_it_is_unknown(timeline: Timeline) -> None:
    """An engine that was never asked for two things at once has not shown that it can."""
    actual = verdict(timeline)

    assert Finding(id="capacity.concurrency", status="unknown", summary=ANY_TEXT) == actual


def test_waiting_behind_a_prefill_with_room_in_the_pool_is_no_capacity_problem() -> None:
    """Requests that queue for their turn to be computed do not lack memory, whatever the engine's reason says."""
    # Seven requests that wait while 49 of 159 blocks are held by three (seen on 0.32)
    small = pool(usable_blocks=159)
    queue = replace(holding(49, of=small, running=3, waiting=7), requests_waiting_for_capacity=7)

    assert "ok" == verdict(seen(*[queue] * 20), Facts(pools=(small,))).status


def test_a_pool_is_full_well_below_usage_one() -> None:
    """Three of eight 8K requests in 32,768 tokens stand at 80 %: the fourth does not fit, and five wait."""
    # A pool of 2,048 blocks with 1,638 held by three requests
    small = pool(usable_blocks=2048)
    queue = holding(1638, of=small, running=3, waiting=5)
    actual = verdict(seen(*[queue] * 3), Facts(pools=(small,)))

    assert ("suspect", 5) == (actual.status, evidence(actual)["max_waiting"])


@pytest.mark.parametrize(
    ("tokens_waiting", "readings", "status"),
    [(200, 30, "fault"), (900, 30, "suspect"), (200, 9, "suspect"), (None, 30, "suspect")],
    ids=["collapsed", "as much as before", "for four minutes", "not counted"],
)
def test_queue_behind_which_the_work_collapses_is_a_fault(
    tokens_waiting: int | None, readings: int, status: str
) -> None:
    """A full server that works on has a long queue at worst; one that does a fifth of its work thrashes."""
    # 1,000 tokens in each half minute, and then a queue at a full pool
    small = pool(usable_blocks=100)
    fine, queue = holding(60, of=small, running=3), holding(99, of=small, running=3, waiting=9)
    work = [(fine, 1_000)] * 30 + [(queue, tokens_waiting)] * readings
    done, samples = 0, []
    for number, (page, tokens) in enumerate(work):
        done += tokens or 0
        counted = None if tokens_waiting is None else done
        one = replace(page, prompt_tokens_total=None, generation_tokens_total=counted)
        samples.append(Sample(at_seconds=30.0 * number, engines=(one,)))

    assert status == verdict(Timeline(samples=tuple(samples)), Facts(pools=(small,))).status


def test_a_wait_of_two_samples_does_not_count() -> None:
    """Admission takes some engine steps: a short queue at a full pool is not held against it."""
    # Two samples with a queue, and then none
    small = pool(usable_blocks=100)
    queue, fine = holding(99, of=small, running=3, waiting=1), holding(99, of=small, running=4)

    assert "ok" == verdict(seen(fine, queue, queue, fine, queue, queue, fine), Facts(pools=(small,))).status


def test_a_counter_that_starts_anew_is_no_preemption() -> None:
    """A restarted engine counts from zero: what it counted before is not counted again."""
    # Preemptions long ago, a restart, and none since
    timeline = seen(*(engine(running=2, preemptions=count) for count in (50, 50, 0, 0, 0)))

    assert ("ok", 0) == (verdict(timeline).status, evidence(verdict(timeline))["preemptions"])


def test_preemptions_after_a_restart_count() -> None:
    """What a restarted engine preempts is counted from zero."""
    # A restart and two preemptions after it
    timeline = seen(*(engine(running=2, preemptions=count) for count in (50, 50, 0, 1, 2)))

    assert 2 == evidence(verdict(timeline))["preemptions"]


def test_an_engine_that_was_not_on_one_page_has_not_preempted_anew() -> None:
    """A data-parallel engine missing from one reading comes back with its old count, not with new preemptions."""
    # Two engines with old preemptions, the second missing from one page
    first, second = engine(running=2, preemptions=3), engine(label="1", running=2, preemptions=50)
    both = Facts(pools=(pool("0"), pool("1")))
    timeline = seen((first, second), (first,), (first, second), (first, second))

    assert ("ok", 0) == (verdict(timeline, both).status, evidence(verdict(timeline, both))["preemptions"])


def test_preemptions_of_all_engines_are_added_up() -> None:
    """Both engines' counters count."""
    # Two engines with one preemption each
    both = Facts(pools=(pool("0"), pool("1")))
    timeline = seen(
        (engine(running=2), engine(label="1", running=2)),
        (engine(running=2, preemptions=1), engine(label="1", running=2, preemptions=1)),
    )

    assert ("fault", 2) == (verdict(timeline, both).status, evidence(verdict(timeline, both))["preemptions"])


def test_one_full_engine_beside_an_empty_one_is_suspect() -> None:
    """Room in another engine's pool is of no use to requests that wait at a full one."""
    # Two engines, of which one is full and has a queue
    both = Facts(pools=(pool("0", usable_blocks=100), pool("1")))
    page = (holding(99, of=both.pools[0], running=3, waiting=2), engine(label="1"))

    assert "suspect" == verdict(seen(*[page] * 3), both).status


def test_an_engine_without_a_pool_divides_nothing() -> None:
    """Waiting requests of an engine whose pool or usage is unknown are not counted as waiting for room."""
    # Waiting requests, no usage and no running request
    odd = (engine(usage=None, running=2, waiting=4), engine(usage=1.0, running=0, waiting=4))

    assert {"ok", "unknown"} >= {
        verdict(seen(odd[0], odd[0], odd[0]), Facts()).status,
        verdict(seen(odd[1], odd[1], odd[1])).status,
    }
