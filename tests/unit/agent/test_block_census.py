"""The census of a pool's blocks: owners that add up to the pool, and orphans with their last holders."""

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvdiag.agent.block_census import Census
from kvdiag.agent.schedulers import VLLM
from tests.unit.agent.scheduler_stand_in import Request, Scheduler, Status
from tests.unit.agent.test_block_tables import SlidingWindowManager, moved

FEW = 40
"""Publications within which a count of a thousand blocks is complete on any machine."""


class Vllm(Scheduler):
    """The class whose constructor is wrapped."""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    assert VLLM.wrap(type("Module", (), {"Scheduler": Vllm}))
    yield
    VLLM.forget()


def watched() -> Census:
    """A census whose next count is always due."""
    return Census(clock=itertools.count(0.0, 60.0).__next__)


def next_count(census: Census, scheduler: Scheduler) -> dict[str, Any]:
    """The next complete count, after a step of the engine."""
    before = census.read()
    scheduler.step()
    for _ in range(FEW):
        after = census.read()
        if after is not None and (before is None or after["counts"] > before["counts"]):
            return after
    raise AssertionError("no count was complete")


def counted(scheduler: Scheduler, census: Census | None = None, times: int = 6) -> dict[str, Any]:
    """The last of some counts, each after a step."""
    census = census or watched()
    return [next_count(census, scheduler) for _ in range(times)][-1]


def owners(count: dict[str, Any]) -> dict[str, int]:
    """The owners that hold blocks, of those that the pool has; they add up to the pool."""
    assert count["usable_blocks"] == sum(count["owners"].values())
    return {owner: blocks for owner, blocks in count["owners"].items() if blocks and owner != "free"}


def test_process_without_a_scheduler_has_no_count() -> None:
    """API servers and workers publish nothing of blocks."""
    assert watched().read() is None


def test_every_class_of_owner_is_counted() -> None:
    """Running and waiting requests, those that the connector keeps, and frees that wait for a step."""
    scheduler = Vllm()
    scheduler.start("runs", 10)
    waits = scheduler.start("waits", 20)
    waits.status = Status.WAITING_FOR_REMOTE_KVS
    kept = scheduler.start("kept", 30)
    kept.status = Status.FINISHED_STOPPED
    scheduler.running = [scheduler.requests["runs"]]
    scheduler.deferred_frees.append((1, scheduler.pool.get_new_blocks(5)))
    count = counted(scheduler)
    assert {"running": 10, "waiting": 20, "connector": 30, "deferred": 5} == owners(count)
    assert count["connector_oldest_seconds"] >= 0
    assert count["closed_counts"] == count["counts"]


def test_shared_and_null_blocks_are_counted_once() -> None:
    """A prefix of several requests is one owner's, and the null block has no owner."""
    scheduler = Vllm()
    scheduler.start("first", 10)
    prefix = scheduler.held("first")[:4]
    scheduler.start("second", 3, shared=prefix)
    scheduler.held("second").insert(0, scheduler.pool.null_block)
    assert {"running": 13} == owners(counted(scheduler))


def test_groups_are_counted_apart() -> None:
    """Layers with a window of a hybrid model hold blocks of the same pool."""
    scheduler = Vllm(1001, 2)
    scheduler.start("one", 10)
    scheduler.start("one", 4, group=1)
    assert [10, 4] == counted(scheduler)["groups"]


def test_orphans_have_their_ids_and_last_holder() -> None:
    """Blocks of an aborted request that keep a reference, while others run; its lengths, and no prompt."""
    scheduler, census = Vllm(), watched()
    scheduler.start("other", 10)
    scheduler.start("lost", 6)
    expected = [block.block_id for block in scheduler.held("lost")[-2:]]
    counted(scheduler, census, 2)
    scheduler.end("lost", Status.FINISHED_ABORTED, lost=2)
    count = counted(scheduler, census)
    assert {"running": 10, "orphaned": 2} == owners(count)
    assert expected == count["orphans"]
    assert [{"id": "lost", "blocks": 2, "prompt_tokens": 30, "output_tokens": 4, "end": "aborted"}] == count["culprits"]


def test_orphan_stays_one_while_others_come() -> None:
    """A confirmed orphan is not looked for again; the next one is found, too."""
    scheduler, census = Vllm(), watched()
    for name in ("first", "second", "third"):
        scheduler.start(name, 6)
    counted(scheduler, census, 2)
    for lost, name in enumerate(("first", "second"), 1):
        scheduler.end(name, lost=1)
        scheduler.grow("third", 2)
        assert {"running": 18 - 6 * lost + 2 * lost, "orphaned": lost} == owners(counted(scheduler, census))


def test_orphans_of_unobserved_requests_are_found() -> None:
    """A request that ended within one count: its blocks are found by looking at the whole pool."""
    scheduler, census = Vllm(), watched()
    scheduler.start("other", 10)
    counted(scheduler, census, 2)
    scheduler.start("brief", 5)
    scheduler.end("brief", lost=3)
    count = counted(scheduler, census, 12)
    assert {"running": 10, "orphaned": 3} == owners(count)
    assert [] == count["culprits"]


def test_blocks_of_a_dropped_request_are_orphans() -> None:
    """A request that the scheduler does not know any more, whose list of blocks is still there."""
    scheduler, census = Vllm(), watched()
    scheduler.start("dropped", 7)
    counted(scheduler, census, 2)
    scheduler.running.remove(scheduler.requests.pop("dropped"))
    count = counted(scheduler, census)
    assert {"orphaned": 7} == owners(count)
    assert [("dropped", 7)] == [(one["id"], one["blocks"]) for one in count["culprits"]]


