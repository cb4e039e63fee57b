"""Device memory over an hour and a half: whose it is, which ranks grow with it, and what room there is."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from kvdiag.diagnosis.growth.attribution import (
    NON_TORCH,
    TORCH,
    device_growth,
    others_growth,
    torch_growth,
    undecided,
    unused_growth,
)
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.model import Allocator, Device, Facts, Finding, Memory, Sample, Timeline
from tests.builders.answers import evidence, statuses
from tests.builders.series import seeded
from tests.builders.values import GIB, allocator, device, engine, pool, process, split

MB = 10**6
KNOWN = Facts(pools=(pool(),), server_pids=(100, 101, 102), engine_name="vllm")
Part = Callable[[int, int], tuple[tuple[Device, ...] | None, tuple[Allocator, ...] | None]]
"""Devices and allocators, by what leaks: bytes at a minute."""
Judge = Callable[[Timeline, Facts, Limits], tuple[Finding, ...]]


def seen(part: Part, *, rate_mb_per_minute: float = 12.0, minutes: int = 80) -> Timeline:
    """One sample a minute of a component that grows by 12 MB per minute, and of an idle engine."""
    samples = []
    for minute in range(minutes):
        grown = round((rate_mb_per_minute * minute + (1, -1, -1, 1)[minute % 4]) * MB)
        devices, allocators = part(grown, minute)
        samples.append(Sample(at_seconds=60.0 * minute, engines=(engine(),), devices=devices, allocators=allocators))
    return Timeline(samples=tuple(samples))


def card(own: int | None, *, used: int, index: int = 0, pid: int = 100) -> Device:
    """A device of 80 GiB."""
    listed = None if own is None else (process(pid, own), process(7, GIB))
    return device(index, total_bytes=80 * GIB, used_bytes=used, processes=listed)


def worker(live: int, reserved: int, *, pid: int = 100, gpu: str = "0", **changes: object) -> Allocator:
    """What a worker publishes."""
    return allocator(
        pid=pid, device_uuid=gpu, title="VLLM::Worker", allocated_bytes=live, reserved_bytes=reserved, **changes
    )


def only(found: Finding | None) -> Finding:
    """The finding that there is."""
    assert found is not None
    return found


def test_server_that_grows_is_called_by_its_engine() -> None:
    """Growth that only NVML reports is a torch leak for vLLM, a non-torch leak for llama.cpp; the other is unknown."""
    timeline = seen(lambda grown, _: ((card(20 * GIB + grown, used=22 * GIB + grown),), None))

    torch, beside = device_growth(timeline, KNOWN, DEFAULT_LIMITS)
    other = device_growth(timeline, replace(KNOWN, engine_name="llama.cpp"), DEFAULT_LIMITS)

    assert [(TORCH, "fault"), (NON_TORCH, "unknown")] == [(one.id, one.status) for one in (torch, beside)]
    assert [(TORCH, "unknown"), (NON_TORCH, "fault")] == [(one.id, one.status) for one in other]
    told = evidence(torch)
    assert "GPU 0 (the server's process)" == torch.holder
    # 58 GiB less what grew
    assert 58 * GIB - (12 * 79 + 1) * MB == told["room"]
    assert pytest.approx(0.0, abs=MB) == told["growth_of_others_per_hour"]
    assert "other_ranks" not in told


@pytest.mark.parametrize(
    ("known", "status"),
    [
        (Facts(engine_name="vllm"), "suspect"),
        (Facts(engine_name="vllm", pools=(pool(),)), "fault"),
        (Facts(engine_name="vllm", device_uuids=("GPU-0",)), "fault"),
    ],
)
def test_device_of_untold_holders_is_suspect_alone(known: Facts, status: str) -> None:
    """Growth without visible processes is a suspect; it is a fault if the GPU is assigned or holds the pool."""
    found = device_growth(seen(lambda grown, _: ((card(None, used=22 * GIB + grown),), None)), known, DEFAULT_LIMITS)

    assert (TORCH, status) == (found[0].id, found[0].status)
    assert "GPU 0 (process not visible)" == found[0].holder


def test_devices_that_stand_still_are_ok_by_both_names() -> None:
    """Constant device memory is ok under both ids; less than an hour of samples gives no finding."""
    still: Part = lambda grown, _: ((card(20 * GIB, used=22 * GIB),), None)  # noqa: E731

    found = device_growth(seen(still), KNOWN, DEFAULT_LIMITS)
    assert [(TORCH, "ok"), (NON_TORCH, "ok")] == [(one.id, one.status) for one in found]
    assert "growth_of_others_per_hour" not in evidence(found[0])
    assert () == device_growth(seen(still, minutes=59), KNOWN, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("judge", "holder"), [(torch_growth, "VLLM::Worker 100"), (device_growth, "GPU 0 (the server's process)")]
)
@pytest.mark.parametrize(
    ("factors", "others", "growing", "words"),
    [
        ((1, 0, 0), 2, 0, "2 other ranks none grows"),
        ((2, 1, 0), 2, 1, "2 other ranks 1 grows"),
        ((3, 2, 1), 2, 2, "2 other ranks 2 grow"),
        ((2, 1), 1, 1, "other rank grows too"),
        ((1, 0), 1, 0, "other rank does not grow"),
    ],
)
def test_growth_is_told_with_that_of_the_ranks_beside_it(
    judge: Judge, holder: str, factors: tuple[int, ...], others: int, growing: int, words: str
) -> None:
    """One of several that grows alone is a leak of what it does."""

    def part(grown: int, _: int) -> tuple[tuple[Device, ...] | None, tuple[Allocator, ...] | None]:
        sizes = [6 * GIB + factor * grown for factor in factors]
        if judge is device_growth:
            return tuple(
                card(size, used=size + GIB, index=rank, pid=100 + rank) for rank, size in enumerate(sizes)
            ), None
        return None, tuple(worker(size, 20 * GIB, pid=100 + rank, gpu=str(rank)) for rank, size in enumerate(sizes))

    torch, _ = judge(seen(part), KNOWN, DEFAULT_LIMITS)

    told = evidence(torch)
    assert f"{words};" in f"{torch.summary};"
    assert (others, growing) == (told["other_ranks"], told["other_ranks_that_grow"])
    assert holder == torch.holder


def test_torch_tells_what_lives_and_what_is_beside() -> None:
    """Live bytes that grow within the reserved bytes are a torch leak; memory outside torch is ok."""

    def part(grown: int, _: int) -> tuple[tuple[Device, ...], tuple[Allocator, ...]]:
        one = worker(6 * GIB + grown, 20 * GIB, process_bytes=21 * GIB)
        return (card(21 * GIB, used=22 * GIB),), (one,)

    torch, beside = torch_growth(seen(part), KNOWN, DEFAULT_LIMITS)

    assert [(TORCH, "fault"), (NON_TORCH, "ok")] == [(one.id, one.status) for one in (torch, beside)]
    assert (0.0, 58 * GIB) == (evidence(torch)["reserved_growth_per_hour"], evidence(torch)["room"])
    assert 0.0 == evidence(beside)["reserved_growth_per_hour"]


def test_growth_outside_torch_holds_next_to_a_gap_in_which_torch_is_unknown() -> None:
    """No window is full after an hour without samples: the fault of before stays what it was, and torch is unknown."""

    def part(grown: int, _: int) -> tuple[tuple[Device, ...], tuple[Allocator, ...]]:
        one = worker(6 * GIB, 20 * GIB, process_bytes=21 * GIB + grown)
        return (card(21 * GIB + grown, used=22 * GIB + grown),), (one,)

    whole = seen(part, minutes=208)
    timeline = Timeline(samples=tuple(one for one in whole.samples if not 145 <= one.at_seconds / 60.0 < 200))
    torch, beside = torch_growth(timeline, KNOWN, DEFAULT_LIMITS)

    assert [(TORCH, "unknown"), (NON_TORCH, "fault")] == [(one.id, one.status) for one in (torch, beside)]


@pytest.mark.parametrize(
    ("device_grows", "reserved_grows", "status"),
    [
        (True, False, "fault"),
        (True, True, "unknown"),
        (False, False, "ok"),
        (False, True, "ok"),
        (None, False, "unknown"),
    ],
)
def test_beside_torch_is_told_by_the_device_while_torch_stands_still(
    *, device_grows: bool | None, reserved_grows: bool, status: str
) -> None:
    """Without process sizes, device growth counts as non-torch only while torch's reserved bytes are flat."""

    def part(grown: int, _: int) -> tuple[tuple[Device, ...] | None, tuple[Allocator, ...]]:
        size = 30 * GIB + (grown if device_grows else 0)
        devices = None if device_grows is None else (card(size, used=size + GIB),)
        return devices, (worker(6 * GIB, 20 * GIB + (grown if reserved_grows else 0)),)

    _, beside = torch_growth(seen(part), KNOWN, DEFAULT_LIMITS)

    assert (NON_TORCH, status) == (beside.id, beside.status)


