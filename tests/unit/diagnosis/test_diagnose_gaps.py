"""What is missing or was lost makes a diagnosis unknown; the newest samples make its ledger."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose, informed
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.steps import STEPS
from kvdiag.model import Device, Facts, Finding, Gap, Mark, Sample, Timeline
from tests.builders.answers import ANY_TEXT, statuses
from tests.builders.runs import judged, run
from tests.builders.values import (
    GIB,
    GPU_LOST,
    MIB,
    NO_ANSWER,
    NO_NVML,
    allocator,
    device,
    engine,
    holding,
    pool,
    process,
    seen,
)
from tests.builders.worlds import World, facts


def test_nothing_observed_is_unknown() -> None:
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


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [((), "ok"), ((Gap(source="prometheus", kind="failed", reason="an hour could not be read"),), "unknown")],
    ids=["whole", "lost in part"],
)
def test_a_timeline_without_steps_is_judged_by_its_rules(gaps: tuple[Gap, ...], expected: str) -> None:
    """Idle floors alone make a verdict; what could not be read may have held anything, what was found stays found."""
    known = Facts(pools=(pool(),), gaps=gaps)
    fine, leaking = (diagnose(seen(*[holding(blocks)] * 3), known) for blocks in (0, 5))
    assert ((expected, ()), ("fault", ())) == ((fine.worst, fine.steps), (leaking.worst, leaking.steps))


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


def test_one_late_answer_on_a_busy_machine_changes_nothing() -> None:
    """A single failed sample in the middle is a gap that is listed, and the verdict stays ok."""
    whole = run()
    middle = next(mark.at_seconds for mark in whole.marks if mark.step == "warmup") - 0.001
    late = Sample(at_seconds=middle, gaps=(NO_ANSWER,))
    timeline = Timeline(
        samples=tuple(sorted((*whole.samples, late), key=lambda one: one.at_seconds)), marks=whole.marks
    )
    actual = diagnose(timeline, facts(World()))

    assert ("ok", (NO_ANSWER,)) == (actual.worst, actual.gaps)


def test_gaps_are_listed_once_and_in_order() -> None:
    """A gap that every sample repeats is listed once."""
    actual = judged(World(pools=(), nvml=NO_NVML))
    assert (*facts(World(pools=())).gaps, NO_NVML) == actual.gaps


def test_what_was_never_there_is_not_lost() -> None:
    """Where there is no driver, a question about it that took too long does not make the whole run unknown."""
    world = World(nvml=NO_NVML)
    whole = run(world)
    late = Gap(source="nvml", kind="failed", reason="the driver has not answered for 1 s: its samples are stale")
    slow = replace(whole.samples[-1], engines=None, devices=None, gaps=(late,))
    samples = (*whole.samples, replace(slow, at_seconds=whole.samples[-1].at_seconds + 0.1))
    assert "ok" == diagnose(Timeline(samples=samples, marks=whole.marks), facts(world)).worst


KNOWN = Facts(pools=(pool(),), server_pids=(100,), device_uuids=("GPU-0",))

CUT_OFF = Gap(source="trace", kind="failed", reason="the trace ends in the middle of a line")


def at(
    seconds: float, *, idle: bool = True, devices: tuple[Device, ...] | None = None, gap: Gap | None = None
) -> Sample:
    """A sample of an idle engine, of devices, or of a gap."""
    return Sample(
        at_seconds=seconds, engines=(engine(),) if idle else None, devices=devices, gaps=() if gap is None else (gap,)
    )


def worst(*samples: Sample, known: Facts = KNOWN) -> str:
    """The verdict on idle samples with the server on GPU 0, followed by these samples."""
    own = device(processes=(process(100, 20 * GIB - 464 * MIB),))
    idle = [at(float(second), devices=(own,)) for second in range(3)]
    return diagnose(Timeline(samples=(*idle, *samples)), known).worst


@pytest.mark.parametrize(("failures", "expected"), [(2, "ok"), (3, "unknown")])
def test_source_is_lost_after_three_failures_to_the_end(failures: int, expected: str) -> None:
    """Three final failures of the metrics endpoint, driver or device make it unknown; two, or a recovery, do not."""
    page = [at(10.0 + number, idle=False, gap=NO_ANSWER) for number in range(failures)]
    driver = [at(10.0 + number, gap=GPU_LOST) for number in range(failures)]
    dark = [at(10.0 + number, devices=(device(used_bytes=None),), gap=GPU_LOST) for number in range(failures)]

    other = device(1, processes=(process(100, 20 * GIB - 464 * MIB),))
    half = [replace(one, devices=(*(one.devices or ()), other)) for one in dark]

    for lost in (page, driver, dark, half):
        assert expected == worst(*lost)
    assert "ok" == worst(*page, at(20.0))
    assert "ok" == worst(*driver, at(20.0, devices=(device(),)))
    assert "ok" == worst(*dark, at(20.0, devices=(device(),)))


def test_a_server_that_has_answered_and_is_not_there_is_lost() -> None:
    """As after a restart of the daemon that knows it from before: absent is not yet there only where it never was."""
    absent = Gap(source="engine", kind="absent", reason="starting: nobody answers")
    nobody = [at(10.0 + number, idle=False, gap=absent) for number in range(3)]
    starting = [at(float(second), idle=False, devices=(device(),), gap=absent) for second in range(3)]
    assert "unknown" == worst(*nobody)
    assert "ok" == worst(*nobody, at(20.0))
    assert "ok" == diagnose(Timeline(samples=(*starting, at(3.0), at(4.0))), KNOWN).worst


def test_what_is_not_the_servers_or_was_never_there_is_not_lost() -> None:
    """Another tenant's dark device, a device that never reports memory, and a host without a driver are not lost."""
    other = device(1, used_bytes=None)
    times = (10.0, 11.0, 12.0)
    assert "ok" == worst(*(at(each, devices=(device(), other), gap=GPU_LOST) for each in times))
    assert "ok" == worst(*(at(each, devices=(device(used_bytes=None),)) for each in times))
    assert "ok" == worst(*(at(each, gap=NO_NVML) for each in times))
    assert "ok" == worst(*(at(each, gap=replace(GPU_LOST, source="agent")) for each in times))


