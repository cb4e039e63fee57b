"""spike.activation at its thresholds, with its figures; several processes and GPUs."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules import spike_activation
from kvdiag.model import Allocator, Device, Engine, Facts, Finding, Sample, Timeline
from tests.builders.answers import evidence, only, rows
from tests.builders.runs import of_run
from tests.builders.values import GIB, MIB, OOM, OOM_WITH_ROOM, device, engine, process, split
from tests.builders.worlds import World
from tests.unit.diagnosis.failures import FAILED, FIRST, REFUSED, SERVER

IDLE, BUSY = engine(), engine(running=4, usage=0.5)
HEADROOM = 300_000_000
CONTEXT = 256 * MIB


def judged(*samples: Sample, of: Facts = SERVER) -> Finding:
    """The rule's one finding."""
    return only(spike_activation.judge, Timeline(samples=samples), of)


def by_torch(*pairs: tuple[Allocator, Allocator]) -> Finding:
    """The finding on the first and the last publications of processes."""
    first, last = zip(*pairs, strict=True)
    return judged(Sample(at_seconds=0.0, allocators=first), Sample(at_seconds=15.0, allocators=last))


@pytest.mark.parametrize(
    ("step", "message", "expected"),
    [
        ("concurrent", OOM, "fault"),
        ("concurrent", OOM_WITH_ROOM, "ok"),
        ("long_context", OOM, "ok"),
        ("concurrent", OOM.replace("512.00 MiB is free", "4.00 GiB is free"), "unknown"),
    ],
    ids=["not enough", "not in one piece", "one long request", "enough was free"],
)
def test_failed_request_of_ours_is_judged_by_its_message(step: str, message: str, expected: str) -> None:
    """Devices that were never observed full do not contradict a request that ran out of memory."""
    world = World(failing={step: message})
    actual = of_run(spike_activation.judge, world)

    asked = evidence(actual)["requested"]
    assert (expected, step) == (actual.status, evidence(actual)["step"])
    assert ("512 MiB free" in actual.summary) == (expected == "fault")
    assert asked == (5 * GIB // 2 if message is OOM_WITH_ROOM else 3 * GIB)


def test_a_refused_allocation_has_its_figures() -> None:
    """The evidence has the bytes requested, those available, and the growth of live bytes since the first sample."""
    actual = by_torch((FIRST, REFUSED))

    assert ("spike.activation", "fault", "VLLM::Worker_TP0 100") == (actual.id, actual.status, actual.holder)
    assert [
        ("process", "VLLM::Worker_TP0 100", "holder", "torch"),
        ("failed_allocations", 3, "times", "torch"),
        ("allocated_growth", GIB, "bytes", "torch"),
        ("requested", 3 * GIB, "bytes", "black box"),
        ("free_on_device", 512 * MIB, "bytes", "black box"),
        ("available_with_unused", 1536 * MIB, "bytes", "black box"),
    ] == rows(actual)


def test_a_refusal_of_unknown_size_is_suspect() -> None:
    """One failed allocation of unknown size, without the black box, is a suspect."""
    first, last = (replace(one, title=None) for one in (FIRST, REFUSED))
    actual = by_torch((replace(first, ooms_total=0), replace(last, ooms_total=1, failure=None)))
    assert "suspect" == actual.status
    assert ["process", "failed_allocations", "allocated_growth"] == list(evidence(actual))


@pytest.mark.parametrize(
    ("grown", "asked", "status"),
    [
        (1536 * MIB, 3 * GIB, "ok"),
        (1536 * MIB - 1, 3 * GIB, "fault"),
        (1, 1536 * MIB + 1, "ok"),
        (-GIB, 3 * GIB, "fault"),
        (0, 1536 * MIB + 1, "fault"),
        (0, 1536 * MIB, "suspect"),
        (GIB, 1 * GIB, "suspect"),
    ],
    ids=["all that is short", "a byte less", "a byte of one", "gave back", "a byte short", "just enough", "more"],
)
def test_growth_that_took_what_is_short_is_the_cause(grown: int, asked: int, status: str) -> None:
    """1.5 GiB of 3 are missing: if live bytes grew by as much since the first sample, growth is the cause."""
    whole = split(
        live_bytes=7 * GIB, releasable_bytes=640 * MIB, stranded_bytes=384 * MIB, largest_free_block_bytes=2 * GIB
    )
    first = replace(FIRST, allocated_bytes=3 * GIB)
    failure = replace(FAILED, asked_bytes=asked, split=whole)
    last = replace(first, ooms_total=3, allocated_bytes=3 * GIB + grown, failure=failure)
    actual = by_torch((first, last))
    assert status == actual.status
    assert ("only 0 B" in actual.summary) == (status != "ok" and grown <= 0)


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        pytest.param(FIRST, replace(REFUSED, allocated_bytes=7 * GIB), "ok", id="grown by 2 GiB"),
        pytest.param(FIRST, replace(REFUSED, failure=replace(FAILED, asked_bytes=GIB)), "ok", id="room in pieces"),
        *(
            pytest.param(
                replace(FIRST, ooms_total=first), replace(REFUSED, ooms_total=last), "unknown", id=f"{first}-{last}"
            )
            for first, last in ((0, 0), (5, 5), (5, 4), (None, 5), (5, None), (None, None))
        ),
    ],
)
def test_other_refusals_are_no_spike(first: Allocator, last: Allocator, status: str) -> None:
    """Growth and holes have verdicts of their own; refusals before the first sample, or not counted, say nothing."""
    assert status == by_torch((first, last)).status


