"""What will be offered to a server: each step cut to what the server admits, and it says so."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis.steps import STEPS
from kvdiag.engines.sglang.metrics import capabilities
from kvdiag.feeds.active.load_generator import Speed
from kvdiag.feeds.active.step_plan import (
    CYCLES_SECONDS,
    MAX_OUTPUT_TOKENS,
    MIN_CYCLES,
    MIN_OUTPUT_TOKENS,
    PlannedStep,
    expected_seconds,
    fits_together,
    plan,
    repeated,
)
from kvdiag.model import Capabilities, Facts, KvPool, Workload
from tests.builders.answers import containing

ROOMY = Facts(max_model_len_tokens=131072)
BY_ID = {step.id: step for step in STEPS}


def pool(blocks: int, *, block_tokens: int = 16, engine: str = "0", window: int | None = None) -> KvPool:
    """A pool with so many usable blocks."""
    return KvPool(
        engine=engine,
        block_tokens=block_tokens,
        total_blocks=blocks + 1,
        usable_blocks=blocks,
        usage_blocks=blocks,
        sliding_window_tokens=window,
    )


def planned(step: str, facts: Facts, speed: Speed | None = None) -> PlannedStep:
    """One step as it is planned."""
    (found,) = [one for one in plan(STEPS, facts, speed) if one.step.id == step]
    return found


@pytest.mark.parametrize("facts", [ROOMY, Facts(), Facts(pools=(pool(100_000),))], ids=["long", "untold", "large"])
def test_server_with_room_gets_the_steps_as_they_are_defined(facts: Facts) -> None:
    """Where everything fits, or nothing is known of the limits, nothing is changed and nothing is noted."""
    actual = plan(STEPS, facts)
    assert tuple(PlannedStep(step=step, workload=step.workload, cycles=step.cycles) for step in STEPS) == actual


def test_short_context_cuts_the_prompts() -> None:
    """A server of 2,048 tokens gets prompts that leave room for their outputs; what fits stays as it is."""
    actual = plan(STEPS, Facts(max_model_len_tokens=2048))
    expected = [
        (BY_ID["baseline"].workload, ()),
        (BY_ID["single_request"].workload, ()),
        (replace(BY_ID["concurrent"].workload, prompt_tokens=1792), (containing("2,048 tokens", "to 1,792:"),)),
        (
            replace(BY_ID["long_context"].workload, prompt_tokens=1920),
            (containing("16,384 tokens", "to 1,920:", "2,048 tokens"),),
        ),
    ]
    assert expected == [(one.workload, one.notes) for one in actual]


def test_small_pool_cuts_the_prompts() -> None:
    """No request is offered that is longer than the smallest engine's pool."""
    facts = Facts(max_model_len_tokens=32768, pools=(pool(1000), pool(400, engine="1")))
    actual = planned("long_context", facts)
    assert Workload(requests=1, prompt_tokens=6272, max_tokens=128, hold_seconds=1.5) == actual.workload
    assert (containing("prompt of 16,384", "to 6,272:", "6,400 tokens"),) == actual.notes


def test_a_request_that_would_never_be_admitted_is_not_sent() -> None:
    """SGLang admits a request only with a page to spare: one of the whole pool stays in the queue."""
    facts = Facts(max_model_len_tokens=32_768, pools=(pool(256, block_tokens=64),), capabilities=capabilities({}))
    actual = planned("long_context", facts)
    assert 255 * 64 == actual.workload.prompt_tokens + actual.workload.max_tokens
    assert (containing("prompt of 16,384", "16,320 tokens"),) == actual.notes


def test_pool_of_windowed_layers_does_not_cut() -> None:
    """Where every layer slides a pool holds longer requests than it has tokens."""
    facts = Facts(max_model_len_tokens=32768, pools=(pool(400, window=4096),))
    actual = planned("long_context", facts)
    assert (BY_ID["long_context"].workload, ()) == (actual.workload, actual.notes)


def test_shorter_output_alone_is_said_too() -> None:
    """Where only the output has to be cut the note says that, and not that the prompt was."""
    # A fast server, which gets outputs of 500 tokens, and admits 800
    speed = Speed(first_token_seconds=0.01, tokens_per_second=1000.0)
    actual = planned("single_request", Facts(max_model_len_tokens=800), speed)
    assert Workload(requests=1, prompt_tokens=512, max_tokens=200, hold_seconds=0.5) == actual.workload
    assert (containing("output of 500", "to 200:", "800 tokens"),) == actual.notes


