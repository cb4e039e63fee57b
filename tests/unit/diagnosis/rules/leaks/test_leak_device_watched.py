"""leak.device_torch and leak.device_non_torch over hours of samples, and over a soak."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.growth.attribution import CULPRIT, NON_TORCH, TORCH, UNDECIDED
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge as fragmented
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Finding, Timeline
from tests.builders.answers import evidence, rows, statuses
from tests.builders.runs import run
from tests.builders.series import (
    MODELS,
    Part,
    device_part,
    host_part,
    timeline,
    torch_part,
)
from tests.builders.soak_timeline import NONE, Seen, after_cycles, after_requests, facts_of, soak
from tests.builders.values import GIB, MIB, SERVER_PID, split
from tests.builders.worlds import World, facts

FACTS = facts(World())


def verdicts(seen: Timeline) -> dict[str, Finding]:
    """The rule's findings on a timeline, by id."""
    return {one.id: one for one in judge(seen, FACTS, DEFAULT_LIMITS)}


@pytest.mark.parametrize("busy", [True, False], ids=["under load", "idle"])
def test_process_that_grows_for_hours_is_a_fault_with_the_time_that_is_left(busy: bool) -> None:
    """200 MB/h of device memory over seven hours are a fault, with the time until the device is full.

    NVML does not show which part grows: of an engine that allocates through torch, the torch verdict is likelier.
    """
    actual = verdicts(timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=device_part, busy=busy))

    shown = evidence(actual[TORCH])
    left = shown["time_to_exhaustion"]
    assert {TORCH: "fault", NON_TORCH: "unknown"} == statuses(tuple(actual.values()))
    assert "GPU 0 (the server's process)" == actual[TORCH].holder
    assert isinstance(left, float)
    # 80 GiB less 28 of the process, 2 of others and what it grew
    assert pytest.approx((50 * GIB - 7 * 200e6) / 200e6 * 3600.0, rel=0.05) == left


def burst(minutes: float, mb_per_hour: float) -> Timeline:
    """A device that grows so fast after a seventh of so many minutes."""
    return timeline(
        "filled cache",
        hours=minutes / 60.0,
        tick_seconds=10.0,
        leak_mb_per_hour=mb_per_hour,
        onset=0.15,
        part=device_part,
    )


def test_twenty_gib_in_minutes_are_a_fault_before_the_first_hour() -> None:
    """A leak that leaves less than an hour is a fault before the first hour; a slower one is still unknown."""
    actual, other = (judge(burst(35.0, rate), FACTS, DEFAULT_LIMITS) for rate in (90_000.0, 10_000.0))

    # With more room the window of an hour is waited for
    assert {TORCH: "fault", NON_TORCH: "unknown"} == statuses(actual)
    assert {TORCH: "unknown", NON_TORCH: "unknown"} == statuses(other)
    assert actual[0].growth is not None
    assert (actual[0].growth.exhaustion_seconds or 0.0) < 3600.0
    # Minutes of it are evidence, too
    assert ("window", 0.17, "hours", "kvdiag") == rows(verdicts(burst(15.0, 90_000.0))[TORCH])[0]


def test_model_that_loads_is_no_burst() -> None:
    """Before the engine answers, memory is taken faster than by any leak."""
    samples = tuple(replace(sample, engines=None) for sample in burst(36.0, 90_000.0).samples)
    assert {TORCH: "unknown", NON_TORCH: "unknown"} == statuses(judge(Timeline(samples=samples), FACTS, DEFAULT_LIMITS))


def test_sleep_is_no_growth() -> None:
    """Memory that an engine gives back while it sleeps, and takes again, is neither a fall nor a rise."""
    seen = timeline("pool", hours=8.0, part=device_part)
    begin = seen.samples[0].at_seconds
    samples = []
    for sample in seen.samples:
        asleep = (sample.at_seconds - begin) // 600.0 % 6 == 5
        (page,) = sample.engines or ()
        devices = device_part(5 * GIB).devices if asleep else sample.devices
        samples.append(replace(sample, engines=(replace(page, asleep=asleep),), devices=devices))

    actual = judge(Timeline(samples=tuple(samples)), FACTS, DEFAULT_LIMITS)

    assert {TORCH: "ok", NON_TORCH: "ok"} == statuses(actual)
    assert {0.0} == {evidence(one)["growth_of_the_floor"] for one in actual}


