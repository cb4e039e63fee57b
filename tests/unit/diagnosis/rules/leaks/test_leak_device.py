"""leak.device_torch and leak.device_non_torch over the equal cycles of the steps, by NVML and by the agents."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.attribution import NON_TORCH, TORCH
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Finding, Sample, Timeline
from tests.builders.answers import containing, evidence, statuses
from tests.builders.runs import run
from tests.builders.values import GIB, KIB, MIB, NO_NVML, process
from tests.builders.worlds import TRAINING, World, facts


def verdicts(world: World, timeline: Timeline | None = None) -> tuple[Finding, ...]:
    """The rule's findings on a world, or on another timeline of it."""
    return judge(run(world) if timeline is None else timeline, facts(world), DEFAULT_LIMITS)


def both(status: str) -> dict[str, str]:
    """The same status for both ids."""
    return {TORCH: status, NON_TORCH: status}


@pytest.mark.parametrize(
    "world",
    [
        World(memory_reported=False),
        World(lost_in="single_request"),
        World(busy=True),
        World(failing={"single_request": "HTTP 500"}),
    ],
    ids=["memory not told", "server lost", "never idle", "requests failed"],
)
def test_without_readings_around_enough_loads_it_is_unknown(world: World) -> None:
    """No idle moment or no request that worked: nothing was compared, and the finding says why."""
    few = containing("fewer than 5 equal requests")
    assert [("unknown", few)] * 2 == [(one.status, one.summary) for one in verdicts(world)]


@pytest.mark.parametrize(
    ("world", "status"),
    [
        pytest.param(World(first_touch_bytes=(180 * MIB, 120 * MIB, 60 * MIB)), "ok", id="with the first three"),
        pytest.param(World(first_touch_bytes=(0, 0, 2 * GIB)), "ok", id="in one step"),
        pytest.param(World(first_touch_bytes=(0, 0, 256 * MIB, 128 * MIB)), "ok", id="in the two cycles left for it"),
        pytest.param(
            World(first_touch_bytes=tuple(size * MIB for size in (512, 256, 128, 64, 32, 16, 8, 4, 2))),
            "unknown",
            id="decaying",
        ),
        pytest.param(World(first_touch_bytes=(*(0,) * 6, 50 * MIB)), "unknown", id="one step among flat cycles"),
        pytest.param(
            World(first_touch_bytes=(*(0,) * 4, *(size * MIB for size in (48, 24, 12, 6, 4, 2)))),
            "unknown",
            id="slowing down",
        ),
        pytest.param(
            World(foreign={0: (process(7, 2 * GIB),)}, foreign_growth_bytes={0: -4 * MIB}), "ok", id="given back"
        ),
        pytest.param(
            World(foreign={1: (TRAINING,)}, foreign_growth_bytes={1: 64 * MIB}), "ok", id="somebody else's job on GPU 1"
        ),
    ],
)
def test_growth_that_is_not_the_servers_or_not_steady_is_no_leak(world: World, status: str) -> None:
    """Kernels and workspaces of the first requests, however large, are no leak; growth that comes to an end is none,
    nor is it shown as flat; a shrinking server and a GPU without a process of the server are quiet.
    """
    assert both(status) == statuses(verdicts(world))


def test_readings_without_process_lists_do_not_hide_whose_memory_grows() -> None:
    """The driver lists processes in some samples only; one without a list, right after, does not blind the rule."""
    world = World(foreign={0: (process(7, 1 * GIB),)}, foreign_growth_bytes={0: 32 * MIB})
    whole = run(world)
    samples: list[Sample] = []
    for sample in whole.samples:
        samples.append(sample)
        if sample.devices is not None:
            plain = tuple(replace(one, processes=None) for one in sample.devices)
            samples.append(replace(sample, at_seconds=sample.at_seconds + 0.001, devices=plain))

    actual = verdicts(world, Timeline(samples=tuple(samples), marks=whole.marks))

    # The growth is the other process's as before
    assert statuses(verdicts(world)) == statuses(actual)
    assert "another process" == evidence(actual[1])["holder"]


