"""Who lost SGLang's pages: never a wrong request, however many end, come and go, or are miscounted meanwhile."""

import itertools
import random
from typing import Any

import pytest

from kvdiag.agent.schedulers import SGLANG
from kvdiag.agent.sglang_census import SGLangCensus
from tests.unit.agent import sglang_stand_in as stand_in
from tests.unit.agent.sglang_stand_in import FINISH_ABORT, FINISH_LENGTH, PAGE_TOKENS

PAGES = 1000
LOSSES = (2, 5)
DIPS = (0, 1, -1, 11, -11)
"""Pages by which a count of free ones is wrong. None of them is as many as a request lost: the sums would be right."""


class SGLang(stand_in.Scheduler):
    """The class whose constructor is wrapped."""


class World:
    """A scheduler under a load that never pauses, and what a census says of it."""

    def __init__(self, seed: int) -> None:
        """Begin with some requests."""
        assert SGLANG.wrap(type("Module", (), {"Scheduler": SGLang}))
        self._rng = random.Random(seed)  # noqa: S311 - a load, not secrets
        self._scheduler = SGLang(PAGES)
        self._dip = self._dips = 0
        allocator = self._scheduler.token_to_kv_pool_allocator
        allocator.available_size = lambda: (self._scheduler.free_now - self._dip) * PAGE_TOKENS
        self.census = SGLangCensus(clock=itertools.count(0.0, 5.0).__next__)
        self._names = map(str, itertools.count())
        self._noted: set[str] = set()
        self.count: dict[str, Any] = {}

    def work(self, *, dips: bool = True) -> None:
        """A step: some requests begin and end, some come and go unnoted, and now and then the census looks."""
        for _ in range(self._rng.randrange(3)):
            self._scheduler.start(next(self._names), pages=self._rng.randrange(6, 9))
        while len(self._scheduler.requests) > self._rng.randrange(3, 30):
            self.end()
        if not self._rng.randrange(4):
            self._scheduler.rows_given += 1
        if self._rng.randrange(3):
            self._scheduler.run_batch(self.census.poll)
            self._noted |= {one.rid for one in self._scheduler.requests}
        if self._rng.randrange(2):
            # Two looks in a row at most.
            self._dips = self._dips + 1 if dips and self._dips < 2 and not self._rng.randrange(3) else 0
            self._dip = self._rng.choice(DIPS) if self._dips else 0
            self.count = self._scheduler.run_batch(self.census.read) or self.count
            self._noted |= {one.rid for one in self._scheduler.requests}
            self._dip = 0

    def end(self, lose: int = 0) -> str | None:
        """One ends; its name, `None` if none was noted."""
        if not self._scheduler.requests or (lose and not self._rng.randrange(4)):
            self._scheduler.rows_given += 1
            self._scheduler.free(self._scheduler.free_now - lose)
            return None
        request = self._rng.choice(self._scheduler.requests)
        self._scheduler.finish(request, self._rng.choice((FINISH_ABORT, FINISH_LENGTH))(), lose=lose)
        return request.rid if request.rid in self._noted else None


@pytest.mark.parametrize("seed", range(40))
def test_requests_that_lost_pages_are_among_those_named(seed: int) -> None:
    """All that were noted are named; where one was not, more are counted than named."""
    world = World(seed)
    rng = random.Random(seed)  # noqa: S311 - as above
    losers: dict[int, str | None] = {}
    for _ in range(20):
        world.work(dips=False)
    for pages in LOSSES:
        for _ in range(rng.randrange(12)):
            world.work()
        losers[pages] = world.end(lose=pages)
    for _ in range(8):
        world.work()
    for _ in range(100):
        world.work(dips=False)
    assert sum(LOSSES) == world.count["owners"]["orphaned"]
    named = world.count["culprits"]
    expected: dict[int, set[str | None]] = {sum(LOSSES): set(losers.values())}
    expected |= {pages: {name} for pages, name in losers.items()}
    for pages, names in expected.items():
        group = [one for one in named if one["blocks"] == pages]
        if group:
            more = group[0].get("among", 1) - len(group)
            missing = names - {one["id"] for one in group}
            assert missing <= {None}
            assert more >= len(missing)
    assert set(losers.values()) - {None} <= {one["id"] for one in named}
    SGLANG.forget()
