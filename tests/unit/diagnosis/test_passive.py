"""What a trend says, figure by figure: which component decides, how certain it is, and how long the room lasts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from kvdiag.diagnosis.banks import Watched
from kvdiag.diagnosis.history import Holder
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.passive import (
    decisive,
    evidence,
    excluded,
    finding,
    judged,
    longest_seconds,
    lookalike,
    too_short,
)
from kvdiag.diagnosis.window import HOUR_SECONDS, Shape, Trend
from kvdiag.model import Evidence, Status
from tests.builders.values import GIB, MIB

FAST, MID, HALF, SLOW = DEFAULT_LIMITS.banks
GIB_AN_HOUR = GIB / HOUR_SECONDS
"""Bytes per second."""

CACHE_BYTES = DEFAULT_LIMITS.cache_bytes


def trend(shape: Shape = "grows", **changes: object) -> Trend:
    """Growth by 1 GiB/h over the 6 h of a bank, certain and without an error."""
    usual = Trend(
        bank=MID,
        shape=shape,
        idle_only=True,
        bytes_per_second=GIB_AN_HOUR,
        error_bytes_per_second=0.0,
        later_bytes_per_second=GIB_AN_HOUR,
        gain_bytes=4.0 * GIB,
        p_rising=0.0001,
        p_drift=0.0002,
        p_steady=0.6,
        wanders=9.123,
        hours=6.0,
        jumps_up=3,
        jumps_down=1,
        certain=True,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def holder(who: str) -> Holder:
    """Somebody on the host."""
    return Holder(device_uuid="", who=who)


def watched(*trends: Trend, seconds: float = 3600.0, burst: Trend | None = None, at_record: bool = False) -> Watched:
    """A component by its banks."""
    return Watched(seconds=seconds, trends=trends, burst=burst, at_record=at_record)


def room(size_bytes: int | None) -> Callable[[Holder], int | None]:
    """The same room for everybody."""
    return lambda _: size_bytes


def test_what_is_missing_for_any_bank_is_told() -> None:
    """How long was read, what the shortest and the longest bank would show."""
    two = (watched(seconds=600.0), watched(seconds=1230.0))
    assert 1230.0 == longest_seconds(two)
    assert 0.0 == longest_seconds(())
    assert (
        "host memory was read over 20 min; 1 h of readings without long gaps shows growth of 300 MB/h, 24 h of 5 MB/h"
        == too_short(two, "host memory", DEFAULT_LIMITS)
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (trend("grows", bytes_per_second=1.0), trend("steps")),
        (trend("steps", bytes_per_second=1.0), trend("unsteady")),
        (trend("unsteady", bytes_per_second=1.0), trend("event")),
        (trend("event", bytes_per_second=1.0), trend("ended")),
        (trend("ended", bytes_per_second=1.0), trend("flat")),
        (trend("grows", bytes_per_second=1.0), trend("grows", certain=False)),
        (trend("grows", gain_bytes=1.0), trend("grows", bytes_per_second=1.0)),
        (trend("grows"), trend("grows", gain_bytes=1.0)),
    ],
)
def test_worst_component_decides(first: Trend, second: Trend) -> None:
    """By its form, then by certainty, by its rate, by its gain, whichever order they come in."""
    for pair in ((first, second), (second, first)):
        by_name = {holder(str(number)): watched(one) for number, one in enumerate(pair)}
        found = decisive(by_name, DEFAULT_LIMITS, room(None))
        assert found is not None
        assert first == found[1]
    assert decisive({holder("none"): watched()}, DEFAULT_LIMITS, room(None)) is None


@pytest.mark.parametrize(
    ("room_bytes", "at_record", "certain", "reaches_a_bank", "shape"),
    [
        (GIB, False, False, False, "grows"),  # an hour is left: no bank would tell in time
        (GIB + GIB // 7200, False, False, False, None),  # half a second more
        (GIB + MIB, False, False, False, None),
        (None, False, True, True, "flat"),
        (GIB + MIB, True, True, True, "unsteady"),  # more is left, and it has never been so high
        (GIB + MIB, True, False, True, "flat"),
        (GIB + MIB, True, True, False, None),
    ],
)
def test_burst_decides_where_the_room_is_gone_within_the_hour(
    room_bytes: int | None, *, at_record: bool, certain: bool, reaches_a_bank: bool, shape: Shape | None
) -> None:
    """A burst of 1 GiB/h with 1 GiB left is called; with more it leaves open what a bank calls healthy."""
    # GIVEN
    burst = trend(bank=DEFAULT_LIMITS.burst, certain=certain)
    banks = (trend("flat", bytes_per_second=0.0),) if reaches_a_bank else ()

    # WHEN
    found = decisive({holder("a"): watched(*banks, burst=burst, at_record=at_record)}, DEFAULT_LIMITS, room(room_bytes))

    # THEN
    assert shape == (None if found is None else found[1].shape)


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (trend(), "fault", "a keep growing, 1.00 GiB/h over 6 h, and do not come back"),
        (trend(certain=False), "suspect", "a grow 1.00 GiB/h over 6 h; that they only wander is not excluded yet"),
        (trend("steps"), "fault", "a grow in 3 steps up and 1 down over 6 h, 1.00 GiB/h"),
        (trend("steps", certain=False), "suspect", "a grow in 3 steps up and 1 down over 6 h, 1.00 GiB/h"),
        (
            trend("unsteady"),
            "unknown",
            "cannot tell: a rose 4.00 GiB over 6 h, but not steadily; 12 h of readings would decide",
        ),
        (
            trend("unsteady", bank=SLOW, hours=24.0),
            "unknown",
            "cannot tell: a rose 4.00 GiB over 24 h, but not steadily; the same load on an idle replica would decide",
        ),
        (
            trend("unsteady", bank=DEFAULT_LIMITS.burst, hours=1.0 / 3.0),
            "unknown",
            "cannot tell: a rose 4.00 GiB within 20 min; 1 h of readings would decide",
        ),
        (trend("event"), "ok", "a rose 4.00 GiB over 6 h in 3 jumps: events, not a leak"),
        (trend("event", jumps_up=0), "ok", "a rose 4.00 GiB over 6 h at once: an event, not a leak"),
        (
            trend("ended"),
            "ok",
            "a rose 4.00 GiB over 6 h, ever more slowly: warm-up or a cache that fills, not a leak",
        ),
        (
            trend("flat", bank=replace(MID, least_bytes_per_hour=20.0 * MIB, least_growth_bytes=100 * MIB)),
            "ok",
            "a are flat over 6 h; 20.00 MiB/h would show",
        ),
    ],
)
def test_every_form_has_its_status_and_sentence(found: Trend, status: Status, words: str) -> None:
    """Growth that is certain is a fault, other growth suspect, what is open unknown, the rest ok; no room, no time."""
    assert found.shape in get_args(Shape)
    assert (status, words) == judged(found, "a", None, DEFAULT_LIMITS)


def test_room_is_told_in_hours_or_minutes() -> None:
    """From two hours on in hours, below in minutes; of what is no leak not at all."""
    exact = "a grow in 3 steps up and 1 down over 6 h, 1.00 GiB/h; room for "
    assert f"{exact}2.0 h (2.0 to 2.0)" == judged(trend("steps"), "a", 2 * GIB, DEFAULT_LIMITS)[1]
    assert f"{exact}90 min (90 to 90)" == judged(trend("steps"), "a", GIB * 3 // 2, DEFAULT_LIMITS)[1]
    # An error of a quarter: 1 GiB/h may be 0.5 or 1.5.
    wide = trend("steps", error_bytes_per_second=GIB_AN_HOUR / 4.0)
    assert f"{exact}6.0 h (4.0 to 12.0)" == judged(wide, "a", 6 * GIB, DEFAULT_LIMITS)[1]
    open_end = trend("steps", error_bytes_per_second=GIB_AN_HOUR)
    assert f"{exact}6.0 h (2.0 to unknown)" == judged(open_end, "a", 6 * GIB, DEFAULT_LIMITS)[1]
    assert "room for" not in judged(trend("ended"), "a", GIB, DEFAULT_LIMITS)[1]


@pytest.mark.parametrize(
    ("room_bytes", "changes", "status"),
    [
        # Of growth that levels off, half a window's worth is still to come: 6 h at 1 GiB/h are 3 GiB.
        (3 * GIB - 1, {}, "fault"),
        (3 * GIB, {}, "suspect"),
        (3 * GIB, {"later_bytes_per_second": 1.01 * GIB_AN_HOUR}, "fault"),
        (3 * GIB - 1, {"p_drift": 0.1, "wanders": 3.9}, "suspect"),  # it may only wander
        (None, {}, "suspect"),
    ],
)
def test_growth_that_ends_too_late_is_a_fault(
    room_bytes: int | None, changes: dict[str, float], status: Status
) -> None:
    """Whether growth levels off does not matter where the room does not last for the rest of it."""
    found = trend("grows", certain=False, **changes)
    assert status == judged(found, "a", room_bytes, DEFAULT_LIMITS)[0]
    assert "suspect" == judged(replace(found, shape="steps"), "a", room_bytes, DEFAULT_LIMITS)[0]


@pytest.mark.parametrize(
    ("rate", "grown_bytes", "room_bytes", "status"),
    [
        (1.0, 2 * GIB, 100 * GIB, "suspect"),
        (1.0, 2 * GIB, None, "suspect"),
        (0.32005, 2 * GIB, 100 * GIB, "suspect"),  # 8 GiB in 25 h are 0.32 GiB/h
        (0.31995, 2 * GIB, 100 * GIB, "fault"),
        (1.0, int(1.05 * CACHE_BYTES), 100 * GIB, "suspect"),
        (1.0, int(1.05 * CACHE_BYTES) + 1, 100 * GIB, "fault"),
        (1.0, 2 * GIB, 6 * GIB, "suspect"),  # room for the rest of it
        (1.0, 2 * GIB, 6 * GIB - 1, "fault"),
        (1.0, 6 * GIB, 4 * GIB, "suspect"),  # and for four hours
        (1.0, 6 * GIB, 4 * GIB - MIB, "fault"),
    ],
)
def test_a_cache_of_untold_bound_may_fill(
    rate: float, grown_bytes: int, room_bytes: int | None, status: Status
) -> None:
    """Steady growth is suspect while a cache may explain it: fast enough, within its bound, with room for the rest."""
    # GIVEN
    found = (
        holder("server 1"),
        trend(bytes_per_second=rate * GIB_AN_HOUR, later_bytes_per_second=rate * GIB_AN_HOUR),
    )

    # WHEN
    actual = finding(
        "leak.host",
        found,
        "bytes",
        room_bytes,
        "host",
        DEFAULT_LIMITS,
        cache_bytes=CACHE_BYTES,
        grown_bytes=grown_bytes,
    )

    # THEN
    assert status == actual.status
    last = (
        Evidence(name="grown_since_first_reading", value=grown_bytes, unit="bytes", source="host"),
        Evidence(name="cache_of_untold_bound", value=CACHE_BYTES, unit="bytes", source="assumed"),
    )
    assert (status == "suspect") == (actual.evidence[-2:] == last)


def test_where_no_cache_can_be_growth_stays_a_fault() -> None:
    """Without a bound that may be there nothing is excused, and what was looked at beside comes last."""
    # WHEN
    extra = excluded("other_growth", watched(trend(bytes_per_second=2.0)), "host")
    actual = finding("leak.host", (holder("x 1"), trend()), "bytes", None, "host", DEFAULT_LIMITS, extra=(extra,))

    # THEN
    assert ("leak.host", "fault") == (actual.id, actual.status)
    assert actual.summary.startswith("x 1: bytes keep growing")
    assert Evidence(name="other_growth", value=7200.0, unit="bytes", source="host") == actual.evidence[-1]
    assert excluded("other_growth", None, "host").value is None
    assert excluded("other_growth", watched(), "host").value is None


@pytest.mark.parametrize(
    ("found", "begins"),
    [
        (trend("flat"), None),
        (trend("event"), None),
        (trend("steps"), "level steps: 3 of 4 go up, at random half would"),
        (trend(p_steady=0.49), "warm-up or a cache that fills: the later half still grows at 100% of"),
        (
            trend(p_steady=0.5, later_bytes_per_second=0.9 * GIB_AN_HOUR),
            "warm-up or a cache that fills: the later half still grows at 90% of the rate of the whole",
        ),
        (trend(p_steady=0.5), "memory that only wanders: its chance of so steady a drift is 0.0002"),
        (trend(p_drift=1.1e-6), "memory that only wanders: its chance of so steady a drift is 1.1e-06"),
        (
            trend(p_drift=1e-6),
            "garbage or load that comes and goes: the lowest readings rose by 100% of what the slope says",
        ),
        (
            trend(p_drift=0.0, gain_bytes=2.0 * GIB),
            "garbage or load that comes and goes: the lowest readings rose by 50%",
        ),
        (trend(bytes_per_second=0.0), "warm-up or a cache that fills: the later half still grows at 0% of"),
    ],
)
def test_nearest_lookalike_is_the_one_that_is_least_excluded(found: Trend, begins: str | None) -> None:
    """A bend before wandering, wandering before garbage; the figure that excludes it is told. 4 GiB of 6 are all."""
    told = lookalike(found)
    assert (begins is None) == (told == ())
    if begins is not None:
        assert told[0].startswith(begins)


def test_evidence_has_every_figure_with_its_unit() -> None:
    """Rates by the hour, the room and how long it lasts; what nothing bounds is not told."""
    # GIVEN growth by 1 GiB/h with an error that may be all of it, and room for 6
    found = trend(error_bytes_per_second=GIB_AN_HOUR, later_bytes_per_second=0.5 * GIB_AN_HOUR, hours=6.004)

    # WHEN
    actual = [
        (one.name, one.value, one.unit, one.source) for one in evidence(found, "x 1", 6 * GIB, "host", DEFAULT_LIMITS)
    ]

    # THEN what would show is 2.9 errors
    lookalikes = [one for one in actual if one[0] == "nearest_lookalike"]
    assert 1 == len(lookalikes)
    expected = [
        ("holder", "x 1", "", "host"),
        ("window", 6.0, "hours", "kvdiag"),
        ("read_while_idle", "only", "", "engine"),
        ("growth_per_hour", GIB, "bytes", "host"),
        ("growth_per_hour_of_later_half", GIB / 2, "bytes", "host"),
        ("growth_of_the_floor", 4.0 * GIB, "bytes", "host"),
        ("chance_without_growth", 0.0001, "ratio", "computed"),
        ("chance_in_a_random_walk", 0.0002, "ratio", "computed"),
        ("wandering_of_a_healthy_server", 9.12, "deviations", "computed"),
        ("chance_that_steady_growth_slows_so", 0.6, "ratio", "computed"),
        ("jumps_up", 3, "jumps", "host"),
        ("jumps_down", 1, "jumps", "host"),
        ("smallest_visible_growth", 2.9 * GIB, "bytes per hour", "computed"),
        ("room", 6 * GIB, "bytes", "host"),
        ("time_to_exhaustion_earliest", 7200.0, "seconds", "computed"),
        ("time_to_exhaustion", 21600.0, "seconds", "computed"),
        ("time_to_exhaustion_latest", None, "seconds", "computed"),
    ]
    told = [one for one in actual if one[0] != "nearest_lookalike"]
    assert [(name, unit, source) for name, _, unit, source in expected] == [
        (name, unit, source) for name, _, unit, source in told
    ]
    assert ("nearest_lookalike", "", "computed") == (lookalikes[0][0], *lookalikes[0][2:])
    for (name, value, _, _), (_, found_value, _, _) in zip(expected, told, strict=True):
        assert (value if value is None or isinstance(value, str) else pytest.approx(value)) == found_value, name


def test_under_load_no_room_is_no_time() -> None:
    """Where the readings were not idle ones that is told; without room there is no time to exhaustion."""
    # WHEN
    told = {one.name: one.value for one in evidence(trend(idle_only=False), "x", None, "host", DEFAULT_LIMITS)}

    # THEN
    assert "and under load" == told["read_while_idle"]
    assert [None] * 4 == [
        told[name]
        for name in ("room", "time_to_exhaustion_earliest", "time_to_exhaustion", "time_to_exhaustion_latest")
    ]
    flat = {one.name: one.value for one in evidence(trend("flat"), "x", GIB, "host", DEFAULT_LIMITS)}
    assert (GIB, None) == (flat["room"], flat["time_to_exhaustion"])
    assert not any(isinstance(value, float) and math.isinf(value) for value in told.values())
