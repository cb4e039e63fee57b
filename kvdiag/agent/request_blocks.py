"""How well vLLM's requests use the blocks they hold, as counted in the engine core's process.

Three figures: token slots allocated beyond the tokens computed (the tail of each request), the blocks of the ten
longest requests, and the blocks of requests whose computed tokens have not changed for a minute.

A request is looked at while the engine is not scheduling: a block is allocated there before its tokens are counted.
`STEP_REQUESTS` are followed by a pause, after which the engine is asked again: it runs in pauses alone, for a thread
keeps the interpreter much longer than these take. The next look waits until its CPU time is spread thinly:
one second for each `SHARE_SECONDS` that the last one took. Prompts and tokens are never read.
"""

from __future__ import annotations

import heapq
import operator
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .block_tables import parts
from .schedulers import VLLM
from .vllm_pool import pool_of

SHARE_SECONDS = 20e-6
"""CPU time of a second."""

MAX_WAIT_SECONDS = 60.0
STEP_REQUESTS = 8
STEP_BLOCKS = 64
RELEASE_SECONDS = 100e-6
LONGEST = 10
STALLED_SECONDS = 60.0
MAX_REQUESTS = 4096
MAX_FRAMES = 24
"""Calls within the scheduler, from allocating a block outwards."""

MAX_TRIES = 20
TRY_SECONDS = 1e-3

POSITIONAL = (
    *("FullAttentionManager", "SlidingWindowManager", "ChunkedLocalAttentionManager"),
    *("SinkFullAttentionManager", "RSWAManager"),
)
"""Managers whose n-th block holds the n-th tokens of a request; released ones are replaced by the null block."""

_request_id, _block_id = operator.attrgetter("request_id"), operator.attrgetter("block_id")

IDLE_STATUS = "WAITING_FOR_STREAMING_REQ"
"""A session between two inputs: it has nothing to compute."""