@given(
    longest=st.integers(2, 200_000),
    blocks=st.integers(1, 20_000),
    block_tokens=st.sampled_from([8, 16, 128, 1056]),
    speed=st.none() | st.builds(Speed, first_token_seconds=st.floats(0, 60), tokens_per_second=st.floats(0.1, 5000)),
)
def test_nothing_is_offered_that_does_not_fit(
    longest: int, blocks: int, block_tokens: int, speed: Speed | None
) -> None:
    """Every request fits the server's longest and its pool, asks for something, and a cut one is noted."""
    facts = Facts(max_model_len_tokens=longest, pools=(pool(blocks, block_tokens=block_tokens),))
    limit = min(longest, blocks * block_tokens)
    steps = plan(STEPS, facts, speed)
    for one in steps[1:]:
        load, defined = one.workload, one.step.workload
        assert load.prompt_tokens + load.max_tokens <= limit
        assert load.prompt_tokens >= 1
        assert load.max_tokens >= 1
        assert load.prompt_tokens <= defined.prompt_tokens
        assert (load.requests, load.hold_seconds) == (defined.requests, defined.hold_seconds)
        assert (load.prompt_tokens < defined.prompt_tokens) <= any("prompt of" in note for note in one.notes)
        assert 1 <= one.cycles <= one.step.cycles


@pytest.mark.parametrize(
    ("tokens_per_second", "step", "tokens"),
    [
        pytest.param(100.0, "single_request", MIN_OUTPUT_TOKENS, id="alone, slow: the least"),
        pytest.param(300.0, "single_request", 150, id="alone: half a second"),
        pytest.param(5000.0, "single_request", MAX_OUTPUT_TOKENS, id="alone, fast: the most"),
        pytest.param(200.0, "concurrent", 200, id="ten at once: two seconds"),
        pytest.param(100.0, "long_context", 150, id="a long one: a second and a half"),
    ],
)
def test_outputs_hold_the_load(tokens_per_second: float, step: str, tokens: int) -> None:
    """Outputs are as long as it takes this server to hold the step's requests together for its hold."""
    actual = planned(step, ROOMY, Speed(first_token_seconds=0.1, tokens_per_second=tokens_per_second))
    assert tokens == actual.workload.max_tokens


@pytest.mark.parametrize(
    ("first_token_seconds", "cycles", "notes"),
    [
        pytest.param(0.1, 8, (), id="quick"),
        pytest.param(2.0, 7, (containing("7 cycles instead of 8"),), id="slow"),
        pytest.param(30.0, MIN_CYCLES, (containing("6 cycles instead of 8"),), id="very slow"),
    ],
)
def test_slow_server_gets_fewer_cycles(first_token_seconds: float, cycles: int, notes: tuple[str, ...]) -> None:
    """The cycles of a step fit into their time together, but for those without which nothing can be judged."""
    speed = Speed(first_token_seconds=first_token_seconds, tokens_per_second=400.0)
    actual = planned("single_request", ROOMY, speed)
    assert (cycles, notes) == (actual.cycles, actual.notes)
    assert 25.0 == CYCLES_SECONDS


def test_single_cycle_is_always_offered() -> None:
    """Steps of one cycle are offered once, however slow the server."""
    actual = plan(STEPS, ROOMY, Speed(first_token_seconds=60.0, tokens_per_second=0.1))
    assert [1, MIN_CYCLES, 1, 1] == [one.cycles for one in actual]


@pytest.mark.parametrize(
    ("slot_tokens", "prompt_speed", "expected"),
    [
        pytest.param(8192, 1e6, (4, 8192 - 128), id="four slots"),
        pytest.param(32_768, 1e6, (1, 32_768 - 128), id="one pool for all"),
        pytest.param(20_000, 1e6, (2, 16_384 - 128), id="slots that may use two thirds of it each"),
        pytest.param(32_768, 1000.0, (1, 30_000), id="no longer than 30 s"),
        pytest.param(32_768, 300.0, (1, 16_384), id="no shorter than the step"),
        pytest.param(32_768, 100.0, (1, 6_000), id="unless that takes more than a minute"),
    ],
)
def test_a_pool_that_hides_lost_cells_is_filled(
    slot_tokens: int, prompt_speed: float, expected: tuple[int, int]
) -> None:
    """The fourth step sends the longest requests that the pool can hold at once, as far as time allows."""
    cells = pool(32_768, block_tokens=1)
    can = Capabilities(returns=False, waits=False)
    facts = Facts(max_model_len_tokens=slot_tokens, pools=(cells,), capabilities=can)
    speed = Speed(first_token_seconds=0.01, tokens_per_second=85.0, prompt_tokens_per_second=prompt_speed)
    filling = planned("long_context", facts, speed)
    assert expected == (filling.workload.requests, filling.workload.prompt_tokens)
    assert filling.notes


