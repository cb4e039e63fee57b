"""leak.device_torch and leak.device_non_torch over the equal cycles of the steps, by NVML and by the agents."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.attribution import UNDECIDED
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Device, Evidence, Finding, Sample, Timeline
from tests.builders.answers import containing, evidence, statuses
from tests.builders.runs import run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, process
from tests.builders.worlds import TRAINING, World, facts
from tests.unit.diagnosis.rules.leaks.device_leaks import NON_TORCH, TORCH, verdicts


def both(status: str) -> dict[str, str]:
    """The same status for both ids."""
    return {TORCH: status, NON_TORCH: status}


def seen_otherwise(timeline: Timeline, change: object) -> Timeline:
    """The timeline with every reading of the devices passed through `change`."""
    samples = tuple(
        sample if sample.devices is None else replace(sample, devices=change(sample.devices))  # type: ignore[operator]
        for sample in timeline.samples
    )
    return Timeline(samples=samples, marks=timeline.marks)


def test_growth_with_every_request_is_a_fault() -> None:
    """Six MiB more after each of six judged cycles is a leak; whether torch holds them is said to be open."""
    # A server that keeps 6 MiB of device memory of each request
    world = World(device_growth_bytes=6 * MIB)
    actual = verdicts(world)
    # The process is known to grow, and what inside it is not
    expected = (
        Finding(
            id=TORCH,
            status="fault",
            summary=containing("GPU 0", "6.00 MiB", UNDECIDED),
            evidence=(
                Evidence(name="gpu", value=0, unit="index", source="nvml"),
                Evidence(name="growth_per_cycle", value=6.0 * MIB, unit="bytes", source="nvml"),
                Evidence(name="growth_over_judged_cycles", value=36 * MIB, unit="bytes", source="nvml"),
                Evidence(name="judged_cycles", value=6, unit="cycles", source="kvdiag"),
                Evidence(name="rising_cycles", value=6, unit="cycles", source="nvml"),
                Evidence(name="first_touch_growth", value=12 * MIB, unit="bytes", source="nvml"),
                Evidence(name="smallest_detectable_leak", value=2 * MIB, unit="bytes per request", source="computed"),
                Evidence(name="holder", value="server", unit="", source="nvml"),
            ),
        ),
        Finding(id=NON_TORCH, status="unknown", summary=UNDECIDED),
    )

    assert expected == actual


def test_flat_device_memory_is_ok_and_says_what_would_have_shown() -> None:
    """A healthy server's verdict names the smallest leak that it would have seen."""
    actual = verdicts(World())
    assert [("ok", containing("flat over 6 equal requests", "2.00 MiB"))] * 2 == [
        (one.status, one.summary) for one in actual
    ]


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), NO_NVML.reason),
        (World(nvml=GPU_LOST), GPU_LOST.reason),
        (World(memory_told=False), containing("fewer than 5 equal requests")),
        (World(lost_in="single_request"), containing("fewer than 5 equal requests")),
        (World(busy=True), containing("fewer than 5 equal requests")),
        (
            World(failing={"single_request": "HTTP 500"}),
            containing("fewer than 5 equal requests"),
        ),
    ],
    ids=["no NVML", "GPU lost", "memory not told", "server lost", "never idle", "requests failed"],
)
def test_without_readings_around_enough_loads_it_is_unknown(world: World, reason: str) -> None:
    """No device, no idle moment or no request that worked: nothing was compared, and the finding says why."""
    actual = verdicts(world)
    assert [("unknown", reason)] * 2 == [(one.status, one.summary) for one in actual]


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


def test_another_process_that_grows_on_the_same_gpu_is_not_the_server() -> None:
    """A co-tenant that takes 32 MiB more in every cycle makes no fault of the server."""
    world = World(foreign={0: (process(7, 1 * GIB),)}, foreign_growth_bytes={0: 32 * MIB})
    assert "fault" not in statuses(verdicts(world)).values()


def test_another_process_does_not_hide_the_servers_own_leak() -> None:
    """A leak on one of the server's GPUs is found although somebody else grows faster on another of them."""
    # Tensor parallel on two GPUs: the server leaks on GPU 0, a co-tenant grows faster on GPU 1
    world = World(
        gpus=2, device_growth_bytes=6 * MIB, foreign={1: (process(7, GIB),)}, foreign_growth_bytes={1: 64 * MIB}
    )
    actual = verdicts(world)[0]
    # The server's own is the verdict
    assert ("fault", 0, "server") == (actual.status, evidence(actual)["gpu"], evidence(actual)["holder"])


