"""The arithmetic of trends: known answers, invariances, and false alarms on noise that remembers."""

import math
from random import Random
from statistics import median
from time import process_time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdiag import stats
from tests.builders.series import MODELS, memory, report, seeded

numbers = st.lists(st.integers(-10_000, 10_000).map(float), min_size=8, max_size=40)


def autoregressive(random: Random, keep: float, count: int = 60) -> list[float]:
    """Noise of which each value keeps a share of the one before."""
    value, values = 0.0, []
    for number in range(count + 100):
        value = keep * value + random.gauss(0.0, 1.0)
        if number >= 100:
            values.append(value)
    return values


@pytest.mark.parametrize(
    ("score", "freedom", "expected"),
    [(0.0, 8, 0.5), (1.860, 8, 0.05), (2.821, 9, 0.01), (-1.812, 10, 0.95), (6.314, 1, 0.05), (1.645, 10_000, 0.05)],
)
def test_student_tail_is_the_table_s(score: float, freedom: float, expected: float) -> None:
    """One-sided probabilities of Student's t, as printed in any table."""
    assert pytest.approx(expected, abs=1e-4) == stats.student_tail(score, freedom)


def test_binomial_tail_is_a_coin_s() -> None:
    """Seven heads of seven are rarer than one in a hundred, six of six are not."""
    assert (1 / 128, 1 / 64, 1.0) == (stats.binomial_tail(7, 7), stats.binomial_tail(6, 6), stats.binomial_tail(0, 3))


@pytest.mark.parametrize(("keep", "bar"), [(0.0, 0.02), (0.3, 0.03), (0.6, 0.06), (0.8, 0.08), (0.9, 0.12)])
def test_slope_holds_its_false_alarms_on_noise_that_remembers(keep: float, bar: float) -> None:
    """At a nominal 1 % the slope stays below 6 % up to a correlation of 0.8, and at about 8 % with 0.9."""
    # 300 series of 60 values without a trend
    random = seeded(f"noise {keep}")
    series = [autoregressive(random, keep) for _ in range(300)]
    found = [stats.slope(values) for values in series]
    rate = sum(one is not None and one.p_rising < 0.01 for one in found) / len(found)
    report(f"slope, correlation {keep}: {rate:.1%} false alarms at a nominal 1 %")
    assert rate <= bar


def test_drift_is_not_seen_in_walks() -> None:
    """Of random walks, which a trend test calls every fourth time, the drift test calls at most its share."""
    random = seeded("walks")
    walks = [autoregressive(random, 1.0) for _ in range(300)]
    calls = [(tail := stats.drift_tail(values, 12)) is not None and tail < 0.05 for values in walks]
    report(f"drift, random walk: {sum(calls) / len(calls):.1%} false alarms at a nominal 5 %")
    assert sum(calls) / len(calls) <= 0.09


def test_load_beside_the_series_is_not_its_trend() -> None:
    """Memory that follows a rising load has no slope of its own; memory that rises in addition to the load has one."""
    # Load that rises, with noise
    random = seeded("load")
    load = [number / 10 + random.gauss(0.0, 1.0) for number in range(60)]
    follows = [3.0 * each + random.gauss(0.0, 0.1) for each in load]

    alone, beside = stats.slope(follows), stats.slope(follows, [load])
    rising = stats.slope([each + 0.05 * number for number, each in enumerate(follows)], [load])

    assert alone is not None
    assert beside is not None
    assert rising is not None
    assert alone.p_rising < 0.01 < beside.p_rising
    assert rising.p_rising < 0.01
    assert pytest.approx(0.05, abs=0.005) == rising.per_step


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0] * 20, (0.0, 0.5)), ([2.0 * number for number in range(20)], (2.0, 0.0))],
    ids=["flat", "line"],
)
def test_slope_without_noise(values: list[float], expected: tuple[float, float]) -> None:
    """A flat series has no trend, and a straight line nothing but."""
    actual = stats.slope(values)
    assert actual is not None
    assert expected == (round(actual.per_step, 6), round(actual.p_rising, 6))


