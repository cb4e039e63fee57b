"""Counts that follow what changed are those that a walk over all lists has, after every kind of move of the engine."""

import itertools
import random
from collections import Counter as Numbers
from collections.abc import Iterator
from typing import Any

import pytest

from kvdiag.agent.block_count import Count, Counter
from tests.unit.agent.scheduler_stand_in import Block, FullAttentionManager, Scheduler, Status

MOVES, DISTURBED = 400, 60


class SlidingWindowManager(FullAttentionManager):
    """Puts the null block in the place of what the window has passed."""


def walked(scheduler: Scheduler) -> dict[str, int]:
    """The distinct blocks of each owner, counted from nothing."""
    order = ("running", "waiting", "connector")
    owners: dict[int, str] = {}
    running = {one.request_id for one in scheduler.running}
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for name, blocks in manager.req_to_blocks.items():
            request = scheduler.requests.get(name)
            if request is None:
                continue
            owner = "running" if name in running else "connector" if request.is_finished() else "waiting"
            for block in blocks:
                if not block.is_null:
                    owners[block.block_id] = min(owner, owners.get(block.block_id, owner), key=order.index)
    return dict(Numbers(owners.values()))


def held_by_group(scheduler: Scheduler) -> list[set[int]]:
    """The blocks of each group's lists."""
    return [
        {block.block_id for blocks in manager.req_to_blocks.values() for block in blocks if not block.is_null}
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    ]


def taken(counter: Counter, scheduler: Scheduler, **how: bool) -> Count:
    """One count to its end."""

    def steps() -> Iterator[Any]:
        yield (yield from counter.take(scheduler, [], **how))

    *_, count = steps()
    assert isinstance(count, Count)
    return count


def moved(scheduler: Scheduler, rng: random.Random, number: int) -> None:
    """One move of an engine, of its own requests."""
    known = [name for name in scheduler.requests if name.startswith("request-")]
    names = [name for name in known if scheduler.requests[name] in scheduler.running]
    waiting = [name for name in known if scheduler.requests[name] not in scheduler.running]
    name = rng.choice(names) if names else None
    move = rng.choice(("start", "start", "grow", "grow", "pass", "preempt", "resume", "end", "keep", "release"))
    groups = range(len(scheduler.kv_cache_manager.coordinator.single_type_managers))
    if move == "start" and len(scheduler.pool.free) > 300:
        shared = scheduler.held(name)[: rng.choice((0, 6, 200))] if name else []
        for group in groups:
            scheduler.start(f"request-{number}", rng.randrange(1, 150), None if group else shared, group)
    elif move == "resume" and waiting and len(scheduler.pool.free) > 300:
        again = rng.choice(waiting)
        if not scheduler.requests[again].is_finished():
            for group in groups:
                scheduler.start(again, rng.randrange(1, 20), group=group)
    elif move == "release" and waiting:
        scheduler.end(rng.choice(waiting))
    elif name is None:
        return
    elif move == "grow" and scheduler.pool.free:
        scheduler.grow(name, group=rng.choice(groups))
    elif move == "pass" and len(groups) > 1:
        blocks = scheduler.held(name, rng.choice(groups[1:]))
        place = next((place for place, block in enumerate(blocks) if not block.is_null), None)
        if place is not None:
            replaced(scheduler, blocks, place, scheduler.pool.null_block)
    elif move == "preempt":
        scheduler.preempt(name)
    elif move == "keep":
        scheduler.requests[name].status = Status.FINISHED_STOPPED
        scheduler.running.remove(scheduler.requests[name])
    elif move == "end":
        scheduler.end(name)


