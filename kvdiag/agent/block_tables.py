"""What the owners of a pool's blocks hold, kept from one count to the next: only what changed is looked at.

vLLM has a list of blocks for each request and KV-cache group, which grows at its end until the request ends. To look at
a block costs a cache miss or two, so where every block is in one list, their lengths are all that is needed. Blocks in
several lists are at the beginning of a request that came later: as long as these have several references they are
looked at, and so are the same places of the lists that have them too. Where windows pass blocks, which then are
replaced by the null block, all are looked at.

Blocks that are shared or replaced in another way make the numbers of a count not add up: then all are looked at, and
compared.
"""

from __future__ import annotations

import array
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
STEP_ZEROS = 1000

Steps = Generator[None, None, Any]
"""Short steps of work, between which the engine may work."""

T = TypeVar("T")

Left = list[tuple[str, list[Any]]]
"""Lists of requests that do not hold their blocks any more, some of which may have been replaced before."""


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


_NONE = array.array("L")
_SHIFT = 32
_block_id = operator.attrgetter("block_id")


class References:
    """How many references the owners have to each block, and the distinct blocks of each owner.

    `by_block` has one number for each block, with `_SHIFT` bits for each owner, the first owner in the lowest.
    """

    __slots__ = ("blocks", "by_block")

    def __init__(self) -> None:
        """Of no blocks."""
        self.by_block: list[int] = []
        self.blocks = [0] * len(OWNERS)

    def begin(self, size: int, null: Any) -> Steps:
        """Of a pool of so many blocks; the null block is never counted."""
        for start in range(0, size, STEP_ZEROS):
            self.by_block.extend(itertools.repeat(0, min(STEP_ZEROS, size - start)))
            yield
        if null is not None:
            self.by_block[null.block_id] = 1

    def add(self, ids: Iterable[int], rank: int) -> None:
        """One more reference to each of these blocks, by the owner of that place in the order."""
        by_block, more, new = self.by_block, 1 << _SHIFT * rank, 0
        # Of this owner and those before it.
        first = (1 << _SHIFT * (rank + 1)) - 1
        for one in ids:
            before = by_block[one]
            by_block[one] = before + more
            if not before & first:
                new += 1
                if before:
                    self.blocks[_first(before)] -= 1
        self.blocks[rank] += new

    def remove(self, ids: Iterable[int], rank: int) -> None:
        """One reference less."""
        by_block, less, last = self.by_block, 1 << _SHIFT * rank, 0
        first = (1 << _SHIFT * (rank + 1)) - 1
        for one in ids:
            by_block[one] = after = by_block[one] - less
            if not after & first:
                last += 1
                if after:
                    self.blocks[_first(after)] += 1
        self.blocks[rank] -= last


def _first(references: int) -> int:
    return ((references & -references).bit_length() - 1) // _SHIFT


def _total(references: int) -> int:
    """The references of all owners."""
    total = 0
    while references:
        total += references & ((1 << _SHIFT) - 1)
        references >>= _SHIFT
    return total


class Now(NamedTuple):
    """What the engine has of one group at this moment: its lists, their lengths, the leading null blocks of each.

    `nulls` is `None` where there are no windows. `ranks` are the owners of requests that do not run.
    """

    lists: dict[str, list[Any]]
    sizes: dict[str, int]
    nulls: dict[str, int] | None
    ranks: dict[str, int]


