"""fragmentation.kv_waste without a load of our own: blocks that come and go with a request, against its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_kv_waste import judge
from kvdiag.model import Engine, Facts, Finding, KvPool, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.values import engine, pool
from tests.quality.corpus.tape import seeded

POOL = pool(max_concurrency=None)
RUNNING = (2, 3) * 40


def pages(
    running: Iterable[int] = RUNNING,
    *,
    blocks_each: float,
    resident_blocks: int = 0,
    prompt_tokens: int = 1_000,
    generated_tokens: int = 100,
    looked_up: float = 1.0,
    of: KvPool = POOL,
) -> list[Engine]:
    """Readings in each of which one more request was begun and ended, so many running at once."""
    return [
        replace(
            engine(
                usage=(resident_blocks + count * blocks_each) / of.usage_blocks,
                running=count,
                waiting=1,
                prompt_tokens=number * prompt_tokens,
                label=of.engine,
            ),
            generation_tokens_total=number * generated_tokens,
            prefix_queries_total=round(looked_up * number * prompt_tokens),
        )
        for number, count in enumerate(running)
    ]


def verdict(*readings: Engine, tick_seconds: float = 30.0, of: KvPool = POOL) -> Finding:
    """The rule's one finding on so many pages."""
    samples = tuple(Sample(at_seconds=number * tick_seconds, engines=(one,)) for number, one in enumerate(readings))
    (found,) = judge(Timeline(samples=samples), Facts(pools=(of,)), DEFAULT_LIMITS)
    return found


def test_requests_that_reserve_the_longest_context_are_a_fault() -> None:
    """Two thousand blocks for each request, where its tokens can be 2,000 at the most, are sixteen times its need."""
    # Prompts of 1,000 tokens and answers of 100 on the mean, so of 1,000 at the very most
    actual = verdict(*pages(blocks_each=2_000))

    # 2,000 tokens need 125 blocks of 16, and one for the rounding
    told = ANY_TEXT
    assert ("fault", told) == (actual.status, actual.summary)
    figures = {"max_blocks_needed": 126, "max_prompt_tokens": 1_000, "min_prompts": 79}
    assert figures.items() <= evidence(actual).items()


def test_figures_by_the_page_have_units_and_sources() -> None:
    """Blocks of a request to the hundredth, and what is read from the page apart from what is computed."""
    # Three requests that take 4,501 blocks together
    actual = verdict(*pages((1, 4) * 40, blocks_each=1_500 + 1 / 3))

    assert {
        "blocks_per_request": (1500.33, "blocks", "engine"),
        "max_blocks_needed": (126, "blocks", "computed"),
        "max_request_tokens": (2000, "tokens", "computed"),
        "max_prompt_tokens": (1000, "tokens", "engine"),
        "min_prompts": (79, "requests", "engine"),
        "concurrency_changes": (79, "samples", "engine"),
        "prefix_queries_to_prompt_tokens": (1.0, "ratio", "engine"),
    } == {one.name: (one.value, one.unit, one.source) for one in actual.evidence}


@pytest.mark.parametrize(
    ("blocks", "looked_up", "status"),
    [(2_000, 0.0, "suspect"), (2_000, 5.0, "suspect"), (600, 1.0, "suspect"), (400, 1.0, "unknown")],
    ids=["no second counter", "the second counter disagrees", "less than tenfold", "within the bound"],
)
def test_less_certain_waste_is_no_fault(blocks: int, looked_up: float, status: str) -> None:
    """A fault takes ten times the need and two counters that agree; what the bound still covers accuses nobody."""
    assert status == verdict(*pages(blocks_each=blocks, looked_up=looked_up)).status


@pytest.mark.parametrize(("hours", "status"), [(1, "suspect"), (2, "suspect"), (4, "fault")])
def test_less_than_tenfold_waste_of_every_hour_is_a_fault(hours: int, status: str) -> None:
    """One hour's prompts may be odd; five times the need in each of three hours is how the server holds requests."""
    # The same traffic, hour after hour
    running = list(RUNNING) * (hours * 120 // len(list(RUNNING)) + 1)

    assert status == verdict(*pages(running[: hours * 120], blocks_each=600)).status


def test_long_contexts_that_stay_are_not_waste() -> None:
    """A session of 90,000 tokens beside short requests holds most of the pool, and needs it."""
    # Such a session, and requests that hold what they need
    actual = verdict(*pages(blocks_each=70, resident_blocks=5_600))

    assert "unknown" == actual.status


@pytest.mark.parametrize(
    "readings",
    [
        pages([3] * 80, blocks_each=2_000),
        pages(RUNNING[:8], blocks_each=2_000),
        pages(blocks_each=2_000, prompt_tokens=0),
        [replace(one, kv_usage_ratio=None) for one in pages(blocks_each=2_000)],
        [replace(one, requests_running=None) for one in pages(blocks_each=2_000)],
    ],
    ids=["always as many", "too few readings", "no prompts", "usage not told", "requests not told"],
)
def test_pages_that_show_no_request_come_or_go_are_unknown(readings: list[Engine]) -> None:
    """Without changes, or without prompts, nothing is said of one request."""
    actual = verdict(*readings)
    assert "unknown" == actual.status


def test_readings_too_far_apart_are_unknown() -> None:
    """Between readings of five minutes too many requests come and go."""
    assert "unknown" == verdict(*pages(blocks_each=2_000), tick_seconds=300.0).status


def test_a_pool_whose_curve_is_not_known_is_unknown() -> None:
    """A model that takes blocks for states, too, is not measured by its tokens."""
    # A pool by whose own figures a longest request takes more blocks than full attention would
    hybrid = pool(max_concurrency=1.5)
    known = Facts(pools=(hybrid,), max_model_len_tokens=32_768)
    samples = tuple(
        Sample(at_seconds=30.0 * number, engines=(one,))
        for number, one in enumerate(pages(blocks_each=2_000, of=hybrid))
    )
    (actual,) = judge(Timeline(samples=samples), known, DEFAULT_LIMITS)

    assert "unknown" == actual.status


@given(seed=st.integers(), longest=st.integers(1, 20_000), most=st.integers(1, 2_000), at_once=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_requests_that_hold_what_they_need_are_never_accused(seed: int, longest: int, most: int, at_once: int) -> None:
    """However prompts and answers are spread, whole blocks of their tokens are no waste."""
    # A request that begins with each reading, and ends some readings later
    random = seeded(str(seed))
    prompts, answers = ([random.randint(1, top) for _ in range(60)] for top in (longest, most))
    lasting = [1 + (prompt + answer) % at_once for prompt, answer in zip(prompts, answers, strict=True)]
    ends = [number + length for number, length in enumerate(lasting)]
    readings = []
    for now in range(len(prompts)):
        resident = [one for one in range(now + 1) if ends[one] > now]
        held = sum(-(-(prompts[one] + answers[one]) // 16) for one in resident)
        readings.append(
            replace(
                engine(usage=min(held / 60_000, 1.0), running=len(resident), prompt_tokens=sum(prompts[: now + 1])),
                generation_tokens_total=sum(answers[: now + 1]),
                prefix_queries_total=sum(prompts[: now + 1]),
            )
        )

    large = pool(usable_blocks=60_000, max_concurrency=None)
    assert "unknown" == verdict(*readings, of=large).status
