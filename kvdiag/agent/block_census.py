"""Who holds the blocks of vLLM's KV pool, and which have no owner, as counted in the engine core's process.

vLLM counts references to a block and not who has them. A block with a reference that no request holds, no free that
waits for a step in flight and no copy in flight, in three counts with a step of the engine between each, is orphaned:
it is not released before the server restarts. In this order:

1. A count (`block_count`) has the distinct blocks of each owner. Owners and free blocks add up to the pool; what is
   missing is unowned.
2. While more blocks are unowned than known, those of the counts before that are no longer held are looked at; then, if
   more stay unowned, the whole pool.
3. Blocks that the KV connector's own records name are pinned by the connector, not orphaned.
4. The last counts know the request that held an orphan last; requests that ended within one count stay unknown.

Steps are short, with a pause after `HOLD_SECONDS` of them, and a publication ends after `BUDGET_SECONDS`: a large pool
is counted over several publications. The copy of the lists of blocks is one exception, because the engine must not work
meanwhile: it is made once a publication at most, and given up once the free blocks have changed. Prompts and tokens are
never read.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterator
from typing import Any

from .block_count import STEP_BLOCKS, Count, Lists, Steps, pool_of, take
from .connector_pins import pinned_ids
from .schedulers import VLLM

BUDGET_SECONDS = 100e-6
"""CPU time of one publication: 0.01 % of a core."""

SEARCH_SECONDS = 1e-3
"""The same while blocks are missing whose ids are not known."""

LEAST_BLOCKS = 400
"""Looked at in each publication, however slow the machine is: a count of a few requests is complete at once."""

HOLD_SECONDS = 20e-6
RELEASE_SECONDS = 100e-6
"""Pause after a slice: the engine takes the interpreter meanwhile."""

CONFIRMED = 3
"""Counts, each after another step, in which a block must be unowned."""

UNSETTLED = 2
"""Counts in a row with more blocks unowned than known before the whole pool is looked at."""

MAX_EARLIER = 3
MAX_REQUESTS = 1024
MAX_SUSPECTS = 4096
MAX_ENDED = 2048
MAX_LISTED = 64
MAX_TEXT_CHARACTERS = 128
MAX_IMPOSSIBLE = 5

COMPLETE = -1
"""Follows the last step of a count: no other begins in the same publication."""


class _Suspect:
    """A block without an owner: in how many counts, since when, and who had it last."""

    __slots__ = ("counts", "holder", "pinned", "since_seconds")

    def __init__(self, holder: str | None) -> None:
        self.holder = holder
        self.counts = 0
        self.pinned = False
        self.since_seconds = time.monotonic()


class Census:
    """Reads the scheduler of this process, if it has one."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._begin(None)

    def _begin(self, scheduler: Any) -> None:
        self._of = id(scheduler)
        self._work: Iterator[int] | None = None
        self._result: dict[str, Any] | None = None
        self._alive: dict[str, Any] = {}
        self._ended: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self._finished_at: dict[str, float] = {}
        self._loading: set[str] = set()
        self._earlier: collections.deque[list[Lists]] = collections.deque(maxlen=MAX_EARLIER)
        self._suspects: dict[int, _Suspect] = {}
        self._step: Any = None
        self._was_idle = False
        self._unsettled = self._impossible = 0
        self._counts = self._closed = 0

    def read(self) -> dict[str, Any] | None:
        """The newest complete count, `None` without a scheduler or before the first.

        Raises:
            Exception: this vLLM keeps its blocks in another way, or something changed while it was read.
        """
        scheduler = VLLM.newest()
        if self._of != id(scheduler):
            self._begin(scheduler)
        if scheduler is None:
            return None
        try:
            self._note_ends(scheduler)
            del scheduler
            self._continue()
        except BaseException:
            self._of = 0
            raise
        return self._result

    def _continue(self) -> None:
        """Work until a count is complete or the budget is spent."""
        self._work = self._work or self._counts_without_end()
        began_seconds, blocks = time.thread_time(), 0
        budget_seconds = SEARCH_SECONDS if self._unsettled else BUDGET_SECONDS
        while blocks < LEAST_BLOCKS or time.thread_time() - began_seconds < budget_seconds:
            slice_seconds = time.perf_counter()
            while time.perf_counter() - slice_seconds < HOLD_SECONDS:
                looked_at = next(self._work)
                if looked_at == COMPLETE:
                    return
                blocks += looked_at
            time.sleep(RELEASE_SECONDS)

    def _note_ends(self, scheduler: Any) -> None:
        """Keep how requests ended that the scheduler has dropped since the last publication; release their objects."""
        requests = scheduler.requests
        # A long queue holds no blocks, and copying it would hold the interpreter.
        alive = (
            dict(requests)
            if len(requests) <= MAX_REQUESTS
            else {one.request_id: one for one in list(scheduler.running)}
        )
        for name in self._alive.keys() - alive.keys():
            self._ended[name] = _about(self._alive[name])
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        self._alive = alive

    def _counts_without_end(self) -> Steps:
        """Steps of work, and `COMPLETE` after each count, or where none can be had now."""
        while (scheduler := VLLM.newest()) is not None:
            steps = take(scheduler, list(self._suspects))
            pool, _ = pool_of(scheduler)
            del scheduler
            count: Count | None = yield from steps
            if count is None:
                yield COMPLETE
                continue
            if count.unowned < 0:
                self._impossible += 1
                if self._impossible >= MAX_IMPOSSIBLE:
                    raise ValueError(f"owners hold {-count.unowned} blocks more than are in use")
                yield COMPLETE
                continue
            self._impossible = 0
            # Without a step since the last count a block may still be between two owners, unless nothing works.
            if count.step is not self._step or (count.idle and self._was_idle):
                yield from self._judge(count, pool)
            self._step, self._was_idle = count.step, count.idle
            self._earlier.appendleft(count.lists)
            yield COMPLETE
            if self._unsettled >= UNSETTLED:
                # A request that ended within one count was not observed to hold it.
                yield from self._look(pool.blocks, count.held, None)
                self._unsettled = 0

    def _judge(self, count: Count, pool: Any) -> Steps:
        for one in list(self._suspects):
            if one in count.referenced and not count.held[one]:
                self._suspects[one].counts += 1
            else:
                del self._suspects[one]
        yield 0
        if count.unowned > len(self._suspects):
            for lists in itertools.chain.from_iterable(self._earlier):
                yield from self._look(lists.blocks, count.held, lists)
        self._unsettled = self._unsettled + 1 if count.unowned > len(self._suspects) else 0
        due = [one for one in self._suspects.values() if one.counts >= CONFIRMED - 1]
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
        self._counts += 1
        self._loading.update(count.loading)
        self._loading &= self._alive.keys() | self._ended.keys()
        self._publish(count, scheduler, connector)

    def _look(self, blocks: list[Any], held: bytearray, lists: Lists | None) -> Steps:
        """Suspect those of some blocks that have a reference and no owner; `lists` know who had them."""
        for start in range(0, len(blocks), STEP_BLOCKS):
            chunk = blocks[start : start + STEP_BLOCKS]
            for place in [place for place, block in enumerate(chunk) if block.ref_cnt > 0]:
                one = chunk[place].block_id
                if not held[one] and one not in self._suspects and len(self._suspects) < MAX_SUSPECTS:
                    self._suspects[one] = _Suspect(None if lists is None else lists.holder(start + place))
            yield len(chunk)

    def _publish(self, count: Count, scheduler: Any, connector: Any) -> None:
        now_seconds = time.monotonic()
        pinned = [one for one in self._suspects.values() if one.pinned]
        orphans = {
            one: suspect
            for one, suspect in self._suspects.items()
            if suspect.counts >= CONFIRMED and not suspect.pinned
        }
        unconfirmed = count.unowned - len(pinned) - len(orphans)
        self._closed = 0 if unconfirmed else self._closed + 1
        self._finished_at = {name: self._finished_at.get(name, now_seconds) for name in count.finished}
        owners = {**count.owners, "pinned": count.owners["pinned"] + len(pinned)}
        parallel = getattr(scheduler, "parallel_config", None)
        rank = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
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
            "culprits": self._culprits(orphans),
        }

    def _culprits(self, orphans: dict[int, _Suspect]) -> list[dict[str, Any]]:
        """The requests that last held orphans, the newest of them."""
        counts = collections.Counter(suspect.holder for suspect in orphans.values() if suspect.holder)
        found = []
        for name in list(counts)[-MAX_LISTED:]:
            about = self._ended.get(name)
            if about is None and name in self._alive:
                about = _about(self._alive[name])
            loading = {"loading": True} if name in self._loading else {}
            found.append({"id": name[:MAX_TEXT_CHARACTERS], "blocks": counts[name], **(about or {}), **loading})
        return found


def _about(request: Any) -> dict[str, Any]:
    """A request's lengths, and how it ended; never its prompt or output."""
    status = str(getattr(getattr(request, "status", None), "name", ""))
    if status.startswith("FINISHED_"):
        end = {"FINISHED_ABORTED": "aborted", "FINISHED_ERROR": "failed"}.get(status, "finished")
    else:
        end = "preempted" if getattr(request, "num_preemptions", 0) else "running"
    lengths = {
        name: getattr(request, attribute, None)
        for name, attribute in (("prompt_tokens", "num_prompt_tokens"), ("output_tokens", "num_output_tokens"))
    }
    return {**{name: value for name, value in lengths.items() if type(value) is int}, "end": end}


def _connector_name(connector: Any) -> str:
    inner = getattr(connector, "_connectors", None)
    names = [type(one).__name__ for one in (connector, *(inner if isinstance(inner, (list, tuple)) else ()))]
    return " ".join(names)[:MAX_TEXT_CHARACTERS]


def _age(now_seconds: float, times: Any) -> float | None:
    return max((now_seconds - since_seconds for since_seconds in times), default=None)
