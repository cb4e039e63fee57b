from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import NON_TORCH, TORCH, judge
from kvdiag.model import Finding, KvPool, Timeline
from tests.builders import GIB, SERVER_PID, World, evidence, facts, run, statuses
from tests.series import (
    MODELS,
    Part,
    device_part,
    hidden_device_part,
    host_part,
    timeline,
    torch_part,
)

FACTS = facts(World())


def verdicts(seen: Timeline) -> dict[str, Finding]:
    """The rule's findings on a timeline, by id."""
    return {one.id: one for one in judge(seen, FACTS, DEFAULT_LIMITS)}


@pytest.mark.parametrize("busy", [True, False], ids=["under load", "idle"])
def test_process_that_grows_for_hours_is_a_fault_with_the_time_that_is_left(busy: bool) -> None:
    """Two hundred MB/h of device memory are called over six hours; that NVML cannot tell whose inside is said."""
    # WHEN
    actual = verdicts(timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=device_part, busy=busy))

    # THEN
    shown = evidence(actual[NON_TORCH])
    left = shown["time_to_exhaustion"]
    assert {TORCH: "unknown", NON_TORCH: "fault"} == statuses(tuple(actual.values()))
    assert actual[NON_TORCH].summary.startswith("GPU 0, the server's process: device bytes keep growing, 19")
    assert actual[NON_TORCH].summary.endswith(
        "torch's allocator statistics would tell its allocations from others of the process"
    )
    assert ("and under load" if busy else "only") == shown["read_while_idle"]
    assert isinstance(left, float)
    # 80 GiB less 28 of the process, 2 of others and what it grew
    assert pytest.approx((50 * GIB - 7 * 200e6) / 200e6 * 3600.0, rel=0.05) == left


@pytest.mark.parametrize(("pools", "expected"), [(FACTS.pools, "fault"), ((), "suspect")], ids=["pool", "no pool"])
def test_device_whose_processes_are_not_listed(pools: tuple[KvPool, ...], expected: str) -> None:
    """Beside an engine that took its pool at its start there is no room for a neighbour; else it may be one's."""
    # WHEN
    seen = timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=hidden_device_part)
    actual = judge(seen, replace(FACTS, pools=pools), DEFAULT_LIMITS)

    # THEN
    assert {TORCH: "unknown", NON_TORCH: expected} == statuses(actual)


@pytest.mark.parametrize(
    ("part", "torch", "beside"),
    [
        (torch_part(live=True), "fault", "ok"),
        (torch_part(reserved=True), "ok", "ok"),
        (torch_part(outside=True), "ok", "fault"),
        (torch_part(outside=True, told=False), "ok", "fault"),
        (torch_part(live=True, told=False), "fault", "unknown"),
        (torch_part(), "ok", "ok"),
    ],
    ids=["live", "cache", "beside", "beside, by NVML here", "live, by NVML here", "nothing"],
)
def test_agents_tell_torch_from_what_is_beside(part: Part, torch: str, beside: str) -> None:
    """With the agents' figures over hours each of the two has a verdict of its own."""
    # WHEN
    actual = verdicts(timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=part))

    # THEN
    assert {TORCH: torch, NON_TORCH: beside} == statuses(tuple(actual.values()))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "random walk"])
@pytest.mark.parametrize("part", [device_part, torch_part(live=True)], ids=["NVML", "torch"])
def test_healthy_device_memory_is_silent(name: str, part: Part) -> None:
    """What a healthy server's memory does over eight hours is no leak, by NVML or by torch."""
    # WHEN
    actual = [verdicts(timeline(name, seed, hours=8.0, part=part)) for seed in range(2)]

    # THEN noise as slow as an hour may stay open
    found = {status for one in actual for status in statuses(tuple(one.values())).values()}
    assert found <= ({"ok", "unknown"} if name == "slow noise" else {"ok"})


def test_window_too_short_is_unknown_and_names_what_decides() -> None:
    """Half an hour without steps is neither cycles nor a bank."""
    # WHEN
    actual = verdicts(timeline("pool", hours=0.5, leak_mb_per_hour=5000.0, part=device_part))

    # THEN
    sentence = "cannot tell: 5 equal cycles with device readings after each are needed, or 1 h of readings"
    assert {TORCH: ("unknown", sentence), NON_TORCH: ("unknown", sentence)} == {
        verdict: (one.status, one.summary) for verdict, one in actual.items()
    }


def test_steps_are_judged_by_their_cycles_alone() -> None:
    """Hours of readings before a run change nothing of what its cycles say."""
    # GIVEN a run after eight hours of growth
    before = timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=device_part)
    cycles = run(World())
    shift = before.samples[-1].at_seconds + 1.0 - cycles.samples[0].at_seconds
    later = Timeline(
        samples=(
            *before.samples,
            *(replace(sample, at_seconds=sample.at_seconds + shift) for sample in cycles.samples),
        ),
        marks=tuple(replace(mark, at_seconds=mark.at_seconds + shift) for mark in cycles.marks),
    )

    # THEN
    assert judge(cycles, FACTS, DEFAULT_LIMITS) == judge(later, FACTS, DEFAULT_LIMITS)


def test_a_day_of_every_source_names_who_leaks() -> None:
    """Of device, torch and host together at one reading in ten seconds."""
    # GIVEN
    whole = timeline("fast noise", hours=24.0, tick_seconds=10.0, part=torch_part(live=True))
    samples = tuple(replace(sample, host=host_part(20 * GIB).host) for sample in whole.samples)

    # WHEN
    actual = diagnose(Timeline(samples=samples), FACTS)

    # THEN
    assert {f"VLLM::Worker {SERVER_PID}"} == {
        str(one.value)
        for found in actual.findings
        if found.id == TORCH
        for one in found.evidence
        if one.name == "holder"
    }