def test_a_gpu_of_another_tenant_that_goes_dark_is_not_lost_where_the_servers_is_only_assigned() -> None:
    """Where no server process is visible, as in a container, only the loss of its assigned GPU counts."""
    both = [at(float(second), devices=(device(), device(1))) for second in range(3)]
    dark = [at(10.0 + second, devices=(device(), device(1, used_bytes=None)), gap=GPU_LOST) for second in range(3)]
    lost = [at(10.0 + second, devices=(device(used_bytes=None), device(1)), gap=GPU_LOST) for second in range(3)]
    assigned = replace(KNOWN, server_pids=None)
    assert "unknown" == diagnose(Timeline(samples=(*both, *lost)), assigned).worst
    assert "ok" == diagnose(Timeline(samples=(*both, *dark)), assigned).worst


def test_stretch_of_time_that_was_lost_makes_it_unknown() -> None:
    """Of a history, or of a trace that was cut off; a metric that a Prometheus does not have does not."""
    failed = Gap(source="prometheus", kind="failed", reason="an hour")
    assert "unknown" == worst(known=replace(KNOWN, gaps=(failed,)))
    assert "ok" == worst(known=replace(KNOWN, gaps=(replace(failed, kind="absent"),)))
    assert "unknown" == worst(known=replace(KNOWN, gaps=(CUT_OFF,)))


def test_steps_are_those_of_what_was_marked() -> None:
    """A timeline without marks has no steps unless it was cut off; a probe has its own, a soak adds one."""

    def steps(*names: str, known: Facts = KNOWN) -> list[str]:
        marks = tuple(Mark(at_seconds=1.0, step=name, cycle=0, phase="begin") for name in names)
        return [one.id for one in diagnose(Timeline(samples=(at(1.0),), marks=marks), known).steps]

    usual = [step.id for step in STEPS]
    assert [] == steps()
    assert usual == sorted(steps(known=replace(KNOWN, gaps=(CUT_OFF,))), key=usual.index)
    assert sorted(usual) == sorted(steps("baseline"))
    assert ["isolation"] == steps("isolation", "baseline")
    assert sorted([*usual, "soak"]) == sorted(steps("soak"))


@pytest.mark.parametrize(("later", "used_gib"), [(15.0, 20), (15.1, 22)])
def test_devices_with_their_processes_are_reported_for_a_quarter_minute(later: float, used_gib: int) -> None:
    """A sample with process lists is preferred to a newer one without for 15 s: later its processes may have exited."""
    listed = device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),))
    samples = (at(10.0, devices=(listed,)), at(10.0 + later, devices=(device(used_bytes=22 * GIB),)))
    actual = diagnose(Timeline(samples=samples), KNOWN)
    # Its lines add up to what is used
    assert used_gib * GIB == sum(line.bytes for line in actual.ledger)


@pytest.mark.parametrize(("apart", "told"), [(15.0, True), (-15.0, True), (15.1, False), (-15.1, False)])
def test_torch_is_reported_beside_devices_of_the_same_time(apart: float, *, told: bool) -> None:
    """Its nearest reading, if it is within a quarter minute before or after theirs."""
    listed = device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),))
    told_by = Sample(at_seconds=50.0 + apart, allocators=(allocator(device_uuid="0"),))
    far = Sample(at_seconds=10.0, allocators=(allocator(reserved_bytes=9 * GIB),))
    samples = sorted((far, told_by, at(50.0, devices=(listed,))), key=lambda one: one.at_seconds)
    actual = diagnose(Timeline(samples=tuple(samples)), KNOWN)
    assert told == any(line.component.startswith("torch_") for line in actual.ledger)
    assert 20 * GIB == sum(line.bytes for line in actual.ledger)


def test_ledger_is_of_the_newest_engines() -> None:
    """Later samples of other sources do not change the ledger; the window has its first and last time."""
    samples = (at(1.0), Sample(at_seconds=2.0, engines=(holding(9),)), at(7.5, idle=False, devices=(device(),)))
    actual = diagnose(Timeline(samples=samples), KNOWN)
    assert (1.0, 7.5, 3) == (actual.start_seconds, actual.end_seconds, actual.samples)
    assert 20 * GIB == sum(line.bytes for line in actual.ledger)


def test_gaps_of_facts_come_first() -> None:
    """Then those of samples in their order, each once."""
    samples = (at(1.0, gap=GPU_LOST), at(2.0, gap=NO_ANSWER), at(3.0, gap=GPU_LOST))
    assert (NO_NVML, GPU_LOST, NO_ANSWER) == diagnose(Timeline(samples=samples), replace(KNOWN, gaps=(NO_NVML,))).gaps


def test_rule_that_says_more_than_is_known_is_heard() -> None:
    """Cause, check, remedy and runbook of the verdict fill in what the rule leaves open, and nothing else."""
    entry = KNOWLEDGE["leak.host"]
    bare = Finding(id="leak.host", status="fault", summary=ANY_TEXT)
    own = replace(bare, likely_cause="a", confirm="b", remedy="c", runbook="d")

    assert own == replace(informed(own), confidence=None)
    filled = informed(bare)
    assert (entry.likely_cause, entry.confirm, entry.remedy, entry.runbook) == (
        filled.likely_cause,
        filled.confirm,
        filled.remedy,
        filled.runbook,
    )
