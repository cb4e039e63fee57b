"""leak.kv_blocks with its figures: what is held, since when, by how many requests; late returns, hits, busy servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Engine, Facts, Finding, Gap, Mark, Outcome, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, rows
from tests.builders.values import MIB, NO_ANSWER, engine, holding, pool, seen

ONE_POOL = Facts(pools=(pool(),))


def verdict(timeline: Timeline, of: Facts = ONE_POOL) -> Finding:
    """The rule's one finding."""
    (found,) = judge(timeline, of, DEFAULT_LIMITS)
    return found


def idle(blocks: int) -> list[Engine]:
    """Two idle readings that agree."""
    return [holding(blocks)] * 2


BUSY = [holding(900, running=9)] * 2


def served(first: int, last: int, requests: Sequence[tuple[float, int, int]]) -> Finding:
    """The finding on an idle floor, work, and an idle floor, with our own requests over at tenths of a second."""
    timeline = seen(*idle(first), *BUSY, *idle(last))
    marks = [
        Mark(
            at_seconds=1_000.0 + tenth / 10,
            step="single_request",
            cycle=cycle,
            phase="release",
            outcome=Outcome(completed=done, failed=failed, prompt_tokens=1, generated_tokens=1),
        )
        for cycle, (tenth, done, failed) in enumerate(requests)
    ]
    begun = Mark(at_seconds=1_000.6, step="soak", cycle=99, phase="begin")
    return verdict(replace(timeline, marks=(*marks, begun)))


@pytest.mark.parametrize(
    ("requests", "counted"),
    [
        ([(3, 8, 2)], 10),
        ([(2, 8, 0)], 0),
        ([(2.1, 8, 0)], 8),
        ([(6, 8, 0)], 8),
        ([(3, 4, 1), (4, 5, 0)], 10),
    ],
    ids=["served and failed", "over at the first floor", "just after it", "over at the last", "two spans"],
)
def test_requests_between_the_first_idle_floor_and_the_last_are_counted(
    requests: list[tuple[float, int, int]], counted: int
) -> None:
    """Floors at tenths 2 and 6 of readings in each tenth: what was over by the first is in it already."""
    assert counted == evidence(served(10, 30, requests))["requests_between"]


@pytest.mark.parametrize(
    ("first", "last", "rate", "gone"),
    [
        (10, 30, ANY_TEXT, 3_057),
        (10, 15, ANY_TEXT, 12_258),
        (10, 11, ANY_TEXT, 61_330),
        (10, 10, "", None),
        (0, 10, ANY_TEXT, 6_134),
    ],
)
def test_what_each_request_leaves_and_when_the_pool_is_gone(first: int, last: int, rate: str, gone: int | None) -> None:
    """Ten requests between: (6,144 - held) * 10 / growth, as 6,114 * 10 / 20 = 3,057."""
    actual = served(first, last, [(3, 10, 0)])

    # In blocks of 2 MiB
    f"{2 * last} MiB" if last >= 50 else f"{2 * last:.2f} MiB"
    assert "fault" == actual.status
    assert [
        ("idle_intervals", 2, "intervals", "engine"),
        ("blocks_at_first_idle", first, "blocks", "engine"),
        ("blocks_at_last_idle", last, "blocks", "engine"),
        ("requests_between", 10, "requests", "kvdiag"),
        ("leaked", last * 2 * MIB, "bytes", "engine"),
        ("leaked_ratio", last / 6144, "ratio", "engine"),
        ("requests_until_pool_full", gone, "requests", "computed"),
    ] == rows(actual)


def test_without_requests_in_between_no_rate_is_made_up() -> None:
    """Blocks became more, and of ours there was no request, or steps that are not known."""
    alone = verdict(seen(*idle(10), *BUSY, *idle(30)))
    assert evidence(alone)["requests_between"] is None
    assert evidence(alone)["requests_until_pool_full"] is None


