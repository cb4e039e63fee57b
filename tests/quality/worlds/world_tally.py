"""Judge worlds as their history grows, and count what was right, missed, false, late, and taken back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from kvdiag.diagnosis import diagnose
from kvdiag.model import Status
from tests.quality.corpus.score import family, prefix
from tests.quality.corpus.today import DETECTORS, explains, seen
from tests.quality.worlds.benign_worlds import benign_worlds
from tests.quality.worlds.growing_worlds import growing_worlds
from tests.quality.worlds.planted import World
from tests.quality.worlds.trouble_worlds import trouble_worlds

HOUR = 3600.0


def worlds_of(seed: int) -> tuple[World, ...]:
    """All worlds of a seed."""
    random = Random(f"worlds {seed}")  # noqa: S311 - it guards nothing
    return (*growing_worlds(random), *trouble_worlds(random), *benign_worlds(random))


@dataclass(kw_only=True)
class Outcome:
    """The answers about one world: at the end, and on the way.

    `fault_hours` is from the onset to the first right fault, `flaps` how often a right fault was taken back before the
    end, `false_faults` how many times a wrong fault began. `alerts` says of each of the usual alerts
    whether it fired and was right.
    """

    world: World
    worst: Status = "unknown"
    called: dict[str, str] = field(default_factory=dict)
    confidence: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    fault_hours: float | None = None
    flaps: int = 0
    false_faults: int = 0
    alerts: dict[str, bool | None] = field(default_factory=dict)

    @property
    def status(self) -> str | None:
        """The right verdict's status at the end; `None` where it was not called."""
        given = [self.called[one] for one in self.world.accept if one in self.called]
        return max(given, key=("suspect", "fault").index, default=None)

    @property
    def accepted(self) -> bool:
        """Whether it was called as it should be."""
        right = self.world.right
        if right == "unknown":
            return self.worst in ("unknown", "suspect") and not self.wrong("fault")
        if right == "benign":
            return not self.called
        return self.status == "fault" or (self.status == "suspect" and right == "suspect")

    def wrong(self, status: str) -> list[str]:
        """Verdicts called with a status that are not so."""
        true = (*self.world.accept, *self.world.also)
        return [one for one, given in self.called.items() if given == status and one not in true]


def moments(hours: float, onset_hours: float = 0.0) -> Iterator[float]:
    """Hours at which a world is judged: each half hour at first, then rarer, those that are scored, and the end."""
    scored = {onset_hours + 1.5, onset_hours + 10.0}
    at, some = 0.5, set()
    while at < hours:
        some.add(at)
        at += 0.5 if at < 4.0 else max(1.0, 0.25 * at)
    yield from sorted(one for one in some | scored if one < hours)
    yield hours + 1.0


