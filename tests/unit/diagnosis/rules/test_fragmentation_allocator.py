from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Evidence, Finding
from tests.builders.answers import ANY_TEXT
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, OOM, OOM_WITH_ROOM
from tests.builders.worlds import World, facts


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_an_allocation_that_failed_with_room_left_is_a_fault() -> None:
    """2.5 GiB failed although 3.45 GiB were free or unused: no hole was large enough."""
    # A server that fails ten requests with such a message
    actual = verdict(World(failing={"concurrent": OOM_WITH_ROOM}))
    expected = Finding(
        id="fragmentation.allocator",
        status="fault",
        summary=ANY_TEXT,
        evidence=(
            Evidence(name="requested", value=5 * GIB // 2, unit="bytes", source="torch's message"),
            Evidence(name="free_on_device", value=512 * MIB, unit="bytes", source="torch's message"),
            Evidence(name="reserved_but_unallocated", value=int(2.95 * GIB), unit="bytes", source="torch's message"),
            Evidence(name="failed_requests", value=10, unit="requests", source="step concurrent"),
        ),
    )

    assert expected == actual


def test_exhaustion_is_not_fragmentation() -> None:
    """An allocation larger than all that was left would have failed without a single hole."""
    # 3 GiB asked of 0.75 GiB
    actual = verdict(World(failing={"long_context": OOM}))

    assert "ok" == actual.status


@pytest.mark.parametrize(
    "world",
    [
        World(),
        World(failing={"concurrent": "HTTP 500: internal error"}),
        World(failing={"concurrent": "CUDA out of memory. Tried to allocate 3.00 GiB."}),
        World(lost_in="single_request"),
    ],
    ids=["nothing failed", "failed otherwise", "figures missing", "server lost"],
)
def test_without_a_failed_allocation_it_is_unknown(world: World) -> None:
    """What lies idle inside the allocator is not visible from outside, and is not guessed."""
    actual = verdict(world)

    assert "unknown" == actual.status


def test_a_failure_without_holes_does_not_hide_one_with() -> None:
    """Of two failed steps the one with room left decides, whichever came first."""
    # Both kinds of failure in either order
    first = verdict(World(failing={"concurrent": OOM_WITH_ROOM, "long_context": OOM}))
    second = verdict(World(failing={"concurrent": OOM, "long_context": OOM_WITH_ROOM}))

    assert ("fault", "fault") == (first.status, second.status)
