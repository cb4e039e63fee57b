"""What a fleet's feed gives after a round: the verdict of each replica, as of when; and how it is kept in a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvdiag.diagnosis.fleet import ReplicaSummary
from kvdiag.model import Diagnosis, Gap
from kvdiag.model.codec import from_plain, to_plain
from kvdiag.sources.prometheus_answers import SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaVerdict:
    """One replica's newest verdict. `as_of_seconds` is the end of the history that it was judged by.

    `summary` is what the comparison of versions needs, `None` for a GPU without a known server. `node` is the host it
    runs on, `None` if no series names it. `unread` is why it could not be read in the last round. `silent_seconds` is
    for how long it is known to have had no sample: what could not be read may have some. `is_judged` is false for one
    whose workers were killed.
    """

    key: str
    subject: tuple[tuple[str, str], ...]
    diagnosis: Diagnosis
    summary: ReplicaSummary | None
    as_of_seconds: float
    newest_seconds: float
    node: str | None = None
    unread: str | None = None
    silent_seconds: float = 0.0
    is_judged: bool = True

    @property
    def present(self) -> Diagnosis:
        """The diagnosis as of now: without a complete last read nothing is ok."""
        if self.unread is None or any(gap.reason.endswith(self.unread) for gap in self.diagnosis.gaps):
            return self.diagnosis
        gap = Gap(SOURCE, "failed", self.unread)
        found = self.diagnosis
        lives = found.lives
        if lives and lives[-1].worst == "ok" and found.worst == "ok":
            lives = (*lives[:-1], replace(lives[-1], worst="unknown"))
        worst = "unknown" if found.worst == "ok" else found.worst
        return replace(found, worst=worst, lives=lives, gaps=(*found.gaps, gap))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRound:
    """The state after a round, or within the first one: verdicts, what belongs to no replica, and what it took.

    `problem` is why the survey failed; the verdicts are then those before.
    """

    # Python 3.11's `asyncio.run` writes a text of what it returns, twice.
    verdicts: tuple[ReplicaVerdict, ...] = field(default=(), repr=False)
    gaps: tuple[Gap, ...] = ()
    replicas: int = 0
    """Those that the survey listed."""
    judged: int = 0
    """Replicas that were judged in this round."""
    samples: int = 0
    """Samples that were read."""
    end_seconds: float = 0.0
    """The moment until which it read."""
    took_seconds: float = 0.0
    cpu_seconds: float = 0.0
    failed_total: int = 0
    """Rounds in which the survey failed."""
    problem: str | None = None


def kept_verdict(verdict: ReplicaVerdict) -> dict[str, Any]:
    """A verdict as plain values, for its replica's file."""
    summary = None if verdict.summary is None else to_plain(verdict.summary)
    return {
        "subject": [list(one) for one in verdict.subject],
        "diagnosis": to_plain(verdict.diagnosis),
        "summary": summary,
        "as_of": verdict.as_of_seconds,
        "newest": verdict.newest_seconds,
        "node": verdict.node,
    }


def restored_verdict(key: str, about: Mapping[str, Any]) -> ReplicaVerdict | None:
    """The verdict that a file keeps; `None` if it has none, or one of another version of kvdiag."""
    try:
        summary = about["summary"]
        return ReplicaVerdict(
            key=key,
            subject=tuple((str(name), str(value)) for name, value in about["subject"]),
            diagnosis=from_plain(Diagnosis, about["diagnosis"]),
            summary=None if summary is None else from_plain(ReplicaSummary, summary),
            as_of_seconds=float(about["as_of"]),
            newest_seconds=float(about["newest"]),
            node=None if about["node"] is None else str(about["node"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
