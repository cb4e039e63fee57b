"""What is judged of many replicas, for the outputs to show: each one's diagnosis, and what all show together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvdiag.diagnosis.fleet import Fleet
from kvdiag.model import Diagnosis, Gap, Status
from kvdiag.outputs.terminal.text import ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the history is from, and of which time. `join_seconds` is the tolerance with which pages were joined."""

    url: str
    match: str
    start_seconds: float
    end_seconds: float
    join_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One replica, or one GPU that no server is known of, by the labels that name it."""

    key: str
    subject: tuple[tuple[str, str], ...]
    diagnosis: Diagnosis

    def order(self) -> tuple[int, str]:
        """The worst first, equals by their names."""
        return ORDER.index(self.diagnosis.worst), self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDiagnosis:
    """All replicas in their order, what they show together, and what could be joined to none.

    `source` is `None` where each replica is a trace of its own.
    """

    source: Source | None
    judged: tuple[Judged, ...]
    fleet: Fleet
    gaps: tuple[Gap, ...]

    @property
    def worst(self) -> Status:
        """The worst of any replica, or of what only all together show."""
        found = {one.diagnosis.worst for one in self.judged}
        # That replicas are too few to be compared is no reason to doubt what each of them shows.
        found |= {self.fleet.worst} & {"fault", "suspect"}
        return next((status for status in ORDER if status in found), "unknown")

    @property
    def by_worst(self) -> dict[Status, int]:
        """How many replicas there are of each status."""
        counts = Counter(one.diagnosis.worst for one in self.judged)
        return {status: counts[status] for status in ORDER}