@pytest.mark.parametrize(
    ("stranded_share", "expected"), [(None, "suspect"), (1.0, "fault"), (0.51, "fault"), (0.5, None), (0.0, None)]
)
def test_cache_that_grows_is_holes_where_most_of_it_is_stranded(
    stranded_share: float | None, expected: str | None
) -> None:
    """A growing cache is a fault if most of it is stranded, a suspect if its parts are unknown."""

    def part(grown: int, _: int) -> tuple[None, tuple[Allocator, ...]]:
        parts = None
        if stranded_share is not None:
            stranded = round(grown * stranded_share) if grown > 0 else 0
            parts = split(
                reserved_bytes=6 * GIB + max(grown, 0),
                live_bytes=6 * GIB,
                stranded_bytes=stranded,
                releasable_bytes=max(grown, 0) - stranded,
                largest_free_block_bytes=0,
            )
        return None, (worker(6 * GIB, 6 * GIB + max(grown, 0), split=parts),)

    found = unused_growth(seen(part), KNOWN, DEFAULT_LIMITS, "fragmentation.allocator")

    assert expected == (None if found is None else found.status)
    if found is not None:
        told = evidence(found)
        last = (12 * 79 + 1) * MB
        assert ("fragmentation.allocator", last, 0.0) == (
            found.id,
            told["reserved_but_unallocated"],
            told["live_growth_per_hour"],
        )
        assert (None if stranded_share is None else round(last * stranded_share)) == told["stranded"]
        units = {one.name: (one.unit, one.source) for one in found.evidence}
        assert {("bytes", "torch")} == {units[name] for name in ("reserved_but_unallocated", "stranded", "releasable")}


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (("stranded_bytes", "releasable_bytes"), "fault"),
        (("stranded_bytes",), "suspect"),
        (("releasable_bytes",), "suspect"),
    ],
)
def test_cache_whose_parts_are_not_all_told_is_suspect(told: tuple[str, ...], status: str) -> None:
    """Where torch counts one part alone, the other may be all of the rest."""

    # A cache that grows and of which nothing is releasable, or of which that is not reported
    def part(grown: int, _: int) -> tuple[None, tuple[Allocator, ...]]:
        parts = {"stranded_bytes": max(grown, 0), "releasable_bytes": 0}
        counted: dict[str, Any] = {name: parts[name] for name in told}
        return None, (worker(6 * GIB, 6 * GIB + max(grown, 0), expandable_segments=True, **counted),)

    actual = only(unused_growth(seen(part), KNOWN, DEFAULT_LIMITS, "fragmentation.allocator"))

    assert status == actual.status