def test_without_steps_nothing_is_orphaned() -> None:
    """While the engine is within one step, a block may be between two owners for any time."""
    scheduler, census = Vllm(), watched()
    scheduler.start("runs", 10)
    counted(scheduler, census, 2)
    scheduler.pool.get_new_blocks(3)
    count = [census.read() for _ in range(FEW)][-1]
    assert count is not None
    assert count["owners"]["orphaned"] == 0


def test_idle_engine_needs_no_steps() -> None:
    """Nothing moves there, so that a reference without an owner stays one."""
    scheduler, census = Vllm(), watched()
    scheduler.start("lost", 6)
    counted(scheduler, census, 2)
    scheduler.end("lost", lost=6)
    count = [census.read() for _ in range(FEW)][-1]
    assert count is not None
    assert {"orphaned": 6} == owners(count)


def test_released_orphans_are_none() -> None:
    """A late release, as of a connector's timeout, ends the finding."""
    scheduler, census = Vllm(), watched()
    scheduler.start("late", 6)
    lost = scheduler.held("late")[-2:]
    counted(scheduler, census, 2)
    scheduler.end("late", lost=2)
    assert {"orphaned": 2} == owners(counted(scheduler, census))
    scheduler.pool.free_blocks(lost)
    assert {} == owners(counted(scheduler, census))


@pytest.mark.parametrize("groups", [1, 2])
def test_busy_engine_is_not_accused_and_its_losses_are_named(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """It works in every tenth pause of the census, and some of its requests lose a block when they end."""
    scheduler, census, rng = Vllm(2001, groups), watched(), random.Random(groups)  # noqa: S311 - moves, not secrets
    managers: list[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    managers[1:] = [SlidingWindowManager(scheduler.pool) for _ in managers[1:]]
    numbers, lost = itertools.count(), dict[str, int]()

    def work(_: float) -> None:
        if rng.random() < 0.1:
            moved(scheduler, rng, next(numbers))
            scheduler.step()

    monkeypatch.setattr(time, "sleep", work)
    for number in range(200):
        for _ in range(rng.randrange(8)):
            moved(scheduler, rng, next(numbers))
        scheduler.step()
        count = census.read() or {"orphans": [], "culprits": []}
        assert set(count["orphans"]) <= set(lost.values())
        assert {one["id"] for one in count["culprits"]} <= lost.keys()
        name = f"loses-{number // 50}"
        if number % 50 == 20:
            scheduler.start(name, 6)
        elif number % 50 == 45:
            lost[name] = scheduler.held(name)[-1].block_id
            scheduler.end(name, lost=1)
    final = counted(scheduler, census, 12)
    assert sorted(lost.values()) == final["orphans"]
    assert lost.keys() == {one["id"] for one in final["culprits"]}
    assert {30} == {one["prompt_tokens"] for one in final["culprits"]}


class Connector:
    """A connector that pins blocks of finished requests by their ids, as the Mooncake store does."""

    def __init__(self) -> None:
        """Nothing pinned."""
        self._pinned_saves: dict[int, tuple[list[int], int]] = {}
        self.cpu_block_ids = list(range(1001))
        self.request = Request("with a prompt")


def test_blocks_of_another_pool_are_not_pinned() -> None:
    """A connector's own pool, in the host's memory, has blocks of the same class and ids: they hide no orphan."""
    scheduler = Vllm()
    scheduler.connector = Connector()
    scheduler.start("kept")
    scheduler.connector.blocks = Scheduler(1001).pool.blocks
    scheduler.end("kept", lost=2)
    assert {"orphaned": 2} == owners(counted(scheduler, times=8))


def test_blocks_that_a_connector_names_are_pinned() -> None:
    """They have no request and are no orphans; the connector's own memory on the host names none of the pool's."""
    scheduler, census = Vllm(), watched()
    scheduler.connector = Connector()
    scheduler.start("saved", 6)
    counted(scheduler, census, 2)
    saved, lost = scheduler.held("saved")[2:4], scheduler.held("saved")[4:]
    scheduler.connector._pinned_saves[1] = ([block.block_id for block in saved], 1)  # noqa: SLF001 - as vLLM's has
    scheduler.end("saved", lost=4)
    count = counted(scheduler, census)
    assert {"pinned": 2, "orphaned": 2} == owners(count)
    assert [block.block_id for block in lost] == count["orphans"]
    assert count["connector"] == "Connector"


@pytest.mark.parametrize("missing", ["requests", "finished_req_ids", "kv_cache_manager"])
def test_another_version_is_an_error_for_the_caller(missing: str) -> None:
    """An attribute that another version of vLLM has not: the reason, and no count."""
    scheduler = Vllm()
    delattr(scheduler, missing)
    with pytest.raises(AttributeError, match=missing):
        watched().read()


def test_a_pool_of_other_types_is_an_error_for_the_caller() -> None:
    """A size that is no whole number."""
    scheduler: Any = Vllm()
    scheduler.kv_cache_manager.block_pool.num_gpu_blocks = "many"
    with pytest.raises(TypeError):
        watched().read()


def test_a_scheduler_that_is_given_up_is_not_kept() -> None:
    """The census has a weak reference only."""
    scheduler = Vllm()
    census = watched()
    scheduler.start("runs", 10)
    counted(scheduler, census, 1)
    del scheduler
    assert VLLM.newest() is None
    assert census.read() is None
