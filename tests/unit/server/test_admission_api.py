"""Advice for concurrent clients: promises count until the engine's metrics show them, bad questions are refused."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from kvdiag.model import Facts, Sample, Snapshot
from kvdiag.server.endpoints import MAX_PROMISES, ON_ITS_WAY_SECONDS, Admissions
from tests.builders.answers import containing
from tests.builders.values import holding, pool
from tests.unit.server.shell import shell

KNOWN = Facts(max_model_len_tokens=8192, pools=(pool(usable_blocks=1000, max_concurrency=None),))
QUERY: Mapping[str, Sequence[str]] = {"prompt_tokens": ["1600"], "max_tokens": ["1600"]}
"""200 blocks of 16 where nothing is known of lengths."""

NOW_SECONDS = 1_001.0


def shown(blocks: int, *, running: int, engines_seconds: float = 1_000.5) -> Snapshot:
    """A serving server of which so many blocks are held."""
    engine = holding(blocks, of=KNOWN.pools[0], running=running)
    return Snapshot(
        state="serving",
        facts=KNOWN,
        newest=Sample(at_seconds=engines_seconds, engines=(engine,)),
        sources=(),
        engines_seconds=engines_seconds,
    )


def test_the_same_room_is_given_once() -> None:
    """Of ten questions between two samples, as many are admitted as there is room for."""
    desk, now = Admissions(), shown(0, running=0)
    told = [desk.answer(QUERY, now, NOW_SECONDS)["decision"] for _ in range(10)]
    assert ["admit"] * 4 + ["wait"] * 6 == told


def test_a_promise_ends_when_the_page_shows_it() -> None:
    """A sample newer than the promise by the request's travel time to the engine replaces it."""
    desk = Admissions()
    assert "admit" == desk.answer(QUERY, shown(0, running=0), NOW_SECONDS)["decision"]
    # The engine is read at once, the promise still counts
    soon = shown(0, running=0, engines_seconds=NOW_SECONDS + ON_ITS_WAY_SECONDS / 2)
    assert 200 == desk.answer(QUERY, soon, NOW_SECONDS + 1.0)["promised_blocks"]
    later = shown(400, running=2, engines_seconds=NOW_SECONDS + 5.0)
    assert 0 == desk.answer(QUERY, later, NOW_SECONDS + 5.0)["promised_blocks"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda now: replace(now, state="lost"), "does not answer"),
        (lambda now: replace(now, state="starting"), "does not answer"),
        (lambda now: replace(now, engines_seconds=NOW_SECONDS - 60.0), "1 min old"),
        (lambda now: replace(now, newest=Sample(at_seconds=1_000.0)), "does not answer"),
    ],
)
def test_who_cannot_be_seen_has_no_room(changed: Callable[[Snapshot], Snapshot], words: str) -> None:
    """In doubt the advice is to wait."""
    told = Admissions().answer(QUERY, changed(shown(0, running=0)), NOW_SECONDS)
    assert "wait" == told["decision"]
    assert words in told["reason"]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"prompt_tokens": ["10"]},
        {"prompt_tokens": ["0"], "max_tokens": ["1"]},
        {"prompt_tokens": ["-1"], "max_tokens": ["1"]},
        {"prompt_tokens": ["1e3"], "max_tokens": ["1"]},
        {"prompt_tokens": ["1", "2"], "max_tokens": ["1"]},
        {"prompt_tokens": ["9" * 100], "max_tokens": ["1"]},
        {"prompt_tokens": ["\N{ARABIC-INDIC DIGIT ONE}"], "max_tokens": ["1"]},
    ],
)
def test_what_is_no_question_is_refused(query: Mapping[str, Sequence[str]]) -> None:
    """Each number once, and a number."""
    with pytest.raises(ValueError, match="tokens"):
        Admissions().answer(query, shown(0, running=0), NOW_SECONDS)


def test_a_crowd_is_bounded() -> None:
    """However many ask for little, what is remembered has an end."""
    vast = replace(KNOWN, pools=(pool(usable_blocks=10_000_000, max_concurrency=None),))
    desk, now = Admissions(), replace(shown(0, running=0), facts=vast)
    query = {"prompt_tokens": ["1"], "max_tokens": ["1"]}
    for _ in range(MAX_PROMISES):
        desk.answer(query, now, NOW_SECONDS)
    told = desk.answer(query, now, NOW_SECONDS)
    assert ("wait", containing("too many")) == (told["decision"], told["reason"])


def test_over_http() -> None:
    """The advice with its numbers, marked as not cacheable; a bad question is a 400 that names the missing input."""
    with shell(shown(100, running=1)) as serving:
        good = serving.ask("GET /api/v1/admission?prompt_tokens=160&max_tokens=160")
        bad = serving.ask("GET /api/v1/admission?prompt_tokens=160")
    told = json.loads(good.body)
    assert (200, "no-store", "admit") == (good.status, good.headers["cache-control"], told["decision"])
    assert (1000, 900, 20) == (told["usable_blocks"], told["free_blocks"], told["request_blocks"])
    assert (400, "give max_tokens once") == (bad.status, json.loads(bad.body)["error"][:20])
