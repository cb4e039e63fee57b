"""What the isolation probe will send, what each of its requests says, and that it is bounded."""

import json
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.feeds.active.isolation_probe import FAILURES, plan_isolation
from kvdiag.feeds.active.load_generator import Speed
from kvdiag.model import Facts, KvPool, Timeline
from tests.fixtures.hostile import Peer, raw, reply
from tests.unit.feeds.active.test_active import IDLE, STREAM, page_with, run


def pool(blocks: int, block_tokens: int = 16, engine: str = "0") -> KvPool:
    """A pool with so many usable blocks."""
    return KvPool(
        engine=engine, block_tokens=block_tokens, total_blocks=blocks + 1, usable_blocks=blocks, usage_blocks=blocks
    )


def speed(tokens_per_second: float) -> Speed:
    """A server that reads so many tokens a second."""
    return Speed(first_token_seconds=0.1, tokens_per_second=20.0, prompt_tokens_per_second=tokens_per_second)


class Listener:
    """A server that answers every completion with a token, and keeps what was asked, and with which headers."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.prompt_tokens = 1000

    def completions(self, peer: Peer) -> None:
        """As many tokens as are asked for."""
        body = json.loads(peer.request_body)
        with self._lock:
            self.bodies.append(body)
            self.heads.append(peer.request_head.decode().lower())
        usage = {"completion_tokens": body["max_tokens"]}
        self.prompt_tokens += len(body["prompt"])
        peer.send(STREAM + b"data: " + json.dumps({"choices": [{}], "usage": usage}).encode() + b"\n\n")

    def page(self, peer: Peer) -> None:
        """An idle server that has counted what it was asked."""
        reply(page_with("vllm:prompt_tokens_total", f"{float(self.prompt_tokens)}"))(peer)

    def asked(self, facts: Facts, other_headers: dict[str, str]) -> Timeline:
        """What a probe leaves behind."""
        answers = {"/metrics/": self.page, "/v1/completions": self.completions}
        return run(answers, facts, probe=True, other_headers=other_headers)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The bodies without those of the warm-up."""
        return [body for body in self.bodies if body["max_tokens"] == 1]


def test_default_probe() -> None:
    """Six rounds with salts and six without; who asks second takes turns."""
    actual = plan_isolation(Facts(pools=(pool(8192),)))
    kinds = [one.probe.kind for one in actual.requests if one.probe]
    assert (30, 61_470, ()) == (len(actual.requests), actual.tokens, actual.notes)
    assert {6} == set(Counter(kinds).values())
    assert ["first", "same_salt", "other_salt", "first_unsalted", "other_unsalted", "first", "other_salt"] == kinds[:7]


@pytest.mark.parametrize(
    ("facts", "tokens", "note"),
    [
        (Facts(pools=(pool(8192, 784),)), 4 * 784 + 1, None),
        (Facts(max_model_len_tokens=1024), 1023, "2,048 tokens scaled down to 1,023"),
        (Facts(pools=(pool(128),)), 512, "2,048 tokens scaled down to 512"),
    ],
    ids=["large blocks", "short context", "small pool"],
)
def test_prompt_is_fitted(facts: Facts, tokens: int, note: str | None) -> None:
    """Prompts hold whole blocks, which are large in hybrid models, and are cut to what context and pool admit."""
    actual = plan_isolation(facts)
    assert {tokens} == {one.prompt_tokens for one in actual.requests}
    assert (note is None) == (actual.notes == ())
    assert note is None or note in actual.notes[0]


@given(
    st.integers(1, 200_000),
    st.integers(1, 4096),
    st.none() | st.integers(2, 200_000),
    st.none() | st.floats(1.0, 1e7).map(speed),
)
def test_load_is_bounded(blocks: int, block_tokens: int, longest: int | None, measured: Speed | None) -> None:
    """For every server: thirty requests, each small enough to be admitted, a round of which fits in the pool."""
    facts = Facts(max_model_len_tokens=longest, pools=(pool(blocks, block_tokens),))
    actual = plan_isolation(facts, measured)
    prompt = actual.requests[0].prompt_tokens
    assert 30 == len(actual.requests)
    assert 1 <= prompt <= max(2048, 4 * block_tokens + 1)
    assert 4 * prompt <= blocks * block_tokens or prompt == 1
    assert longest is None or prompt + 1 <= longest
    assert measured is None or prompt == 1 or 30 * prompt <= 60.0 * measured.prompt_tokens_per_second


def test_tenants_ask_the_same_with_what_is_theirs() -> None:
    """A round is one prompt: a salt, the same, another; then a prompt without one. The other tenant has its own key.

    Behind a data-parallel server one engine alone is asked: another would have a known prompt for new.
    """
    listener = Listener()
    two_engines = Facts(pools=(pool(8192), pool(8192, engine="1")))

    timeline = listener.asked(two_engines, {"Authorization": "Bearer key-of-b"})

    rounds = listener.rounds
    first, same, other, plain, other_plain = rounds[:5]
    assert first["prompt"] == same["prompt"] == other["prompt"] != plain["prompt"] == other_plain["prompt"]
    assert first["cache_salt"] == same["cache_salt"] != other["cache_salt"]
    assert ("cache_salt" in plain, "cache_salt" in other_plain) == (False, False)
    assert ["kvdiag-a", "kvdiag-a", "kvdiag-b", "kvdiag-a", "kvdiag-b"] == [one["user"] for one in rounds[:5]]
    keyed = ["bearer key-of-b" in head for head in listener.heads[-len(rounds) :]]
    assert keyed == [one["user"] == "kvdiag-b" for one in rounds]
    assert all("x-data-parallel-rank: 0" in head for head in listener.heads[-len(rounds) :])
    assert 12 == len({str(one["prompt"]) for one in rounds})
    spans = timeline.spans("isolation")
    assert all(span.complete and span.outcome and span.outcome.first_token_seconds for span in spans)
    assert 30 == len(spans) == len(rounds)


def test_failing_requests_end_the_probe() -> None:
    """A server that refuses the probe is not asked thirty times."""
    listener = Listener()
    failing = raw(STREAM, b'data: {"error": {"message": "no"}}\n\n')

    def answer(peer: Peer) -> None:
        (listener.completions if json.loads(peer.request_body)["max_tokens"] > 1 else failing)(peer)

    actual = run({"/metrics/": IDLE, "/v1/completions": answer}, probe=True)

    outcomes = [span.outcome for span in actual.spans("isolation")]
    assert [("no",)] * FAILURES == [one.errors for one in outcomes if one is not None]
