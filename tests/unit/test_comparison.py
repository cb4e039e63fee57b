"""One run against another, figure by figure: what is worse, what cannot be compared, what is no difference."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.baseline_comparison import (
    Baseline,
    Figure,
    Setting,
    baseline_of,
    changed_settings,
    compare,
    document,
    parse,
)
from kvdiag.diagnosis import diagnose
from kvdiag.model import MeasuredFigures, StepResult, Timeline
from kvdiag.outputs.terminal.comparison_text import render
from tests.builders.runs import run
from tests.builders.values import GIB, MIB, holding, pool, seen
from tests.builders.worlds import WORLDS, facts
from tests.unit.outputs.texts import piped


def of(world: str) -> Baseline:
    """The baseline of a run in one of the tests' worlds."""
    timeline, known = run(WORLDS[world]), facts(WORLDS[world])
    return baseline_of(timeline, diagnose(timeline, known))


HEALTHY = of("healthy")


def outcomes(before: Baseline, after: Baseline) -> dict[str, str]:
    """How each figure has changed."""
    return {one.name: one.outcome for one in compare(before, after)}


def changed(name: str, value: float) -> Baseline:
    """The healthy one with another figure."""
    figures = tuple(replace(one, value=value) if one.name == name else one for one in HEALTHY.figures)
    return replace(HEALTHY, figures=figures)


def value(name: str) -> float:
    """A figure of the healthy one."""
    return next(one.value for one in HEALTHY.figures if one.name == name)


def test_a_run_is_what_it_was() -> None:
    """Held against itself nothing has changed, and all that matters is there."""
    found = outcomes(HEALTHY, HEALTHY)
    assert {"same"} == set(found.values())
    expected = {
        "idle.device_used",
        "idle.weights",
        "pool.capacity_tokens",
        "single_request.blocks_kept",
        "concurrent.blocks_per_1000",
        "long_context.blocks_per_1000",
    }
    assert expected <= set(found)


@pytest.mark.parametrize(
    ("name", "factor", "outcome"),
    [
        ("idle.device_used", 1.05, "worse"),
        ("idle.device_used", 0.95, "better"),
        ("idle.device_used", 1.019, "same"),
        ("pool.capacity_tokens", 0.95, "worse"),
        ("pool.capacity_tokens", 1.05, "better"),
        ("concurrent.blocks_per_1000", 1.05, "worse"),
        ("concurrent.blocks_per_1000", 0.95, "better"),
    ],
)
def test_worse_is_more_memory_or_less_room(name: str, factor: float, outcome: str) -> None:
    """By more than 2 %, each figure in its own direction."""
    assert outcome == outcomes(HEALTHY, changed(name, value(name) * factor))[name]


def test_some_bytes_are_no_difference() -> None:
    """A small part may double and still be small."""
    small = Figure(name="idle.unaccounted", unit="bytes", value=4.0 * MIB, worse="higher")
    before = replace(HEALTHY, figures=(small,))
    for size, outcome in ((30 * MIB, "same"), (GIB, "worse")):
        after = replace(before, figures=(replace(small, value=float(size)),))
        assert {small.name: outcome} == outcomes(before, after)


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        pytest.param((5, 514), (5, 575), "same", id="the last block is filled further"),
        pytest.param((5, 575), (5, 514), "same", id="and less far"),
        pytest.param((5, 512), (6, 512), "same", id="one block more"),
        pytest.param((5, 512), (8, 512), "worse", id="three"),
        pytest.param((8, 512), (5, 512), "better", id="three less"),
        pytest.param((1_311, 20_892), (1_322, 20_892), "same", id="less than 2 %"),
        pytest.param((1_311, 20_892), (1_345, 20_892), "worse", id="more, of many blocks"),
    ],
)
def test_where_a_request_ends_in_its_last_block_is_no_difference(
    before: tuple[int, int], after: tuple[int, int], outcome: str
) -> None:
    """Blocks are whole: a request's cost in them depends on its tokens, which differ from run to run of one server."""

    def baseline(blocks: int, tokens: int) -> Baseline:
        step = StepResult(
            id="single_request",
            status="ok",
            summary="",
            measured=MeasuredFigures(blocks=blocks, bytes=blocks * 32_768, tokens=tokens),
        )
        told = diagnose(Timeline(samples=()), facts(WORLDS["healthy"]))
        return baseline_of(Timeline(samples=()), replace(told, steps=(step,)))

    # one is held against the other
    actual = outcomes(baseline(*before), baseline(*after))
    names = ("single_request.blocks_per_1000", "single_request.bytes_per_token")
    assert [outcome] * 2 == [actual[name] for name in names]


