"""What a soak will offer, and that it is given up where it cannot be judged any more."""

import json
import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.active.load_generator import Speed
from kvdiag.feeds.active.soak_plan import (
    LOAD_SHARE,
    MAX_PAIRS,
    MAX_SECONDS,
    MIN_PAIRS,
    MIN_PROMPT_TOKENS,
    MIN_SECONDS,
    SoakPlan,
    plan_soak,
)
from kvdiag.feeds.active.step_runner import SPOILT_CYCLES
from kvdiag.model import Capabilities, Facts, KvPool, MemoryProfile, Timeline
from tests.builders.allocation_profiles import profile
from tests.builders.answers import containing, step
from tests.builders.values import MIB
from tests.fixtures.hostile import LONG_SECONDS, Answer, Peer, reply
from tests.unit.feeds.active.test_active import PAGE, STREAM, page_with, run

TWELVE_MINUTES_SECONDS = 720.0

lengths = st.integers(int(MIN_SECONDS), int(MAX_SECONDS)).map(float)
speeds = st.none() | st.builds(
    Speed,
    first_token_seconds=st.floats(0.001, 60.0),
    tokens_per_second=st.floats(0.1, 1e4),
    prompt_tokens_per_second=st.floats(1.0, 1e6),
)


def pools(blocks: int) -> tuple[KvPool, ...]:
    """A pool with so many usable blocks of 16 tokens."""
    return (KvPool(engine="0", block_tokens=16, total_blocks=blocks + 1, usable_blocks=blocks, usage_blocks=blocks),)


def test_default_soak() -> None:
    """Twelve minutes: thirty pairs, of which five repeat their contents, the warm-up's largest shape first."""
    actual = plan_soak(TWELVE_MINUTES_SECONDS, Facts())
    assert (60, 12.0, 720.0) == (len(actual.cycles), actual.cycle_seconds, actual.seconds)
    assert [16, 8, 4] == [load.requests for load in actual.warmup]
    assert 5 == sum(load.repeated for load in actual.cycles)
    assert (340, 701_760) == (actual.requests, actual.tokens)


