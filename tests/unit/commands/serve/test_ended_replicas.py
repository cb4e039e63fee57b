"""A replica that has ended: its series disappear after an hour."""

import pytest

from kvdiag.commands.daemons.fleet_daemon import status_of
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.fleet.fleet_round import FleetRound, ReplicaVerdict
from kvdiag.outputs.fleet_status import FleetStatus
from kvdiag.outputs.metrics.fleet_metrics import fleet_figures
from tests.unit.outputs.test_fleet import REPLICAS, SOURCE

NOW = 1_000_000.0


def verdict(number: int, silent_seconds: float) -> ReplicaVerdict:
    """Of a replica that has had no sample for so long."""
    one = REPLICAS[number]
    return ReplicaVerdict(
        key=one.key,
        subject=one.subject,
        diagnosis=one.diagnosis,
        summary=None,
        as_of_seconds=NOW,
        newest_seconds=NOW - silent_seconds,
        silent_seconds=silent_seconds,
    )


@pytest.mark.parametrize(("minutes", "shown"), [(59.0, 2), (61.0, 1)])
def test_a_replica_has_no_series_an_hour_after_its_last_sample(minutes: float, shown: int) -> None:
    """Neither a status nor a finding nor a place on the page; the other one stays."""
    state = FleetRound(verdicts=(verdict(0, 60.0 * minutes), verdict(1, 30.0)), replicas=2, end_seconds=NOW)
    status = status_of(state, SOURCE, 86_400.0, DEFAULT_LIMITS)
    figures = fleet_figures(status)
    assert (shown, shown) == (len(status.replicas), status.listed)
    assert "without a verdict" not in status.sentence
    for name in ("replica_status", "replica_finding"):
        pods = {labels[2] for labels, _ in figures[name]}
        assert len(pods) <= shown
    assert shown == len({labels[2] for labels, _ in figures["replica_status"]})


def test_a_fleet_that_has_ended_is_no_first_round() -> None:
    """Nor is it ok."""
    state = FleetRound(verdicts=(verdict(0, 7200.0),), replicas=1, end_seconds=NOW)
    status = status_of(state, SOURCE, 86_400.0, DEFAULT_LIMITS)
    assert ("unknown", False) == (status.worst, "first round" in status.sentence)
    assert "first round" in FleetStatus(source=SOURCE).sentence
