"""One replica in figures that can be calculated by hand: a sample every ten minutes from 0 s on, without noise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.fleet.replica import ReplicaGrowth, ReplicaSummary, summarise
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Allocator, Device, Engine, Facts, HostProcess, Sample, Timeline
from tests.builders.values import GIB, MIB, SERVER_PID, allocator, device, engine, pool, process, split
from tests.unit.diagnosis.fleet.replicas import replica

TICK, HOUR = 600.0, 3600.0
NOBODY = Facts()
KNOWN = Facts(pools=(pool(),), server_pids=(SERVER_PID,))


def life(part: Callable[[int], Sample], *, hours: float = 25.0) -> Timeline:
    """The samples of this many hours; the first hour is left out of the comparison."""
    count = round(hours * HOUR / TICK) + 1
    return Timeline(samples=tuple(replace(part(place), at_seconds=place * TICK) for place in range(count)))


def full(size: int) -> Sample:
    """A device, and nothing else."""
    return Sample(at_seconds=0.0, devices=(device(used_bytes=size, total_bytes=80 * GIB),))


def summary(part: Callable[[int], Sample], facts: Facts = NOBODY, *, hours: float = 25.0) -> ReplicaSummary:
    """What is kept of such a life."""
    return replica(life(part, hours=hours), "r", facts)


def growth(part: Callable[[int], Sample], facts: Facts = NOBODY, *, hours: float = 25.0) -> ReplicaGrowth:
    """The growth of the only component that is reported."""
    (only,) = summary(part, facts, hours=hours).growths
    return only


def newest(part: Sample, facts: Facts = KNOWN) -> dict[str, float]:
    """What each component holds, where nothing changes."""
    return {one.component: one.newest for one in summary(lambda _: part, facts, hours=7.0).growths}


def test_steady_growth_is_its_rate_however_it_is_measured() -> None:
    """1 MiB in ten minutes are 6 an hour, of all the life and of its later half, of the levels and of their floors."""
    actual = growth(lambda place: full(20 * GIB + place * MIB))

    # The last of 48 bins of half an hour has the samples 147 to 150
    rate: Any = pytest.approx(6 * MIB, rel=1e-9)
    assert actual == ReplicaGrowth(
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


@pytest.mark.parametrize(("steps", "falls", "rises"), [(6, 0, False), (7, 0, True), (7, 1, False)])
def test_jumps_count_as_growth_where_they_only_rise(steps: int, falls: int, rises: bool) -> None:
    """Seven jumps up and none down have p = 1/128 and count; six, p = 1/64, may be levels that move either way."""
    # Steps of 100 MiB, three hours apart
    actual = growth(lambda place: full(20 * GIB + 100 * MIB * (min((place + 8) // 18, steps) - falls * (place > 140))))

    assert (steps, falls) == (actual.jumps_up, actual.jumps_down)
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
    """Seven hours of samples yield a growth; one sample less yields none."""
    assert told == len(summary(lambda _: full(GIB), hours=hours).growths)


@pytest.mark.parametrize(("missing", "told"), [(0.25, True), (0.28, False)])
def test_three_quarters_of_a_life_have_to_be_known(missing: float, told: bool) -> None:
    """What is not known of the rest lies between what is."""
    # 48 bins of half an hour, the last of them without samples
    unseen = round(150 * missing * 24 / 25)

    found = summary(lambda place: full(GIB) if place <= 150 - unseen else Sample(at_seconds=0.0))

    assert told == bool(found.growths)


SHARED = device(
    used_bytes=30 * GIB, total_bytes=80 * GIB, processes=(process(SERVER_PID, 20 * GIB), process(7, 6 * GIB))
)
WHOLE = device(used_bytes=30 * GIB, total_bytes=80 * GIB)
INSIDE, OTHER = allocator(process_bytes=None), allocator(pid=7)
STRANGE = device(2, used_bytes=9 * GIB, processes=(process(7, 9 * GIB),))
ANONYMOUS = HostProcess(pid=1, name="a", resident_bytes=5 * GIB, anonymous_bytes=3 * GIB)


def of(*devices: Device, inside: tuple[Allocator, ...] = (), host: tuple[HostProcess, ...] = ()) -> Sample:
    """A sample of these parts."""
    return Sample(at_seconds=0.0, devices=devices or None, allocators=inside or None, host=host or None)


class TestParts:
    """Which bytes are in which component."""

    @pytest.mark.parametrize(
        ("sample", "known", "gib"),
        [
            (of(SHARED), KNOWN, {"server": 20, "unlisted": 4}),
            (of(SHARED), NOBODY, {"device": 30, "unlisted": 4}),
            (
                of(SHARED, device(1, used_bytes=5 * GIB, processes=(process(SERVER_PID, 3 * GIB),)), STRANGE),
                KNOWN,
                {"server": 23, "unlisted": 6},
            ),
            (
                of(inside=(allocator(process_bytes=11 * GIB, releasable_bytes=GIB),)),
                KNOWN,
                {"torch_live": 6, "torch_unused": 1, "outside_torch": 3},
            ),
            (of(inside=(allocator(split=split()),)), KNOWN, {"torch_live": 6, "torch_unused": 0}),
            (
                of(SHARED, inside=(INSIDE,)),
                KNOWN,
                {"torch_live": 6, "torch_unused": 2, "outside_torch": 12, "unlisted": 4},
            ),
            (of(WHOLE, inside=(INSIDE,)), KNOWN, {"torch_live": 6, "torch_unused": 2, "device_outside_torch": 22}),
            (of(inside=(INSIDE, OTHER)), KNOWN, {"torch_live": 6, "torch_unused": 2}),
            (of(inside=(OTHER,)), KNOWN, {}),
            # What no listed process uses needs the list, and the memory, of every device.
            (of(SHARED, device(1, used_bytes=5 * GIB)), NOBODY, {"device": 35}),
            (of(SHARED, device(1, used_bytes=5 * GIB, processes=())), NOBODY, {"device": 35}),
            (of(SHARED, device(1, used_bytes=5 * GIB, processes=(process(9, None),))), NOBODY, {"device": 35}),
            (
                of(SHARED, device(1, used_bytes=5 * GIB, processes=(process(9, 3 * GIB),))),
                NOBODY,
                {"device": 35, "unlisted": 6},
            ),
            (of(SHARED, device(1, used_bytes=None, processes=(process(9, 3 * GIB),))), NOBODY, {"device": 30}),
            (of(host=(ANONYMOUS, replace(ANONYMOUS, pid=2, anonymous_bytes=GIB))), KNOWN, {"host_anonymous": 4}),
            (
                of(host=(ANONYMOUS, HostProcess(pid=3, name="c", resident_bytes=GIB, anonymous_bytes=None))),
                KNOWN,
                {"host_resident": 6},
            ),
        ],
    )
    def test_every_byte_is_in_the_finest_component(self, sample: Sample, known: Facts, gib: dict[str, int]) -> None:
        """A total counts only where its parts are not reported; a sum that lacks a part is none."""
        assert {name: size * GIB for name, size in gib.items()} == newest(sample, known)

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

        # Two engines, of which the second restarts its counter after 5 and after 10 hours
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
        """Load and its maximum are removed, by usage if reported, else by running requests; without, they count."""
        by_usage, by_requests, by_highest, alone = (
            growth(part)
            for part in (
                lambda place: both(place, engine(usage=place / 200, running=1)),
                lambda place: both(place, engine(usage=None, running=place)),
                lambda place: both(place - place % 6, engine(usage=0.0 if place % 6 else place / 200, running=1)),
                lambda place: both(place, None),
            )
        )

        assert (True, True, False) == (by_usage.load_reported, by_requests.load_reported, alone.load_reported)
        assert MIB > max(abs(one.per_hour) for one in (by_usage, by_requests, by_highest))
        assert pytest.approx(10 * GIB * 6 / 200, rel=1e-6) == alone.per_hour

    def test_blocks_held_at_idle_are_read_once_it_is_quiet(self) -> None:
        """Idle blocks count from the second of two idle samples on; blocks in use by a working engine are no leak."""

        # An engine that works at every third reading, and holds 10 blocks more with each hour once it is quiet
        def page(place: int) -> Sample:
            works = place % 3 == 0
            held = 3000 if works else 10 * (place // 6) + (500 if place % 3 == 1 else 0)
            return Sample(at_seconds=0.0, engines=(engine(usage=held / 6144, running=int(works)),))

        found = growth(page, KNOWN)

        assert ("kv_held_idle", True) == (found.component, found.load_reported)
        assert pytest.approx(10.0, rel=0.02) == found.per_hour
        assert 230 <= found.newest <= 250
        exact = replace(DEFAULT_LIMITS, fleet=replace(DEFAULT_LIMITS.fleet, idle_settle_seconds=TICK))
        assert (found,) == summarise(life(page), KNOWN, exact, replica="r").growths

    def test_engine_that_is_never_idle_tells_no_held_blocks(self) -> None:
        """An engine that is never idle, or whose pool is not reported, has no figure of blocks in use while idle."""
        works, idle = (Sample(at_seconds=0.0, engines=(engine(usage=0.5, running=running),)) for running in (1, 0))
        assert ({}, {}, 3072) == (newest(works), newest(idle, NOBODY), newest(idle)["kv_held_idle"])


def both(place: int, page: Engine | None) -> Sample:
    """A device whose memory follows a load that rises by 1/200 of the maximum with each sample."""
    used = 20 * GIB + 10 * GIB * place // 200
    return Sample(
        at_seconds=0.0,
        engines=None if page is None else (page,),
        devices=(device(used_bytes=used, total_bytes=80 * GIB),),
    )
