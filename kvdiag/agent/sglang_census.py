"""Who holds the pages of SGLang's KV pool, and how many have no owner, as counted in its scheduler's process.

A look (`sglang_pool`) is a few numbers of the scheduler's own and of each request. In this order:

1. A publication looks once the scheduler is at rest and the CPU time of the last look is spread thinly. In between, the
   requests that run are noted where they have changed, two to ten times a second. While pages without an owner are
   not confirmed, and for `CLOSE_SECONDS` after, every publication looks, and so does a note of one that has ended.
2. Pages without an owner in three looks in a row, with a forward pass between each, are orphaned: the least of the
   three. Cached pages that are in use in three looks while nothing runs are, too: their lock is never released.
3. Where the pages without an owner grew, the requests that ended since the look before held them: one, or one of
   several that ended at once. The number must be the same in three looks in a row: where it goes up and down, all that
   ended meanwhile may have held them. Requests that came and went between two notes count as ones that ended, too: how
   many there were is known by the rows of the table of tokens that SGLang has given out.
4. Orphans that find an owner again show that an owner is not counted: from then on nothing is published but that.

Prompts and tokens are never read.
"""

from __future__ import annotations

import collections
import contextlib
import math
import operator
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .schedulers import SGLANG
from .sglang_pool import RELEASE_SECONDS, Look, active, is_quiet, is_same, lists_of, look, lost_pages, refusal

LOOK_SECONDS, NOTE_SECONDS = 80e-6, 60e-6
"""CPU time of a second: what a look, or a note, takes is spread over the time after it."""

MAX_WAIT_SECONDS = 10.0
CLOSE_SECONDS = 10.0
BUDGET_SECONDS = 1e-3
"""CPU time of the looks after requests that ended, of one second, after which no other begins."""

POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 0.4
TRIES = 8
PAUSE_SECONDS = 1e-3
CONFIRMED = 3
MAX_IMPOSSIBLE = 5
MAX_REQUESTS = 1024
MAX_GROUPS = 64
MAX_LISTED = 64
MAX_TEXT_CHARACTERS = 128

_finished_reason = operator.attrgetter("finished_reason")


class _Group(NamedTuple):
    """Pages that lost their owner at once: how many were without one then, and of `among` that ended, those noted."""

    unowned: int
    pages: int
    among: float
    ended: list[dict[str, Any]]


class _Ended:
    """Requests that ended, and how many more did that were not noted; infinite where that is not known."""

    def __init__(self) -> None:
        self.noted: list[dict[str, Any]] = []
        self.more = 0.0

    def add(self, noted: list[dict[str, Any]], more: float = 0.0) -> None:
        """Add some, of which the oldest are only counted where they are too many."""
        self.noted += noted
        self.more += more + max(len(self.noted) - MAX_REQUESTS, 0)
        del self.noted[:-MAX_REQUESTS]

    def take(self, other: _Ended) -> None:
        """Move those of the other here."""
        self.add(other.noted, other.more)
        other.clear()

    def clear(self) -> None:
        """Forget all."""
        self.noted, self.more = [], 0.0


