"""leak.device_torch and leak.device_non_torch where the agents tell what is torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.model import Timeline
from tests.builders.answers import statuses
from tests.builders.runs import run
from tests.builders.values import MIB, NO_NVML
from tests.builders.worlds import World
from tests.unit.diagnosis.rules.device_leaks import NON_TORCH, TORCH, verdicts


def told(world: World) -> dict[str, tuple[str, str]]:
    """Status and summary of both ids."""
    return {one.id: (one.status, one.summary) for one in verdicts(world)}


def test_with_agents_a_leak_of_tensors_is_torchs() -> None:
    """What lives in torch and grows is torch's leak, and outside torch nothing is wrong."""
    world = World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=6 * MIB)

    actual = told(world)

    grows = "VLLM::Worker_TP0 100: torch's allocated memory grows 6.00 MiB with each request and is not released"
    flat = "outside torch the process is flat over 6 equal cycles (detection limit 2.00 MiB per request)"
    assert {TORCH: ("fault", grows), NON_TORCH: ("ok", flat)} == actual


def test_with_agents_a_leak_beside_torch_is_not_torchs() -> None:
    """What the process takes while torch stands still is not torch's."""
    actual = told(World(agents=True, device_growth_bytes=6 * MIB))

    flat = "torch's allocated memory is flat over 6 equal cycles (detection limit 64.0 KiB per request)"
    grows = "VLLM::Worker_TP0 100 grows 6.00 MiB with each request outside torch, and it is not released"
    assert {TORCH: ("ok", flat), NON_TORCH: ("fault", grows)} == actual


def test_with_agents_a_leak_shows_before_the_driver_has_a_page_of_it() -> None:
    """Tensors of 100 KiB a request, which fit into what torch has reserved already, are a leak that NVML cannot see."""
    world = World(agents=True, torch_growth_bytes=100 * 2**10, nvml=None)

    actual = told(world)

    assert ("fault", "ok") == (actual[TORCH][0], actual[NON_TORCH][0])
    assert "100 KiB with each request" in actual[TORCH][1]


def test_with_agents_no_driver_is_needed_for_what_is_torchs() -> None:
    """Where NVML does not answer here, the agents are enough to judge both."""
    actual = told(World(agents=True, torch_growth_bytes=6 * MIB, device_growth_bytes=6 * MIB, nvml=NO_NVML))

    assert ("fault", "ok") == (actual[TORCH][0], actual[NON_TORCH][0])


def test_cache_that_grows_while_nothing_more_lives_in_it_is_no_leak() -> None:
    """What torch reserves more with each equal request, no tensor kept, is fragmentation.allocator's to tell."""
    actual = told(World(agents=True, device_growth_bytes=6 * MIB, cache_growth_bytes=6 * MIB))

    assert ("ok", "ok") == (actual[TORCH][0], actual[NON_TORCH][0])


@pytest.mark.parametrize(
    ("torch_growth_bytes", "expected"),
    [
        (6 * MIB, ("ok", "GPU 0 grows by no more than torch reserves: outside torch it is flat")),
        (
            2 * MIB,
            ("fault", "GPU 0 grows with each request and is not released, 24.0 MiB in 6 cycles of it outside torch"),
        ),
    ],
)
def test_where_processes_are_not_told_the_devices_growth_less_torchs_decides(
    torch_growth_bytes: int, expected: tuple[str, str]
) -> None:
    """Without the bytes of the process itself, the device's growth that torch does not reserve is outside torch."""
    world = World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=torch_growth_bytes, outside_told=False)

    assert expected == told(world)[NON_TORCH]


def test_agents_that_did_not_publish_after_each_cycle_decide_nothing() -> None:
    """Publications of before a cycle's end tell of its load: the device alone is judged."""
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


@pytest.mark.parametrize(
    ("late_bytes", "expected"),
    [
        (
            (0, 0, 0, 0, 300 * 2**10, 0, 0, 0),
            ("ok", "torch's allocated memory rose once, 300 KiB in 6"),
        ),
        (
            (0, 0, 0, 0, 0, 9 * MIB, 0, 9 * MIB),
            ("unknown", "torch's allocated memory rose 18.0 MiB in 6"),
        ),
    ],
    ids=["once", "now and then"],
)
def test_table_that_torch_makes_late_is_an_event(late_bytes: tuple[int, ...], expected: tuple[str, str]) -> None:
    """One step among flat cycles is no leak; several that are not steady leave it open."""
    # What came with the first request, with the second, and so on
    world = World(agents=True, torch_late_bytes=late_bytes)

    status, summary = told(world)[TORCH]

    assert expected[0] == status
    assert expected[1] in summary
