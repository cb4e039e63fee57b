"""The diagnosis is the same at any time, in any order of its inputs, and with one idle sample more."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.model import Device, Diagnosis, Engine, KvPool, Load, Sample, Timeline
from tests.builders.answers import later, statuses
from tests.builders.runs import run
from tests.builders.values import pool
from tests.builders.worlds import World, facts
from tests.unit.diagnosis.any_worlds import few, worlds


@few
@given(worlds(), st.integers(1, 10**6))
def test_a_shift_in_time_changes_nothing_but_the_window(world: World, seconds: int) -> None:
    """What happened is judged, not when."""
    whole, known = run(world), facts(world)
    moved = Timeline(
        samples=tuple(replace(one, at_seconds=one.at_seconds + seconds) for one in whole.samples),
        marks=tuple(replace(one, at_seconds=one.at_seconds + seconds) for one in whole.marks),
    )
    assert later(diagnose(whole, known), seconds) == diagnose(moved, known)


def told(diagnosis: Diagnosis) -> tuple[object, ...]:
    """What a diagnosis says without its labels: its verdicts, and every number of its steps."""
    return (
        diagnosis.worst,
        statuses(diagnosis.findings),
        diagnosis.steps,
        sorted((line.component, line.bytes, line.provenance) for line in diagnosis.ledger),
    )


@few
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_devices_changes_nothing_but_labels(world: World, chance: random.Random) -> None:
    """Devices may be listed and numbered in any order."""
    whole, known = run(world), facts(world)
    order = list(range(8))
    chance.shuffle(order)

    def permuted(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return tuple(sorted((replace(one, index=order[one.index]) for one in devices), key=lambda one: one.index))

    samples = tuple(
        one if one.devices is None else replace(one, devices=permuted(one.devices)) for one in whole.samples
    )

    first, second = (told(diagnose(one, known)) for one in (whole, Timeline(samples=samples, marks=whole.marks)))
    assert first[:2] == second[:2]
    assert first[3] == second[3]


@few
@given(worlds())
def test_the_order_of_engines_changes_nothing(world: World) -> None:
    """Engines may stand on the page in any order, and under any label."""
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

    assert told(diagnose(whole, known)) == told(diagnose(other, pools))


@few
@given(worlds())
def test_one_more_idle_sample_never_turns_ok_into_a_fault(world: World) -> None:
    """Nothing new happened: a verdict may become surer, and no accusation arises."""
    whole, known = run(world), facts(world)
    page = next(one.engines for one in reversed(whole.samples) if one.engines)
    idle = tuple(replace(one, requests_running=0, requests_waiting=0) for one in page)
    at_seconds = whole.samples[-1].at_seconds + 0.1
    more = (*whole.samples, Sample(at_seconds=at_seconds, engines=idle, load=Load(requests=0)))
    before, after = diagnose(whole, known), diagnose(Timeline(samples=more, marks=whole.marks), known)

    assert (before.worst, after.worst) not in {("ok", "fault"), ("ok", "suspect")}
    for verdict, status in statuses(before.findings).items():
        assert "ok" != status or "fault" != statuses(after.findings)[verdict]