def test_growth_whose_process_is_not_visible_says_so() -> None:
    """In a container the growth is seen and whose it is may not be: the finding does not claim to know."""
    world = World(device_growth_bytes=6 * MIB, server_seen=False)
    actual = verdicts(world)[0]
    assert "unknown" == evidence(actual)["holder"]
    assert "whose process is not visible" in actual.summary
    assert actual.status in {"suspect", "fault"}


def test_one_of_two_gpus_out_of_reach_leaves_it_unknown() -> None:
    """A GPU of the server that could not be read after the cycles is not covered by the other one's flatness."""

    # Two GPUs, of which the second does not answer after the first readings
    def lost(devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return tuple(replace(one, memory=None, processes=None) if one.index == 1 else one for one in devices)

    world = World(gpus=2)
    whole = run(world)
    known, later = whole.samples[:40], Timeline(samples=whole.samples[40:], marks=())
    timeline = Timeline(samples=known + seen_otherwise(later, lost).samples, marks=whole.marks)

    assert both("unknown") == statuses(verdicts(world, timeline))


def test_readings_without_process_lists_do_not_hide_whose_memory_grows() -> None:
    """The driver lists processes on some readings only: one without a list, right after, does not blind the rule."""
    world = World(foreign={0: (process(7, 1 * GIB),)}, foreign_growth_bytes={0: 32 * MIB})
    whole = run(world)
    samples: list[Sample] = []
    for sample in whole.samples:
        samples.append(sample)
        if sample.devices is not None:
            plain = tuple(replace(one, processes=None) for one in sample.devices)
            samples.append(replace(sample, at_seconds=sample.at_seconds + 0.001, devices=plain))

    actual = verdicts(world, Timeline(samples=tuple(samples), marks=whole.marks))

    # The growth is the neighbour's as before
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


def test_growth_while_nothing_runs_is_not_blamed_on_requests() -> None:
    """Where it cannot be seen whose bytes they are, a device that grows at idle as well grows for another reason."""
    world = World(
        server_seen=False,
        processes_told=False,
        foreign={0: (process(7, 1 * GIB),)},
        foreign_growth_bytes={0: 24 * MIB},
    )
    actual = verdicts(world)

    assert both("unknown") == statuses(actual)
    assert "also grows while idle" in actual[1].summary


def test_a_leak_beside_a_growing_other_process_is_the_servers_own() -> None:
    """Where the driver tells both sizes, the server's own growth is judged, whatever its neighbour takes."""
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


def told(world: World) -> dict[str, tuple[str, str]]:
    """Status and summary of both ids."""
    return {one.id: (one.status, one.summary) for one in verdicts(world)}


def test_with_agents_a_leak_of_tensors_is_torchs() -> None:
    """What lives in torch and grows is torch's leak, and outside torch nothing is wrong."""
    world = World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=6 * MIB)
    actual = told(world)
    grows = containing("VLLM::Worker_TP0 (pid 100)", "torch's allocated memory", "6.00 MiB with each request")
    flat = containing("outside torch", "flat over 6 equal requests", "2.00 MiB per request")
    assert {TORCH: ("fault", grows), NON_TORCH: ("ok", flat)} == actual


def test_with_agents_a_leak_beside_torch_is_not_torchs() -> None:
    """What the process takes while torch stands still is not torch's."""
    actual = told(World(agents=True, device_growth_bytes=6 * MIB))
    flat = containing("torch's allocated memory", "flat over 6 equal requests", "64.0 KiB per request")
    grows = containing("VLLM::Worker_TP0 (pid 100)", "6.00 MiB with each request", "outside torch")
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
        (6 * MIB, ("ok", containing("GPU 0", "flat outside torch"))),
        (2 * MIB, ("fault", containing("GPU 0", "24.0 MiB in 6 equal requests", "outside torch"))),
    ],
)
def test_where_processes_are_not_reported_the_devices_growth_less_torchs_decides(
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
    world = World(agents=True, torch_late_bytes=late_bytes)
    status, summary = told(world)[TORCH]
    assert expected[0] == status
    assert expected[1] in summary
