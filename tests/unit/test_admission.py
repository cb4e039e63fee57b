"""Admission advice: room for what everybody will still need, and no promise where something is not known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.admission import ADMISSION_LIMITS, Advice, Wish, advise
from kvdiag.model import Engine, Facts, Lengths
from tests.builders.values import engine, holding, pool
from tests.quality.bench.admission_replay import arrivals, replay

KNOWN = Facts(max_model_len_tokens=8192, pools=(pool(usable_blocks=1000, max_concurrency=None),))
USUAL = Lengths(upper_tokens=(100.0, 200.0, math.inf), counts=(50, 50, 0), mean_prompt_tokens=160.0)
WISH = Wish(prompt_tokens=160, max_tokens=1000)


def asked(
    *engines: Engine,
    wish: Wish = WISH,
    facts: Facts = KNOWN,
    lengths: Lengths | None = USUAL,
    age_seconds: float = 0.5,
    promised: tuple[int, ...] = (),
) -> Advice:
    """Advice for engines in this state."""
    return advise(wish, engines=engines, age_seconds=age_seconds, facts=facts, lengths=lengths, promised=promised)


def held(blocks: int, *, running: int, waiting: int = 0) -> Engine:
    """An engine of the known pool."""
    return holding(blocks, of=KNOWN.pools[0], running=running, waiting=waiting)


def test_there_is_room_for_what_all_will_need() -> None:
    """A request is admitted where all requests' final lengths fit next to the reserve; the numbers add up to that."""
    told = asked(held(150, running=10))
    # One of 160 tokens and at most 180 of output counts with 22 blocks of 16
    assert "admit" == told.decision
    assert (850, 22, 180, 50) == (told.free_blocks, told.request_blocks, told.output_tokens, told.reserve_blocks)


@pytest.mark.parametrize(
    ("reading", "promised", "decision", "told"),
    [
        pytest.param(held(940, running=60), (), "wait", "blocks short", id="a full pool"),
        pytest.param(
            held(990, running=60, waiting=100),
            (),
            "shed",
            "more than the whole pool",
            id="a queue as large as the pool",
        ),
        pytest.param(held(100, running=1), (600, 600), "shed", "already need 1,200 blocks", id="promises beyond it"),
    ],
)
def test_what_has_no_room_waits_or_is_told_to_go(
    reading: Engine, promised: tuple[int, ...], decision: str, told: str
) -> None:
    """A request that would wait for a whole turnover of the pool, counting those just admitted, is shed at once."""
    advice = asked(reading, promised=promised)
    assert decision == advice.decision
    assert told in advice.reason


def test_nothing_else_runs() -> None:
    """On an idle server even a request that leaves no reserve is admitted, since it would wait forever."""
    assert "admit" == asked(held(0, running=0), wish=Wish(prompt_tokens=7000, max_tokens=1000)).decision


@pytest.mark.parametrize(
    ("wish", "facts", "told"),
    [
        (Wish(prompt_tokens=8000, max_tokens=200), KNOWN, "max_model_len"),
        (Wish(prompt_tokens=17_000, max_tokens=1), replace(KNOWN, max_model_len_tokens=None), "never be served"),
    ],
)
def test_what_can_never_be_served_is_shed(wish: Wish, facts: Facts, told: str) -> None:
    """Waiting would not help."""
    advice = asked(held(0, running=0), wish=wish, facts=facts)
    assert "shed" == advice.decision
    assert told in advice.reason


@pytest.mark.parametrize(
    ("engines", "facts", "age_seconds", "told"),
    [
        ((), KNOWN, 0.0, "does not answer"),
        ((held(0, running=0),), KNOWN, ADMISSION_LIMITS.stale_seconds + 1.0, "6 s old"),
        ((held(0, running=0),), replace(KNOWN, pools=()), 0.0, "report its KV pool"),
        ((engine(label="1"),), KNOWN, 0.0, "engine 1 does not report"),
        ((engine(usage=None),), KNOWN, 0.0, "KV usage"),
        ((engine(running=None),), KNOWN, 0.0, "KV usage"),
        ((replace(engine(), asleep=True),), KNOWN, 0.0, "asleep"),
    ],
)
def test_in_doubt_it_waits(engines: tuple[Engine, ...], facts: Facts, age_seconds: float, told: str) -> None:
    """What is not known is no room."""
    advice = asked(*engines, facts=facts, age_seconds=age_seconds)
    assert "wait" == advice.decision
    assert advice.reason.startswith("unknown: ")
    assert told in advice.reason