def test_holes_of_torch_that_grow_are_fragmentation() -> None:
    """Reserved bytes that nothing lives in, more of them each hour, and not what torch could give back."""
    seen = timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=torch_part(reserved=True))
    holes = split(live_bytes=0, stranded_bytes=8 * GIB, releasable_bytes=0)
    samples = tuple(
        replace(sample, allocators=tuple(replace(each, split=holes) for each in sample.allocators or ()))
        for sample in seen.samples
    )
    (actual,) = fragmented(Timeline(samples=samples), FACTS, DEFAULT_LIMITS)
    assert ("fault", 0.0) == (actual.status, evidence(actual)["live_growth_per_hour"])


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
    actual = verdicts(timeline("filled cache", hours=7.0, leak_mb_per_hour=200.0, part=part))
    assert {TORCH: torch, NON_TORCH: beside} == statuses(tuple(actual.values()))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "random walk"])
@pytest.mark.parametrize("part", [device_part, torch_part(live=True)], ids=["NVML", "torch"])
def test_healthy_device_memory_is_silent(name: str, part: Part) -> None:
    """What a healthy server's memory does over eight hours is no leak, by NVML or by torch."""
    actual = [verdicts(timeline(name, seed, hours=8.0, part=part)) for seed in range(2)]
    # Noise as slow as an hour may stay open
    found = {status for one in actual for status in statuses(tuple(one.values())).values()}
    assert found <= ({"ok", "unknown"} if name == "slow noise" else {"ok"})


def test_window_too_short_is_unknown_and_names_what_decides() -> None:
    """Half an hour without steps is neither cycles nor a window."""
    actual = verdicts(timeline("pool", hours=0.5, leak_mb_per_hour=5000.0, part=device_part))
    assert {TORCH: "unknown", NON_TORCH: "unknown"} == statuses(tuple(actual.values()))
    assert all("sample for 1 h" in one.summary for one in actual.values())


def test_steps_are_judged_by_their_cycles_alone() -> None:
    """Hours of samples before a run do not change the findings on its cycles."""
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

    assert judge(cycles, FACTS, DEFAULT_LIMITS) == judge(later, FACTS, DEFAULT_LIMITS)


def test_a_day_of_every_source_names_who_leaks() -> None:
    """Of device, torch and host together at one reading in ten seconds."""
    whole = timeline("fast noise", hours=24.0, tick_seconds=10.0, part=torch_part(live=True))
    samples = tuple(replace(sample, host=host_part(20 * GIB).host) for sample in whole.samples)

    actual = diagnose(Timeline(samples=samples), FACTS)

    assert {f"VLLM::Worker {SERVER_PID}"} == {
        str(one.value)
        for found in actual.findings
        if found.id == TORCH
        for one in found.evidence
        if one.name == "holder"
    }


def test_beginning_that_is_reported_is_left_out() -> None:
    """The first half hour after a known start is not growth, even if the samples begin with it."""
    # 30 GiB that come within 25 minutes
    seen = timeline("pool", hours=2.0, part=device_part)
    begin = seen.samples[0].at_seconds
    samples = tuple(
        replace(
            sample,
            devices=device_part(10 * GIB + int(min((sample.at_seconds - begin) / 1500.0, 1.0) * 30 * GIB)).devices,
        )
        for sample in seen.samples
    )

    actual = judge(Timeline(samples=samples), replace(FACTS, started_seconds=begin), DEFAULT_LIMITS)

    assert {TORCH: "ok", NON_TORCH: "ok"} == statuses(actual)
    assert {0.0} == {evidence(one)["growth_of_the_floor"] for one in actual}


