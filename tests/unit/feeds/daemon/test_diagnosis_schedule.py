"""The repeated diagnosis of a daemon: what one has taken is released at once, not by a later collection."""

import asyncio
import contextlib
import gc

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.live.sampling import Clock
from kvdiag.model import Diagnosis, Facts, Sample, Timeline
from tests.builders.values import device


def test_a_diagnosis_leaves_no_timeline_behind() -> None:
    """A day of eight GPUs leaves 0.5 MiB of series in each: the daemon's memory is limited to 64 MiB."""
    samples = tuple(Sample(at_seconds=float(at), devices=(device(),)) for at in range(100))
    gc.collect()
    gc.disable()
    try:
        before = _timelines()
        assert asyncio.run(_diagnosed(samples)) is not None
        after = _timelines()
    finally:
        gc.enable()
    assert after == before


async def _diagnosed(samples: tuple[Sample, ...]) -> Diagnosis | None:
    done, facts = asyncio.Event(), Facts()
    schedule = DiagnosisSchedule(
        lambda: (Timeline(samples=samples), facts, DEFAULT_LIMITS), done.set, clock=Clock(), every_seconds=0.01
    )
    running = asyncio.create_task(schedule.run())
    await asyncio.wait_for(done.wait(), 10.0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    schedule.close()
    return schedule.newest


def _timelines() -> int:
    return sum(isinstance(one, Timeline) for one in gc.get_objects())
