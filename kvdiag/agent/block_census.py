"""Who holds the blocks of vLLM's KV pool, and which have no owner, as counted in the engine core's process.

vLLM counts references to a block and not who has them. A block with a reference that no request holds, no free that
waits for a step in flight and no copy in flight, in three counts with a step of the engine between each, is orphaned:
it is not released before the server restarts. In this order:

1. A count (`block_count`) adds up the lengths of all lists. Where that is what is in use, every block has an owner, and
   none is looked at; else it has the distinct blocks of each owner. Owners and free blocks add up to the pool; what is
   missing is unowned.
2. While more blocks are unowned than known, the blocks without an owner are looked at: those that have a reference are
   suspects, and the next count clears those that the engine has taken meanwhile.
3. Blocks that the KV connector's own records name are pinned by the connector, not orphaned.
4. An orphan's last holder is the request that has let go of a list with it since the last count in which every block
   had an owner; those that began and ended between two counts are not known.

Steps are short, with a pause after `HOLD_SECONDS` of them. The next count waits until the CPU time of the last one is
spread thinly: one second for each `COUNT_SECONDS` that it took. Prompts and tokens are never read.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from typing import Any

from .block_count import Count, Counter
from .block_tables import Steps, parts
from .connector_pins import pinned_ids
from .schedulers import VLLM
from .vllm_pool import pool_of

COUNT_SECONDS = 80e-6
"""CPU time of a second: what a count takes is spread over the seconds after it."""

MAX_WAIT_SECONDS = 15.0

LONGEST_SECONDS = 8e-3
"""CPU time of one publication: a count that takes more is completed by the next ones."""

SEARCH_SECONDS = LONGEST_SECONDS
"""As this, while numbers do not add up: blocks are looked at."""

RECENT_BLOCKS = 4096
MAX_LATE = 3
"""A look at more blocks is over too late for a search, as many times in a row: the engine has taken others since."""

HOLD_SECONDS = 25e-6
RELEASE_SECONDS = 100e-6
"""Pause after a slice: the engine takes the interpreter meanwhile."""

CONFIRMED = 3
"""Counts, each after another step, in which a block must be unowned."""

UNSETTLED = 2
"""Counts in a row with more blocks unowned than known before all lists are looked at."""

ANEW_COUNTS = 64
"""Counts after which all blocks are looked at once more."""

MAX_SUSPECTS = 4096
MAX_LISTED = 64
STEP_HELD = 1024
STEP_LOOK = 200
STEP_SUSPECTS = 64
MAX_TEXT_CHARACTERS = 128
MAX_IMPOSSIBLE = 5

COMPLETE = True
"""What follows the last step: no other begins in the same publication."""


class _Suspect:
    """A block without an owner: in how many counts, since when, and who had it last."""

    __slots__ = ("block", "counts", "holder", "pinned", "since_seconds")

    def __init__(self, block: Any) -> None:
        self.block = block
        self.holder: str | None = None
        self.counts = 0
        self.pinned = False
        self.since_seconds = time.monotonic()


class Census:
    """Reads the scheduler of this process, if it has one."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Read nothing yet."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._error: Exception | None = None
        self._begin(None)

    def _begin(self, scheduler: Any) -> None:
        self._of = id(scheduler)
        self._due_seconds = float("-inf")
        self._spent_seconds = self._begun_seconds = 0.0
        self._work: Iterator[bool | None] | None = None
        self._result: dict[str, Any] | None = None
        self._finished_at: dict[str, float] = {}
        self._loading: set[str] = set()
        self._counter = Counter()
        self._searched = 0
        self._suspects: dict[int, _Suspect] = {}
        self._step: Any = None
        self._was_idle = False
        self._unsettled = self._impossible = self._late = 0
        self._known = False
        self._anew = False
        self._taken = self._counts = self._closed = 0

    def read(self) -> dict[str, Any] | None:
        """The newest complete count, `None` without a scheduler or before the first.

        Raises:
            Exception: this vLLM keeps its blocks in another way, or something changed while it was read.
        """
        scheduler = VLLM.newest()
        if self._of != id(scheduler):
            self._error = None
            self._begin(scheduler)
        if scheduler is None or self._clock() < self._due_seconds:
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._result
        try:
            self._continue()
            self._error = None
        except Exception as error:
            self._begin(scheduler)
            self._error = error
            self._due_seconds = self._clock() + MAX_WAIT_SECONDS
            raise
        return self._result

    def _continue(self) -> None:
        """Work until a count is complete; the next work is due when the CPU time of this one is spread thinly."""
        self._work = self._work or self._counts_without_end()
        if not self._spent_seconds:
            self._begun_seconds = self._clock()
        began_seconds = self._cpu_clock()
        complete = False
        while not complete and self._cpu_clock() - began_seconds < LONGEST_SECONDS:
            complete = _worked(self._work)
            if not complete:
                time.sleep(RELEASE_SECONDS)
        self._spent_seconds += self._cpu_clock() - began_seconds
        if complete:
            spent_seconds, self._spent_seconds = self._spent_seconds, 0.0
            unconfirmed = any(one.counts < CONFIRMED and not one.pinned for one in self._suspects.values())
            searches = self._unsettled or self._late or self._anew or unconfirmed
            apart_seconds = spent_seconds / (SEARCH_SECONDS if searches else COUNT_SECONDS)
            self._due_seconds = self._begun_seconds + min(apart_seconds, MAX_WAIT_SECONDS)

    def _counts_without_end(self) -> Iterator[bool | None]:
        """Steps of work, and `COMPLETE` after each count, or where none can be had now."""
        while (scheduler := VLLM.newest()) is not None:
            keeps = bool(self._late) or any(not one.counts for one in self._suspects.values())
            asked = list(self._suspects)
            steps = self._counter.take(scheduler, asked, known=self._known, anew=self._anew, keeps=keeps)
            pool, _ = pool_of(scheduler)
            del scheduler
            count: Count | None = yield from steps
            if count is None:
                yield COMPLETE
                continue
            # A block that was replaced in the midst of a list is found at the latest then.
            self._taken += 1
            self._anew = count.unowned < 0 or self._taken % ANEW_COUNTS == 0
            if count.unowned < 0:
                self._impossible += 1
                if self._impossible >= MAX_IMPOSSIBLE:
                    raise ValueError(f"owners hold {-count.unowned} blocks more than are in use")
                yield COMPLETE
                continue
            self._impossible = 0
            if self._is_later(count):
                yield from self._judge(count, pool)
            yield COMPLETE

    def _is_later(self, count: Count) -> bool:
        """Whether the engine made a step since the last count: else a block may still be between two owners.

        Not so where nothing works.
        """
        step, was_idle = self._step, self._was_idle
        self._step, self._was_idle = count.step, count.idle
        return count.step is not step or (count.idle and was_idle)

    def _judge(self, count: Count, pool: Any) -> Steps:
        yield
        for number, one in enumerate(list(self._suspects)):
            if one in count.referenced and (count.held is None or not count.held[one]):
                self._suspects[one].counts += 1
            else:
                del self._suspects[one]
            if number % STEP_SUSPECTS == STEP_SUSPECTS - 1:
                yield
        explained = count.unowned <= len(self._suspects)
        self._known = explained and all(one.counts >= CONFIRMED for one in self._suspects.values())
        late = not explained and count.looked_at > RECENT_BLOCKS and self._late < MAX_LATE
        self._late = self._late + 1 if late else 0
        yield from self._find_holders()
        if not explained and not late:
            yield from self._search(pool.blocks, count.held)
            self._unsettled = self._unsettled + 1 if count.unowned > len(self._suspects) else 0
        yield from self._counter.settle(known=self._known)
        self._anew = self._anew or self._unsettled % ANEW_COUNTS == UNSETTLED
        due = any(one.counts >= CONFIRMED - 1 for one in self._suspects.values())
        scheduler = VLLM.newest()
        connector = getattr(scheduler, "connector", None)
        if due and connector is not None:
            pinned = yield from pinned_ids(connector, scheduler, pool)
            for one, suspect in self._suspects.items():
                if pinned is None:
                    # Nothing shows that the connector does not use it.
                    suspect.counts = min(suspect.counts, CONFIRMED - 1)
                elif suspect.counts:
                    suspect.pinned = one in pinned
                    suspect.counts = 1 if suspect.pinned else suspect.counts
        yield
        self._loading.update(count.loading)
        if self._loading:
            self._loading &= self._counter.requests.keys() | self._counter.ended.keys()
        yield
        yield from self._publish(count, scheduler)

    def _search(self, blocks: list[Any], held: Any) -> Steps:
        """Suspect the blocks that have a reference and no owner, from where the last search ended.

        The engine works meanwhile, and the next count clears blocks that it has taken since.
        """
        for _ in range(0, len(blocks), STEP_HELD):
            start = self._searched if self._searched < len(blocks) else 0
            self._searched = start + STEP_HELD
            [unowned] = (held[start : self._searched] == 0).nonzero()
            yield
            for part in parts(unowned.tolist(), STEP_SUSPECTS):
                for block in map(blocks.__getitem__, map(start.__add__, part)):
                    if block.ref_cnt > 0 and not block.is_null and block.block_id not in self._suspects:
                        self._suspects[block.block_id] = _Suspect(block)
                yield
            if len(self._suspects) >= MAX_SUSPECTS:
                return

    def _find_holders(self) -> Steps:
        """Who had the blocks last that one count has confirmed: who had a block last began last."""
        wanted = {id(one.block): one for one in self._suspects.values() if one.counts == 1}
        yield
        for name, blocks in (one for left in self._counter.left for one in reversed(left)):
            if not wanted:
                return
            for start in range(0, len(blocks), STEP_LOOK):
                for one in wanted.keys() & set(map(id, blocks[start : start + STEP_LOOK])):
                    wanted.pop(one).holder = name
                yield

    def _publish(self, count: Count, scheduler: Any) -> Steps:
        self._counts += 1
        now_seconds = self._clock()
        connector = getattr(scheduler, "connector", None)
        pinned = [one for one in self._suspects.values() if one.pinned]
        orphans = {
            one: suspect
            for one, suspect in self._suspects.items()
            if suspect.counts >= CONFIRMED and not suspect.pinned
        }
        unconfirmed = count.unowned - len(pinned) - len(orphans)
        yield
        self._closed = 0 if unconfirmed else self._closed + 1
        self._finished_at = {name: self._finished_at.get(name, now_seconds) for name in count.finished}
        owners = {**count.owners, "pinned": count.owners["pinned"] + len(pinned)}
        parallel = getattr(scheduler, "parallel_config", None)
        rank = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
        culprits = self._culprits(orphans) if orphans else []
        yield
        self._result = {
            "at_monotonic_seconds": now_seconds,
            "engine": str(rank)[:MAX_TEXT_CHARACTERS],
            "usable_blocks": count.usable,
            "owners": {
                **owners,
                "cached_free": count.cached_free,
                "free": count.free - count.cached_free,
                "orphaned": len(orphans),
                "unconfirmed": unconfirmed,
            },
            "groups": count.groups,
            "counts": self._counts,
            "closed_counts": self._closed,
            "connector": None if connector is None else _connector_name(connector),
            "connector_oldest_seconds": _age(now_seconds, self._finished_at.values()),
            "pinned_oldest_seconds": _age(now_seconds, [one.since_seconds for one in pinned]),
            "orphans": sorted(orphans)[-MAX_LISTED:],
            "culprits": culprits,
        }

    def _culprits(self, orphans: dict[int, _Suspect]) -> list[dict[str, Any]]:
        """The requests that last held orphans, the newest of them."""
        counts = collections.Counter(suspect.holder for suspect in orphans.values() if suspect.holder)
        found = []
        for name in list(counts)[-MAX_LISTED:]:
            kept = self._counter.kept(name)
            about = {} if kept is None else _about(*kept)
            loading = {"loading": True} if name in self._loading else {}
            found.append({"id": name[:MAX_TEXT_CHARACTERS], "blocks": counts[name], **about, **loading})
        return found


def _worked(work: Iterator[bool | None]) -> bool:
    """Do some steps of it, as long as the engine can wait; whether a count is complete."""
    began_seconds = time.perf_counter()
    while time.perf_counter() - began_seconds < HOLD_SECONDS:
        if (step := next(work, COMPLETE)) is not None:
            return step is COMPLETE
    return False


def _about(status: Any, preemptions: Any, prompt_tokens: Any, output_tokens: Any) -> dict[str, Any]:
    """How a request ended, and its lengths."""
    name = str(getattr(status, "name", ""))
    if name.startswith("FINISHED_"):
        end = {"FINISHED_ABORTED": "aborted", "FINISHED_ERROR": "failed"}.get(name, "finished")
    else:
        end = "preempted" if preemptions else "running"
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return {**{name: value for name, value in lengths.items() if type(value) is int}, "end": end}


def _connector_name(connector: Any) -> str:
    inner = getattr(connector, "_connectors", None)
    names = [type(one).__name__ for one in (connector, *(inner if isinstance(inner, (list, tuple)) else ()))]
    return " ".join(names)[:MAX_TEXT_CHARACTERS]


def _age(now_seconds: float, times: Any) -> float | None:
    return max((now_seconds - since_seconds for since_seconds in times), default=None)
