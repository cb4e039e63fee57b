"""fragmentation.kv_waste at its thresholds and with its figures: by loads of known tokens, and by the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_kv_waste import judge
from kvdiag.model import Engine, Facts, Finding, KvPool, Load, Mark, Outcome, Phase, Sample, Timeline, Workload
from tests.builders.answers import ANY_TEXT
from tests.builders.values import engine, holding, pool

POOL = pool(max_concurrency=None)


def figures(found: Finding) -> list[tuple[str, object, str, str]]:
    """Evidence as rows."""
    return [(one.name, one.value, one.unit, one.source) for one in found.evidence]


def uncounted(blocks: int, running: int = 0) -> Engine:
    """A page that counts no tokens."""
    return replace(holding(blocks, running=running), prompt_tokens_total=None, generation_tokens_total=None)


def loads(*each: tuple[int, int, int], of: tuple[KvPool, ...] = (POOL,)) -> Finding:
    """The finding on loads, one after the other: so many requests of so many tokens each that hold so many blocks."""
    samples: list[Sample] = []
    marks: list[Mark] = []
    for number, (requests, tokens, held) in enumerate(each):
        start = 10.0 * number
        workload = Workload(requests=requests, prompt_tokens=tokens, max_tokens=1)
        outcome = Outcome(completed=requests, failed=0, prompt_tokens=requests * tokens, generated_tokens=requests)
        phases: tuple[tuple[float, Phase], ...] = ((0.0, "begin"), (1.0, "offer"), (2.0, "release"), (3.0, "end"))
        for second, phase in phases:
            marks.append(
                Mark(
                    at_seconds=start + second,
                    step="soak",
                    cycle=number,
                    phase=phase,
                    workload=workload,
                    outcome=outcome if phase == "release" else None,
                )
            )
        load = Load(requests=requests, resident_tokens=(tokens,) * requests)
        for second, page, ours in (
            (0.3, uncounted(0), None),
            (0.6, uncounted(0), None),
            (1.3, uncounted(held, requests), load),
            (1.6, uncounted(held, requests), load),
            (2.3, uncounted(0), None),
            (2.6, uncounted(0), None),
        ):
            samples.append(Sample(at_seconds=start + second, engines=(page,), load=ours, load_before=ours))
    (found,) = judge(Timeline(samples=tuple(samples), marks=tuple(marks)), Facts(pools=of), DEFAULT_LIMITS)
    return found


@pytest.mark.parametrize(
    ("requests", "tokens", "held", "status"),
    [
        (1, 64, 5, "ok"),
        (1, 64, 6, "suspect"),
        (1, 64, 7, "fault"),
        (1, 16, 2, "ok"),
        (2, 64, 10, "ok"),
        (2, 64, 11, "suspect"),
        (2, 64, 12, "suspect"),
        (2, 64, 13, "fault"),
        (1, 64, 4, "ok"),
    ],
)
def test_one_block_for_each_request_is_rounding_and_half_as_much_again_a_fault(
    requests: int, tokens: int, held: int, status: str
) -> None:
    """64 tokens need 4 blocks of 16: 5 may be the next one, 6 are one and a half times as many, 7 are more."""
    assert status == loads((requests, tokens, held)).status


def test_the_worst_of_several_loads_is_told_with_its_figures() -> None:
    """Of 12 for 8, 14 for 8 and 40 for 32 the second holds most for its tokens; a load that holds nothing is none."""
    actual = loads((2, 64, 12), (2, 64, 14), (1, 512, 40), (1, 64, 0))

    # 128 tokens in 14 blocks of 16
    assert "fault" == actual.status
    assert [
        ("blocks_in_use", 14, "blocks", "engine"),
        ("blocks_needed", 8, "blocks", "computed"),
        ("tokens_resident", 128, "tokens", "kvdiag"),
        ("block_size", 16, "tokens", "engine"),
        ("fill_ratio", 128 / 224, "ratio", "computed"),
    ] == figures(actual)


@pytest.mark.parametrize(
    ("each", "of"),
    [([(0, 64, 9)], (POOL,)), ([(1, 64, 0)], (POOL,)), ([(1, 64, 9)], ()), ([], (POOL,))],
    ids=["no request", "no block", "no pool", "no load"],
)
def test_without_blocks_of_known_tokens_it_is_unknown(each: list[tuple[int, int, int]], of: tuple[KvPool, ...]) -> None:
    """There is nothing to be compared."""
    found = loads(*each, of=of)

    assert "unknown" == found.status


def by_page(blocks_each: int, *, looked_up: float = 1.0, readings: int = 80) -> Finding:
    """The finding on 2 and 3 running in turns, a prompt of 1,000 tokens and an answer of 100 with each reading."""
    samples = []
    for number in range(readings):
        running = 2 + number % 2
        page = replace(
            engine(usage=running * blocks_each / POOL.usage_blocks, running=running, prompt_tokens=number * 1_000),
            generation_tokens_total=number * 100,
            prefix_queries_total=round(looked_up * number * 1_000),
        )
        samples.append(Sample(at_seconds=30.0 * number, engines=(page,)))
    (found,) = judge(Timeline(samples=tuple(samples)), Facts(pools=(POOL,)), DEFAULT_LIMITS)
    return found


@pytest.mark.parametrize(
    ("blocks", "looked_up", "status"),
    [
        (503, 1.0, "unknown"),
        (504, 1.0, "suspect"),
        (1_259, 1.0, "suspect"),
        (1_260, 1.0, "fault"),
        (1_260, 2.0, "fault"),
        (1_260, 2.1, "suspect"),
        (1_260, 0.5, "fault"),
        (1_260, 0.4, "suspect"),
    ],
    ids=["less than four", "four", "less than ten", "ten", "twice", "more than twice", "half", "less than half"],
)
def test_waste_by_the_page_counts_from_four_times_the_most_that_a_request_can_need(
    blocks: int, looked_up: float, status: str
) -> None:
    """2,000 tokens at the most, which are 126 blocks: 504 are four times that, and 1,260 ten times."""
    assert status == by_page(blocks, looked_up=looked_up).status


@pytest.mark.parametrize(("readings", "status"), [(2 * 121, "suspect"), (3 * 121, "fault")])
def test_waste_of_three_hours_in_a_row_is_a_fault(readings: int, status: str) -> None:
    """Five times the need, hour after hour, with counters that agree."""
    assert status == by_page(630, readings=readings).status


def test_waste_by_the_page_has_its_figures() -> None:
    """What a request holds beside all that bounds its need."""
    actual = by_page(1_260)

    told = ANY_TEXT
    assert told == actual.summary
    assert [
        ("blocks_per_request", 1_260.0, "blocks", "engine"),
        ("max_blocks_needed", 126, "blocks", "computed"),
        ("max_request_tokens", 2_000, "tokens", "computed"),
        ("max_prompt_tokens", 1_000, "tokens", "engine"),
        ("min_prompts", 79, "requests", "engine"),
        ("concurrency_changes", 79, "samples", "engine"),
        ("prefix_queries_to_prompt_tokens", 1.0, "ratio", "engine"),
    ] == figures(actual)