class RequestBlocks:
    """Looks at the requests of this process's scheduler, if it has one."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Look at nothing yet."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._begin(None)

    def _begin(self, scheduler: Any) -> None:
        self._of = id(scheduler)
        self._due_seconds = 0.0
        self._since: dict[str, tuple[int, float]] = {}
        self._stalled: dict[str, float] = {}
        self._stalled_blocks = 0
        self._result: dict[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """The newest figures, `None` without a scheduler or before the first.

        Raises:
            Exception: this vLLM keeps its requests in another way, or something changed while it was read.
        """
        scheduler = VLLM.newest()
        if self._of != id(scheduler):
            self._begin(scheduler)
        if scheduler is None or self._clock() < self._due_seconds:
            return self._result
        began_seconds = self._cpu_clock()
        try:
            self._result = self._look(scheduler) or self._result
        finally:
            spent_seconds = self._cpu_clock() - began_seconds
            self._due_seconds = self._clock() + min(spent_seconds / SHARE_SECONDS - 1.0, MAX_WAIT_SECONDS)
        return self._result

    def _look(self, scheduler: Any) -> dict[str, Any] | None:
        """The figures as of now; `None` where the engine did nothing but schedule."""
        pool, managers = pool_of(scheduler)
        tables = [one.req_to_blocks for one in managers]
        sized = [(one.req_to_blocks, one.block_size) for one in managers if type(one).__name__ in POSITIONAL]
        holding: dict[str, None] = {}
        time.sleep(RELEASE_SECONDS)
        for table in tables:
            for part in parts(table):
                holding.update(dict.fromkeys(part))
                time.sleep(RELEASE_SECONDS)
        names = list(holding)
        if len(names) > MAX_REQUESTS:
            raise ValueError(f"{len(names)} requests hold blocks, at most {MAX_REQUESTS} are looked at")
        requests, running = scheduler.requests, set[str]()
        for those in parts(list(scheduler.running)):
            running.update(map(_request_id, those))
            time.sleep(RELEASE_SECONDS)
        slacks: list[int] = []
        lengths: list[tuple[int, str]] = []
        since: dict[str, tuple[int, float]] = {}
        now_seconds = self._clock()
        for place, name in enumerate(names):
            if place % STEP_REQUESTS == 0:
                time.sleep(RELEASE_SECONDS)
                if not _between_schedules():
                    return None
                now_seconds = self._clock()
            request, runs = requests.get(name), name in running
            # The connector has those of a finished one.
            if request is None or (not runs and request.is_finished()):
                continue
            tokens = request.num_computed_tokens
            if type(tokens) is not int or tokens < 0:
                raise TypeError(f"num_computed_tokens is {str(tokens)[:40]!r}")
            known = self._since.get(name)
            since[name] = known if known is not None and known[0] == tokens else (tokens, now_seconds)
            lengths.append((tokens, name))
            # What others than running ones have allocated waits for its tokens: a remote prefill, the next input.
            if runs:
                held = [(len(table.get(name) or ()), size) for table, size in sized]
                slacks.append(sum(max(blocks * size - tokens, 0) for blocks, size in held))
        time.sleep(RELEASE_SECONDS)
        self._since = since
        now_seconds = self._clock()
        stalled: dict[str, float] = {}
        for some in parts(since.items()):
            stalled.update(
                (name, since_seconds)
                for name, (_, since_seconds) in some
                if now_seconds - since_seconds >= STALLED_SECONDS and not _waits_for_input(scheduler, name)
            )
            time.sleep(RELEASE_SECONDS)
        # Without progress they take no further block.
        if stalled != self._stalled:
            self._stalled, self._stalled_blocks = stalled, _distinct(pool, tables, list(stalled))
        time.sleep(RELEASE_SECONDS)
        largest: list[tuple[int, str]] = []
        for several in parts(lengths):
            largest = heapq.nlargest(LONGEST, [*largest, *several])
            time.sleep(RELEASE_SECONDS)
        longest = [name for _, name in largest]
        longest_blocks = _distinct(pool, tables, longest)
        slots = (sum(slacks), max(slacks, default=0)) if sized else (None, None)
        time.sleep(RELEASE_SECONDS)
        return {
            "at_monotonic_seconds": now_seconds,
            "requests": len(lengths),
            "tail_tokens": slots[0],
            "tail_largest_tokens": slots[1],
            "longest_requests": len(longest),
            "longest_blocks": longest_blocks,
            "stalled_requests": len(stalled),
            "stalled_blocks": self._stalled_blocks,
            "stalled_oldest_seconds": now_seconds - min(stalled.values()) if stalled else None,
        }


def _distinct(pool: Any, tables: list[Any], names: list[str]) -> int:
    """The distinct blocks that some requests hold, with a pause for the engine after each `STEP_BLOCKS`."""
    null = getattr(pool, "null_block", None)
    found: set[int] = set()
    for table in tables:
        for name in names:
            blocks = table.get(name) or []
            for start in range(0, len(blocks), STEP_BLOCKS):
                found.update(map(_block_id, blocks[start : start + STEP_BLOCKS]))
                time.sleep(RELEASE_SECONDS)
    return len(found - {null.block_id} if null is not None else found)


def _waits_for_input(scheduler: Any, name: str) -> bool:
    request = scheduler.requests.get(name)
    return request is None or request.status.name == IDLE_STATUS


def _between_schedules() -> bool:
    """Wait until the engine's thread, the first of its process, is not scheduling; whether it came to that."""
    engine = threading.main_thread().ident
    for _ in range(MAX_TRIES):
        frame = sys._current_frames().get(engine or 0)  # noqa: SLF001 - the only way to look at another thread
        for _ in range(MAX_FRAMES):
            if frame is None or frame.f_code.co_name == "schedule":
                break
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != "schedule":
            return True
        del frame
        time.sleep(TRY_SECONDS)
    return False
