from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.sim.blocks import NULL_BLOCK, BlockPool, block_hash, blocks_for


@settings(deadline=None, max_examples=50)
@given(
    total=st.integers(2, 40),
    actions=st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 50)), max_size=60),
)
def test_every_block_is_free_held_or_null(total: int, actions: list[tuple[str, int]]) -> None:
    """After any allocation, sharing and release, free, held and null block make up the pool, as the usage shows."""
    # A pool and the tables that hold its blocks
    pool = BlockPool(total)
    tables: list[list[int]] = []
    for action, number in actions:
        if action == "take" and number <= pool.free_blocks:
            tables.append(pool.take(number))
        elif action == "share" and tables:
            table = tables[number % len(tables)]
            pool.hold(table)
            tables.append(list(table))
        elif action == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        held = {block for table in tables for block in table}
        assert len(held) == pool.held_blocks
        assert total == pool.free_blocks + pool.held_blocks + 1
        assert 1 - pool.free_blocks / (total - 1) == pool.usage_ratio
        assert NULL_BLOCK not in held


def test_blocks_are_taken_in_order_of_disuse() -> None:
    """Blocks without a hash are reused first, then cached ones, a sequence's tail before its head."""
    # A pool of five, of which two sequences of two were cached, and one block was never used
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(2)
    for number, block in enumerate([*first, *second]):
        pool.publish(block, bytes([number]))
    pool.release(first)
    pool.release(second)
    assert [5, *reversed(first), *reversed(second)] == pool.take(5)


def test_a_released_prefix_is_found_again() -> None:
    """Freed blocks stay findable by their chain of hashes, as far as the chain matches."""
    # A released sequence of three cached blocks
    pool = BlockPool(10)
    chain = [b"a", b"b", b"c"]
    table = pool.take(3)
    for block, known_as in zip(table, chain, strict=True):
        pool.publish(block, known_as)
    pool.release(table)

    found = pool.find([b"a", b"b", b"x", b"c"])

    assert table[:2] == found
    assert pool.free_among(found) == 2
    pool.hold(found)
    assert (7, 2) == (pool.free_blocks, pool.held_blocks)


def test_a_block_that_is_handed_out_is_forgotten() -> None:
    """What was cached in a block is no longer found once the block has a new owner."""
    # A pool of one usable block, cached and released
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.release([block])
    pool.take(1)
    assert [] == pool.find([b"a"])


def test_without_prefix_caching_nothing_is_found() -> None:
    """A pool with prefix caching off finds nothing, with any published blocks."""
    pool = BlockPool(4, prefix_caching=False)
    pool.publish(pool.take(1)[0], b"a")
    assert [] == pool.find([b"a"])


def test_a_shared_block_is_free_after_the_last_release() -> None:
    """A block that two requests refer to is held until both have let go."""
    pool = BlockPool(4)
    table = pool.take(1)
    pool.hold(table)
    pool.release(table)
    assert 1 == pool.held_blocks
    pool.release(table)
    assert 0 == pool.held_blocks


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda pool: pool.release([NULL_BLOCK]), "block 0 is not held"),
        (lambda pool: pool.release([3]), "block 3 is not held"),
        (lambda pool: pool.take(4), "4 blocks asked for, 3 free"),
        (lambda _: BlockPool(1), "null block"),
    ],
)
def test_wrong_uses_are_refused(wrong: Callable[[BlockPool], object], reason: str) -> None:
    """Only held blocks are released, only free ones taken, and a pool has a usable block; a refusal changes nothing."""
    pool = BlockPool(4)
    with pytest.raises(ValueError, match=reason):
        wrong(pool)
    assert 3 == pool.free_blocks


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=8), st.lists(st.integers(0, 2**31), min_size=1, max_size=8))
def test_hashes_tell_tokens_parents_and_salts_apart(tokens: list[int], others: list[int]) -> None:
    """Two blocks have the same hash exactly when tokens, all tokens before them, and salt are the same."""
    parent = block_hash(b"", others)
    assert (tokens == others) == (block_hash(b"", tokens) == block_hash(b"", others))
    assert block_hash(b"", tokens) != block_hash(parent, tokens)
    assert block_hash(b"", tokens) != block_hash(b"", tokens, "salt")
    assert block_hash(b"", tokens, "salt") == block_hash(b"", tokens, "salt")


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_the_last_block_may_be_partly_empty(tokens: int, expected: int) -> None:
    """Tokens take whole blocks."""
    assert expected == blocks_for(tokens, 16)
