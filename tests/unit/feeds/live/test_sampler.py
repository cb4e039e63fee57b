"""A sampler that reads each source at its pace, and that no source can hold up."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.live.sampling import (
    DRIVER_SECONDS,
    Clock,
    HostReading,
    Pace,
    Sampler,
    TimelineBuilder,
    read_agents,
)
from kvdiag.model import Allocator, Device, Engine, Facts, Gap, Load, Memory, Sample
from kvdiag.sources import host
from kvdiag.sources.agents.agent_publication import devices_inside
from kvdiag.sources.agents.allocator_files import AgentReading
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.http import HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.answers import containing
from tests.fixtures.hostile import Answer, Hostile, Peer, endless, head, reply

LONG_SECONDS = 120.0

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
    agents: ThreadedReader[AgentReading] | None = None,
    answer_seconds: float = LONG_SECONDS,
    pace: Pace = QUICK,
) -> list[Sample]:
    """All that a sampler saw of a server until there was enough of it."""

    async def work(url: str) -> list[Sample]:
        recorder = TimelineBuilder()
        nvml = ThreadedReader(read_devices, "nvml")
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            sampler = Sampler(
                engine=ENGINE.open(HttpReader(client, answer_seconds)),
                nvml=nvml,
                agents=agents,
                processes=ThreadedReader(read_host or host.read, "host"),
                facts=Facts(server_pids=pids),
                record=recorder.add,
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


@contextmanager
def hanging() -> Iterator[Callable[..., Any]]:
    """A reader that answers only after the block."""
    release = threading.Event()

    def read(**_: object) -> Any:
        release.wait(LONG_SECONDS)
        return None, ()

    try:
        yield read
    finally:
        release.set()


def engine_readings(samples: list[Sample]) -> list[Sample]:
    """Samples that the engine was due in."""
    return [one for one in samples if one.engines or any(gap.source == "engine" for gap in one.gaps)]


def device_readings(samples: list[Sample]) -> list[Sample]:
    """Samples that the devices were due in."""
    return [one for one in samples if one.devices or any(gap.source == "nvml" for gap in one.gaps)]


def test_sampler_reads_each_part_at_its_pace() -> None:
    """Engine, devices and host come in samples of their own; process lists with every third device reading."""
    asked: list[bool] = []

    def read_devices(*, processes: bool) -> DeviceReading:
        asked.append(processes)
        return (GPU,), ()

    samples = sampled(
        reply(PAGE),
        until=lambda seen: len(asked) >= 7 and len(engine_readings(seen)) >= 5 and any(one.host for one in seen),
        read_devices=read_devices,
        pids=(1,),
    )

    engines = engine_readings(samples)
    expected = {((SEEN,), Load(requests=2, resident_tokens=(7,)), None, None, ())}
    assert expected == {(one.engines, one.load, one.devices, one.host, one.gaps) for one in engines}
    assert {((GPU,), None)} == {(one.devices, one.load) for one in device_readings(samples)}
    assert sorted(one.at_seconds for one in samples) == [one.at_seconds for one in samples]
    assert asked[0]
    assert any(not processes for processes in asked)


def test_server_that_fails_leaves_gaps() -> None:
    """An engine that cannot be read is a gap in each tick's sample, together with what our own requests hold."""
    samples = sampled(reply("", status=500), until=lambda seen: len(engine_readings(seen)) >= 3)
    gap = Gap("engine", "failed", containing("500 on /metrics/"))
    failed = (None, Load(requests=2, resident_tokens=(7,)), (gap,))
    assert all(failed == (one.engines, one.load, one.gaps) for one in engine_readings(samples))


def test_page_that_never_ends_holds_up_nothing_else() -> None:
    """While the engine's response does not end, the devices are still sampled."""
    page = endless(head(), b"#", pause_seconds=0.01)
    samples = sampled(
        page, until=lambda seen: bool(engine_readings(seen)) and len(device_readings(seen)) >= 3, answer_seconds=0.2
    )
    gap = Gap("engine", "failed", containing("200 ms on /metrics/"))
    assert all((gap,) == one.gaps for one in engine_readings(samples))


def test_driver_that_hangs_holds_up_nothing_else() -> None:
    """While the driver hangs the engine is read on, and the devices' samples say since when. Where NVML never answered
    there may be no driver, and no line names one.
    """
    with hanging() as hang:
        samples = sampled(
            reply(PAGE),
            until=lambda seen: len(device_readings(seen)) >= 2 and len(engine_readings(seen)) >= 5,
            read_devices=hang,
        )

    reasons = {gap.reason for one in device_readings(samples) for gap in one.gaps}
    assert containing("NVML", f"{DRIVER_SECONDS:.0f} s") in list(reasons)
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}


