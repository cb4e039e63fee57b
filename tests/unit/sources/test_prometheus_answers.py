"""What a Prometheus answers, decoded: samples as they are, nothing taken for them that is none."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_answers import History, Points, add_samples, decoded_answer

START, END = 1_000_000.0, 1_086_400.0
NAME = {"__name__": "up", "pod": "a"}
KEY = (("__name__", "up"), ("pod", "a"))


def matrix(*points: tuple[float | str, ...], **more: Any) -> dict[str, Any]:
    """An answer with one series."""
    result = [{"metric": NAME, "values": [list(point) for point in points]}]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}, **more}


POINTS = st.lists(
    st.tuples(st.floats(START, END), st.sampled_from(["1", "0.5", "NaN", "+Inf", "-Inf", "1e999"])), max_size=30
)


@given(POINTS, POINTS)
def test_points_ascend_and_are_finite(first: list[tuple[float, str]], second: list[tuple[float, str]]) -> None:
    """Of another answer before, twice or no number: what is kept ascends strictly and can be counted with."""
    # Answers with any points come one after the other
    history = History()
    for points in (first, second):
        add_samples(json.loads(json.dumps(matrix(*sorted(dict(points).items())))), START, END, history)
    kept = history.series.get(KEY, Points())
    assert sorted(set(kept.times)) == list(kept.times)
    assert all(value in (1.0, 0.5) for value in kept.values)
    assert len(kept) <= len(first) + len(second)


@pytest.mark.parametrize("is_compact", [True, False])
@pytest.mark.parametrize(
    ("some", "expected"),
    [
        pytest.param([[(START, "1"), (START + 60.0, "2"), (START + 30.0, "3")]], "time goes back", id="backwards"),
        pytest.param([[(START, "1")], [(START, "2")]], "two values at one time", id="two values"),
        pytest.param([[(START, "1"), (START, "2"), (START + 30.0, "3")]], "two values at one time", id="of one part"),
        pytest.param([[(START + 30.0, "2")], [(START, "1"), (START + 30.0, "2")]], [1.0, 2.0], id="two parts"),
        pytest.param([[(START, "1"), (START, "1"), (START + 30.0, "2")]], [1.0, 2.0], id="a sample twice"),
    ],
)
def test_a_series_has_one_value_at_a_time(
    some: list[list[tuple[float, str]]], expected: str | list[float], is_compact: bool
) -> None:
    """In the order of time, whether its samples stand in one place or in two."""
    whole = answer_with([("a", points) for points in some])
    answer = decoded_answer(json.dumps(whole, separators=(",", ":")).encode(), "x") if is_compact else whole
    assert answer is not None
    history = History()
    if isinstance(expected, str):
        with pytest.raises(Unreadable, match=expected):
            add_samples(answer, START, END, history)
    else:
        add_samples(answer, START, END, history)
        assert [expected] == [list(points.values) for points in history.series.values()]


LABEL_TEXTS = st.sampled_from(["a", '"values":[[1,"2"]]', '"]]', "\\", ',"', "\u00e9"])
COMPACT = st.lists(
    st.tuples(
        LABEL_TEXTS,
        st.lists(
            st.tuples(st.floats(START, END), st.sampled_from(["1", "0.25", "NaN", "+Inf", "x", "1_0", " 1", "true"])),
            max_size=9,
        ),
    ),
    max_size=5,
)


@given(COMPACT, st.booleans())
def test_written_without_spaces_an_answer_is_the_same(some: list[tuple[str, list[Any]]], ascii_only: bool) -> None:
    """Samples cut out of the text are those that JSON has, with any text in the labels; so are errors."""
    answer = answer_with(some)
    compact = json.dumps(answer, separators=(",", ":"), ensure_ascii=ascii_only)
    assert read_of(json.loads(compact)) == read_of(decoded_answer(compact.encode(), "x"))


MOMENTS = [START, START + 30.5, START + 60.0, START + 90.0]


@pytest.mark.parametrize("text", ["1", "0.25", "NaN", "+Inf", "x", "1_0", "true", "1,2", "", "1],[2"])
@pytest.mark.parametrize("moments", [MOMENTS, MOMENTS[:1], [*MOMENTS[:2], MOMENTS[3]], [*MOMENTS[:2], START + 61.0]])
def test_a_constant_series_is_read_as_any_other(text: str, moments: list[float]) -> None:
    """Whether another series of the answer has the same times or not."""
    varying = list(zip(MOMENTS, "1234", strict=True))
    answer = answer_with([("a", varying), ("b", [(moment, text) for moment in moments]), ("c", varying)])
    compact = json.dumps(answer, separators=(",", ":"))
    assert read_of(json.loads(compact)) == read_of(decoded_answer(compact.encode(), "x"))


def answer_with(some: list[tuple[str, list[Any]]]) -> dict[str, Any]:
    """An answer with these points by pod."""
    result = [
        {"metric": {"__name__": "up", "pod": text}, "values": [list(point) for point in points]}
        for text, points in some
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def read_of(answer: dict[str, Any] | None, start_seconds: float = START) -> object:
    """What is read of an answer, or the error."""
    if answer is None:
        return None
    history = History()
    try:
        count = add_samples(answer, start_seconds, END, history)
    except Unreadable as error:
        return str(error)
    series = history.series.items()
    return count, {key: (list(one.times), list(one.values), one.infinite_seconds) for key, one in series}


@pytest.mark.parametrize(
    "result",
    [
        '{"metric":{},"values":0}',
        '{"metric":{},"values":0},{"metric":{},"values":[[1,"2"]]}',
        '{"metric":{},"values":0,"more":{"values":[[1,"2"]]}}',
        '{"metric":{},"values":NaN},{"metric":{"pod":"b"},"more":{"values":[[1,"2"]]}}',
        '{"metric":{},"values":-Infinity,"values":[[1,"2"]]}',
        '{"metric":{},"values":[[1,"2"]],"values":[[3,"4"]]}',
        '{"metric":{},"values":[[1,"2"]],"values":0}',
        '{"metric":{"values":[[1,"2"]]}}',
        '{"metric":{"values":[[1,"2"]]},"values":0.0}',
        '{"metric":{},"values":[[1,"2"],[3,"4",5,"6"]]}',
        '{"metric":{},"values":[[1,"2"]',
        '{"metric":{},"values":[[1,2,"3"],["4"]]}',
        '{"metric":{},"values":[[1,"2"],[],[3,"4"]]}',
        '{"metric":{},"values":[[1,"1,2"],[3,""]]}',
        '{"metric":{},"values":[[1,"true"]]}',
        '{"metric":{},"values":[[,""]]}',
        '{"metric":{},"values":[[997,998,"1,2"]]}',
        '{"metric":{},"values":[[1,],[2,"3""4"]]}',
        '[{"values":[[1,"2"]]}]',
        *(f'{{"metric":{{}},"values":[[{time},"2"]]}}' for time in ("1_0", "01", "+1", "1.", "Inf", "1e2", "NaN")),
    ],
)
def test_an_answer_is_read_as_its_json_however_it_is_written(result: str) -> None:
    """Nothing is taken for a series' samples that is not, and no time for a number that JSON has not."""
    body = f'{{"data":{{"resultType":"matrix","result":[{result}]}}}}'
    try:
        expected = json.loads(body)
    except ValueError:
        expected = None
    assert read_of(expected, 0.0) == read_of(decoded_answer(body.encode(), "x"), 0.0)


