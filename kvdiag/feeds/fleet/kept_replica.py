"""What a fleet's feed keeps in memory of a replica between two rounds."""

import math
import zlib
from collections import defaultdict
from dataclasses import dataclass, field

from kvdiag.feeds.fleet.fleet_round import ReplicaVerdict
from kvdiag.feeds.fleet.replica_samples import ReplicaSamples
from kvdiag.feeds.history.replica_timeline import SILENT_SECONDS
from kvdiag.feeds.history.series_join import Replica
from kvdiag.feeds.history.series_labels import METRICS
from kvdiag.sources.prometheus_answers import Labels

ENDED_SECONDS = 3600.0
"""Without a sample, after which a replica is no longer shown; until the window has passed it counts for its version."""

OVERLAP_SECONDS = 120.0
"""Least time that is read again: samples of several targets arrive one after the other."""

AGAIN = ((3600.0, 6.0 * 3600.0), (24.0 * 3600.0, math.inf))
"""How often a replica is read again, and how far back: samples may arrive after newer ones, as from a queue on disk."""

_MEMORY = ("device", "process", "torch", "host", "container")


@dataclass(slots=True)
class KeptReplica:
    """One replica: until when it was read, what could not be, and its newest verdict."""

    replica: Replica
    until_seconds: float = 0.0
    known: set[Labels] | None = None
    """The series that its file has; `None` where it must be read."""
    hole_seconds: float | None = None
    """The start of the oldest interval that could not be read."""
    retry_seconds: float = 0.0
    wait_seconds: float = 0.0
    unread: str | None = None
    lost_seconds: float = 0.0
    """The end of the newest interval that could not be read, or of all where it never had a sample; 0 without any."""
    newest_seconds: float = 0.0
    newest: dict[str, float] = field(default_factory=dict)
    """The time of the newest sample of each metric."""
    again_seconds: list[float] = field(default_factory=list)
    """When it is read again, for each of `AGAIN`."""
    figures: dict[str, float] = field(default_factory=dict)
    """Its newest memory figures, and those when it was judged."""
    judged_figures: dict[str, float] = field(default_factory=dict)
    verdict: ReplicaVerdict | None = None

    @property
    def is_new(self) -> bool:
        """Whether it was never judged; one whose workers were killed is left to workers again."""
        return self.verdict is None or not self.verdict.is_judged

    def restore(self, samples: ReplicaSamples, replica: Replica) -> None:
        """Take over what a file says of the replica: until when it was read, and what could not be."""
        self.until_seconds = samples.until_seconds
        self.newest_seconds = max(self.newest_seconds, samples.newest_seconds(replica))
        self.newest = samples.newest()
        self.hole_seconds = min((lost.start_seconds for lost in samples.lost), default=None)
        self.lost_seconds = max((lost.end_seconds for lost in samples.lost), default=0.0)
        self.unread = next((lost.reason for lost in samples.lost), None)
        self.wait_for_samples()

    def wait_for_samples(self) -> None:
        """One that never had a sample has not ended: what was read of it shows as little as what could not be."""
        if not self.newest_seconds:
            self.lost_seconds = self.until_seconds

    def start_seconds(self, end_seconds: float) -> float:
        """Where a read until `end_seconds` begins: at the newest sample of the metric of which it is the oldest.

        An interval is a power of two, so that most replicas begin at the same moment and are read together. A metric
        without a sample for an hour is one that the server no longer has. Without any it begins as for a new replica.
        """
        newest = max(self.newest.values(), default=0.0)
        late_seconds = self.until_seconds - min(
            (moment for moment in self.newest.values() if moment >= newest - ENDED_SECONDS), default=newest
        )
        back_seconds = OVERLAP_SECONDS
        while back_seconds < late_seconds:
            back_seconds *= 2.0
        start = self.until_seconds - back_seconds
        if self.hole_seconds is not None and end_seconds >= self.retry_seconds:
            start = min(start, self.hole_seconds)
        return min(start, self._again(end_seconds))

    def read_whole(self) -> None:
        """Begin the next read with the window: a series that appeared may have come with its past."""
        if self.again_seconds:
            self.again_seconds[-1] = 0.0

    def _again(self, end_seconds: float) -> float:
        """Where it begins because it is time to read it again. Not all replicas have their turn in the same round."""
        if not self.again_seconds:
            turn = zlib.crc32(self.replica.key.encode()) / 2**32
            self.again_seconds = [end_seconds + turn * every_seconds for every_seconds, _ in AGAIN]
        start = math.inf
        for place, (every_seconds, back_seconds) in enumerate(AGAIN):
            if end_seconds >= self.again_seconds[place]:
                self.again_seconds[place] = end_seconds + every_seconds
                start = min(start, end_seconds - back_seconds)
        return start

    @property
    def silent_seconds(self) -> float:
        """For how long it is known to have had no sample."""
        return max(self.until_seconds - max(self.newest_seconds, self.lost_seconds), 0.0)

    @property
    def change(self) -> float:
        """How much its memory has changed since its verdict, as a ratio; infinite after a restart, or an end."""
        names = self.figures.keys() | self.judged_figures.keys()
        if self.figures.get("started_seconds") != self.judged_figures.get("started_seconds"):
            return math.inf
        if self.as_of_seconds - self.newest_seconds <= SILENT_SECONDS < self.until_seconds - self.newest_seconds:
            return math.inf
        pairs = ((self.figures.get(name, 0.0), self.judged_figures.get(name, 0.0)) for name in names)
        return max((abs(now - then) / max(now, then, 1.0) for now, then in pairs), default=0.0)

    @property
    def as_of_seconds(self) -> float:
        """The moment of its verdict, 0 without one."""
        return 0.0 if self.verdict is None else self.verdict.as_of_seconds


def figures_of(samples: ReplicaSamples) -> dict[str, float]:
    """The newest figures that a read brought, by part and field: memory, whether it answers, and its process' start."""
    found: dict[str, float] = defaultdict(float)
    for series_id, points in samples.series.items():
        meaning = METRICS[dict(series_id)["__name__"]]
        is_memory = meaning.part in _MEMORY and meaning.field.endswith("_bytes")
        if (is_memory or meaning.part == "up") and points.values:
            found[f"{meaning.part} {meaning.field}"] += points.values[-1] * meaning.scale
    for series_id, value in samples.once.items():
        if dict(series_id)["__name__"] == "process_start_time_seconds":
            found["started_seconds"] = max(found["started_seconds"], value)
    return dict(found)
