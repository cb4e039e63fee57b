"""Ticks that do not drift, a recorder that wakes those who wait, and a sampler that no source can hold up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.feeds.live import (
    DRIVER_SECONDS,
    HOST_SECONDS,
    Clock,
    DeviceReading,
    HostReading,
    Pace,
    Recorder,
    Sampler,
    ticks,
)
from kvdiag.feeds.trace import TraceWriter, read_trace
from kvdiag.model import Device, Engine, Facts, Gap, Load, Mark, Sample, Timeline
from kvdiag.sources.http import HttpReader
from kvdiag.sources.patience import Patient
from kvdiag.sources.vllm import VllmSource
from tests.feeds.virtual_time import now_seconds, run, spend
from tests.fixtures.hostile import Answer, Hostile, Peer, endless, head, reply

LONG_SECONDS = 120.0


def ticked(period_seconds: float, busy_seconds: list[float]) -> list[tuple[int, float]]:
    """Number and time of each tick, where the work of each takes so long."""

    async def work() -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []
        async for number in ticks(period_seconds):
            seen.append((number, now_seconds()))
            if len(seen) > len(busy_seconds):
                return seen
            spend(busy_seconds[len(seen) - 1])
        raise AssertionError("ticks never end")

    return run(work())


def test_quick_work_is_ticked_at_each_time() -> None:
    """Work that is done before the next tick never shifts it."""
    # WHEN
    actual = ticked(0.5, [0.1, 0.4, 0.0, 0.49])

    # THEN
    assert [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)] == actual


def test_missed_ticks_are_skipped() -> None:
    """After work that took several ticks the next one comes at its own time, and none is made up for."""
    # WHEN
    actual = ticked(0.5, [1.25, 0.1, 0.75])

    # THEN
    assert [(0, 0.0), (3, 1.5), (4, 2.0), (6, 3.0)] == actual


@settings(deadline=None)
@given(
    period=st.sampled_from([0.1, 0.3, 1.0, 5.0]),
    busy=st.lists(st.floats(0.0, 20.0), max_size=20),
)
def test_ticks_never_drift(period: float, busy: list[float]) -> None:
    """Whatever the work takes, tick n comes at n periods, each later than the one before."""
    # WHEN
    seen = ticked(period, busy)

    # THEN
    numbers = [number for number, _ in seen]
    assert sorted(set(numbers)) == numbers
    assert [pytest.approx(number * period, abs=1e-6) for number in numbers] == [at for _, at in seen]


def sample(at_seconds: float, running: int = 0) -> Sample:
    """A reading of one engine."""
    return Sample(at_seconds=at_seconds, engines=(Engine(engine="0", requests_running=running),))


def running_in(samples: list[Sample]) -> list[int | None]:
    """What the engine's gauge said in each sample."""
    return [engine.requests_running for one in samples for engine in one.engines or ()]


def test_waiting_ends_with_what_is_waited_for() -> None:
    """Whoever waits for a condition is woken by the sample that makes it true, and sees none from before."""

    # GIVEN
    async def work() -> tuple[bool, list[int | None], float]:
        recorder = Recorder()
        recorder.add(sample(0.0, running=9))
        asked: list[list[Sample]] = []

        def done(samples: list[Sample]) -> bool:
            asked.append(samples)
            return 3 in running_in(samples)

        async def record() -> None:
            for number in range(1, 6):
                await asyncio.sleep(1.0)
                recorder.add(sample(float(number), running=number))

        async with asyncio.TaskGroup() as group:
            group.create_task(record())
            found = await recorder.wait_for(done, 100.0)
            at_seconds = now_seconds()
        return found, running_in(asked[-1]), at_seconds

    # WHEN
    actual = run(work())

    # THEN
    assert (True, [1, 2, 3], 3.0) == actual


