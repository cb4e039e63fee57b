"""When a server counts as dead: it stopped answering, and a tenth of a device of its came free."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.server_exits import ServerExit, server_exits
from kvdiag.model import Device, Engine, Facts, Gap, Sample, Timeline
from tests.builders.values import GIB, NO_ANSWER, device, engine

TOTAL = 100 * GIB


def gpus(*free_bytes: int | None) -> tuple[Device, ...]:
    """Devices of 100 GiB by what is free of each."""
    return tuple(
        device(index, total_bytes=TOTAL, used_bytes=None if free is None else TOTAL - free)
        for index, free in enumerate(free_bytes)
    )


def up(seconds: float, *free_bytes: int | None) -> Sample:
    """An engine that answers."""
    return Sample(at_seconds=seconds, engines=(engine(),), devices=gpus(*free_bytes) or None)


def down(seconds: float, *free_bytes: int | None, gap: Gap = NO_ANSWER) -> Sample:
    """An engine that does not."""
    return Sample(at_seconds=seconds, devices=gpus(*free_bytes) or None, gaps=(gap,))


def found(*samples: Sample, known: Facts | None = None) -> tuple[ServerExit, ...]:
    """The deaths of a timeline."""
    return server_exits(Timeline(samples=samples), known or Facts(), DEFAULT_LIMITS)


def test_memory_that_comes_free_when_nobody_answers_is_a_death() -> None:
    """With the least that was free before, on which GPU, and what came free."""
    actual = found(
        up(1.0, 5 * GIB, 9 * GIB), up(2.0, GIB, 9 * GIB), down(3.0, 3 * GIB, 9 * GIB), down(4.0, 61 * GIB, 99 * GIB)
    )
    assert (
        ServerExit(at_seconds=4.0, gpu=0, free_before_bytes=GIB, came_free_bytes=60 * GIB, answered_before=True),
    ) == actual


@pytest.mark.parametrize(("free_bytes", "count"), [(11 * GIB, 1), (11 * GIB - 1, 0)])
def test_a_tenth_of_the_device_has_to_come_free(free_bytes: int, count: int) -> None:
    """From 1 GiB to 11 of 100; less is a context or activations."""
    assert count == len(found(up(1.0, GIB), down(2.0, free_bytes)))


def test_what_is_freed_by_a_server_that_answers_is_no_death() -> None:
    """Nor what comes free where a page is missing for another reason, or of devices that are not the server's."""
    assert () == found(up(1.0, GIB), up(2.0, 90 * GIB))
    assert () == found(up(1.0, GIB), down(2.0, GIB), up(3.0, 90 * GIB))
    assert () == found(up(1.0, GIB), down(2.0, 90 * GIB, gap=replace(NO_ANSWER, kind="absent")))
    assert () == found(up(1.0, GIB), down(2.0, 90 * GIB, gap=replace(NO_ANSWER, source="nvml")))
    assert () == found(up(1.0, GIB), Sample(at_seconds=2.0, devices=gpus(90 * GIB)))
    assert () == found(up(1.0, None), down(2.0, None))
    other = Facts(device_uuids=("GPU-1",))
    assert () == found(up(1.0, GIB, GIB), down(2.0, 90 * GIB, GIB), known=other)
    assert 1 == found(up(1.0, GIB, GIB), down(2.0, GIB, 90 * GIB), known=other)[0].gpu
    # A page that comes although a part of it failed is an answer.
    partly = Sample(at_seconds=2.0, engines=(engine(),), devices=gpus(90 * GIB), gaps=(NO_ANSWER,))
    assert () == found(up(1.0, GIB), down(1.5), partly)


def test_memory_that_a_gpu_shows_free_before_the_engine_is_asked_is_a_death() -> None:
    """Each is scraped at a time of its own: of an answer in between it was no death."""
    freed = Sample(at_seconds=2.0, devices=gpus(90 * GIB))
    assert [2.0] == [one.at_seconds for one in found(up(1.0, GIB), freed, down(3.0))]
    assert () == found(up(1.0, GIB), freed, up(3.0), down(4.0))


def test_each_death_counts_once() -> None:
    """Each exit resets the minimum of free memory, and whether the server has answered."""

    # A server that dies, tries to start twice without an answer, and dies again after one
    def silent(seconds: float, *free_bytes: int) -> Sample:
        return down(seconds, *free_bytes)

    actual = found(
        up(1.0, GIB),
        silent(2.0, 90 * GIB),
        silent(3.0, 90 * GIB),
        silent(4.0, 2 * GIB),
        silent(5.0, 90 * GIB),
        up(6.0, 3 * GIB),
        silent(7.0, 90 * GIB),
    )

    assert [(2.0, GIB, True), (5.0, 2 * GIB, False), (7.0, 3 * GIB, True)] == [
        (one.at_seconds, one.free_before_bytes, one.answered_before) for one in actual
    ]


def test_samples_without_devices_change_nothing() -> None:
    """Engines and devices are read on ticks of their own; other engines' pages are answers."""
    page: tuple[Engine, ...] = (engine(), engine(label="1"))
    actual = found(
        Sample(at_seconds=1.0, engines=page),
        Sample(at_seconds=1.5, devices=gpus(GIB)),
        down(2.0),
        Sample(at_seconds=3.0, devices=gpus(50 * GIB)),
    )
    assert [(3.0, 49 * GIB, True)] == [(one.at_seconds, one.came_free_bytes, one.answered_before) for one in actual]
    never = found(Sample(at_seconds=1.5, devices=gpus(GIB)), down(2.0), Sample(at_seconds=3.0, devices=gpus(50 * GIB)))
    assert [False] == [one.answered_before for one in never]
