"""The verdict as of now: what still supports it, and that status page, live view, boards and alert agree on its age."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.queries import SCRAPED_SILENT_SECONDS
from kvdiag.feeds.daemon.diagnosis_schedule import DIAGNOSIS_SECONDS, GIVEN_UP_SECONDS, MAX_REST_SECONDS
from kvdiag.model import Gap, Snapshot
from kvdiag.outputs.current_verdict import SILENT_SECONDS, STALE_SECONDS, as_of_now, current_verdict
from kvdiag.outputs.html.status_page import page
from tests.unit.outputs.test_metrics import NEWEST, named
from tests.unit.outputs.test_status_page import NOW, shown, well
from tests.unit.outputs.test_top_frames import of, screen
from tests.unit.server.shell import STARTING

TOO_LARGE = replace(NEWEST, at_seconds=NOW, engines=None, gaps=(Gap("engine", "refused", "more than 4 MiB"),))
SLOWEST_SECONDS = MAX_REST_SECONDS + DIAGNOSIS_SECONDS + GIVEN_UP_SECONDS
"""From one diagnosis to the next on a slow host: its longest rest, the wait for a tick, and the longest diagnosis."""


@pytest.mark.parametrize("given_up", [0, 1])
def test_a_slow_host_does_not_flicker_to_unknown(given_up: int) -> None:
    """The verdict of a host whose diagnoses come as seldom as the daemon allows, one of them given up, holds until the
    next one is there: on the status page, in the live view and on the boards.
    """
    snapshot = well(diagnosed_seconds=NOW - 1 - (1 + given_up) * SLOWEST_SECONDS)
    assert 'class="verdict ok"' in page(snapshot, (), NOW)
    assert screen(of(snapshot))[1].startswith("OK")
    assert (1 + given_up) * SLOWEST_SECONDS < STALE_SECONDS


@pytest.mark.parametrize(
    ("known", "status", "holds"),
    [
        pytest.param(STARTING, "unknown", False, id="nothing read"),
        pytest.param(well(newest=replace(NEWEST, at_seconds=NOW - SILENT_SECONDS)), "ok", True, id="read a minute ago"),
        pytest.param(well(newest=replace(NEWEST, at_seconds=NOW - SILENT_SECONDS - 1)), "unknown", False, id="silent"),
        pytest.param(well(diagnosis=None), "unknown", False, id="not diagnosed yet"),
        pytest.param(well(state="starting"), "unknown", False, id="starting"),
        pytest.param(well(state="lost"), "unknown", False, id="lost"),
        pytest.param(well(diagnosed_seconds=NOW - STALE_SECONDS), "ok", True, id="an old diagnosis"),
        pytest.param(well(diagnosed_seconds=NOW - STALE_SECONDS - 1), "unknown", False, id="too old a diagnosis"),
        pytest.param(shown(diagnosed_seconds=NOW - STALE_SECONDS - 1), "unknown", False, id="too old a fault"),
        pytest.param(well(), "ok", True, id="well"),
        pytest.param(shown(), "fault", True, id="a fault"),
        pytest.param(shown(state="lost"), "fault", True, id="a fault of a lost server"),
        pytest.param(well(newest=TOO_LARGE), "unknown", False, id="refused"),
        pytest.param(shown(newest=TOO_LARGE), "fault", True, id="a fault of a refused server"),
    ],
)
def test_only_a_current_diagnosis_counts(known: Snapshot, status: str, holds: bool) -> None:
    """Everything else is unknown, with a reason; an old fault is still named."""
    found = current_verdict(known, NOW)
    assert (status, holds) == (found.status, found.holds)
    assert bool(found.reason) == (not holds or known.state == "lost" or known.newest is TOO_LARGE)
    assert (known.state == "lost") == found.down
    if known.newest is TOO_LARGE:
        assert TOO_LARGE.gaps[0].reason in found.sentence
        assert [status] == [one.present_worst for one in (as_of_now(known),) if one is not None]
    if known.diagnosis is not None and known.diagnosis.worst == "fault":
        assert "leak.kv_blocks: " in found.sentence


@pytest.mark.parametrize("blind", [{"state": "lost"}, {"state": "starting"}, {"newest": TOO_LARGE}])
@pytest.mark.parametrize("known", [well(), shown()], ids=["well", "a fault"])
def test_no_finding_of_a_server_that_cannot_be_seen_is_ok(known: Snapshot, blind: dict[str, Any]) -> None:
    """Neither in the metrics nor on the page; a fault that was found before remains one."""
    before, now = known.diagnosis, as_of_now(replace(known, **blind))
    assert before is not None
    assert now is not None
    assert {"ok": "unknown"}.get(before.worst, before.worst) == now.worst
    statuses = {"ok": "unknown", "unknown": "unknown", "suspect": "suspect", "fault": "fault"}
    assert [statuses[one.status] for one in before.findings] == [one.status for one in now.findings]
    rows = named(replace(known, **blind), "kvdiag_finding")
    assert not any(value for (_, status), value in rows.items() if status == "ok")


def test_the_alert_uses_the_same_ages() -> None:
    """KvdiagStale fires when outputs stop showing the verdict, not before."""
    rules = yaml.safe_load((Path(__file__).parents[3] / "alerts" / "alerting-rules.yaml").read_text(encoding="utf-8"))
    expressions = [str(rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    age = re.compile(r"kvdiag_(sample|diagnosis)_timestamp_seconds > (\d+)")
    ages = {found for one in expressions for found in age.findall(one)}
    assert {("sample", str(SCRAPED_SILENT_SECONDS)), ("diagnosis", str(STALE_SECONDS))} == ages
