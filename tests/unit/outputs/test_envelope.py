from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvdiag.outputs.html.downsample import pauses, runs, thinned

READINGS = st.lists(st.one_of(st.none(), st.integers(-1000, 1000).map(float)), min_size=1, max_size=300)


@given(READINGS, st.integers(1, 40))
def test_no_spike_is_lost_and_no_hole_is_bridged(values: list[float | None], columns: int) -> None:
    """However few columns there are, the extremes are kept with their times, and nothing is added."""
    times = [float(second) for second in range(len(values))]
    whole = runs(times, values)
    few = thinned(whole, times[0], times[-1], columns)
    kept = [(time, value) for some_times, some in few for time, value in zip(some_times, some, strict=True)]
    read = [(time, value) for time, value in zip(times, values, strict=True) if value is not None]
    assert set(kept) <= set(read)
    assert sorted(kept, key=lambda one: one[0]) == kept
    for telling in (min, max):
        assert telling((value for _, value in read), default=None) == telling((v for _, v in kept), default=None)
    assert read[:1] + read[-1:] == kept[:1] + kept[-1:]


@given(READINGS, st.integers(1, 40))
def test_a_hole_wider_than_a_column_stays_one(values: list[float | None], columns: int) -> None:
    """No run spans an interval without samples that is wide enough to be drawn."""
    times = [float(second) for second in range(len(values))]
    width = max(times[-1] - times[0], 1e-9) / columns
    read = {time for time, value in zip(times, values, strict=True) if value is not None}
    few = thinned(runs(times, values), times[0], times[-1], columns)
    for some_times, _ in few:
        for before, after in pairwise(some_times):
            unseen = [time for time in times if before < time < after and time not in read]
            assert not unseen or after - before <= width


@given(st.lists(st.booleans(), min_size=1, max_size=2000))
def test_what_is_drawn_is_bounded(seen: list[bool]) -> None:
    """A source that is lost at every other sample makes no more points than a constant one."""
    times = [float(second) for second in range(len(seen))]
    values = [float(second % 7) if there else None for second, there in zip(range(len(seen)), seen, strict=True)]
    few = thinned(runs(times, values), times[0], times[-1], 20)
    assert sum(len(some) for some, _ in few) <= 12 * 21


def test_the_same_readings_give_the_same_points() -> None:
    """Nothing is drawn by chance."""
    times = [second / 10 for second in range(5000)]
    values = [float(second * 7919 % 1000) for second in range(5000)]
    whole = runs(times, values)
    assert thinned(whole, 0.0, 500.0, 100) == thinned(whole, 0.0, 500.0, 100)


def test_time_in_which_nothing_was_read_is_a_pause() -> None:
    """An interval much longer than the adjacent ones is a break; a change of the sampling interval is none."""
    minutes = [60.0 * minute for minute in range(30)]
    seconds = [1800.0 + second for second in range(60)]
    after = [1920.0 + second for second in range(60)]
    assert (90,) == pauses([*minutes, *seconds, *after])


def test_a_late_reading_is_no_pause() -> None:
    """At ten samples a second, one that is a second late leaves no hole."""
    times = [*(tick / 10 for tick in range(50)), *(6.0 + tick / 10 for tick in range(50))]
    assert () == pauses(times)


def test_runs_are_cut_at_breaks_and_where_nothing_was_seen() -> None:
    """Each run has the samples between two holes."""
    assert (([0.0, 1.0], [5.0, 6.0]), ([3.0], [7.0]), ([4.0], [8.0])) == runs(
        [0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, None, 7.0, 8.0], (4,)
    )
