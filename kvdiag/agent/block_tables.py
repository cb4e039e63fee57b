"""The ids of the blocks that requests hold, kept from one count to the next: each block is looked at once.

vLLM has a list of blocks for each request and KV-cache group, which grows at its end until the request ends. The
lengths of all lists are enough where they add up to the blocks in use: then no request shares any, unless as many are
lost, which the census rules out from time to time. Windows put the null block in place of the first ones, and some
managers replace any: their lists are looked at again in each count, and so are all where the numbers of a count did not
add up.
"""

from __future__ import annotations

import array
import bisect
import itertools
import operator
from collections.abc import Container, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

OWNERS = ("running", "waiting", "connector", "deferred", "pinned")
"""Owners of blocks with a reference, in the order in which a block that several of them share is counted."""

RUNNING, WAITING, CONNECTOR, DEFERRED, PINNED = range(len(OWNERS))

STEP_BLOCKS = 64
STEP_REQUESTS = 32
STEP_FIRST = 8
STEP_ITEMS = 32
STEP_NAMES = 64

APPENDED = ("FullAttentionManager", "SinkFullAttentionManager", "CrossAttentionManager")
"""Managers whose lists only grow, but for a copy of a shared block before it is written."""

PASSED = ("SlidingWindowManager", "ChunkedLocalAttentionManager")
"""Managers that replace the first blocks of a list, one after the other, by the null block."""

T = TypeVar("T")

Steps = Generator[None, None, Any]
"""Short steps of work, between which the engine may work."""

Left = list[tuple[str, list[Any]]]
"""Lists of requests that do not hold their blocks any more."""

_block_id = operator.attrgetter("block_id")


def parts(items: Iterable[T], step: int = STEP_ITEMS) -> Iterator[list[T]]:
    """Some at a time; RuntimeError where they are a table of the engine, which adds or removes some meanwhile."""
    left = iter(items)
    return iter(lambda: list(itertools.islice(left, step)), [])


def without(names: Iterable[str], others: Container[str]) -> Steps:
    """The names that are not among the others."""
    found: list[str] = []
    for part in parts(names, STEP_NAMES):
        found += itertools.filterfalse(others.__contains__, part)
        yield
    return found


def leading(blocks: list[Any], null: Any) -> int:
    """How many of a list's first blocks are the null block, if all of those are at its beginning."""
    return bisect.bisect_left(blocks, True, key=lambda block: block is not null)


class Now(NamedTuple):
    """What the engine has of one group at this moment: its lists, their lengths, the leading null blocks of each.

    `ranks` are the owners of requests that do not run.
    """

    lists: dict[str, list[Any]]
    sizes: dict[str, int]
    nulls: dict[str, int]
    ranks: dict[str, int]


class Group:
    """The ids of the blocks of one KV-cache group by request, as of the last count."""

    def __init__(self, kind: str, null_id: int) -> None:
        """Without requests; `kind` names the class of the group's manager."""
        self.passes = kind in PASSED
        self._is_kept = kind in APPENDED or self.passes
        self._null_id = null_id
        self._now = Now({}, {}, {}, {})
        self._nulls: dict[str, int] = {}
        self._ids: dict[str, array.array[int]] = {}

    def follow(self, now: Now, left: Left) -> Steps:
        """Give up what requests do not hold any more; those lists are added to `left`."""
        before, self._now = self._now, now
        gone = yield from without(before.lists, now.lists)
        for number, name in enumerate(gone):
            self._drop(name, before.lists, left)
            if number % STEP_FIRST == STEP_FIRST - 1:
                yield
        for part in parts(now.lists.items()):
            for name, blocks in part:
                if before.lists.get(name, blocks) is not blocks:
                    # It was preempted, and has resumed.
                    self._drop(name, before.lists, left)
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
        for part in parts(self._now.sizes.items()):
            for name, size in part:
                passed = self._now.nulls.get(name, 0) - self._nulls.get(name, 0)
                if passed or len(self._ids.get(name, ())) != size:
                    yield from self._look(name, size)
            yield

    def ids(self, rank: int) -> list[array.array[int]]:
        """The ids of all blocks of that owner's requests, null blocks among them."""
        ranks = self._now.ranks
        if rank == RUNNING:
            return [ids for name, ids in self._ids.items() if name not in ranks] if ranks else list(self._ids.values())
        return [self._ids[name] for name, its_rank in ranks.items() if its_rank == rank and name in self._ids]

    def _drop(self, name: str, lists: dict[str, list[Any]], left: Left) -> None:
        left.append((name, lists[name]))
        self._ids.pop(name, None)
        self._nulls.pop(name, None)

    def _look(self, name: str, size: int) -> Steps:
        """Follow a list up to this length."""
        blocks = self._now.lists[name]
        ids = self._ids.setdefault(name, array.array("i"))
        # One that is shorter than it was.
        del ids[size:]
        if self.passes:
            nulls, known = self._now.nulls[name], self._nulls.get(name, 0)
            passed = min(nulls, len(ids))
            if passed > known:
                ids[known:passed] = array.array("i", [self._null_id]) * (passed - known)
            self._nulls[name] = nulls
        while len(ids) < size:
            at = len(ids)
            ids.extend(map(_block_id, blocks[at : min(at + STEP_BLOCKS, size)]))
            if len(ids) == at:
                return
            yield
