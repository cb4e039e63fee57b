"""fragmentation.allocator where the gap stays: through idle minutes, hours of traffic, and each further request."""

from __future__ import annotations

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


def test_cache_that_stays_through_ten_idle_minutes_is_to_be_watched() -> None:
    """It is called what it is, and no fault."""
    actual = idle(LARGE)
    assert "ok" == actual.status


def test_holes_that_stay_through_ten_idle_minutes_are_suspect() -> None:
    """Where the blocks show that it is stranded, it is more than cache."""
    holes = split(reserved_bytes=15 * GIB, live_bytes=5 * GIB, releasable_bytes=0, stranded_bytes=10 * GIB, fits=True)
    actual = idle(replace(LARGE, split=holes))
    assert "suspect" == actual.status


@pytest.mark.parametrize(
    "actual",
    [
        idle(LARGE, minutes=9),
        idle(LARGE, running=1),
        idle(replace(LARGE, memory=None)),
        idle(
            replace(
                LARGE,
                split=split(reserved_bytes=15 * GIB, live_bytes=5 * GIB, releasable_bytes=0, private_bytes=10 * GIB),
            )
        ),
        idle(replace(LARGE, allocated_bytes=8 * GIB)),
    ],
    ids=["not so long", "a request runs", "device not told", "pools of graphs", "activations explain it"],
)
def test_gap_that_has_a_reason_is_not_watched(actual: Finding) -> None:
    """Between requests, in graph pools, or no larger than activations: of use, and said so."""
    assert ("ok", False) == (actual.status, "worth watching" in actual.summary)


def served(*, first_tokens: int = 0, gaps_gib: tuple[int, ...] = (24,) * 30, pools: bool = True) -> Finding:
    """The rule's one finding on a server that takes 1,000 prompt tokens a minute, by the gap of each reading."""
    total = 180 * GIB
    samples = []
    for minute, gap in enumerate(gaps_gib):
        live = 140 * GIB
        reserved = live + gap * GIB
        inside = allocator(
            title="VLLM::Worker_TP0",
            allocated_bytes=live,
            reserved_bytes=reserved,
            memory=Memory(total_bytes=total, free_bytes=10 * GIB),
            split=split(
                reserved_bytes=reserved,
                live_bytes=live,
                releasable_bytes=gap * GIB,
                largest_free_block_bytes=gap * GIB,
            ),
        )
        page = engine(usage=0.1, running=3, prompt_tokens=first_tokens + 1_000 * minute)
        samples.append(Sample(at_seconds=60.0 * minute, allocators=(inside,), engines=(page,)))
    known = facts(World() if pools else World(pools=()))
    (found,) = judge(Timeline(samples=tuple(samples)), known, DEFAULT_LIMITS)
    return found


def test_cache_of_the_load_that_no_request_used_in_an_hour_is_a_fault() -> None:
    """After half an hour the request that needs it may yet come; after an hour of traffic it is lost to the pool."""
    assert "fault" == served(gaps_gib=(24,) * 62).status


def test_cache_of_the_load_that_no_request_uses_is_suspect() -> None:
    """Torch keeps 24 GiB from the loading of the weights: the pool was sized without them, and nobody else has them."""
    actual = served()
    assert "suspect" == actual.status
    assert {"min_unused_since_start": 24 * GIB, "kv_tokens_lost": 196_608}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    "actual",
    [
        served(first_tokens=1_000_000),
        served(gaps_gib=(2, *[24] * 29)),
        served(gaps_gib=(*[24] * 20, 5, *[24] * 9)),
        served(gaps_gib=(16,) * 30),
        served(gaps_gib=(24,) * 5),
        served(pools=False),
    ],
    ids=["start not seen", "came with requests", "used once", "as activations take", "too short", "no pool"],
)
def test_cache_that_requests_explain_is_ok(actual: Finding) -> None:
    """A high-water mark of requests is of use to the next of them."""
    assert "ok" == actual.status


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
