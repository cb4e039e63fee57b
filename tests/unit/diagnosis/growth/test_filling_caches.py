"""Growth on the host under a cache's bound, and through it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.filling_caches import filling, within_its_limit
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, memory_series
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Evidence, Facts, Finding, HostCache, HostProcess, Sample, Status, Timeline
from tests.builders.answers import evidence
from tests.builders.values import GIB, engine

MB = 10**6
CACHE = "llama.cpp's prompt cache"
HOLDER = MemoryOwner(device_uuid="", who="llama-server 7")
FAULT = Finding(id="leak.host", status="fault", summary="it grows", evidence=())


def told(limit_bytes: int) -> Facts:
    """A server whose command line bounds its cache."""
    return Facts(host_caches=(HostCache(name=CACHE, flag="--cache-ram", limit_bytes=limit_bytes),))


def grown(size_bytes: int, *, minutes: int = 80, name: str = "llama-server") -> Timeline:
    """A process that holds so much more at last, at a steady rate."""
    samples = []
    for minute in range(minutes):
        size = 2 * GIB + size_bytes * minute // (minutes - 1)
        held = HostProcess(pid=7, name=name, resident_bytes=size, anonymous_bytes=size)
        samples.append(Sample(at_seconds=60.0 * minute, engines=(engine(),), host=(held,)))
    return Timeline(samples=tuple(samples))


@pytest.mark.parametrize(
    ("known", "grown_mb", "judged", "status"),
    [
        (told(1000 * MB), 1050, FAULT, "ok"),
        (told(1000 * MB), 1051, FAULT, "fault"),
        (Facts(), 8000, FAULT, "suspect"),
        (Facts(), 8000, replace(FAULT, status="suspect"), "unknown"),
        (Facts(), 9100, FAULT, "fault"),
    ],
)
def test_growth_within_a_size_limit_is_the_caches(known: Facts, grown_mb: int, judged: Finding, status: Status) -> None:
    """A twentieth beyond it is not counted; under a bound that is only assumed a step less certain."""
    seen = memory_series(grown(grown_mb * MB), known, DEFAULT_LIMITS)
    actual = within_its_limit(judged, HOLDER, seen, Part.HOST_ANONYMOUS, known, DEFAULT_LIMITS)

    assert status == actual.status
    limit = 1000 * MB if known.host_caches else 8 * GIB
    assert [
        ("grown_since_first_sample", grown_mb * MB, "bytes", "host"),
        ("cache_size_limit", limit, "bytes"),
        ("full", grown_mb * MB / limit, "ratio", "computed"),
    ] == [
        (one.name, one.value, one.unit, one.source)[: 3 if one.name == "cache_size_limit" else 4]
        for one in actual.evidence
    ]


def test_process_without_caches_is_judged_as_it_was() -> None:
    """Nothing is known that bounds it."""
    seen = memory_series(grown(500 * MB, name="python3"), Facts(), DEFAULT_LIMITS)
    stranger = MemoryOwner(device_uuid="", who="python3 7")
    assert FAULT is within_its_limit(FAULT, stranger, seen, Part.HOST_ANONYMOUS, Facts(), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("grown_mb", "limit_mb", "full"), [(1000, 2000, 0.5), (1050, 1000, 1.05), (1060, 1000, None), (10, 1000, None)]
)
def test_cache_that_fills_is_told_while_it_does(grown_mb: int, limit_mb: int, full: float | None) -> None:
    """Under a bound that is told; one through it is none, nor is one that stands still."""
    actual = filling(grown(grown_mb * MB), told(limit_mb * MB), DEFAULT_LIMITS, "benign.warmup")

    assert (full is None) == (actual is None)
    if actual is not None:
        assert ("benign.warmup", "ok") == (actual.id, actual.status)
        size = Evidence(name="grown_since_first_sample", value=grown_mb * MB, unit="bytes", source="host")
        assert size == actual.evidence[0]
        assert full == evidence(actual)["full"]


def test_cache_of_an_assumed_bound_is_not_told_as_filling() -> None:
    """Nobody knows that it is there."""
    assert filling(grown(1000 * MB), Facts(), DEFAULT_LIMITS, "benign.warmup") is None
    assert filling(grown(1000 * MB, name="python3"), told(2000 * MB), DEFAULT_LIMITS, "benign.warmup") is None


def test_fullest_of_two_caches_is_told() -> None:
    """By its share of the bound."""
    # Two processes of one server, of which the second holds more of it
    samples = []
    for minute in range(80):
        held = [
            HostProcess(pid=pid, name="llama-server", resident_bytes=size, anonymous_bytes=size)
            for pid, size in ((8, 2 * GIB + 20 * MB * minute), (9, 2 * GIB + 12 * MB * minute))
        ]
        samples.append(Sample(at_seconds=60.0 * minute, engines=(engine(),), host=tuple(held)))

    actual = filling(Timeline(samples=tuple(samples)), told(4000 * MB), DEFAULT_LIMITS, "benign.warmup")

    assert actual is not None
    assert 79 * 20 * MB / (4000 * MB) == evidence(actual)["full"]