@pytest.mark.parametrize("mb_per_hour", [200.0, 1000.0, 3500.0])
def test_no_cache_explains_growth_of_a_device(mb_per_hour: float) -> None:
    """However much room there is: what engines keep on a device they take at start."""
    # Growth on a GPU with 50 GiB of room
    seen = timeline("pool", hours=3.0 if mb_per_hour > 500.0 else 7.0, leak_mb_per_hour=mb_per_hour, part=device_part)
    assert "fault" == verdicts(seen)[TORCH].status


LEAK = after_requests(MIB)

NO_CYCLES = "fewer than 5 equal requests"


def told(seen: Seen, engine_name: str | None = "vllm") -> tuple[Finding, Finding]:
    """Both findings, torch's first."""
    known = replace(facts_of(), engine_name=engine_name)
    found = {one.id: one for one in judge(soak(seen), known, DEFAULT_LIMITS)}
    return found[TORCH], found[NON_TORCH]


@pytest.mark.parametrize(
    ("seen", "torch", "beside"),
    [
        (
            Seen(live=LEAK, beside=NONE),
            ("fault", "allocated memory grows"),
            ("ok", "memory outside torch is flat"),
        ),
        (
            Seen(live=NONE, beside=LEAK),
            ("ok", "allocated memory is flat"),
            ("fault", "memory outside torch grows"),
        ),
        (Seen(live=NONE, beside=None), ("ok", "allocated memory is flat"), ("unknown", NO_CYCLES)),
        (Seen(live=LEAK, server=LEAK), ("fault", "allocated memory grows"), ("unknown", NO_CYCLES)),
    ],
    ids=["live", "beside", "flat, rest not told", "live, rest not told"],
)
def test_where_agents_tell_each_has_its_own(seen: Seen, torch: tuple[str, str], beside: tuple[str, str]) -> None:
    """Live and non-torch bytes of agents decide each verdict; a part that is not reported stays unknown."""
    for (status, words), actual in zip((torch, beside), told(seen), strict=True):
        assert words in actual.summary
        assert status == actual.status


@pytest.mark.parametrize("server_reported", [True, False], ids=["the server's bytes", "the device's"])
def test_what_nvml_alone_sees_stand_still_is_flat_in_both(server_reported: bool) -> None:
    """Flat device memory is ok inside and outside torch: one sentence for both, with the same figures."""
    torch, beside = told(Seen(server_reported=server_reported))
    assert ("ok", "ok") == (torch.status, beside.status)
    assert 19 == evidence(torch)["judged_load_cycles"]
    assert torch == replace(beside, id=TORCH)


@pytest.mark.parametrize(
    ("engine_name", "likely"), [("vllm", TORCH), (None, NON_TORCH)], ids=["an engine of torch's", "another"]
)
@pytest.mark.parametrize("server_reported", [True, False], ids=["the server's bytes", "the device's"])
def test_what_nvml_alone_sees_grow_is_called_what_it_mostly_is(
    engine_name: str | None, likely: str, server_reported: bool
) -> None:
    """As sure that it grows, and no culprit is named: either verdict, and both say what would decide."""
    found = told(Seen(server=LEAK, server_reported=server_reported), engine_name)
    called, other = found if likely == TORCH else found[::-1]
    assert ("fault", other.id) == (called.status, called.or_id)
    assert CULPRIT == called.likely_cause
    assert called.summary.endswith(CULPRIT)
    assert MIB == evidence(called)["growth_per_request"]
    assert ("unknown", f"{UNDECIDED}", ()) == (other.status, other.summary, other.evidence)


def test_growth_that_idle_cycles_show_as_well_is_not_the_requests() -> None:
    """Growth in idle cycles, too, is a suspect if the server's bytes are reported, and unknown if the device's are."""
    found = [told(Seen(server=after_cycles(4 * MIB), server_reported=one))[0].status for one in (True, False)]
    assert ["suspect", "unknown"] == found