def test_cache_that_does_not_grow_is_none() -> None:
    """Neither where what lives grows with it."""
    assert unused_growth(seen(lambda grown, _: (None, (worker(6 * GIB, 8 * GIB),))), KNOWN, DEFAULT_LIMITS, "f") is None
    both: Part = lambda grown, _: (None, (worker(6 * GIB + grown, 8 * GIB + grown),))  # noqa: E731
    assert unused_growth(seen(both), KNOWN, DEFAULT_LIMITS, "f") is None


def test_neighbour_that_grows_is_told_with_the_server_beside_it() -> None:
    """Bytes that are not the server's; none where they stand still."""
    growing: Part = lambda grown, _: ((card(20 * GIB, used=25 * GIB + grown),), None)  # noqa: E731
    still: Part = lambda grown, _: ((card(20 * GIB, used=25 * GIB),), None)  # noqa: E731

    actual = only(others_growth(seen(growing), KNOWN, DEFAULT_LIMITS, "baseline.foreign_memory"))

    assert ("baseline.foreign_memory", "fault") == (actual.id, actual.status)
    assert 0.0 == evidence(actual)["server_growth_per_hour"]
    assert {TORCH: "ok", NON_TORCH: "ok"} == statuses(device_growth(seen(growing), KNOWN, DEFAULT_LIMITS))
    assert others_growth(seen(still), KNOWN, DEFAULT_LIMITS, "x") is None


def test_room_is_the_least_that_is_told_of_the_device() -> None:
    """By NVML here, or inside the process; of another device nothing."""
    # A process that sees 40 GiB free where NVML here sees 58, and 1 GiB free elsewhere
    inside = Memory(total_bytes=80 * GIB, free_bytes=40 * GIB)

    def part(grown: int, _: int) -> tuple[tuple[Device, ...], tuple[Allocator, ...]]:
        one = worker(6 * GIB + grown, 20 * GIB, memory=inside, process_bytes=21 * GIB)
        return (card(21 * GIB, used=22 * GIB), card(None, used=79 * GIB, index=1)), (one,)

    torch, _ = torch_growth(seen(part), KNOWN, DEFAULT_LIMITS)

    assert 40 * GIB == evidence(torch)["room"]


def test_growth_on_an_engine_without_torch_has_one_verdict() -> None:
    """llama.cpp has no torch to separate from, and no agent could: the growth is outside it."""
    grown = Finding(NON_TORCH, "fault", "it grows")
    torch, non_torch = undecided(grown, Facts(engine_name="llamacpp"))
    assert ("ok", grown) == (torch.status, non_torch)
    torch, non_torch = undecided(grown, Facts(engine_name="vllm"))
    assert ("fault", NON_TORCH, "unknown") == (torch.status, torch.or_id, non_torch.status)


@pytest.mark.parametrize(("listed", "status"), [(False, "suspect"), (True, "fault")])
def test_only_the_servers_own_bytes_confirm_a_suspect(listed: bool, status: str) -> None:
    """A whole device may grow by other processes as well."""
    random = seeded("walk 1")
    walk = list(accumulate(random.gauss(0.0, 20.0 * MB) for _ in range(80)))

    def part(grown: int, minute: int) -> tuple[tuple[Device, ...], tuple[Allocator, ...]]:
        own = 21 * GIB + grown
        one = worker(6 * GIB + grown + round(walk[minute]), 20 * GIB + grown, process_bytes=own)
        return (card(own if listed else None, used=30 * GIB + grown),), (one,)

    torch, _ = torch_growth(seen(part, rate_mb_per_minute=7.0), KNOWN, DEFAULT_LIMITS)
    assert status == torch.status