def test_without_known_lengths_the_request_counts_whole() -> None:
    """A handful of finished requests is no distribution: what is asked for at most is counted."""
    few = Lengths(upper_tokens=(100.0,), counts=(ADMISSION_LIMITS.min_finished - 1,))
    for lengths in (None, few):
        told = asked(held(0, running=0), lengths=lengths)
        assert (1000, math.ceil(1160 / 16)) == (told.output_tokens, told.request_blocks)


def test_promises_count_until_they_are_seen() -> None:
    """Two clients that ask between two samples do not get the same room twice."""
    assert "admit" == asked(held(900, running=1)).decision
    assert "wait" == asked(held(900, running=1), promised=(40,)).decision


def test_the_fullest_of_several_engines_counts() -> None:
    """Which one the request comes to is not known."""
    two = replace(
        KNOWN,
        pools=(pool(usable_blocks=1000, max_concurrency=None), pool("1", usable_blocks=1000, max_concurrency=None)),
    )
    full = replace(held(940, running=60), engine="1")
    told = asked(held(0, running=0), full, facts=two)
    assert ("wait", "1") == (told.decision, told.engine)


def test_lengths_of_an_even_bucket() -> None:
    """Lengths even in 0 to 100: mean 50, median 50, and beyond 50 a quarter of the mean is left."""
    even = Lengths(upper_tokens=(100.0,), counts=(100,))
    assert 50.0 == pytest.approx(even.mean_tokens(1000))
    assert 50 == even.quantile_tokens(0.5, 1000)
    assert 12.5 == pytest.approx(even.beyond_tokens(50.0, 1000))
    # Requests without a prompt grow before they finish: (h + t) (1 - t/100)^2 at h = 0 is largest at t = 100/3.
    assert 100 / 3 * 4 / 9 == pytest.approx(even.peak_growth_tokens(0.0, 1000), rel=0.01)
    # Long prompts give back more than the others write.
    assert 0.0 == even.peak_growth_tokens(500.0, 1000)


def test_buckets_that_are_none_are_refused() -> None:
    """They come from outside."""
    for upper, counts in (((2.0, 1.0), (1, 1)), ((1.0,), (1, 2)), ((1.0,), (-1,)), ((math.nan,), (1,))):
        with pytest.raises(ValueError, match=r"buckets|counts"):
            Lengths(upper_tokens=upper, counts=counts)


LENGTHS = st.builds(
    lambda counts, prompt: Lengths(
        upper_tokens=(10.0, 100.0, 1000.0, math.inf), counts=tuple(counts), mean_prompt_tokens=prompt
    ),
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.none() | st.floats(1.0, 8000.0),
)


@given(
    blocks=st.integers(0, 1000),
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    prompt=st.integers(1, 8000),
    output=st.integers(1, 8000),
    lengths=st.none() | LENGTHS,
    promised=st.lists(st.integers(1, 500), max_size=5),
)
def test_who_is_admitted_fits_now(
    blocks: int,
    running: int,
    waiting: int,
    prompt: int,
    output: int,
    lengths: Lengths | None,
    promised: list[int],
) -> None:
    """For any figures, no request is admitted whose prompt does not fit next to what is held and promised."""
    told = asked(
        held(blocks, running=running, waiting=waiting),
        wish=Wish(prompt_tokens=prompt, max_tokens=output),
        lengths=lengths,
        promised=tuple(promised),
    )
    if told.decision == "admit" and (running or waiting or promised):
        assert blocks + sum(promised) + math.ceil(prompt / 16) <= 1000


@pytest.mark.parametrize("preempts", [True, False])
def test_a_recorded_minute_without_preemption_or_collapse(preempts: bool) -> None:
    """Over a minute of recorded requests, in a pool that is too small for them, no request is preempted or lost."""
    requests = [one for one in arrivals() if one.at_seconds < 60.0]
    plain = replay(requests, 1500, advised=False, preempts=preempts)
    advised = replay(requests, 1500, advised=True, preempts=preempts)
    assert plain.preemptions + plain.lost > 0
    assert (0, 0, 0) == (advised.preemptions, advised.collapses, advised.lost)
    assert len(requests) == advised.finished + advised.turned_away
    assert advised.finished > len(requests) / 2
