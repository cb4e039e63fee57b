"""leak.host: the room that is left of the host's memory, and which of a process's bytes count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_host import judge
from kvdiag.model import Facts, Finding, HostProcess, Sample, Timeline
from tests.builders.answers import evidence
from tests.builders.series import host_part, timeline
from tests.builders.values import GIB, engine
from tests.builders.worlds import World, facts

HOURS, RATE = 3.0, 500e6
"""Of growth, and bytes in each of them."""


def grown(limit_bytes: int | None, *after: Sample) -> Finding:
    """The finding on an engine core that grows from 20 GiB, beside 2 of an API server, then further samples."""
    seen = timeline("pool", hours=HOURS, leak_mb_per_hour=RATE / 1e6, part=host_part)
    end = seen.samples[-1].at_seconds
    samples = (*seen.samples, *(replace(one, at_seconds=end + number) for number, one in enumerate(after, start=1)))
    known: Facts = replace(facts(World()), host_limit_bytes=limit_bytes)
    (found,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)
    return found


TAKEN = 22 * GIB + int(HOURS * RATE)
"""The anonymous bytes of both at the end."""


@pytest.mark.parametrize(
    ("limit_bytes", "hours"),
    [(TAKEN + int(10 * RATE), 10.0), (TAKEN + int(RATE), 1.0), (TAKEN - 5 * GIB, 0.0), (None, None)],
    ids=["ten hours", "one hour", "no room", "limit not told"],
)
def test_the_room_is_the_limit_less_what_all_processes_hold(limit_bytes: int | None, hours: float | None) -> None:
    """At 500 MB an hour; a limit that is passed leaves nothing, and none that is not told is made up."""
    actual = grown(limit_bytes, Sample(at_seconds=0.0, engines=(engine(),)), Sample(at_seconds=0.0, host=()))

    left = evidence(actual)["time_to_exhaustion"]
    assert actual.status in {"suspect", "fault"}
    assert left is None if hours is None else pytest.approx(hours * 3600.0, rel=0.02, abs=60.0) == left


def test_resident_bytes_count_no_more_than_anonymous_ones() -> None:
    """A process that tells both is judged by those that nobody can drop: mapped files come and go."""
    # A process whose resident bytes grow while its anonymous ones stand still
    seen = timeline("pool", hours=HOURS, leak_mb_per_hour=RATE / 1e6, part=host_part)
    samples = tuple(
        replace(
            one,
            host=tuple(
                HostProcess(pid=each.pid, name=each.name, resident_bytes=each.resident_bytes, anonymous_bytes=2 * GIB)
                for each in one.host or ()
            ),
        )
        for one in seen.samples
    )
    (actual,) = judge(Timeline(samples=samples), facts(World()), DEFAULT_LIMITS)

    assert ("ok", "flat") == (actual.status, evidence(actual)["decided_by"])
