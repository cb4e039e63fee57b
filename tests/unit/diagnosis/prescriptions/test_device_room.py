"""By how much a pool is made smaller so that the device has room, and what that costs in tokens."""

from dataclasses import replace

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.prescriptions.device_room import (
    EXPANDABLE,
    joined_holes,
    memory_won_back,
    smaller_pool,
    with_room_for,
)
from kvdiag.model import Facts, Prescription
from tests.builders.values import GIB, MIB, holding, pool, seen
from tests.unit.diagnosis.prescriptions.crowded_server import FREE_BYTES, FULL, GPU, SIX, known

LARGE = pool(pool_bytes=None)
"""Three requests of 32,768 tokens."""


def shrunk(of: Facts, needed_bytes: int = GIB) -> Prescription:
    """The prescription that frees a GiB."""
    return smaller_pool(FULL, of, DEFAULT_LIMITS, needed_bytes=needed_bytes, gain="")


def test_a_share_is_lowered_by_just_enough() -> None:
    """1 GiB of 23.5 is 0.043: from 0.92 to 0.87, the next lower hundredth, for at least 512 blocks of 2 MiB."""
    (change,) = shrunk(known(LARGE)).changes
    assert "--gpu-memory-utilization 0.87" == change.change
    assert change.free_bytes is not None
    assert change.free_bytes >= FREE_BYTES + GIB
    assert change.pool_tokens is not None
    assert 512 * 16 <= LARGE.usable_blocks * 16 - change.pool_tokens <= 605 * 16


def test_a_pool_of_given_bytes_loses_the_blocks_alone() -> None:
    """12 GiB less one: 512 blocks of 16 tokens."""
    (change,) = shrunk(known(pool())).changes
    assert f"--kv-cache-memory-bytes {(6145 - 512) * 2 * MIB}" == change.change
    assert (6144 - 512) * 16 == change.pool_tokens


def test_the_longest_request_is_shortened_with_the_pool() -> None:
    """A pool for one request of 32,768 tokens less a GiB holds none: vLLM would not start without a lower limit."""
    one = pool(usable_blocks=2100)
    (change,) = shrunk(known(one)).changes
    assert f"--kv-cache-memory-bytes {(2101 - 512) * 2 * MIB} --max-model-len {(2100 - 512) * 16}" == change.change


def test_sglangs_share_is_lowered_where_the_device_is_short() -> None:
    """The opposite direction of a pool that is too small; its value is not reported, the difference is known."""
    of = replace(known(pool(memory_fraction_ratio=None, bytes_computed=True)), engine_name="sglang")
    assert ["lower --mem-fraction-static by 0.05"] == [one.change for one in shrunk(of).changes]


def test_a_pool_smaller_than_what_is_missing_cannot_give_it() -> None:
    """1.7 GiB do not become 2 GiB of room."""
    found = shrunk(known(replace(SIX, pool_bytes=SIX.total_blocks * 2 * MIB)), 2 * GIB)
    assert ((), 1) == (found.changes, len(found.missing))


def test_a_share_whose_pool_would_hold_nothing_cannot_give_it() -> None:
    """As computed from the share alone, 2 GiB would leave fewer blocks than none."""
    found = shrunk(known(replace(SIX, pool_bytes=None, capacity_tokens=None, max_concurrency=None)), 2 * GIB)
    assert ((), 1) == (found.changes, len(found.missing))


def test_an_allocation_that_had_room_is_not_mended_by_a_smaller_pool() -> None:
    """3 GiB were free for 256 MiB: it failed for another reason, and no larger pool is prescribed."""
    found = with_room_for(FULL, known(LARGE), DEFAULT_LIMITS, 256 * MIB, 3 * GIB)
    assert ((), 1) == (found.changes, len(found.missing))


def test_missing_figures_are_named() -> None:
    """No pool, no device, no bytes of a block: each time one reason and no change."""
    nothing = seen(holding(0))
    for of, timeline in ((known(LARGE), nothing), (Facts(), FULL), (replace(known(LARGE), model_config=None), FULL)):
        found = smaller_pool(timeline, of, DEFAULT_LIMITS, needed_bytes=GIB, gain="")
        assert ((), 1) == (found.changes, len(found.missing))


def test_holes_are_joined_by_a_variable() -> None:
    """Torch reads it at the start of the server."""
    assert [EXPANDABLE] == [one.change for one in joined_holes(3 * GIB).changes]
    assert GPU.memory is not None


def test_memory_that_is_not_the_pools_is_worth_tokens() -> None:
    """3 GiB are 1,536 blocks of 2 MiB: 24,576 tokens more than the pool has."""
    (change,) = memory_won_back(known(pool()), change="stop it", cost="its work", size_bytes=3 * GIB).changes
    assert 6144 * 16 + 24_576 == change.pool_tokens


def test_memory_without_the_bytes_of_a_block_is_bytes_alone() -> None:
    """What to do stays; its worth in tokens is the missing figure, and so where no pool is reported."""
    for of in (replace(known(LARGE), model_config=None), Facts()):
        found = memory_won_back(of, change="stop it", cost="its work", size_bytes=3 * GIB)
        assert (["stop it"], [None], 1) == (
            [one.change for one in found.changes],
            [one.pool_tokens for one in found.changes],
            len(found.missing),
        )


def test_a_failure_without_its_figures_has_no_fix() -> None:
    """Both the bytes requested and those free are needed; with them 2.5 GiB and 300 MB are made free."""
    for asked, free in ((None, GIB), (3 * GIB, None)):
        found = with_room_for(FULL, known(pool()), DEFAULT_LIMITS, asked, free)
        assert ((), 1) == (found.changes, len(found.missing))
    (change,) = with_room_for(FULL, known(pool()), DEFAULT_LIMITS, 3 * GIB, GIB // 2).changes
    assert change.free_bytes is not None
    assert change.free_bytes - FREE_BYTES >= 5 * GIB // 2 + DEFAULT_LIMITS.headroom_bytes