@pytest.mark.parametrize(
    ("floors", "status"),
    [
        ((40, 39), "unknown"),
        ((40, 40), "fault"),
        ((40, 41), "fault"),
        ((40, 30, 35), "fault"),
        ((40, 30, 29), "unknown"),
        ((40, 0, 20), "fault"),
        ((40, 0, 20, 19), "unknown"),
        ((0, 20), "fault"),
    ],
)
def test_what_falls_below_every_floor_since_the_pool_was_empty_is_on_its_way_back(
    floors: tuple[int, ...], status: str
) -> None:
    """A floor that only falls is being returned; one that stands, or rises again, is not."""
    actual = verdict(seen(*(reading for blocks in floors for reading in (*idle(blocks), *BUSY))))
    assert status == actual.status


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ([holding(40)], "fault"),
        ([holding(0)], "fault"),
        ([holding(90), holding(41), holding(40)], "fault"),
        ([holding(90), holding(40), holding(39)], "unknown"),
    ],
    ids=["one reading, as many", "one reading, none", "as many at the end", "fewer at the end"],
)
def test_an_end_that_did_not_settle_counts_where_it_shows_fewer(end: list[Engine], status: str) -> None:
    """Forty blocks of the last floor are proven until a reading shows fewer of them."""
    actual = verdict(seen(*idle(0), *BUSY, *idle(40), *BUSY, *end))
    assert status == actual.status


def test_an_empty_pool_whose_end_did_not_settle_is_unknown() -> None:
    """Readings that fall to nothing show that nothing stayed, those that stop above it do not."""
    ends = [[holding(9), holding(0)], [holding(9), holding(1)], [holding(0), holding(9)], []]
    assert ["unknown", "unknown", "unknown", "ok"] == [verdict(seen(*idle(0), *BUSY, *end)).status for end in ends]


@pytest.mark.parametrize(("after", "status"), [(0.0, "fault"), (0.05, "unknown")], ids=["at that moment", "before it"])
def test_a_floor_of_before_the_servers_start_is_another_servers(after: float, status: str) -> None:
    """What began when the floor was read has it; what began later has not."""
    # A floor whose second reading is at 1000.2
    known = replace(ONE_POOL, started_seconds=1_000.2 + after)
    actual = verdict(seen(*idle(5), *BUSY), known)
    assert status == actual.status


@pytest.mark.parametrize(
    ("pages", "of", "told"),
    [
        (BUSY, ONE_POOL, ANY_TEXT),
        ([NO_ANSWER], ONE_POOL, NO_ANSWER.reason),
        ([*BUSY, NO_ANSWER], ONE_POOL, ANY_TEXT),
        ([replace(engine(), kv_usage_ratio=None)] * 3, ONE_POOL, ANY_TEXT),
        (BUSY, Facts(), ANY_TEXT),
        ([NO_ANSWER], Facts(), NO_ANSWER.reason),
    ],
    ids=["busy", "no answer", "busy, then no answer", "usage not told", "no pool", "no pool, no answer"],
)
def test_why_there_is_no_floor_is_told(pages: list[Engine | Gap], of: Facts, told: str) -> None:
    """An engine that answered has its own reason, one that did not its gap's."""
    assert Finding(id="leak.kv_blocks", status="unknown", summary=ANY_TEXT) == verdict(seen(*pages), of)


def late(*holds: tuple[int, int]) -> Finding:
    """The finding where so many blocks stayed held for so many half minutes after work, again and again."""
    pages: list[Engine] = []
    for blocks, readings in holds:
        pages += [*BUSY, *[holding(blocks)] * (readings + 1), *[engine()] * 2]
    samples = tuple(Sample(at_seconds=30.0 * number, engines=(one,)) for number, one in enumerate(pages))
    return verdict(Timeline(samples=samples))


def test_late_returns_have_their_figures() -> None:
    """The longest and the most of them, which need not be the same; never one of another."""
    actual = late((1_536, 4), (768, 10))
    assert "suspect" == actual.status
    assert [
        ("idle_intervals", 2, "intervals", "engine"),
        ("blocks_at_first_idle", 0, "blocks", "engine"),
        ("blocks_at_last_idle", 0, "blocks", "engine"),
        ("requests_between", None, "requests", "kvdiag"),
        ("late_frees", 2, "times", "engine"),
        ("longest_late_free", 300.0, "seconds", "engine"),
        ("max_blocks_freed_late", 1_536, "blocks", "engine"),
        ("max_late_ratio", 0.25, "ratio", "engine"),
    ] == rows(actual)


@pytest.mark.parametrize(
    ("holds", "status"),
    [
        (((1_536, 4), (1_536, 4)), "fault"),
        (((1_536, 4), (1_535, 4)), "suspect"),
        (((1_536, 4),), "suspect"),
        (((1_536, 4), (200, 4), (1_536, 4)), "fault"),
    ],
    ids=["a quarter twice", "a block less", "once", "with a small one between"],
)
def test_a_quarter_of_the_pool_twice_is_how_the_server_works(holds: tuple[tuple[int, int], ...], status: str) -> None:
    """Once may be a neighbour that was lost; 1,536 of 6,144 blocks are a quarter."""
    assert status == late(*holds).status


