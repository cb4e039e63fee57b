"""The diagnosis of many replicas as the outputs show it: each one's own, and the comparison of all of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from kvdiag.diagnosis.fleet import Fleet
from kvdiag.formatting import format_duration, plural
from kvdiag.model import Diagnosis, Finding, Gap, Status
from kvdiag.outputs.presentation import ORDER, problems_of, sentence

NAMES = ("cluster", "namespace", "pod")
GPU_NAMES = ("Hostname", "gpu", "UUID", "uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the history comes from, and its time range. `join_seconds` is the tolerance of joining two targets."""

    url: str
    match: str
    start_seconds: float
    end_seconds: float
    join_seconds: float

    @property
    def joined(self) -> str:
        """How far apart samples of two targets may be to count as one moment, in words."""
        return f"samples of different targets taken within {format_duration(self.join_seconds)} of each other"


def replica_name(key: str, subject: tuple[tuple[str, str], ...]) -> str:
    """What a replica is called: its trace, its namespace and pod, its address, or its GPU."""
    return "/".join(_parts(key, subject))


def _parts(key: str, subject: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    labels = dict(subject)
    if "trace" in labels:
        return (labels["trace"],)
    if labels.get("pod"):
        *before, pod = (labels[one] for one in NAMES if labels.get(one))
        realm = realm_of(key, subject)
        return *before, f"{pod} [{realm}]" if realm else pod
    realm = _realm(key, subject)
    where = f" [{realm}]" if realm else ""
    key = key.removesuffix(where)
    if key.startswith("gpu "):
        return ((" ".join(labels[one] for one in GPU_NAMES if labels.get(one)) or key) + where,)
    return ((labels.get("instance") or key.partition(" ")[2].lstrip("/")) + where,)


def realm_of(key: str, subject: tuple[tuple[str, str], ...]) -> str:
    """Labels that keep apart replicas of one name, as `region=eu`; the cluster, which has a label, is not repeated."""
    cluster = f"cluster={dict(subject).get('cluster')}"
    return ",".join(part for part in _realm(key, subject).split(",") if part != cluster)


def _realm(key: str, subject: tuple[tuple[str, str], ...]) -> str:
    """What a key has in brackets after the name, which may have brackets of its own."""
    cluster, namespace, pod, instance = (dict(subject).get(one, "") for one in (*NAMES, "instance"))
    named = (f"pod {cluster}/{namespace}/{pod}", f"instance {cluster}/{instance}")
    own = next((one for one in named if key.startswith(one)), "")
    return key[len(own) :].partition(" [")[2].removesuffix("]")


def exhaustion_seconds(findings: Iterable[Finding]) -> float:
    """The soonest exhaustion of memory among some findings, infinite without any."""
    known = (one.growth.exhaustion_seconds for one in findings if one.growth is not None)
    return min((seconds for seconds in known if seconds is not None), default=float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One replica, or one GPU without a known server, by the labels that name it."""

    key: str
    subject: tuple[tuple[str, str], ...]
    diagnosis: Diagnosis

    @property
    def hours(self) -> float:
        """The length of the replica's history."""
        return (self.diagnosis.end_seconds - self.diagnosis.start_seconds) / 3600.0

    @property
    def exhaustion_seconds(self) -> float:
        """When its memory will be exhausted at this growth, from the verdict on; infinite where that is not known."""
        return exhaustion_seconds(problems_of(self.diagnosis.findings))

    def order(self) -> tuple[int, float, str]:
        """The worst first, then the soonest exhaustion of memory, then by name."""
        return ORDER.index(self.diagnosis.worst), self.exhaustion_seconds, self.key

    @property
    def name(self) -> str:
        """What the replica is called."""
        return replica_name(self.key, self.subject)

    @property
    def path(self) -> str:
        """The name as part of an address: a slash within a label is quoted, one between two labels is not."""
        return "/".join(quote(part, safe="") for part in _parts(self.key, self.subject))

    @property
    def summary(self) -> str:
        """The replica's result in one sentence."""
        diagnosis = self.diagnosis
        if diagnosis.worst != "ok" or diagnosis.worst_past_life or diagnosis.down_since_seconds:
            return sentence(diagnosis)
        count = Counter(one.status for one in diagnosis.findings)
        unknown = f", {count['unknown']} unknown" if count["unknown"] else ""
        # As that its series end: who reads `ok` must not take it for a server that works.
        noted = next(
            (f"; {one.reason}" for one in diagnosis.gaps if (one.source, one.kind) == ("prometheus", "absent")), ""
        )
        return f"no fault found; {count['ok']} of {len(diagnosis.findings)} checks ok{unknown}{noted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDiagnosis:
    """All replicas in their order, the comparison of all of them, and what could not be assigned to any.

    `source` is `None` if each replica is a trace of its own.
    """

    source: Source | None
    judged: tuple[Judged, ...]
    fleet: Fleet
    gaps: tuple[Gap, ...]

    @property
    def worst(self) -> Status:
        """The worst of any replica, or of the comparison of all of them."""
        found = {one.diagnosis.worst for one in self.judged}
        # Too few replicas to compare are no reason to doubt what each of them shows.
        found |= {self.fleet.worst} & {"fault", "suspect"}
        return next((status for status in ORDER if status in found), "unknown")

    @property
    def by_worst(self) -> dict[Status, int]:
        """The number of replicas of each status."""
        counts = Counter(one.diagnosis.worst for one in self.judged)
        return {status: counts[status] for status in ORDER}

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        counts = ", ".join(f"{count} {status}" for status, count in self.by_worst.items() if count)
        called = problems_of(self.fleet.findings)
        together = f"; all replicas compared: {called[0].title}" if called else ""
        return f"{plural(len(self.judged), 'replica')}: {counts}{together}"
