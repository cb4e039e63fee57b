"""Blocks per request from metrics alone: how each figure is calculated, and how many samples it needs."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_kv_waste import MetricsWaste, metrics_waste
from kvdiag.model import Facts, KvPool, Sample, Timeline
from tests.builders.values import engine, pool

KNOWN = Facts(pools=(pool(),), max_model_len_tokens=32768)

PROMPT_TOKENS = 160
GENERATED_TOKENS = 16


def page(
    count: int,
    *,
    blocks: int = 40,
    start: float = 0.0,
    tick: float = 15.0,
    prompt: int = PROMPT_TOKENS,
    generated: int = GENERATED_TOKENS,
    looked_up: int = PROMPT_TOKENS,
    pools: Sequence[KvPool] = (pool(),),
) -> list[Sample]:
    """Samples of which every second has one more request that uses `blocks` blocks; each counts one more prompt."""
    samples = []
    for number in range(count):
        running = number % 2
        engines = tuple(
            replace(
                engine(usage=blocks * running / one.usable_blocks, running=running, label=one.engine),
                prompt_tokens_total=prompt * number,
                generation_tokens_total=generated * number,
                prefix_queries_total=looked_up * number,
            )
            for one in pools
        )
        samples.append(Sample(at_seconds=start + tick * number, engines=engines))
    return samples


def waste(*samples: Sample, known: Facts = KNOWN) -> MetricsWaste | None:
    """What the page says of these."""
    return metrics_waste(Timeline(samples=samples), known, DEFAULT_LIMITS)


def test_a_request_holds_what_comes_and_goes_with_it() -> None:
    """40 blocks; 160 + 10 x 16 tokens need at most 20, and one more for the time between the samples."""
    actual = waste(*page(9))

    assert (
        MetricsWaste(
            blocks_per_request=40.0,
            expected_blocks=21,
            request_tokens=320,
            longest_prompt_tokens=160,
            prompts=8,
            changes=8,
            looked_up_ratio=1.0,
            windows_in_a_row=0,
        )
        == actual
    )
    assert 40.0 / 21.0 == actual.ratio


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (page(9), True),
        (page(8), False),  # seven changes
        (page(9, prompt=0), False),
        (page(9, tick=90.0), True),
        (page(9, tick=90.1), False),  # over a gap several requests may have come
    ],
)
def test_too_few_changes_or_prompts_tell_nothing(samples: Sequence[Sample], *, told: bool) -> None:
    """Eight of each, read within 90 s of one another."""
    assert told == (waste(*samples) is not None)


def test_prompts_are_as_many_as_the_longest_can_be() -> None:
    """One of 320 tokens among seven of 160 leaves four: too few."""
    samples = page(9)
    jump = [
        replace(
            each,
            engines=tuple(
                replace(one, prompt_tokens_total=(one.prompt_tokens_total or 0) + 160) for one in each.engines or ()
            ),
        )
        for each in samples[4:]
    ]

    assert waste(*samples[:4], *jump) is None
    assert waste(*samples) is not None


def test_no_request_is_longer_than_the_context() -> None:
    """Of 320 tokens a context of 200 leaves 200: 13 blocks and one."""
    short = Facts(pools=(pool(max_concurrency=None),), max_model_len_tokens=200)
    actual = waste(*page(9), known=short)
    assert actual is not None
    assert (200, 14) == (actual.request_tokens, actual.expected_blocks)
    unbounded = waste(*page(9), known=replace(short, max_model_len_tokens=None))
    assert unbounded is not None
    assert 320 == unbounded.request_tokens


def test_readings_without_requests_or_usage_tell_no_change() -> None:
    """Their tokens count all the same; as many running as before is none."""
    samples = page(13)

    def without(sample: Sample, **changes: object) -> Sample:
        return replace(sample, engines=tuple(replace(one, **changes) for one in sample.engines or ()))  # type: ignore[arg-type]

    samples[5], samples[9] = without(samples[5], kv_usage_ratio=None), without(samples[9], requests_running=None)
    again = replace(samples[12], at_seconds=190.0)

    actual = waste(*samples, again)

    # Of twelve changes four are not reported
    assert actual is not None
    assert (8, 12, 40.0) == (actual.changes, actual.prompts, actual.blocks_per_request)


def test_second_counter_is_set_against_the_first() -> None:
    """Half as many tokens looked up as came in prompts are 0.5; none may be, or be counted."""
    samples = page(9)
    uncounted = [
        replace(each, engines=tuple(replace(one, prefix_queries_total=None) for one in each.engines or ()))
        for each in samples
    ]
    found = [waste(*page(9, looked_up=80)), waste(*page(9, looked_up=0)), waste(*uncounted)]
    assert [0.5, 0.0, 0.0] == [None if one is None else one.looked_up_ratio for one in found]


def test_engine_with_most_waste_is_reported() -> None:
    """Of two engines the one whose pool has the larger blocks for a request."""
    both = Facts(pools=(pool("0"), pool("1", usable_blocks=3072)), max_model_len_tokens=32768)
    # The second one's request at the same share of its pool, twice as many blocks
    samples = [
        replace(one, engines=(*(one.engines or ()), replace((other.engines or ())[0], engine="1")))
        for one, other in zip(page(9), page(9, blocks=80), strict=True)
    ]

    # 80 of 6,144 are 40 of 3,072
    actual = waste(*samples, known=replace(both, pools=(pool("0"), pool("1"))))
    assert actual is not None
    assert 80.0 == actual.blocks_per_request
    assert waste(*samples, known=Facts()) is None


def test_windows_of_an_hour_in_a_row_count() -> None:
    """Hours that use four times the blocks needed are counted in a row; an hour below that resets the count."""
    # 84 blocks are 4 x 21; a window lasts an hour
    much, less = 84, 83

    def hours(*held: int) -> MetricsWaste | None:
        samples = [each for hour, blocks in enumerate(held) for each in page(9, blocks=blocks, start=3601.0 * hour)]
        return waste(*samples)

    rows = [
        None if found is None else found.windows_in_a_row for found in (hours(much), hours(much, much), hours(less))
    ]
    assert [1, 2, 0] == rows
    broken, longest = hours(much, much, less, much), hours(much, less, much, much, much)
    assert broken is not None
    assert longest is not None
    assert (2, 3) == (broken.windows_in_a_row, longest.windows_in_a_row)
