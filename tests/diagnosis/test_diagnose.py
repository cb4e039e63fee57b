from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.rules import RULES
from kvdiag.diagnosis.steps import STEPS
from kvdiag.model import Device, Diagnosis, Engine, Facts, Gap, KvPool, Load, Sample, Status, Timeline
from tests.builders import (
    GIB,
    GPU_LOST,
    MIB,
    NO_ANSWER,
    NO_NVML,
    OOM,
    OOM_WITH_ROOM,
    SMALL_POOL,
    TRAINING,
    WORLDS,
    World,
    device,
    engine,
    facts,
    holding,
    judged,
    pool,
    process,
    run,
    seen,
    statuses,
    step,
)

STEP_IDS = ("baseline", "single_request", "concurrent", "long_context")

VERDICTS: dict[str, Status] = {
    "healthy": "ok",
    "two GPUs, tensor parallel": "ok",
    "two engines, data parallel": "ok",
    "sliding window": "ok",
    "pool without bytes": "ok",
    "no pool": "unknown",
    "no GPU": "ok",
    "GPU lost": "unknown",
    "memory not told": "ok",
    "processes not told": "ok",
    "server not seen": "ok",
    "usage not told": "unknown",
    "blocks leak": "fault",
    "blocks held at start": "fault",
    "device memory leaks": "fault",
    "torch leaks": "fault",
    "leak beside torch": "fault",
    "agents on two GPUs": "ok",
    "ranks uneven": "suspect",
    "warm-up": "ok",
    "foreign process": "fault",
    "foreign process of unknown size": "ok",
    "zombie": "suspect",
    "blocks wasted": "fault",
    "requests wait": "suspect",
    "requests are preempted": "fault",
    "one request runs out of memory": "fault",
    "ten requests find no hole": "fault",
    "requests fail": "unknown",
    "other traffic": "unknown",
    "other prompts": "unknown",
    "loads not seen": "unknown",
    "cut short": "unknown",
    "server lost": "unknown",
}

FAULTS: dict[str, set[str]] = {
    "torch leaks": {"leak.device_torch"},
    "ranks uneven": {"imbalance.rank"},
    "leak beside torch": {"leak.device_non_torch"},
    "blocks leak": {"leak.kv_blocks"},
    "blocks held at start": {"leak.kv_blocks"},
    "device memory leaks": {"leak.device_torch"},
    "foreign process": {"baseline.foreign_memory"},
    "zombie": {"baseline.foreign_memory"},
    "blocks wasted": {"fragmentation.kv_waste"},
    "requests wait": {"capacity.concurrency"},
    "requests are preempted": {"capacity.concurrency"},
    "one request runs out of memory": {"capacity.long_context"},
    "ten requests find no hole": {"fragmentation.allocator"},
}


