"""Ticks that do not drift, a clock that runs forward, and a recorder that wakes those who wait."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.feeds.live.sampling import Clock, TimelineBuilder, ticks
from kvdiag.feeds.recording.trace import TraceWriter, read_trace
from kvdiag.model import Engine, Facts, Mark, Sample, Timeline
from tests.unit.feeds.daemon.virtual_time import now_seconds, run, spend


def ticked(period_seconds: float, busy_seconds: list[float]) -> list[tuple[int, float]]:
    """Number and time of each tick, where the work of each takes so long."""

    async def work() -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []
        async for number in ticks(period_seconds):
            seen.append((number, now_seconds()))
            if len(seen) > len(busy_seconds):
                return seen
            spend(busy_seconds[len(seen) - 1])
        raise AssertionError("ticks never end")

    return run(work())


def test_quick_work_is_ticked_at_each_time() -> None:
    """Work that is done before the next tick never shifts it."""
    assert [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)] == ticked(0.5, [0.1, 0.4, 0.0, 0.49])


def test_missed_ticks_are_skipped() -> None:
    """After work that took several ticks the next one comes at its own time, and none is made up for."""
    assert [(0, 0.0), (3, 1.5), (4, 2.0), (6, 3.0)] == ticked(0.5, [1.25, 0.1, 0.75])


@settings(deadline=None)
@given(period=st.sampled_from([0.1, 0.3, 1.0, 5.0]), busy=st.lists(st.floats(0.0, 20.0), max_size=20))
def test_ticks_never_drift(period: float, busy: list[float]) -> None:
    """However long the work takes, tick n comes at n periods, each later than the one before."""
    seen = ticked(period, busy)
    numbers = [number for number, _ in seen]
    assert sorted(set(numbers)) == numbers
    assert [pytest.approx(number * period, abs=1e-6) for number in numbers] == [at for _, at in seen]


def sample(at_seconds: float, running: int = 0) -> Sample:
    """A sample of one engine."""
    return Sample(at_seconds=at_seconds, engines=(Engine(engine="0", requests_running=running),))


def running_in(samples: list[Sample]) -> list[int | None]:
    """The engine's running gauge in each sample."""
    return [engine.requests_running for one in samples for engine in one.engines or ()]


def test_waiting_ends_with_what_is_waited_for() -> None:
    """A task that waits for a condition is woken by the sample that makes it true, and never by an earlier one."""

    async def work() -> tuple[bool, list[int | None], float]:
        recorder = TimelineBuilder()
        recorder.add(sample(0.0, running=9))
        asked: list[list[Sample]] = []

        def done(samples: list[Sample]) -> bool:
            asked.append(samples)
            return 3 in running_in(samples)

        async def record() -> None:
            for number in range(1, 6):
                await asyncio.sleep(1.0)
                recorder.add(sample(float(number), running=number))

        async with asyncio.TaskGroup() as group:
            group.create_task(record())
            found = await recorder.wait_for(done, 100.0)
            at_seconds = now_seconds()
        return found, running_in(asked[-1]), at_seconds

    assert (True, [1, 2, 3], 3.0) == run(work())


def test_waiting_ends_at_its_limit() -> None:
    """A condition that never comes true is given up, whether samples come or not."""

    async def work() -> tuple[bool, bool, float]:
        recorder = TimelineBuilder()

        async def record() -> None:
            for number in range(20):
                await asyncio.sleep(1.0)
                recorder.add(sample(float(number)))

        silent = await recorder.wait_for(bool, 5.0)
        async with asyncio.TaskGroup() as group:
            recording = group.create_task(record())
            busy = await recorder.wait_for(lambda samples: 3 in running_in(samples), 5.0)
            at_seconds = now_seconds()
            recording.cancel()
        return silent, busy, at_seconds

    assert (False, False, 10.0) == run(work())


def test_what_is_true_already_is_not_waited_for() -> None:
    """A condition that holds of no samples at all needs none."""

    async def work() -> tuple[bool, float]:
        return await TimelineBuilder().wait_for(lambda samples: True, 5.0), now_seconds()

    assert (True, 0.0) == run(work())


def test_all_who_wait_are_woken() -> None:
    """Several tasks may wait for different things in the same samples."""

    async def work() -> list[bool]:
        recorder = TimelineBuilder()

        async def record() -> None:
            for number in range(1, 4):
                await asyncio.sleep(1.0)
                recorder.add(sample(float(number), running=number))

        def wait(running: int) -> asyncio.Task[bool]:
            return asyncio.create_task(recorder.wait_for(lambda samples: running in running_in(samples), 10.0))

        waiting = [wait(running) for running in (3, 1, 2, 4)]
        await record()
        return [await task for task in waiting]

    assert [True, True, True, False] == run(work())


def test_recorder_keeps_what_it_writes(tmp_path: Path) -> None:
    """The timeline in memory and the trace on disk are the same."""
    path = tmp_path / "trace.jsonl"
    mark = Mark(at_seconds=1.5, step="baseline", cycle=0, phase="begin")

    with TraceWriter(path, Facts()) as trace:

        async def work() -> Timeline:
            recorder = TimelineBuilder(trace)
            for entry in (sample(1.0), mark, sample(2.0)):
                recorder.add(entry)
            assert 2 == recorder.count
            assert [sample(2.0)] == recorder.since(-1)
            return recorder.timeline()

        actual = run(work())

    assert Timeline(samples=(sample(1.0), sample(2.0)), marks=(mark,)) == actual
    assert (actual, Facts()) == read_trace(path)


def test_clock_runs_forward() -> None:
    """The clock gives seconds since the epoch, and never less than before."""
    clock = Clock()
    seen = [clock.now_seconds() for _ in range(1000)]
    assert sorted(seen) == seen
    assert seen[0] > 1_700_000_000
