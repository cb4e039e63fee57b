"""The census of SGLang's pages: owners that add up to the pool, and orphans with the requests that ended with them."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvdiag.agent.schedulers import SGLANG
from kvdiag.agent.sglang_census import SGLangCensus
from tests.unit.agent import sglang_stand_in as stand_in
from tests.unit.agent.sglang_stand_in import FINISH_ABORT, FINISH_LENGTH, PAGE_TOKENS, Request

PAGES = 100


class SGLang(stand_in.Scheduler):
    """The class whose constructor is wrapped."""


@pytest.fixture
def scheduler() -> Iterator[SGLang]:
    """A scheduler that the census finds."""
    assert SGLANG.wrap(type("Module", (), {"Scheduler": SGLang}))
    yield SGLang(PAGES)
    SGLANG.forget()


def watched() -> SGLangCensus:
    """A census whose next look is always due."""
    return SGLangCensus(clock=itertools.count(0.0, 60.0).__next__)


def counted(scheduler: SGLang, census: SGLangCensus, times: int = 3) -> dict[str, Any]:
    """The last of some counts, each in a forward pass of its own."""
    found: list[dict[str, Any]] = [scheduler.run_batch(census.read) for _ in range(times)]
    assert PAGES == sum(found[-1]["owners"].values())
    return found[-1]


def held(count: dict[str, Any]) -> dict[str, int]:
    """The owners that have pages."""
    return {owner: pages for owner, pages in count["owners"].items() if pages}


def test_owners_add_up_to_the_pool(scheduler: SGLang) -> None:
    """Whole pages of each; a cached prefix counts once, and a session's request as running."""
    for name in ("one", "two"):
        scheduler.start(name, pages=5, cached_pages=3)
    scheduler.tree_cache.protected = 3 * PAGE_TOKENS
    scheduler.tree_cache.evictable = 7 * PAGE_TOKENS
    scheduler.tree_cache.sessions = {"s": Request("", 90, 4, 2).kv, "in use": scheduler.requests[0].kv}
    scheduler.waiting_queue.append(Request("waits", 91, 2, 0))
    scheduler.free(PAGES - 10 - 3 - 7 - 4 - 2)
    count = counted(scheduler, watched())
    expected = {"running": 10, "waiting": 2, "session": 4, "cached_protected": 3, "cached_free": 7, "free": 74}
    assert expected == held(count)
    assert (3, 3, "0") == (count["counts"], count["closed_counts"], count["engine"])


def test_orphans_have_the_request_that_ended(scheduler: SGLang) -> None:
    """Confirmed in three counts; a request that ends alone is known, with its lengths and its end."""
    census = watched()
    requests = [scheduler.start(name, pages=5) for name in ("stays", "aborted", "finished")]
    counted(scheduler, census)
    scheduler.finish(requests[1], FINISH_ABORT(), lose=2)
    counts = [counted(scheduler, census, times=1) for _ in range(3)]
    assert [0, 0, 2] == [one["owners"]["orphaned"] for one in counts]
    assert [2, 2, 0] == [one["owners"]["unconfirmed"] for one in counts]
    scheduler.finish(requests[2], FINISH_LENGTH())
    lengths = {"prompt_tokens": 30, "output_tokens": 5}
    assert [{"id": "aborted", "blocks": 2, "end": "aborted", **lengths}] == counted(scheduler, census)["culprits"]


def test_requests_that_end_at_once_are_named_together(scheduler: SGLang) -> None:
    """Which of them held the pages is unknown; pages that find an owner again, for good, are no request's."""
    census = watched()
    requests = [scheduler.start(name, pages=5) for name in ("one", "two", "three")]
    counted(scheduler, census)
    scheduler.finish(requests[0], FINISH_LENGTH(), lose=1)
    counted(scheduler, census, times=1)
    scheduler.free(scheduler.free_now + 1)
    counted(scheduler, census)
    for request in requests[1:]:
        scheduler.finish(request, FINISH_LENGTH(), lose=2)
    culprits = counted(scheduler, census)["culprits"]
    assert {"two": (4, 2), "three": (4, 2)} == {one["id"]: (one["blocks"], one["among"]) for one in culprits}


