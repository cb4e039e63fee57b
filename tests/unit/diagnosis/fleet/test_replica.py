"""One replica's life in numbers that can be reckoned by hand: a reading in ten minutes from 0 s on, without noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.fleet.replica import Growth, ReplicaSummary
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.model import Device, Engine, Facts, HostProcess, Sample, Timeline
from tests.builders.values import GIB, MIB, SERVER_PID, allocator, device, engine, pool, process, split
from tests.unit.diagnosis.fleet.replicas import replica

TICK, HOUR = 600.0, 3600.0
NOBODY = Facts()
KNOWN = Facts(pools=(pool(),), server_pids=(SERVER_PID,))


def life(part: Callable[[int], Sample], *, hours: float = 25.0) -> Timeline:
    """The readings of so many hours; the first of them is left out of what is compared."""
    count = round(hours * HOUR / TICK) + 1
    samples = []
    for place in range(count):
        sample = part(place)
        samples.append(
            Sample(
                at_seconds=place * TICK,
                engines=sample.engines,
                devices=sample.devices,
                allocators=sample.allocators,
                host=sample.host,
            )
        )
    return Timeline(samples=tuple(samples))


def full(size: int) -> Sample:
    """A device, and nothing else."""
    return Sample(at_seconds=0.0, devices=(device(used_bytes=size, total_bytes=80 * GIB),))


def summary(part: Callable[[int], Sample], facts: Facts = NOBODY, *, hours: float = 25.0) -> ReplicaSummary:
    """What is kept of such a life."""
    return replica(life(part, hours=hours), "r", facts)


def growth(part: Callable[[int], Sample], facts: Facts = NOBODY, *, hours: float = 25.0) -> Growth:
    """The growth of the only component that is told."""
    (only,) = summary(part, facts, hours=hours).growths
    return only


def newest(part: Sample, facts: Facts = KNOWN) -> dict[str, float]:
    """What each component holds, where nothing changes."""
    return {one.component: one.newest for one in summary(lambda _: part, facts, hours=7.0).growths}


def test_steady_growth_is_its_rate_however_it_is_measured() -> None:
    """1 MiB in ten minutes are 6 an hour, of all the life and of its later half, of the levels and of their floors."""
    actual = growth(lambda place: full(20 * GIB + place * MIB))

    # The last of 48 blocks of half an hour has the readings 147 to 150
    rate: Any = pytest.approx(6 * MIB, rel=1e-9)
    assert actual == Growth(
        component=MemoryComponent.DEVICE,
        newest=20 * GIB + 148.5 * MIB,
        per_hour=rate,
        later_per_hour=rate,
        floor_per_hour=rate,
        later_floor_per_hour=rate,
        jumps_up=0,
        jumps_down=0,
        load_reported=False,
    )


def test_growth_that_ended_has_a_later_half_without_it() -> None:
    """What rose for half of the life and stands since grows no more, though it has grown."""
    actual = growth(lambda place: full(20 * GIB + min(place, 78) * MIB))

    # The lowest of the last third lies 72 MiB above the first: 32 blocks of half an hour later
    assert (0.0, 0.0) == (actual.later_per_hour, actual.later_floor_per_hour)
    assert pytest.approx(71 * MIB / 16, rel=0.02) == actual.floor_per_hour
    assert actual.per_hour > MIB


@pytest.mark.parametrize(("steps", "rises"), [(6, False), (7, True)])
def test_jumps_count_as_growth_where_they_only_rise(steps: int, rises: bool) -> None:
    """Seven up and none down are chance once in 128 times; six, once in 64, may be levels that move either way."""
    # Steps of 100 MiB, three hours apart
    actual = growth(lambda place: full(20 * GIB + 100 * MIB * min((place + 8) // 18, steps)))

    assert (steps, 0) == (actual.jumps_up, actual.jumps_down)
    assert rises == (actual.per_hour > 10 * MIB)
    assert actual.floor_per_hour > 10 * MIB


def test_floor_rises_by_a_jump_that_no_slope_shows() -> None:
    """1 GiB after 30 of 48 blocks: over 32 of them in the whole, over 16 of 24 in the later half."""
    actual = growth(lambda place: full((20 + (place >= 96)) * GIB))

    # Blocks are half an hour long
    assert (1, 0, 0.0) == (actual.jumps_up, actual.jumps_down, actual.per_hour)
    assert pytest.approx(64 * MIB) == actual.floor_per_hour
    assert pytest.approx(128 * MIB) == actual.later_floor_per_hour


@pytest.mark.parametrize(("hours", "told"), [(7.0, 1), (7.0 - 1.0 / 6.0, 0)])
def test_six_hours_after_the_first_are_enough(hours: float, told: int) -> None:
    """A reading less, and nothing is said."""
    assert told == len(summary(lambda _: full(GIB), hours=hours).growths)


@pytest.mark.parametrize(("missing", "told"), [(0.25, True), (0.28, False)])
def test_three_quarters_of_a_life_have_to_be_known(missing: float, told: bool) -> None:
    """What is not known of the rest lies between what is."""
    # 48 blocks of half an hour, the last of them without readings
    unseen = round(150 * missing * 24 / 25)

    found = summary(lambda place: full(GIB) if place <= 150 - unseen else Sample(at_seconds=0.0))

    assert told == bool(found.growths)


class TestParts:
    """Which bytes are in which component."""

    DEVICE = device(
        used_bytes=30 * GIB, total_bytes=80 * GIB, processes=(process(SERVER_PID, 20 * GIB), process(7, 6 * GIB))
    )

    def test_every_byte_of_a_device_is_in_one_component(self) -> None:
        """The server's processes, and what no listed process holds; others' listed bytes are nobody's leak here."""
        sample = Sample(at_seconds=0.0, devices=(self.DEVICE,))
        assert {"server": 20 * GIB, "unlisted": 4 * GIB} == newest(sample)
        assert {"device": 30 * GIB, "unlisted": 4 * GIB} == newest(sample, NOBODY)

    def test_torchs_bytes_are_told_apart(self) -> None:
        """Live ones, what it reserves beside them less what the driver could have back, and the process's rest."""
        # 6 of 8 GiB live, 1 of the rest releasable, in a process of 11 GiB
        inside = allocator(process_bytes=11 * GIB, releasable_bytes=GIB)

        expected = {"torch_live": 6 * GIB, "torch_unused": 1 * GIB, "outside_torch": 3 * GIB}
        assert expected == newest(Sample(at_seconds=0.0, allocators=(inside,)))

    def test_split_of_the_reserved_bytes_goes_before_the_total(self) -> None:
        """Two GiB that could be given back are no cache that grows."""
        inside = allocator(split=split())
        assert {"torch_live": 6 * GIB, "torch_unused": 0.0} == newest(Sample(at_seconds=0.0, allocators=(inside,)))

    def test_without_its_own_figure_the_rest_is_nvmls(self) -> None:
        """The process's bytes, else the device's, less what torch reserves."""
        inside = allocator(process_bytes=None)
        sample = Sample(at_seconds=0.0, devices=(self.DEVICE,), allocators=(inside,))
        whole = Sample(
            at_seconds=0.0, devices=(device(used_bytes=30 * GIB, total_bytes=80 * GIB),), allocators=(inside,)
        )

        torch = {"torch_live": 6 * GIB, "torch_unused": 2 * GIB}
        assert newest(sample) == {**torch, "outside_torch": 12 * GIB, "unlisted": 4 * GIB}
        assert newest(whole) == {**torch, "device_outside_torch": 22 * GIB}

    @pytest.mark.parametrize(
        ("other", "expected"),
        [
            (device(1, used_bytes=5 * GIB), {"device": 35 * GIB}),
            (device(1, used_bytes=5 * GIB, processes=()), {"device": 35 * GIB}),
            (device(1, used_bytes=5 * GIB, processes=(process(9, None),)), {"device": 35 * GIB}),
            (
                device(1, used_bytes=5 * GIB, processes=(process(9, 3 * GIB),)),
                {"device": 35 * GIB, "unlisted": 6 * GIB},
            ),
            (device(1, used_bytes=None, processes=(process(9, 3 * GIB),)), {"device": 30 * GIB}),
        ],
        ids=["no list", "an empty list", "a size untold", "both lists", "no memory"],
    )
    def test_what_no_process_holds_needs_every_list(self, other: Device, expected: dict[str, int]) -> None:
        """One device whose processes, or whose memory, are not told leaves the sum open."""
        assert expected == newest(Sample(at_seconds=0.0, devices=(self.DEVICE, other)), NOBODY)

    def test_servers_bytes_are_those_of_its_devices(self) -> None:
        """Of several the sum; a device that is not the server's is left out."""
        second = device(1, used_bytes=5 * GIB, processes=(process(SERVER_PID, 3 * GIB),))
        strange = device(2, used_bytes=9 * GIB, processes=(process(7, 9 * GIB),))

        expected = {"server": 23 * GIB, "unlisted": 6 * GIB}
        assert expected == newest(Sample(at_seconds=0.0, devices=(self.DEVICE, second, strange)))

    def test_another_servers_allocator_is_not_counted(self) -> None:
        """A pid that is seen and not the server's."""
        inside = (allocator(), allocator(pid=7, allocated_bytes=GIB))
        assert 6 * GIB == newest(Sample(at_seconds=0.0, allocators=inside))["torch_live"]
        assert {} == newest(Sample(at_seconds=0.0, allocators=inside[1:]))

    def test_host_bytes_are_anonymous_where_every_process_tells(self) -> None:
        """One that does not leaves resident bytes, all together."""
        told = HostProcess(pid=1, name="a", resident_bytes=5 * GIB, anonymous_bytes=3 * GIB)
        other = HostProcess(pid=2, name="b", resident_bytes=2 * GIB, anonymous_bytes=1 * GIB)
        untold = HostProcess(pid=3, name="c", resident_bytes=GIB, anonymous_bytes=None)

        assert {"host_anonymous": 4 * GIB} == newest(Sample(at_seconds=0.0, host=(told, other)))
        assert {"host_resident": 6 * GIB} == newest(Sample(at_seconds=0.0, host=(told, untold)))

    def test_sum_over_usual_parts_counts(self) -> None:
        """Of a replica whose second GPU is read at every other time, the times with both: of equally many, the more."""
        both = (device(used_bytes=3 * GIB), device(1, used_bytes=4 * GIB))

        found = growth(
            lambda place: Sample(at_seconds=0.0, devices=both if place % 2 else both[:1]), hours=25.0 + 1 / 6
        )

        assert (7 * GIB, 0.0) == (found.newest, found.per_hour)


