"""Memory in use while the engine sleeps: it must be the same from sleep to sleep."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Facts, Finding, Sample, Timeline
from tests.builders.values import GIB, MIB, device, engine

SLEEP_MINUTES = 30


def sleeps(*floors: int) -> Finding:
    """The finding on a device that holds 60 GiB awake and these bytes in each sleep, one every hour."""
    samples = []
    for minute in range(2 * SLEEP_MINUTES * len(floors)):
        asleep = minute % (2 * SLEEP_MINUTES) >= SLEEP_MINUTES
        used = floors[minute // (2 * SLEEP_MINUTES)] if asleep else 60 * GIB
        page = replace(engine(usage=0.0), asleep=asleep)
        gpu = device(used_bytes=used, total_bytes=80 * GIB)
        samples.append(Sample(at_seconds=60.0 * minute, engines=(page,), devices=(gpu,)))
    facts = Facts(engine_name="vllm", device_uuids=("GPU-0",))
    found = judge(Timeline(samples=tuple(samples)), facts, DEFAULT_LIMITS)
    return next(one for one in found if one.id == "leak.device_torch")


@pytest.mark.parametrize(
    ("floors", "status"),
    [
        pytest.param([GIB] * 8, "unknown", id="the same"),
        pytest.param([GIB + 50 * MIB * step for step in range(4)], "unknown", id="too few sleeps"),
        pytest.param([GIB + 50 * MIB * step for step in range(5)], "suspect", id="five that rise"),
        pytest.param([GIB + 50 * MIB * step for step in range(6)], "fault", id="six that rise"),
        pytest.param([GIB + 400 * MIB * min(step, 2) for step in range(8)], "unknown", id="rose in the first two"),
        pytest.param([GIB + 400 * MIB * (step % 2) for step in range(8)], "unknown", id="up and down"),
        pytest.param([GIB + MIB * step for step in range(8)], "unknown", id="less than an allocator moves"),
    ],
)
def test_memory_asleep_that_rises_is_a_leak(floors: list[int], status: str) -> None:
    """By the number of sleeps, their order, and the rate of the later half."""
    assert status == sleeps(*floors).status


def test_its_figures_are_those_of_the_sleeps() -> None:
    """The floors, the rise of a sleep, and the rate over the hours between them."""
    figures = {one.name: one.value for one in sleeps(*(GIB + 100 * MIB * step for step in range(6))).evidence}
    assert (6, GIB, GIB + 500 * MIB) == tuple(figures[name] for name in ("sleeps", "first_sleep_min", "last_sleep_min"))
    assert 100 * MIB == figures["growth_per_sleep"]
    assert pytest.approx(100 * MIB) == figures["growth_per_hour"]
