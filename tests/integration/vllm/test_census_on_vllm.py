"""Who holds vLLM 0.32's KV blocks, counted by the agent inside it while requests run."""

from collections.abc import Callable

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import BlockOwners, Facts, KvPool, Sample, Status, Timeline
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.fixtures.hostile import eventually
from tests.integration.vllm.meddling import Meddling
from tests.integration.vllm.side_by_side import completion
from tests.integration.vllm.traffic import other_traffic

pytestmark = pytest.mark.real_vllm


def counted(meddling: Meddling, enough: Callable[[BlockOwners], bool]) -> BlockOwners:
    """The first count that is enough; every one before has owners that add up to the pool, or the reader refuses it."""
    source = TorchAllocatorSource(meddling.published, show_request_ids=True)
    found: list[BlockOwners] = []

    def reached() -> bool:
        found.extend(source.read().block_owners or ())
        return bool(found) and enough(found[-1])

    assert eventually(reached), found[-1:]
    return found[-1]


def verdict(count: BlockOwners) -> Status:
    """The verdict of leak.kv_blocks by this count alone."""
    pool = KvPool(
        engine=count.engine,
        block_tokens=128,
        total_blocks=count.usable_blocks + 1,
        usable_blocks=count.usable_blocks,
        usage_blocks=count.usable_blocks,
    )
    sample = Sample(at_seconds=1.0, block_owners=(count,))
    findings = diagnose(Timeline(samples=(sample,)), Facts(pools=(pool,))).findings
    (found,) = [one for one in findings if one.id == "leak.kv_blocks"]
    return found.status


def test_leak_is_found_while_requests_run(meddling: Meddling) -> None:
    """A healthy pool closes; two blocks of each request that ends are orphans, with the requests that held them."""
    with other_traffic(meddling.server):
        start = counted(meddling, lambda one: one.counts > 0)
        closed = counted(
            meddling,
            lambda one: one.counts > start.counts + 5 and one.running_blocks > 0
            and one.closed_counts >= DEFAULT_LIMITS.census_counts,
        )  # fmt: skip
        with meddling.leaking(2):
            leaks = counted(meddling, lambda one: bool(one.orphaned_blocks and one.last_holders))
        # What was kept is released as the next request finishes.
        completion(meddling.server)
    assert 0 == closed.orphaned_blocks
    assert ("ok", "fault") == (verdict(closed), verdict(leaks))
    assert {300} == {one.prompt_tokens for one in leaks.last_holders}
    assert all(one.request.startswith("cmpl-") for one in leaks.last_holders)
    assert all(one.blocks <= 2 for one in leaks.last_holders)
