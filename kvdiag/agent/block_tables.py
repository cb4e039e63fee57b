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

STEP_BLOCKS = 48
BLOCKS_OF_REQUEST = 8
"""As many blocks take the time that turning to a request does."""

STEP_ENDED = 8
STEP_FIRST = 8
STEP_ITEMS = 32
STEP_NAMES = 24
STEP_LENGTHS = 32
STEP_SAME = 96

APPENDED = ("FullAttentionManager", "SinkFullAttentionManager", "CrossAttentionManager")
"""Managers whose lists only grow, but for a copy of a shared block before it is written."""

PASSED = ("SlidingWindowManager", "ChunkedLocalAttentionManager")
"""Managers that replace the first blocks of a list, one after the other, by the null block."""

T = TypeVar("T")

Steps = Generator[Any, None, Any]
"""Short steps of work, between which the engine may work."""

PAUSE = False
"""What follows a step that has to wait for the engine."""

Left = list[tuple[str, list[Any]]]
"""Lists of requests that do not hold their blocks any more."""

_block_id, _ref_cnt = operator.attrgetter("block_id"), operator.attrgetter("ref_cnt")


def parts(items: Iterable[T], step: int = STEP_ITEMS) -> Iterator[list[T]]:
    """Some at a time; RuntimeError where they are a table of the engine, which adds or removes some meanwhile."""
    left = iter(items)
    return iter(lambda: list(itertools.islice(left, step)), [])


def leading(blocks: list[Any], null: Any, known: int = 0) -> int:
    """How many of a list's first blocks are the null block, if all of those are at its beginning; `known` were."""
    if 0 < known < len(blocks) and blocks[known - 1] is null and blocks[known] is not null:
        return known
    return bisect.bisect_left(blocks, True, key=lambda block: block is not null)


def _others(lists: dict[str, list[Any]], than: dict[str, list[Any]]) -> Steps:
    """The requests whose list is not the same there."""
    others: list[str] = []
    for names in parts(lists, STEP_SAME):
        others += itertools.compress(names, map(operator.is_not, map(lists.get, names), map(than.get, names)))
        yield
    return others


class Now(NamedTuple):
    """What the engine has of one group at this moment: its lists, their lengths, and their leading null blocks.

    `begun` are the requests with another list than before, `ended` those whose list is not held any more, `again` the
    references of blocks that are in several lists, beyond the first of each. `ranks` are the owners of lists whose
    request does not run, `dropped` the requests that the scheduler does not know any more.
    """

    lists: dict[str, list[Any]]
    lengths: list[int]
    nulls: dict[str, int]
    begun: list[str]
    ended: list[str]
    again: int
    ranks: dict[str, int]
    dropped: set[str]

    def total(self) -> int:
        """The distinct blocks in all lists, where null blocks are at the beginning of lists."""
        return sum(self.lengths) - sum(self.nulls.values()) - self.again