def test_too_few_values_tell_nothing() -> None:
    """Neither a slope nor a drift nor a change is made of a handful of values."""
    assert stats.slope([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert stats.slope([float(number) for number in range(20)], [[float(number) for number in range(20)]]) is None
    assert stats.drift_tail([1.0] * 12, 12) is None
    assert not stats.is_step([0.0, 0.0, 3.0])
    assert not stats.is_step([7.0] * 10)


def test_drift_of_what_never_varies() -> None:
    """A straight line drifts for certain, a flat one not at all."""
    line = [float(number) for number in range(26)]
    assert (0.0, 1.0) == (stats.drift_tail(line, 12), stats.drift_tail([3.0] * 26, 12))


@given(numbers, st.integers(-(10**9), 10**9), st.sampled_from([0.5, 2.0, 1024.0]))
def test_shift_and_scale_change_nothing_but_the_unit(values: list[float], shift: int, scale: float) -> None:
    """In another unit and from another zero the slope is the same in that unit, and its significance the same."""
    others = [shift + scale * value for value in values]

    before, after = stats.slope(values), stats.slope(others)

    assert before is not None
    assert after is not None
    assert pytest.approx(scale * stats.theil_sen(values), rel=1e-9, abs=1e-6) == stats.theil_sen(others)
    assert pytest.approx(scale * before.per_step, rel=1e-6, abs=1e-4) == after.per_step
    if before.error_per_step > 1e-3:
        assert pytest.approx(before.p_rising, rel=1e-3, abs=1e-6) == after.p_rising


@given(numbers)
def test_a_series_turned_round_has_the_opposite_slope(values: list[float]) -> None:
    """Read backwards what rose falls, at the same rate."""
    assert pytest.approx(-stats.theil_sen(values)) == stats.theil_sen(values[::-1])


def test_theil_sen_ignores_outliers() -> None:
    """A fifth of the values may be anything."""
    values = [3.0 * number for number in range(40)]
    values[::5] = [1e9] * 8
    assert pytest.approx(3.0, rel=0.05) == stats.theil_sen(values)


def test_change_tells_a_step_from_a_line() -> None:
    """A level step is explained by a step, a slope by a line."""
    assert stats.is_step([10.0] * 30 + [15.0] * 10)
    assert not stats.is_step([float(number) for number in range(40)])


def test_jumps_are_taken_out_and_counted() -> None:
    """Two jumps up and one down leave the slope that the series has besides."""
    random = seeded("jumps")
    rises = [1.0 + random.gauss(0.0, 0.2) for _ in range(60)]
    rises[10], rises[30], rises[50] = 200.0, 300.0, -100.0
    values = [sum(rises[:number]) for number in range(61)]

    actual = stats.without_jumps(values, 6.0, 20.0)

    assert (2, 1) == (actual.ups, actual.downs)
    assert pytest.approx(397.0, abs=3.0) == values[-1] - actual.values[-1]
    assert pytest.approx(1.0, abs=0.1) == stats.theil_sen(actual.values)
    assert [11, 31, 51] == [place for place, _ in actual.jumps]
    assert stats.Levelled(values=(4.0,), jumps=()) == stats.without_jumps([4.0], 6.0, 1.0)


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=60), st.integers(1, 12))
@example([900.0, 901.0], 1)
def test_bins_hold_every_reading_of_their_time_once(times: list[float], count: int) -> None:
    """The bins together hold the samples from their first edge to their end inclusive, in order, each in one bin."""
    times.sort()

    actual = stats.binned(times, times, 900.0, 50.0, count)

    start = 900.0 - 50.0 * count
    assert count == len(actual)
    assert tuple(at for at in times if start <= at <= 900.0) == tuple(at for one in actual for at in one)
    assert all(
        start + 50.0 * place <= at <= start + 50.0 * (place + 1) for place, one in enumerate(actual) for at in one
    )


def test_exhaustion_is_an_interval() -> None:
    """A rate known to a fifth gives bounds around the time; one that may be 0 has no latest; a fall has no time."""
    assert stats.Interval(low=50.0, estimate=60.0, high=75.0) == stats.exhaustion_seconds(600.0, 10.0, 1.0, 2.0)
    assert stats.Interval(low=20.0, estimate=60.0, high=math.inf) == stats.exhaustion_seconds(600.0, 10.0, 10.0, 2.0)
    assert stats.Interval(low=0.0, estimate=0.0, high=0.0) == stats.exhaustion_seconds(-5.0, 10.0, 1.0, 2.0)
    assert stats.exhaustion_seconds(600.0, 0.0, 1.0, 2.0) is None


