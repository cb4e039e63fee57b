"""capacity.concurrency: queues, the work behind them, and the room for requests, at the thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.capacity_concurrency import judge
from kvdiag.model import Engine, Evidence, Facts, Finding, KvPool, Mark, Outcome, Sample, Timeline, Workload
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import NO_ANSWER, engine, holding, pool, seen
from tests.builders.worlds import SMALL_POOL, World, facts

ONE_POOL = Facts(pools=(pool(),))

FULL = World(pools=(SMALL_POOL,), max_model_len_tokens=17_600, resident_at_once=7)


def verdict(timeline: Timeline, of: Facts = ONE_POOL) -> Finding:
    """The rule's one finding."""
    (found,) = judge(timeline, of, DEFAULT_LIMITS)
    return found


def test_requests_that_push_one_another_out_are_a_fault() -> None:
    """Preemptions are counted, and set against how many of the step's requests the pool holds."""
    world = replace(FULL, preemptions=5)
    actual = verdict(run(world), facts(world))
    expected = Finding(
        id="capacity.concurrency",
        status="fault",
        summary=ANY_TEXT,
        evidence=(
            Evidence(name="preemptions", value=5, unit="requests", source="engine"),
            Evidence(name="max_waiting", value=3, unit="requests", source="engine"),
            Evidence(name="max_running", value=7, unit="requests", source="engine"),
            Evidence(name="max_usage", value=1099 / 1100, unit="ratio", source="engine"),
            Evidence(name="capacity", value=17_600, unit="tokens", source="engine"),
        ),
    )

    assert expected == actual


def test_requests_that_wait_for_room_are_suspect() -> None:
    """Without a preemption, waiting with a full pool is a capacity problem all the same."""
    actual = verdict(run(FULL), facts(FULL))
    assert "suspect" == actual.status


def test_ten_requests_with_room_for_all_are_ok() -> None:
    """A healthy server runs all ten at once."""
    actual = verdict(run(), facts(World()))
    assert ("ok", 10) == (actual.status, evidence(actual)["max_running"])


@pytest.mark.parametrize(
    "timeline",
    [
        seen(NO_ANSWER, NO_ANSWER),
        seen(engine(preemptions=None), engine(preemptions=None)),
        seen(*[engine()] * 9),
        seen(*[holding(40, running=1)] * 9),
        run(World(cut_short_in="single_request")),
    ],
    ids=["no answer", "no counter", "idle", "one request", "stopped before the concurrent step"],
)
def test_without_requests_at_the_same_time_it_is_unknown(timeline: Timeline) -> None:
    """An engine that was never asked for two things at once has not shown that it can."""
    actual = verdict(timeline)
    assert Finding(id="capacity.concurrency", status="unknown", summary=ANY_TEXT) == actual


def test_waiting_behind_a_prefill_with_room_in_the_pool_is_no_capacity_problem() -> None:
    """Requests that queue for their turn to be computed do not lack memory, whatever the engine's reason says."""
    # Seven requests that wait while 49 of 159 blocks are held by three (seen on 0.32)
    small = pool(usable_blocks=159)
    queue = replace(holding(49, of=small, running=3, waiting=7), requests_waiting_for_capacity=7)
    assert "ok" == verdict(seen(*[queue] * 20), Facts(pools=(small,))).status


def test_a_pool_is_full_well_below_usage_one() -> None:
    """Three of eight 8K requests in 32,768 tokens stand at 80 %: the fourth does not fit, and five wait."""
    # A pool of 2,048 blocks with 1,638 held by three requests
    small = pool(usable_blocks=2048)
    queue = holding(1638, of=small, running=3, waiting=5)
    actual = verdict(seen(*[queue] * 3), Facts(pools=(small,)))
    assert ("suspect", 5) == (actual.status, evidence(actual)["max_waiting"])


