"""fragmentation.allocator where the gap stays: through idle minutes, hours of traffic, and each further request."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_allocator import judge
from kvdiag.model import Allocator, Finding, Memory, Sample, Timeline
from tests.builders.answers import evidence
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, allocator, device, engine, split
from tests.builders.worlds import World, facts
from tests.unit.diagnosis.rules.gaps import HELD, verdict

LARGE = allocator(
    title="VLLM::Worker_TP0",
    allocated_bytes=5 * GIB,
    reserved_bytes=15 * GIB,
    memory=Memory(total_bytes=80 * GIB, free_bytes=60 * GIB),
    split=split(reserved_bytes=15 * GIB, live_bytes=5 * GIB, releasable_bytes=10 * GIB),
)
"""10 GiB unused, where activations explain 6.4 and 2 % of the device are 1.6 more."""


def idle(held: Allocator, *, minutes: int = 11, running: int = 0) -> Finding:
    """The finding on a server that has been so for so long, read once a minute."""
    samples = tuple(
        Sample(at_seconds=1000.0 + 60.0 * number, allocators=(held,), engines=(engine(running=running),))
        for number in range(minutes + 1)
    )
    (found,) = judge(Timeline(samples=samples), facts(World()), DEFAULT_LIMITS)
    return found


def of_parts(**sizes: int) -> Allocator:
    """The same with other parts of the 10 GiB."""
    return replace(LARGE, split=split(reserved_bytes=15 * GIB, live_bytes=5 * GIB, **{"releasable_bytes": 0, **sizes}))


@pytest.mark.parametrize(
    ("actual", "status"),
    [
        (idle(LARGE), "ok"),
        (idle(of_parts(stranded_bytes=10 * GIB)), "suspect"),
        (idle(LARGE, minutes=9), "ok"),
        (idle(LARGE, running=1), "ok"),
        (idle(replace(LARGE, memory=None)), "ok"),
        (idle(of_parts(private_bytes=10 * GIB)), "ok"),
        (idle(replace(LARGE, allocated_bytes=8 * GIB)), "ok"),
    ],
    ids=["cache", "holes", "not so long", "a request runs", "device unknown", "graph pools", "activations explain it"],
)
def test_what_stays_through_ten_idle_minutes_is_suspect_where_it_is_stranded(actual: Finding, status: str) -> None:
    """Between requests, in graph pools, or no larger than activations it is of use."""
    assert status == actual.status


def served(*, first_tokens: int = 0, gaps_gib: tuple[int, ...] = (24,) * 30, pools: bool = True) -> Finding:
    """The rule's one finding on a server that takes 1,000 prompt tokens a minute, by the gap of each sample."""
    samples = []
    for minute, gap in enumerate(gaps_gib):
        live, reserved = 140 * GIB, (140 + gap) * GIB
        parts = split(
            reserved_bytes=reserved, live_bytes=live, releasable_bytes=gap * GIB, largest_free_block_bytes=gap * GIB
        )
        memory = Memory(total_bytes=180 * GIB, free_bytes=10 * GIB)
        inside = replace(LARGE, allocated_bytes=live, reserved_bytes=reserved, memory=memory, split=parts)
        page = engine(usage=0.1, running=3, prompt_tokens=first_tokens + 1_000 * minute)
        samples.append(Sample(at_seconds=60.0 * minute, allocators=(inside,), engines=(page,)))
    (found,) = judge(Timeline(samples=tuple(samples)), facts(World() if pools else World(pools=())), DEFAULT_LIMITS)
    return found


@pytest.mark.parametrize(
    ("actual", "status"),
    [
        (served(), "suspect"),
        (served(gaps_gib=(24,) * 62), "fault"),
        (served(first_tokens=1_000_000), "ok"),
        (served(gaps_gib=(2, *[24] * 29)), "ok"),
        (served(gaps_gib=(*[24] * 20, 5, *[24] * 9)), "ok"),
        (served(gaps_gib=(16,) * 30), "ok"),
        (served(gaps_gib=(24,) * 5), "ok"),
        (served(pools=False), "ok"),
    ],
    ids=["unused", "for an hour", "start not observed", "came with requests", "used once", "small", "short", "no pool"],
)
def test_what_loading_left_that_no_request_uses_is_lost_to_the_pool(actual: Finding, status: str) -> None:
    """After half an hour the request that needs it may yet come, after an hour of traffic it is lost; a high-water
    mark of requests is of use to the next of them.
    """
    assert status == actual.status


def kept(releasable: int, stranded: int, **changes: object) -> Allocator:
    """What a Prometheus has kept of a process: two parts of what does not live, and no blocks."""
    reserved = 5 * GIB + releasable + stranded
    return replace(
        HELD,
        backend=None,
        expandable_segments=None,
        reserved_bytes=reserved,
        releasable_bytes=releasable,
        stranded_bytes=stranded,
        **changes,  # type: ignore[arg-type]
    )


def idle_for(minutes: int, reading: Allocator) -> Finding:
    """The finding after so many minutes without a request, the device told by an exporter."""
    whole = device(used_bytes=20 * GIB, total_bytes=24 * GIB, uuid="GPU-0")
    samples = tuple(
        Sample(at_seconds=30.0 * number, engines=(engine(),), devices=(whole,), allocators=(reading,))
        for number in range(2 * minutes + 3)
    )
    (found,) = judge(Timeline(samples=samples), facts(World()), DEFAULT_LIMITS)
    return found


@pytest.mark.parametrize(
    ("actual", "status"),
    [
        (verdict(kept(0, 3 * GIB), kept(0, 3 * GIB, alloc_retries_total=4)), "suspect"),
        (idle_for(12, kept(GIB, 6 * GIB)), "suspect"),
        (idle_for(12, kept(6 * GIB, 100 * MIB)), "ok"),
        (verdict(kept(4 * GIB, 100 * MIB), kept(4 * GIB, 100 * MIB)), "ok"),
        (verdict(kept(0, GIB), kept(0, GIB)), "ok"),
        (verdict(kept(GIB, 3 * GIB), kept(GIB, 3 * GIB)), "unknown"),
    ],
    ids=["flushes", "idle holes", "idle cache", "cache", "little", "holes"],
)
def test_the_parts_that_a_prometheus_keeps_are_judged(actual: Finding, status: str) -> None:
    """Releasable and stranded bytes are enough for what takes no look at the blocks."""
    assert status == actual.status
    assert {"releasable", "stranded"} <= evidence(actual).keys()


@pytest.mark.parametrize(
    ("world", "status"),
    [
        (World(agents=True, device_growth_bytes=6 * MIB, cache_growth_bytes=6 * MIB), "suspect"),
        (World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=6 * MIB), "ok"),
        (World(agents=True, device_growth_bytes=6 * MIB), "ok"),
        (World(device_growth_bytes=6 * MIB), "unknown"),
    ],
    ids=["cache", "tensors", "beside torch", "no agent"],
)
def test_what_each_request_leaves_reserved_and_empty_is_suspect(world: World, status: str) -> None:
    """Torch that reserves more with each equal request while nothing more lives in it, as over hours."""
    (actual,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    assert status == actual.status
