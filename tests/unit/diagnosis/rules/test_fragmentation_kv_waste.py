from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.fragmentation_kv_waste import judge
from kvdiag.model import Evidence, Finding
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import pool
from tests.builders.worlds import World, facts


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_requests_that_hold_far_more_than_their_tokens_are_a_fault() -> None:
    """A hundred blocks beside the 39 that 624 tokens need are more than three times as much."""
    # A server that reserves a hundred blocks more for each request
    actual = verdict(World(extra_blocks_per_request=100))
    expected = Finding(
        id="fragmentation.kv_waste",
        status="fault",
        summary=ANY_TEXT,
        evidence=(
            Evidence(name="blocks_in_use", value=139, unit="blocks", source="engine"),
            Evidence(name="blocks_needed", value=39, unit="blocks", source="computed"),
            Evidence(name="tokens_resident", value=624, unit="tokens", source="kvdiag"),
            Evidence(name="block_size", value=16, unit="tokens", source="engine"),
            Evidence(name="fill_ratio", value=624 / (139 * 16), unit="ratio", source="computed"),
        ),
    )

    assert expected == actual


def test_blocks_that_the_tokens_need_are_ok() -> None:
    """A paged engine holds no more than whole blocks."""
    # A healthy server
    actual = verdict(World())

    assert "ok" == actual.status


def test_somewhat_more_is_suspect() -> None:
    """Two blocks more for each request of 39 are worth a look, not an alarm."""
    # A server that holds two blocks more than needed
    actual = verdict(World(extra_blocks_per_request=2))

    assert "suspect" == actual.status


def test_one_block_more_for_each_request_is_the_rounding() -> None:
    """Gauge and token stream are read apart: a request may have entered its next block meanwhile."""
    # A server that holds one block more for each request
    assert "ok" == verdict(World(extra_blocks_per_request=1)).status


@pytest.mark.parametrize(
    "world",
    [
        World(pools=()),
        World(usage_told=False),
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
    actual = verdict(world)

    summary = ANY_TEXT
    assert Finding(id="fragmentation.kv_waste", status="unknown", summary=summary) == actual


def test_large_blocks_are_rounding_and_not_waste() -> None:
    """With blocks of 1,024 tokens a short request fills part of one; that is what such a pool costs."""
    # A pool of large blocks
    actual = verdict(World(pools=(pool(block_tokens=1024, usable_blocks=100),)))

    # It is told how full they are
    assert "ok" == actual.status
    assert 0 < float(evidence(actual)["fill_ratio"] or 0) < 1


def test_a_leak_is_not_waste() -> None:
    """Blocks that stay held raise the floor, against which the next load is measured."""
    # A server that leaks
    assert "ok" == verdict(World(leaked_blocks_per_request=4)).status


def test_windowed_layers_that_give_blocks_back_are_not_waste() -> None:
    """A sliding window of 1,024 tokens holds what the window touches."""
    # Such a server
    assert "ok" == verdict(World(pools=(pool(sliding_window_tokens=1024),))).status


def test_two_engines_share_the_requests() -> None:
    """Blocks are counted over all engines, tokens too."""
    # A healthy server of two engines
    assert "ok" == verdict(World(pools=(pool("0"), pool("1")), gpus=2)).status
