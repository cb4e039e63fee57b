"""One count of a vLLM scheduler's blocks: who holds the blocks of its pool at one moment, in short steps.

Which lists there are, how long they are, and how many references shared blocks have, is read first. The engine may work
between two steps, so this counts only if the pool's free list is the same before and after. Where the lengths do not
add up to the blocks in use, the blocks that came since the last look are looked at, without haste: lists grow at their
ends, and a list that the engine has dropped stays as it was.

Distinct blocks are counted by numpy, which vLLM needs itself: each owner marks its blocks in one array, the first owner
of a shared block last.
"""

from __future__ import annotations

import collections
import itertools
import operator
from typing import Any, NamedTuple

from .block_tables import (
    CONNECTOR,
    DEFERRED,
    OWNERS,
    PINNED,
    RUNNING,
    STEP_ENDED,
    STEP_FIRST,
    STEP_NAMES,
    WAITING,
    Group,
    Left,
    Now,
    Steps,
    parts,
)

KEPT_COUNTS, MAX_KEPT_COUNTS = 3, 12
"""Counts for which the blocks are kept that requests have let go of."""

STEP_ASKED, STEP_MARKED = 64, 8192

MAX_ENDED = 2048
KEPT_OF_REQUESTS = ("status", "num_preemptions", "num_prompt_tokens", "num_output_tokens")

MAX_TORN = 3
"""Moments in a row that the engine disturbed before it has to wait for one."""

_request_id = operator.attrgetter("request_id")


class Count(NamedTuple):
    """Blocks of one pool at one moment: `usable`, `free`, of them `cached_free`, and by owner.

    `held` has a number for each block, 0 where it has no owner; `None` where all blocks in use have one but those asked
    about. `looked_at` blocks came since the last look: as long did this one take. `groups` counts each KV-cache
    group's. `referenced` are the blocks asked about that had a reference. `step` is another object after each step of
    the engine. `finished` are requests whose blocks the connector holds, `loading` those that wait for it.
    """

    usable: int
    free: int
    cached_free: int
    owners: dict[str, int]
    groups: list[int]
    held: Any
    looked_at: int
    referenced: set[int]
    step: Any
    idle: bool
    finished: list[str]
    loading: list[str]

    @property
    def unowned(self) -> int:
        """Blocks with a reference and no owner."""
        return self.usable - self.free - sum(self.owners.values())


class _Moment:
    """What the engine has at one moment, read in short steps; `torn` where it worked meanwhile."""

    def __init__(self) -> None:
        self.groups: list[Now] = []
        self.finished: list[str] = []
        self.loading: list[str] = []
        self.without_request: list[tuple[int, list[Any]]] = []
        self.referenced: set[int] = set()
        self.unhashed = 0
        self.free_list: tuple[Any, ...] = ()
        self.free = self.cached = 0
        self.step: Any = None
        self.idle = False
        self.torn = False


