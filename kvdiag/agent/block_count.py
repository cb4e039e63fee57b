"""One count of a vLLM scheduler's blocks: who holds the blocks of its pool at one moment, in short steps.

Which lists there are, how long they are, and how many references shared blocks have, is read first, of one moment
(`vllm_pool`). Where the lengths do not add up to the blocks in use, the blocks that came since the last look are looked
at, without haste: lists grow at their ends, and a list that the engine has dropped stays as it was.

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
    OWNERS,
    PAUSE,
    RUNNING,
    STEP_ENDED,
    STEP_FIRST,
    WAITING,
    Group,
    Left,
    Steps,
    parts,
)
from .vllm_pool import STEP_ASKED, Moment, moment_of, pool_of, whole

KEPT_COUNTS, MAX_KEPT_COUNTS = 3, 12
"""Counts for which the blocks are kept that requests have let go of."""

TRIES = 3
"""Moments in a row with fewer blocks in lists than in use before they are looked at: one may be between two owners."""

STEP_MARKED = 8192

MAX_ENDED = 2048
KEPT_OF_REQUESTS = ("status", "num_preemptions", "num_prompt_tokens", "num_output_tokens")


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


class Counter:
    """Counts one scheduler's blocks, again and again."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._groups: list[Group] = []
        self._size = 0
        self._names: dict[int, str] = {}
        self._strange: set[str] = set()
        self._gone: list[tuple[str, Any]] = []
        self.left: collections.deque[Left] = collections.deque()
        """What requests have let go of, the newest count first."""
        self.requests: dict[str, Any] = {}
        """Requests that hold blocks."""
        self.ended: collections.OrderedDict[str, tuple[Any, ...]] = collections.OrderedDict()
        """What is kept of those that do not any more."""

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
        size = whole(pool.num_gpu_blocks, "num_gpu_blocks")
        null = getattr(pool, "null_block", None)
        yield
        if self._size != size or len(self._groups) != len(managers):
            self._size = size
            null_id = 0 if null is None else null.block_id
            self._groups = [Group(type(manager).__name__, null_id) for manager in managers]
        unclear = anew or bool(asked and not known)
        usable = size - (null is not None)
        tries = 1 if unclear else TRIES
        while True:
            moment = yield from moment_of(scheduler, self._groups, asked)
            if moment.torn:
                return None
            in_use = usable - moment.free - len(moment.referenced)
            held = sum([now.total() for now in moment.groups]) + sum([len(one) for _, one in moment.without_request])
            tries -= 1
            if not tries or held >= in_use:
                break
            yield PAUSE
        while len(self.left) >= (MAX_KEPT_COUNTS if keeps else KEPT_COUNTS):
            yield from _released(self.left.pop())
        left: Left = []
        self.left.appendleft(left)
        for group, now in zip(self._groups, moment.groups, strict=True):
            yield from group.follow(now, left)
        yield from self._part(left)
        yield from self._rank(scheduler, moment)
        # Who was dropped is the last holder of its blocks.
        for group, now in zip(self._groups, moment.groups, strict=True):
            left += [(name, group.lists[name]) for name in now.dropped]
        # A large pool takes seconds to count at first: meanwhile its scheduler may be given up.
        del scheduler
        apart = any(now.again for now in moment.groups) and any(now.ranks for now in moment.groups)
        if not (unclear or apart or moment.without_request):
            sizes: list[list[int]] = []
            for group in self._groups:
                its_sizes = yield from group.sizes()
                sizes.append(its_sizes)
            yield
            if sum(map(sum, sizes)) == in_use:
                blocks = [sum(each) for each in zip(*sizes, strict=True)]
                yield
                count = self._count(moment, blocks, list(map(sum, sizes)))
                yield
                return count
        for group in self._groups:
            yield from group.look(anew=anew)
        return (yield from self._counted(moment))

    def settle(self, *, known: bool) -> Steps:
        """Keep how requests ended that may have left blocks behind; release the objects of all that ended.

        Where every block without an owner is `known`, none that ended has left another behind.
        """
        while known and self.left:
            yield from _released(self.left.pop())
        while self._gone:
            if not known:
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
            for one in map(id, requests):
                self._names.pop(one, None)
            self._strange.difference_update(names)
            self._gone += itertools.compress(zip(names, requests, strict=True), requests)
            yield

    def kept(self, name: str) -> tuple[Any, ...] | None:
        """`KEPT_OF_REQUESTS` of a request that holds blocks, or did; `None` where it is not known."""
        return _kept(self.requests[name]) if name in self.requests else self.ended.get(name)

    def _counted(self, moment: Moment) -> Steps:
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
        if moment.null is not None:
            held[moment.null.block_id] = 0
        blocks = np.bincount(held, minlength=len(OWNERS) + 1).tolist()[1:]
        yield
        if len(self._groups) == 1:
            groups = [sum(blocks[: CONNECTOR + 1])]
        else:
            for marks in in_groups:
                if moment.null is not None:
                    marks[moment.null.block_id] = 0
                groups.append(int(np.count_nonzero(marks)))
                yield
        return self._count(moment, blocks, groups, held)

    def _count(self, moment: Moment, blocks: list[int], groups: list[int], held: Any = None) -> Count:
        usable = self._size - (moment.null is not None)
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

    def _rank(self, scheduler: Any, moment: Moment) -> Steps:
        """Find out the owners of lists whose request does not run."""
        for now in moment.groups:
            for part in parts(now.begun):
                for name in part:
                    request = scheduler.requests.get(name)
                    if request is None:
                        self._strange.add(name)
                    else:
                        self._names.pop(id(self.requests.get(name)), None)
                        self._names[id(request)] = name
                        self.requests[name] = request
                yield
        # Requests are compared by identity, which reads nothing of them.
        ids = list(map(id, scheduler.running))
        yield
        running = set(ids)
        yield
        waiting = map(self._names.__getitem__, itertools.filterfalse(running.__contains__, self._names))
        others = [*waiting, *self._strange]
        yield
        for part in parts(others):
            for name in part:
                rank = self._rank_of(name, scheduler, moment)
                for group, now, manager in zip(self._groups, moment.groups, moment.managers, strict=True):
                    blocks = group.lists.get(name)
                    if blocks is not None and rank is not None and rank != RUNNING:
                        now.ranks[name] = rank
                    elif blocks is not None and rank is None and manager.req_to_blocks.get(name) is blocks:
                        # The blocks of a request that the scheduler has dropped are never released.
                        now.dropped.add(name)
            yield
        for now, manager in zip(moment.groups, moment.managers, strict=True):
            cached, held = getattr(manager, "num_cached_block", None), sum(now.lengths)
            # The last block of each is not full.
            hashed = sum(cached.values()) if isinstance(cached, dict) else held - len(now.lengths)
            moment.unhashed += max(held - hashed, 0)
            yield

    def _rank_of(self, name: str, scheduler: Any, moment: Moment) -> int | None:
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


def _released(left: Left) -> Steps:
    """Give up lists, two at a time: each lets go of all its blocks at once."""
    while left:
        del left[-2:]
        yield


def _kept(request: Any) -> tuple[Any, ...]:
    """A request's status, preemptions and lengths; never its prompt or output."""
    return tuple(getattr(request, name, None) for name in KEPT_OF_REQUESTS)
