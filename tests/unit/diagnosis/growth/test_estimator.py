"""The growth estimator: which gate decides on what, and how often noise is called."""

import math
from collections.abc import Callable
from dataclasses import astuple, fields, replace
from itertools import accumulate

import pytest

from kvdiag.diagnosis.growth.estimator import assess
from kvdiag.diagnosis.growth.growth_evidence import Assessment, GrowthEvidence, Series
from kvdiag.diagnosis.growth.growth_windows import Minutes
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from tests.builders.series import MODELS, memory, seeded
from tests.builders.values import GIB, MIB
from tests.quality.bench.growth_power import KINDS

LIMITS = DEFAULT_LIMITS.growth
MB = 10**6


def series(above: Callable[[float], float], hours: float, *, tick: float = 60.0, collected: bool = False) -> Series:
    """A sample each minute: 20 GiB, plus `above` by the hour, plus a little white noise."""
    random = seeded("estimator")
    times = [tick * step for step in range(round(hours * 3600.0 / tick) + 1)]
    sizes = [20 * GIB + round(above(seconds / 3600.0) + random.gauss(0.0, 2.0 * MB)) for seconds in times]
    return Series(times_seconds=times, sizes_bytes=sizes, collected=collected)


def drawn(kind: str, seed: int, hours: float, leak: float = 0.0, onset: float = 0.0) -> Assessment:
    """A drawn series without its first half hour."""
    times, sizes, load = memory(kind, seed, hours=hours, leak_mb_per_hour=leak, onset=onset, models=KINDS)
    return assess(Series(times_seconds=times[30:], sizes_bytes=sizes[30:], load=load[30:]), LIMITS)


def decided(found: Assessment) -> GrowthEvidence:
    """The window that answers."""
    assert found.decides is not None
    return found.decides


@pytest.mark.parametrize(
    ("above", "hours", "reason"),
    [
        (lambda hour: 0.0, 8.0, "flat"),
        (lambda hour: 400 * MB * (hour % 1.7), 24.0, "returns"),
        (lambda hour: 2000 * MB * (hour > 5.0), 8.0, "event"),
        (lambda hour: 500 * MB * min(max(hour - 4.0, 0.0), 2.0), 8.0, "event"),
        (lambda hour: 3000 * MB * (1.0 - math.exp(-hour / 2.0)), 6.0, "ended"),
    ],
    ids=["flat", "garbage", "a step", "a quarter", "warm-up"],
)
def test_what_is_explained_is_none_by_its_gate(above: Callable[[float], float], hours: float, reason: str) -> None:
    """Each lookalike of a leak fails at the gate that is there for it, over the whole history."""
    found = assess(series(above, hours), LIMITS)
    assert {"none"} == {one.status for one in found.windows}
    assert {"flat", reason} == {"flat", *(one.reason for one in found.windows)}


@pytest.mark.parametrize(("rate", "hours"), [(500.0, 1.6), (50.0, 8.0), (20.0, 16.0), (10.0, 60.0)])
def test_steady_growth_is_a_fault_with_its_rate(rate: float, hours: float) -> None:
    """The slower it is the longer it takes, and no length of history is too long."""
    growth = decided(assess(series(lambda hour: rate * MB * hour, hours), LIMITS))
    assert ("fault", "grows") == (growth.status, growth.reason)
    assert pytest.approx(rate * MB, rel=0.1) == growth.bytes_per_second * 3600.0


def test_the_shortest_window_that_convinces_gives_the_rate() -> None:
    """A leak that began late is reported with its own rate, not with that of the day."""
    growth = decided(assess(series(lambda hour: 1000 * MB * max(hour - 22.0, 0.0), 24.0), LIMITS))
    assert ("fault", 1.0) == (growth.status, growth.window_hours)
    assert pytest.approx(1000 * MB, rel=0.1) == growth.bytes_per_second * 3600.0