def test_hits_that_dwindled_have_their_figures() -> None:
    """From 60 to 1 in a hundred of what was looked up, over four hours."""
    # Eight pieces of a half hour each, 600,000 prompt tokens looked up in each of them
    pages, queries, hits = [], 0, 0
    for share in (60, 50, 40, 30, 20, 10, 4, 1):
        for _ in range(60):
            queries, hits = queries + 10_000, hits + share * 100
            pages.append(
                replace(
                    engine(usage=0.3, running=5, prompt_tokens=queries),
                    prefix_queries_total=queries,
                    prefix_hits_total=hits,
                )
            )
    last = replace(pages[-1], kv_usage_ratio=0.0, requests_running=0)
    samples = tuple(Sample(at_seconds=30.0 * number, engines=(one,)) for number, one in enumerate([*pages, last, last]))
    actual = verdict(Timeline(samples=samples))

    assert "unknown" == actual.status
    assert [
        ("idle_intervals", 1, "intervals", "engine"),
        ("blocks_at_first_idle", 0, "blocks", "engine"),
        ("blocks_at_last_idle", 0, "blocks", "engine"),
        ("requests_between", None, "requests", "kvdiag"),
        ("first_hit_ratio", pytest.approx(0.6, abs=0.01), "ratio", "engine"),
        ("last_hit_ratio", pytest.approx(0.01, abs=0.001), "ratio", "engine"),
        ("prefix_queries", pytest.approx(4_800_000, abs=20_000), "tokens", "engine"),
    ] == rows(actual)


def never_idle(held: Callable[[float, int], float]) -> Finding:
    """The finding on six hours of 4 to 6 running requests, by the blocks held at an hour beside so many."""
    samples = []
    for number in range(241):
        running = 4 + number // 4 % 3
        blocks = round(held(number / 40, running)) + 30 * (number % 4)
        samples.append(Sample(at_seconds=90.0 * number, engines=(holding(blocks, running=running),)))
    return verdict(Timeline(samples=tuple(samples)))


FLAT = "never idle; the lowest readings beside as many requests do not rise"


@pytest.mark.parametrize(
    ("each", "growth", "status"),
    [
        (15, 0.0, "ok"),
        (50, 0.0, "ok"),
    ],
    ids=["bounded", "flat"],
)
def test_a_busy_server_that_is_well_has_its_figures(each: int, growth: float, status: str) -> None:
    """Four requests at the least; growth of a block in all the six hours would show, 1 / 6 in an hour."""
    actual = never_idle(lambda _, running: each * running)

    assert status == actual.status
    assert [
        ("window", 6.0, "hours", "kvdiag"),
        ("min_blocks_under_load", 4 * each, "blocks", "engine"),
        ("running_at_min", 4, "requests", "engine"),
        ("min_blocks_growth_per_hour", pytest.approx(growth, abs=0.001), "blocks", "engine"),
        ("detection_limit_per_hour", pytest.approx(1 / 6, abs=0.001), "blocks", "computed"),
    ] == rows(actual)


def test_a_busy_server_whose_lowest_readings_rise_is_unknown_with_its_figures() -> None:
    """Twenty blocks an hour more beside as many requests: a leak, or longer requests."""
    actual = never_idle(lambda hour, running: 50 * running + 20 * hour)
    # In the newest third, from the fourth hour on, 200 and 80 blocks are the lowest
    assert "unknown" == actual.status
    assert pytest.approx(20.0, rel=0.02) == evidence(actual)["min_blocks_growth_per_hour"]
    assert pytest.approx(280, abs=9) == evidence(actual)["min_blocks_under_load"]


def test_a_busy_server_in_steps_of_ours_is_not_judged_by_its_lowest_readings() -> None:
    """A run of steps makes idle moments itself: traffic in between is another's, and is told as such."""
    busy = [Sample(at_seconds=90.0 * number, engines=(holding(9, running=1),)) for number in range(241)]
    mark = Mark(at_seconds=1.0, step="baseline", cycle=0, phase="begin")
    assert ["unknown", "ok"] == [verdict(Timeline(samples=tuple(busy), marks=marks)).status for marks in ((mark,), ())]
