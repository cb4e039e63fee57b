"""The metrics of a fleet's daemon: verdicts by replica and version, and the cost of its rounds.

`fleet_metrics.json` is the contract with the rules and the fleet board. Verdicts that are ok or unknown have no series
of their own: a thousand replicas would have 70,000.
"""

import json
import math
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Any

from prometheus_client.registry import Collector

import kvdiag
from kvdiag.outputs.fleet_status import FleetStatus
from kvdiag.outputs.metrics.diagnosis_metrics import STATUSES
from kvdiag.outputs.metrics.families import Figures, family, one_of, single
from kvdiag.outputs.presentation import problems_of


@cache
def fleet_contract() -> dict[str, Any]:
    """`fleet_metrics.json`: every metric by its name, in the order of the page."""
    text = files("kvdiag.outputs.metrics").joinpath("fleet_metrics.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


class FleetCollector(Collector):
    """A fleet's state as metric families."""

    def __init__(self, status: FleetStatus, refused_total: int, push_failures_total: int | None = None) -> None:
        """Show one state."""
        self._status = status
        self._own = {
            "connections_refused": single(refused_total),
            "otlp_push_failures": single(push_failures_total),
        }

    def collect(self) -> list[Any]:
        """Every family; what is not known has no series."""
        figures = fleet_figures(self._status) | self._own
        return [family(name, figures, fleet_contract()) for name in fleet_contract()]


def fleet_figures(status: FleetStatus) -> Figures:
    """The rows of every family."""
    replicas = [(one.labels, one) for one in status.replicas]
    problems = [(labels, finding) for labels, one in replicas for finding in one.problems]
    versions = () if status.fleet is None else status.fleet.versions
    found = [(_version(one.version), each) for one in versions for each in problems_of(one.findings)]
    growths = () if status.fleet is None else status.fleet.growths
    counts = Counter(one.status for one in status.replicas)
    succeeded = status.problem is None
    return {
        "build_info": [((kvdiag.__version__,), 1.0)],
        "replica_status": [
            ((*labels, *state), value) for labels, one in replicas for state, value in one_of(one.status, STATUSES)
        ],
        "replica_finding": [((*labels, one.id, one.status), 1.0) for labels, one in problems],
        "replica_finding_or_info": [
            ((*labels, one.id, one.or_id), 1.0) for labels, one in problems if one.or_id is not None
        ],
        "replica_time_to_exhaustion_seconds": [
            ((*labels, one.id), one.growth.exhaustion_seconds) for labels, one in problems if one.growth is not None
        ],
        "replica_growth_bytes_per_second": [
            ((*labels, one.id), one.growth.bytes_per_second) for labels, one in problems if one.growth is not None
        ],
        "replica_diagnosis_timestamp_seconds": [(labels, one.as_of_seconds) for labels, one in replicas],
        "fleet_replicas": [((state,), float(counts[state])) for state in STATUSES],
        "fleet_unread_replicas": single(len(status.unread)),
        "fleet_growth_bytes_per_hour": [
            ((*_version(one.version), one.component.value), one.per_hour.estimate)
            for one in growths
            if one.component.unit == "bytes" and math.isfinite(one.per_hour.estimate)
        ],
        "fleet_version_finding": [((*version, one.id, one.status), 1.0) for version, one in found],
        "fleet_version_finding_or_info": [
            ((*version, one.id, one.or_id), 1.0) for version, one in found if one.or_id is not None
        ],
        "fleet_version_replicas": [(_version(one.version), float(one.replicas)) for one in versions],
        "fleet_round_timestamp_seconds": single(status.round_seconds if succeeded else None),
        "fleet_round_interval_seconds": single(status.every_seconds),
        "fleet_round_duration_seconds": single(None if status.round_seconds is None else status.took_seconds),
        "fleet_round_cpu_seconds": single(None if status.round_seconds is None else status.cpu_seconds),
        "fleet_round_samples": single(None if status.round_seconds is None else status.samples),
        "fleet_rounds_failed": single(status.rounds_failed_total),
    }


def _version(version: Any) -> tuple[str, str, str]:
    return version.engine or "", version.model or "", version.version or ""
