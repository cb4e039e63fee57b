"""What was not seen, or not any more, is unknown and told once; what was never there is not lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.model import Facts, Gap, Sample, Timeline
from tests.builders.answers import statuses
from tests.builders.runs import judged, run
from tests.builders.values import NO_ANSWER, NO_NVML, device, engine, holding, pool, seen
from tests.builders.worlds import World, facts


def test_nothing_seen_is_unknown() -> None:
    """An empty timeline is judged unknown, without steps, at no time."""
    actual = diagnose(Timeline(samples=()), Facts())

    assert ("unknown", (), 0, 0.0, 0.0, ()) == (
        actual.worst,
        actual.steps,
        actual.samples,
        actual.start_seconds,
        actual.end_seconds,
        actual.ledger,
    )
    assert {"unknown"} == set(statuses(actual.findings).values())


def test_a_timeline_without_steps_is_judged_by_its_rules() -> None:
    """History has no test steps: idle floors alone make a verdict."""
    # An idle server and a leaking one
    known = Facts(pools=(pool(),))
    fine, leaking = (diagnose(seen(*[holding(blocks)] * 3), known) for blocks in (0, 5))

    assert (("ok", ()), ("fault", ())) == ((fine.worst, fine.steps), (leaking.worst, leaking.steps))


@pytest.mark.parametrize(
    "timeline",
    [
        seen(*[engine(usage=None)] * 5),
        seen(*[engine(running=1)] * 5),
        seen(*[engine(running=None)] * 5),
        seen(NO_ANSWER, NO_ANSWER, NO_ANSWER),
        seen(),
    ],
    ids=["no usage", "always busy", "does not say", "no answer", "nothing"],
)
def test_history_that_shows_no_idle_pool_is_unknown(timeline: Timeline) -> None:
    """Without steps and without an idle floor there is no ground for ok."""
    assert "unknown" == diagnose(timeline, Facts(pools=(pool(),))).worst


def test_a_server_that_stopped_answering_is_unknown_at_the_end() -> None:
    """A healthy past is no evidence for a server that is gone, whichever reading came last."""
    # Idle readings, then no answer, and a reading of the devices after that
    gone = seen(*[engine()] * 5, *[NO_ANSWER] * 5)
    last = Sample(at_seconds=gone.samples[-1].at_seconds + 1, devices=(device(),))
    timeline = Timeline(samples=(*gone.samples, last))

    assert "unknown" == diagnose(timeline, Facts(pools=(pool(),))).worst


def test_history_that_was_lost_in_part_is_not_ok() -> None:
    """What could not be read may have held anything; what was found in the rest stays found."""
    # An idle server and a leaking one, an hour of each lost
    lost = Gap(source="prometheus", kind="failed", reason="an hour could not be read")
    known = Facts(pools=(pool(),), gaps=(lost,))
    fine, leaking = (diagnose(seen(*[holding(blocks)] * 3), known) for blocks in (0, 5))

    assert (("unknown", ()), ("fault", ())) == ((fine.worst, fine.steps), (leaking.worst, leaking.steps))


def test_a_gpu_that_fell_off_during_the_run_is_unknown() -> None:
    """A GPU of the server that stopped answering is not healthy, whichever reading came last."""
    # A run in which GPU 1 of two is out of reach from the middle on
    world = World(gpus=2)
    whole = run(world)
    lost = Gap(source="nvml", kind="failed", reason="GPU 1 is unreachable (GPU is lost)")
    half = whole.samples[len(whole.samples) // 2].at_seconds

    def broken(sample: Sample) -> Sample:
        if sample.devices is None or sample.at_seconds < half:
            return sample
        devices = tuple(replace(one, memory=None, processes=None) if one.index else one for one in sample.devices)
        return replace(sample, devices=devices, gaps=(lost,))

    timeline = Timeline(samples=tuple(broken(sample) for sample in whole.samples), marks=whole.marks)

    assert "unknown" == diagnose(timeline, facts(world)).worst


def test_one_late_answer_on_a_busy_machine_changes_nothing() -> None:
    """A single failed reading in the middle is a gap that is listed, and no verdict."""
    # A healthy run with one reading that failed, between the baseline and the first requests
    whole = run()
    middle = next(mark.at_seconds for mark in whole.marks if mark.step == "warmup") - 0.001
    late = Sample(at_seconds=middle, gaps=(NO_ANSWER,))
    timeline = Timeline(
        samples=tuple(sorted((*whole.samples, late), key=lambda one: one.at_seconds)), marks=whole.marks
    )
    actual = diagnose(timeline, facts(World()))

    assert ("ok", (NO_ANSWER,)) == (actual.worst, actual.gaps)


def test_gaps_are_listed_once_and_in_order() -> None:
    """What was not seen is told once, however often it was not."""
    # A server without pools on a machine without NVML
    actual = judged(World(pools=(), nvml=NO_NVML))

    assert (*facts(World(pools=())).gaps, NO_NVML) == actual.gaps


def test_what_was_never_there_is_not_lost() -> None:
    """Where there is no driver, a question about it that took too long does not make the whole run unknown."""
    # A run without NVML, whose readings of the devices were late once, at the end
    world = World(nvml=NO_NVML)
    whole = run(world)
    late = Gap(source="nvml", kind="failed", reason="the driver has not answered for 1 s: its readings are stale")
    slow = replace(whole.samples[-1], engines=None, devices=None, gaps=(late,))
    samples = (*whole.samples, replace(slow, at_seconds=whole.samples[-1].at_seconds + 0.1))

    assert "ok" == diagnose(Timeline(samples=samples, marks=whole.marks), facts(world)).worst
