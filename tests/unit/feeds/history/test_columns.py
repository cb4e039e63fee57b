"""Columns put side by side: exact within a page, as of a moment between pages, one after the other when renamed."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.feeds.history.columns import Column, by_row, combined, in_turn, side_by_side
from kvdiag.feeds.history.columns import readings as rows_made

PAGE, OTHER = ("page",), ("other",)


def column(*readings: tuple[float, float], target: tuple[str, ...] = PAGE) -> Column:
    """Samples of one target."""
    return Column(
        targets=frozenset({target}),
        times=array("d", [moment for moment, _ in readings]),
        values=array("d", [value for _, value in readings]),
    )


def readings(whole: Column) -> list[tuple[float, float]]:
    """What stands in a column."""
    return list(zip(whole.times, whole.values, strict=True))


def test_equal_rows_in_a_row_are_made_once() -> None:
    """What stays the same is one object, and a row without figures is left out."""
    rows = {"a": {"x": [1.0, 1.0, None, 1.0], "y": [2.0, 2.0, None, None]}, "b": {"x": [None, 5.0, 5.0, 6.0]}}
    found = rows_made([1.0, 2.0, 3.0, 4.0], rows, by_row(lambda key, figures: (key, dict(figures))))
    assert found[1.0] == (("a", {"x": 1.0, "y": 2.0}),)
    assert found[2.0] == (("a", {"x": 1.0, "y": 2.0}), ("b", {"x": 5.0}))
    assert found[3.0] == (("b", {"x": 5.0}),)
    assert found[4.0] == (("a", {"x": 1.0}), ("b", {"x": 6.0}))
    assert found[1.0][0] is found[2.0][0]


COLUMNS = st.builds(
    lambda times, target: column(*((moment, moment * 2.0) for moment in sorted(times)), target=target),
    st.sets(st.floats(0.0, 1000.0), min_size=1, max_size=20),
    st.sampled_from([PAGE, OTHER]),
)


def test_a_page_is_joined_exactly() -> None:
    """Of one page a field that is missing is missing, however near the last one was."""
    times, rows = side_by_side({"a": column((1, 10), (2, 20), (3, 30)), "b": column((1, 1), (3, 3))}, 90.0)
    assert ([1, 2, 3], [10, 20, 30], [1, None, 3]) == (list(times), list(rows["a"]), list(rows["b"]))


def test_another_page_is_joined_as_of_a_moment() -> None:
    """The newest sample that is not too old is joined; a future one never is."""
    lead = column((100, 1), (130, 2), (160, 3), (190, 4))
    times, rows = side_by_side({"a": lead, "b": column((125, 7), target=OTHER)}, 40.0)
    assert ([100, 130, 160, 190], [None, 7, 7, None]) == (list(times), list(rows["b"]))


def test_readings_far_from_the_leading_page_have_rows_of_their_own() -> None:
    """While one exporter was down the other was not."""
    times, rows = side_by_side({"a": column((100, 1), (130, 2), (160, 3)), "b": column((500, 7), target=OTHER)}, 90.0)
    assert ([100, 130, 160, 500], [1, 2, 3, None]) == (list(times), list(rows["a"]))
    assert [None, None, None, 7] == list(rows["b"])


@pytest.mark.parametrize(
    ("second", "expected", "twice"),
    [
        pytest.param([(4, 40), (5, 50)], [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)], 0, id="after it"),
        pytest.param([(0, 40)], [(0, 40), (1, 1), (2, 2), (3, 3)], 0, id="before it"),
        pytest.param([(1.5, 9), (2.5, 9)], [(1, 1), (2, 2), (3, 3)], 1, id="beside it"),
        pytest.param([(0, 9), (2, 9), (4, 9)], [(0, 9), (1, 1), (2, 2), (3, 3), (4, 9)], 1, id="on both sides"),
    ],
)
def test_a_second_column_fills_what_lies_outside(
    second: list[tuple[float, float]], expected: list[tuple[float, float]], twice: int
) -> None:
    """What says the same at the same time counts once, and is counted."""
    whole, repeated = in_turn([column((1, 1), (2, 2), (3, 3)), column(*second, target=OTHER)])
    assert (expected, twice) == (readings(whole), repeated)


def test_each_address_of_a_pod_that_moves_has_its_turn() -> None:
    """The address with the most samples comes first; what is between two of them counts as well."""
    lives = (column((1, 1), (2, 2), (3, 3)), column((7, 7), (8, 8)), column((5, 5), target=OTHER))
    whole, repeated = in_turn(lives)
    assert ([(1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (8, 8)], 0) == (readings(whole), repeated)
    assert {PAGE, OTHER} == whole.targets


@given(st.lists(COLUMNS, min_size=1, max_size=4))
def test_turns_ascend_and_invent_nothing(columns: list[Column]) -> None:
    """Joined columns have ascending times and only values that were in a sample."""
    whole, _ = in_turn(columns)
    assert sorted(set(whole.times)) == list(whole.times)
    assert set(readings(whole)) <= {reading for one in columns for reading in readings(one)}


@given(st.lists(COLUMNS, min_size=1, max_size=4), st.floats(0.0, 100.0))
def test_rows_are_near_their_readings(columns: list[Column], tolerance: float) -> None:
    """Every value in a row was sampled then or at most the tolerance before; the longest column loses no sample."""
    times, rows = side_by_side(dict(enumerate(columns)), tolerance)
    assert sorted(set(times)) == list(times)
    for values in rows.values():
        for moment, value in zip(times, values, strict=True):
            assert value is None or 0.0 <= moment - value / 2.0 <= tolerance or moment == value / 2.0
    assert set(max(columns, key=lambda one: len(one.times)).times) <= set(times)


@given(COLUMNS, st.floats(0.0, 2000.0), st.floats(0.0, 2000.0))
def test_impossible_readings_are_counted(whole: Column, least: float, most: float) -> None:
    """Values outside the limits are left out and counted."""
    kept, refused = whole.between(least, most)
    assert len(whole.times) == len(kept.times) + refused
    assert all(least <= value <= most for value in kept.values)


def test_series_of_one_scrape_are_combined_at_each_time() -> None:
    """A series that appears later counts from then on."""
    whole = combined([column((1.0, 5.0), (2.0, 6.0)), column((2.0, 4.0))], sum)
    assert readings(whole) == [(1.0, 5.0), (2.0, 10.0)]
