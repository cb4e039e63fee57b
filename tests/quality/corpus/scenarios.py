"""Effects of operations on memory: sleep, restarts, deployments, page cache, other processes, load ramps.

Not incidents, and of no public thread: each is a way in which a judgement of the incidents could be right by luck.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from tests.quality.corpus.incident import CORE, Incident, Record, Shape, kv_pool, server
from tests.quality.corpus.recording import NOT_UP, Holder, HostMemory, Pages, Recording, serving
from tests.quality.corpus.score import HEALTHY, Expected
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, highest, running_total, scaled, total

NAP_HOURS, NAP_EVERY_HOURS = 0.1, 0.5


def _naps(tape: Tape, mib_each: float) -> Recording:
    """Put to sleep for six minutes each half hour: weights and pool leave the device and are restored."""
    shape = Shape(version="0.20.0")
    asleep = [hour % NAP_EVERY_HOURS >= NAP_EVERY_HOURS - NAP_HOURS for hour in tape.hours]
    kept = tape.of(lambda hour: int(hour / NAP_EVERY_HOURS) * mib_each * MIB)
    demand = [0.0 if sleeps else load for sleeps, load in zip(asleep, tape.traffic(), strict=True)]
    pages: Pages = []
    for sleeps, page in zip(asleep, serving(tape, demand, shape.pool), strict=True):
        pages.append(tuple(replace(one, asleep=sleeps) for one in page) if isinstance(page, tuple) else page)
    recording = server(tape, shape, demand=demand, pages=pages)
    held = [
        (2.6 * GIB if sleeps else float(shape.held_bytes)) + more for sleeps, more in zip(asleep, kept, strict=True)
    ]
    card = recording.gpus[0]
    return replace(recording, gpus=(replace(card, holders=(replace(card.holders[0], held=held),)),))


def _page_cache(tape: Tape) -> Recording:
    """The container's working set rises by 2 GiB an hour of files; what is anonymous stands still."""
    recording = server(tape)
    read = HostMemory(pid=140, name="fluent-bit", anonymous=tape.flat(90.0 * MIB), files=tape.line(2.0 * GIB))
    return replace(recording, host=(*recording.host, read))


def _slow_device(tape: Tape) -> Recording:
    grown = total(tape.line(236.0 * MIB), tape.noise(12.0 * MIB, 5.0))
    return server(tape, Shape(fraction=0.8), grown=([max(value, 0.0) for value in grown],))


def _fast_then_slow(tape: Tape) -> Recording:
    grown = tape.of(lambda hour: (5.9 * min(hour, 0.4) + 2.0 * max(hour - 0.4, 0.0)) * GIB)
    return server(tape, host_grown={CORE: grown})


def _lives(tape: Tape, every: float, within: float, leak_gib_per_hour: float) -> Recording:
    """A life of so many hours after another; each begins with a warm-up of 2 GiB on the host."""
    shape = Shape(version="0.11.0")
    births = [every * number for number in range(1, int(tape.hours[-1] / every) + 1)]
    demand = tape.traffic()
    down = [any(birth <= hour < birth + 0.07 for birth in births) for hour in tape.hours]
    pages: Pages = [
        NOT_UP if gone else page
        for gone, page in zip(down, serving(tape, demand, shape.pool, restarts=births), strict=True)
    ]
    ages = [hour - max((birth for birth in births if hour >= birth), default=-within) for hour in tape.hours]
    grown: Track = [min(age / 0.5, 1.0) * 2.0 * GIB + leak_gib_per_hour * GIB * age for age in ages]
    recording = server(tape, shape, demand=demand, pages=pages, host_grown={CORE: grown}, host_limit_bytes=64 * GIB)
    card = recording.gpus[0]
    held = [0.0 if gone else size for gone, size in zip(down, card.holders[0].held, strict=True)]
    return replace(recording, gpus=(replace(card, holders=(replace(card.holders[0], held=held),)),))


def _adapters(tape: Tape) -> Recording:
    loaded = tape.levels((1.5, 300.0 * MIB), (3.2, 600.0 * MIB), (6.1, 900.0 * MIB))
    return server(tape, Shape(fraction=0.85), grown=(loaded,))


def _neighbour(tape: Tape) -> Recording:
    recording = server(tape, Shape(fraction=0.7))
    card = recording.gpus[0]
    other = Holder(pid=900, name="python3", held=tape.levels((3.0, 10.0 * GIB)), own=False)
    return replace(recording, gpus=(replace(card, holders=(*card.holders, other)),))