@pytest.mark.parametrize(
    ("tokens_waiting", "readings", "status"),
    [(200, 30, "fault"), (900, 30, "suspect"), (200, 9, "suspect"), (None, 30, "suspect")],
    ids=["collapsed", "as much as before", "for four minutes", "not counted"],
)
def test_queue_behind_which_the_work_collapses_is_a_fault(
    tokens_waiting: int | None, readings: int, status: str
) -> None:
    """A full server that works on has a long queue at worst; one that does a fifth of its work thrashes."""
    # 1,000 tokens in each half minute, and then a queue at a full pool
    small = pool(usable_blocks=100)
    fine, queue = holding(60, of=small, running=3), holding(99, of=small, running=3, waiting=9)
    work = [(fine, 1_000)] * 30 + [(queue, tokens_waiting)] * readings
    done, samples = 0, []
    for number, (page, tokens) in enumerate(work):
        done += tokens or 0
        counted = None if tokens_waiting is None else done
        one = replace(page, prompt_tokens_total=None, generation_tokens_total=counted)
        samples.append(Sample(at_seconds=30.0 * number, engines=(one,)))

    assert status == verdict(Timeline(samples=tuple(samples)), Facts(pools=(small,))).status


def test_a_wait_of_two_samples_does_not_count() -> None:
    """Admission takes some engine steps: a short queue at a full pool is not held against it."""
    small = pool(usable_blocks=100)
    queue, fine = holding(99, of=small, running=3, waiting=1), holding(99, of=small, running=4)
    assert "ok" == verdict(seen(fine, queue, queue, fine, queue, queue, fine), Facts(pools=(small,))).status


def test_a_counter_that_starts_anew_is_no_preemption() -> None:
    """A restarted engine counts from zero: what it counted before is not counted again."""
    timeline = seen(*(engine(running=2, preemptions=count) for count in (50, 50, 0, 0, 0)))
    assert ("ok", 0) == (verdict(timeline).status, evidence(verdict(timeline))["preemptions"])


def test_preemptions_after_a_restart_count() -> None:
    """What a restarted engine preempts is counted from zero."""
    timeline = seen(*(engine(running=2, preemptions=count) for count in (50, 50, 0, 1, 2)))
    assert 2 == evidence(verdict(timeline))["preemptions"]


def test_an_engine_that_was_not_on_one_page_has_not_preempted_anew() -> None:
    """A data-parallel engine missing from one reading comes back with its old count, not with new preemptions."""
    first, second = engine(running=2, preemptions=3), engine(label="1", running=2, preemptions=50)
    both = Facts(pools=(pool("0"), pool("1")))
    timeline = seen((first, second), (first,), (first, second), (first, second))
    assert ("ok", 0) == (verdict(timeline, both).status, evidence(verdict(timeline, both))["preemptions"])


def test_preemptions_of_all_engines_are_added_up() -> None:
    """Both engines' counters count."""
    both = Facts(pools=(pool("0"), pool("1")))
    timeline = seen(
        (engine(running=2), engine(label="1", running=2)),
        (engine(running=2, preemptions=1), engine(label="1", running=2, preemptions=1)),
    )
    assert ("fault", 2) == (verdict(timeline, both).status, evidence(verdict(timeline, both))["preemptions"])


def test_one_full_engine_beside_an_empty_one_is_suspect() -> None:
    """Room in another engine's pool is of no use to requests that wait at a full one."""
    both = Facts(pools=(pool("0", usable_blocks=100), pool("1")))
    page = (holding(99, of=both.pools[0], running=3, waiting=2), engine(label="1"))
    assert "suspect" == verdict(seen(*[page] * 3), both).status


def test_an_engine_without_a_pool_divides_nothing() -> None:
    """Waiting requests of an engine whose pool or usage is unknown are not counted as waiting for room."""
    odd = (engine(usage=None, running=2, waiting=4), engine(usage=1.0, running=0, waiting=4))
    assert {"ok", "unknown"} >= {
        verdict(seen(odd[0], odd[0], odd[0]), Facts()).status,
        verdict(seen(odd[1], odd[1], odd[1])).status,
    }


HUNDRED = Facts(pools=(pool(usable_blocks=100),))


