"""A watch on a clock that is set, in a loop whose hours pass at once: what is kept stays in order and in proportion."""

import asyncio
import contextlib
from itertools import pairwise

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.live.sampling import Clock
from kvdiag.model import Diagnosis, Facts, Sample, Timeline
from kvdiag.sources.agents.allocator_files import AgentReading
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.finders import Finding
from tests.builders.values import device
from tests.unit.feeds.daemon.virtual_time import now_seconds, run

BOOT_SECONDS = 1_700_000_000.0
FACTS = Facts()


class Settable:
    """A wall clock that people set."""

    def __init__(self) -> None:
        """Right."""
        self.off_seconds = 0.0

    def __call__(self) -> float:
        """What it shows."""
        return BOOT_SECONDS + self.off_seconds + now_seconds()


class Devices(ThreadedReader[DeviceReading]):
    """A GPU that answers at once."""

    def __init__(self) -> None:
        """No thread is needed."""
        super().__init__(lambda processes: ((device(),), ()), "nvml")

    async def ask(self, timeout_seconds: float, **kwargs: object) -> DeviceReading:
        """The device sample."""
        return (device(),), ()


class Agents(ThreadedReader[AgentReading]):
    """A folder of agents that answers at once, and keeps whether it was closed."""

    def __init__(self) -> None:
        """No thread is needed."""
        super().__init__(lambda: AgentReading((), ()), "torch_allocator")
        self.open = True

    async def ask(self, timeout_seconds: float, **kwargs: object) -> AgentReading:
        """The allocator sample; none after `close`."""
        assert self.open
        return AgentReading((), ())

    def close(self) -> None:
        """Keep that it was."""
        self.open = False


class Idle(DiagnosisSchedule):
    """Diagnoses nothing."""

    async def _renew(self) -> None:
        pass


async def nobody() -> FoundServer:
    """No server is there."""
    raise KvdiagError("nobody listens")


def watched(*sets: float) -> tuple[tuple[Sample, ...], Watch]:
    """Ten minutes on a clock that is set after each, and the minute after the last."""

    async def work() -> tuple[tuple[Sample, ...], Watch]:
        wall = Settable()
        watch = Watch(
            Finding(nobody, Devices()),
            agents=None,
            limits=DEFAULT_LIMITS,
            clock=Clock(wall=wall, steady=now_seconds),
            schedule=Idle,
        )
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(600)
        for seconds in sets:
            wall.off_seconds += seconds
            await asyncio.sleep(600)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return watch.history(), watch

    return run(work())


def test_agents_of_before_are_closed_once_nothing_reads_them() -> None:
    """Closing them at the change would let a read that is due fail, which looks like an error of kvdiag's own."""

    async def work() -> tuple[bool, ...]:
        before, after = Agents(), Agents()
        watch = Watch(Finding(nobody, Devices()), agents=before, limits=DEFAULT_LIMITS, schedule=Idle)
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(60)
        watch.read_agents(after)
        opened = before.open
        await asyncio.sleep(60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return opened, before.open, after.open

    assert (True, False, True) == run(work())


def test_a_set_clock_moves_the_history_with_it() -> None:
    """The clock set an hour back, then two forward: samples stay in order, none is lost, intervals are unchanged."""
    untouched, _ = watched(0.0, 0.0)
    kept, watch = watched(-3600.0, 7200.0)
    assert [round(later.at_seconds - earlier.at_seconds, 3) for earlier, later in pairwise(untouched[-300:])] == [
        round(later.at_seconds - earlier.at_seconds, 3) for earlier, later in pairwise(kept[-300:])
    ]
    assert abs(kept[-1].at_seconds - untouched[-1].at_seconds - 3600.0) < 2.0
    assert all(earlier.at_seconds <= later.at_seconds for earlier, later in pairwise(kept))
    assert kept[-1].at_seconds - kept[0].at_seconds > 1700.0
    assert {"clock": 2} == {one.source: one.errors_total for one in watch.snapshot().sources if one.source == "clock"}


def test_no_tick_is_missed_for_it() -> None:
    """The sampling interval follows the monotonic clock, which cannot be set."""
    _, watch = watched(-3600.0, 7200.0)
    nvml = next(one for one in watch.snapshot().sources if one.source == "nvml")
    assert (0, True) == (nvml.ticks_missed_total, (nvml.ticks_total or 0) >= 1800)
    assert watch.snapshot().newest.devices is not None


def test_a_clock_that_ntp_disciplines_is_not_one_that_was_set() -> None:
    """Fractions of a second are nothing."""
    _, watch = watched(0.5, -0.4)
    assert "clock" not in {one.source for one in watch.snapshot().sources}


class Slow(DiagnosisSchedule):
    """One whose diagnoses take 0.57 s of CPU and three of a busy machine's."""

    async def _made(self, *_: object) -> Diagnosis:
        await asyncio.sleep(3.0)
        self._cpu_seconds = 0.57
        return diagnose(Timeline(samples=()), Facts(), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("options", "apart_seconds"),
    [
        ({}, 190.0),
        ({"every_seconds": 5.0, "cpu_ratio": 0.03}, 20.0),
        ({"cpu_ratio": 1.0}, 10.0),
        ({"cpu_ratio": 0.0005}, 300.0),
    ],
    ids=["a daemon", "a view", "no limit", "five minutes at most"],
)
def test_a_diagnosis_is_as_seldom_as_it_is_dear(options: dict[str, float], apart_seconds: float) -> None:
    """One that takes 0.57 s of CPU comes as often as its share allows, however long a busy machine lets it wait."""
    made: list[float] = []

    def subject() -> tuple[Timeline, Facts, Limits]:
        return Timeline(samples=(Sample(at_seconds=0.0),)), FACTS, DEFAULT_LIMITS

    async def work() -> None:
        clock = Clock(wall=now_seconds, steady=now_seconds)
        schedule = Slow(subject, lambda: made.append(now_seconds()), clock=clock, **options)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(600):
                await schedule.run()

    run(work())

    assert {apart_seconds} == {round(later - earlier, 3) for earlier, later in pairwise(made)}


def test_a_diagnosis_dated_by_a_clock_that_was_set_is_made_again() -> None:
    """One under way is dropped: the times that it would keep are wrong by the jump. The newest one is soon replaced."""
    made: list[float] = []

    def subject() -> tuple[Timeline, Facts, Limits]:
        return Timeline(samples=(Sample(at_seconds=0.0),)), FACTS, DEFAULT_LIMITS

    async def work() -> None:
        schedule = Slow(subject, lambda: made.append(now_seconds()), clock=Clock(wall=now_seconds, steady=now_seconds))
        task = asyncio.create_task(schedule.run())
        for wait_seconds in (1.0, 98.0):
            await asyncio.sleep(wait_seconds)
            schedule.move(3600.0)
        await asyncio.sleep(50)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work())

    assert [13.0, 103.0] == [round(at_seconds, 3) for at_seconds in made]
