from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.capacity_long_context import judge
from kvdiag.model import Engine, Evidence, Facts, Finding, Sample, Timeline
from tests.builders import GIB, MIB, OOM, OOM_WITH_ROOM, World, engine, evidence, facts, holding, pool, run


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_one_request_that_ran_out_of_memory_is_a_fault() -> None:
    """The failed request's own figures are the evidence."""
    # GIVEN a server whose 16K prompt does not fit
    actual = verdict(World(failing={"long_context": OOM}))
    # THEN
    expected = Finding(
        id="capacity.long_context",
        status="fault",
        summary="one request of 16,384 tokens ran out of memory: it asked for 3.00 GiB at once, 512 MiB were free",
        evidence=(
            Evidence(name="prompt", value=16_384, unit="tokens", source="kvdiag"),
            Evidence(name="asked", value=3 * GIB, unit="bytes", source="torch's message"),
            Evidence(name="free_on_device", value=512 * MIB, unit="bytes", source="torch's message"),
            Evidence(name="reserved_but_unallocated", value=256 * MIB, unit="bytes", source="torch's message"),
        ),
    )

    assert expected == actual


def test_a_long_request_that_ran_is_ok() -> None:
    """A healthy server served 16,384 tokens."""
    # GIVEN a healthy server
    actual = verdict(World())

    # THEN
    assert ("ok", "a request of 16,384 tokens ran to its end") == (actual.status, actual.summary)


@pytest.mark.parametrize(
    "world",
    [
        World(unseen=("long_context",)),
        World(cut_short_in="long_context"),
        World(lost_in="concurrent"),
        World(failing={"long_context": "HTTP 500: internal error"}),
    ],
    ids=["not seen", "cut short", "server lost", "failed otherwise"],
)
def test_a_long_request_that_was_not_seen_to_end_is_unknown(world: World) -> None:
    """A request that never ran, failed for another reason, or was not watched proves nothing."""
    # WHEN such a run is judged
    actual = verdict(world)

    # THEN
    summary = "cannot tell: no long request was seen to run to its end"
    assert Finding(id="capacity.long_context", status="unknown", summary=summary) == actual


def test_an_allocation_that_found_no_hole_is_not_the_contexts_size() -> None:
    """Where all that was left would have been enough it is fragmentation's case."""
    # GIVEN a long request that failed with room left
    assert "fault" != verdict(World(failing={"long_context": OOM_WITH_ROOM})).status


def test_ten_requests_that_ran_out_are_not_one_long_context() -> None:
    """Running out with ten requests says nothing about one, which then worked."""
    # GIVEN a server that fails ten requests and serves the long one
    assert "ok" == verdict(World(failing={"concurrent": OOM})).status


def test_figures_that_the_message_lacks_are_not_made_up() -> None:
    """A message without free bytes gives no free bytes: not zero."""
    # GIVEN torch's message cut off after what was asked for
    actual = verdict(World(failing={"long_context": "CUDA out of memory. Tried to allocate 3.00 GiB."}))

    # THEN
    assert "one request of 16,384 tokens ran out of memory: it asked for 3.00 GiB at once" == actual.summary
    assert evidence(actual)["free_on_device"] is None


def test_a_pool_below_the_admitted_length_is_a_fault() -> None:
    """By the engine's own figures the longest admitted request cannot be held."""
    # GIVEN a pool of 20,000 tokens and a length of 32,768
    actual = verdict(World(pools=(pool(capacity_tokens=20_000),)))

    # THEN
    assert "fault" == actual.status
    assert {"capacity": 20_000, "max_model_len": 32_768} == evidence(actual)


def test_the_smaller_pool_of_two_engines_decides() -> None:
    """A long request may land on the engine with the smaller pool."""
    # GIVEN two engines of unequal pools
    actual = verdict(World(pools=(pool("0"), pool("1", capacity_tokens=20_000)), gpus=2))

    # THEN
    assert ("fault", 20_000) == (actual.status, evidence(actual)["capacity"])


def test_an_engine_that_does_not_tell_its_capacity_is_judged_by_what_ran() -> None:
    """Versions before 0.24 report no capacity: the request that ran is the evidence."""
    # GIVEN such an engine
    actual = verdict(World(pools=(pool(capacity_tokens=None, max_concurrency=None),)))

    # THEN
    assert ("ok", None) == (actual.status, evidence(actual)["capacity"])


def each_minute(*engines: Engine) -> Finding:
    """The rule's one finding on one reading of the engine each minute, without any steps."""
    samples = tuple(Sample(at_seconds=60.0 * minute, engines=(one,)) for minute, one in enumerate(engines))
    (found,) = judge(Timeline(samples=samples), Facts(pools=(pool(),)), DEFAULT_LIMITS)
    return found


STUCK = holding(6144, running=1, waiting=5)


def test_a_request_that_has_the_whole_pool_and_gets_no_token_is_a_fault() -> None:
    """It needs a block more than there is, and everything behind it waits."""
    # WHEN a server works for two minutes, and then stands still for five
    actual = each_minute(*[holding(300, running=3)] * 2, *[STUCK] * 6)

    # THEN
    sentence = (
        "one request holds all of the pool (98,320 tokens) and got no token in 5 minutes, 5 wait behind it: "
        "its context needs more than there is"
    )
    assert ("fault", sentence) == (actual.status, actual.summary)
    assert {"without_a_token": 300.0, "most_waiting": 5}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    "readings",
    [
        [replace(STUCK, generation_tokens_total=number) for number in range(8)],
        [replace(STUCK, requests_waiting=0)] * 8,
        [replace(STUCK, requests_running=2)] * 8,
        [holding(6000, running=1, waiting=5)] * 8,
        [STUCK] * 3,
        [replace(STUCK, generation_tokens_total=None)] * 8,
        [*[STUCK] * 3, engine(), *[STUCK] * 3],
    ],
    ids=["tokens come", "nobody waits", "two run", "blocks are left", "for a moment", "not counted", "it goes on"],
)
def test_a_full_pool_alone_is_not_stuck(readings: list[Engine]) -> None:
    """A long request that fills the pool and gets its tokens is what a pool is for."""
    # THEN
    assert "unknown" == each_minute(*readings).status