@pytest.mark.parametrize(
    ("held", "running", "status"),
    [(75, 3, "ok"), (76, 3, "suspect"), (50, 1, "ok"), (51, 1, "suspect")],
    ids=["room for one more", "a block less", "half is free", "a block less than half"],
)
def test_room_for_one_more_of_the_mean_size_is_room(held: int, running: int, status: str) -> None:
    """Three that hold 75 of 100 blocks take 25 each, which is what is left; with 76 held it is not enough."""
    queue = holding(held, of=HUNDRED.pools[0], running=running, waiting=2)
    # Running beside them is another engine's request, so that two run at the same time
    assert status == verdict(seen(*[(queue, engine(label="9", running=1))] * 3), HUNDRED).status


@pytest.mark.parametrize(
    ("pages", "status"),
    [
        ([engine(running=2)], "unknown"),
        ([engine(running=2)] * 2, "ok"),
        ([engine(running=2), NO_ANSWER, NO_ANSWER], "unknown"),
        ([engine(running=1), engine(running=2, preemptions=None), engine(running=1)], "ok"),
        ([engine(running=1)] * 2, "unknown"),
        ([(engine(running=1), engine(running=1, label="1"))] * 2, "ok"),
        ([(engine(running=9), engine(running=1, label="1", preemptions=None))] * 9, "unknown"),
    ],
    ids=["one page", "two pages", "one page and gaps", "one uncounted", "one runs", "on two engines", "one of two"],
)
def test_two_pages_that_count_and_two_requests_are_needed(pages: list[object], status: str) -> None:
    """A counter is compared with itself, and an engine that never ran two has not shown that it can."""
    actual = verdict(seen(*pages))  # type: ignore[arg-type]
    assert status == actual.status


def test_a_step_of_ours_that_was_served_needs_no_reading_of_two_at_once() -> None:
    """Ten requests that were served are known to have been there, however few samples saw them."""
    workload = Workload(requests=10, prompt_tokens=2048, max_tokens=256)
    served, lost = (Outcome(completed=done, failed=10 - done, prompt_tokens=1, generated_tokens=1) for done in (10, 0))

    def of(outcome: Outcome | None, step: str = "concurrent") -> Finding:
        marks = (
            Mark(at_seconds=1_000.0, step=step, cycle=0, phase="offer", workload=workload),
            Mark(at_seconds=1_001.0, step=step, cycle=0, phase="release", outcome=outcome),
        )
        return verdict(replace(seen(*[engine()] * 4), marks=marks))

    assert ["ok", "unknown", "unknown", "unknown"] == [
        of(served).status,
        of(lost).status,
        of(None).status,
        of(served, step="long_context").status,
    ]


def test_what_a_waiting_queue_shows_is_told_with_its_units() -> None:
    """Two engines: requests that run are added up, usage and queue are the highest, capacity is both pools'."""
    # 99 of 100 blocks held on one engine with 2 and then 5 waiting, and 10 on the other
    pools = (pool("0", usable_blocks=100), pool("1", usable_blocks=100))
    pages = [
        (holding(99, of=pools[0], running=3, waiting=waiting), replace(holding(10, of=pools[1], running=4), engine="1"))
        for waiting in (2, 5, 3)
    ]
    actual = verdict(seen(*pages), Facts(pools=pools))

    # 200 blocks of 16 tokens
    assert "suspect" == actual.status
    assert [
        ("preemptions", 0, "requests", "engine"),
        ("max_waiting", 5, "requests", "engine"),
        ("max_running", 7, "requests", "engine"),
        ("max_usage", 0.99, "ratio", "engine"),
        ("capacity", 3_200, "tokens", "engine"),
        ("throughput_ratio_while_waiting", None, "ratio", "computed"),
    ] == [(one.name, one.value, one.unit, one.source) for one in actual.evidence]


