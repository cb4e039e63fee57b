"""One look at SGLang's pool of KV pages: who holds them at one moment, by the scheduler's own numbers.

SGLang keeps indices of its pool in tensors on the device, which reading would make wait. Their lengths are Python's:
free pages are the length of the free list, cached ones are counted by the radix cache, and a request or session holds
what it has allocated beyond what the cache owns. These add up to the pool wherever no function of the scheduler moves
pages between two of them. That is known by the stack of its thread, which is in a forward pass, waits for its results
or for requests. Cached pages in use ("protected") are counted once, however many requests share them.

Read in the source of SGLang 0.5.6 to 0.5.23; before, a request does not say how much it has allocated.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

QUIET = frozenset(("run_batch", "recv_requests", "on_idle", "self_check_during_idle", "maybe_sleep_on_idle"))
"""Functions of the scheduler within which no page changes its owner."""

RESULTS = ("process_batch_result_prefill", "process_batch_result_decode")
"""They begin by waiting for the results of a forward pass (`synchronize`), before they release anything."""

MAX_FRAMES = 200
SLICE_REQUESTS = 32
SLICE_INDICES = 65_536
RELEASE_SECONDS = 100e-6
MAX_WAITING = 1024

_RECORDS = (
    operator.attrgetter("kv.req_pool_idx", "kv.kv_allocated_len", "kv.cache_protected_len"),
    operator.attrgetter("req_pool_idx", "kv.kv_allocated_len", "cache_protected_len"),
    operator.attrgetter("req_pool_idx", "kv_allocated_len", "cache_protected_len"),
)
"""Row of a request in the table of tokens, tokens allocated, and those of them that the cache owns: of 0.5.20 to
0.5.23, 0.5.18, and 0.5.6 to 0.5.15.
"""

_KV = operator.attrgetter("kv")


class _Record(NamedTuple):
    """What a request or a session holds."""

    req_pool_idx: int | None
    kv_allocated_len: int
    cache_protected_len: int


class Look(NamedTuple):
    """Pages of the pool at one moment. `step` rises with each forward pass, `rows` with each request that began.

    `rows` is `None` before 0.5.18, which does not count the rows of its table of tokens that it gives out.
    """

    usable: int
    free: int
    cached_free: int
    cached_protected: int
    running: int
    waiting: int
    session: int
    step: int
    idle: bool
    rows: int | None

    @property
    def unowned(self) -> int:
        """Pages without an owner; below 0 where more are held than there are, as after a page was freed twice."""
        return self.usable - sum(self[1:7])


def refusal(scheduler: Any) -> str | None:
    """Why this scheduler's pages cannot be counted by owner, `None` if they can."""
    args = scheduler.server_args
    of_args = (
        ("pp_size", (1, None), "pipeline parallelism"),
        ("disaggregation_mode", ("null", None), "disaggregated prefill and decode"),
        ("enable_hisparse", (False, None), "HiSparse"),
        ("dllm_algorithm", (None,), "a diffusion model"),
        ("speculative_algorithm", (None,), "speculative decoding"),
        ("enable_unified_memory", (False, None), "unified memory"),
    )
    for name, usual, what in of_args:
        value = getattr(args, name, None)
        if getattr(value, "value", value) not in usual:
            return f"with {what} pages have owners that are not counted"
    hybrid = ("is_hybrid", "is_hybrid_swa", "is_hybrid_ssm", "is_hybrid_gdn")
    if any(getattr(scheduler, name, False) for name in hybrid):
        return "the pools of a hybrid model are not counted by owner"
    allocator = scheduler.token_to_kv_pool_allocator
    if getattr(allocator, "free_pages", None) is None:
        return f"{type(allocator).__name__} has no list of free pages"
    if allocator.page_size != scheduler.tree_cache.page_size:
        return "the pool and the radix cache have pages of different sizes"
    return None


def look(scheduler: Any, running: set[Any], thread: int | None) -> Look | None:
    """A look, or `None` where the scheduler moved pages meanwhile; with no `thread` it is known not to.

    `running` are those of `active`. The scheduler's thread `is_quiet`.

    Raises:
        AttributeError, TypeError, ValueError: this version of SGLang keeps its pages in another way.
    """
    before = _mark(scheduler)
    rows_given = _rows_given(scheduler)
    page = _whole(scheduler.token_to_kv_pool_allocator.page_size, "page_size")
    waiting = [one for one in scheduler.waiting_queue[:MAX_WAITING] if one not in running]
    sessions = _sessions(scheduler.tree_cache)
    # A row belongs to the first of them: a request may run on a session's.
    rows: set[int] | None = set() if sessions else None
    by_owner = (
        _held(list(running), rows, page),
        _held(waiting, rows, page),
        _held(sessions, rows, page),
    )
    idle = not running and not waiting
    after = _mark(scheduler)
    if before[0] is not after[0] or before[1:] != after[1:] or (thread is not None and not is_quiet(thread)):
        return None
    free, cached, protected, usable = (_whole(count, "a count of tokens") for count in after[2:])
    if free % page or cached % page or protected % page or usable % page:
        raise ValueError("the radix cache or the pool does not have whole pages")
    counts = usable // page, free // page, cached // page, protected // page
    return Look(*counts, *by_owner, after[1], idle, rows_given)


