"""VictoriaMetrics in place of Prometheus: the same history gives the same verdicts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.model import Diagnosis
from tests.fixtures.require import require
from tests.integration.prometheus.histories import END_SECONDS, WORLDS
from tests.integration.prometheus.server import PrometheusEnvError
from tests.integration.prometheus.test_fleet_rounds import WINDOW_SECONDS, access_to, diagnosed
from tests.integration.prometheus.victoria import holding, victoria_metrics


@pytest.fixture(scope="module")
def victoria(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a VictoriaMetrics with every world's history."""
    try:
        victoria_metrics()
    except PrometheusEnvError as error:
        require(ok=False, what=f"VictoriaMetrics ({error})")
    lines = (line for world in WORLDS.values() for line in world())
    with holding(lines, tmp_path_factory.mktemp("victoria")) as url:
        yield url


def findings(diagnoses: dict[str, Diagnosis]) -> dict[str, tuple[str, dict[str, str]]]:
    """The verdicts of each replica, without figures."""
    return {key: (one.worst, {each.id: each.status for each in one.findings}) for key, one in diagnoses.items()}


def test_diagnose_gives_the_verdicts_that_it_gives_by_prometheus(history: str, victoria: str) -> None:
    """Every world, sample by sample."""
    by_prometheus, by_victoria = diagnosed(history, END_SECONDS), diagnosed(victoria, END_SECONDS)
    assert findings(by_prometheus) == findings(by_victoria)
    assert {key: one.samples for key, one in by_prometheus.items()} == {
        key: one.samples for key, one in by_victoria.items()
    }


def test_the_fleets_daemon_gives_the_verdicts_of_diagnose(victoria: str, tmp_path: Path) -> None:
    """After the first read of the window, and after rounds that read only what is new."""
    folder = StateFolder(tmp_path / "state", {})
    feed = FleetFeed(
        access_to(victoria).source, "", WINDOW_SECONDS, folder, limits=DEFAULT_LIMITS, cpu_seconds=1e9, workers=2
    )
    moments = (END_SECONDS - 600.0, END_SECONDS - 300.0, END_SECONDS)
    states = [asyncio.run(feed.round(moment)) for moment in moments]
    folder.close()
    assert diagnosed(victoria, END_SECONDS) == {one.key: one.present for one in states[-1].verdicts}
    assert {None} == {one.problem for one in states}
    assert states[1].samples < states[0].samples / 5
