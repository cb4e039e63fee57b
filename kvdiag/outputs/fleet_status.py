"""The state of a fleet's daemon as its page, its metrics and its document show it. Pure.

Replicas stand in the order of their verdicts, the worst first. A replica that has ended is not among them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlencode

from kvdiag.diagnosis.fleet import Fleet
from kvdiag.diagnosis.fleet.replica import Version
from kvdiag.formatting import format_time
from kvdiag.model import Finding, Gap, Status
from kvdiag.outputs.fleet_results import NAMES, FleetDiagnosis, Judged, Source, exhaustion_seconds, realm_of
from kvdiag.outputs.metrics.families import label
from kvdiag.outputs.presentation import problems_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReplica:
    """One replica: its verdict, as of when it is, its version and node, and why it could not be read last."""

    judged: Judged
    as_of_seconds: float
    version: Version
    node: str | None = None
    unread: str | None = None

    @property
    def status(self) -> Status:
        """Its verdict."""
        return self.judged.diagnosis.worst

    @property
    def labels(self) -> tuple[str, str, str, str, str, str]:
        """What its series are labelled with: cluster, namespace, pod (or its name), engine, model, version."""
        subject = dict(self.judged.subject)
        cluster = ", ".join(filter(None, (subject.get("cluster"), realm_of(self.judged.key, self.judged.subject))))
        pod = subject.get("pod")
        return (
            cluster,
            subject.get("namespace", "") if pod else "",
            pod or self.judged.name,
            self.version.engine or "",
            self.version.model or "",
            self.version.version or "",
        )

    @property
    def address(self) -> str:
        """The address of its page: by its name, or by its labels where a browser would take a part for a folder."""
        is_folder = not {".", ".."}.isdisjoint(self.judged.path.split("/"))
        return self.query if is_folder else f"/replica/{self.judged.path}"

    @property
    def query(self) -> str:
        """The address of its page by its labels."""
        return f"/replica?{urlencode(dict(zip(NAMES, self.labels, strict=False)))}"

    @property
    def problems(self) -> list[Finding]:
        """Its suspects and faults, one for each verdict: the first to exhaust memory."""
        found: dict[str, Finding] = {}
        for one in problems_of(self.judged.diagnosis.findings):
            if one.id not in found or exhaustion_seconds([one]) < exhaustion_seconds([found[one.id]]):
                found[one.id] = one
        return list(found.values())

    @property
    def exhaustion_seconds(self) -> float:
        """When its memory will be exhausted at this growth, from the verdict on; infinite where that is not known."""
        return self.judged.exhaustion_seconds


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """The newest state: replicas, the comparison of versions, and what the last round took.

    `round_seconds` is the end of the history read, `None` before the first round; `took_seconds` and `cpu_seconds` are
    the length and the processor time of the last one, `problem` is why it failed. `listed` replicas were found, some of
    which may have no verdict yet.
    """

    source: Source
    replicas: tuple[FleetReplica, ...] = ()
    fleet: Fleet | None = None
    gaps: tuple[Gap, ...] = ()
    listed: int = 0
    judged: int = 0
    samples: int = 0
    round_seconds: float | None = None
    took_seconds: float = 0.0
    cpu_seconds: float = 0.0
    rounds_failed_total: int = 0
    problem: str | None = None
    every_seconds: float | None = None
    """Between the starts of two rounds."""

    @cached_property
    def result(self) -> FleetDiagnosis | None:
        """The diagnosis of all replicas, as `kvdiag diagnose` has it; `None` before there is any."""
        if self.fleet is None:
            return None
        judged = tuple(one.judged for one in self.replicas)
        return FleetDiagnosis(source=self.source, judged=judged, fleet=self.fleet, gaps=self.gaps)

    def named(self, name: str) -> list[FleetReplica]:
        """The replicas of this name; without any, those whose namespace and pod it is, in whichever cluster."""
        return [one for one in self.replicas if one.judged.name == name] or [
            one for one in self.replicas if "/".join(filter(None, one.labels[1:3])) == name
        ]

    def labelled(self, cluster: str, namespace: str, pod: str) -> list[FleetReplica]:
        """The replicas whose series have these labels, as an alert's link names them: cut as those of /metrics are.

        A Prometheus may label what it scrapes with a cluster of its own: that counts only among replicas of one name.
        """
        wanted = [label(cluster), label(namespace), label(pod)]
        shown = [(one, [label(text) for text in one.labels[:3]]) for one in self.replicas]
        found = [(one, labels) for one, labels in shown if labels[1:] == wanted[1:]]
        return [one for one, labels in found if labels == wanted] or [one for one, _ in found]

    @property
    def unread(self) -> list[FleetReplica]:
        """Those that could not be read in the last round."""
        return [one for one in self.replicas if one.unread is not None]

    @property
    def worst(self) -> Status:
        """The worst of any replica and version; unknown before there is any."""
        return "unknown" if self.result is None else self.result.worst

    @property
    def sentence(self) -> str:
        """The state in one sentence."""
        if self.problem is not None and self.round_seconds is not None:
            last = f"; verdicts are of earlier rounds: {self.result.sentence}" if self.result else ""
            return f"the round of {format_time(self.round_seconds)} failed: {self.problem}{last}"
        if self.result is None and self.round_seconds is not None:
            return "no replica has a sample of the last hour"
        if self.result is None:
            return "the first round is in progress: no replica has a verdict yet"
        without = self.listed - len(self.replicas)
        return self.result.sentence + (f"; {without} more without a verdict yet" if without > 0 else "")


def worst_first(replicas: Iterable[FleetReplica]) -> tuple[FleetReplica, ...]:
    """In the order of their verdicts, as in `kvdiag diagnose`."""
    return tuple(sorted(replicas, key=lambda one: one.judged.order()))
