"""Series of hours as they are gathered: whose bytes, how often read, from when on, and what the engines did beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest

from kvdiag.diagnosis.history import GROUPS, UNTOLD, Company, Holder, Part, company, history, watch_all
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Allocator, Device, Engine, Facts, HostProcess, Sample, Timeline
from tests.builders.values import GIB, MIB, allocator, device, engine, process

KNOWN = Facts(server_pids=(100,))


def at(
    seconds: float,
    *engines: Engine,
    devices: tuple[Device, ...] | None = None,
    allocators: tuple[Allocator, ...] | None = None,
    host: tuple[HostProcess, ...] | None = None,
) -> Sample:
    """A sample of these parts."""
    return Sample(at_seconds=seconds, engines=engines or None, devices=devices, allocators=allocators, host=host)


def timeline(*samples: Sample) -> Timeline:
    """A timeline of samples."""
    return Timeline(samples=samples)


def on_host(pid: int, anonymous: int | None, resident: int = GIB, name: str = "vllm") -> HostProcess:
    """A process of the server on the host."""
    return HostProcess(pid=pid, name=name, resident_bytes=resident, anonymous_bytes=anonymous)


def test_every_component_is_read_together_with_others() -> None:
    """What one of them lacks at the end is gone: each is in one group."""
    assert sorted(get_args(Part)) == sorted(part for group in GROUPS for part in group)


def by_name(readings: dict[Holder, tuple[list[float], list[int]]]) -> dict[str, tuple[list[float], list[int]]]:
    """The series by whose they are, in words."""
    return {holder.who: line for holder, line in readings.items()}


def served(seconds: float, *, idle: bool = False, usage: float | None = 0.5, asleep: bool | None = None) -> Sample:
    """One engine's page."""
    return at(seconds, replace(engine(usage=usage, running=0 if idle else 3), asleep=asleep))


def test_engines_are_told_of_by_their_newest_reading() -> None:
    """Idle 5 s after the last request, for 90 s after the reading, and nothing before the first."""
    # GIVEN a request that is over by second 10
    seen = company(timeline(served(5.0), served(10.0, idle=True, usage=0.0), served(15.0, idle=True, usage=0.25)))

    # THEN
    assert UNTOLD == seen.at(4.9, DEFAULT_LIMITS)
    assert (False, 0.5, False) == seen.at(5.0, DEFAULT_LIMITS)
    assert (False, 0.0, False) == seen.at(14.9, DEFAULT_LIMITS)
    assert (True, 0.25, False) == seen.at(15.0, DEFAULT_LIMITS)
    assert (True, 0.25, False) == seen.at(105.0, DEFAULT_LIMITS)
    assert UNTOLD == seen.at(105.1, DEFAULT_LIMITS)
    assert (False, None, False) == UNTOLD


def test_company_is_over_all_engines() -> None:
    """Idle when all are, as full as all together, asleep when one is; requests where usage is not told."""
    # GIVEN
    first, second = engine(usage=0.25), replace(engine(usage=None, running=3, label="1"), asleep=True)

    # WHEN
    actual = company(
        timeline(
            at(1.0, first, engine(usage=0.5, label="1")),
            at(2.0, first, second),
            at(3.0),
            at(4.0, engine(waiting=1)),
            at(5.0, engine(usage=None, running=None)),
            Sample(at_seconds=6.0, engines=()),
            at(7.0, engine()),
        )
    )

    # THEN
    assert (1.0, 2.0, 4.0, 5.0, 6.0, 7.0) == actual.times_seconds
    assert (0.75, 3.25, 0.0, 0.0, 0.0, 0.0) == actual.load
    assert (False, True, False, False, False, False) == actual.asleep
    assert (1.0, math.inf, math.inf, math.inf, math.inf, 7.0) == actual.idle_since_seconds
    assert (None, False) == (actual.began_seconds, actual.fresh)


def counting(seconds: float, *prompts: int, generated: int | None = 0) -> Sample:
    """Engines by their prompt tokens."""
    return at(
        seconds,
        *(
            replace(engine(prompt_tokens=tokens, label=str(number)), generation_tokens_total=generated)
            for number, tokens in enumerate(prompts)
        ),
    )


def test_restart_is_a_counter_that_falls() -> None:
    """Of any engine, at the newest such reading; one that stands still is none."""
    assert company(timeline(counting(1.0, 5, 9), counting(2.0, 5, 9), counting(3.0, 6, 12))).began_seconds is None
    restarts = timeline(
        counting(1.0, 5, 9), counting(2.0, 5, 8), counting(3.0, 0, 9), counting(4.0, 7, 9), at(5.0, engine())
    )
    assert 5.0 == company(restarts).began_seconds
    assert 3.0 == company(timeline(*restarts.samples[:4])).began_seconds


