from dataclasses import replace
from functools import partial

from kvdiag.diagnosis.steps import LONG_CONTEXT
from kvdiag.model import Engine, Load, MeasuredFigures, StepFigures, StepResult, Timeline
from tests.builders.answers import ANY_TEXT
from tests.builders.runs import run, step_result
from tests.builders.values import MIB, pool
from tests.builders.worlds import World

result = partial(step_result, LONG_CONTEXT)


def test_growth_along_a_line_is_ok() -> None:
    """One request of 16,496 tokens ends with the 1,031 blocks that it needs, and never held more on the way."""
    actual = result(World())
    same = {"requests": 1, "tokens": 16_496, "blocks": 1_031, "bytes": 1_031 * 2 * MIB}

    assert actual == StepResult(
        id="long_context",
        status="ok",
        summary=ANY_TEXT,
        expected=StepFigures(**same, highest_blocks=1_032),
        measured=MeasuredFigures(**same, highest_blocks=1_031, filled_ratio=1.0, samples_of_whole_load=8),
    )


def test_the_last_chunk_of_a_prompt_is_no_excess_of_a_window() -> None:
    """A window's blocks are judged once tokens are generated: until then the prompt's last chunk is in use, too."""
    # A window of 1,024 tokens, and a sample right after the first token that shows 128 blocks more
    world = World(pools=(pool(sliding_window_tokens=1024),))
    whole = run(world)
    span = whole.spans("long_context")[-1]
    first = next(
        index
        for index, one in enumerate(whole.samples)
        if one.at_seconds > (span.offer_seconds or 0.0) and one.load is not None and one.load.resident_tokens
    )
    page, prompt = whole.samples[first], Load(requests=1, resident_tokens=(16_384,))
    full = tuple(replace(one, kv_usage_ratio=(65 + 128) / 6144) for one in page.engines or ())
    samples = list(whole.samples)
    samples[first] = replace(page, engines=full, load=prompt, load_before=prompt)

    actual = result(world, Timeline(samples=tuple(samples), marks=whole.marks))

    assert ("ok", result(world).summary) == (actual.status, actual.summary)


def overshooting(world: World) -> Timeline:
    """A run whose long request held 1,500 blocks for a moment of its prefill."""
    whole = run(world)
    (offer,) = [mark.at_seconds for mark in whole.marks if (mark.step, mark.phase) == ("long_context", "offer")]
    index = next(
        number for number, one in enumerate(whole.samples) if one.at_seconds > offer and one.engines is not None
    )
    sample = whole.samples[index]

    def held(engine: Engine) -> Engine:
        return replace(engine, kv_usage_ratio=1500 / 6144)

    page = tuple(held(engine) for engine in sample.engines or ())
    samples = (*whole.samples[:index], replace(sample, engines=page), *whole.samples[index + 1 :])
    return Timeline(samples=samples, marks=whole.marks)


def test_an_overshoot_on_the_way_is_suspect() -> None:
    """A prefill that held a duplicate for a moment is a suspect, although the end is right."""
    # A request that held 1,500 blocks on the way to 1,031
    actual = result(World(), overshooting(World()))
    assert ("suspect", 1_500) == (actual.status, actual.measured.highest_blocks)


def test_windowed_layers_are_judged_at_their_end_alone() -> None:
    """A prefill chunk stands on top of the window for a moment, which is no overshoot."""
    world = World(pools=(pool(sliding_window_tokens=1024),))
    actual = result(world, overshooting(world))
    assert "ok" == actual.status
    assert "linear" not in actual.summary


def test_a_request_that_was_offered_again_is_judged_where_it_was_observed() -> None:
    """The first request fell between two samples: the second one counts, with its peak."""
    actual = result(World(again=("long_context",)))
    assert ("ok", 1_031) == (actual.status, actual.measured.highest_blocks)