def test_the_first_preemption_counts() -> None:
    """From 0 to 1 is one; a usage, or a number of running requests, that is not told is none."""
    pages = (engine(running=None, usage=None), engine(running=None, usage=None, preemptions=1))
    actual = verdict(seen(*pages))
    assert "fault" == actual.status
    assert {"preemptions": 1, "max_running": 0, "max_usage": 0.0}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    ("pools", "capacity", "told"),
    [
        ((pool(usable_blocks=100),), 1_600, "2 of 4"),
        ((pool(usable_blocks=96),), 1_536, "2 of 4"),
        ((pool(usable_blocks=95),), 1_520, "1 of 4"),
        ((pool(usable_blocks=900),), 14_400, "4 of 4"),
        ((pool(usable_blocks=48), pool("1", usable_blocks=143)), 3_056, "3 of 4"),
        ((pool(usable_blocks=100, sliding_window_tokens=64),), None, None),
        ((pool(usable_blocks=100), pool("1", usable_blocks=100, sliding_window_tokens=64)), None, None),
        ((), None, None),
    ],
    ids=["hundred blocks", "to the block", "one less", "all", "two engines", "windowed", "one windowed", "no pool"],
)
def test_how_many_of_our_requests_the_pools_hold(pools: tuple[KvPool, ...], capacity: int | None, told: str) -> None:
    """A request of 512 and 256 tokens stores 767, which are 48 blocks of 16; windowed layers hold another number."""
    workload = Workload(requests=4, prompt_tokens=512, max_tokens=256)
    mark = Mark(at_seconds=1_000.0, step="concurrent", cycle=0, phase="offer", workload=workload)
    timeline = replace(seen(engine(), engine(preemptions=1)), marks=(mark,))
    actual = verdict(timeline, Facts(pools=pools))
    assert capacity == evidence(actual)["capacity"]
    assert told in actual.summary if told else "of 4" not in actual.summary


@pytest.mark.parametrize("requests", [0, None])
def test_without_requests_of_ours_nothing_is_said_of_them(requests: int | None) -> None:
    """A step that offered nothing, or whose load is not known, sets no measure."""
    workload = None if requests is None else Workload(requests=requests, prompt_tokens=512, max_tokens=1)
    mark = Mark(at_seconds=1_000.0, step="concurrent", cycle=0, phase="offer", workload=workload)
    verdict(replace(seen(engine(), engine(preemptions=1)), marks=(mark,)))


FINE, QUEUE = (
    replace(holding(held, of=HUNDRED.pools[0], running=3, waiting=waiting), preemptions_total=0)
    for held, waiting in ((60, 0), (99, 9))
)

MINUTES = [FINE] * 11, [QUEUE] * 11
"""Ten minutes without a queue, and ten with one."""


def share(*stretches: tuple[Sequence[Engine], int, int], every_seconds: float = 60.0) -> float | str | None:
    """Work while requests wait over other times, by pages and what each adds in prompt and generated tokens."""
    samples: list[Sample] = []
    prompt = generated = 0
    for pages, prompt_tokens, generated_tokens in stretches:
        for page in pages:
            prompt, generated = prompt + prompt_tokens, generated + generated_tokens
            one = replace(page, prompt_tokens_total=prompt, generation_tokens_total=generated)
            samples.append(Sample(at_seconds=every_seconds * len(samples), engines=(one,)))
    return evidence(verdict(Timeline(samples=tuple(samples)), HUNDRED))["throughput_ratio_while_waiting"]


@pytest.mark.parametrize(
    ("tokens", "status"),
    [
        (500, "suspect"),
        (499, "fault"),
        (100, "fault"),
    ],
    ids=["half", "less than half", "a tenth"],
)
def test_less_than_half_of_the_work_is_a_collapse(tokens: int, status: str) -> None:
    """Exactly half of it is a long queue."""
    # 1,000 tokens a minute, and then so many behind a queue
    pages = [(one, 1_000) for one in MINUTES[0]] + [(one, tokens) for one in MINUTES[1]]
    samples: list[Sample] = []
    done = 0
    for number, (page, more) in enumerate(pages):
        done += more
        samples.append(Sample(at_seconds=60.0 * number, engines=(replace(page, generation_tokens_total=done),)))
    actual = verdict(Timeline(samples=tuple(samples)), HUNDRED)

    found = evidence(actual)["throughput_ratio_while_waiting"]
    assert status == actual.status
    assert pytest.approx(tokens / 1_000) == found


TEN_MINUTES, NINE_MINUTES = 11, 10
"""Pages, a minute apart."""


