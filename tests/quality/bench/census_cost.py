"""Print what the census of a KV pool costs the engine core, and how soon it names a lost block.

python -m tests.quality.bench.census_cost

On a stand-in of vLLM's scheduler with the attributes that the census reads, in a process without other threads. Before
each publication the engine works for a second: every request takes blocks for the tokens of that second, and some end.
Both figures are CPU time of the thread, which other processes of the machine do not lengthen; the system's own part of
each pause is in the first. What the engine's steps lose on a real server is in agent_cost.
"""

import gc
import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvdiag.agent import block_census, request_blocks, sglang_census
from kvdiag.agent.schedulers import SGLANG, VLLM
from tests.quality.bench.table import note
from tests.unit.agent import sglang_stand_in
from tests.unit.agent.scheduler_stand_in import Scheduler

BLOCKS = 30_000
REQUESTS = 256
FIRST_BLOCKS, LAST_BLOCKS = 50, 150
"""What a request begins and ends with."""

BLOCKS_PER_REQUEST = (FIRST_BLOCKS + LAST_BLOCKS) // 2

SHARED_BLOCKS = 20
ROWS = 4096
GROWN_BLOCKS = 2
"""Of each request in a second, 32 tokens: five end in a second, and five begin."""

BEFORE = 200
"""Seconds that are not counted: the first count begins from nothing."""

SECONDS, SGLANG_SECONDS, LOOKS = 1000, 100, 20
LOSSES, WAIT_SECONDS = 12, 30
NAMED_SECONDS = 30.0
CPU_SECONDS, HELD_SECONDS = 150e-6, 50e-6
P99 = 0.99


class Vllm(Scheduler):
    """The class whose constructor is wrapped."""


