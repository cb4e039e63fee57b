"""capacity.concurrency: the work that is done while requests wait, against that while none does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import evidence
from tests.builders.values import engine
from tests.unit.diagnosis.rules.test_capacity_concurrency import FINE, HUNDRED, QUEUE, verdict

MINUTES = [FINE] * 11, [QUEUE] * 11
"""Ten minutes without a queue, and ten with one."""

SHARE = "throughput_ratio_while_waiting"


def worked(
    *stretches: tuple[Sequence[Engine], int, int], every_seconds: float = 60.0, beside: tuple[Engine, ...] = ()
) -> Finding:
    """The finding on samples that add these prompt and generated tokens each, next to other engines."""
    samples: list[Sample] = []
    prompt = generated = 0
    for pages, prompt_tokens, generated_tokens in stretches:
        for page in pages:
            prompt, generated = prompt + prompt_tokens, generated + generated_tokens
            one = replace(page, prompt_tokens_total=prompt, generation_tokens_total=generated)
            samples.append(Sample(at_seconds=every_seconds * len(samples), engines=(one, *beside)))
    pools = tuple(replace(HUNDRED.pools[0], engine=str(place)) for place in range(1 + len(beside)))
    return verdict(Timeline(samples=tuple(samples)), Facts(pools=pools))


@pytest.mark.parametrize(
    ("tokens", "beside", "status"),
    [
        pytest.param(500, (), "suspect", id="half"),
        pytest.param(499, (), "fault", id="less than half"),
        pytest.param(100, (), "fault", id="a tenth"),
        pytest.param(200, (engine(label="1"),), "fault", id="beside an idle engine"),
    ],
)
def test_less_than_half_of_the_work_is_a_collapse(tokens: int, beside: tuple[Engine, ...], status: str) -> None:
    """1,000 tokens a minute, and then so many behind a queue: exactly half of it is a long queue."""
    actual = worked((MINUTES[0], 0, 1_000), (MINUTES[1], 0, tokens), beside=beside)
    assert status == actual.status
    assert pytest.approx(tokens / 1_000) == evidence(actual)[SHARE]


@pytest.mark.parametrize(
    ("fine", "queue", "tokens", "every_seconds", "expected"),
    [
        pytest.param(11, 11, (600, 400), 60.0, 0.4, id="ten minutes each"),
        pytest.param(11, 10, (600, 400), 60.0, None, id="queue of nine"),
        pytest.param(10, 11, (600, 400), 60.0, None, id="nine without"),
        pytest.param(11, 11, (0, 0), 60.0, None, id="no work"),
        pytest.param(11, 11, (600, 400), 90.0, 0.4, id="90 s apart"),
        pytest.param(11, 11, (600, 400), 90.1, None, id="further apart"),
    ],
)
def test_work_is_compared_over_ten_minutes_of_either(
    fine: int, queue: int, tokens: tuple[int, int], every_seconds: float, expected: float | None
) -> None:
    """Prompt and generated tokens together, whichever comes first; pages more than 90 s apart do not count."""
    stretches = (MINUTES[0][:fine], *tokens), (MINUTES[1][:queue], 300, 100)
    for order in (stretches, stretches[::-1]):
        actual = evidence(worked(*order, every_seconds=every_seconds))[SHARE]
        assert actual is None if expected is None else pytest.approx(expected) == actual


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([replace(FINE, requests_waiting=2)] * 5, id="a queue with room"),
        pytest.param([replace(FINE, requests_running=0, kv_usage_ratio=0.0)] * 5, id="idle"),
        pytest.param([QUEUE, FINE, QUEUE, replace(FINE, requests_waiting=2)], id="changes from one to the other"),
    ],
)
def test_minutes_that_are_neither_are_left_out(between: list[Engine]) -> None:
    """Tokens of other pages between ten minutes of either kind are not compared."""
    actual = worked((MINUTES[0], 500, 500), (between, 9_000, 9_000), (MINUTES[1], 100, 100))
    assert pytest.approx(0.2) == evidence(actual)[SHARE]


def test_minutes_without_counted_tokens_have_no_work() -> None:
    """Where a counter is not reported, what was done is not known."""

    # A thousand tokens a minute, then two hundred behind a queue
    def of(*, told: bool = True) -> float | str | None:
        samples, done = [], 100
        for number, page in enumerate([*MINUTES[0], *MINUTES[1], *MINUTES[1]]):
            done += 1_000 if page is FINE else 200
            counted = None if number == 15 and not told else done
            one = replace(page, generation_tokens_total=counted, prompt_tokens_total=0)
            samples.append(Sample(at_seconds=60.0 * number, engines=(one,)))
        return evidence(verdict(Timeline(samples=tuple(samples)), Facts(pools=HUNDRED.pools)))[SHARE]

    assert [pytest.approx(0.2)] * 2 == [of(), of(told=False)]