def test_four_steps_within_an_hour_are_a_fault() -> None:
    """Each of them confirms the one before: no earlier window has to, which is too short for as many."""
    growth = decided(assess(series(lambda hour: 100 * MIB * (4.0 * hour // 1.0), 1.15), LIMITS))
    assert ("fault", "grows", True) == (growth.status, growth.reason, growth.by_count)
    stopped = decided(assess(series(lambda hour: 100 * MIB * (8.0 * min(hour, 0.55) // 1.0), 1.15), LIMITS))
    assert "none" == stopped.status


@pytest.mark.parametrize(("hours", "reason"), [(5.5, "grows"), (5.9, "event")])
def test_steps_are_over_once_they_pause_for_longer_than_ever(hours: float, reason: str) -> None:
    """Five adapters, one each twenty minutes, are no leak an hour after the last: no window of their past holds."""
    found = decided(assess(series(lambda hour: 300 * MIB * min(max((hour - 3.0) // (1 / 3), 0.0), 5.0), hours), LIMITS))
    assert reason == found.reason


def test_small_falls_make_no_events_of_large_steps() -> None:
    """An arena of 100 MB that is returned among steps of 2.3 GB leaves them growth, at their whole rate."""
    found = decided(assess(series(lambda hour: 2300 * MB * (hour // 0.28) - 100 * MB * (hour > 0.7), 1.1), LIMITS))
    assert ("fault", 0) == (found.status, found.steps_down)
    assert 4 * GIB < found.gain_bytes


def test_a_warm_up_that_has_ended_does_not_hold() -> None:
    """However noisy: for hours it looked steady, and its noise may look like a growth that continues."""

    def warming(hour: float) -> float:
        return 2000 * MB * (1.0 - math.exp(-hour / 1.5)) + 90 * MB * math.sin(2.0 * math.pi * hour / 1.7)

    assert ["held", "ended"] == [decided(assess(series(warming, hours), LIMITS)).reason for hours in (3.0, 4.0)]


def test_nothing_is_left_before_the_first_minute() -> None:
    """More minutes may be asked for than are kept of a history of months."""
    minutes = Minutes.of(series(lambda hour: 0.0, 0.1), LIMITS)
    assert ([], []) == (minutes.until(8).medians, minutes.until(8).lows)


@pytest.mark.parametrize(("hours", "status"), [(1.15, "suspect"), (4.15, "fault")])
def test_steps_of_a_heap_are_a_fault_once_they_last_for_hours(hours: float, status: str) -> None:
    """A heap that warms up, or is not collected yet, climbs in steps as well."""
    growth = decided(assess(series(lambda hour: 100 * MIB * (4.0 * hour // 1.0), hours, collected=True), LIMITS))
    assert status == growth.status


def test_a_sawtooth_without_its_falls_is_no_growth() -> None:
    """Garbage that is collected after more than a day's floor has risen: the claim is not the floor's rise."""
    found = assess(series(lambda hour: 700 * MB * (hour % 0.9) + 60 * MB * hour, 4.0), LIMITS)
    assert {"none"} == {one.status for one in found.windows if one.steps_down}


def test_scrapes_that_come_late_still_fill_the_hour() -> None:
    """Samples 61 s apart are as dense as those of a minute."""
    growth = decided(assess(series(lambda hour: 500 * MB * hour, 1.4, tick=61.0), LIMITS))
    assert "fault" == growth.status


@pytest.mark.parametrize(
    ("steps", "status"), [(3, "unknown"), (4, "suspect"), (8, "fault")], ids=["three", "four", "eight"]
)
def test_steps_that_only_go_up_count_by_their_number(steps: int, status: str) -> None:
    """300 MB every two hours: a few may be what is loaded when used, many even ones are a leak."""
    growth = decided(assess(series(lambda hour: 300 * MB * (hour // 2.0), 2.0 * steps + 1.0), LIMITS))
    assert (status, 0) == (growth.status, growth.steps_down)


def working(above: Callable[[float], float], hours: float) -> Series:
    """A server that works twelve hours a day and hardly at night; `above` is by the tokens done, in thousands."""
    times = [60.0 * step for step in range(round(hours * 60.0) + 1)]
    load = [1.0 if seconds / 3600.0 % 24.0 < 12.0 else 0.05 for seconds in times]
    work = [1000.0 * done for done in accumulate(load)]
    random = seeded("working")
    sizes = [20 * GIB + round(above(done / 1000.0) + random.gauss(0.0, 2.0 * MB)) for done in work]
    return Series(times_seconds=times, sizes_bytes=sizes, load=load, work=work)


@pytest.mark.parametrize("hours", [20.0, 24.0, 45.0])
def test_a_leak_of_requests_is_judged_over_their_work(hours: float) -> None:
    """By the hour it ends each evening; by the tokens it is a straight line, whose rate is the mean over its time."""
    leak = working(lambda done: 1.5 * MB * done, hours)
    growth = decided(assess(leak, LIMITS))
    assert ("fault", True) == (growth.status, growth.over_work)
    begin = leak.times_seconds[-1] - 3600.0 * growth.window_hours
    grown = leak.sizes_bytes[-1] - leak.sizes_bytes[round(begin / 60.0)]
    assert pytest.approx(grown, rel=0.1) == growth.bytes_per_second * 3600.0 * growth.window_hours
    by_time = assess(replace(leak, work=None), LIMITS).windows
    assert {"held"} >= {one.reason for one in by_time if one.status == "fault"}


def evening(above: Callable[[float], float]) -> Series:
    """Five hours in which the work falls to a third, evenly; `above` is by the share of it that is done."""
    times = [60.0 * step for step in range(301)]
    work = list(accumulate(1.0 - step / 450.0 for step in range(301)))
    random = seeded("evening")
    sizes = [20 * GIB + round(above(done / work[-1]) + random.gauss(0.0, 2.0 * MB)) for done in work]
    return Series(times_seconds=times, sizes_bytes=sizes, work=work)


def test_growth_that_slows_down_with_the_work_is_no_warm_up() -> None:
    """What each request leaves is as much as before; a warm-up slows down over the work as well."""
    leak = evening(lambda done: 1500 * MB * done)
    assert "fault" == decided(assess(leak, LIMITS)).status
    assert "slowing" in {one.reason for one in assess(replace(leak, work=None), LIMITS).windows}
    warming = assess(evening(lambda done: 1500 * MB * (1.0 - math.exp(-1.2 * done))), LIMITS)
    assert "slowing" in {one.reason for one in warming.windows}
    assert "fault" not in {one.status for one in warming.windows}


def test_work_explains_no_noise_as_growth() -> None:
    """What does not grow with the work is judged as before, and an engine without work has no such clock."""
    flat = working(lambda done: 0.0, 36.0)
    assert "none" == decided(assess(flat, LIMITS)).status
    idle = replace(flat, work=[7.0] * len(flat.times_seconds))
    assert assess(replace(flat, work=None), LIMITS) == assess(idle, LIMITS)


def test_growth_of_collected_memory_needs_a_past() -> None:
    """An hour of little of it may be one collector's period; device memory, which nothing collects, is a fault."""

    def above(hour: float) -> float:
        return 350 * MB * hour

    assert "fault" == decided(assess(series(above, 1.2), LIMITS)).status
    held = decided(assess(series(above, 1.2, collected=True), LIMITS))
    assert ("suspect", "no past") == (held.status, held.reason)
    # More, at a rate that keeps up, is neither garbage nor a warm-up.
    assert "fault" == decided(assess(series(lambda hour: 800 * MB * hour, 1.2, collected=True), LIMITS)).status
    warming = assess(series(lambda hour: 2000 * MB * (1.0 - math.exp(-hour / 0.9)), 1.2, collected=True), LIMITS)
    assert "fault" not in {one.status for one in warming.windows}
    assert "fault" == decided(assess(series(lambda hour: 3.0 * GIB * hour, 1.2, collected=True), LIMITS)).status
    assert "fault" == decided(assess(series(above, 3.5, collected=True), LIMITS)).status


def test_a_collection_of_before_explains_the_next_climb() -> None:
    """A tooth that rises where the last one has been is no new ground."""
    found = assess(series(lambda hour: 300 * MB * (hour % 4.0), 11.5), LIMITS)
    assert "fault" not in {one.status for one in found.windows}
    assert "recurring" in {one.reason for one in found.windows}


def test_a_fault_holds_until_its_growth_is_released_or_long_over() -> None:
    """A leak that pauses is no other than before; memory that returned, or stayed level for longer, is."""

    def paused(hour: float) -> float:
        return 60 * MB * min(hour, 12.0)

    found = decided(assess(series(paused, 17.0), LIMITS))
    assert ("fault", "held") == (found.status, found.reason)
    assert 0.0 < found.age_seconds <= 3600.0 * found.window_hours
    released = assess(series(lambda hour: paused(hour) * (hour < 16.0), 17.0), LIMITS)
    assert "fault" not in {one.status for one in released.windows}
    over = assess(series(paused, 30.0), LIMITS)
    assert "fault" not in {one.status for one in over.windows}


def test_load_is_taken_out() -> None:
    """Memory that follows the load does not grow at equal load; a leak of 100 MB/h beneath it is a fault."""
    for leak, status in ((0.0, "none"), (100.0, "fault")):
        growth = decided(drawn("load cycles", 3, 14.0, leak))
        assert (status, True) == (growth.status, growth.load_removed)


def test_a_burst_needs_engines_that_answer() -> None:
    """Loading a model takes memory faster than any leak."""
    climb = series(lambda hour: 30 * GIB * hour, 0.6, tick=15.0)
    served = assess(climb, LIMITS, served_since_seconds=0.0)
    assert served.burst is not None
    assert served.decides is None
    assert assess(climb, LIMITS).burst is None
    assert assess(climb, LIMITS, served_since_seconds=1800.0).burst is None


@pytest.mark.parametrize(("minutes", "hours"), [(59, []), (60, [1.0]), (74, [1.0]), (75, [1.0, 1.25])])
def test_the_whole_history_is_a_window_once_it_is_a_quarter_longer(minutes: int, hours: list[float]) -> None:
    """The whole history is a window if it is a quarter longer than the longest full window."""
    times = [60.0 * minute + 30.0 for minute in range(minutes)]
    found = assess(Series(times_seconds=times, sizes_bytes=[10 * MB * minute for minute in range(minutes)]), LIMITS)
    assert hours == [one.window_hours for one in found.windows]


@pytest.mark.parametrize(
    ("rises", "reason"),
    [
        ((100, 90, 80, 60), "slowing"),
        ((100, 99, 98, 79), "slowing"),
        ((100, 99, 98, 80), "grows"),
        ((100, 100, 80, 60), "grows"),
        ((100, 80, 90, 60), "grows"),
    ],
)
def test_growth_slows_down_where_each_fifth_rises_less(rises: tuple[int, ...], reason: str) -> None:
    """And the last one by less than four fifths of the first: 13 minutes each, by their middles."""
    middles = [0, *accumulate(rises)]
    sizes = []
    for minute in range(65):
        part = min(max((minute - 6) // 13, 0), 3)
        sizes.append(3 * MB * (13 * middles[part] + rises[part] * (minute - 6 - 13 * part)) // 13)
    found = assess(Series(times_seconds=[60.0 * minute for minute in range(65)], sizes_bytes=sizes), LIMITS)
    assert [reason] == [one.reason for one in found.windows if one.reason != "held"]


CURVES: dict[str, Callable[[float], float]] = {
    "steady": lambda hour: 200 * MB * hour,
    "late": lambda hour: 600 * MB * max(hour - 6.0, 0.0),
    "faster and faster": lambda hour: 20 * MB * hour**2,
    "levels off": lambda hour: 3000 * MB * (1.0 - math.exp(-hour / 5.0)),
    "sawtooth": lambda hour: 300 * MB * (hour % 4.0) + 30 * MB * hour,
    "steps up": lambda hour: 300 * MB * (hour // 0.8),
    "steps both ways": lambda hour: 60 * MB * hour + 500 * MB * (3.0 < hour < 5.0) + 400 * MB * (hour > 9.5),
    "waves": lambda hour: 80 * MB * hour + 90 * MB * math.sin(hour * 2.0),
    "began lately": lambda hour: 400 * MB * max(hour - 10.9, 0.0),
    "still": lambda hour: 0.0,
}


def test_each_gate_has_its_figures(golden: Callable[[str, str], None]) -> None:
    """Of every window over twelve hours, by curve and by kinds of drawn memory with a leak of 60 MB an hour."""
    found = {name: assess(series(above, 12.0), LIMITS) for name, above in CURVES.items()}
    found |= {f"drawn: {kind}": drawn(kind, 5, 13.0, 60.0) for kind in ("load cycles", "fast noise", "ratchet")}
    for tick in (20.0, 90.0, 300.0):
        found |= {f"{name}: {tick:.0f} s": assess(series(of, 31.0, tick=tick), LIMITS) for name, of in CURVES.items()}
    lines = [
        ", ".join([name, *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in astuple(rounded))])
        for name, assessment in found.items()
        for one in assessment.windows
        # Further digits of so small a p-value are the platform's.
        for rounded in [replace(one, p_drift=max(one.p_drift, 1e-6))]
    ]
    names = ", ".join(["series", *(each.name for each in fields(GrowthEvidence))])
    golden("figures/growth.txt", "\n".join([names, *lines]) + "\n")


@pytest.mark.parametrize(("first", "second", "ratio"), [(1, 2, 2.0), (0, 1, 1.0), (0, 0, 0.0)])
def test_later_half_is_compared_with_the_first(first: int, second: int, ratio: float) -> None:
    """By their bytes in four minutes, without a division by 0."""
    sizes = [GIB + (first * min(minute, 30) + second * max(minute - 30, 0)) // 4 for minute in range(60)]
    (found,) = assess(Series(times_seconds=[60.0 * minute for minute in range(60)], sizes_bytes=sizes), LIMITS).windows
    assert ratio == found.later_ratio


def test_what_equals_its_limit_does_not_exceed_it() -> None:
    """The p-value of four steps; and without a past, growth is not beyond it."""
    steps = series(lambda hour: 300 * MB * (hour // 2.0), 9.0)
    p_steps = assess(steps, replace(LIMITS, steps_p=0.0, drift_p=0.0)).windows[-1].p_steps
    assert "few steps" == assess(steps, replace(LIMITS, steps_p=p_steps, drift_p=0.0)).windows[-1].reason
    young = series(CURVES["sawtooth"], 31.0, tick=300.0)
    assert "drift" == assess(young, replace(LIMITS, suspect_beyond_past=0.0)).windows[-1].reason


def test_the_longest_of_what_is_pending_decides() -> None:
    """Before what the longest window says, and after the shortest fault; a fault lasts as long as its own window."""
    none, *_ = assess(series(lambda hour: 0.0, 8.0), LIMITS).windows
    slow = replace(none, status="unknown", reason="slowing", window_hours=3.0)
    recent, short = replace(slow, reason="recent"), replace(slow, reason="recent", window_hours=1.0)
    asked = ((short, slow, none), (short, recent, none), (replace(none, strength=9.0), none))
    assert [slow, recent, none] == [Assessment(seconds=1.0, windows=each).decides for each in asked]
    fault = replace(none, status="fault", window_hours=3.0)
    found = Assessment(seconds=1.0, windows=(short, fault, none))
    assert (fault, True, False) == (found.decides, found.lasts(3.0), found.lasts(3.1))


def test_exhaustion_is_bounded_by_the_error_of_the_rate() -> None:
    """100 GB at 1 GB an hour last about 100 hours; what does not grow exhausts nothing."""
    growth = decided(assess(series(lambda hour: 1000 * MB * hour, 6.0), LIMITS))
    left = growth.exhaustion_seconds(100e9, LIMITS)
    assert left is not None
    assert left.low <= left.estimate <= left.high
    assert pytest.approx(100.0, rel=0.05) == left.estimate / 3600.0
    assert replace(growth, bytes_per_second=0.0, later_bytes_per_second=0.0).exhaustion_seconds(1e9, LIMITS) is None
    # A later half that is ten times as fast may continue so
    faster = replace(growth, later_bytes_per_second=10 * growth.bytes_per_second).exhaustion_seconds(100e9, LIMITS)
    assert faster is not None
    assert pytest.approx(10.0, rel=0.05) == faster.low / 3600.0


def test_no_readings_and_few_readings_decide_nothing() -> None:
    """There is no window that they fill."""
    assert assess(Series(times_seconds=(), sizes_bytes=()), LIMITS) == Assessment(seconds=0.0, windows=())
    assert assess(series(lambda hour: 5000 * MB * hour, 0.9), LIMITS).decides is None
    assert assess(Series(times_seconds=[0.0, 7200.0], sizes_bytes=[0, GIB]), LIMITS).decides is None


@pytest.mark.parametrize("kind", MODELS)
def test_healthy_noise_is_no_fault(kind: str) -> None:
    """Eleven kinds of healthy memory, judged at several ages of up to three days."""
    found = [decided(drawn(kind, seed, hours)).status for seed in range(3) for hours in (3.0, 9.0, 26.0, 72.0)]
    assert "fault" not in found
    assert found.count("suspect") <= (2 if kind in {"random walk", "ramps"} else 0)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in {"random walk", "level steps"}])
def test_leaks_in_noise_are_called(kind: str) -> None:
    """A leak of 50 MB/h over 20 hours is called in each of these noise models."""
    assert all(decided(drawn(kind, seed, 34.0, 50.0, 14.0)).grows for seed in range(3))


@pytest.mark.parametrize("kind", ["pool", "fast noise", "slow noise", "sawtooth", "load cycles"])
def test_a_leak_well_above_the_printed_limit_is_never_flat(kind: str) -> None:
    """The detection limit is true: twice of it is never called flat over the same window."""
    for seed in range(3):
        limit = decided(drawn(kind, seed, 24.5)).detection_limit_bytes_per_second * 3600.0 / MB
        assert "none" != decided(drawn(kind, seed, 24.5, 2.0 * limit)).status


def test_moving_a_series_changes_nothing() -> None:
    """Neither when it was read nor how much stands still beneath it."""
    one = series(lambda hour: 40 * MB * hour, 12.0)
    moved = replace(
        one,
        times_seconds=[at + 86_400.0 for at in one.times_seconds],
        sizes_bytes=[size + 64 * MIB for size in one.sizes_bytes],
    )
    before, after = decided(assess(one, LIMITS)), decided(assess(moved, LIMITS))
    assert (before.status, before.reason, before.window_hours) == (after.status, after.reason, after.window_hours)
    assert pytest.approx(before.bytes_per_second) == after.bytes_per_second