def test_the_worst_process_is_reported_and_of_equals_the_first_by_name() -> None:
    """A fault is reported before a suspect and an ok; equal ranks are reported in one order, however they were read."""
    grown, untold = replace(REFUSED, allocated_bytes=7 * GIB), replace(REFUSED, failure=None)

    def of(pid: int, last: Allocator, **changes: object) -> tuple[Allocator, Allocator]:
        return (
            replace(FIRST, pid=pid, **changes),  # type: ignore[arg-type]
            replace(last, pid=pid, **changes),  # type: ignore[arg-type]
        )

    worst = by_torch(of(100, grown), of(101, untold), of(102, REFUSED))
    assert ("fault", "VLLM::Worker_TP0 102") == (worst.status, evidence(worst)["process"])
    better = by_torch(of(100, grown), of(101, untold))
    assert ("suspect", "VLLM::Worker_TP0 101") == (better.status, evidence(better)["process"])
    assert "VLLM::Worker_TP0 101" == evidence(by_torch(of(102, REFUSED), of(101, REFUSED)))["process"]
    by_title = by_torch(of(101, REFUSED, title="b"), of(102, REFUSED, title="a"))
    assert "a 102" == evidence(by_title)["process"]
    nameless = by_torch(of(101, REFUSED), of(102, REFUSED, title=None))
    assert "process 102" == evidence(nameless)["process"]
    small = replace(REFUSED, failure=replace(FAILED, asked_bytes=4 * GIB))
    by_device = by_torch(of(101, REFUSED, device_uuid="b"), of(101, small, device_uuid="a"))
    assert 4 * GIB == evidence(by_device)["requested"]


def gpu(free_bytes: int, *, of: int = 24 * GIB, others: int = 0, index: int = 0) -> Device:
    """A GPU with so many bytes free, of which the server holds what others and the driver do not."""
    used = of - free_bytes
    listed = (process(100 + index, used - 464 * MIB - others), process(7, others))
    return device(index, total_bytes=of, used_bytes=used, processes=listed)


def under_load(*free_bytes: int, at_peak_others: int = 0) -> Finding:
    """The finding on a GPU's free bytes at idle, while requests run, at idle, and so on, 15 s apart."""
    return judged(
        *(
            Sample(
                at_seconds=15.0 * number,
                engines=(BUSY if number % 2 else IDLE,),
                devices=(gpu(free, others=at_peak_others if number % 2 else 0),),
            )
            for number, free in enumerate(free_bytes)
        )
    )