@pytest.mark.parametrize(
    ("first", "last", "fresh"), [(0, 5, True), (0, 0, False), (1, 5, False), (None, 5, False), (0, None, True)]
)
def test_a_server_is_seen_from_its_start_where_it_had_generated_nothing(
    first: int | None, last: int | None, *, fresh: bool
) -> None:
    """A counter that never moves tells nothing."""
    assert fresh == company(timeline(counting(1.0, 0, generated=first), counting(9.0, 0, generated=last))).fresh
    assert not company(timeline()).fresh


def test_host_memory_is_that_of_each_process_and_of_all() -> None:
    """Anonymous bytes, together while all tell them; resident ones of a process that does not."""
    # GIVEN
    host = (on_host(100, 5 * MIB), on_host(101, 7 * MIB, name=""))
    untold = (on_host(100, 6 * MIB), on_host(101, None, 9 * MIB, name=""))

    # WHEN
    actual = history(
        timeline(at(0.0, host=host), at(15.0, host=untold), at(30.0, host=host[:1])), KNOWN, DEFAULT_LIMITS
    )

    # THEN
    assert {
        "vllm 100": ([0.0, 15.0, 30.0], [5 * MIB, 6 * MIB, 5 * MIB]),
        "process 101": ([0.0], [7 * MIB]),
    } == by_name(actual.anonymous)
    assert {"the server's 2 processes together": ([0.0], [12 * MIB])} == by_name(actual.together)
    assert {"process 101": ([15.0], [9 * MIB])} == by_name(actual.resident)
    assert {""} == {holder.device_uuid for holder in actual.anonymous}


def test_readings_are_kept_four_times_a_minute() -> None:
    """One within 14.5 s of the last that was kept adds nothing; other processes are another source."""
    # GIVEN
    host = (on_host(100, MIB),)
    samples = [at(seconds, host=host) for seconds in (0.0, 14.4, 14.5, 20.0, 29.0)]

    # WHEN
    actual = history(timeline(*samples), KNOWN, DEFAULT_LIMITS)
    torch = history(
        timeline(*(at(seconds, allocators=(allocator(),)) for seconds in (0.0, 14.4, 14.5, 20.0, 29.0))),
        KNOWN,
        DEFAULT_LIMITS,
    )
    devices = history(
        timeline(*(at(seconds, devices=(device(),)) for seconds in (0.0, 14.4, 14.5, 20.0, 29.0))),
        KNOWN,
        DEFAULT_LIMITS,
    )

    # THEN
    assert [0.0, 14.5, 29.0] == by_name(actual.anonymous)["vllm 100"][0]
    assert [0.0, 14.5, 29.0] == by_name(torch.live)["process 100"][0]
    assert [0.0, 14.5, 29.0] == by_name(devices.whole)["GPU 0"][0]


def test_torch_is_live_reserved_unused_and_outside() -> None:
    """Of processes that may be the server's, by the name that they bear; what is beside torch only where it is told."""
    # GIVEN
    told = replace(allocator(device_uuid="AB", process_bytes=9 * GIB), title="VLLM::Worker")
    other = allocator(pid=101, pid_seen=False)
    stranger = allocator(pid=7)

    # WHEN
    actual = history(timeline(at(0.0, allocators=(stranger, told, other))), KNOWN, DEFAULT_LIMITS)

    # THEN
    assert {"VLLM::Worker 100": [6 * GIB], "process 101": [6 * GIB]} == {
        name: line[1] for name, line in by_name(actual.live).items()
    }
    assert [8 * GIB] == by_name(actual.reserved)["VLLM::Worker 100"][1]
    assert [2 * GIB] == by_name(actual.unused)["VLLM::Worker 100"][1]
    assert {"VLLM::Worker 100": ([0.0], [GIB])} == by_name(actual.outside)
    assert {"ab", "0"} == {holder.device_uuid for holder in actual.live}


def test_devices_are_the_servers_where_its_processes_were_seen() -> None:
    """Its own bytes and those of others; a device that is not its own, and a reading without lists, do not count."""

    # GIVEN
    def listed(seconds: float, own: int, used: int) -> Sample:
        mine = device(0, used_bytes=used, processes=(process(100, own), process(7, GIB)))
        return at(seconds, devices=(mine, device(1)))

    # WHEN
    actual = history(
        timeline(
            listed(0.0, 4 * GIB, 6 * GIB), at(15.0, devices=(device(0), device(1))), listed(16.0, 5 * GIB, 4 * GIB)
        ),
        KNOWN,
        DEFAULT_LIMITS,
    )

    # THEN more of its own than of all is no others
    assert {"GPU 0": ([0.0, 16.0], [4 * GIB, 5 * GIB])} == by_name(actual.server)
    assert {"GPU 0": ([0.0, 16.0], [2 * GIB, 0])} == by_name(actual.others)
    assert {} == by_name(actual.whole)
    assert {"0"} == {holder.device_uuid for holder in actual.server}