def test_one_kept_block_is_worse() -> None:
    """From none to one there is no share, and no tolerance."""
    assert "worse" == outcomes(HEALTHY, changed("single_request.blocks_kept", 1.0))["single_request.blocks_kept"]


def test_what_is_not_there_is_not_the_same() -> None:
    """A figure that is missing on one side is reported as missing, with the direction of the change."""
    less = replace(HEALTHY, figures=HEALTHY.figures[1:])
    name = HEALTHY.figures[0].name
    assert "missing" == outcomes(HEALTHY, less)[name]
    assert "new" == outcomes(less, HEALTHY)[name]


def test_a_verdict_that_comes_is_worse_and_one_that_goes_is_better() -> None:
    """Verdicts count like figures."""
    leaks = replace(HEALTHY, verdicts=("leak.kv_blocks",))
    assert "worse" == outcomes(HEALTHY, leaks)["leak.kv_blocks"]
    assert "better" == outcomes(leaks, HEALTHY)["leak.kv_blocks"]
    assert "same" == outcomes(leaks, leaks)["leak.kv_blocks"]
    assert compare(leaks, HEALTHY)[-1].ratio is None


def test_without_steps_there_is_no_baseline() -> None:
    """Hours of watching have no steps to compare."""
    timeline = seen(*[holding(0)] * 3)
    with pytest.raises(ValueError, match="no test step"):
        baseline_of(timeline, diagnose(timeline, replace(facts(WORLDS["healthy"]), pools=(pool(),))))
    with pytest.raises(ValueError, match="no test step"):
        baseline_of(Timeline(samples=()), diagnose(Timeline(samples=()), facts(WORLDS["healthy"])))


def test_what_is_kept_is_what_is_read() -> None:
    """There and back."""
    assert HEALTHY == parse(document(HEALTHY))


@pytest.mark.parametrize(
    "spoilt",
    [
        None,
        [],
        {},
        {"kvdiag_baseline": 2},
        {"kvdiag_baseline": 1, "figures": {}, "verdicts": []},
        {"kvdiag_baseline": 1, "figures": [], "verdicts": [], "engine": 3},
        {"kvdiag_baseline": 1, "figures": [3], "verdicts": []},
        {
            "kvdiag_baseline": 1,
            "figures": [{"name": "a", "unit": "b", "value": True, "worse": "higher"}],
            "verdicts": [],
        },
        {"kvdiag_baseline": 1, "figures": [{"name": "a", "unit": "b", "value": 1.0, "worse": "up"}], "verdicts": []},
        *(
            {
                "kvdiag_baseline": 1,
                "figures": [{"name": "a", "unit": "b", "value": value, "worse": "lower"}],
                "verdicts": [],
            }
            for value in (10**400, -(10**400), float("inf"), float("nan"))
        ),
        {
            "kvdiag_baseline": 1,
            "figures": [{"name": "a", "unit": "b", "value": 1.0, "worse": "lower", "grain": "1"}],
            "verdicts": [],
        },
        {"kvdiag_baseline": 1, "figures": [{"unit": "b", "value": 1.0, "worse": "lower"}], "verdicts": []},
        {"kvdiag_baseline": 1, "figures": [], "verdicts": ["x"] * 1000},
        {"kvdiag_baseline": 1, "figures": [], "verdicts": ["x" * 5000]},
    ],
)
def test_what_is_no_baseline_is_refused(spoilt: object) -> None:
    """It comes from outside."""
    with pytest.raises(ValueError, match=r"\S"):
        parse(spoilt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(document(HEALTHY))), inner),
    max_leaves=8,
)


@given(JSON)
def test_nothing_else_than_value_error(spoilt: object) -> None:
    """Any file content is parsed as a baseline, or refused with a ValueError."""
    value = {"kvdiag_baseline": 1, **spoilt} if isinstance(spoilt, dict) else spoilt
    try:
        read: Baseline | None = parse(value)
    except ValueError:
        read = None
    assert read is None or read == parse(document(read))


def test_changed_settings_stand_before_the_figures() -> None:
    """Changed settings explain the figures that changed; a setting of only one side is reported too."""
    old, new = (
        replace(HEALTHY, settings=(Setting(name="cache_dtype", value=dtype), *more))
        for dtype, more in (("auto", ()), ("fp8", (Setting(name="kv_connector", value="Nixl"),)))
    )
    assert (("cache_dtype", "auto", "fp8"), ("kv_connector", None, "Nixl")) == changed_settings(old, new)
    text = piped(render(old, new, compare(old, new)))
    assert 0 < text.index("fp8") < text.index("pool.capacity_tokens")
    assert () == changed_settings(old, old) == changed_settings(replace(old, settings=()), new)
    assert "block_tokens" in {one.name for one in HEALTHY.settings}