def bytes_or_none(most: int) -> st.SearchStrategy[int | None]:
    """A size, or that it is not told."""
    return st.none() | st.integers(0, most)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any server in any trouble, several troubles at once among them."""
    pools = draw(
        st.sampled_from(
            [
                (pool(),),
                (pool(pool_bytes=None),),
                (pool(sliding_window_tokens=512),),
                (pool(usage_blocks=6145),),
                (pool("0"), pool("1")),
                (SMALL_POOL,),
                (),
            ]
        )
    )
    return World(
        pools=pools,
        gpus=draw(st.integers(1, 3)),
        device_bytes=80 * GIB,
        driver_reserved_bytes=draw(st.sampled_from([464 * MIB, None])),
        weights_bytes=draw(bytes_or_none(12 * GIB)),
        held_at_start_blocks=draw(st.sampled_from([0, 0, 7])),
        leaked_blocks_per_request=draw(st.sampled_from([0, 0, 1, 9])),
        extra_blocks_per_request=draw(st.sampled_from([0, 0, 1, 40])),
        first_touch_bytes=tuple(draw(st.lists(st.integers(0, 200 * MIB), max_size=4))),
        device_growth_bytes=draw(st.sampled_from([0, 0, 3 * MIB])),
        agents=draw(st.booleans()),
        torch_growth_bytes=draw(st.sampled_from([0, 0, 3 * MIB])),
        outside_told=draw(st.booleans()),
        foreign=draw(st.sampled_from([{}, {0: (TRAINING,)}, {1: (process(7, None),)}, {2: (TRAINING,)}])),
        foreign_growth_bytes=draw(st.sampled_from([{}, {0: 8 * MIB, 2: 8 * MIB}])),
        zombie_bytes=draw(st.sampled_from([0, 0, 2 * GIB])),
        server_seen=draw(st.booleans()),
        processes_told=draw(st.booleans()),
        server_bytes_told=draw(st.booleans()),
        memory_told=draw(st.sampled_from([True, True, False])),
        nvml=draw(st.sampled_from([None, None, NO_NVML, GPU_LOST])),
        resident_at_once=draw(st.sampled_from([None, None, 6])),
        preemptions=draw(st.sampled_from([0, 0, 4])),
        failing=draw(st.sampled_from([{}, {}, {"long_context": OOM}, {"concurrent": OOM_WITH_ROOM}])),
        other_prompt_tokens=draw(st.sampled_from([{}, {"concurrent": 9}])),
        unseen=draw(st.sampled_from([(), ("single_request",), ("concurrent", "long_context")])),
        busy=draw(st.sampled_from([False, False, False, True])),
        cut_short_in=draw(st.sampled_from([None, None, *STEP_IDS[1:]])),
        lost_in=draw(st.sampled_from([None, None, None, *STEP_IDS[1:]])),
        usage_told=draw(st.sampled_from([True, True, True, False])),
    )


few = settings(max_examples=25, deadline=None)
"""A run of the builders takes some ten milliseconds, and more on a busy machine."""


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_gets_its_verdict(name: str) -> None:
    """The worst of each kind of server, and the findings that accuse: those and no other."""
    # WHEN the run is judged
    actual = judged(WORLDS[name])

    # THEN
    accused = {one.id for one in actual.findings if one.status in {"fault", "suspect"}}
    assert (VERDICTS[name], FAULTS.get(name, set())) == (actual.worst, accused)


def test_every_world_is_judged() -> None:
    """No world is left out of the table."""
    # THEN
    assert list(WORLDS) == list(VERDICTS)


def test_steps_come_in_their_order() -> None:
    """A run has four steps with unique ids, whatever of it was seen."""
    # THEN
    assert STEP_IDS == tuple(one.id for one in STEPS)
    assert STEP_IDS == tuple(one.id for one in judged(World(lost_in="single_request")).steps)


def test_every_verdict_is_known() -> None:
    """Each id that a rule answers with has its entry, with every part and a runbook of its own name."""
    # GIVEN the ids of a healthy run
    ids = [one.id for one in judged().findings]

    # THEN none comes twice, and all are known
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(KNOWLEDGE)
    for verdict, entry in KNOWLEDGE.items():
        assert f"alerts/runbooks/{verdict}.md" == entry.runbook
        assert all((entry.symptom, entry.likely_cause, entry.confirm, entry.remedy))


def test_findings_bring_cause_check_and_remedy() -> None:
    """What is known of a verdict comes with each finding."""
    # THEN
    for one in judged(World(leaked_blocks_per_request=4)).findings:
        entry = KNOWLEDGE[one.id]
        assert (entry.likely_cause, entry.confirm, entry.remedy, entry.runbook) == (
            one.likely_cause,
            one.confirm,
            one.remedy,
            one.runbook,
        )


@few
@given(worlds())
def test_every_rule_answers_every_id_each_time(world: World) -> None:
    """Whatever was seen, each verdict is there once, in the same order, with a sentence and a status."""
    # WHEN any run is judged
    actual = judged(world)

    # THEN
    assert list(statuses(judged().findings)) == [one.id for one in actual.findings]
    assert all(summary for summary in (one.summary for one in actual.findings))
    assert all(summary for summary in (one.summary for one in actual.steps))
    assert all(one.summary.startswith("cannot tell: ") for one in actual.steps if one.status == "unknown") or (
        "unknown" == step(actual, "baseline").status
    )


@few
@given(worlds())
def test_the_worst_is_what_was_found(world: World) -> None:
    """Fault before suspect before unknown before ok; unknown findings alone are no reason for unknown."""
    # WHEN any run is judged
    actual = judged(world)
    found = {one.status for one in actual.steps} | {one.status for one in actual.findings}

    # THEN
    if "fault" in found:
        assert "fault" == actual.worst
    elif "suspect" in found:
        assert "suspect" == actual.worst
    else:
        assert actual.worst in {"ok", "unknown"}
        assert ("ok" == actual.worst) <= ({"ok"} == {one.status for one in actual.steps})


@few
@given(worlds())
def test_the_same_timeline_gives_the_same_diagnosis(world: World) -> None:
    """Judging is a function: twice the same, down to the last word."""
    # GIVEN one timeline
    timeline, known = run(world), facts(world)

    # THEN
    assert diagnose(timeline, known) == diagnose(timeline, known)


@few
@given(worlds(), st.integers(1, 10**6))
def test_a_shift_in_time_changes_nothing_but_the_window(world: World, seconds: int) -> None:
    """What happened is judged, not when."""
    # GIVEN a run and the same run later
    whole, known = run(world), facts(world)
    later = Timeline(
        samples=tuple(replace(one, at_seconds=one.at_seconds + seconds) for one in whole.samples),
        marks=tuple(replace(one, at_seconds=one.at_seconds + seconds) for one in whole.marks),
    )
    first, second = diagnose(whole, known), diagnose(later, known)

    # THEN
    moved = replace(first, start_seconds=first.start_seconds + seconds, end_seconds=first.end_seconds + seconds)
    assert moved == second


def told(diagnosis: Diagnosis) -> tuple[object, ...]:
    """What a diagnosis says without its labels: its verdicts, and every number of its steps."""
    return (
        diagnosis.worst,
        statuses(diagnosis.findings),
        diagnosis.steps,
        sorted((line.component, line.bytes, line.source) for line in diagnosis.ledger),
    )


@few
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_devices_changes_nothing_but_labels(world: World, chance: random.Random) -> None:
    """Devices may be listed and numbered in any order."""
    # GIVEN a run, and the same with its devices listed in another order and numbered by it
    whole, known = run(world), facts(world)
    order = list(range(8))
    chance.shuffle(order)

    def permuted(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return tuple(sorted((replace(one, index=order[one.index]) for one in devices), key=lambda one: one.index))

    samples = tuple(
        one if one.devices is None else replace(one, devices=permuted(one.devices)) for one in whole.samples
    )

    # THEN
    first, second = (told(diagnose(one, known)) for one in (whole, Timeline(samples=samples, marks=whole.marks)))
    assert first[:2] == second[:2]
    assert first[3] == second[3]


@few
@given(worlds())
def test_the_order_of_engines_changes_nothing(world: World) -> None:
    """Engines may stand on the page in any order, and under any label."""
    # GIVEN a run against two engines, and the same with pages and pools turned round and relabelled
    world = replace(world, pools=(pool("0"), pool("1")))
    whole, known = run(world), facts(world)

    def renamed(one: Engine) -> Engine:
        return replace(one, engine={"0": "b", "1": "a"}[one.engine])

    def turned(one: KvPool) -> KvPool:
        return replace(one, engine={"0": "b", "1": "a"}[one.engine])

    samples = tuple(
        one if one.engines is None else replace(one, engines=tuple(renamed(page) for page in reversed(one.engines)))
        for one in whole.samples
    )
    other = Timeline(samples=samples, marks=whole.marks)
    pools = replace(known, pools=tuple(turned(one) for one in reversed(known.pools)))

    # THEN
    assert told(diagnose(whole, known)) == told(diagnose(other, pools))


@few
@given(worlds())
def test_one_more_idle_sample_never_turns_ok_into_a_fault(world: World) -> None:
    """Nothing new happened: a verdict may become surer, and no accusation arises."""
    # GIVEN a run, and the same with its last page read once more, idle
    whole, known = run(world), facts(world)
    page = next(one.engines for one in reversed(whole.samples) if one.engines)
    idle = tuple(replace(one, requests_running=0, requests_waiting=0) for one in page)
    at_seconds = whole.samples[-1].at_seconds + 0.1
    more = (*whole.samples, Sample(at_seconds=at_seconds, engines=idle, load=Load(requests=0)))
    before, after = diagnose(whole, known), diagnose(Timeline(samples=more, marks=whole.marks), known)

    # THEN
    assert (before.worst, after.worst) not in {("ok", "fault"), ("ok", "suspect")}
    for verdict, status in statuses(before.findings).items():
        assert "ok" != status or "fault" != statuses(after.findings)[verdict]


def test_nothing_seen_is_unknown() -> None:
    """An empty timeline is judged unknown, without steps, at no time."""
    # WHEN nothing was seen
    actual = diagnose(Timeline(samples=()), Facts())

    # THEN
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
    # GIVEN an idle server and a leaking one
    known = Facts(pools=(pool(),))
    fine, leaking = (diagnose(seen(*[holding(blocks)] * 3), known) for blocks in (0, 5))

    # THEN
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
    # THEN
    assert "unknown" == diagnose(timeline, Facts(pools=(pool(),))).worst


def test_a_server_that_stopped_answering_is_unknown_at_the_end() -> None:
    """A healthy past is no evidence for a server that is gone, whichever reading came last."""
    # GIVEN idle readings, then no answer, and a reading of the devices after that
    gone = seen(*[engine()] * 5, *[NO_ANSWER] * 5)
    last = Sample(at_seconds=gone.samples[-1].at_seconds + 1, devices=(device(),))
    timeline = Timeline(samples=(*gone.samples, last))

    # THEN
    assert "unknown" == diagnose(timeline, Facts(pools=(pool(),))).worst


def test_history_that_was_lost_in_part_is_not_ok() -> None:
    """What could not be read may have held anything; what was found in the rest stays found."""
    # GIVEN an idle server and a leaking one, an hour of each lost
    lost = Gap(source="prometheus", kind="failed", reason="an hour could not be read")
    known = Facts(pools=(pool(),), gaps=(lost,))
    fine, leaking = (diagnose(seen(*[holding(blocks)] * 3), known) for blocks in (0, 5))

    # THEN
    assert (("unknown", ()), ("fault", ())) == ((fine.worst, fine.steps), (leaking.worst, leaking.steps))


def test_a_gpu_that_fell_off_during_the_run_is_unknown() -> None:
    """A GPU of the server that stopped answering is not healthy, whichever reading came last."""
    # GIVEN a run in which GPU 1 of two is out of reach from the middle on
    world = World(gpus=2)
    whole = run(world)
    lost = Gap(source="nvml", kind="failed", reason="GPU 1 is out of reach (GPU is lost)")
    half = whole.samples[len(whole.samples) // 2].at_seconds

    def broken(sample: Sample) -> Sample:
        if sample.devices is None or sample.at_seconds < half:
            return sample
        devices = tuple(replace(one, memory=None, processes=None) if one.index else one for one in sample.devices)
        return replace(sample, devices=devices, gaps=(lost,))

    timeline = Timeline(samples=tuple(broken(sample) for sample in whole.samples), marks=whole.marks)

    # THEN
    assert "unknown" == diagnose(timeline, facts(world)).worst


def test_one_late_answer_on_a_busy_machine_changes_nothing() -> None:
    """A single failed reading in the middle is a gap that is listed, and no verdict."""
    # GIVEN a healthy run with one reading that failed, between the baseline and the first requests
    whole = run()
    middle = next(mark.at_seconds for mark in whole.marks if mark.step == "warmup") - 0.001
    late = Sample(at_seconds=middle, gaps=(NO_ANSWER,))
    timeline = Timeline(
        samples=tuple(sorted((*whole.samples, late), key=lambda one: one.at_seconds)), marks=whole.marks
    )
    actual = diagnose(timeline, facts(World()))

    # THEN
    assert ("ok", (NO_ANSWER,)) == (actual.worst, actual.gaps)


def test_gaps_are_listed_once_and_in_order() -> None:
    """What was not seen is told once, however often it was not."""
    # GIVEN a server without pools on a machine without NVML
    actual = judged(World(pools=(), nvml=NO_NVML))

    # THEN
    assert (*facts(World(pools=())).gaps, NO_NVML) == actual.gaps


def test_limits_are_taken_from_their_one_value() -> None:
    """A caller's own limits are the ones that count."""
    # GIVEN two blocks too many for each request
    world = World(extra_blocks_per_request=2)

    # THEN a wider tolerance is all it takes
    assert "suspect" == diagnose(run(world), facts(world)).worst
    assert "ok" == diagnose(run(world), facts(world), Limits(blocks_per_request_tolerance=2)).worst


def test_a_rule_is_a_function_of_what_it_is_given() -> None:
    """Each rule answers with a tuple of findings for nothing at all."""
    # THEN
    for rule in RULES:
        found = rule(Timeline(samples=()), Facts(), DEFAULT_LIMITS)
        assert {"unknown"} == {one.status for one in found}


def test_what_was_never_there_is_not_lost() -> None:
    """Where there is no driver, a question about it that took too long does not make the whole run unknown."""
    # GIVEN a run without NVML, whose readings of the devices were late once, at the end
    world = World(nvml=NO_NVML)
    whole = run(world)
    late = Gap(source="nvml", kind="failed", reason="the driver has not answered for 1 s: its readings are stale")
    slow = replace(whole.samples[-1], engines=None, devices=None, gaps=(late,))
    samples = (*whole.samples, replace(slow, at_seconds=whole.samples[-1].at_seconds + 0.1))

    # THEN
    assert "ok" == diagnose(Timeline(samples=samples, marks=whole.marks), facts(world)).worst
