"""Token ids for prompts: the server's own where it tells them, safe ones where it does not."""

from __future__ import annotations

import pytest

from kvdiag.feeds.active.load_generator import DEFAULT_TOKEN_IDS, token_ids
from tests.fixtures.hostile import Answer, Hostile, endless, head, raw, reply, reply_json
from tests.unit.feeds.completions import MODEL, with_client


def test_vocabulary_is_the_servers(drill: str) -> None:
    """Token ids for prompts are those that the server's own tokenizer makes of words."""
    actual = with_client(drill, lambda client: token_ids(client, MODEL))
    assert {3 + byte for byte in b"abcdefghijklmnopqrstuvwxyz "} == set(actual)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(reply("", status=404), id="not there"),
        pytest.param(reply("<html>"), id="HTML"),
        pytest.param(reply_json([]), id="a list"),
        pytest.param(reply_json({"tokens": 5}), id="a number for tokens"),
        pytest.param(reply_json({"tokens": {"a": 1}}), id="an object for tokens"),
        pytest.param(reply_json({"tokens": []}), id="no tokens"),
        pytest.param(reply_json({"tokens": [-1, 0, 2**40, "5", 1.5, None]}), id="tokens that are none"),
        pytest.param(reply("[" * 100_000), id="nested without end"),
        pytest.param(endless(head(), b" " * 65536, limit_bytes=100 * 2**20), id="100 MB"),
        pytest.param(raw(), id="hangs up"),
    ],
)
def test_without_a_vocabulary_a_safe_one_is_used(answer: Answer) -> None:
    """A /tokenize that cannot be had, whatever it answers, leaves ids that are text in every vocabulary."""
    with Hostile({"/tokenize": answer}) as server:
        actual = with_client(server.url, lambda client: token_ids(client, MODEL))
        sent_bytes = server.sent_bytes
    assert DEFAULT_TOKEN_IDS == actual
    assert sent_bytes < 50 * 2**20


def test_vocabulary_that_never_ends_is_given_up() -> None:
    """A /tokenize that keeps sending a little is given up, and not waited for as long as it sends."""
    answer = endless(head(), b" ", pause_seconds=0.05)
    with Hostile({"/tokenize": answer}) as server:
        actual = with_client(server.url, lambda client: token_ids(client, MODEL, answer_seconds=0.3))
    assert DEFAULT_TOKEN_IDS == actual
