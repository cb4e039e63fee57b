"""How hourly series are gathered: owner of the bytes, sampling interval, start, and the engines' load."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.memory_series import MemorySeries, Points, engine_activity, memory_series
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Allocator, Device, Engine, Facts, HostProcess, Sample, Timeline
from tests.builders.values import GIB, MIB, allocator, device, engine, process

KNOWN = Facts(server_pids=(100,))
GROWTH = DEFAULT_LIMITS.growth


def at(
    seconds: float,
    *engines: Engine,
    devices: tuple[Device, ...] | None = None,
    allocators: tuple[Allocator, ...] | None = None,
    host: tuple[HostProcess, ...] | None = None,
) -> Sample:
    """A sample of these parts."""
    return Sample(at_seconds=seconds, engines=engines or None, devices=devices, allocators=allocators, host=host)


def timeline(*samples: Sample) -> Timeline:
    """A timeline of samples."""
    return Timeline(samples=samples)


def on_host(pid: int, anonymous: int | None, resident: int = GIB, name: str = "vllm") -> HostProcess:
    """A process of the server on the host."""
    return HostProcess(pid=pid, name=name, resident_bytes=resident, anonymous_bytes=anonymous)


def series(*samples: Sample, known: Facts = KNOWN) -> MemorySeries:
    """The series of some samples."""
    return memory_series(timeline(*samples), known, DEFAULT_LIMITS)


def by_name(seen: MemorySeries, part: Part) -> Mapping[str, Points]:
    """The series of a component by whose they are, in words."""
    return {owner.who: points for owner, points in seen.points[part].items()}


def test_load_and_sleep_are_those_of_the_newest_sample_before() -> None:
    """For 90 s after it, and nothing before the first."""
    asleep = replace(engine(usage=0.25), asleep=True)
    seen = engine_activity(timeline(at(5.0, engine(usage=0.5)), at(10.0, asleep)))

    assert (None, False) == seen.at(4.9, GROWTH)
    assert (0.5, False) == seen.at(9.9, GROWTH)
    assert (0.25, True) == seen.at(100.0, GROWTH)
    assert (None, False) == seen.at(100.1, GROWTH)


def test_activity_is_over_all_engines() -> None:
    """As full as all together, asleep when one is; running requests where usage is not reported."""
    first, second = engine(usage=0.25), replace(engine(usage=None, running=3, label="1"), asleep=True)

    actual = engine_activity(
        timeline(at(1.0, first, engine(usage=0.5, label="1")), at(2.0, first, second), at(3.0), at(4.0, engine()))
    )

    assert [1.0, 2.0, 4.0] == actual.times_seconds
    assert [0.75, 3.25, 0.0] == actual.load
    assert [False, True, False] == actual.asleep
    assert not actual.fresh


def counting(seconds: float, *prompts: int, generated: int | None = 0) -> Sample:
    """Engines by their prompt tokens."""
    return at(
        seconds,
        *(
            replace(engine(prompt_tokens=tokens, label=str(number)), generation_tokens_total=generated)
            for number, tokens in enumerate(prompts)
        ),
    )


@pytest.mark.parametrize(
    ("first", "last", "fresh"), [(0, 5, True), (0, 0, False), (1, 5, False), (None, 5, False), (0, None, True)]
)
def test_a_server_is_seen_from_its_start_where_it_had_generated_nothing(
    first: int | None, last: int | None, *, fresh: bool
) -> None:
    """A counter that never moves says nothing."""
    seen = timeline(*(counting(at, 0, generated=total) for at, total in ((1.0, first), (5.0, first), (9.0, last))))
    assert fresh == engine_activity(seen).fresh


def test_host_memory_is_that_of_each_process_and_of_all() -> None:
    """Anonymous bytes, together while all report them; resident ones of a process that does not."""
    host = (on_host(100, 5 * MIB), on_host(101, 7 * MIB, name=""))
    unreported = (on_host(100, 6 * MIB), on_host(101, None, 9 * MIB, name=""))

    actual = series(at(0.0, host=host), at(15.0, host=unreported), at(30.0, host=host[:1]))

    assert {
        "vllm 100": ([0.0, 15.0, 30.0], [5 * MIB, 6 * MIB, 5 * MIB]),
        "process 101": ([0.0], [7 * MIB]),
    } == by_name(actual, Part.HOST_ANONYMOUS)
    assert [([0.0], [12 * MIB])] == list(by_name(actual, Part.HOST_TOGETHER).values())
    assert {"process 101": ([15.0], [9 * MIB])} == by_name(actual, Part.HOST_RESIDENT)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"host": (on_host(100, MIB),)}, Part.HOST_ANONYMOUS),
        ({"allocators": (allocator(),)}, Part.TORCH_LIVE),
        ({"devices": (device(),)}, Part.DEVICE),
    ],
)
def test_readings_are_kept_four_times_a_minute(changes: dict[str, object], part: Part) -> None:
    """One within 14.5 s of the last that was kept adds nothing."""
    samples = [
        replace(Sample(at_seconds=seconds), **changes)  # type: ignore[arg-type]
        for seconds in (0.0, 14.4, 14.5, 20.0, 29.0)
    ]
    ((times, _),) = by_name(series(*samples), part).values()
    assert [0.0, 14.5, 29.0] == times


def test_torch_is_live_reserved_unused_and_outside() -> None:
    """Of processes that may be the server's; what is outside torch only where it is reported."""
    reported = replace(allocator(device_uuid="AB", process_bytes=9 * GIB), title="VLLM::Worker")
    other, stranger = allocator(pid=101, pid_seen=False), allocator(pid=7)

    actual = series(at(0.0, allocators=(stranger, reported, other)))

    assert {"VLLM::Worker 100", "process 101"} == set(by_name(actual, Part.TORCH_LIVE))
    name = "VLLM::Worker 100"
    parts = (Part.TORCH_LIVE, Part.TORCH_RESERVED, Part.TORCH_UNUSED, Part.OUTSIDE_TORCH)
    assert [6 * GIB, 8 * GIB, 2 * GIB, GIB] == [by_name(actual, part)[name][1][0] for part in parts]
    assert {name} == set(by_name(actual, Part.OUTSIDE_TORCH))
    assert {"ab", "0"} == {owner.device_uuid for owner in actual.points[Part.TORCH_LIVE]}


