"""A soak's statistic on healthy memory of every kind, and on leaks in it: the table is
`tests/quality/bench/soak_power.py`.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis.growth.soak_cycles import Soaked, judge
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from tests.builders.series import report
from tests.builders.soak_series import MODELS, Kind, contents, cycles_of, readings, soaked
from tests.builders.values import MIB

SOAKS = 40
DEFAULT, SHORT = cycles_of(12), cycles_of(5)


def called(name: str, leak_mib: float = 0.0) -> Counter[str]:
    """How often each shape is the verdict on a model in the default soak."""
    kind = MODELS[name]
    shapes = Counter[str](soaked(kind, f"suite {name} {seed}", DEFAULT, leak_mib).shape for seed in range(SOAKS))
    report(f"{name} + {leak_mib:g} MiB: {dict(shapes)}")
    return shapes


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"GC"}))
def test_healthy_memory_is_no_leak(name: str) -> None:
    """With jitter, first touch, high-water marks, another process or noise at most one soak in forty is called."""
    assert called(name)["leak"] <= 1


def test_garbage_is_rarely_a_leak() -> None:
    """A heap that is collected every 3 to 20 load cycles is called in some 6 of 100 soaks, and then only suspected."""
    found = [soaked(MODELS["GC"], f"suite GC {seed}", DEFAULT) for seed in range(SOAKS)]

    called_leaks = [one for one in found if one.shape == "leak"]
    assert len(called_leaks) <= 0.15 * SOAKS
    assert all(one.bins < DEFAULT_LIMITS.soak.certain_bins for one in called_leaks)


@pytest.mark.parametrize(
    ("name", "leak_mib", "least"),
    [("quiet", 2, SOAKS), ("flat", 2, 34), ("flat", 5, SOAKS), ("ratchet", 20, SOAKS), ("neighbour", 20, SOAKS)],
)
def test_leak_is_found(name: str, leak_mib: float, least: int) -> None:
    """2 MiB per load cycle are found on a quiet floor, 20 MiB if another process takes 10 or during first touch."""
    assert called(name, leak_mib)["leak"] >= least


def test_neighbour_is_told_from_requests() -> None:
    """What grows in idle cycles as well is not laid at the requests' door."""
    assert called("neighbour")["background"] >= SOAKS - 2


def test_first_touch_has_ended() -> None:
    """Growth that decays is warm-up."""
    assert called("ratchet")["ended"] >= SOAKS - 2


@pytest.mark.parametrize("name", ["quiet", "flat", "RSS noise"])
def test_smallest_leak_that_would_show_does(name: str) -> None:
    """A leak as large as the soak's detection limit is called or left open, never declared flat."""
    for seed in range(SOAKS):
        # A soak that found nothing, and its smallest visible leak
        visible = soaked(MODELS[name], f"visible {seed}", DEFAULT).visible_per_cycle / MIB

        actual = soaked(MODELS[name], f"visible {seed}", DEFAULT, visible)

        assert actual.shape in ("leak", "unsteady", "background")


@pytest.mark.parametrize("cycles", [DEFAULT, SHORT], ids=["12 min", "5 min"])
def test_cache_of_contents_is_told_from_a_leak(cycles: tuple[object, ...]) -> None:
    """Repeated contents leave nothing behind; a real leak of the same size does."""
    minutes = 12 if cycles is DEFAULT else 5
    cache = soaked(Kind(model=contents), "a cache", cycles_of(minutes))
    leak = soaked(MODELS["flat"], "a leak", cycles_of(minutes), 20.0)

    assert ("content", "leak") == (cache.shape, leak.shape)


def test_leak_per_request_is_measured() -> None:
    """Twenty MiB in the mean load cycle, within a tenth, per request; and the dose shows."""
    actual = soaked(MODELS["flat"], "measured", DEFAULT, 20.0)

    assert pytest.approx(20.0 * MIB * actual.load_cycles / actual.requests, rel=0.1) == actual.per_request
    assert actual.dose_p is not None
    assert actual.dose_p < 0.01


def verdict(sizes: list[int | None]) -> Soaked | None:
    """`judge` on the samples after the default soak's cycles."""
    return judge(sizes, DEFAULT, DEFAULT_LIMITS, least=DEFAULT_LIMITS.soak.device_bytes)


@settings(deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 5), st.integers(-(2**33), 2**33))
def test_only_differences_count(name: str, seed: int, shift: int) -> None:
    """The same bytes on another base are judged the same."""
    sizes = readings(MODELS[name], f"shifted {seed}", DEFAULT)

    assert verdict([*sizes]) == verdict([size + shift for size in sizes])


@settings(deadline=None)
@given(st.sets(st.integers(0, len(DEFAULT) - 1), max_size=4))
def test_a_reading_that_is_missing_is_no_growth(missing: set[int]) -> None:
    """Where a cycle was not read, what came before and after it is not compared; the leak is still found."""
    sizes: list[int | None] = [*readings(MODELS["flat"], "holes", DEFAULT, 20.0)]
    for place in missing:
        sizes[place] = None

    actual = verdict(sizes)

    assert actual is not None
    assert "leak" == actual.shape
