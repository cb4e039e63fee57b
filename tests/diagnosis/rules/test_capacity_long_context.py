from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.capacity_long_context import judge
from kvdiag.model import Evidence, Finding
from tests.builders import GIB, MIB, OOM, OOM_WITH_ROOM, World, evidence, facts, pool, run


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