def test_devices_are_whole_where_nobody_tells_whose_bytes_they_hold() -> None:
    """All of them, else those that were assigned; one without a memory reading tells nothing."""
    seen = timeline(at(0.0, devices=(device(0), device(1, used_bytes=None), device(2))))
    assert {"GPU 0", "GPU 2"} == set(by_name(history(seen, Facts(), DEFAULT_LIMITS).whole))
    assigned = Facts(device_uuids=("GPU-2",))
    assert {"GPU 2": ([0.0], [20 * GIB])} == by_name(history(timeline(*seen.samples), assigned, DEFAULT_LIMITS).whole)


def test_growth_is_what_is_held_beyond_the_first_reading() -> None:
    """Never less than nothing; a part moved where its largest and smallest are so far apart."""
    # GIVEN
    samples = [at(15.0 * step, host=(on_host(100, size),)) for step, size in enumerate((5, 9, 3, 8))]
    seen = history(timeline(*samples), KNOWN, DEFAULT_LIMITS)
    fallen = history(timeline(*samples[:3]), KNOWN, DEFAULT_LIMITS)
    (holder,) = seen.anonymous

    # THEN
    assert (3, 0) == (seen.grown_bytes("anonymous", holder), fallen.grown_bytes("anonymous", holder))
    assert [True, False] == [seen.grew("anonymous", 6), seen.grew("anonymous", 7)]
    assert not seen.grew("live", 0)


def company_of(times: Sequence[float], **changes: object) -> Company:
    """Engines that run at every one of these times."""
    usual = Company(
        times_seconds=tuple(times),
        idle_since_seconds=(math.inf,) * len(times),
        load=(0.5,) * len(times),
        asleep=(False,) * len(times),
        began_seconds=None,
        fresh=False,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def line(start: float, end: float, tick: float = 30.0) -> tuple[list[float], list[int]]:
    """Equal readings from a moment to another."""
    times = [start + tick * step for step in range(int((end - start) / tick) + 1)]
    return times, [GIB] * len(times)


def lasted(
    readings: dict[str, tuple[list[float], list[int]]], beside: Company, since: float = -math.inf
) -> dict[str, float]:
    """How long each series is that is watched."""
    moments = {seconds: beside.at(seconds, DEFAULT_LIMITS) for times, _ in readings.values() for seconds in times}
    watched = watch_all(readings, list(readings.values()), beside, moments, DEFAULT_LIMITS, since)
    return {key: one.seconds for key, one in watched.items()}


def test_what_was_not_there_to_the_end_is_gone() -> None:
    """A newest reading 5 min before the newest of all is of something that ended."""
    readings = {"a": line(0.0, 3600.0), "b": line(0.0, 3300.0), "c": line(0.0, 3270.0)}
    assert {"a": 3600.0, "b": 3300.0} == lasted(readings, company_of(()))


def test_half_an_hour_of_a_beginning_is_left_out() -> None:
    """Where it was seen: a process that came later than others, engines that were fresh, or that restarted."""
    # GIVEN
    whole = {"a": line(0.0, 7200.0)}

    # THEN
    assert {"a": 7200.0} == lasted(whole, company_of(()))
    assert {"a": 5400.0} == lasted(whole, company_of((), fresh=True))
    assert {"a": 6900.0} == lasted(whole, company_of((), began_seconds=300.0))
    assert {"a": 5070.0} == lasted(whole, company_of((), began_seconds=330.0))
    assert {"a": 7200.0, "b": 6900.0} == lasted({**whole, "b": line(300.0, 7200.0)}, company_of(()))
    assert {"a": 7200.0, "b": 5070.0} == lasted({**whole, "b": line(330.0, 7200.0)}, company_of(()))
    assert {"a": 1200.0} == lasted(whole, company_of(()), since=6000.0)
    assert {"a": 5400.0} == lasted(whole, company_of((), fresh=True), since=600.0)


def test_readings_beside_engines_asleep_are_left_out() -> None:
    """Their weights are elsewhere meanwhile."""
    # GIVEN engines that fall asleep half an hour before the end
    times = [30.0 * step for step in range(241)]
    beside = company_of(times, asleep=tuple(seconds >= 5400.0 for seconds in times))
    assert {"a": 5370.0} == lasted({"a": line(0.0, 7200.0)}, beside)


def test_start_that_was_told_is_a_beginning() -> None:
    """The first half hour after a server's start does not count, whoever saw it."""
    # GIVEN two hours of readings of a server that was started ten minutes before them
    samples = [at(600.0 + 30.0 * step, host=(on_host(100, GIB),)) for step in range(241)]
    started = replace(KNOWN, started_seconds=0.0)

    # WHEN
    (actual,) = history(timeline(*samples), started, DEFAULT_LIMITS).watched("anonymous", DEFAULT_LIMITS).values()

    # THEN
    assert 6000.0 == actual.seconds
