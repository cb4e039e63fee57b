"""What a soak says of growth that is written down step by step: twelve judged load cycles, each after an idle one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from kvdiag.diagnosis.growth.soak_cycles import Cycle, Soaked, judge
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.stats.rank_tests import rank_sum_tail, rising

IDLE, LOAD, AGAIN = Cycle(requests=0), Cycle(requests=2), Cycle(requests=2, repeated=True)
WARMUP, JUDGED = 4, 12
"""Of 16 load cycles a quarter is warm-up."""


def soak(
    load: Sequence[float] | float,
    idle: Sequence[float] | float = 0.0,
    *,
    first: float = 0.0,
    again: Sequence[float] = (),
    least: float = 1.0,
    noisy: bool = False,
    doses: Sequence[int] = (2,) * JUDGED,
) -> Soaked:
    """`judge` on the rises of the judged load and idle cycles, after a warm-up that brings `first` at once."""
    loads = [*load] if isinstance(load, Sequence) else [load] * len(doses)
    idles = [*idle] if isinstance(idle, Sequence) else [idle] * len(doses)
    cycles, rises = [IDLE], [0.0]
    for place in range(WARMUP):
        cycles += [LOAD, IDLE] if place < WARMUP - 1 else [LOAD]
        rises += [first if place == 0 else 0.0, 0.0] if place < WARMUP - 1 else [0.0]
    for added_idle, added, dose in zip(idles, loads, doses, strict=True):
        cycles += [IDLE, replace(LOAD, requests=dose)]
        rises += [added_idle, added]
    cycles += [AGAIN] * len(again)
    rises += again
    found = judge([*accumulate(rises)], cycles, DEFAULT_LIMITS, least=least, noisy=noisy)
    assert found is not None
    return found


def alternating(loads: Sequence[float]) -> Soaked | None:
    """`judge` on a host's memory over load cycles that add these sizes, with an idle cycle after each."""
    cycles = [IDLE, *[LOAD, IDLE] * len(loads)]
    rises = [0.0, *(rise for load in loads for rise in (load, 0.0))]
    return judge([*accumulate(rises)], cycles, DEFAULT_LIMITS, least=1.0, noisy=True)


def test_figures_of_a_soak_are_those_of_its_cycles() -> None:
    """Ten for a load of two requests, one for an idle cycle: of each request 4.5 stay."""
    actual = soak(10.0, 1.0, first=20.0, least=3.0)

    # The first judged load comes after 20 of the warm-up, and one idle cycle
    levels = [31.0 + 11.0 * place for place in range(12)]
    assert actual == Soaked(
        shape="leak",
        load_cycles=12,
        idle_cycles=12,
        requests=24,
        per_cycle=11.0,
        per_idle_cycle=1.0,
        per_request=4.5,
        gain=121.0,
        first_touch=31.0,
        trend_p=rising(levels),
        load_p=rank_sum_tail([10.0] * 12, [1.0] * 12),
        dose_p=None,
        bins=2,
        visible_per_cycle=6.0,
    )
    assert 3.0 == actual.visible_per_request


def test_noise_of_idle_cycles_says_what_would_have_shown() -> None:
    """Twice its deviation, where that is more than twice the least; a cycle without requests has no smaller share."""
    # Idle cycles that add 3 and release 3, alternating
    actual = soak(0.0, [3.0, -3.0] * 6)

    assert 6.0 == actual.visible_per_cycle
    assert 6.0 == replace(actual, requests=0).visible_per_request


@pytest.mark.parametrize(
    ("load", "idle", "first", "least", "shape"),
    [
        (10.0, 0.0, 0.0, 10.0, "leak"),
        (10.0, 0.0, 0.0, 10.1, "flat"),
        (0.0, 0.0, 4.0, 1.0, "ended"),  # twice the detection limit, which is 2
        (0.0, 0.0, 3.9, 1.0, "flat"),
        ([0.0] * 11 + [1.9], 0.0, 4.0, 1.0, "ended"),  # less than half of the first touch came later
        ([0.0] * 11 + [2.0], 0.0, 4.0, 1.0, "flat"),
        ([0.0] * 11 + [-2.0], 0.0, 6.0, 1.0, "ended"),  # of 6 there are 4 left
        ([0.0] * 11 + [-2.1], 0.0, 6.0, 1.0, "flat"),
        ([10.0] * 6 + [5.0] * 6, 0.0, 0.0, 1.0, "leak"),  # half as fast in the later half
        ([10.0] * 6 + [4.9] * 6, 0.0, 0.0, 1.0, "unsteady"),
        ([10.0] * 6 + [2.5] * 6, 0.0, 0.0, 1.0, "unsteady"),
        ([10.0] * 6 + [2.4] * 6, 0.0, 0.0, 1.0, "ended"),
        ([10.0] * 6 + [4.0] * 6, 0.0, 0.0, 4.0, "unsteady"),
        ([10.0] * 6 + [4.0] * 6, 0.0, 0.0, 4.1, "ended"),  # below what counts
        ([6.0] * 6 + [100.0] + [4.0] * 5, 0.0, 0.0, 1.0, "unsteady"),  # one jump makes the slope
        ([6.0] * 8 + [14.0] + [2.5] * 3, 0.0, 0.0, 1.0, "leak"),  # in the last third as well
        (10.0, 10.0, 0.0, 1.0, "background"),
        (10.0, [14.0, 0.0] * 6, 0.0, 1.0, "background"),  # 0.7 of the load's
        (10.0, [13.9, 0.0] * 6, 0.0, 1.0, "unsteady"),
        (-10.0, 0.0, 0.0, 1.0, "flat"),
    ],
)
def test_shape_is_that_of_the_steps(
    load: Sequence[float] | float, idle: Sequence[float] | float, first: float, least: float, shape: str
) -> None:
    """Where each shape begins and ends."""
    assert shape == soak(load, idle, first=first, least=least).shape


