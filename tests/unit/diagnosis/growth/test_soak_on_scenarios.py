"""A soak of the embedded server's scenarios, from requests to verdict, in a loop that jumps instead of waiting."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.active.step_runner import Progress
from kvdiag.model import Timeline
from kvdiag.sim import SCENARIOS
from kvdiag.sim.scenarios import Scenario
from tests.builders.answers import finding, statuses, step
from tests.builders.soak_run import soak_run
from tests.builders.values import GIB, KIB

CYCLE_SECONDS = 16.0
"""Room for sixteen requests and the settling: a soak that is late ends early."""

SLOW_LEAK = replace(
    SCENARIOS["device-leak"], device_bytes_kept_per_request=439 * KIB, kv_cache_memory_bytes=12 * GIB, lazy_bytes=()
)
"""4 MiB in the mean load cycle: less than a page a request, so that no single request shows it."""

VERDICTS: Mapping[str, tuple[Scenario, str, str, str]] = {
    "healthy": (SCENARIOS["healthy"], "ok", "leak.device_non_torch", "ok"),
    "kv-leak": (SCENARIOS["kv-leak"], "fault", "leak.kv_blocks", "fault"),
    "slow device leak": (SLOW_LEAK, "fault", "leak.device_torch", "fault"),
    "warmup": (SCENARIOS["warmup"], "ok", "leak.device_non_torch", "ok"),
}


def offered(timeline: Timeline, name: str) -> list[int]:
    """How many requests each cycle of a step offered."""
    return [span.workload.requests for span in timeline.spans(name) if span.workload is not None]


@pytest.mark.long
@pytest.mark.parametrize("name", VERDICTS)
def test_story_is_found_out(name: str) -> None:
    """Thirty-six accelerated cycles identify the scenario's fault, and blame nothing else."""
    scenario, status, verdict, expected = VERDICTS[name]
    reports: list[Progress] = []

    timeline, facts = soak_run(scenario, cycle_seconds=CYCLE_SECONDS, reports=reports)
    actual = diagnose(timeline, facts)

    result = step(actual, "soak")
    assert (status, expected) == (result.status, finding(actual, verdict).status), result
    leaks = {one: said for one, said in statuses(actual.findings).items() if one.startswith("leak.")}
    blamed = {one for one, said in leaks.items() if said in ("suspect", "fault")}
    assert ({verdict} if expected == "fault" else set()) == blamed
    failed = [span for span in timeline.spans("soak") if span.outcome is None or span.outcome.failed]
    assert (196, []) == (result.measured.requests, failed), result
    assert "cycle 36 of 36, 16 s left" == reports[-1].detail
    assert [0, 4, 0, 8, 0, 16, 0, 4, 0, 16, 0, 8] == offered(timeline, "soak")[:12]
    assert [16, 8, 4] == offered(timeline, "soak_warmup")