class TestEngines:
    """Load, restarts and what is held at idle."""

    def test_restart_is_where_a_counter_falls(self) -> None:
        """Each fall is one, of any engine; the newest of them begins the life that counts."""

        # Two engines, of which the second begins anew after 5 and after 10 hours
        def page(place: int) -> Sample:
            pages = (
                engine(prompt_tokens=place),
                engine(prompt_tokens=100 + place % 30 if place < 90 else 100, label="1"),
            )
            return Sample(at_seconds=0.0, engines=pages)

        found = summary(page, KNOWN)

        assert (3, 90 * TICK, 150 * TICK - 90 * TICK) == (found.restarts, found.began_seconds, found.age_seconds)
        assert 60 * TICK - HOUR == found.watched_seconds
        assert 90 * TICK == summary(page, replace(KNOWN, started_seconds=10.0)).began_seconds
        assert 150 * TICK == summary(page, replace(KNOWN, started_seconds=1e9)).began_seconds

    def test_memory_that_follows_the_load_does_not_grow(self) -> None:
        """By usage where it is told, else by what runs; 10 GiB for a full pool, and a load that rises all day."""
        by_usage, by_requests, alone = (
            growth(part)
            for part in (
                lambda place: both(place, engine(usage=place / 200, running=1)),
                lambda place: both(place, engine(usage=None, running=place)),
                lambda place: both(place, None),
            )
        )

        assert (True, True, False) == (by_usage.load_reported, by_requests.load_reported, alone.load_reported)
        assert abs(by_usage.per_hour) < MIB > abs(by_requests.per_hour)
        assert pytest.approx(10 * GIB * 6 / 200, rel=1e-6) == alone.per_hour

    def test_blocks_held_at_idle_are_read_once_it_is_quiet(self) -> None:
        """From the second of two idle readings on; what a working engine holds is nobody's leak."""

        # An engine that works at every third reading, and holds 10 blocks more with each hour once it is quiet
        def page(place: int) -> Sample:
            works = place % 3 == 0
            held = 3000 if works else 10 * (place // 6) + (500 if place % 3 == 1 else 0)
            return Sample(at_seconds=0.0, engines=(engine(usage=held / 6144, running=int(works)),))

        found = growth(page, KNOWN)

        assert ("kv_held_idle", True) == (found.component, found.load_reported)
        assert pytest.approx(10.0, rel=0.02) == found.per_hour
        assert 230 <= found.newest <= 250

    def test_engine_that_is_never_idle_tells_no_held_blocks(self) -> None:
        """Nor does one whose pool is not told."""
        works, idle = (Sample(at_seconds=0.0, engines=(engine(usage=0.5, running=running),)) for running in (1, 0))
        assert ({}, {}, 3072) == (newest(works), newest(idle, NOBODY), newest(idle)["kv_held_idle"])


def both(place: int, page: Engine | None) -> Sample:
    """A device that follows a load which rises by a two-hundredth of the whole with each reading, in waves."""
    used = 20 * GIB + 10 * GIB * place // 200
    return Sample(
        at_seconds=0.0,
        engines=None if page is None else (page,),
        devices=(device(used_bytes=used, total_bytes=80 * GIB),),
    )
