"""Summarise one replica: how fast each memory component grows after the first hour, corrected for load.

In this order: each sample's bytes are added up over the replica's parts (a sum that lacks a part is none); the first
hour after the start is left out; the rest becomes bins of equal length with their medians; what follows the load is
taken out; so are jumps, unless they only rise; then median slopes of the whole and of its later half, and the rise of
the lowest bins. A summary takes about 2 kB for a history of any length: it is all that a fleet keeps of a
replica. Nothing is judged here, since one replica's slope does not show whether it is noise.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from operator import attrgetter
from statistics import median

from kvdiag import stats
from kvdiag.diagnosis.engine_columns import engine_columns
from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.lives import restarts
from kvdiag.diagnosis.reserved_memory import releasable_bytes
from kvdiag.diagnosis.timeline_queries import held_blocks, server_bytes, server_devices, server_uuids
from kvdiag.model import Allocator, Device, Engine, Facts, Timeline

HELD = Part.KV_HELD_IDLE
"""The only component that does not depend on the load and has no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The group that replicas are compared by: one model served by one engine. `None` where not reported."""

    engine: str | None
    version: str | None
    model: str | None

    @property
    def title(self) -> str:
        """The version in words."""
        return " ".join((self.engine or "engine", self.version or "of unknown version"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGrowth:
    """How a component of one replica grows, per hour, over its life after the first hour and over the later half.

    Median slopes over all pairs of bins, at equal load where load is reported, without jumps unless they only rise;
    `floor_per_hour` is the rise of the lowest bins, jumps included. `newest` is the median of the last bin.
    """

    component: Part
    newest: float
    per_hour: float
    later_per_hour: float
    floor_per_hour: float
    later_floor_per_hour: float
    jumps_up: int
    jumps_down: int
    load_reported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSummary:
    """One replica: its version, its age, and the growth of each component that it reports.

    `watched_seconds` is the time sampled since its last restart, without the first hour; `began_seconds` is when it
    started, or its first sample, and `age_seconds` the time since then.
    """

    replica: str
    version: Version
    began_seconds: float
    age_seconds: float
    watched_seconds: float
    restarts: int
    growths: tuple[ReplicaGrowth, ...]

    def growth(self, component: Part) -> ReplicaGrowth | None:
        """The growth of one component, `None` where this replica does not report it."""
        return next((one for one in self.growths if one.component == component), None)


@dataclass(slots=True)
class _Series:
    """Sums over a replica's parts by time, and over how many parts each sum is: one that lacks a part is no sum."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def add(self, seconds: float, value: float, parts: int = 1) -> None:
        self.times.append(seconds)
        self.values.append(value)
        self.parts.append(parts)

    def since(self, seconds: float) -> tuple[list[float], list[float]]:
        """The whole sums from a moment on."""
        start = bisect_left(self.times, seconds)
        times, values, parts = self.times[start:], self.values[start:], self.parts[start:]
        if len(set(parts)) <= 1:
            return times, values
        counts = Counter(parts)
        usual = max(counts, key=lambda count: (counts[count], count))
        whole = [count == usual for count in parts]
        return list(compress(times, whole)), list(compress(values, whole))


def summarise(
    timeline: Timeline, facts: Facts, limits: Limits, *, replica: str, version: str | None = None
) -> ReplicaSummary:
    """One replica's history as a fleet needs it.

    `version` is what it is compared by (an image, say) where that is not the engine's own version. Its age counts from
    the start of its process where that is reported, else from its first sample or newest restart.
    """
    restarted = [timeline.samples[place].at_seconds for place in restarts(timeline, facts, limits)]
    series = _totals(timeline, facts, limits, restarted)
    first = timeline.samples[0].at_seconds if timeline.samples else 0.0
    last = timeline.samples[-1].at_seconds if timeline.samples else 0.0
    started = facts.started_seconds
    began = max([first, *restarted]) if started is None else min(max([started, *restarted]), last)
    start = max(began + limits.fleet.first_seconds, first)
    return ReplicaSummary(
        replica=replica,
        version=Version(
            engine=facts.engine_name,
            version=facts.engine_version if version is None else version,
            model=facts.model,
        ),
        began_seconds=began,
        age_seconds=last - began,
        watched_seconds=max(last - start, 0.0),
        restarts=len(restarted),
        growths=_growths(series, start, last, limits) if last - start >= limits.fleet.min_seconds else (),
    )