class Group:
    """The blocks of one KV-cache group by request, as of the last count."""

    def __init__(self, references: References, null: Any) -> None:
        """Without requests."""
        self._references = references
        self._null = null
        self._now = Now({}, {}, None, {})
        # The ids of blocks that were looked at, from the first of each request; of most requests none is.
        self._ids: dict[str, array.array[int]] = {}
        self._known: dict[str, list[Any]] = {}
        self._nulls: dict[str, int] = {}
        self._looked_at = [0] * len(OWNERS)
        self._distinct = 0
        self.alone = [0] * len(OWNERS)
        """Blocks of each owner that were not looked at: each is in one list."""

    @property
    def blocks(self) -> int:
        """Distinct blocks with an owner."""
        return self._distinct + sum(self.alone)

    def nulls_of(self, name: str) -> int:
        """How many leading blocks of a request were the null block in the last count."""
        return self._nulls.get(name, 0)

    def forget(self, now: Now, left: Left) -> Steps:
        """Give up what requests do not hold any more; lists that they have let go of are added to `left`.

        All groups do so before any of them follows the engine: a block may have come from one group to another.
        """
        before, self._now = self._now, now
        lists = self._known = before.lists
        gone = yield from without(lists, now.lists)
        for number, name in enumerate(gone):
            if name in self._ids:
                yield from self._drop(name, before, left)
            else:
                left.append((name, lists.pop(name)))
                self._nulls.pop(name, None)
            if number % STEP_FIRST == STEP_FIRST - 1:
                yield
        yield
        # In the same order, unless a request started over.
        others = map(operator.is_not, lists.values(), now.lists.values())
        for name in list(itertools.compress(lists, others)):
            if lists[name] is not now.lists[name]:
                yield from self._drop(name, before, left)
        yield
        for name in before.ranks.keys() | now.ranks.keys():
            rank, other = before.ranks.get(name, RUNNING), now.ranks.get(name, RUNNING)
            if rank != other:
                ids = self._ids.get(name, _NONE)
                self._looked_at[rank] -= len(ids)
                self._looked_at[other] += len(ids)
                for start in range(0, len(ids), STEP_BLOCKS):
                    part = ids[start : start + STEP_BLOCKS]
                    self._change(part, (), rank)
                    self._change((), part, other)
                    yield
        for name, nulls in (now.nulls or {}).items():
            if nulls > self.nulls_of(name):
                self._pass(name, nulls)
                yield

    def follow(self) -> Steps:
        """Look at what requests hold beyond the last count, where that is needed."""
        now = self._now
        if now.nulls is not None:
            yield from self.look_at_all()
        else:
            new = yield from without(now.lists, self._known)
            for number, name in enumerate(new):
                blocks = now.lists[name]
                if blocks and blocks[0].ref_cnt > 1:
                    yield from self._look_at_shared(name)
                if number % STEP_FIRST == STEP_FIRST - 1:
                    yield
        self._sum_up()

    def look_at_all(self) -> Steps:
        """Look at all blocks that were not."""
        for number, (name, size) in enumerate(self._now.sizes.items()):
            yield from self._look(name, size)
            if number % STEP_REQUESTS == STEP_REQUESTS - 1:
                yield
        self._sum_up()

    def compare(self) -> Steps:
        """Compare all lists with the engine's; returns the number of blocks that had been replaced."""
        replaced = 0
        for name, ids in self._ids.items():
            blocks = self._now.lists[name]
            for start in range(0, len(ids), STEP_BLOCKS):
                part = blocks[start : start + STEP_BLOCKS]
                differ = map(operator.ne, ids[start : start + STEP_BLOCKS], map(_block_id, part))
                for place in list(itertools.compress(itertools.count(start), differ)):
                    self._replace(name, place, blocks[place].block_id)
                    replaced += 1
                yield
        return replaced

    def _look_at_shared(self, name: str) -> Steps:
        """Look at the first blocks of a new request, up to one that it has alone, and at the same ones of others."""
        blocks, size, shared = self._now.lists[name], self._now.sizes[name], 0
        while shared < size and blocks[shared].ref_cnt > 1:
            shared += 1
            if shared % STEP_BLOCKS == 0:
                yield
        yield from self._look(name, shared)
        for place in range(shared):
            block = blocks[place]
            if block.ref_cnt <= _total(self._references.by_block[block.block_id]):
                continue
            others = [
                other
                for other, its_size in self._now.sizes.items()
                if len(self._ids.get(other, _NONE)) <= place < its_size and self._now.lists[other][place] is block
            ]
            yield
            if not others:
                # A reference of no request; if it is one of another place after all, the sums show it.
                return
            for other in others:
                yield from self._look(other, min(shared, self._now.sizes[other]))

    def _look(self, name: str, size: int) -> Steps:
        """Look at the blocks of a request up to this length."""
        rank, blocks = self._now.ranks.get(name, RUNNING), self._now.lists[name]
        while (at := len(self._ids.get(name, _NONE))) < size:
            ids = array.array("L", map(_block_id, blocks[at : min(at + STEP_BLOCKS, size)]))
            if not ids:
                break
            self._ids.setdefault(name, array.array("L")).extend(ids)
            self._looked_at[rank] += len(ids)
            self._change((), ids, rank)
            yield

    def _drop(self, name: str, before: Now, left: Left) -> Steps:
        rank, ids = before.ranks.get(name, RUNNING), self._ids.pop(name, _NONE)
        left.append((name, before.lists.pop(name)))
        self._nulls.pop(name, None)
        self._looked_at[rank] -= len(ids)
        for start in range(0, len(ids), STEP_BLOCKS):
            self._change(ids[start : start + STEP_BLOCKS], (), rank)
            yield

    def _pass(self, name: str, nulls: int) -> None:
        """The window has passed all before this place."""
        for place in range(self.nulls_of(name), min(nulls, len(self._ids.get(name, _NONE)))):
            self._replace(name, place, self._null.block_id)
        self._nulls[name] = nulls

    def _replace(self, name: str, place: int, block_id: int) -> None:
        ids = self._ids[name]
        if ids[place] != block_id:
            rank = self._now.ranks.get(name, RUNNING)
            self._change((ids[place],), (block_id,), rank)
            ids[place] = block_id

    def _change(self, removed: Iterable[int], added: Iterable[int], rank: int) -> None:
        before = sum(self._references.blocks)
        if removed:
            self._references.remove(removed, rank)
        if added:
            self._references.add(added, rank)
        self._distinct += sum(self._references.blocks) - before

    def _sum_up(self) -> None:
        alone = [-looked_at for looked_at in self._looked_at]
        alone[RUNNING] += sum(self._now.sizes.values())
        for name, rank in self._now.ranks.items():
            size = self._now.sizes[name]
            alone[RUNNING] -= size
            alone[rank] += size
        self.alone = alone