def test_waiting_ends_at_its_limit() -> None:
    """A condition that never comes true is given up, whether samples come or not."""

    # GIVEN
    async def work() -> tuple[bool, bool, float]:
        recorder = Recorder()

        async def record() -> None:
            for number in range(20):
                await asyncio.sleep(1.0)
                recorder.add(sample(float(number)))

        silent = await recorder.wait_for(bool, 5.0)
        async with asyncio.TaskGroup() as group:
            recording = group.create_task(record())
            busy = await recorder.wait_for(lambda samples: 3 in running_in(samples), 5.0)
            at_seconds = now_seconds()
            recording.cancel()
        return silent, busy, at_seconds

    # WHEN
    actual = run(work())

    # THEN
    assert (False, False, 10.0) == actual


def test_what_is_true_already_is_not_waited_for() -> None:
    """A condition that holds of no samples at all needs none."""

    # GIVEN
    async def work() -> tuple[bool, float]:
        return await Recorder().wait_for(lambda samples: True, 5.0), now_seconds()

    # WHEN
    actual = run(work())

    # THEN
    assert (True, 0.0) == actual


def test_all_who_wait_are_woken() -> None:
    """Several tasks may wait for different things in the same samples."""

    # GIVEN
    async def work() -> list[bool]:
        recorder = Recorder()

        async def record() -> None:
            for number in range(1, 4):
                await asyncio.sleep(1.0)
                recorder.add(sample(float(number), running=number))

        def wait(running: int) -> asyncio.Task[bool]:
            return asyncio.create_task(recorder.wait_for(lambda samples: running in running_in(samples), 10.0))

        waiting = [wait(running) for running in (3, 1, 2, 4)]
        await record()
        return [await task for task in waiting]

    # WHEN
    actual = run(work())

    # THEN
    assert [True, True, True, False] == actual


def test_recorder_keeps_what_it_writes(tmp_path: Path) -> None:
    """The timeline in memory and the trace on disk are the same."""
    # GIVEN
    path = tmp_path / "trace.jsonl"
    mark = Mark(at_seconds=1.5, step="baseline", cycle=0, phase="begin")

    # WHEN
    with TraceWriter(path, Facts()) as trace:

        async def work() -> Timeline:
            recorder = Recorder(trace)
            for entry in (sample(1.0), mark, sample(2.0)):
                recorder.add(entry)
            assert 2 == recorder.count
            assert [sample(2.0)] == recorder.since(-1)
            return recorder.timeline()

        actual = run(work())

    # THEN
    assert Timeline(samples=(sample(1.0), sample(2.0)), marks=(mark,)) == actual
    assert (actual, Facts()) == read_trace(path)


PAGE = "vllm:num_requests_running 3.0\nvllm:kv_cache_usage_perc 0.5\n"
SEEN = Engine(engine="0", requests_running=3, kv_usage_ratio=0.5)
GPU = Device(uuid="GPU-1", index=0, name="", memory=None)
QUICK = Pace(engine_seconds=0.02, device_seconds=0.05, process_seconds=0.15, host_seconds=0.05)


def sampled(
    page: Answer,
    *,
    until: Callable[[list[Sample]], bool],
    read_devices: Callable[..., DeviceReading] = lambda **_: ((GPU,), ()),
    pids: tuple[int, ...] | None = None,
    read_host: Callable[..., HostReading] | None = None,
    answer_seconds: float = LONG_SECONDS,
    pace: Pace = QUICK,
) -> list[Sample]:
    """All that a sampler saw of a server until there was enough of it."""

    async def work(url: str) -> list[Sample]:
        recorder = Recorder()
        nvml = Patient(read_devices, "nvml")
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            sampler = Sampler(
                vllm=VllmSource(HttpReader(client, answer_seconds)),
                nvml=nvml,
                processes=None if read_host is None else Patient(read_host, "host"),
                facts=Facts(server_pids=pids),
                recorder=recorder,
                pace=pace,
                clock=Clock(),
                load=lambda: Load(requests=2, resident_tokens=(7,)),
            )
            sampling = asyncio.create_task(sampler.run())
            try:
                assert await recorder.wait_for(until, LONG_SECONDS)
            finally:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
                nvml.close()
        return recorder.since(0)

    with Hostile({"/metrics/": page}) as server:
        return asyncio.run(work(server.url))