def test_pages_in_motion_are_not_counted(scheduler: SGLang) -> None:
    """Outside a forward pass, in the midst of an allocation, there is no count, and within one pass only one."""
    census = watched()
    assert census.read() is None
    count = scheduler.run_batch(lambda: [scheduler.start("one", 5), census.read(), census.read()])[-1]
    assert 1 == count["counts"]


def test_request_between_polls_is_known(scheduler: SGLang) -> None:
    """A request that runs for less than a second is noted by a poll, and its pages are looked at when it has ended."""
    census = watched()
    counted(scheduler, census)
    request = scheduler.start("short", pages=5)
    assert scheduler.run_batch(census.poll) is not None
    scheduler.finish(request, FINISH_ABORT(), lose=3)
    scheduler.run_batch(census.poll)
    (culprit,) = counted(scheduler, census)["culprits"]
    assert ("short", 3) == (culprit["id"], culprit["blocks"])


def test_nobody_is_named_where_more_may_have_come_and_gone(scheduler: SGLang) -> None:
    """SGLang before 0.5.18 does not count what it gives to requests, as long as they may be too short to be noted."""
    del scheduler.req_to_token_pool.req_generation
    census = watched()
    request = scheduler.start("one", pages=5)
    counted(scheduler, census)
    scheduler.finish(request, FINISH_ABORT(), lose=3)
    count = counted(scheduler, census)
    assert (3, []) == (count["owners"]["orphaned"], count["culprits"])


def test_request_that_has_not_left_its_batch_is_known(scheduler: SGLang) -> None:
    """It has ended and lost pages, and is listed until the next step; it is not among those that end later."""
    census = watched()
    requests = [scheduler.start(name, pages=5) for name in ("one", "two")]
    counted(scheduler, census)
    batch = scheduler.running_batch.reqs
    scheduler.finish(requests[0], FINISH_ABORT(), lose=2)
    requests[0].kv = None
    scheduler.running_batch.reqs = batch
    counted(scheduler, census)
    scheduler.running_batch.reqs = batch[1:]
    scheduler.finish(requests[1], FINISH_LENGTH(), lose=1)
    culprits = counted(scheduler, census)["culprits"]
    assert [("one", 2), ("two", 1)] == [(one["id"], one["blocks"]) for one in culprits]
    assert all("among" not in one for one in culprits)


def test_lock_that_stays_is_an_orphan(scheduler: SGLang) -> None:
    """Cached pages in use while nothing runs can never be evicted; new locks of requests are theirs.

    Who has ended last is not who left the lock.
    """
    census = watched()
    request = scheduler.start("ended", pages=5)
    counted(scheduler, census)
    scheduler.finish(request, FINISH_LENGTH())
    scheduler.tree_cache.protected = 4 * PAGE_TOKENS
    scheduler.free(PAGES - 4)
    for _ in range(2):
        counted(scheduler, census)
    count = counted(scheduler, census)
    assert ({"orphaned": 4, "free": 96}, []) == (held(count), count["culprits"])
    scheduler.start("one", pages=5, cached_pages=6)
    scheduler.tree_cache.protected = 6 * PAGE_TOKENS
    scheduler.free(PAGES - 11)
    assert {"orphaned": 4, "free": 89, "running": 5, "cached_protected": 2} == held(counted(scheduler, census))


def test_dying_scheduler_names_the_lost_pages(scheduler: SGLang) -> None:
    """Those that are in no list, in the cache or in the row of a request or session; wrong ids are not named."""
    census = watched()
    request = scheduler.start("aborted", pages=4, cached_pages=1)
    scheduler.tree_cache.evictable = 2 * PAGE_TOKENS
    scheduler.tree_cache.sessions = {"s": Request("", 2, 3, 1).kv}
    scheduler.free(PAGES - 4 - 2 - 3)
    counted(scheduler, census)
    scheduler.finish(request, FINISH_ABORT(), lose=2)
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.free_pages = stand_in.Tensor([*range(9, PAGES - 1), PAGES])
    allocator.release_pages = stand_in.Tensor([3, 4])

    def tokens(*pages: int) -> list[int]:
        return [PAGE_TOKENS * page + token for page in pages for token in range(PAGE_TOKENS)]

    scheduler.tree_cache.all_values_flatten = lambda: stand_in.Tensor(tokens(1, 8))  # type: ignore[attr-defined]
    # A row of which the last page is not full, and what another request left behind it.
    row = stand_in.Tensor([*tokens(1, 5, 6, 7)[:-3], *tokens(2)])
    table = stand_in.Tensor([stand_in.Tensor(), stand_in.Tensor(tokens(2)), row])
    scheduler.req_to_token_pool.req_to_token = table
    count = census.last_look()
    assert count is not None
    assert ([2, PAGES - 1], 2, "aborted") == (count["orphans"], count["owners"]["orphaned"], count["culprits"][0]["id"])
    allocator.release_pages = stand_in.Tensor([3])
    count = census.last_look()
    assert count is not None
    assert [] == count["orphans"]