@pytest.mark.parametrize(
    ("first", "named"),
    [(((GPU,), ()), "the driver has not answered"), ((None, (Gap("nvml", "absent", "no library"),)), "NVML has not")],
    ids=["a driver", "no driver"],
)
def test_driver_that_answered_an_earlier_sampler_is_known(first: DeviceReading, named: str) -> None:
    """A driver that hangs while the server restarts is not taken for a library that is still being loaded; where there
    never was one, a slow search for it is no driver that hangs.
    """
    asked, found = list[bool](), list[Sample]()

    async def work(hang: Callable[..., DeviceReading]) -> None:
        def read(*, processes: bool) -> DeviceReading:
            asked.append(processes)
            return first if len(asked) == 1 else hang()

        nvml = ThreadedReader(read, "nvml")
        for _ in range(2):
            sampler = Sampler(
                engine=None, nvml=nvml, facts=Facts(), record=found.append, pace=QUICK, clock=Clock(), load=lambda: None
            )
            await sampler.read_devices(processes=False)
        nvml.close()

    with hanging() as hang:
        asyncio.run(work(hang))
    earlier = [gap.reason for gap in first[1]]
    assert [earlier, [containing(named)]] == [[gap.reason for gap in one.gaps] for one in found]


def test_process_that_hangs_holds_up_nothing_else() -> None:
    """While the host's process read hangs, this is reported and the engine is still sampled."""
    with hanging() as hang:
        samples = sampled(
            reply(PAGE),
            until=lambda seen: any(gap.source == "host" for one in seen for gap in one.gaps),
            pids=(1,),
            read_host=hang,
        )

    (gap,) = {gap for one in samples for gap in one.gaps}
    assert Gap("host", "failed", containing("the host has not answered")) == gap
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}


def test_a_source_that_breaks_costs_its_own_readings() -> None:
    """What a reader of ours did not foresee is a gap that says so, tick after tick; the others are read on."""

    def broken(*, processes: bool) -> DeviceReading:
        raise ZeroDivisionError(f"processes={processes}")

    samples = sampled(
        reply(PAGE),
        until=lambda seen: len(device_readings(seen)) >= 3 and len(engine_readings(seen)) >= 5,
        read_devices=broken,
    )

    gaps = [one.gaps for one in device_readings(samples)]
    assert (Gap("nvml", "failed", containing("ZeroDivisionError")),) in gaps
    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}


def test_a_reading_that_broke_took_its_time_too() -> None:
    """The reported duration of a source's newest read is that of the failed read, not of the one before it."""
    now = [0.0]

    def breaks_later(*, processes: bool) -> DeviceReading:
        now[0] += 3.0 if processes else 1.0
        if processes:
            raise ZeroDivisionError
        return (GPU,), ()

    nvml = ThreadedReader(breaks_later, "nvml")
    sampler = Sampler(
        engine=None,
        nvml=nvml,
        facts=Facts(),
        record=TimelineBuilder().add,
        pace=QUICK,
        clock=Clock(wall=lambda: 0.0, steady=lambda: now[0]),
        load=lambda: None,
    )

    async def work() -> list[dict[str, float]]:
        await sampler.read_devices(processes=False)
        told = [dict(sampler.durations_seconds)]
        with pytest.raises(ZeroDivisionError):
            await sampler.read_devices(processes=True)
        return [*told, sampler.durations_seconds]

    try:
        actual = asyncio.run(work())
    finally:
        nvml.close()

    assert [{"nvml": 1.0}, {"nvml": 3.0}] == actual


def test_reads_that_overlap_are_recorded_in_their_order() -> None:
    """A step reads the engine while its loop does: an answer that came late would be counters that fell, a restart."""
    asked = 0

    async def answer(_: httpx2.Request) -> httpx2.Response:
        nonlocal asked
        asked += 1
        page = f"vllm:prompt_tokens_total {asked}.0\n".encode()
        for _turn in range(10 * (asked == 1)):
            await asyncio.sleep(0)

        async def body() -> AsyncIterator[bytes]:
            yield page

        return httpx2.Response(200, content=body())

    async def work() -> list[Sample]:
        recorder = TimelineBuilder()
        async with httpx2.AsyncClient(base_url="http://server", transport=httpx2.MockTransport(answer)) as client:
            sampler = Sampler(
                engine=ENGINE.open(HttpReader(client, LONG_SECONDS)),
                nvml=ThreadedReader(lambda **_: (None, ()), "nvml"),
                facts=Facts(),
                record=recorder.add,
                pace=QUICK,
                clock=Clock(),
                load=lambda: None,
            )
            await asyncio.gather(sampler.read_engine(), sampler.read_engine())
        return recorder.since(0)

    assert [1, 2] == [one.total("prompt_tokens_total") for one in asyncio.run(work())]