class Counter:
    """Counts one scheduler's blocks, again and again."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._groups: list[Group] = []
        self._size = 0
        self._alive: set[Any] = set()
        self._strange: set[str] = set()
        self._gone: list[tuple[str, Any]] = []
        self.left: collections.deque[Left] = collections.deque()
        """What requests have let go of, the newest count first."""
        self.requests: dict[str, Any] = {}
        """Requests that hold blocks."""
        self.ended: collections.OrderedDict[str, tuple[Any, ...]] = collections.OrderedDict()
        """What is kept of those that do not any more."""
        self._unhashed = 0
        self.all_run = False
        """Whether every request that held blocks in the last count was running."""

    def take(
        self, scheduler: Any, asked: list[int], *, known: bool = False, anew: bool = False, keeps: bool = False
    ) -> Steps:
        """A `Count`, or `None` where the engine was at work meanwhile; yields after each short step.

        `known`: the blocks asked about are orphans. `anew`: all blocks are looked at, whether the lengths of
        lists add up or not. `keeps`: more of what requests have let go of.

        Raises:
            AttributeError, ImportError, TypeError, ValueError: this version of vLLM keeps its blocks in another way.
        """
        pool, managers = pool_of(scheduler)
        size = _whole(pool.num_gpu_blocks, "num_gpu_blocks")
        null = getattr(pool, "null_block", None)
        yield
        if self._size != size or len(self._groups) != len(managers):
            self._size = size
            null_id = 0 if null is None else null.block_id
            self._groups = [Group(type(manager).__name__, null_id) for manager in managers]
        unclear = anew or bool(asked and not known)
        usable = size - (null is not None)
        moment = yield from self._moment(scheduler, managers, pool, asked)
        if moment.torn:
            return None
        while len(self.left) >= (MAX_KEPT_COUNTS if keeps else KEPT_COUNTS):
            yield from _released(self.left.pop())
        left: Left = []
        self.left.appendleft(left)
        for group, now in zip(self._groups, moment.groups, strict=True):
            yield from group.follow(now, left)
        yield from self._part(left)
        yield from self._rank(scheduler, managers, moment)
        # A large pool takes seconds to count at first: meanwhile its scheduler may be given up.
        del scheduler
        apart = any(now.again for now in moment.groups) and any(now.ranks for now in moment.groups)
        if not (unclear or apart or moment.without_request):
            sizes: list[list[int]] = []
            for group in self._groups:
                its_sizes = yield from group.sizes()
                sizes.append(its_sizes)
            yield
            if sum(map(sum, sizes)) == usable - moment.free - len(moment.referenced):
                blocks = [sum(each) for each in zip(*sizes, strict=True)]
                yield
                count = self._count(null, moment, blocks, list(map(sum, sizes)))
                yield
                return count
        for group in self._groups:
            yield from group.look(anew=anew)
        return (yield from self._counted(null, moment))

    def check(self, scheduler: Any, asked: list[int]) -> Steps:
        """As `take`, by nothing but lengths and references: what is in use beyond the blocks asked about is unowned.

        All requests are taken to be running, and blocks that several have begun to share since the last count are
        counted as often as they are held: then more are held than are in use.
        """
        pool, managers = pool_of(scheduler)
        null = getattr(pool, "null_block", None)
        moment = _Moment()
        moment.free_list = _free_list(pool)
        totals: list[int] = []
        try:
            for group, manager in zip(self._groups, managers, strict=True):
                totals.append((yield from group.total(manager.req_to_blocks, null)))
        except RuntimeError:
            # A table grew while it was read.
            return None
        yield from self._read_rest(scheduler, managers, pool, asked, moment)
        moment.unhashed = self._unhashed
        if moment.torn:
            return None
        without = [sum(len(blocks) for rank, blocks in moment.without_request if rank == each) for each in (3, 4)]
        yield
        return self._count(null, moment, [sum(totals), 0, 0, *without], totals)

    def settle(self, *, explained: bool) -> Steps:
        """Keep how requests ended that may have left blocks behind; release the objects of all that ended."""
        while self._gone:
            if not explained:
                for name, request in self._gone[-STEP_FIRST:]:
                    self.ended[name] = _kept(request)
                    if len(self.ended) > MAX_ENDED:
                        self.ended.popitem(last=False)
            del self._gone[-STEP_FIRST:]
            yield

    def _part(self, left: Left) -> Steps:
        """Set requests aside that hold no blocks any more."""
        for part in parts(map(operator.itemgetter(0), left), STEP_ENDED):
            names = part
            for group in self._groups:
                names = list(itertools.filterfalse(group.lists.__contains__, names))
            requests = list(map(self.requests.pop, names, itertools.repeat(None)))
            self._alive.difference_update(requests)
            self._strange.difference_update(names)
            self._gone += itertools.compress(zip(names, requests, strict=True), requests)
            yield

    def kept(self, name: str) -> tuple[Any, ...] | None:
        """`KEPT_OF_REQUESTS` of a request that holds blocks, or did; `None` where it is not known."""
        return _kept(self.requests[name]) if name in self.requests else self.ended.get(name)

    def _counted(self, null: Any, moment: _Moment) -> Steps:
        """The distinct blocks of each owner and group."""
        import numpy as np  # noqa: PLC0415 - vLLM has imported it; only its engine core needs it here

        held = np.zeros(self._size, np.uint8)
        in_groups = [held] if len(self._groups) == 1 else [np.zeros(self._size, np.uint8) for _ in self._groups]
        yield
        groups: list[int] = []
        for rank in reversed(range(len(OWNERS))):
            if rank > CONNECTOR:
                # Blocks that belong to no request, and will not for long.
                ids = [
                    block.block_id
                    for its_rank, blocks in moment.without_request
                    if its_rank == rank
                    for block in blocks
                ]
                for start in range(0, len(ids), STEP_ASKED):
                    held[ids[start : start + STEP_ASKED]] = rank + 1
                    yield
                continue
            for group, marks in zip(self._groups, in_groups, strict=True):
                joined = np.frombuffer(b"".join(group.ids(rank)), np.int32)
                yield
                for start in range(0, len(joined), STEP_MARKED):
                    for each in (held,) if marks is held else (held, marks):
                        each[joined[start : start + STEP_MARKED]] = rank + 1
                        yield
        if null is not None:
            held[null.block_id] = 0
        blocks = np.bincount(held, minlength=len(OWNERS) + 1).tolist()[1:]
        yield
        if len(self._groups) == 1:
            groups = [sum(blocks[: CONNECTOR + 1])]
        else:
            for marks in in_groups:
                if null is not None:
                    marks[null.block_id] = 0
                groups.append(int(np.count_nonzero(marks)))
                yield
        return self._count(null, moment, blocks, groups, held)

    def _count(self, null: Any, moment: _Moment, blocks: list[int], groups: list[int], held: Any = None) -> Count:
        usable = self._size - (null is not None)
        cached_free = min(max(moment.cached - max(sum(blocks) - moment.unhashed, 0), 0), moment.free)
        return Count(
            usable=usable,
            free=moment.free,
            cached_free=cached_free,
            owners=dict(zip(OWNERS, blocks, strict=True)),
            groups=groups,
            held=held,
            looked_at=0 if held is None else sum(group.looked_at for group in self._groups),
            referenced=moment.referenced,
            step=moment.step,
            idle=moment.idle,
            finished=moment.finished,
            loading=moment.loading,
        )

    def _moment(self, scheduler: Any, managers: list[Any], pool: Any, asked: list[int]) -> Steps:
        """What the engine has at one moment, in short steps if it does not work between them."""
        for _ in range(MAX_TORN):
            moment = _Moment()
            try:
                yield from self._read(scheduler, managers, pool, asked, moment)
            except RuntimeError:
                # A table grew while it was copied.
                continue
            yield
            if not moment.torn:
                return moment
        moment = _Moment()
        try:
            collections.deque(self._read(scheduler, managers, pool, asked, moment), maxlen=0)
        except RuntimeError:
            moment.torn = True
        yield
        return moment

    def _read(self, scheduler: Any, managers: list[Any], pool: Any, asked: list[int], moment: _Moment) -> Steps:
        """Read what has to be of one moment: the free blocks are the same before and after."""
        moment.free_list = _free_list(pool)
        yield
        null = getattr(pool, "null_block", None)
        for group, manager in zip(self._groups, managers, strict=True):
            moment.groups.append((yield from group.read(manager.req_to_blocks, null)))
            yield
        yield from self._read_rest(scheduler, managers, pool, asked, moment)

    def _read_rest(self, scheduler: Any, managers: list[Any], pool: Any, asked: list[int], moment: _Moment) -> Steps:
        """Read what is not in lists of requests."""
        for manager in managers:
            # Both ends of a copy of a block in flight.
            moment.without_request += [
                (PINNED, list(pair)) for pair in list(getattr(manager, "_pending_cow_copies", ()))
            ]
        for _, blocks in list(getattr(scheduler, "deferred_frees", ())):
            # Those of another pool, in the host's memory, have the same ids.
            own = [one for one in blocks if getattr(one, "pool", None) in (None, pool)]
            moment.without_request.append((DEFERRED, own))
        for start in range(0, len(asked), STEP_ASKED):
            looked_at = asked[start : start + STEP_ASKED]
            moment.referenced.update(one for one in looked_at if pool.blocks[one].ref_cnt > 0)
            yield
        moment.free = _whole(moment.free_list[0], "free blocks")
        moment.cached = len(pool.cached_block_hash_to_block) if getattr(pool, "enable_caching", False) else 0
        moment.idle = not scheduler.requests
        # A new set in every step (Scheduler._update_after_schedule).
        moment.step = scheduler.finished_req_ids
        moment.torn = not _is_same(moment.free_list, _free_list(pool))

    def _rank(self, scheduler: Any, managers: list[Any], moment: _Moment) -> Steps:
        """Find out the owners of lists whose request does not run."""
        for now in moment.groups:
            for part in parts(now.begun):
                for name in part:
                    request = scheduler.requests.get(name)
                    if request is None:
                        self._strange.add(name)
                    elif (known := self.requests.get(name)) is not request:
                        self._alive.discard(known)
                        self._alive.add(request)
                        self.requests[name] = request
                yield
        running: set[Any] = set()
        for some in parts(list(scheduler.running), STEP_NAMES):
            running.update(some)
            yield
        # Requests are compared by identity, which reads nothing of them.
        others = [*map(_request_id, self._alive - running), *self._strange]
        yield
        for part in parts(others):
            for name in part:
                rank = self._rank_of(name, scheduler, moment)
                for group, now, manager in zip(self._groups, moment.groups, managers, strict=True):
                    blocks = group.lists.get(name)
                    if blocks is not None and rank is not None and rank != RUNNING:
                        now.ranks[name] = rank
                    elif blocks is not None and rank is None and manager.req_to_blocks.get(name) is blocks:
                        # The blocks of a request that the scheduler has dropped are never released.
                        now.dropped.add(name)
            yield
        for now, manager in zip(moment.groups, managers, strict=True):
            cached, held = getattr(manager, "num_cached_block", None), now.held
            # The last block of each is not full.
            hashed = sum(cached.values()) if isinstance(cached, dict) else held - len(now.sizes)
            moment.unhashed += max(held - hashed, 0)
            yield
        self._unhashed = moment.unhashed
        self.all_run = not any(now.ranks or now.dropped for now in moment.groups)

    def _rank_of(self, name: str, scheduler: Any, moment: _Moment) -> int | None:
        """The owner of a request's blocks; `None` where the scheduler does not know it any more."""
        request = scheduler.requests.get(name)
        if request is None:
            return None
        if request.is_finished():
            moment.finished.append(name)
            return CONNECTOR
        status = getattr(request.status, "name", None)
        if status == "RUNNING":
            return RUNNING
        if status == "WAITING_FOR_REMOTE_KVS":
            moment.loading.append(name)
        return WAITING


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


def _released(left: Left) -> Steps:
    """Give up lists, two at a time: each lets go of all its blocks at once."""
    while left:
        del left[-2:]
        yield


def _kept(request: Any) -> tuple[Any, ...]:
    """A request's status, preemptions and lengths; never its prompt or output."""
    return tuple(getattr(request, name, None) for name in KEPT_OF_REQUESTS)


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value
