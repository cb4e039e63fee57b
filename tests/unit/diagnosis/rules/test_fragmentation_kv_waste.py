"""fragmentation.kv_waste: by loads of known tokens, and from metrics alone."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis.rules.fragmentation_kv_waste import judge
from kvdiag.model import Engine, Facts, Finding, KvPool, RequestBlocks, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, only, rows
from tests.builders.runs import of_run
from tests.builders.values import engine, owners, pool
from tests.builders.worlds import World
from tests.quality.corpus.tape import seeded
from tests.unit.diagnosis.steps.successive_loads import Offered, timeline

verdict = partial(of_run, judge)


def test_requests_that_hold_far_more_than_their_tokens_are_a_fault() -> None:
    """139 blocks in use, where 624 tokens need 39, are more than three times as many and a fault."""
    actual = verdict(World(extra_blocks_per_request=100))
    assert ("fragmentation.kv_waste", "fault") == (actual.id, actual.status)
    assert [
        ("blocks_in_use", 139, "blocks", "engine"),
        ("blocks_needed", 39, "blocks", "computed"),
        ("tokens_resident", 624, "tokens", "kvdiag"),
        ("block_size", 16, "tokens", "engine"),
        ("fill_ratio", 624 / (139 * 16), "ratio", "computed"),
    ] == rows(actual)


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(), "ok", id="what the tokens need"),
        pytest.param(World(extra_blocks_per_request=1), "ok", id="the block that a request entered meanwhile"),
        pytest.param(World(extra_blocks_per_request=2), "suspect", id="two more of 39"),
        pytest.param(World(leaked_blocks_per_request=4), "ok", id="a leak, which raises the floor"),
        pytest.param(World(pools=(pool(sliding_window_tokens=1024),)), "ok", id="what a window touches"),
        pytest.param(World(pools=(pool("0"), pool("1")), gpus=2), "ok", id="tokens and blocks of two engines"),
    ],
)
def test_runs_get_their_status(world: World, status: str) -> None:
    """A paged engine holds whole blocks of what is resident; somewhat more is worth a look, not an alarm."""
    assert status == verdict(world).status


@pytest.mark.parametrize(
    "world",
    [
        World(pools=()),
        World(usage_reported=False),
        World(unseen=("single_request", "concurrent", "long_context")),
        World(busy=True),
        World(other_prompt_tokens={"single_request": 1, "concurrent": 1, "long_context": 1}),
        World(lost_in="single_request"),
        World(pools=(pool(max_concurrency=9.0),)),
    ],
    ids=["no pool", "no usage", "not seen", "never idle", "other prompts", "server lost", "curve not known"],
)
def test_without_a_load_of_known_tokens_it_is_unknown(world: World) -> None:
    """Only blocks that belong to known tokens can be called too many."""
    assert Finding(id="fragmentation.kv_waste", status="unknown", summary=ANY_TEXT) == verdict(world)


def test_large_blocks_are_rounding_and_not_waste() -> None:
    """With blocks of 1,024 tokens a short request uses part of one: that is rounding, and ok."""
    actual = verdict(World(pools=(pool(block_tokens=1024, usable_blocks=100),)))
    # The fill ratio is reported all the same
    assert "ok" == actual.status
    assert 0 < float(evidence(actual)["fill_ratio"] or 0) < 1


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
    """Samples in each of which one more request begins and ends, with these numbers running at once."""
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


def of_metrics(*readings: Engine, tick_seconds: float = 30.0, of: KvPool = POOL) -> Finding:
    """The rule's one finding on so many pages."""
    samples = tuple(Sample(at_seconds=number * tick_seconds, engines=(one,)) for number, one in enumerate(readings))
    return only(judge, Timeline(samples=samples), Facts(pools=(of,)))


def test_figures_by_the_page_have_units_and_sources() -> None:
    """Blocks of a request to the hundredth, and what is read from the page apart from what is computed."""
    # Three requests that take 4,501 blocks together
    actual = of_metrics(*pages((1, 4) * 40, blocks_each=1_500 + 1 / 3))

    assert {
        "blocks_per_request": (1500.33, "blocks", "engine"),
        "max_blocks_needed": (126, "blocks", "computed"),
        "max_request_tokens": (2000, "tokens", "computed"),
        "max_prompt_tokens": (1000, "tokens", "engine"),
        "min_prompts": (79, "requests", "engine"),
        "concurrency_changes": (79, "samples", "engine"),
        "prefix_queries_to_prompt_tokens": (1.0, "ratio", "engine"),
    } == {one.name: (one.value, one.unit, one.source) for one in actual.evidence}


def test_long_contexts_that_stay_are_not_waste() -> None:
    """A session of 90,000 tokens next to short requests needs most of the pool: unknown, not waste."""
    assert "unknown" == of_metrics(*pages(blocks_each=70, resident_blocks=5_600)).status


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
    """If running requests do not change, or prompts or usage are missing, the verdict is unknown."""
    assert "unknown" == of_metrics(*readings).status