def engine_readings(samples: list[Sample]) -> list[Sample]:
    """Samples that the engine was due in."""
    return [one for one in samples if one.engines or any(gap.source == "vllm" for gap in one.gaps)]


def device_readings(samples: list[Sample]) -> list[Sample]:
    """Samples that the devices were due in."""
    return [one for one in samples if one.devices or any(gap.source == "nvml" for gap in one.gaps)]


def test_sampler_reads_each_part_at_its_pace() -> None:
    """Engine, devices and host come in samples of their own; process lists with every third device reading."""
    # GIVEN
    asked: list[bool] = []

    def read_devices(*, processes: bool) -> DeviceReading:
        asked.append(processes)
        return (GPU,), ()

    # WHEN
    samples = sampled(
        reply(PAGE),
        until=lambda seen: len(asked) >= 7 and len(engine_readings(seen)) >= 5 and any(one.host for one in seen),
        read_devices=read_devices,
        pids=(1,),
    )

    # THEN
    engines = engine_readings(samples)
    expected = {((SEEN,), Load(requests=2, resident_tokens=(7,)), None, None, ())}
    assert expected == {(one.engines, one.load, one.devices, one.host, one.gaps) for one in engines}
    assert {((GPU,), None)} == {(one.devices, one.load) for one in device_readings(samples)}
    assert sorted(one.at_seconds for one in samples) == [one.at_seconds for one in samples]
    assert asked[0]
    assert any(not processes for processes in asked)


def test_server_that_fails_leaves_gaps() -> None:
    """An engine that cannot be read is a gap in its samples, tick after tick, with what our requests hold beside it."""
    # WHEN
    samples = sampled(reply("", status=500), until=lambda seen: len(engine_readings(seen)) >= 3)

    # THEN
    gap = Gap(source="vllm", kind="failed", reason="500 on /metrics/: check the URL, is a vLLM server there?")
    expected = {(None, Load(requests=2, resident_tokens=(7,)), (gap,))}
    assert expected == {(one.engines, one.load, one.gaps) for one in engine_readings(samples)}


def test_page_that_never_ends_holds_up_nothing_else() -> None:
    """While the engine's page does not end the devices are read on."""
    # GIVEN
    page = endless(head(), b"#", pause_seconds=0.01)

    # WHEN
    samples = sampled(
        page,
        until=lambda seen: bool(engine_readings(seen)) and len(device_readings(seen)) >= 3,
        answer_seconds=0.2,
    )

    # THEN
    gap = Gap(source="vllm", kind="failed", reason="no whole answer within 0.2 s on /metrics/")
    assert {(gap,)} == {one.gaps for one in engine_readings(samples)}


def test_driver_that_hangs_holds_up_nothing_else() -> None:
    """While the driver hangs the engine is read on, and the devices' samples say since when."""
    # GIVEN
    release = threading.Event()

    def hang(*, processes: bool) -> DeviceReading:
        release.wait(LONG_SECONDS)
        return None, ()

    # WHEN
    try:
        samples = sampled(
            reply(PAGE),
            until=lambda seen: len(device_readings(seen)) >= 2 and len(engine_readings(seen)) >= 5,
            read_devices=hang,
        )
    finally:
        release.set()

    # THEN
    reasons = {gap.reason for one in device_readings(samples) for gap in one.gaps}
    assert f"the driver has not answered for {DRIVER_SECONDS:.0f} s: its readings are stale" in reasons
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}