@pytest.mark.parametrize(
    ("fine", "queue", "worked", "every_seconds", "expected"),
    [
        (TEN_MINUTES, TEN_MINUTES, (600, 400), 60.0, 0.4),
        (TEN_MINUTES, NINE_MINUTES, (600, 400), 60.0, None),
        (NINE_MINUTES, TEN_MINUTES, (600, 400), 60.0, None),
        (TEN_MINUTES, TEN_MINUTES, (0, 0), 60.0, None),
        (TEN_MINUTES, TEN_MINUTES, (600, 400), 90.0, 0.4),
        (TEN_MINUTES, TEN_MINUTES, (600, 400), 90.1, None),
    ],
    ids=["ten minutes each", "queue of nine", "nine without", "no work", "90 s apart", "further apart"],
)
def test_work_is_compared_over_ten_minutes_of_either(
    fine: int, queue: int, worked: tuple[int, int], every_seconds: float, expected: float | None
) -> None:
    """Prompt and generated tokens together, whichever comes first; pages more than 90 s apart do not hang together."""
    # 400 tokens a page behind a queue
    stretches = (MINUTES[0][:fine], *worked), (MINUTES[1][:queue], 300, 100)
    for order in (stretches, stretches[::-1]):
        actual = share(*order, every_seconds=every_seconds)
        assert actual is None if expected is None else pytest.approx(expected) == actual


def mixed(*between: Engine) -> float | str | None:
    """The share where so many tokens of other pages lie between ten minutes of either kind."""
    return share((MINUTES[0], 500, 500), (between, 9_000, 9_000), (MINUTES[1], 100, 100))


def test_minutes_that_are_neither_are_left_out() -> None:
    """A queue while there is room, an idle server, a change from one to the other: none is compared."""
    behind_a_prefill = replace(FINE, requests_waiting=2)
    idle = replace(FINE, requests_running=0, kv_usage_ratio=0.0)
    assert [pytest.approx(0.2)] * 3 == [
        mixed(*pages) for pages in ([behind_a_prefill] * 5, [idle] * 5, [QUEUE, FINE, QUEUE, behind_a_prefill])
    ]


def test_an_engine_that_counts_anew_has_no_work_in_between() -> None:
    """A restart, another set of engines, or a counter that is not there: what was done is not known."""

    # A thousand tokens a minute, then two hundred behind a queue, and something else in one minute of those
    def of(label: str = "0", *, told: bool = True, restart: bool = False) -> float | str | None:
        samples, done = [], 100
        for number, page in enumerate([*MINUTES[0], *MINUTES[1], *MINUTES[1]]):
            odd = number == 15
            done = 0 if odd and restart else done + (1_000 if page is FINE else 200)
            counted = None if odd and not told else done
            one = replace(page, engine=label if odd else "0", generation_tokens_total=counted, prompt_tokens_total=None)
            samples.append(Sample(at_seconds=60.0 * number, engines=(one,)))
        pools = (HUNDRED.pools[0], replace(HUNDRED.pools[0], engine="7"))
        found = evidence(verdict(Timeline(samples=tuple(samples)), Facts(pools=pools)))
        return found["throughput_ratio_while_waiting"]

    assert [pytest.approx(0.2)] * 4 == [of(), of(restart=True), of(told=False), of("7")]


def test_work_of_all_engines_counts_where_one_of_them_has_a_queue() -> None:
    """A second engine that is idle, or works on, beside the one whose pool is full."""
    # 1,000 tokens a minute, then 200 while the first engine has a queue
    samples: list[Sample] = []
    done = 0
    for page in (*MINUTES[0], *MINUTES[1]):
        done += 1_000 if page is FINE else 200
        first = replace(page, generation_tokens_total=done)
        samples.append(Sample(at_seconds=60.0 * len(samples), engines=(first, engine(label="1"))))
    pools = (HUNDRED.pools[0], replace(HUNDRED.pools[0], engine="1"))
    actual = verdict(Timeline(samples=tuple(samples)), Facts(pools=pools))

    assert "fault" == actual.status
    assert pytest.approx(0.2) == evidence(actual)["throughput_ratio_while_waiting"]
