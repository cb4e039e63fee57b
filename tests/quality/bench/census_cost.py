"""Print what the census of a KV pool costs the engine core: CPU a publication, and the interpreter held at once.

python -m tests.quality.bench.census_cost

On a stand-in of vLLM's scheduler with the attributes that the census reads, in a process without other threads: what
the engine's steps lose on a real server is in agent_cost.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvdiag.agent import block_census, request_blocks
from kvdiag.agent.schedulers import VLLM
from tests.quality.bench.table import note
from tests.unit.agent.scheduler_stand_in import Scheduler

BLOCKS = 30_000
REQUESTS = 256
BLOCKS_PER_REQUEST = 100
PUBLICATIONS, LOOKS = 400, 20
CPU_SECONDS, HELD_SECONDS = 150e-6, 50e-6
P99 = 0.99


class Vllm(Scheduler):
    """The class whose constructor is wrapped."""


def filled() -> Scheduler:
    """A pool most of which is held by running requests."""
    if not VLLM.wrap(type("Module", (), {"Scheduler": Vllm})):
        raise RuntimeError("the scheduler is not wrapped")
    scheduler = Vllm(BLOCKS + 1)
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    for number in range(REQUESTS):
        scheduler.start(f"request-{number}", blocks=0)
        taken = scheduler.pool.free[:BLOCKS_PER_REQUEST]
        del scheduler.pool.free[:BLOCKS_PER_REQUEST]
        for block in taken:
            block.ref_cnt = 1
        manager.req_to_blocks[f"request-{number}"] = taken
    scheduler.pool.free_block_queue.renew()
    return scheduler


@contextmanager
def pauses() -> Iterator[tuple[list[float], Callable[[], None]]]:
    """The seconds of each interval that ends in a pause, and what begins the next one; nothing else here sleeps."""
    held: list[float] = []
    resumed = [0.0]
    sleep = time.sleep

    def resume() -> None:
        resumed[0] = time.perf_counter()

    def paused(seconds: Any) -> None:
        held.append(time.perf_counter() - resumed[0])
        sleep(seconds)
        resume()

    time.sleep = paused
    try:
        yield held, resume
    finally:
        time.sleep = sleep


def measured(scheduler: Scheduler) -> tuple[list[float], list[float], int]:
    """CPU seconds of each publication, seconds of each interval without a pause, and publications for one count."""
    census = block_census.Census()
    busy: list[float] = []
    counts = [0]
    with pauses() as (held, resume):
        for _ in range(PUBLICATIONS):
            scheduler.step()
            began_seconds = time.thread_time()
            resume()
            found = census.read()
            time.sleep(0.0)
            busy.append(time.thread_time() - began_seconds)
            counts.append(0 if found is None else found["counts"])
    complete = sum(after > before for before, after in itertools.pairwise(counts))
    return busy, held, round(PUBLICATIONS / complete) if complete else 0


def looked(scheduler: Scheduler) -> tuple[float, list[float]]:
    """CPU seconds a second of looks at requests, as often as they come, and seconds of intervals without a pause."""
    now_seconds = [0.0]
    requests = request_blocks.RequestBlocks(lambda: now_seconds[0])
    busy: list[float] = []
    with pauses() as (held, resume):
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


def main() -> int:
    """Print the figures."""
    scheduler = filled()
    busy, held, publications = measured(scheduler)
    share, looks = looked(scheduler)
    cpu, longest = statistics.median(busy), sorted(held)[int(P99 * len(held))]
    note("census: CPU per publication, 30,000 blocks", cpu * 1e6, CPU_SECONDS * 1e6, than="budget", unit="µs")
    note("census: GIL held at once, 99 of 100", longest * 1e6, HELD_SECONDS * 1e6, than="budget", unit="µs")
    for what, seconds, most in (
        ("CPU of a publication, median", cpu, CPU_SECONDS),
        ("CPU of a publication, most", max(busy), None),
        ("interpreter held at once, median", statistics.median(held), HELD_SECONDS),
        ("interpreter held at once, 99 of 100", longest, HELD_SECONDS),
        ("interpreter held at once, most", max(held), None),
        ("looks at requests, CPU a second", share, None),
        ("looks, interpreter held, median", statistics.median(looks), HELD_SECONDS),
        ("looks, interpreter held, 99 of 100", sorted(looks)[int(P99 * len(looks))], HELD_SECONDS),
    ):
        limit = "" if most is None else f" (at most {most * 1e6:.0f} µs: {'met' if seconds <= most else 'NOT MET'})"
        sys.stdout.write(f"{what:<40}{seconds * 1e6:8.1f} µs{limit}\n")
    size = f"{BLOCKS:,} blocks, {REQUESTS} requests of {BLOCKS_PER_REQUEST} blocks"
    sys.stdout.write(f"{'publications for one count':<40}{publications:8d}    ({size})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
