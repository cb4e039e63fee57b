"""Collapsing prefix-cache hits, as leak.kv_blocks distinguishes them from a change of traffic."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import only, rows
from tests.builders.values import engine, pool


def of_readings(*pages: Engine) -> Finding:
    """The rule's one finding on samples of one engine, half a minute apart."""
    timeline = Timeline(samples=tuple(Sample(at_seconds=at * 30.0, engines=(one,)) for at, one in enumerate(pages)))
    return only(judge, timeline, Facts(pools=(pool(),)))


def asked(shares: list[float], *, usage: float = 0.3, readings: int = 60, tokens: int = 20_000) -> list[Engine]:
    """Samples of a server whose prompts hit by these shares, one after the other; idle at its end."""
    pages: list[Engine] = []
    queries = hits = 0
    for share in [share for share in shares for _ in range(readings)]:
        queries, hits = queries + tokens, hits + round(share * tokens)
        page = engine(usage=usage, running=5, prompt_tokens=queries)
        pages.append(replace(page, prefix_queries_total=queries, prefix_hits_total=hits))
    return [*pages, *[replace(pages[-1], kv_usage_ratio=0.0, requests_running=0)] * 3]


FALLING = [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.04, 0.01]


def test_hits_that_fall_to_nothing_are_unknown() -> None:
    """A cache tier that lost its blocks looks like a change of traffic; from 60 % to 1 % over four hours."""
    actual = of_readings(*asked(FALLING, tokens=10_000))
    assert "unknown" == actual.status
    assert [
        ("idle_intervals", 1, "intervals", "engine"),
        ("blocks_at_first_idle", 0, "blocks", "engine"),
        ("blocks_at_last_idle", 0, "blocks", "engine"),
        ("requests_between", None, "requests", "engine"),
        ("first_hit_ratio", pytest.approx(0.6, abs=0.01), "ratio", "engine"),
        ("last_hit_ratio", pytest.approx(0.01, abs=0.001), "ratio", "engine"),
        ("prefix_queries", pytest.approx(4_800_000, abs=20_000), "tokens", "engine"),
    ] == rows(actual)


@pytest.mark.parametrize(
    "readings",
    [
        asked([0.3] * 8),
        asked([0.6, 0.1, 0.5, 0.2, 0.6, 0.1, 0.05, 0.01]),
        asked(FALLING, usage=0.95),
        asked(FALLING, tokens=100),
        asked(FALLING, readings=20),
        asked([share / 10 for share in FALLING]),
    ],
    ids=["even", "up and down", "a full pool", "next to no traffic", "within an hour and a half", "few hits"],
)
def test_hits_that_traffic_explains_are_ok(readings: list[Engine]) -> None:
    """Prompts differ from hour to hour: only a fall without an end and without another reason is reported."""
    assert "ok" == of_readings(*readings).status


@pytest.mark.parametrize("restart", [1, 100, 240, 470])
def test_a_restart_neither_makes_nor_hides_a_fall(restart: int) -> None:
    """A counter reset neither hides nor makes a fall: the hit ratio continues after it."""
    even = asked([0.3] * 8)
    before = even[restart - 1]
    again = [
        replace(
            one,
            prefix_queries_total=(one.prefix_queries_total or 0) - (before.prefix_queries_total or 0),
            prefix_hits_total=(one.prefix_hits_total or 0) - (before.prefix_hits_total or 0),
        )
        for one in even[restart:]
    ]

    assert "ok" == of_readings(*even[:restart], *again).status