def _launch(tape: Tape) -> Recording:
    """The first day of a service: its load rises for ten hours, and what it keeps for the highest load with it."""
    shape = Shape(version="0.11.0")
    demand = [
        min(max(0.05 + 0.08 * hour + shake, 0.02), 0.95)
        for hour, shake in zip(tape.hours, tape.noise(0.08, 10.0), strict=True)
    ]
    return server(tape, shape, demand=demand, host_grown={CORE: scaled(highest(demand), 3.0 * GIB)})


def _streams(tape: Tape) -> Recording:
    """Long streams, one or the other always running, of much the same length."""
    shape = Shape(pool=kv_pool(54.0))
    demand = [0.4 + shake for shake in tape.noise(0.03, 20.0)]
    return server(tape, shape, pages=serving(tape, demand, shape.pool, most_running=40, request_tokens=8_000))


def _late_frees(tape: Tape) -> Recording:
    """Blocks of the last requests are released up to half a minute late, every time."""
    shape = Shape(pool=kv_pool(54.0), version="0.11.0")
    demand = tape.pauses(tape.traffic(), every=0.5, lasting=0.2)
    late = [1_200.0 if not now and before else 0.0 for before, now in zip([1.0, *demand[:-1]], demand, strict=True)]
    return server(tape, shape, pages=serving(tape, demand, shape.pool, held_blocks=late))


def _bursts(tape: Tape) -> Recording:
    """A leak of 600 MB/h on average that comes with one batch job an hour."""
    jobs = tape.of(lambda hour: 1.0 if hour % 1.0 < 0.2 else 0.0)
    grown = running_total(jobs, by=600e6 * tape.tick_seconds / 3600.0 / 0.2)
    demand = tape.pauses(tape.flat(0.5), every=1.0, lasting=0.8, first=0.2)
    return server(tape, demand=demand, host_grown={CORE: grown})


_NOTHING = Expected(accept=(HEALTHY,))
_ON_DEVICE = Expected(accept=("leak.device_non_torch", "leak.device_torch"))
_ON_HOST = Expected(accept=("leak.host",))

_SCENARIOS: tuple[tuple[str, Record, float, str, Expected], ...] = (
    ("sleep, leaking", partial(_naps, mib_each=99.5), 14.0, "99.5 MiB stay with each sleep, two an hour", _ON_DEVICE),
    ("sleep", partial(_naps, mib_each=0.0), 14.0, "two sleeps an hour", _NOTHING),
    ("page cache", _page_cache, 8.0, "2 GiB/h of files beside it", _NOTHING),
    ("slow device leak", _slow_device, 14.0, "236 MiB/h", _ON_DEVICE),
    ("fast, then slow", _fast_then_slow, 8.0, "5.9 GiB/h for 24 minutes, then 2.0 GiB/h", _ON_HOST),
    (
        "killed and restarted",
        partial(_lives, every=4.4, within=0.0, leak_gib_per_hour=10.0),
        16.0,
        "10 GiB/h, killed each 4.4 h",
        _ON_HOST,
    ),
    (
        "deployed anew",
        partial(_lives, every=5.0, within=3.0, leak_gib_per_hour=0.0),
        16.0,
        "a new life each 5 h",
        _NOTHING,
    ),
    ("adapters", _adapters, 9.0, "three times 300 MiB", _NOTHING),
    (
        "a neighbour comes",
        _neighbour,
        6.0,
        "10 GiB from the third hour on",
        Expected(accept=("baseline.foreign_memory",), unseen=("series",)),
    ),
    ("launch", _launch, 11.0, "the load rises for ten hours", _NOTHING),
    ("long streams", _streams, 8.0, "never idle", _NOTHING),
    ("late frees", _late_frees, 6.0, "half a minute late", _NOTHING),
    ("a job an hour leaks", _bursts, 10.0, "600 MB in twelve minutes of each hour", _ON_HOST),
)

SCENARIOS: Mapping[str, tuple[Incident, Expected]] = MappingProxyType(
    {
        name: (
            Incident(id=name, reported=reported, assumed="all of it", record=record, hours=hours, tick_seconds=30.0),
            expected,
        )
        for name, record, hours, reported, expected in _SCENARIOS
    }
)