class Group:
    """The lists of one KV-cache group by request, as of the last count, and the ids of their blocks."""

    def __init__(self, kind: str, null_id: int) -> None:
        """Without requests; `kind` names the class of the group's manager."""
        self.passes = kind in PASSED
        self._is_kept = kind in APPENDED or self.passes
        self._null_id = null_id
        self.lists: dict[str, list[Any]] = {}
        self._now = Now({}, [], {}, [], [], 0, {}, set())
        self._shared: dict[int, Any] = {}
        self._searched: dict[str, list[Any]] = {}
        self._nulls: dict[str, int] = {}
        self._ids: dict[str, array.array[int]] = {}
        self.looked_at = 0
        """Blocks, by the last look."""

    def read(self, table: Mapping[str, list[Any]], null: Any) -> Steps:
        """What the engine has now, without owners.

        The copy is of one moment; the rest is of the same, unless blocks came or went meanwhile.
        """
        lists = dict(table)
        yield
        lengths: list[int] = []
        for part in parts(lists.values(), STEP_LENGTHS):
            lengths += map(len, part)
            yield
        begun = yield from _others(lists, self.lists)
        ended = yield from _others(self.lists, lists)
        nulls: dict[str, int] = {}
        if self.passes:
            for some in parts(lists.items()):
                nulls.update((name, leading(blocks, null, self._now.nulls.get(name, 0))) for name, blocks in some)
                yield
        yield from self._find_shared(lists, begun, nulls)
        again = yield from self._again()
        return Now(lists, lengths, nulls, begun, ended, again, {}, set())

    def _find_shared(self, lists: dict[str, list[Any]], begun: list[str], nulls: dict[str, int]) -> Steps:
        """Note the blocks of new lists that have several references.

        A block comes into a second list when that list begins: later ones are taken from the free blocks. What was
        found stands where the engine disturbs the moment.
        """
        looked_at = 0
        for name in begun:
            blocks = lists[name]
            if self._searched.get(name) is blocks:
                continue
            for block in itertools.islice(blocks, nulls.get(name, 0), None):
                looked_at += 1
                if block.ref_cnt > 1:
                    self._shared[block.block_id] = block
                elif not self.passes:
                    break
                if looked_at >= STEP_BLOCKS:
                    looked_at = 0
                    yield
            self._searched[name] = blocks
            looked_at += BLOCKS_OF_REQUEST
            if looked_at >= STEP_BLOCKS:
                looked_at = 0
                yield
        yield

    def _again(self) -> Steps:
        """The references of blocks in several lists, beyond the first of each; forgets those that are in one."""
        again = 0
        self._shared.pop(self._null_id, None)
        for part in parts(list(self._shared.values())):
            counts = list(map(_ref_cnt, part))
            again += sum(counts) - len(counts) + counts.count(0)
            if min(counts) <= 1:
                for block in itertools.compress(part, map((2).__gt__, counts)):
                    del self._shared[block.block_id]
            yield
        return again

    def follow(self, now: Now, left: Left) -> Steps:
        """Take over what the engine has now; the lists that requests do not hold any more are added to `left`."""
        # One with another list was preempted, and has resumed.
        for part in parts(now.ended, STEP_ENDED):
            left += zip(part, map(self.lists.__getitem__, part), strict=True)
            for name in part if self._ids or self._nulls else ():
                self._ids.pop(name, None)
                self._nulls.pop(name, None)
            yield
        self._now, self.lists = now, now.lists
        yield
        self._searched.clear()
        yield

    def sizes(self) -> Steps:
        """The distinct blocks of each owner's requests."""
        now = self._now
        sizes = [0] * len(OWNERS)
        sizes[RUNNING] = now.total()
        yield
        if now.ranks or now.dropped:
            lengths = dict(zip(now.lists, now.lengths, strict=True))
            yield
            for part in parts((*now.ranks, *now.dropped)):
                for name in part:
                    size = lengths[name] - now.nulls.get(name, 0)
                    sizes[RUNNING] -= size
                    if name in now.ranks:
                        sizes[now.ranks[name]] += size
                yield
        return sizes

    def look(self, *, anew: bool) -> Steps:
        """Look at the blocks that came since the last look, or at all."""
        now = self._now
        if anew or not self._is_kept:
            self._ids.clear()
            self._nulls.clear()
        for name in now.dropped:
            self._ids.pop(name, None)
        for passed in parts(now.nulls.items()):
            for name, nulls in passed:
                if nulls != self._nulls.get(name, 0):
                    self._pass(name, nulls)
            yield
        behind: list[tuple[str, int]] = []
        for some in parts(zip(now.lists, now.lengths, strict=True), STEP_NAMES):
            known = map(len, map(self._ids.get, [name for name, _ in some], itertools.repeat(())))
            behind += [one for one, ids in zip(some, known, strict=True) if one[1] != ids]
            yield
        self.looked_at = looked_at = 0
        for name, size in behind:
            if name in now.dropped:
                continue
            ids = self._ids.get(name)
            if ids is None:
                ids = self._ids[name] = array.array("i")
            blocks = self.lists[name]
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