class Engine:
    """A pool most of which is held by running requests, and what happens to it in a second."""

    def __init__(self, shared_blocks: int = 0) -> None:
        """Begin with requests of all ages, each with as many blocks of one prefix."""
        if not VLLM.wrap(type("Module", (), {"Scheduler": Vllm})):
            raise RuntimeError("the scheduler is not wrapped")
        self.scheduler = Vllm(BLOCKS + 1)
        self._begun = 0
        self._prefix = self._taken(shared_blocks)
        for block in self._prefix:
            block.ref_cnt = 0
        for number in range(REQUESTS):
            self._start(FIRST_BLOCKS + (LAST_BLOCKS - FIRST_BLOCKS) * number // REQUESTS)
        # As vLLM does once it has started: the collector does not visit its blocks.
        gc.freeze()

    @property
    def _lists(self) -> dict[str, list[Any]]:
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks

    def work(self) -> None:
        """Steps of one second."""
        for request in list(self.scheduler.running):
            self._lists[request.request_id] += self._taken(GROWN_BLOCKS)
            if len(self._lists[request.request_id]) >= LAST_BLOCKS:
                self.scheduler.end(request.request_id)
                self._start(FIRST_BLOCKS)
        self.scheduler.pool.free_block_queue.renew()
        self.scheduler.step()

    def _start(self, blocks: int) -> None:
        self._begun += 1
        self.scheduler.start(f"request-{self._begun}", blocks=0)
        for block in self._prefix:
            block.ref_cnt += 1
        self._lists[f"request-{self._begun}"] = [*self._prefix, *self._taken(blocks - len(self._prefix))]

    def lose(self, rng: random.Random) -> Any:
        """End a request whose last block keeps its reference."""
        name = rng.choice(list(self._lists))
        lost = self._lists[name][-1]
        self.scheduler.end(name, lost=1)
        self._start(FIRST_BLOCKS)
        return lost

    def _taken(self, blocks: int) -> list[Any]:
        pool = self.scheduler.pool
        taken = pool.free[:blocks]
        del pool.free[:blocks]
        for block in taken:
            block.ref_cnt = 1
        return taken


@contextmanager
def pauses() -> Iterator[tuple[list[float], list[float], Callable[[], None]]]:
    """CPU and clock seconds of each interval that ends in a pause, and what begins the next; nothing else sleeps."""
    held: list[float] = []
    held_by_clock: list[float] = []
    resumed = [0.0, 0.0]
    sleep = time.sleep

    def resume() -> None:
        resumed[:] = time.thread_time(), time.perf_counter()

    def paused(seconds: Any) -> None:
        held_by_clock.append(time.perf_counter() - resumed[1])
        held.append(time.thread_time() - resumed[0])
        sleep(seconds)
        resume()

    time.sleep = paused
    try:
        yield held, held_by_clock, resume
    finally:
        time.sleep = sleep


def measured(engine: Engine) -> tuple[float, list[float], list[float], float]:
    """CPU seconds of a second, CPU and clock seconds between two pauses, and seconds for a count."""
    now_seconds = [0.0]
    census = block_census.Census(lambda: now_seconds[0])
    spent_seconds, counts = 0.0, 0
    with pauses() as (held, held_by_clock, resume):
        for second in range(BEFORE + SECONDS):
            if second == BEFORE:
                spent_seconds, counts = 0.0, _counts(census)
                held.clear()
                held_by_clock.clear()
            now_seconds[0] += 1.0
            engine.work()
            began_seconds = time.thread_time()
            resume()
            census.read()
            spent_seconds += time.thread_time() - began_seconds
            time.sleep(0.0)
    return spent_seconds / SECONDS, held, held_by_clock, SECONDS / max(_counts(census) - counts, 1)


def named(engine: Engine) -> list[float]:
    """Seconds from the loss of a block, whose request ends, until the census has it among its orphans."""
    rng = random.Random(0)  # noqa: S311 - requests, not secrets
    now_seconds = [0.0]
    census = block_census.Census(lambda: now_seconds[0])
    found: list[float] = []

    def second() -> dict[str, Any]:
        now_seconds[0] += 1.0
        engine.work()
        return census.read() or {"orphans": ()}

    for _ in range(BEFORE):
        second()
    for _ in range(LOSSES):
        for _ in range(rng.randrange(WAIT_SECONDS)):
            second()
        lost = engine.lose(rng)
        since_seconds = now_seconds[0]
        while lost.block_id not in second()["orphans"]:
            pass
        found.append(now_seconds[0] - since_seconds)
        engine.scheduler.pool.free_blocks([lost])
        while lost.block_id in second()["orphans"]:
            pass
    return found


def _counts(census: block_census.Census) -> int:
    found = census.read()
    return 0 if found is None else int(found["counts"])


def looked(scheduler: Scheduler) -> tuple[float, list[float]]:
    """CPU seconds a second of looks at requests, as often as they come, and seconds of intervals without a pause."""
    now_seconds = [0.0]
    requests = request_blocks.RequestBlocks(lambda: now_seconds[0])
    busy: list[float] = []
    with pauses() as (held, _, resume):
        for look in range(LOOKS):
            now_seconds[0] += 60.0
            for request in scheduler.requests.values():
                request.num_computed_tokens = 1500 + look  # type: ignore[attr-defined]
            began_seconds = time.thread_time()
            resume()
            requests.read()
            time.sleep(0.0)
            busy.append(time.thread_time() - began_seconds)
    spent_seconds = statistics.median(busy)
    apart_seconds = min(spent_seconds / request_blocks.SHARE_SECONDS, request_blocks.MAX_WAIT_SECONDS)
    return spent_seconds / apart_seconds, held


class Sglang(sglang_stand_in.Scheduler):
    """The class whose constructor is wrapped."""

    def work(self, part: int) -> None:
        """A tenth of a second, in every second of which one request ends and another begins."""
        if part % 2:
            self.rows[1] += 1
            self.finish(self.requests[0], sglang_stand_in.FINISH_LENGTH())
            self.start(f"request-{self.forward_ct}", BLOCKS_PER_REQUEST)
        self.forward_ct += 1


def measured_sglang() -> tuple[float, list[float]]:
    """CPU seconds of a second, and of each interval without a pause, with as many requests and pages."""
    if not SGLANG.wrap(type("Module", (), {"Scheduler": Sglang})):
        raise RuntimeError("the scheduler is not wrapped")
    scheduler = Sglang(BLOCKS)
    scheduler.rows = importlib.import_module("numpy").zeros(ROWS, "int64")
    for number in range(REQUESTS):
        scheduler.start(f"request {number}", BLOCKS_PER_REQUEST)
    now_seconds = [0.0]
    census = sglang_census.SGLangCensus(lambda: now_seconds[0])
    spent_seconds = due_seconds = 0.0
    with pauses() as (held, _, resume):
        for part in range(10 * SGLANG_SECONDS):
            scheduler.work(part)
            now_seconds[0] = part / 10
            # As the agent's thread does, which begins again with each publication.
            if part % 10 and now_seconds[0] < due_seconds:
                continue
            began_seconds = time.thread_time()
            resume()
            due_seconds = now_seconds[0] + (census.poll() or 0.0)
            if part % 10 == 0:
                spent_seconds += time.thread_time() - began_seconds
                time.sleep(0.0)
                began_seconds = time.thread_time()
                scheduler.run_batch(census.read)
            spent_seconds += time.thread_time() - began_seconds
            time.sleep(0.0)
    return spent_seconds / SGLANG_SECONDS, held


def main() -> int:
    """Print the figures."""
    # As in vLLM, where the census does not import it.
    importlib.import_module("numpy")
    engine = Engine()
    cpu, held, held_by_clock, apart_seconds = measured(engine)
    share, looks = looked(engine.scheduler)
    sharing, sharing_held, _, sharing_apart_seconds = measured(Engine(SHARED_BLOCKS))
    losses = named(Engine(SHARED_BLOCKS))
    sglang, sglang_held = measured_sglang()
    longest = sorted(held)[int(P99 * len(held))]
    note("census: CPU a second, 30,000 blocks", cpu * 1e6, CPU_SECONDS * 1e6, than="budget", unit="µs")
    note("census: GIL held at once, 99 of 100", longest * 1e6, HELD_SECONDS * 1e6, than="budget", unit="µs")
    note("census: lost block named, 30,000 blocks", statistics.median(losses), NAMED_SECONDS, than="budget", unit="s")
    for what, seconds, most in (
        ("CPU a second", cpu, CPU_SECONDS),
        ("interpreter held at once, median", statistics.median(held), HELD_SECONDS),
        ("interpreter held at once, 99 of 100", longest, HELD_SECONDS),
        ("interpreter held at once, most", max(held), None),
        ("the same by the clock, median", statistics.median(held_by_clock), None),
        ("the same by the clock, 99 of 100", sorted(held_by_clock)[int(P99 * len(held))], None),
        ("with a prefix shared, CPU a second", sharing, CPU_SECONDS),
        ("with a prefix shared, held, 99 of 100", sorted(sharing_held)[int(P99 * len(sharing_held))], HELD_SECONDS),
        ("looks at requests, CPU a second", share, None),
        ("looks, interpreter held, median", statistics.median(looks), HELD_SECONDS),
        ("looks, interpreter held, 99 of 100", sorted(looks)[int(P99 * len(looks))], HELD_SECONDS),
        ("SGLang, CPU a second", sglang, CPU_SECONDS),
        ("SGLang, interpreter held, median", statistics.median(sglang_held), HELD_SECONDS),
        ("SGLang, interpreter held, 99 of 100", sorted(sglang_held)[int(P99 * len(sglang_held))], HELD_SECONDS),
    ):
        limit = "" if most is None else f" (at most {most * 1e6:.0f} µs: {'met' if seconds <= most else 'NOT MET'})"
        sys.stdout.write(f"{what:<40}{seconds * 1e6:8.1f} µs{limit}\n")
    size = f"{BLOCKS:,} blocks, {REQUESTS} requests of {BLOCKS_PER_REQUEST} blocks"
    sys.stdout.write(f"{'seconds for one count':<40}{apart_seconds:8.1f}    ({size})\n")
    sys.stdout.write(f"{'the same, a prefix shared':<40}{sharing_apart_seconds:8.1f}\n")
    sys.stdout.write(f"{'until a lost block is named, median':<40}{statistics.median(losses):8.1f}\n")
    sys.stdout.write(f"{'until a lost block is named, most':<40}{max(losses):8.1f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