def lost_pages(scheduler: Any, running: set[Any]) -> list[int]:
    """The pages that are neither free nor cached, nor held by one of `running` or a session; ascending.

    Copies the indices from the device: only for a scheduler that has stopped, in its own thread.

    Raises:
        Exception: this version of SGLang keeps its pages in another way.
    """
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    page, table = allocator.page_size, scheduler.req_to_token_pool.req_to_token
    # Page 0 is the padding's.
    owned = bytearray(1 + scheduler.max_total_num_tokens // page)
    owned[0] = 1
    for free in (allocator.free_pages, getattr(allocator, "release_pages", None)):
        for index in _indices(free):
            owned[index] = 1
    held = [one for one in _records([*running]) if one is not None] + _sessions(tree)
    rows = [table[one.req_pool_idx][: one.kv_allocated_len] for one in held if one.req_pool_idx is not None]
    for tokens in (tree.all_values_flatten(), *rows):
        for index in _indices(tokens):
            owned[index // page] = 1
    return [index for index, has_owner in enumerate(owned) if not has_owner]


def _indices(tensor: Any) -> Iterator[int]:
    """The numbers in a tensor, which would take a hundred times its size at once."""
    for start in range(0, 0 if tensor is None else len(tensor), SLICE_INDICES):
        yield from tensor[start : start + SLICE_INDICES].tolist()


def lists_of(scheduler: Any) -> list[Any]:
    """The lists of requests of all batches, each with its last request."""
    found: list[Any] = [scheduler.chunked_req]
    for batch in (scheduler.running_batch, scheduler.last_batch, _current(scheduler)):
        requests = None if batch is None else batch.reqs
        found += (requests, requests[-1]) if requests else (None,)
    return found


def is_same(before: list[Any], after: list[Any]) -> bool:
    """Whether two answers of `lists_of` are of the same objects."""
    return len(before) == len(after) and all(map(operator.is_, before, after))


def active(scheduler: Any) -> list[Any]:
    """The requests that run, and the one between two chunks of its prompt; some may be there twice."""
    batches = [scheduler.running_batch, scheduler.last_batch, _current(scheduler)]
    batches += [entry[0] for entry in list(getattr(scheduler, "result_queue", ()))]
    found: list[Any] = []
    lists: list[list[Any]] = []
    for batch in batches:
        requests = None if batch is None else batch.reqs
        # The copy of a batch has a copy of its list.
        if requests and requests not in lists:
            lists.append(requests)
            found += requests
    if (chunked := scheduler.chunked_req) is not None:
        found.append(chunked)
    return found


def is_quiet(thread: int) -> bool:
    """Whether the scheduler's thread is where no page changes its owner."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to another thread's stack
    if frame is None:
        return False
    if frame.f_code.co_name == "synchronize" and frame.f_back is not None:
        inner = frame.f_back.f_code.co_name
        if inner in RESULTS:
            return True
    for _ in range(MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name in QUIET:
            return True
        frame = frame.f_back
    return False


def _mark(scheduler: Any) -> tuple[Any, ...]:
    """What is another one after any page has changed its owner."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    counts = allocator.available_size(), tree.evictable_size(), tree.protected_size()
    # The free list is another tensor after each page that is taken or freed.
    return allocator.free_pages, scheduler.forward_ct, *counts, scheduler.max_total_num_tokens


def _current(scheduler: Any) -> Any:
    """The batch in the forward pass, which may not be among the running ones yet."""
    # Renamed in 0.5.18.
    return scheduler.cur_batch if hasattr(scheduler, "cur_batch") else scheduler.cur_batch_for_debug


def _rows_given(scheduler: Any) -> int | None:
    """How many rows of the table of tokens requests have got since the start."""
    generations = getattr(getattr(scheduler, "req_to_token_pool", None), "req_generation", None)
    # One for each row, on the host: numpy keeps the interpreter, torch would let the engine work meanwhile.
    return None if generations is None or generations.device.type != "cpu" else int(generations.numpy().sum())


def _held(holders: list[Any], rows: set[int] | None, page: int) -> int:
    """Pages of those holders; with `rows`, of those whose row is not counted yet."""
    total = owned_tokens = 0
    for start in range(0, len(holders), SLICE_REQUESTS):
        if start:
            time.sleep(RELEASE_SECONDS)
        for one in _records(holders[start : start + SLICE_REQUESTS]):
            if one is None or one.req_pool_idx is None:
                continue
            if rows is not None:
                if one.req_pool_idx in rows:
                    continue
                rows.add(one.req_pool_idx)
            # Rounded up: the cache owns whole pages.
            total -= -one.kv_allocated_len // page
            owned_tokens += one.cache_protected_len
    if owned_tokens % page:
        raise ValueError("the radix cache does not own whole pages of a request")
    return total - owned_tokens // page


def _records(holders: list[Any]) -> list[Any]:
    """The records of holders, `None` where one has none; one by one only where they are not of the newest form."""
    with contextlib.suppress(AttributeError):
        records = list(map(_KV, holders))
        if hasattr(next((one for one in records if one is not None), None), "cache_protected_len"):
            return records
    return list(map(_record, holders))


def _record(holder: Any) -> _Record | None:
    for get in _RECORDS:
        try:
            record = _Record(*get(holder))
        except AttributeError:
            continue
        # Until 0.5.18 a request keeps its row for a moment after its pages are free.
        return None if getattr(holder, "kv_committed_freed", False) else record
    if getattr(holder, "kv", holder) is None or getattr(holder, "req_pool_idx", holder) is None:
        return None
    raise AttributeError("a request does not say how much it has allocated, as SGLang does from 0.5.6 on")


def _sessions(tree: Any) -> list[Any]:
    """Records of pages that streaming sessions keep between two requests."""
    records = getattr(tree, "session_records", None)
    if records is not None:
        return [one for one in list(records().values()) if one.req_pool_idx is not None]
    slots = getattr(tree, "slots", None) or getattr(getattr(tree, "session", None), "slots", None) or {}
    return list(slots.values())


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value
