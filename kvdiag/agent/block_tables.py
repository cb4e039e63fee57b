"""The ids of the blocks that requests hold, kept from one count to the next: each block is looked at once.

vLLM has a list of blocks for each request and KV-cache group, which grows at its end until the request ends. Their
lengths are enough where they add up to the blocks in use: a block that several requests share has as many references,
and is among the first that a list has. Windows put the null block in place of the first ones, and some managers replace
any: their lists are looked at again in each count, and so are all where the numbers of a count did not add up.
"""

from __future__ import annotations

import array
import bisect
import itertools
import operator
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

OWNERS = ("running", "waiting", "connector", "deferred", "pinned")
"""Owners of blocks with a reference, in the order in which a block that several of them share is counted."""

RUNNING, WAITING, CONNECTOR, DEFERRED, PINNED = range(len(OWNERS))

STEP_BLOCKS = 64
BLOCKS_OF_REQUEST = 8
"""As many blocks take the time that turning to a request does."""

STEP_REQUESTS = 32
STEP_FIRST = 8
STEP_TURNS = 16
STEP_ITEMS = 32
STEP_NAMES = 64

APPENDED = ("FullAttentionManager", "SinkFullAttentionManager", "CrossAttentionManager")
"""Managers whose lists only grow, but for a copy of a shared block before it is written."""

PASSED = ("SlidingWindowManager", "ChunkedLocalAttentionManager")
"""Managers that replace the first blocks of a list, one after the other, by the null block."""

T = TypeVar("T")

Steps = Generator[Any, None, Any]
"""Short steps of work, between which the engine may work; `PAUSE` where it must, for the next one is longer."""

PAUSE = False

Left = list[tuple[str, list[Any]]]
"""Lists of requests that do not hold their blocks any more."""

_block_id = operator.attrgetter("block_id")


def parts(items: Iterable[T], step: int = STEP_ITEMS) -> Iterator[list[T]]:
    """Some at a time; RuntimeError where they are a table of the engine, which adds or removes some meanwhile."""
    left = iter(items)
    return iter(lambda: list(itertools.islice(left, step)), [])


def leading(blocks: list[Any], null: Any, known: int = 0) -> int:
    """How many of a list's first blocks are the null block, if all of those are at its beginning; `known` were."""
    if 0 < known < len(blocks) and blocks[known - 1] is null and blocks[known] is not null:
        return known
    return bisect.bisect_left(blocks, True, key=lambda block: block is not null)


class Now(NamedTuple):
    """What the engine has of one group at this moment: its lists, their lengths, the leading null blocks of each.

    `begun` are the requests whose list is another one than before, `let_go` the lists of those that have none any more,
    `ranks` the owners of those that do not run.
    """

    lists: dict[str, list[Any]]
    sizes: dict[str, int]
    nulls: dict[str, int]
    begun: list[str]
    let_go: dict[str, list[Any]]
    ranks: dict[str, int]


Shared = dict[int, tuple[Any, "Group"]]
"""Blocks that are in several lists of one group, by their ids."""