def _totals(
    timeline: Timeline, facts: Facts, limits: Limits, restarts_seconds: Collection[float]
) -> defaultdict[str, _Series]:
    """Every total that the samples report, by its name; a total of which a part is missing is none."""
    own, series = server_uuids(timeline, facts), defaultdict[str, _Series](_Series)
    devices: tuple[Device, ...] | None = None
    of_devices: list[tuple[_Series, float, int]] = []

    def sums(parts: Iterable[tuple[str, Sequence[float | None]]]) -> list[tuple[_Series, float, int]]:
        known = ((name, sizes) for name, sizes in parts if sizes and None not in sizes)
        return [(series[name], sum(filter(None, sizes)), len(sizes)) for name, sizes in known]

    # Every sample of a day passes through here.
    for sample in timeline.samples:
        if sample.devices:
            # Values that stay the same for hours are often one object.
            if sample.devices is not devices:
                devices = sample.devices
                of_devices = sums(_of_devices(devices, facts, own))
            for line, value, count in of_devices:
                line.add(sample.at_seconds, value, count)
        if sample.allocators:
            for line, value, count in sums(_of_allocators(sample.allocators, facts)):
                line.add(sample.at_seconds, value, count)
    _add_host(series, timeline)
    _add_engines(series, timeline, facts, limits, restarts_seconds)
    return series


def _add_host(series: defaultdict[str, _Series], timeline: Timeline) -> None:
    """Add the resident and the anonymous bytes of all processes together."""
    samples = [sample for sample in timeline.samples if sample.host]
    times, read = [sample.at_seconds for sample in samples], [sample.host or () for sample in samples]
    counts = list(map(len, read))
    for name, of in (("resident", attrgetter("resident_bytes")), ("anonymous", attrgetter("anonymous_bytes"))):
        if set(counts) == {1}:
            sums = [of(process) for (process,) in read]
        else:
            rows = [list(map(of, processes)) for processes in read]
            sums = [None if None in row else sum(row) for row in rows]
        known = [size is not None for size in sums]
        if False not in known:
            series[name] = _Series(times, sums, counts)
        elif True in known:
            series[name] = _Series(*(list(compress(column, known)) for column in (times, sums, counts)))


def _add_engines(
    series: defaultdict[str, _Series],
    timeline: Timeline,
    facts: Facts,
    limits: Limits,
    restarts_seconds: Collection[float],
) -> None:
    """Add the load, the highest load since the last restart, and the blocks in use while idle."""
    columns = engine_columns(timeline)
    answers = [bool(sample.engines) for sample in columns.samples]
    times = list(compress(columns.times_seconds, answers))
    loads = list(compress(columns.loads, answers))
    samples = list(compress(columns.samples, answers))
    counts = [len(sample.engines or ()) for sample in samples]
    series["load"] = _Series(times, loads, counts)
    starts = [0, *(bisect_left(times, seconds) for seconds in sorted(restarts_seconds)), len(times)]
    highest = [top for start, end in pairwise(starts) for top in accumulate(loads[start:end], max)]
    series["highest"] = _Series(times, highest, [1] * len(times))
    idle_since: float | None = None
    engines: tuple[Engine, ...] | None = None
    used: int | None = None
    for at_seconds, is_idle, sample in zip(times, compress(columns.idle, answers), samples, strict=True):
        if is_idle is not True:
            idle_since = None
            continue
        idle_since = at_seconds if idle_since is None else idle_since
        # Blocks are released late, so the first sample of an idle interval does not count.
        if at_seconds - idle_since >= limits.fleet.idle_settle_seconds:
            if sample.engines is not engines:
                engines, used = sample.engines, held_blocks(sample, facts)
            if used is not None:
                series["held"].add(at_seconds, used)


def _of_devices(
    devices: tuple[Device, ...], facts: Facts, own: frozenset[str]
) -> Iterator[tuple[str, Sequence[float | None]]]:
    devices = server_devices(devices, own)
    used = [device.memory.used_bytes for device in devices if device.memory is not None]
    yield "device", used
    if facts.server_pids is not None:
        own_sizes = (server_bytes(device, facts.server_pids) for device in devices)
        yield "server", [size for size in own_sizes if size is not None]
    # An empty list is normal inside a container, and does not show which process uses the bytes.
    if len(used) == len(devices) and all(device.processes for device in devices):
        listed = [[process.used_bytes for process in device.processes or ()] for device in devices]
        rest = (whole - sum(filter(None, sizes)) for whole, sizes in zip(used, listed, strict=True))
        yield "others", [None if None in sizes else size for size, sizes in zip(rest, listed, strict=True)]