@pytest.mark.parametrize(
    ("repeats", "shape"),
    [
        ((10.0, 0.0, 0.0, 0.0, 0.0), "content"),
        ((10.0, 2.4, 2.4, 2.4, 2.4), "content"),
        ((10.0, 2.5, 2.5, 2.5, 2.5), "leak"),  # a quarter of what new contents leave
        ((10.0, 0.0), "leak"),  # one repeat decides nothing
        ((10.0, 0.0, 0.0), "leak"),  # nor do two, with twelve loads: p = 1/91
        ((0.0, 0.0, 10.0, 0.0, 10.0), "leak"),
    ],
)
def test_repeated_contents_tell_a_cache_from_a_leak(repeats: Sequence[float], shape: str) -> None:
    """They leave less than a quarter behind, and the first of them, which brings them, does not count."""
    assert shape == soak(10.0, again=repeats).shape


def test_repeats_count_beyond_what_an_idle_cycle_brings() -> None:
    """Where idle cycles add 2, a repeat that adds 2 has left nothing."""
    assert "content" == soak(10.0, 2.0, again=(10.0, 2.0, 2.0, 2.0, 2.0)).shape


@pytest.mark.parametrize(("repeats", "shape"), [((10.0, 0.0), "leak"), ((10.0, 0.0, 0.0), "content")])
def test_two_repeats_are_enough_beside_fourteen_loads(repeats: Sequence[float], shape: str) -> None:
    """Two repeats below all fourteen loads have p = 1/120 and make it content; one, p = 1/15, does not."""
    assert shape == soak(10.0, again=repeats, doses=(2,) * 14).shape


@pytest.mark.parametrize(
    ("each", "noisy", "shape"), [(0.82, True, "flat"), (0.84, True, "unsteady"), (0.82, False, "leak")]
)
def test_noise_of_a_hosts_memory_raises_what_counts(each: float, noisy: bool, shape: str) -> None:
    """Three deviations of its idle cycles over twelve load cycles: 3 * 12 * sqrt(11) / 12 / 12 = 0.829."""
    # Idle cycles of which one added 12
    idle = [12.0, *[0.0] * 11]

    assert shape == soak(each, idle, least=0.1, noisy=noisy).shape


@pytest.mark.parametrize(
    ("loads", "shape"),
    [
        ([10.0] * 21, "leak"),
        ([10.0] * 20, "unsteady"),  # two bins of twelve cycles and a half
        ([10.0] * 15 + [-59.0] + [30.0] * 5, "leak"),
        ([10.0] * 15 + [-60.0] + [30.0] * 5, "unsteady"),  # back to the lowest of the block before
        # The first bin, of eight cycles, is as low as its first sample: the warm-up's end.
        ([10.0] * 5 + [100.0, 10.0, 10.0, 10.0, -90.0] + [20.0] * 11, "leak"),
    ],
)
def test_lowest_readings_of_a_hosts_memory_have_to_rise(loads: Sequence[float], shape: str) -> None:
    """Garbage that is collected falls to its former level; a leak has rising minima in at least three bins."""
    found = alternating(loads)
    assert found is not None
    assert (shape, 2) == (found.shape, found.bins)


@pytest.mark.parametrize(("loads", "judged"), [(11, None), (12, 9), (15, 12), (16, 12), (19, 15), (20, 15)])
def test_first_touch_is_a_quarter_of_the_loads_and_three_at_least(loads: int, judged: int | None) -> None:
    """What is left of them is judged; eleven are too few."""
    found = alternating([10.0] * loads)
    assert judged == (None if found is None else found.load_cycles)


@pytest.mark.parametrize(("loads", "bins"), [(24, 3), (56, 6), (60, 6), (104, 6)])
def test_bins_of_a_long_soak_become_longer(loads: int, bins: int) -> None:
    """Six at the most: a collector's period lies within one of them, be it ever so long."""
    found = alternating([10.0] * loads)
    assert bins == (None if found is None else found.bins)


def test_dose_is_judged_where_doses_differ() -> None:
    """The largest dose against the smallest."""
    # A leak of 5 a request
    doses = (1, 2, 3) * 4

    actual = soak([5.0 * dose for dose in doses], doses=doses)

    assert rank_sum_tail([15.0] * 4, [5.0] * 4) == actual.dose_p
    assert 5.0 == actual.per_request


@pytest.mark.parametrize(("idles", "judged"), [(3, False), (4, True)])
def test_four_idle_cycles_are_needed_beside_them(idles: int, judged: bool) -> None:
    """Those from the last warm-up cycle to the last load; a cycle that was spoilt is none."""
    spoilt = replace(IDLE, problem="other traffic")
    cycles = [IDLE, *[LOAD] * 12, *[LOAD, IDLE] * idles, LOAD, *[IDLE] * 9, spoilt]
    assert judged == (judge([0.0] * len(cycles), cycles, DEFAULT_LIMITS, least=1.0) is not None)