@pytest.mark.parametrize(
    ("capabilities", "seconds"),
    [
        pytest.param(Capabilities(), 60.0, id="current figures"),
        pytest.param(Capabilities(late_seconds=11.0, renewed_seconds=10.0), 216.0, id="renewed every ten seconds"),
        pytest.param(Capabilities(late_seconds=31.0), 246.0, id="half a minute late while idle"),
    ],
)
def test_late_figures_make_a_run_longer(capabilities: Capabilities, seconds: float) -> None:
    """Each load lasts until its figures are renewed, and the idle time after it until they have caught up."""
    assert seconds == expected_seconds(capabilities)


@pytest.mark.parametrize(
    ("waited", "prompt", "output"), [(True, 378, 125), (False, 2048, 768)], ids=["waited", "too short"]
)
def test_a_load_for_which_the_pool_is_too_small_is_cut_to_what_it_holds(waited: bool, prompt: int, output: int) -> None:
    """Ten requests that waited for room are repeated with the tokens of a tenth of the pool each, a block less."""
    facts = Facts(max_model_len_tokens=131072, pools=(pool(5040, block_tokens=1),))
    first = planned("concurrent", facts)
    again = repeated(first, facts, waited=waited)
    assert (prompt, output) == (again.workload.prompt_tokens, again.workload.max_tokens)
    assert again.workload.requests == first.workload.requests
    assert fits_together(again.workload, facts) is waited


def test_a_load_that_fits_is_not_made_one_that_does_not() -> None:
    """Outputs are held longer only as far as the pool holds all requests together."""
    facts = Facts(max_model_len_tokens=131072, pools=(pool(25_010, block_tokens=1),))
    again = repeated(planned("concurrent", facts), facts, waited=False)
    assert again.workload.max_tokens > BY_ID["concurrent"].workload.max_tokens
    assert fits_together(again.workload, facts)


def test_where_outputs_cannot_be_longer_prompts_are_shorter() -> None:
    """A fast server with a small pool: the same tokens, of which more are generated, are held for longer."""
    small = replace(pool(4096, block_tokens=1), max_requests=4)
    facts = Facts(max_model_len_tokens=4096, pools=(small,), capabilities=Capabilities(waits=False))
    first = planned("concurrent", facts)
    again = repeated(first, facts, waited=False)
    assert (768, 256) == (first.workload.prompt_tokens, first.workload.max_tokens)
    assert (256, 768) == (again.workload.prompt_tokens, again.workload.max_tokens)
    assert again == replace(repeated(again, facts, waited=False), notes=again.notes)


def test_no_more_requests_are_sent_than_one_engine_runs_at_once() -> None:
    """A load goes to one of several engines: those beyond its limit would wait, and never run together."""
    pools = tuple(replace(pool(100_000, engine=name), max_requests=3) for name in "01")
    actual = planned("concurrent", Facts(max_model_len_tokens=131072, pools=pools))
    assert (actual.workload.requests, len(actual.notes)) == (3, 1)


def test_of_several_repetitions_one_is_noted() -> None:
    """A step that is repeated twice says how the last attempt was made, and what held for all of them."""
    first = replace(planned("concurrent", ROOMY), notes=("cut",))
    twice = repeated(repeated(first, ROOMY, waited=False), ROOMY, waited=False)
    assert 9 * first.workload.max_tokens == twice.workload.max_tokens
    assert ["cut", containing(f"{twice.workload.max_tokens:,} output tokens")] == list(twice.notes)


@pytest.mark.parametrize(("speed", "prompt"), [(100.0, 6000), (1000.0, 16384)])
def test_prompts_are_no_longer_than_the_server_computes_in_time(speed: float, prompt: int) -> None:
    """A request without a token in a minute counts as failed, so that a slow server gets shorter ones."""
    measured = Speed(first_token_seconds=1.0, tokens_per_second=100.0, prompt_tokens_per_second=speed)
    actual = planned("long_context", ROOMY, measured)
    assert (prompt, prompt < 16384) == (actual.workload.prompt_tokens, bool(actual.notes))


@pytest.mark.parametrize(
    ("longest", "first_seconds", "then_seconds"),
    [(256, 64 / 300 / 20, 64 / 300 / 20), (131_072, None, 0.02)],
    ids=["64 tokens", "held for 2 s"],
)
def test_a_load_that_ends_before_a_few_samples_is_read_more_often(
    longest: int, first_seconds: float | None, then_seconds: float
) -> None:
    """Slots of 256 tokens at 300 tokens a second, at a twentieth of their 0.2 s; and every load that is repeated."""
    facts = Facts(max_model_len_tokens=longest)
    first = planned("concurrent", facts, Speed(first_token_seconds=0.01, tokens_per_second=300.0))
    assert first.read_seconds == pytest.approx(first_seconds)
    assert repeated(first, facts, waited=False).read_seconds == pytest.approx(then_seconds)