@pytest.mark.parametrize(
    ("before", "least", "after", "others", "status"),
    [
        pytest.param(2 * GIB, HEADROOM, 2 * GIB, 0, "ok", id="headroom"),
        pytest.param(2 * GIB, HEADROOM - 1, 2 * GIB, 0, "suspect", id="a byte less"),
        pytest.param(HEADROOM, HEADROOM - 1, 2 * GIB, 0, "suspect", id="idle with headroom"),
        pytest.param(HEADROOM - 1, HEADROOM - 2, 2 * GIB, 0, "ok", id="full at idle"),
        pytest.param(2 * GIB, 100 * MIB, 100 * MIB + CONTEXT, 0, "suspect", id="a context released"),
        pytest.param(2 * GIB, 100 * MIB, 100 * MIB + CONTEXT - 1, 0, "unknown", id="a byte less released"),
        pytest.param(2 * GIB, 100 * MIB, 2 * GIB, CONTEXT, "ok", id="taken by others"),
        pytest.param(2 * GIB, 100 * MIB, 2 * GIB, CONTEXT - 1, "suspect", id="a byte less taken by others"),
    ],
)
def test_a_dip_below_the_headroom_that_is_released_is_suspect(
    before: int, least: int, after: int, others: int, status: str
) -> None:
    """300 MB are the least that the next transient allocation needs, 256 MiB the smallest context."""
    assert status == under_load(before, least, after, at_peak_others=others).status


def test_a_dip_has_its_figures() -> None:
    """The evidence has the free bytes before, at the minimum and after, and the growth of other processes."""
    assert [
        ("gpu", 0, "index", "nvml"),
        ("min_free_under_load", 100 * MIB, "bytes", "nvml"),
        ("free_before_load", 2 * GIB, "bytes", "nvml"),
        ("free_after_load", 1 * GIB, "bytes", "nvml"),
        ("taken_by_other_processes", 100 * MIB, "bytes", "nvml"),
    ] == rows(under_load(2 * GIB, 100 * MIB, 1 * GIB, at_peak_others=100 * MIB))


def test_a_server_that_was_never_idle_has_nothing_to_compare_with() -> None:
    """Without an idle sample, free bytes before the load and others' growth are unknown."""
    actual = judged(*(Sample(at_seconds=float(at), engines=(BUSY,), devices=(gpu(100 * MIB),)) for at in range(3)))

    assert "unknown" == actual.status
    assert {
        "gpu": 0,
        "min_free_under_load": 100 * MIB,
        "free_before_load": None,
        "free_after_load": None,
        "taken_by_other_processes": None,
    } == evidence(actual)


def test_what_others_gave_back_is_no_negative_share() -> None:
    """Another process that used 1 GiB at idle and nothing at the peak has taken 0 bytes."""
    actual = judged(
        Sample(at_seconds=0.0, engines=(IDLE,), devices=(gpu(2 * GIB, others=GIB),)),
        Sample(at_seconds=15.0, engines=(BUSY,), devices=(gpu(100 * MIB),)),
        Sample(at_seconds=30.0, engines=(IDLE,), devices=(gpu(2 * GIB),)),
    )
    assert ("suspect", 0) == (actual.status, evidence(actual)["taken_by_other_processes"])


def test_the_idle_readings_next_to_the_fullest_moment_are_compared() -> None:
    """Before is the last one before it, after the first one after it; an equal moment later changes neither."""
    kept = under_load(3 * GIB, GIB, 2 * GIB, 100 * MIB, 1 * GIB, 100 * MIB, 500 * MIB)
    assert (2 * GIB, 1 * GIB) == (evidence(kept)["free_before_load"], evidence(kept)["free_after_load"])
    fuller = under_load(3 * GIB, 100 * MIB, 2 * GIB, 50 * MIB, 1 * GIB, 80 * MIB, 500 * MIB)
    assert (2 * GIB, 1 * GIB) == (evidence(fuller)["free_before_load"], evidence(fuller)["free_after_load"])