def test_devices_are_the_servers_where_its_processes_were_seen() -> None:
    """Samples that list the server's processes yield its bytes and the others'; unlisted ones yield none."""

    def listed(seconds: float, own: int, used: int) -> Sample:
        mine = device(0, used_bytes=used, processes=(process(100, own), process(7, GIB)))
        return at(seconds, devices=(mine, device(1)))

    actual = series(
        listed(0.0, 4 * GIB, 6 * GIB), at(15.0, devices=(device(0), device(1))), listed(16.0, 5 * GIB, 4 * GIB)
    )

    # More of its own than of all is no others
    assert {"GPU 0": ([0.0, 16.0], [4 * GIB, 5 * GIB])} == by_name(actual, Part.SERVER)
    assert {"GPU 0": ([0.0, 16.0], [2 * GIB, 0])} == by_name(actual, Part.OTHERS)
    assert {} == by_name(actual, Part.DEVICE)


def test_devices_are_whole_where_nothing_reports_whose_bytes_they_hold() -> None:
    """All of them, else those that were assigned; one without a memory reading says nothing."""
    sample = at(0.0, devices=(device(0), device(1, used_bytes=None), device(2)))
    assert {"GPU 0", "GPU 2"} == set(by_name(series(sample, known=Facts()), Part.DEVICE))
    assigned = series(sample, known=Facts(device_uuids=("GPU-2",)))
    assert {"GPU 2": ([0.0], [20 * GIB])} == by_name(assigned, Part.DEVICE)


def test_growth_is_what_is_held_beyond_the_first_reading() -> None:
    """Never less than nothing."""
    samples = [at(15.0 * step, host=(on_host(100, size),)) for step, size in enumerate((5, 9, 3, 8))]
    for seen, expected in ((series(*samples), 3), (series(*samples[:3]), 0)):
        (owner,) = seen.points[Part.HOST_ANONYMOUS]
        assert expected == seen.grown_bytes(Part.HOST_ANONYMOUS, owner)


def judged_seconds(
    *, known: Facts = KNOWN, engines: Sequence[Sample] = (), **since: tuple[float, float]
) -> list[float]:
    """How long the series of processes that were read from a moment to another are judged."""
    last = max(end for _, end in since.values())
    samples = [
        at(
            seconds,
            host=tuple(
                on_host(100 + number, GIB)
                for number, (start, end) in enumerate(since.values())
                if start <= seconds <= end
            ),
        )
        for seconds in (30.0 * step for step in range(int(last / 30.0) + 1))
    ]
    merged = sorted([*engines, *samples], key=lambda one: one.at_seconds)
    assessed = series(*merged, known=known).assessed(Part.HOST_ANONYMOUS)
    return sorted(one.seconds for one in assessed.values())


def test_what_was_not_there_to_the_end_has_exited() -> None:
    """A process whose newest sample is more than 5 min older than the newest of all is not judged."""
    assert [3300.0, 3600.0] == judged_seconds(a=(0.0, 3600.0), b=(0.0, 3300.0), c=(0.0, 3270.0))


def test_half_an_hour_of_a_beginning_is_left_out() -> None:
    """The first half hour, of a shorter life a quarter, after a known start, a new process, or counters at 0."""
    whole = (0.0, 7200.0)
    fresh = [counting(0.0, 1, generated=0), counting(7200.0, 9, generated=5)]
    assert [7200.0] == judged_seconds(a=whole)
    assert [5400.0] == judged_seconds(a=whole, engines=fresh)
    assert [5130.0, 7200.0] == judged_seconds(a=whole, b=(330.0, 7200.0))
    assert [6000.0] == judged_seconds(a=(600.0, 7800.0), known=replace(KNOWN, started_seconds=0.0))


def test_readings_beside_engines_asleep_are_left_out() -> None:
    """Their weights are elsewhere meanwhile."""
    engines = [at(30.0 * step, replace(engine(), asleep=step >= 180)) for step in range(241)]
    assert [5370.0] == judged_seconds(a=(0.0, 7200.0), engines=engines)
