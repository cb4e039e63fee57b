"""leak.kv_blocks of an engine that reports the used share of its pool, and no size (LMDeploy)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules.leak_kv_blocks import judge
from kvdiag.model import Capabilities, Engine, Facts, Gap, Sample, Timeline
from tests.builders.answers import evidence, only
from tests.builders.values import pool

SHARE = Facts(capabilities=Capabilities(blocks=False))


def watched(*usages: float | None) -> Timeline:
    """Idle intervals with these shares in use at their ends, and ten requests between each two."""
    samples = []
    for place, usage in enumerate(usages):
        idle = Engine(
            engine="0",
            kv_usage_ratio=usage,
            requests_running=0,
            requests_waiting=0,
            requests_finished_total=10 * place,
        )
        for index, one in enumerate((replace(idle, requests_running=3, kv_usage_ratio=0.5), idle, idle, idle)):
            samples.append(Sample(at_seconds=100.0 * place + 10 * index, engines=(one,)))
    return Timeline(samples=tuple(samples))


@pytest.mark.parametrize(
    ("usages", "status"),
    [
        pytest.param((0.0, 0.0), "ok", id="empty"),
        pytest.param((0.0, 0.02, 0.03), "fault", id="grows"),
        pytest.param((0.02, 0.02), "suspect", id="stays"),
        pytest.param((0.0, 0.05, 0.02), "unknown", id="being released"),
        pytest.param((None, None), "unknown", id="not reported"),
    ],
)
def test_a_share_that_stays_in_use_while_idle_is_lost(usages: Sequence[float | None], status: str) -> None:
    """With caching off an idle pool is empty: what grows there over idle intervals is no longer released."""
    assert status == only(judge, watched(*usages), SHARE).status


def test_a_share_has_its_figures() -> None:
    """The least and the last share, also of requests that were too short to show as running."""
    assert (3, 0.0, 0.03) == tuple(evidence(only(judge, watched(0.0, 0.02, 0.03), SHARE)).values())
    unseen = [one for one in watched(0.0, 0.02, 0.03).samples if one.engines_idle]
    assert (1, 0.0, 0.03) == tuple(evidence(only(judge, Timeline(samples=tuple(unseen)), SHARE)).values())


@pytest.mark.parametrize("hidden", [Capabilities(blocks=False, returns=False), Capabilities(blocks=False, usage=False)])
def test_a_share_that_counts_caches_proves_nothing(hidden: Capabilities) -> None:
    """Cached prefixes count as used where prefix caching is on, or its setting is not known."""
    assert "unknown" == only(judge, watched(0.0, 0.02, 0.03), replace(SHARE, capabilities=hidden)).status


def test_an_idle_server_without_usage_is_not_said_to_be_busy() -> None:
    """Dynamo's front end counts requests, and no blocks: its gap says where to find the usage."""
    gap = Gap("engine", "absent", "ask a worker")
    samples = [replace(one, gaps=(gap,)) for one in watched(None, None).samples if one.engines_idle]
    found = only(judge, Timeline(samples=tuple(samples)), Facts(pools=(pool(),)))
    assert ("unknown", gap.reason) == (found.status, found.summary)