class SGLangCensus:
    """Reads the scheduler of this process, if it has one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Read nothing yet."""
        self._clock = clock
        self._begin(None)

    def _begin(self, scheduler: Any) -> None:
        self._of = id(scheduler)
        self._checked = False
        self._engine: str | None = "0"
        self._result: dict[str, Any] | None = None
        self._lists: list[Any] = []
        self._listed: set[Any] = set()
        self._finished: set[Any] = set()
        self._ended, self._holders, self._later = _Ended(), _Ended(), _Ended()
        self._begun = self._unowned = self._equal = 0
        self._rows: int | None = None
        self._looks: collections.deque[int] = collections.deque(maxlen=CONFIRMED)
        self._locked: collections.deque[int] = collections.deque(maxlen=CONFIRMED)
        self._groups: list[_Group] = []
        self._last: Look | None = None
        self._contradiction: str | None = None
        self._counts = self._closed = self._orphaned = self._fewer = self._impossible = 0
        self._left_seconds = 0.0
        self._due_seconds = self._close_until_seconds = float("-inf")

    def read(self) -> dict[str, Any] | None:
        """The newest count, `None` without a scheduler, before the first, and on ranks that share another's pool.

        Raises:
            Exception: this SGLang keeps its pages in another way.
        """
        scheduler = self._scheduler()
        if scheduler is None or self._engine is None:
            return None
        self._left_seconds = BUDGET_SECONDS
        now_seconds = self._clock()
        if now_seconds >= self._due_seconds or now_seconds < self._close_until_seconds:
            began_seconds = time.thread_time()
            self._look_at_rest(scheduler)
            apart_seconds = (time.thread_time() - began_seconds) / LOOK_SECONDS
            self._due_seconds = now_seconds + min(apart_seconds, MAX_WAIT_SECONDS)
        if self._contradiction is not None:
            raise ValueError(self._contradiction)
        return self._result

    def _look_at_rest(self, scheduler: Any) -> None:
        """Look once the scheduler is at rest, or give up."""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_SECONDS)
            if self._is_noted(scheduler) and is_quiet(SGLANG.thread) and self._look(scheduler, SGLANG.thread):
                return

    def poll(self) -> float | None:
        """Note the requests that run; returns the seconds until it is due again, `None` without a scheduler."""
        scheduler = self._scheduler()
        if scheduler is None or self._engine is None:
            return None
        began_seconds = time.thread_time()
        noted = self._is_noted(scheduler)
        if self._left_seconds <= 0 or not self._is_unsettled:
            apart_seconds = (time.thread_time() - began_seconds) / NOTE_SECONDS
            return min(max(apart_seconds, POLL_SECONDS), MAX_POLL_SECONDS)
        if not noted:
            time.sleep(RELEASE_SECONDS)
        if self._is_noted(scheduler) and is_quiet(SGLANG.thread):
            self._look(scheduler, SGLANG.thread)
        self._left_seconds -= time.thread_time() - began_seconds
        return POLL_SECONDS

    @property
    def _is_unsettled(self) -> bool:
        """Whether a look may show who held pages: the fewer have ended since the last, the better."""
        return self._clock() < self._close_until_seconds and (bool(self._ended.noted) or self._equal < CONFIRMED)

    def last_look(self) -> dict[str, Any] | None:
        """The count by a scheduler that is dying of its own check, in whose thread this runs."""
        scheduler = self._scheduler()
        if scheduler is None or self._engine is None:
            return None
        self._note(scheduler)
        # Nothing moves any more: as many looks as one has to be confirmed by.
        for _ in range(CONFIRMED):
            self._look(scheduler, None, settled=True)
        if self._result is None or self._last is None:
            return None
        # The census is complete without their ids.
        with contextlib.suppress(Exception):
            lost = lost_pages(scheduler, self._listed)
            if len(lost) == self._last.unowned:
                self._result["orphans"] = lost[-MAX_LISTED:]
        return self._result

    def _scheduler(self) -> Any:
        """The scheduler of this process; `_engine` is `None` where another rank counts the same pool."""
        scheduler = SGLANG.newest()
        if self._of != id(scheduler):
            self._begin(scheduler)
        if scheduler is not None and not self._checked:
            reason = refusal(scheduler)
            if reason is not None:
                raise ValueError(reason)
            self._engine = _engine(scheduler)
            self._checked = True
        return scheduler

    def _is_noted(self, scheduler: Any) -> bool:
        """Whether the requests that run are those noted; if not, they are now."""
        # A batch that some leave gets another list, and others come to its end.
        if is_same(self._lists, lists_of(scheduler)):
            return True
        self._note(scheduler)
        return False

    def _note(self, scheduler: Any) -> None:
        """Keep how requests ended that no longer run; release their objects."""
        self._lists = lists_of(scheduler)
        listed, before = set(active(scheduler)), self._listed
        if ended := before - listed:
            self._end(ended - self._finished)
            self._finished &= listed
        # A session's request may run on the row that the one before had.
        self._begun += sum(getattr(one, "session", None) is None for one in listed - before)
        self._listed = listed

    def _end(self, requests: set[Any]) -> None:
        self._ended.add([{"id": str(one.rid)[:MAX_TEXT_CHARACTERS], **_about(one)} for one in requests])

    def _look(self, scheduler: Any, thread: int | None, *, settled: bool = False) -> bool:
        """Look once and judge it; returns whether the scheduler was at rest."""
        found = look(scheduler, self._listed, thread)
        if found is None:
            return False
        time.sleep(RELEASE_SECONDS)
        if found.free == found.usable:
            # The cache and the pool were cleared, orphans included, which takes an idle server.
            self._looks.clear()
            self._locked.clear()
            self._groups.clear()
            self._orphaned = self._fewer = self._unowned = 0
            self._equal = CONFIRMED
            self._holders.clear()
        self._judge(found, settled)
        return True

    def _judge(self, found: Look, settled: bool) -> None:
        last, self._last = self._last, found
        if found.idle and not found.session:
            self._locked.append(found.cached_protected)
        locked = min(self._locked) if len(self._locked) == CONFIRMED else 0
        locked = min(locked, found.cached_protected)
        unowned = found.unowned + locked
        if unowned < 0:
            self._impossible += 1
            if self._impossible >= MAX_IMPOSSIBLE or settled:
                self._contradiction = f"owners hold {-unowned} pages more than the pool has: pages were freed twice"
            return
        self._impossible = 0
        # Without a forward pass since the last look a page may still be between two owners, unless nothing works.
        if last is not None and found.step == last.step and not (found.idle and last.idle) and not settled:
            return
        self._blame(found)
        self._looks.append(unowned)
        self._counts += 1
        confirmed = min(self._looks) if len(self._looks) == CONFIRMED else 0
        self._fewer = self._fewer + 1 if unowned < self._orphaned else 0
        if self._fewer >= CONFIRMED:
            released = self._orphaned - unowned
            self._contradiction = f"{released} pages without an owner were released: one of their owners is not counted"
            return
        self._orphaned = max(self._orphaned, confirmed)
        orphaned = min(self._orphaned, unowned)
        self._closed = 0 if unowned > orphaned else self._closed + 1
        if unowned > orphaned:
            self._close_until_seconds = self._clock() + CLOSE_SECONDS
        self._publish(found, orphaned, unowned - orphaned, locked)

    def _blame(self, found: Look) -> None:
        """Note who ended as pages lost their owner. Whose lock is never released is not known."""
        given = None if found.rows is None or self._rows is None else found.rows - self._rows
        self._ended.add([], math.inf if given is None or given < 0 else max(given - self._begun, 0))
        self._rows, self._begun = found.rows, 0
        known = self._groups[-1].unowned if self._groups else 0
        if found.unowned > known:
            # One that has ended leaves its batch with the next step.
            finished = set(filter(_finished_reason, self._listed)) - self._finished
            self._end(finished)
            self._finished |= finished
        if found.unowned == self._unowned and self._equal:
            self._later.take(self._ended)
            self._equal += 1
        else:
            self._holders.take(self._later)
            self._holders.take(self._ended)
            self._unowned, self._equal = found.unowned, 1
        if self._equal < CONFIRMED:
            return
        if found.unowned > known:
            among = len(self._holders.noted) + self._holders.more
            noted = [] if among == math.inf else self._holders.noted[-MAX_LISTED:]
            self._groups.append(_Group(found.unowned, found.unowned - known, among, noted))
            del self._groups[:-MAX_GROUPS]
        self._holders.clear()
        self._later.clear()

    def _publish(self, found: Look, orphaned: int, unconfirmed: int, locked: int) -> None:
        self._result = {
            "at_monotonic_seconds": time.monotonic(),
            "engine": self._engine,
            "usable_blocks": found.usable,
            "owners": {
                **dict.fromkeys(("connector", "deferred", "pinned"), 0),
                "running": found.running,
                "waiting": found.waiting,
                "session": found.session,
                "cached_protected": found.cached_protected - locked,
                "cached_free": found.cached_free,
                "free": found.free,
                "orphaned": orphaned,
                "unconfirmed": unconfirmed,
            },
            "groups": [],
            "counts": self._counts,
            "closed_counts": self._closed,
            "connector": None,
            "orphans": [],
            "culprits": self._culprits(orphaned),
        }

    def _culprits(self, orphaned: int) -> list[dict[str, Any]]:
        """The requests that ended as orphans lost their owner: last those that ended with few others, the newest."""
        found: list[dict[str, Any]] = []
        groups = [group for group in self._groups if group.ended and group.unowned <= orphaned]
        for group in sorted(groups, key=operator.attrgetter("among"), reverse=True):
            among = {"among": int(group.among)} if group.among > 1 else {}
            found += [{**one, "blocks": group.pages, **among} for one in group.ended]
        return found[-MAX_LISTED:]


