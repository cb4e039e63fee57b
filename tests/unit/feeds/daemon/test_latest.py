"""The current state: the newest sample of every part, without removed devices, processes and engines."""

from kvdiag.feeds.daemon.latest import SHOWN_SECONDS, LatestReadings
from kvdiag.model import Gap, HostProcess, Sample, SourceHealth
from tests.builders.values import NO_NVML, allocator, device, engine, process

NO_ANSWER = Gap("engine", "failed", "no answer")
STARTING = Gap("engine", "absent", "no answer yet: nobody listens")
STUCK = Gap("nvml", "failed", "no answer for 9 s")


def after(*samples: Sample) -> LatestReadings:
    """The state after these samples."""
    newest = LatestReadings()
    for sample in samples:
        newest.add(sample)
    return newest


def health(newest: LatestReadings) -> dict[str, tuple[bool, int]]:
    """Whether each source is up, and its errors."""
    return {one.source: (one.up, one.errors_total) for one in newest.sources({}, {})}


def test_parts_of_several_samples_are_put_together() -> None:
    """Each source reads at its own pace; together they are one sample, with the processes of the last list."""
    listed, host = process(1, 5), HostProcess(pid=1, name="vllm", resident_bytes=1)

    actual = after(
        Sample(at_seconds=1.0, devices=(device(processes=(listed,)),)),
        Sample(at_seconds=2.0, engines=(engine(running=2),)),
        Sample(at_seconds=3.0, host=(host,)),
        Sample(at_seconds=4.0, devices=(device(used_bytes=7),)),
    ).sample()

    assert (
        Sample(
            at_seconds=4.0,
            engines=(engine(running=2),),
            devices=(device(used_bytes=7, processes=(listed,)),),
            host=(host,),
        )
        == actual
    )


def test_an_engine_that_does_not_answer_is_gone_at_once() -> None:
    """Its last figures are not shown as if they were of now."""
    newest = after(Sample(at_seconds=1.0, engines=(engine(),)), Sample(at_seconds=2.0, gaps=(NO_ANSWER,)))
    assert Sample(at_seconds=2.0, gaps=(NO_ANSWER,)) == newest.sample()
    assert {"engine": (False, 1)} == health(newest)


def test_a_source_heals() -> None:
    """The next reading brings everything back, and the errors stay counted."""
    newest = after(Sample(at_seconds=1.0, gaps=(NO_ANSWER,)), Sample(at_seconds=2.0, engines=(engine(),)))
    assert Sample(at_seconds=2.0, engines=(engine(),)) == newest.sample()
    assert {"engine": (True, 1)} == health(newest)


def test_a_removed_device_is_gone() -> None:
    """A device that the newest sample does not list is not shown."""
    newest = after(Sample(at_seconds=1.0, devices=(device(0), device(1))), Sample(at_seconds=2.0, devices=(device(1),)))
    assert (device(1),) == newest.sample().devices


def test_a_stuck_driver_is_down() -> None:
    """Its devices are not shown, and it is no error of the engine's."""
    newest = after(
        Sample(at_seconds=1.0, devices=(device(),)),
        Sample(at_seconds=2.0, engines=(engine(),)),
        Sample(at_seconds=3.0, gaps=(STUCK,)),
    )
    assert newest.sample().devices is None
    assert {"nvml": (False, 1), "engine": (True, 0)} == health(newest)


def test_what_is_not_renewed_is_not_shown() -> None:
    """A hung loop leaves no gap in the samples: only their age shows it."""
    newest = after(
        Sample(at_seconds=1.0, devices=(device(),)), Sample(at_seconds=1.5 + SHOWN_SECONDS, engines=(engine(),))
    )
    assert newest.sample().devices is None


def test_a_starting_server_is_no_error() -> None:
    """It is not up, and nothing has failed."""
    assert {"engine": (False, 0)} == health(after(Sample(at_seconds=1.0, gaps=(STARTING,))))


def test_a_driver_that_does_not_exist_cannot_be_down() -> None:
    """A sidecar without a GPU does not report NVML's health; the devices that agents report are shown."""
    newest = after(
        Sample(at_seconds=1.0, gaps=(NO_NVML,)),
        Sample(at_seconds=1.5, devices=(device(),), allocators=(allocator(),)),
        Sample(at_seconds=2.0, gaps=(NO_NVML,)),
    )
    assert {"torch_allocator": (True, 0), "engine": (False, 0)} == health(newest)
    assert (device(),) == newest.sample().devices


def test_news_come_once() -> None:
    """A continuing gap is reported when it begins, and again when its kind changes."""
    newest = LatestReadings()
    assert (STARTING,) == newest.add(Sample(at_seconds=1.0, gaps=(STARTING,)))
    assert () == newest.add(Sample(at_seconds=2.0, gaps=(STARTING,)))
    assert (NO_ANSWER,) == newest.add(Sample(at_seconds=3.0, gaps=(NO_ANSWER,)))


def test_durations_are_told_of_their_sources() -> None:
    """The duration of a source's newest sample is reported with that source."""
    newest = after(Sample(at_seconds=1.0, engines=(engine(),)))
    assert (SourceHealth(source="engine", up=True, errors_total=0, duration_seconds=0.5),) == newest.sources(
        {"engine": 0.5, "nvml": 0.1}, {}
    )