def test_a_soak_of_late_figures_is_as_long_as_its_cycles_need() -> None:
    """Each waits until its tokens were counted and the usage is of the time after them; the note says how long."""
    late = Facts(capabilities=Capabilities(late_seconds=11.0, renewed_seconds=10.0))
    actual = plan_soak(MIN_SECONDS, late)
    assert (MIN_PAIRS, True) == (len(actual.cycles) // 2, 21.0 < (1 - LOAD_SHARE) * actual.cycle_seconds < 25.0)
    assert 1 + len(plan_soak(MIN_SECONDS, Facts()).notes) == len(actual.notes)
    assert 1800.0 == plan_soak(1800.0, late).seconds


@given(lengths, speeds, st.integers(1, 100_000), st.none() | st.integers(64, 200_000))
def test_plan_is_bounded(seconds: float, speed: Speed | None, blocks: int, longest: int | None) -> None:
    """For every server a soak has its length, enough cycles, and limits on requests and prompts."""
    actual = plan_soak(seconds, Facts(max_model_len_tokens=longest, pools=pools(blocks)), speed)
    assert seconds == pytest.approx(actual.seconds)
    loads = actual.cycles[1::2]
    assert len(loads) <= MAX_PAIRS
    assert sum(not load.repeated for load in loads) >= DEFAULT_LIMITS.soak.cycles + 2
    assert {0} == {load.requests for load in actual.cycles[::2]}
    assert {load.requests for load in loads} <= {4, 8, 16}
    assert all(1 <= load.prompt_tokens <= 2048 for load in loads)
    if longest is not None:
        assert all(load.prompt_tokens + load.max_tokens <= longest for load in loads)


@given(lengths, st.integers(500, 100_000))
def test_largest_dose_fits_in_the_pool(seconds: float, blocks: int) -> None:
    """No request of a soak has to queue, since a queue would be part of the measurement."""
    load = plan_soak(seconds, Facts(pools=pools(blocks))).warmup[0]
    each = -(-(load.prompt_tokens + load.max_tokens) // 16)
    assert load.requests * each <= blocks or load.prompt_tokens == MIN_PROMPT_TOKENS


@given(lengths)
def test_doses_are_permuted(seconds: float) -> None:
    """Each dose once in three loads of new content, and no order twice in a row."""
    doses = [load.requests // 4 for load in plan_soak(seconds, Facts()).cycles if load.requests and not load.repeated]
    triples = [tuple(doses[place : place + 3]) for place in range(0, len(doses) - 2, 3)]
    assert {(1, 2, 4)} == {tuple(sorted(triple)) for triple in triples}
    assert all(one != other for one, other in pairwise(triples))


def test_slow_server_gets_shorter_prompts() -> None:
    """Prompts longer than the server can process within a cycle are shortened, and the plan reports it."""
    speed = Speed(first_token_seconds=1.0, tokens_per_second=20.0, prompt_tokens_per_second=500.0)
    actual = plan_soak(TWELVE_MINUTES_SECONDS, Facts(), speed)
    assert 150 == actual.cycles[1].prompt_tokens
    assert (containing("prompt of 2,048", "to 150:"),) == actual.notes


class Company:
    """A server that answers at once and gets another client's requests after the first loads of the soak."""

    def __init__(self, alone_for: int) -> None:
        """Alone for so many requests."""
        self._alone_for = alone_for
        self._lock = threading.Lock()
        self.loads = 0

    def completions(self, peer: Peer) -> None:
        """As many tokens as are asked for."""
        with self._lock:
            self.loads += 1
        wanted = int(json.loads(peer.request_body)["max_tokens"])
        peer.send(STREAM)
        for count in range(1, wanted + 1):
            peer.send(
                b"data: " + json.dumps({"choices": [{}], "usage": {"completion_tokens": count}}).encode() + b"\n\n"
            )

    def page(self, peer: Peer) -> None:
        """The metrics of an idle server, or of one on which another client's request waits."""
        with self._lock:
            waiting = self.loads > self._alone_for
        answer: Answer = reply(page_with("vllm:num_requests_waiting", f"{float(100 * waiting)}") if waiting else PAGE)
        answer(peer)


def test_other_traffic_ends_the_soak() -> None:
    """A few spoilt cycles in a row are enough: minutes more would be as much in vain, and the verdict says why."""
    company = Company(alone_for=2 + 28 + 4)
    facts = Facts(max_model_len_tokens=4096)
    soak = partial(plan_soak, MIN_SECONDS, facts, cycle_seconds=0.5)
    answers = {"/metrics/": company.page, "/v1/completions": company.completions}
    timeline = run(answers, facts, steps=1, soak=soak, silence_seconds=LONG_SECONDS)
    assert 3 + SPOILT_CYCLES >= len(timeline.spans("soak"))
    result = step(diagnose(timeline, facts), "soak")
    assert "unknown" == result.status
    assert containing("12 are needed", "other traffic") == result.summary


def test_server_that_is_lost_after_its_profile_keeps_it() -> None:
    """The profile is made, and then nothing answers any more: what there is by then is in the timeline."""
    server, lost = Company(alone_for=10_000), threading.Event()

    def page(peer: Peer) -> None:
        if not lost.is_set():
            server.page(peer)

    async def profiled(_: Timeline) -> tuple[MemoryProfile, ...]:
        lost.set()
        return (profile(process=MIB, traced=MIB),)

    def soak(_: Speed | None) -> SoakPlan:
        return replace(plan_soak(MIN_SECONDS, Facts(max_model_len_tokens=4096), cycle_seconds=0.5), cycles=())

    answers = {"/metrics/": page, "/v1/completions": server.completions}
    timeline = run(answers, Facts(max_model_len_tokens=4096), steps=1, soak=soak, profile=profiled)
    assert [1] == [len(one.profiles) for one in timeline.samples if one.profiles]