@pytest.mark.parametrize(
    ("peak", "gpu_at_peak"),
    [
        ((gpu(200 * MIB), gpu(100 * MIB, index=1)), 1),
        ((gpu(100 * MIB, index=1), gpu(100 * MIB)), 0),
        ((device(0, used_bytes=None, processes=(process(100, None),)), gpu(100 * MIB, index=1)), 1),
    ],
    ids=["the fuller", "of equals the first", "one dark"],
)
def test_the_fullest_of_several_gpus_is_reported(peak: tuple[Device, ...], gpu_at_peak: int) -> None:
    """Two GPUs, one of which may not report its memory in between."""
    idle = (gpu(2 * GIB), gpu(2 * GIB, index=1))
    readings = ((IDLE, idle), (BUSY, peak), (IDLE, idle))
    samples = [Sample(at_seconds=15.0 * at, engines=(one,), devices=each) for at, (one, each) in enumerate(readings)]
    actual = judged(*samples)
    assert ("suspect", gpu_at_peak) == (actual.status, evidence(actual)["gpu"])


TWO = (device(0, used_bytes=23 * GIB), device(1, used_bytes=24 * GIB - 100 * MIB))


@pytest.mark.parametrize(
    ("devices", "of", "status"),
    [
        (TWO[:1], Facts(), "ok"),
        (TWO, Facts(), "unknown"),
        ((device(), device(1)), Facts(), "unknown"),
        (TWO, Facts(device_uuids=("GPU-0",)), "ok"),
        (TWO, Facts(device_uuids=("GPU-0", "GPU-1")), "unknown"),
        ((device(3, used_bytes=24 * GIB, processes=(process(9, 23 * GIB),)), gpu(GIB)), SERVER, "ok"),
    ],
    ids=["one GPU", "two of unknown owner", "two with room", "one assigned", "two assigned", "another tenant's"],
)
def test_only_the_servers_gpus_are_judged(devices: tuple[Device, ...], of: Facts, status: str) -> None:
    """A lone GPU is the server's, of two only an assignment decides; another tenant's is never looked at."""
    assert status == judged(Sample(at_seconds=1.0, engines=(BUSY,), devices=devices), of=of).status


def pages(*told: tuple[float, Engine | None, int | None]) -> Finding:
    """The finding on pages and a GPU's free bytes, each at its time where there was one."""
    return judged(
        *(
            Sample(
                at_seconds=at_seconds,
                engines=None if page is None else (page,),
                devices=None if free is None else (gpu(free),),
            )
            for at_seconds, page, free in told
        )
    )


UNCOUNTED = replace(IDLE, requests_running=None)


@pytest.mark.parametrize(
    ("readings", "status"),
    [
        (((10.0, BUSY, None), (100.0, None, GIB)), "ok"),
        (((10.0, BUSY, None), (100.1, None, GIB)), "unknown"),
        (((5.0, None, GIB), (10.0, BUSY, None)), "unknown"),
        (((5.0, None, GIB),), "unknown"),
        (((10.0, UNCOUNTED, GIB),), "unknown"),
        (((10.0, UNCOUNTED, GIB), (20.0, BUSY, GIB)), "ok"),
        (((10.0, IDLE, 2 * GIB), (20.0, BUSY, 100 * MIB)), "unknown"),
        (((10.0, IDLE, 2 * GIB), (20.0, BUSY, None), (21.0, None, 100 * MIB), (22.0, IDLE, 2 * GIB)), "suspect"),
    ],
)
def test_a_device_sample_belongs_to_the_engine_sample_before_it_for_ninety_seconds(
    readings: tuple[tuple[float, Engine | None, int | None], ...], status: str
) -> None:
    """With an older one, or none, it is not known whether requests ran; one that does not count is passed over."""
    assert status == pages(*readings).status


@pytest.mark.parametrize(
    ("length_seconds", "apart_seconds", "least"),
    [(3600.0, 10.0, 100 * MIB), (3601.0, 14.5, 100 * MIB), (3601.0, 14.4, 2 * GIB)],
    ids=["an hour, any", "longer, 14.5 s", "longer, nearer"],
)
def test_long_timelines_are_looked_at_four_times_a_minute(
    length_seconds: float, apart_seconds: float, least: int
) -> None:
    """Torch keeps the memory of its largest step, so samples 14.5 s apart do not miss a lasting minimum."""
    actual = pages(
        (100.0, BUSY, 2 * GIB), (100.0 + apart_seconds, BUSY, 100 * MIB), (100.0 + length_seconds, BUSY, None)
    )
    assert least == evidence(actual)["min_free_under_load"]
