"""Pools of engines that report the used share alone: their size by the single request, and what is judged by it."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.blocks.by_share import with_pool_by_share
from kvdiag.diagnosis.blocks.step_accounting import tolerated_blocks
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Capabilities, Facts, Status
from tests.builders.runs import run
from tests.builders.values import pool
from tests.builders.worlds import World, facts

BLOCKS = 4096
HIDDEN = pool(block_tokens=64, usable_blocks=BLOCKS, capacity_tokens=None, max_concurrency=None)


def by_share(world: World) -> Facts:
    """What is known beforehand where the engine reports no pool."""
    return replace(facts(world), pools=(), capabilities=Capabilities(blocks=False))


def test_the_single_request_gives_the_size_of_the_pool() -> None:
    """Ten blocks of 64 tokens that take 10/4,096 of a pool are of 4,096; the diagnosis names the figure's origin."""
    world = World(pools=(HIDDEN,))
    known = with_pool_by_share(run(world), by_share(world))
    assert [BLOCKS] == [pool.usable_blocks for pool in known.pools]
    assert known.gaps[-1].reason.count("4,096") == 1


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        pytest.param(World(pools=(HIDDEN,)), {"ok"}, id="healthy"),
        pytest.param(World(pools=(HIDDEN,), leaked_blocks_per_request=4), {"fault"}, id="leak"),
        pytest.param(World(pools=(HIDDEN,), held_at_start_blocks=50), {"suspect"}, id="a steady share"),
    ],
)
def test_a_run_is_judged_by_share(world: World, expected: set[Status]) -> None:
    """Blocks that stay are a fault, a share that stood before and does not grow is suspect, as `serve` has it."""
    judged = diagnose(run(world), by_share(world))
    assert expected == {finding.status for finding in judged.findings if finding.id == "leak.kv_blocks"}
    assert {judged.worst} == expected


def test_a_measured_size_is_less_exact_than_a_reported_one() -> None:
    """A healthy run: by a single request of 30 blocks that shows 31, 740 blocks of ten requests look like 755."""
    world = World(pools=(HIDDEN,))
    limits = DEFAULT_LIMITS
    assert tolerated_blocks(10, 740, facts(world), limits) == 10
    assert tolerated_blocks(10, 740, by_share(world), limits) >= 740 / 30


def test_a_pool_that_is_reported_or_invisible_is_left_alone() -> None:
    """Where the engine reports its pool, or no share, or counts a cache as used, nothing is inferred."""
    world = World(pools=(HIDDEN,))
    hidden = (Capabilities(blocks=False, usage=False), Capabilities(blocks=False, returns=False))
    for known in (facts(world), *(replace(by_share(world), capabilities=one) for one in hidden)):
        assert known == with_pool_by_share(run(world), known)