def _engine(scheduler: Any) -> str | None:
    """The data-parallel rank of a scheduler; `None` of those that mirror the first of a tensor-parallel group."""
    # Attributes of the scheduler until 0.5.12, of its `ps` until 0.5.20.
    ranks = getattr(scheduler, "ps", scheduler)
    get = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_parallel", None)
    if get is not None and not hasattr(ranks, "attn_tp_rank"):
        ranks = get()
    if any(getattr(ranks, name, None) for name in ("attn_tp_rank", "attn_cp_rank")):
        return None
    rank = getattr(ranks, "dp_rank", None)
    return str(rank if rank is not None else 0)[:MAX_TEXT_CHARACTERS]


def _about(request: Any) -> dict[str, Any]:
    """A request's lengths, and how it ended; never its prompt or output."""
    reason = request.finished_reason or getattr(request, "to_finish", None)
    end = None
    if reason is not None:
        failed = getattr(reason, "status_code", None) is not None
        aborted = type(reason).__name__ == "FINISH_ABORT"
        end = ("failed" if failed else "aborted") if aborted else "finished"
    elif getattr(request, "is_retracted", False) or getattr(request, "retraction_count", 0):
        end = "preempted"
    lengths = {"prompt_tokens": len(request.origin_input_ids), "output_tokens": len(request.output_ids)}
    return {**lengths, "end": end}