def test_cleared_cache_ends_orphans(scheduler: SGLang) -> None:
    """A flush frees all pages, orphans too."""
    census = watched()
    scheduler.free(PAGES - 4)
    assert {"orphaned": 4, "free": 96} == held(counted(scheduler, census))
    scheduler.free(PAGES)
    assert {"free": PAGES} == held(counted(scheduler, census, times=1))
    assert [] == counted(scheduler, census)["culprits"]


def freed_twice(scheduler: SGLang) -> None:
    """A page more is free than there are."""
    scheduler.free(PAGES + 1)


def released(scheduler: SGLang) -> None:
    """Two of four orphans find an owner."""
    scheduler.free(PAGES - 2)


def mistyped(scheduler: SGLang) -> None:
    """Another type."""
    scheduler.max_total_num_tokens = "many"  # type: ignore[assignment]


def part_of_a_page(scheduler: SGLang) -> None:
    """A cache of a token."""
    scheduler.tree_cache.evictable = 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (freed_twice, "freed twice"),
        (released, "is not counted"),
        (mistyped, "is 'many'"),
        (part_of_a_page, "whole pages"),
    ],
)
def test_count_that_cannot_be_is_an_error(scheduler: SGLang, change: Callable[[SGLang], None], reason: str) -> None:
    """Its reason is published instead."""
    census = watched()
    scheduler.free(PAGES - 4)
    counted(scheduler, census)
    change(scheduler)
    with pytest.raises((ValueError, TypeError), match=reason):  # noqa: PT012 - some counts until it is certain
        for _ in range(5):
            scheduler.run_batch(census.read)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("server_args", "pp_size", 2),
        ("server_args", "disaggregation_mode", "decode"),
        ("server_args", "speculative_algorithm", "EAGLE"),
        ("", "is_hybrid_swa", True),
        ("token_to_kv_pool_allocator", "free_pages", None),
        ("token_to_kv_pool_allocator", "page_size", 64),
    ],
)
def test_pools_with_other_owners_are_refused(scheduler: SGLang, where: str, name: str, value: object) -> None:
    """No figure is better than one whose owners are not all known."""
    setattr(getattr(scheduler, where) if where else scheduler, name, value)
    with pytest.raises(ValueError, match=r"not counted|no list|different sizes"):
        scheduler.run_batch(watched().read)


def test_mirrored_rank_publishes_nothing(scheduler: SGLang) -> None:
    """The ranks of a tensor-parallel group hold the same pages: the first counts them."""
    scheduler.attn_tp_rank = 1
    assert scheduler.run_batch(watched().read) is None


def of_0_5_18(request: Request) -> None:
    """The row and the cached tokens are the request's own."""
    vars(request).update(vars(request.kv), kv=SimpleNamespace(kv_allocated_len=request.kv.kv_allocated_len))


def of_0_5_6(request: Request) -> None:
    """All three are."""
    vars(request).update(vars(request.kv))
    del request.kv


@pytest.mark.parametrize("older", [of_0_5_18, of_0_5_6])
def test_requests_of_older_versions_are_read(scheduler: SGLang, older: Callable[[Request], None]) -> None:
    """Row, allocated and cached tokens were moved twice; one whose pages are free already holds none."""
    older(scheduler.start("one", pages=5))
    freed = Request("freed", 9, 5, 0)
    older(freed)
    freed.kv_committed_freed = True  # type: ignore[attr-defined]
    scheduler.requests.append(freed)
    scheduler.cur_batch = None  # type: ignore[attr-defined]
    assert {"running": 5, "free": 95} == held(counted(scheduler, watched()))
    del vars(scheduler.requests[0])["kv_allocated_len"]
    vars(scheduler.requests[0]).pop("kv", None)
    with pytest.raises(AttributeError, match=r"0\.5\.6"):
        scheduler.run_batch(watched().read)