def test_readings_too_far_apart_are_unknown() -> None:
    """With samples five minutes apart too many requests begin and end in between: the verdict is unknown."""
    assert "unknown" == of_metrics(*pages(blocks_each=2_000), tick_seconds=300.0).status


def test_a_pool_whose_curve_is_not_known_is_unknown() -> None:
    """A model that takes blocks for states, too, is not measured by its tokens."""
    hybrid = pool(max_concurrency=1.5)
    known = Facts(pools=(hybrid,), max_model_len_tokens=32_768)
    samples = tuple(
        Sample(at_seconds=30.0 * number, engines=(one,))
        for number, one in enumerate(pages(blocks_each=2_000, of=hybrid))
    )
    actual = only(judge, Timeline(samples=samples), known)

    assert "unknown" == actual.status


@given(seed=st.integers(), longest=st.integers(1, 20_000), most=st.integers(1, 2_000), at_once=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_requests_that_hold_what_they_need_are_never_accused(seed: int, longest: int, most: int, at_once: int) -> None:
    """However prompts and answers are spread, whole blocks of their tokens are no waste."""
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
    assert "unknown" == of_metrics(*readings, of=large).status


def loads(*each: tuple[int, int, int], of: tuple[KvPool, ...] = (POOL,)) -> Finding:
    """The finding on loads, one after the other: so many requests of so many tokens each that hold so many blocks."""
    offered = [Offered(requests=requests, tokens=tokens, held=held) for requests, tokens, held in each]
    return only(judge, timeline("soak", offered), Facts(pools=of))


@pytest.mark.parametrize(
    ("requests", "tokens", "held", "status"),
    [
        (1, 64, 5, "ok"),
        (1, 64, 6, "suspect"),
        (1, 64, 7, "fault"),
        (1, 16, 2, "ok"),
        (1, 16, 3, "fault"),
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


def test_the_worst_of_several_loads_is_reported_with_its_figures() -> None:
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
    ] == rows(actual)


@pytest.mark.parametrize(
    ("each", "of"),
    [([(0, 64, 9)], (POOL,)), ([(1, 64, 0)], (POOL,)), ([(1, 64, 9)], ()), ([], (POOL,))],
    ids=["no request", "no block", "no pool", "no load"],
)
def test_without_blocks_of_known_tokens_it_is_unknown(each: list[tuple[int, int, int]], of: tuple[KvPool, ...]) -> None:
    """There is nothing to be compared."""
    assert "unknown" == loads(*each, of=of).status


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
        (1_260, 0.0, "suspect"),
    ],
    ids=[
        "less than four",
        "four",
        "less than ten",
        "ten",
        "twice",
        "more than twice",
        "half",
        "less than half",
        "no second counter",
    ],
)
def test_waste_by_the_page_counts_from_four_times_the_most_that_a_request_can_need(
    blocks: int, looked_up: float, status: str
) -> None:
    """2,000 tokens at the most, which are 126 blocks: 504 are four times that, and 1,260 ten times."""
    assert status == of_metrics(*pages(blocks_each=blocks, looked_up=looked_up)).status


@pytest.mark.parametrize(("readings", "status"), [(2 * 121, "suspect"), (3 * 121, "fault")])
def test_waste_of_three_hours_in_a_row_is_a_fault(readings: int, status: str) -> None:
    """Five times the need, hour after hour, with counters that agree."""
    running = [2 + number % 2 for number in range(readings)]
    assert status == of_metrics(*pages(running, blocks_each=630)).status


@pytest.mark.parametrize(
    ("tail", "largest", "requests", "status"),
    [
        pytest.param(40 * 15, 15, 40, "ok", id="a tail each"),
        pytest.param(40 * 32, 32, 40, "ok", id="a block each besides"),
        pytest.param(40 * 33, 40, 40, "suspect", id="more"),
        pytest.param(100, 90, 40, "unknown", id="one large, few on average"),
        pytest.param(None, None, 40, "unknown", id="blocks that are no rows of tokens"),
        pytest.param(0, 0, 0, "unknown", id="nothing runs"),
    ],
)
def test_unused_slots_decide_while_requests_run(
    tail: int | None, largest: int | None, requests: int, status: str
) -> None:
    """Blocks of 16 tokens, counted by the agent: no load of known size is needed."""
    held = RequestBlocks(
        age_seconds=1.0,
        requests=requests,
        tail_tokens=tail,
        tail_largest_tokens=largest,
        longest_requests=0,
        longest_blocks=0,
        stalled_requests=0,
        stalled_blocks=0,
    )
    samples = [
        Sample(at_seconds=float(at), engines=(engine(),), block_owners=(replace(owners(), held=held),))
        for at in range(3)
    ]
    found = only(judge, Timeline(samples=tuple(samples)), Facts(engine_name="vllm", pools=(pool(),)))
    assert status == found.status
    if status != "unknown":
        assert (tail, largest, requests) == tuple(
            evidence(found)[name] for name in ("unused_slots", "max_unused_slots", "requests")
        )
