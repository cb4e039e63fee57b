"""One count of a vLLM scheduler's blocks: who holds the blocks of its pool at one moment, in short steps.

The lists of blocks are copied first, those of some requests in one step. The engine may work between two steps, so the
copy counts only if the pool's free list is the same before and after. The rest is counted from the copy, without haste.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Generator
from typing import Any, NamedTuple

OWNERS = ("running", "waiting", "connector", "deferred", "pinned")
"""Owners of blocks with a reference, in the order in which a block that several of them share is counted."""

STEP_BLOCKS = 200
STEP_COPIED = 2000
STEP_REQUESTS = 32
MAX_UNHASHED = 64

_request_id = operator.attrgetter("request_id")

Steps = Generator[int, None, Any]
"""Short steps of work, each with the number of blocks that it looked at."""


class Lists:
    """The lists of blocks of several requests, one after the other: few objects, which the collector must visit."""

    __slots__ = ("blocks", "ends", "group", "names", "owner")

    def __init__(self, owner: str, group: int) -> None:
        """Begin empty."""
        self.owner = owner
        self.group = group
        self.names: list[str] = []
        self.ends: list[int] = []
        self.blocks: list[Any] = []

    def end(self, name: str) -> None:
        """What was added since the last end belongs to this request."""
        self.names.append(name)
        self.ends.append(len(self.blocks))

    def holder(self, place: int) -> str | None:
        """The request that had the block at a place; `None` for blocks of no request."""
        request = bisect.bisect_right(self.ends, place)
        return self.names[request] if request < len(self.names) else None


class Count(NamedTuple):
    """Blocks of one pool at one moment: `usable`, `free`, of them `cached_free`, and by owner.

    `held` has a byte for each block, 1 where it has an owner, `lists` the blocks by request, `groups` counts each
    KV-cache group's. `referenced` are the blocks asked about that had a reference. `step` is another object after each
    step of the engine. `finished` are requests whose blocks the connector holds, `loading` those that wait for it.
    """

    usable: int
    free: int
    cached_free: int
    owners: dict[str, int]
    groups: list[int]
    held: bytearray
    lists: list[Lists]
    referenced: set[int]
    step: Any
    idle: bool
    finished: list[str]
    loading: list[str]

    @property
    def unowned(self) -> int:
        """Blocks with a reference and no owner."""
        return self.usable - self.free - sum(self.owners.values())


def take(scheduler: Any, asked: list[int]) -> Steps:
    """A `Count`, or `None` where the engine was at work meanwhile; yields after each short step.

    Raises:
        AttributeError, TypeError, ValueError: this version of vLLM keeps its blocks in another way.
    """
    pool, managers = pool_of(scheduler)
    size = _whole(pool.num_gpu_blocks, "num_gpu_blocks")
    null = getattr(pool, "null_block", None)
    before = _free_list(pool)
    lists: list[Lists] = []
    finished: list[str] = []
    loading: list[str] = []
    for _ in _copy(scheduler, managers, lists, finished, loading):
        yield 0
        # What is copied for nothing costs the engine the same.
        if not _is_same(before, _free_list(pool)):
            return None
    referenced = {one for one in asked if pool.blocks[one].ref_cnt > 0}
    idle = not scheduler.requests
    # A new set in every step (Scheduler._update_after_schedule).
    step = scheduler.finished_req_ids
    if not _is_same(before, _free_list(pool)):
        return None
    free = _whole(before[0], "free blocks")
    cached = len(pool.cached_block_hash_to_block) if getattr(pool, "enable_caching", False) else 0
    # A large pool takes seconds to count: meanwhile its scheduler may be given up.
    del scheduler
    # A byte for each block: a set of all ids would hold the interpreter whenever it grows.
    held, nulls, unhashed = bytearray(size), 0, 0
    if null is not None:
        held[null.block_id] = nulls = 1
    owners, groups = dict.fromkeys(OWNERS, 0), [0] * len(managers)
    for each in lists:
        for start in range(0, len(each.blocks), STEP_BLOCKS):
            count = 0
            for block in each.blocks[start : start + STEP_BLOCKS]:
                one = block.block_id
                if not held[one]:
                    held[one] = 1
                    count += 1
            owners[each.owner] += count
            groups[each.group] += count
            yield STEP_BLOCKS
        if cached:
            unhashed += yield from _unhashed(each)
    cached_free = min(max(cached - (sum(owners.values()) - unhashed), 0), free)
    usable = size - nulls
    return Count(usable, free, cached_free, owners, groups, held, lists, referenced, step, idle, finished, loading)


def pool_of(scheduler: Any) -> tuple[Any, list[Any]]:
    """The pool of blocks and the managers that take blocks from it, one for each KV-cache group.

    vLLM 0.9.0 has one manager; later versions have a coordinator of several. A manager may have another pool, in the
    host's memory.
    """
    manager = scheduler.kv_cache_manager
    coordinator = getattr(manager, "coordinator", None)
    pool = manager.block_pool
    managers = [manager.single_type_manager] if coordinator is None else list(coordinator.single_type_managers)
    return pool, [one for one in managers if getattr(one, "block_pool", pool) is pool]


def _free_list(pool: Any) -> tuple[Any, ...]:
    """How many blocks are free, and the first and the last of them: another one whenever blocks come or go."""
    queue = pool.free_block_queue
    first = getattr(getattr(queue, "fake_free_list_head", None), "next_free_block", None)
    last = getattr(getattr(queue, "fake_free_list_tail", None), "prev_free_block", None)
    return pool.get_num_free_blocks(), first, last


def _is_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return bool(before[0] == after[0]) and all(map(operator.is_, before[1:], after[1:]))


def _copy(scheduler: Any, managers: list[Any], lists: list[Lists], finished: list[str], loading: list[str]) -> Steps:
    """Copy the lists of all owners, and the names of requests that are finished, or wait for a connector."""
    running = set(map(_request_id, list(scheduler.running)))
    copied = {owner: [Lists(owner, group) for group in range(len(managers))] for owner in OWNERS}
    pool = scheduler.kv_cache_manager.block_pool
    since = 0
    for group, manager in enumerate(managers):
        for name in list(manager.req_to_blocks):
            owner = "running" if name in running else _owner(name, scheduler, finished, loading)
            # The blocks of a request that the scheduler has dropped are never released.
            blocks = manager.req_to_blocks.get(name) if owner else None
            if owner and blocks:
                into = copied[owner][group]
                for start in range(0, len(blocks), STEP_COPIED):
                    into.blocks += blocks[start : start + STEP_COPIED]
                    if start:
                        yield 0
                into.end(name)
                since += len(blocks) % STEP_COPIED
            since += STEP_COPIED // STEP_REQUESTS
            if since >= STEP_COPIED:
                since = 0
                yield 0
        # Both ends of a copy of a block in flight.
        for pair in list(getattr(manager, "_pending_cow_copies", ())):
            copied["pinned"][group].blocks += pair
    for _, blocks in list(getattr(scheduler, "deferred_frees", ())):
        # Those of another pool, in the host's memory, have the same ids.
        copied["deferred"][0].blocks += [one for one in blocks if getattr(one, "pool", None) in (None, pool)]
    lists += [each for owner in OWNERS for each in copied[owner] if each.blocks]


def _owner(name: str, scheduler: Any, finished: list[str], loading: list[str]) -> str | None:
    request = scheduler.requests.get(name)
    if request is None:
        return None
    if request.is_finished():
        finished.append(name)
        return "connector"
    if getattr(request.status, "name", None) == "WAITING_FOR_REMOTE_KVS":
        loading.append(name)
    return "waiting"


def _unhashed(lists: Lists) -> Steps:
    """Blocks at the ends of requests that are not in the prefix cache: partly filled ones."""
    count, start = 0, 0
    for number, end in enumerate(lists.ends):
        for place in range(end - 1, max(start, end - MAX_UNHASHED) - 1, -1):
            block = lists.blocks[place]
            if block.block_hash is not None:
                break
            count += not block.is_null
        start = end
        if number % STEP_REQUESTS == STEP_REQUESTS - 1:
            yield STEP_REQUESTS
    return count


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value