@pytest.mark.parametrize("growth", [1 * MIB, 300 * 1024], ids=["1 MiB", "300 KiB"])
def test_growth_below_a_page_per_request_is_never_a_fault(growth: int) -> None:
    """What grows slower than the driver's page per request cannot be decided in one minute."""
    # Pages of 2 MiB that fill up slowly, so that memory steps up now and then
    steps = tuple(
        2 * MIB * ((number * growth) // (2 * MIB) - ((number - 1) * growth) // (2 * MIB)) for number in range(1, 30)
    )
    assert "fault" not in statuses(verdicts(World(first_touch_bytes=steps))).values()


def test_a_leak_beside_a_growing_other_process_is_the_servers_own() -> None:
    """Where the driver lists both sizes, the server's own growth is judged, whether the other grows or shrinks."""
    growing, shrinking = (
        World(device_growth_bytes=6 * MIB, foreign={0: (process(7, 2 * GIB),)}, foreign_growth_bytes={0: growth})
        for growth in (64 * MIB, -4 * MIB)
    )
    assert ["fault", "fault"] == [verdicts(world)[0].status for world in (growing, shrinking)]


@pytest.mark.parametrize(
    ("engine_name", "called", "untold"),
    [
        ("vllm", TORCH, NON_TORCH),
        ("sglang", TORCH, NON_TORCH),
        ("llama.cpp", NON_TORCH, TORCH),
        (None, NON_TORCH, TORCH),
    ],
)
def test_the_engine_names_what_nvml_alone_shows(engine_name: str | None, called: str, untold: str) -> None:
    """As it does over hours, in a soak and in a fleet: the same growth has one name."""
    world = World(device_growth_bytes=6 * MIB)
    actual = judge(run(world), replace(facts(world), engine_name=engine_name), DEFAULT_LIMITS)
    assert {called: "fault", untold: "unknown"} == statuses(actual)


def test_agents_that_did_not_publish_after_each_cycle_decide_nothing() -> None:
    """Publications older than a cycle's end show its load, so the device alone is judged."""
    world = World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=6 * MIB)
    timeline = run(world)
    late = tuple(
        replace(sample, allocators=tuple(replace(each, age_seconds=60.0) for each in sample.allocators))
        if sample.allocators
        else sample
        for sample in timeline.samples
    )

    actual = verdicts(world, Timeline(samples=late, marks=timeline.marks))

    assert {TORCH: "fault", NON_TORCH: "unknown"} == statuses(actual)


AGENTS = World(agents=True, device_growth_bytes=6 * MIB)


@pytest.mark.parametrize(
    ("world", "torch", "beside"),
    [
        (
            replace(AGENTS, torch_growth_bytes=6 * MIB),
            ("fault", "6.00 MiB with each request"),
            ("ok", "2.00 MiB per request"),
        ),
        (AGENTS, ("ok", "64.0 KiB per request"), ("fault", "6.00 MiB with each request")),
        (
            World(agents=True, torch_growth_bytes=100 * KIB),
            ("fault", "100 KiB with each request"),
            ("ok", "flat over the last 6"),
        ),
        (replace(AGENTS, torch_growth_bytes=6 * MIB, nvml=NO_NVML), ("fault", "6.00 MiB"), ("ok", "flat")),
        (replace(AGENTS, cache_growth_bytes=6 * MIB), ("ok", "flat"), ("ok", "flat")),
    ],
    ids=["tensors", "beside torch", "less than a page of the driver", "no driver", "cache"],
)
def test_with_agents_a_leak_is_told_where_it_is(world: World, torch: tuple[str, str], beside: tuple[str, str]) -> None:
    """Growth of tensors within reserved memory is a leak that NVML does not show; a growing cache without live bytes is
    left to fragmentation.allocator.
    """
    for what, (status, words), actual in zip(
        ("torch's allocated memory", "outside torch"), (torch, beside), verdicts(world), strict=True
    ):
        assert (status, containing(what, words)) == (actual.status, actual.summary)
        assert (status == "fault") == ("VLLM::Worker_TP0 (pid 100)" in actual.summary)