def test_process_that_hangs_holds_up_nothing_else() -> None:
    """While the host does not answer for a process it is said, and the engine is read on."""
    # GIVEN
    release = threading.Event()

    def hang(*, pids: tuple[int, ...]) -> HostReading:
        release.wait(LONG_SECONDS)
        return None, ()

    # WHEN
    try:
        samples = sampled(
            reply(PAGE),
            until=lambda seen: any(gap.source == "host" for one in seen for gap in one.gaps),
            pids=(1,),
            read_host=hang,
        )
    finally:
        release.set()

    # THEN
    gaps = {gap for one in samples for gap in one.gaps}
    reason = f"the host has not answered for {HOST_SECONDS:.0f} s: does a process hang in a driver?"
    assert {Gap(source="host", kind="failed", reason=reason)} == gaps
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}


def test_a_source_that_breaks_costs_its_own_readings() -> None:
    """What a reader of ours did not foresee is a gap that says so, tick after tick; the others are read on."""

    # GIVEN
    def broken(*, processes: bool) -> DeviceReading:
        raise ZeroDivisionError(f"processes={processes}")

    # WHEN
    samples = sampled(
        reply(PAGE),
        until=lambda seen: len(device_readings(seen)) >= 3 and len(engine_readings(seen)) >= 5,
        read_devices=broken,
    )

    # THEN
    gaps = [one.gaps for one in device_readings(samples)]
    reason = "kvdiag failed to read it (ZeroDivisionError); please report that with a log of -vv"
    assert (Gap(source="nvml", kind="failed", reason=reason),) == gaps[0]
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}


def test_slow_driver_is_asked_seldom() -> None:
    """A driver whose calls take long is left alone for as many times as long, and lists processes all the same."""
    # GIVEN a call that takes 20 ms, and a tenth of the time for all of them
    asked: list[tuple[float, bool]] = []

    def slow(*, processes: bool) -> DeviceReading:
        asked.append((time.monotonic(), processes))
        time.sleep(0.02)
        return (GPU,), ()

    # WHEN
    sampled(
        reply(PAGE),
        until=lambda seen: len(device_readings(seen)) >= 4,
        read_devices=slow,
        pace=replace(QUICK, device_seconds=0.01, process_seconds=0.03, most_driver_ratio=0.1),
    )

    # THEN a call comes no sooner than ten times its length after the one before
    assert all(later - earlier > 0.19 for (earlier, _), (later, _) in pairwise(asked))
    assert {True} == {processes for _, processes in asked}


def test_filter_that_is_not_known_is_given_up() -> None:
    """A server whose filtered page is empty is asked for the whole page from then on."""
    # GIVEN
    asked: list[bytes] = []

    def page(peer: Peer) -> None:
        target = peer.request_head.split(b" ")[1]
        asked.append(target)
        reply("" if b"name" in target else PAGE)(peer)

    # WHEN
    samples = sampled(page, until=lambda seen: len(engine_readings(seen)) >= 3)

    # THEN
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}
    assert [True, False, True, False, False] == [b"name" in target for target in asked[:5]]


def test_a_server_that_shows_no_engine_yet_is_asked_for_little_again() -> None:
    """A page that shows nothing, with a filter or without, says nothing about filters: they are used once it does."""
    # GIVEN a server whose first pages have no engine
    asked: list[bool] = []

    def page(peer: Peer) -> None:
        asked.append(b"name" in peer.request_head.split(b" ")[1])
        reply(PAGE if len(asked) > 4 else "process_open_fds 3.0\n")(peer)

    # WHEN
    samples = sampled(page, until=lambda seen: sum(one.engines is not None for one in seen) >= 2)

    # THEN
    assert [True, False, True, True, True, True] == asked[:6]
    assert (None, (SEEN,)) == (engine_readings(samples)[0].engines, engine_readings(samples)[-1].engines)


def test_clock_runs_forward() -> None:
    """The clock gives seconds since the epoch, and never less than before."""
    # GIVEN
    clock = Clock()

    # WHEN
    seen = [clock.now_seconds() for _ in range(1000)]

    # THEN
    assert sorted(seen) == seen
    assert seen[0] > 1_700_000_000
