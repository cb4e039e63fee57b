"""What must change nothing in a verdict over hours: when it was, how GPUs are numbered, how often they were read."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Device, Finding, Sample, Timeline
from tests.builders.series import memory
from tests.builders.values import GIB, SERVER_PID, device, engine, process
from tests.builders.worlds import World, facts

FACTS = facts(World(gpus=2))
SERVERS = replace(FACTS, server_pids=(SERVER_PID, SERVER_PID + 1))

GRID_SECONDS = 32 * 3600
"""The steps at which each window looks back for faults that are held divide it."""

kinds = st.sampled_from(["pool", "fast noise", "load cycles", "level steps", "sawtooth", "warm-up"])
leaks = st.sampled_from([0.0, 200.0, 1000.0])


def two_gpus(name: str, seed: int, leak: float, tick_seconds: float = 60.0) -> Timeline:
    """Three hours of a server on two GPUs, of which the second may leak."""
    times, sizes, load = memory(name, seed, hours=3.0, tick_seconds=tick_seconds, leak_mb_per_hour=leak)
    samples = []
    for at_seconds, size, busy in zip(times, sizes, load, strict=True):
        devices = tuple(
            device(index, used_bytes=held + GIB, total_bytes=160 * GIB, processes=(process(SERVER_PID + index, held),))
            for index, held in enumerate((20 * GIB, size))
        )
        page = engine(usage=round(busy, 4), running=1)
        samples.append(Sample(at_seconds=at_seconds, devices=devices, engines=(page,)))
    return Timeline(samples=tuple(samples))


def said(found: tuple[Finding, ...]) -> list[tuple[str, str]]:
    """Ids and statuses."""
    return [(one.id, one.status) for one in found]


def _called(one: tuple[str, str]) -> tuple[str, str]:
    """A finding, whether it is sure or a suspect."""
    return one[0], "called" if one[1] in ("suspect", "fault") else one[1]


@settings(max_examples=12, deadline=None)
@given(kinds, st.integers(0, 99), leaks, st.integers(1, 10**4).map(lambda count: count * GRID_SECONDS))
def test_when_it_was_does_not_matter(name: str, seed: int, leak: float, shift: int) -> None:
    """The same hours at another time say the same, if the moments at which faults are held are the same."""
    seen = two_gpus(name, seed, leak)
    later = Timeline(samples=tuple(replace(one, at_seconds=one.at_seconds + shift) for one in seen.samples))

    assert said(judge(seen, SERVERS, DEFAULT_LIMITS)) == said(judge(later, SERVERS, DEFAULT_LIMITS))


@settings(max_examples=12, deadline=None)
@given(kinds, st.integers(0, 99), leaks)
def test_how_devices_are_numbered_does_not_matter(name: str, seed: int, leak: float) -> None:
    """Two GPUs that change their indexes, and their places in each sample, are judged alike."""

    def renumbered(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return tuple(replace(one, index=7 - one.index, uuid=f"GPU-{7 - one.index}") for one in reversed(devices))

    seen = two_gpus(name, seed, leak)
    other = Timeline(samples=tuple(replace(one, devices=renumbered(one.devices or ())) for one in seen.samples))

    actual, expected = (judge(one, SERVERS, DEFAULT_LIMITS) for one in (other, seen))

    assert said(expected) == said(actual)
    if leak:
        assert ["GPU 1" in one.summary for one in expected] == ["GPU 6" in one.summary for one in actual]


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["pool", "sawtooth", "warm-up"]), st.integers(0, 99), st.sampled_from([0.0, 1000.0]))
def test_half_of_the_readings_say_the_same(name: str, seed: int, leak: float) -> None:
    """Read each 15 s or each 30 s: what grows is called, and nothing else; how sure that is may differ."""
    seen = two_gpus(name, seed, leak, tick_seconds=15.0)
    half = Timeline(samples=seen.samples[::2])
    assert {15.0} == {later.at_seconds - earlier.at_seconds for earlier, later in pairwise(seen.samples)}

    whole, rest = (said(judge(readings, SERVERS, DEFAULT_LIMITS)) for readings in (seen, half))
    assert [_called(one) for one in whole] == [_called(one) for one in rest]
