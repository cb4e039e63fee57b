"""How requests use the blocks they hold: tails, the ten longest, and requests without progress."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvdiag.agent import request_blocks
from kvdiag.agent.request_blocks import RequestBlocks
from kvdiag.agent.schedulers import VLLM
from tests.unit.agent import scheduler_stand_in as stand_in
from tests.unit.agent.scheduler_stand_in import FullAttentionManager

SIZE = FullAttentionManager.block_size


class MambaManager(FullAttentionManager):
    """One that holds states of a fixed size."""

    block_size = 8192


class Vllm(stand_in.Scheduler):
    """The class whose constructor is wrapped."""

    def __init__(self, blocks: int = 1001, *managers: type[FullAttentionManager]) -> None:
        """Idle, with managers of some kinds."""
        super().__init__(blocks)
        kinds = managers or (FullAttentionManager,)
        self.kv_cache_manager.coordinator.single_type_managers = [kind(self.pool) for kind in kinds]

    def run(self, name: str, tokens: int, blocks: int, shared: list[stand_in.Block] | None = None) -> Any:
        """Run a request that has computed some tokens."""
        request: Any = self.start(name, blocks, shared)
        request.num_computed_tokens = tokens
        return request

    def schedule(self, meanwhile: Callable[[], None]) -> None:
        """Be between the allocation of a block and the count of its tokens."""
        meanwhile()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    assert VLLM.wrap(type("Module", (), {"Scheduler": Vllm}))
    yield
    VLLM.forget()


class Watch:
    """The requests, and the time in seconds, which a test advances."""

    def __init__(self, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """A time."""
        self.now_seconds = 1000.0
        self.requests = RequestBlocks(lambda: self.now_seconds, cpu_clock)

    def look(self, after_seconds: float = 61.0) -> dict[str, Any]:
        """The figures some time later, by default when a look is due."""
        self.now_seconds += after_seconds
        found = self.requests.read()
        assert found is not None
        return found


def test_process_without_a_scheduler_has_no_figures() -> None:
    """API servers and workers publish nothing of requests."""
    assert RequestBlocks().read() is None


def test_tails_are_slots_beyond_the_computed_tokens() -> None:
    """Summed, and the largest; a preempted request computes again from the start and is no tail."""
    scheduler = Vllm()
    scheduler.run("full", 32, 2)
    scheduler.run("one more", 33, 3)
    scheduler.run("ahead", 20, 5)
    loads = scheduler.run("loads", 0, 9)
    scheduler.running.remove(loads)
    found = Watch().look()
    assert (4, 15 + 60, 60) == (found["requests"], found["tail_tokens"], found["tail_largest_tokens"])


def test_states_have_no_tail() -> None:
    """A hybrid model's states: their block is no row of tokens."""
    scheduler = Vllm(1001, FullAttentionManager, MambaManager)
    scheduler.run("hybrid", 33, 3)
    scheduler.start("hybrid", 1, group=1)
    found = Watch().look()
    assert (15, 4) == (found["tail_tokens"], found["longest_blocks"])


def test_without_a_known_manager_there_is_no_tail() -> None:
    """The other figures need no size of a block."""
    scheduler = Vllm(1001, MambaManager)
    scheduler.run("state", 33, 1)
    found = Watch().look()
    assert (None, None, 1) == (found["tail_tokens"], found["tail_largest_tokens"], found["longest_blocks"])


def test_ten_longest_hold_distinct_blocks() -> None:
    """A prefix that several of them share counts once, the null block never."""
    scheduler = Vllm()
    scheduler.run("first", 320, 20)
    for number in range(9):
        scheduler.run(f"long-{number}", 256, 4, shared=scheduler.held("first")[:12])
    scheduler.held("long-0")[0] = scheduler.pool.null_block
    for number in range(20):
        scheduler.run(f"short-{number}", 16, 1)
    found = Watch().look()
    assert (30, 10, 20 + 9 * 4) == (found["requests"], found["longest_requests"], found["longest_blocks"])


def test_requests_without_progress_for_a_minute() -> None:
    """Their blocks and the time of the oldest; those that a session's next input continues are not among them."""
    scheduler, watch = Vllm(), Watch()
    stuck, works = scheduler.run("stuck", 100, 7), scheduler.run("works", 100, 7)
    session = scheduler.run("session", 100, 7)
    session.status = stand_in.Status.WAITING_FOR_STREAMING_REQ
    found = []
    for _ in range(2):
        found.append(watch.look())
        works.num_computed_tokens += 1
    assert [0, 1] == [one["stalled_requests"] for one in found]
    assert (7, 61.0) == (found[-1]["stalled_blocks"], found[-1]["stalled_oldest_seconds"])
    stuck.num_computed_tokens += 1
    assert watch.look()["stalled_requests"] == 0


def test_blocks_of_finished_requests_are_the_connectors() -> None:
    """They are counted by the census."""
    scheduler = Vllm()
    kept = scheduler.run("kept", 5, 2)
    kept.status = stand_in.Status.FINISHED_STOPPED
    scheduler.running.remove(kept)
    assert Watch().look()["requests"] == 0


def test_nothing_is_looked_at_while_the_engine_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is allocated then, and its tokens are not counted yet."""
    monkeypatch.setattr(request_blocks, "MAX_TRIES", 2)
    scheduler, watch = Vllm(), Watch()
    scheduler.run("one", 16, 1)
    scheduler.held("one").extend(scheduler.pool.get_new_blocks(4))
    found: list[Any] = []

    def read() -> None:
        thread = threading.Thread(target=lambda: found.append(watch.requests.read()))
        thread.start()
        thread.join()

    scheduler.schedule(read)
    assert [None] == found
    scheduler.running[0].num_computed_tokens += 64  # type: ignore[attr-defined]
    assert watch.look()["tail_tokens"] == 0


def test_looks_are_spread_by_their_cost() -> None:
    """One that took a second of CPU time is repeated after a minute, and no later."""
    watch = Watch(itertools.count().__next__)
    scheduler = Vllm()
    scheduler.run("one", 16, 1)
    first = watch.look()
    assert watch.look(59.0) is first
    assert watch.look(2.0) is not first


@pytest.mark.parametrize("tokens", [None, -1, "12"])
def test_another_version_is_an_error_for_the_caller(tokens: Any) -> None:
    """Computed tokens of another kind: the reason, and no figure."""
    scheduler = Vllm()
    scheduler.run("one", tokens, 1)
    with pytest.raises(TypeError, match="num_computed_tokens"):
        Watch().look()
