"""What a vLLM scheduler and its pool of blocks have at one moment, read in short steps.

The engine may work between two steps: a moment counts only if the pool's free list is the same before and after.
"""

from __future__ import annotations

import collections
import operator
from typing import Any

from .block_tables import DEFERRED, PINNED, Group, Now, Steps

STEP_ASKED = 64

MAX_TORN = 3
"""Moments in a row that the engine disturbed before it has to wait for one."""


class Moment:
    """Begins with the free list; `torn` where the engine worked before the end of `complete`."""

    def __init__(self, scheduler: Any) -> None:
        """Read the free list.

        Raises:
            AttributeError, TypeError: this version of vLLM keeps its blocks in another way.
        """
        self._scheduler = scheduler
        self._pool, self.managers = pool_of(scheduler)
        self.null = getattr(self._pool, "null_block", None)
        self._free_list = _free_list(self._pool)
        self.groups: list[Now] = []
        self.finished: list[str] = []
        self.loading: list[str] = []
        self.without_request: list[tuple[int, list[Any]]] = []
        self.referenced: set[int] = set()
        self.unhashed = 0
        self.free = self.cached = 0
        self.step: Any = None
        self.idle = False
        self.torn = False

    def read_groups(self, groups: list[Group]) -> Steps:
        """Read the lists of requests; RuntimeError where a table grows meanwhile."""
        for group, manager in zip(groups, self.managers, strict=True):
            self.groups.append((yield from group.read(manager.req_to_blocks, self.null)))
            yield

    def complete(self, asked: list[int]) -> Steps:
        """Read what is not in lists of requests, and which of the blocks asked about have a reference."""
        for manager in self.managers:
            # Both ends of a copy of a block in flight.
            self.without_request += [(PINNED, list(pair)) for pair in list(getattr(manager, "_pending_cow_copies", ()))]
        for _, blocks in list(getattr(self._scheduler, "deferred_frees", ())):
            # Those of another pool, in the host's memory, have the same ids.
            own = [one for one in blocks if getattr(one, "pool", None) in (None, self._pool)]
            self.without_request.append((DEFERRED, own))
        for start in range(0, len(asked), STEP_ASKED):
            looked_at = asked[start : start + STEP_ASKED]
            self.referenced.update(one for one in looked_at if self._pool.blocks[one].ref_cnt > 0)
            yield
        self.free = whole(self._free_list[0], "free blocks")
        enabled = getattr(self._pool, "enable_caching", False)
        self.cached = len(self._pool.cached_block_hash_to_block) if enabled else 0
        self.idle = not self._scheduler.requests
        # A new set in every step (Scheduler._update_after_schedule).
        self.step = self._scheduler.finished_req_ids
        self.torn = not _is_same(self._free_list, _free_list(self._pool))
        # A large pool takes seconds to count at first: meanwhile its scheduler may be given up.
        del self._scheduler, self._pool


def moment_of(scheduler: Any, groups: list[Group], asked: list[int]) -> Steps:
    """A `Moment`: of several steps if the engine does not work between them, else of one."""
    for _ in range(MAX_TORN):
        moment = Moment(scheduler)
        try:
            yield from _read(moment, groups, asked)
        except RuntimeError:
            # A table grew while it was copied.
            continue
        yield
        if not moment.torn:
            return moment
    moment = Moment(scheduler)
    try:
        collections.deque(_read(moment, groups, asked), maxlen=0)
    except RuntimeError:
        moment.torn = True
    yield
    return moment


def _read(moment: Moment, groups: list[Group], asked: list[int]) -> Steps:
    yield
    yield from moment.read_groups(groups)
    yield from moment.complete(asked)


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
    # Until vLLM 0.9 the list has no ends of its own.
    first = getattr(
        getattr(queue, "fake_free_list_head", None), "next_free_block", getattr(queue, "free_list_head", None)
    )
    last = getattr(
        getattr(queue, "fake_free_list_tail", None), "prev_free_block", getattr(queue, "free_list_tail", None)
    )
    return pool.get_num_free_blocks(), first, last


def _is_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return bool(before[0] == after[0]) and all(map(operator.is_, before[1:], after[1:]))


def whole(value: Any, name: str) -> int:
    """The value, a number of blocks; TypeError where it is none."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value