def replaced(scheduler: Scheduler, blocks: list[Block], place: int, block: Block) -> None:
    """Put another block in a place of a list, as vLLM does, and release that which was there."""
    scheduler.pool.free_blocks([blocks[place]])
    blocks[place] = block


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_count_follows_the_engine(seed: int, groups: int) -> None:
    """Random moves, a count after some of them: owners as walked, and no block in use without one."""
    rng = random.Random(seed)  # noqa: S311 - moves, not secrets
    scheduler, counter = Scheduler(2001, groups), Counter()
    managers: list[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    managers[1:] = [SlidingWindowManager(scheduler.pool) for _ in managers[1:]]
    for number in range(MOVES):
        moved(scheduler, rng, number)
        if rng.random() < 0.5:
            count = taken(counter, scheduler)
            assert walked(scheduler) == {owner: blocks for owner, blocks in count.owners.items() if blocks}
            assert 0 == count.unowned
            assert [len(each) for each in held_by_group(scheduler)] == count.groups


@pytest.mark.parametrize("seed", range(4))
def test_lost_blocks_are_counted(seed: int) -> None:
    """Blocks that were taken for no request, after random moves, between which there was no count."""
    rng = random.Random(seed)  # noqa: S311 - moves, not secrets
    scheduler, counter = Scheduler(2001, 2), Counter()
    managers: list[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    managers[1] = SlidingWindowManager(scheduler.pool)
    lost = 0
    for number in range(MOVES):
        moved(scheduler, rng, number)
        if number % 10 == 0:
            lost += len(scheduler.pool.get_new_blocks(rng.randrange(3)))
            assert lost == taken(counter, scheduler).unowned


@pytest.mark.parametrize("seed", range(4))
def test_moves_within_a_count_leave_nothing_behind(seed: int) -> None:
    """The engine moves between the steps of some counts: the next one, which it leaves alone, is as walked."""
    rng = random.Random(seed)  # noqa: S311 - moves, not secrets
    scheduler, counter = Scheduler(2001, 3), Counter()
    managers: list[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    managers[1:] = [SlidingWindowManager(scheduler.pool) for _ in managers[1:]]
    numbers = itertools.count()
    for _ in range(DISTURBED):
        for _ in counter.take(scheduler, []):
            if rng.random() < 0.1:
                moved(scheduler, rng, next(numbers))
        count = taken(counter, scheduler)
        assert walked(scheduler) == {owner: blocks for owner, blocks in count.owners.items() if blocks}
        assert [len(each) for each in held_by_group(scheduler)] == count.groups


def test_blocks_on_their_way_are_counted_anew_each_time() -> None:
    """Frees that wait for a step are not in the next count, and leave nothing behind."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("runs", 10)
    late = scheduler.pool.get_new_blocks(200)
    scheduler.deferred_frees.append((1, late))
    first = taken(counter, scheduler)
    scheduler.deferred_frees.clear()
    scheduler.pool.free_blocks(late)
    second = taken(counter, scheduler)
    assert (200, 0, 10) == (first.owners["deferred"], second.owners["deferred"], second.owners["running"])
    assert (0, 0) == (first.unowned, second.unowned)


def test_blocks_shared_behind_others_are_found() -> None:
    """A request that begins with a block of its own and shares a later one: all are looked at."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("first", 10)
    taken(counter, scheduler)
    scheduler.start("second", 3)
    later = scheduler.held("first")[5]
    scheduler.pool.touch([later])
    scheduler.held("second").append(later)
    count = taken(counter, scheduler)
    assert (13, 0) == (count.owners["running"], count.unowned)


def test_block_that_was_copied_before_it_was_written_is_followed() -> None:
    """Another block in the midst of a list, as after a copy of a shared one: a count of all blocks has it."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("first", 10)
    scheduler.start("second", 3, shared=scheduler.held("first")[:4])
    taken(counter, scheduler)
    replaced(scheduler, scheduler.held("second"), 3, *scheduler.pool.get_new_blocks(1))
    count = taken(counter, scheduler, anew=True)
    assert (14, 0) == (count.owners["running"], count.unowned)


def test_shared_blocks_are_counted_by_their_references() -> None:
    """Lengths and references add up to the blocks in use, as requests come and end: no block is looked at."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("first", 10)
    prefix = scheduler.held("first")[:4]
    for number in range(3):
        scheduler.start(f"other-{number}", 2, shared=prefix)
    counts = [taken(counter, scheduler)]
    scheduler.end("first")
    scheduler.end("other-1")
    scheduler.grow("other-0", 3)
    counts.append(taken(counter, scheduler))
    assert [(16, 0), (11, 0)] == [(count.owners["running"], count.unowned) for count in counts]
    assert [None, None] == [count.held for count in counts]


def test_a_lost_block_does_not_hide_behind_a_shared_one() -> None:
    """Lengths that add up because one block is shared and another is lost: a look at the blocks finds it."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("first", 10)
    scheduler.start("second", 3, shared=scheduler.held("first")[:1])
    scheduler.pool.get_new_blocks(1)
    count = taken(counter, scheduler)
    assert (13, 1) == (count.owners["running"], count.unowned)


def test_an_engine_that_never_rests_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free blocks are others whenever they are read: there is no count this time, and what is known is kept."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("runs", 10)
    numbers = itertools.count()
    monkeypatch.setattr(scheduler.pool, "get_num_free_blocks", numbers.__next__)

    def steps() -> Iterator[Any]:
        yield (yield from counter.take(scheduler, []))

    *_, count = steps()
    assert count is None


def of_0_9_0(scheduler: Any) -> None:
    """One manager without a coordinator, a list of free blocks without ends of its own, and no frees that wait."""
    manager = scheduler.kv_cache_manager
    manager.single_type_manager = manager.coordinator.single_type_managers[0]
    del manager.coordinator
    of_0_9_2(scheduler)


def of_0_9_2(scheduler: Any) -> None:
    """A list of free blocks without ends of its own, and no frees that wait."""
    queue = scheduler.pool.free_block_queue
    queue.free_list_head, queue.free_list_tail = scheduler.pool.free[0], scheduler.pool.free[-1]
    del queue.fake_free_list_head, queue.fake_free_list_tail
    del scheduler.deferred_frees


def of_0_10_2(scheduler: Any) -> None:
    """No frees that wait for a step in flight: those came between 0.20 and 0.24."""
    del scheduler.deferred_frees


@pytest.mark.parametrize("shape", [of_0_9_0, of_0_9_2, of_0_10_2])
def test_older_versions_are_counted(shape: Any) -> None:
    """What the census reads in vLLM 0.9.0 to 0.31, where it is other than in 0.32."""
    scheduler, counter = Scheduler(), Counter()
    scheduler.start("runs", 10)
    scheduler.start("shares", 3, shared=scheduler.held("runs")[:4])
    shape(scheduler)
    count = taken(counter, scheduler)
    assert (13, 0) == (count.owners["running"], count.unowned)