class Group:
    """The ids of the blocks of one KV-cache group by request, as of the last count."""

    def __init__(self, kind: str, null_id: int) -> None:
        """Without requests; `kind` names the class of the group's manager."""
        self.passes = kind in PASSED
        self._is_kept = kind in APPENDED or self.passes
        self._null_id = null_id
        self._now = Now({}, {}, {}, [], {}, {})
        self._nulls: dict[str, int] = {}
        self._ids: dict[str, array.array[int]] = {}
        self.looked_at = 0
        """Blocks, by the last look."""

    def read(self, table: Mapping[str, list[Any]], null: Any, shared: Shared) -> Steps:
        """What the engine has now, without owners; blocks with several references in lists that are new go to `shared`.

        A block comes into a second list when that list begins: later ones are taken from the free blocks.
        """
        yield PAUSE
        # At once, which is short for thousands of requests.
        lists = dict(table)
        yield
        let_go = dict(self._now.lists)
        yield
        sizes: dict[str, int] = {}
        begun: list[str] = []
        for names in parts(lists, STEP_TURNS):
            those = list(map(lists.__getitem__, names))
            sizes.update(zip(names, map(len, those), strict=True))
            before = list(map(let_go.pop, names, itertools.repeat(None)))
            begun += itertools.compress(names, map(operator.is_not, those, before))
            yield
        nulls: dict[str, int] = {}
        if self.passes:
            for part in parts(lists.items()):
                nulls.update((name, leading(blocks, null, self._now.nulls.get(name, 0))) for name, blocks in part)
                yield
        looked_at = 0
        for name in begun:
            for block in itertools.islice(lists[name], nulls.get(name, 0), None):
                looked_at += 1
                if block.ref_cnt > 1:
                    shared[block.block_id] = block, self
                elif not self.passes:
                    break
                if looked_at >= STEP_BLOCKS:
                    looked_at = 0
                    yield
            looked_at += BLOCKS_OF_REQUEST
            if looked_at >= STEP_BLOCKS:
                looked_at = 0
                yield
        yield
        return Now(lists, sizes, nulls, begun, let_go, {})

    def follow(self, now: Now, left: Left) -> Steps:
        """Give up what requests do not hold any more; those lists are added to `left`."""
        before, self._now = self._now, now
        for lists in parts(now.let_go.items()):
            left += lists
            yield
        resumed: list[str] = []
        for names in parts(now.begun):
            # One with another list was preempted, and has resumed.
            again = list(filter(before.lists.__contains__, names))
            resumed += again
            left += zip(again, map(before.lists.__getitem__, again), strict=True)
            yield
        for part in parts((*resumed, *now.let_go) if self._ids or self._nulls else ()):
            for name in part:
                self._ids.pop(name, None)
                self._nulls.pop(name, None)
            yield

    def sizes(self) -> Steps:
        """The blocks of each owner's requests, where none is shared, and null blocks are at the beginning of lists."""
        now = self._now
        sizes = [0] * len(OWNERS)
        sizes[RUNNING] = sum(now.sizes.values()) - sum(now.nulls.values())
        yield
        for part in parts(now.ranks.items()):
            for name, rank in part:
                size = now.sizes[name] - now.nulls.get(name, 0)
                sizes[RUNNING] -= size
                sizes[rank] += size
            yield
        return sizes

    def look(self, *, anew: bool) -> Steps:
        """Look at the blocks that came since the last look, or at all."""
        if anew or not self._is_kept:
            self._ids.clear()
            self._nulls.clear()
        now = self._now
        for part in parts(now.nulls.items()):
            for name, nulls in part:
                if nulls != self._nulls.get(name, 0):
                    self._pass(name, nulls)
            yield
        known = map(len, map(self._ids.get, now.sizes, itertools.repeat(())))
        self.looked_at = 0
        behind = [name for (name, size), ids in zip(now.sizes.items(), known, strict=True) if size != ids]
        yield
        looked_at = 0
        for name in behind:
            ids = self._ids.get(name)
            if ids is None:
                ids = self._ids[name] = array.array("i")
            blocks, size = now.lists[name], now.sizes[name]
            # One that is shorter than it was.
            del ids[size:]
            while (at := len(ids)) < size:
                end = min(at + STEP_BLOCKS - looked_at, size)
                ids.extend(map(_block_id, blocks[at:end]))
                if len(ids) == at:
                    break
                self.looked_at += end - at
                looked_at += end - at + BLOCKS_OF_REQUEST
                if looked_at >= STEP_BLOCKS:
                    looked_at = 0
                    yield

    def ids(self, rank: int) -> list[array.array[int]]:
        """The ids of all blocks of that owner's requests, null blocks among them."""
        ranks = self._now.ranks
        if rank == RUNNING:
            return [ids for name, ids in self._ids.items() if name not in ranks] if ranks else list(self._ids.values())
        return [self._ids[name] for name, its_rank in ranks.items() if its_rank == rank and name in self._ids]

    def _pass(self, name: str, nulls: int) -> None:
        """Put the null block in place of those that a window has passed."""
        ids, known = self._ids.get(name), self._nulls.get(name, 0)
        if ids is not None:
            passed = min(nulls, len(ids))
            ids[known:passed] = array.array("i", [self._null_id]) * max(passed - known, 0)
        self._nulls[name] = nulls