@pytest.mark.parametrize("text", ["1_0", " 1", "1 ", "\u0661", "infinity", "true", "0x1", "", ".5", "1e"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_value_is_a_number_as_servers_write_it(text: str, separators: tuple[str, str]) -> None:
    """Python reads more as a number than a Prometheus ever writes."""
    body = json.dumps(matrix((START, "1"), (START + 30.0, text)), separators=separators).encode()
    with pytest.raises(Unreadable):
        add_samples(decoded_answer(body, "x") or {}, START, END, History())


@pytest.mark.parametrize("moment", [START - 60.0, END + 60.0, float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_times_outside_the_interval_are_refused_wherever_they_stand(moment: float, place: int) -> None:
    """A time that no clock reaches could not be kept in a file."""
    points = [(START, "1"), (START + 30.0, "2")]
    points.insert(place, (moment, "3"))
    body = json.dumps(matrix(*points), separators=(",", ":")).replace("Infinity", "1e999").encode()
    with pytest.raises(Unreadable, match=r"outside|goes back"):
        add_samples(decoded_answer(body, "x") or {}, START, END, History())


def test_series_of_one_scrape_share_their_times() -> None:
    """A later answer replaces them and leaves the other series' as they were."""
    answer = matrix((START, "1"), (START + 30.0, "2"))
    result = answer["data"]["result"]
    result.append({**result[0], "metric": {**NAME, "pod": "b"}})
    history = History()
    add_samples(decoded_answer(json.dumps(answer, separators=(",", ":")).encode(), "x") or {}, START, END, history)
    first, second = history.series.values()
    assert first.times is second.times
    first.add(array("d", [START + 60.0]), array("d", [3.0]))
    assert (3, 2) == (len(first), len(second))