@given(numbers, st.floats(0.0, 1.0))
def test_quantile_lies_between_its_neighbours(values: list[float], ratio: float) -> None:
    """The ends are the extremes, the middle is the median, and more is never less."""
    assert (min(values), max(values)) == (stats.quantile(values, 0.0), stats.quantile(values, 1.0))
    assert pytest.approx(median(values)) == stats.quantile(values, 0.5)
    assert stats.quantile(values, ratio / 2) <= stats.quantile(values, ratio)


def test_a_day_at_one_reading_a_second_is_quick() -> None:
    """Bins, jumps, slope and drift of 86,400 samples take no more than 0.3 s."""
    times, sizes, _ = memory("slow noise", 1, hours=24.0, tick_seconds=1.0)

    begin = process_time()
    cells = stats.binned(times, sizes, times[-1], 1440.0, 60)
    smooth = stats.without_jumps([median(cell) for cell in cells], 6.0, 24.0 * 2**20)
    slope, drift = stats.slope(smooth.values), stats.drift_tail(smooth.values, 12)
    took = process_time() - begin

    report(f"a day at 1 Hz: {took:.3f} s")
    assert None not in (slope, drift)
    assert took <= 0.3


def test_every_null_model_is_what_it_says() -> None:
    """The same seed gives the same series, another seed another one but for the pool that never moves."""
    for name in MODELS:
        first, again, other = (memory(name, seed, hours=1.0) for seed in (1, 1, 2))
        assert first == again
        assert name == "pool" or first[1] != other[1]


def test_jump_of_several_steps_is_one() -> None:
    """What rises over three bins is one jump up, and a second one later is another."""
    random = seeded("ramp")
    values = [random.gauss(0.0, 1.0) for _ in range(60)]
    for place, height in ((20, 100.0), (21, 100.0), (22, 100.0), (40, 100.0)):
        values[place:] = [value + height for value in values[place:]]
    actual = stats.without_jumps(values, 6.0, 20.0)
    assert (2, 0) == (actual.ups, actual.downs)
    assert pytest.approx(400.0, rel=0.05) == values[-1] - actual.values[-1]


def test_another_clock_straightens_what_runs_by_it() -> None:
    """What grows with the work is a line by the work; a clock that stands still gives no result."""
    clock = [0.0, 1.0, 1.0, 1.0, 4.0, 5.0, 9.0]
    actual = stats.evenly(clock, [2.0 * at for at in clock])
    assert pytest.approx([3.0 * step for step in range(7)]) == list(actual or ())
    assert stats.evenly([1.0] * 7, clock) is None
    assert stats.evenly([], []) is None


def test_load_is_found_by_differences_and_a_trend_is_not() -> None:
    """Memory that follows the load has its sensitivity; memory that only rises has none, with any load."""
    random = seeded("share")
    load = [random.random() for _ in range(60)]
    follows = [3.0 * each + random.gauss(0.0, 0.2) for each in load]
    (found,) = stats.sensitivities(follows, [load], 0.25)
    assert pytest.approx(3.0, rel=0.1) == found
    assert (0.0,) == stats.sensitivities([2.0 * step for step in range(60)], [load], 0.25)
    assert (0.0, 0.0) == stats.sensitivities([1.0] * 9, [load[:9], [2.0] * 9], 0.25)


def test_slope_error_is_wider_where_noise_remembers() -> None:
    """Of white noise it is the textbook's; autocorrelated noise of the same size widens it."""
    random = seeded("error")
    white, kept, level = [], [], 0.0
    for _ in range(400):
        push = random.gauss(0.0, 1.0)
        level = 0.7 * level + math.sqrt(1.0 - 0.49) * push
        white.append(push)
        kept.append(level)

    textbook = math.sqrt(12.0 / 400.0) / 400.0
    assert pytest.approx(textbook, rel=0.25) == stats.slope_error(white, 0.0)
    assert stats.slope_error(kept, 0.0) > 1.8 * textbook
    assert pytest.approx(0.0, abs=1e-9) == stats.slope_error([2.0 * step for step in range(50)], 2.0)


def test_missing_bins_lie_between_their_neighbours() -> None:
    """And are not made up where too many are missing."""
    assert [1.0, 1.0, 2.0, 3.0, 3.0] == stats.interpolated([None, 1.0, None, 3.0, None], 0.4)
    assert stats.interpolated([None, 1.0, None, 3.0, None], 0.5) is None
    assert stats.interpolated([None], 0.0) is None