def test_filter_that_is_not_known_is_given_up() -> None:
    """A server whose filtered page is empty is asked for the whole page from then on."""
    asked: list[bytes] = []

    def page(peer: Peer) -> None:
        target = peer.request_head.split(b" ")[1]
        asked.append(target)
        reply("" if b"name" in target else PAGE)(peer)

    samples = sampled(page, until=lambda seen: len(engine_readings(seen)) >= 3)

    assert {(SEEN,)} == {one.engines for one in engine_readings(samples)}
    assert [True, False, True, False, False] == [b"name" in target for target in asked[:5]]


def test_a_server_that_shows_no_engine_yet_is_asked_for_little_again() -> None:
    """A page that shows nothing, with a filter or without, says nothing about filters: they are used once it does."""
    asked: list[bool] = []

    def page(peer: Peer) -> None:
        asked.append(b"name" in peer.request_head.split(b" ")[1])
        reply(PAGE if len(asked) > 4 else "process_open_fds 3.0\n")(peer)

    samples = sampled(page, until=lambda seen: sum(one.engines is not None for one in seen) >= 2)

    assert [True, False, True, True, True, True] == asked[:6]
    assert (None, (SEEN,)) == (engine_readings(samples)[0].engines, engine_readings(samples)[-1].engines)


HELD = Allocator(
    device_uuid="1", pid=7, pid_seen=True, start_ticks=1, age_seconds=0.2, allocated_bytes=5, reserved_bytes=6
)


def agent_readings(
    reading: AgentReading,
    enough: Callable[[list[Sample]], bool],
    read_devices: Callable[..., DeviceReading] = lambda **_: (None, ()),
) -> list[Sample]:
    """Samples that the agents were due in, until there are enough."""

    def due(samples: list[Sample]) -> list[Sample]:
        return [one for one in samples if one.allocators or any(gap.source == "torch_allocator" for gap in one.gaps)]

    seen = sampled(
        reply(PAGE),
        until=lambda samples: enough(due(samples)),
        read_devices=read_devices,
        agents=ThreadedReader(lambda: reading, "agents"),
        pace=Pace(engine_seconds=LONG_SECONDS, device_seconds=LONG_SECONDS, agent_seconds=0.02),
    )
    return due(seen)


def test_agents_are_read_at_their_pace() -> None:
    """Each read of the agents' folder is a sample of its own, with its gaps."""
    gap = Gap("torch_allocator", "failed", "agent-1-1.json: not a file")
    samples = agent_readings(AgentReading((HELD,), (gap,)), lambda seen: len(seen) >= 3)
    assert {((HELD,), (gap,), None, None)} == {(one.allocators, one.gaps, one.engines, one.devices) for one in samples}


def test_without_a_driver_the_gpus_are_those_of_the_agents() -> None:
    """Without NVML here, the NVML figures from inside the server make the devices; if NVML only failed, none do."""
    inside = replace(HELD, memory=Memory(total_bytes=9, free_bytes=2), process_bytes=7)
    absent = Gap("nvml", "absent", "no libnvidia-ml.so.1 here")

    def seen(gap: Gap, enough: Callable[[list[Sample]], bool]) -> Sample:
        return agent_readings(AgentReading((inside,), ()), enough, lambda **_: (None, (gap,)))[-1]

    without = seen(absent, lambda samples: samples[-1:] != [] and samples[-1].devices is not None)
    failing = seen(replace(absent, kind="failed"), lambda samples: len(samples) >= 10)
    assert (devices_inside((inside,)), None) == (without.devices, failing.devices)


def test_volume_that_hangs_is_a_gap() -> None:
    """A folder on a file system that does not answer is reported, and not waited for."""
    with hanging() as hang:
        found, gaps, _ = asyncio.run(read_agents(ThreadedReader(hang, "agents"), 0.05))
    assert (None, (Gap("torch_allocator", "failed", containing("the agents' folder", " ms")),)) == (found, gaps)
