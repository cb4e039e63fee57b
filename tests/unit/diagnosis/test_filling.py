"""Growth on the host under a cache's bound, and through it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.filling import filling, under_its_bound
from kvdiag.diagnosis.history import Holder, history
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Evidence, Facts, Finding, HostCache, HostProcess, Sample, Status, Timeline
from tests.builders.values import GIB, engine

MB = 10**6
CACHE = "llama.cpp's prompt cache"
HOLDER = Holder(device_uuid="", who="llama-server 7")
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
    ("known", "grown_mb", "judged", "status", "words"),
    [
        (told(1000 * MB), 1050, FAULT, "ok", "it fills"),
        (told(1000 * MB), 1051, FAULT, "fault", "it grows; through the bound of"),
        (Facts(), 8000, FAULT, "suspect", "it grows; it may be llama.cpp's prompt cache"),
        (Facts(), 8000, replace(FAULT, status="suspect"), "unknown", "it may be llama.cpp's prompt cache"),
        (Facts(), 9100, FAULT, "fault", "through the bound of"),
    ],
)
def test_growth_under_a_bound_is_the_caches(
    known: Facts, grown_mb: int, judged: Finding, status: Status, words: str
) -> None:
    """A twentieth beyond it is not counted; under a bound that is only assumed a step less certain."""
    # WHEN the bound is 1,000 MB, or 8 GiB by default
    seen = history(grown(grown_mb * MB), known, DEFAULT_LIMITS)
    actual = under_its_bound(judged, HOLDER, seen, "anonymous", known, DEFAULT_LIMITS)

    # THEN
    assert status == actual.status
    assert words in actual.summary
    limit = 1000 * MB if known.host_caches else 8 * GIB
    assert [
        ("grown_since_first_reading", grown_mb * MB, "bytes", "host"),
        ("bound_of_caches", limit, "bytes"),
        ("full", grown_mb * MB / limit, "ratio", "computed"),
    ] == [
        (one.name, one.value, one.unit, one.source)[: 3 if one.name == "bound_of_caches" else 4]
        for one in actual.evidence
    ]


def test_resident_bytes_are_called_so() -> None:
    """Where nobody tells the anonymous ones."""
    # GIVEN
    samples = [
        Sample(
            at_seconds=60.0 * minute,
            engines=(engine(),),
            host=(HostProcess(pid=7, name="llama-server", resident_bytes=2 * GIB + MB * minute),),
        )
        for minute in range(3)
    ]
    known = told(1000 * MB)

    # WHEN
    seen = history(Timeline(samples=tuple(samples)), known, DEFAULT_LIMITS)
    resident = under_its_bound(FAULT, HOLDER, seen, "resident", known, DEFAULT_LIMITS)
    anonymous = under_its_bound(
        FAULT, HOLDER, history(grown(MB), known, DEFAULT_LIMITS), "anonymous", known, DEFAULT_LIMITS
    )

    # THEN
    assert resident.summary.startswith("llama-server 7: resident bytes grow under the bound of")
    assert anonymous.summary.startswith("llama-server 7: anonymous bytes grow under the bound of")


def test_process_without_caches_is_judged_as_it_was() -> None:
    """Nothing is known that bounds it."""
    seen = history(grown(500 * MB, name="python3"), Facts(), DEFAULT_LIMITS)
    stranger = Holder(device_uuid="", who="python3 7")
    assert FAULT is under_its_bound(FAULT, stranger, seen, "anonymous", Facts(), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("grown_mb", "limit_mb", "full"), [(1000, 2000, "50%"), (1050, 1000, "105%"), (1060, 1000, None), (10, 1000, None)]
)
def test_cache_that_fills_is_told_while_it_does(grown_mb: int, limit_mb: int, full: str | None) -> None:
    """Under a bound that is told; one through it is none, nor is one that stands still."""
    # WHEN
    actual = filling(grown(grown_mb * MB), told(limit_mb * MB), DEFAULT_LIMITS, "benign.warmup")

    # THEN
    assert (full is None) == (actual is None)
    if actual is not None:
        assert ("benign.warmup", "ok") == (actual.id, actual.status)
        assert actual.summary.startswith(f"llama-server 7: {CACHE} (--cache-ram) fills: ")
        assert actual.summary.endswith(f"({full})")
        size = Evidence(name="grown_since_first_reading", value=grown_mb * MB, unit="bytes", source="host")
        assert size == actual.evidence[0]


def test_cache_of_an_assumed_bound_is_not_told_as_filling() -> None:
    """Nobody knows that it is there."""
    assert filling(grown(1000 * MB), Facts(), DEFAULT_LIMITS, "benign.warmup") is None
    assert filling(grown(1000 * MB, name="python3"), told(2000 * MB), DEFAULT_LIMITS, "benign.warmup") is None


def test_fullest_of_two_caches_is_told() -> None:
    """By its share of the bound."""
    # GIVEN two processes of one server, of which the second holds more of it
    samples = []
    for minute in range(80):
        held = [
            HostProcess(pid=pid, name="llama-server", resident_bytes=size, anonymous_bytes=size)
            for pid, size in ((8, 2 * GIB + 20 * MB * minute), (9, 2 * GIB + 12 * MB * minute))
        ]
        samples.append(Sample(at_seconds=60.0 * minute, engines=(engine(),), host=tuple(held)))

    # WHEN
    actual = filling(Timeline(samples=tuple(samples)), told(4000 * MB), DEFAULT_LIMITS, "benign.warmup")

    # THEN
    assert actual is not None
    assert actual.summary.startswith("llama-server 8: ")