def judged(world: World, seed: int) -> Outcome:
    """Judge one world at all moments."""
    timeline, facts = world.play(seed)
    series, begin = seen(timeline, facts), timeline.samples[0].at_seconds
    found = Outcome(world=world)
    fired: dict[str, set[str]] = {name: set() for name in DETECTORS}
    before: set[str] = set()
    was_right = False
    for at in moments(world.hours, world.onset_hours):
        diagnosis = diagnose(prefix(timeline, begin + at * HOUR), facts)
        called = [one for one in diagnosis.findings if one.status in ("suspect", "fault")]
        earlier = [one for life in diagnosis.lives for one in life.findings]
        statuses: dict[str, str] = {}
        for one in (*earlier, *called):
            statuses[one.id] = max(one.status, statuses.get(one.id, "suspect"), key=("suspect", "fault").index)
        found.worst, found.called = diagnosis.worst, statuses
        found.confidence = {one.id: one.confidence.ratio for one in (*earlier, *called) if one.confidence is not None}
        found.said = {one.id: one.summary for one in (*earlier, *called)}
        false = set(found.wrong("fault"))
        found.false_faults += len(false - before)
        before = false
        is_right = found.status == "fault"
        if is_right and found.fault_hours is None:
            found.fault_hours = max(at - world.onset_hours, 0.0)
        found.flaps += was_right and not is_right
        was_right = is_right
        now = series.until(begin + at * HOUR)
        for name, detect in DETECTORS.items():
            fired[name] |= detect(now)
    families = [family(one) for one in (*world.accept, *world.also)]
    found.alerts = {
        name: any(explains(one, families) for one in raised) if raised else None for name, raised in fired.items()
    }
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a count, of how many."""

    name: str
    count: float
    of: float | None = None

    @property
    def text(self) -> str:
        """The figure as it is printed."""
        if self.of is None:
            return f"{self.count:.2f}" if self.count % 1 else f"{self.count:g}"
        share = f" ({self.count / self.of:.1%})" if self.of else ""
        return f"{self.count:g} of {self.of:g}{share}"


def table(outcomes: Sequence[Outcome]) -> list[Row]:
    """The figures of many worlds."""
    planted = [one for one in outcomes if one.world.right in ("fault", "suspect")]
    only_fault = [one for one in planted if one.world.right == "fault"]
    benign = [one for one in outcomes if one.world.right == "benign"]
    faults = [(one, name) for one in outcomes for name, status in one.called.items() if status == "fault"]
    false = [(one, name) for one, name in faults if name in one.wrong("fault")]
    missed = [one for one in outcomes if one.world.right != "benign" and not one.accepted]
    fast = [one for one in only_fault if 500.0 <= (one.world.mib_per_hour or 0.0) and _lasts(one.world, 1.5)]
    slow = [one for one in only_fault if one.world.mib_per_hour == 50.0 and _lasts(one.world, 10.0)]
    gpu_hours = sum(one.world.hours * one.world.gpus for one in outcomes)
    return [
        Row(name="fault precision at the end", count=len(faults) - len(false), of=len(faults)),
        Row(name="recall of certain faults", count=_count(only_fault), of=len(only_fault)),
        Row(name="accepted", count=_count(planted), of=len(planted)),
        Row(name="missed", count=len(missed), of=len(outcomes) - len(benign)),
        Row(name="missed and ok overall", count=sum(one.worst == "ok" for one in missed), of=len(missed)),
        Row(
            name="false faults per 1,000 GPU-hours",
            count=1000.0 * sum(one.false_faults for one in outcomes) / gpu_hours if gpu_hours else 0.0,
        ),
        Row(name=">= 500 MiB/h called within 1.5 h", count=_within(fast, 1.5), of=len(fast)),
        Row(name="50 MiB/h called within 10 h", count=_within(slow, 10.0), of=len(slow)),
        Row(name="benign with a fault", count=sum("fault" in one.called.values() for one in benign), of=len(benign)),
        Row(
            name="benign with a suspect", count=sum("suspect" in one.called.values() for one in benign), of=len(benign)
        ),
        Row(name="right faults taken back", count=sum(one.flaps for one in outcomes)),
    ]


def alert_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, int, int, int]]:
    """Of each usual alert: worlds in which it was right, of those with a fault; benign ones in which it fired."""
    rows = []
    for name in DETECTORS:
        right = sum(one.alerts[name] is True for one in outcomes if one.world.accept)
        planted = sum(bool(one.world.accept) for one in outcomes)
        false = sum(one.alerts[name] is not None for one in outcomes if one.world.right == "benign")
        rows.append((name, right, planted, false))
    return rows


def _count(outcomes: Sequence[Outcome]) -> int:
    return sum(one.accepted for one in outcomes)


def _within(outcomes: Sequence[Outcome], hours: float) -> int:
    return sum(one.fault_hours is not None and one.fault_hours <= hours for one in outcomes)


def _lasts(world: World, hours: float) -> bool:
    return world.hours - world.onset_hours >= hours