def _of_allocators(published: tuple[Allocator, ...], facts: Facts) -> Iterator[tuple[str, Sequence[float | None]]]:
    allocators = [one for one in published if one.may_be_of(facts.server_pids)]
    yield "live", [one.allocated_bytes for one in allocators]
    yield "reserved", [one.reserved_bytes for one in allocators]
    yield "releasable", [releasable_bytes(one) for one in allocators]
    yield "outside", [one.outside_torch_bytes for one in allocators]


def _growths(series: defaultdict[str, _Series], start: float, last: float, limits: Limits) -> tuple[ReplicaGrowth, ...]:
    """Each byte counts in one component only: the finest one reported."""

    def bins(name: str, filled_ratio: float = limits.growth.filled_ratio) -> list[float] | None:
        """Medians of equal bins of the life; gaps are interpolated. `None` where too many bins are empty."""
        times, values = series[name].since(start)
        cells = stats.binned(times, values, last, (last - start) / limits.fleet.bins, limits.fleet.bins)
        return stats.interpolated([median(cell) if cell else None for cell in cells], filled_ratio)

    live, reserved, server, device = (bins(name) for name in ("live", "reserved", "server", "device"))
    anonymous = bins("anonymous")
    found: dict[Part, list[float] | None] = {HELD: bins("held", limits.fleet.idle_filled_ratio)}
    if live is not None and reserved is not None:
        found[Part.TORCH_LIVE] = live
        # Cache that torch could release to the driver is no fragmentation, where torch reports it separately.
        unused, cached, outside = _less(reserved, live), bins("releasable"), bins("outside")
        found[Part.TORCH_UNUSED] = unused if cached is None else _less(unused, cached)
        if outside is not None or server is not None:
            found[Part.OUTSIDE_TORCH] = _less(server or [], reserved) if outside is None else outside
        elif device is not None:
            found[Part.DEVICE_OUTSIDE_TORCH] = _less(device, reserved)
    else:
        found[Part.DEVICE if server is None else Part.SERVER] = device if server is None else server
    found[Part.UNLISTED] = bins("others")
    if anonymous is None:
        found[Part.HOST_RESIDENT] = bins("resident")
    else:
        found[Part.HOST_ANONYMOUS] = anonymous
    load, highest = bins("load"), bins("highest")
    covariates = [] if load is None or highest is None else [load, highest]
    return tuple(
        # Blocks in use while idle do not depend on load.
        _growth(component, values, [] if component == HELD else covariates, (last - start) / limits.fleet.bins, limits)
        for component, values in found.items()
        if values is not None
    )


def _less(whole: list[float], part: list[float]) -> list[float]:
    return [one - other for one, other in zip(whole, part, strict=True)]


def _growth(
    component: Part, values: list[float], covariates: list[list[float]], bin_seconds: float, limits: Limits
) -> ReplicaGrowth:
    per_hour, late = HOUR_SECONDS / bin_seconds, len(values) // 2
    whole = list(values)
    for column, sensitivity in zip(
        covariates, stats.sensitivities(values, covariates, limits.growth.load_correlation), strict=True
    ):
        whole = [value - sensitivity * each for value, each in zip(whole, column, strict=True)]
    smooth = stats.without_jumps(whole, limits.growth.jump_deviations, limits.growth.jump_min_bytes)
    # Jumps in both directions hide a trend and are removed; jumps that only rise are growth themselves.
    rising = stats.binomial_tail(smooth.ups, smooth.ups + smooth.downs) < limits.fleet.steps_p
    level = whole if rising or component == HELD else smooth.values
    return ReplicaGrowth(
        component=component,
        newest=values[-1],
        per_hour=stats.theil_sen(level) * per_hour,
        later_per_hour=stats.theil_sen(level[late:]) * per_hour,
        floor_per_hour=_floor(whole) * per_hour,
        later_floor_per_hour=_floor(whole[late:]) * per_hour,
        jumps_up=smooth.ups,
        jumps_down=smooth.downs,
        load_reported=bool(covariates) or component == HELD,
    )


def _floor(level: Sequence[float]) -> float:
    """How fast the minimum rises, per bin, from the first third to the last: collected garbage returns to it."""
    third = len(level) // 3
    return (min(level[-third:]) - min(level[:third])) / (len(level) - third)
