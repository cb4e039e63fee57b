"""A fleet whose state cannot be written, or whose judging fails: those replicas are unknown, and the others judged."""

import asyncio
from pathlib import Path

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.feeds.fleet import replica_judging
from kvdiag.model import Diagnosis, Facts, Timeline
from tests.integration.prometheus.histories import END_SECONDS
from tests.integration.prometheus.test_bad_fleets import counted, feed, holding
from tests.integration.prometheus.test_ended_fleets import OK, shown
from tests.unit.feeds.fleet.test_state_files import largest_file


@pytest.mark.parametrize("room", [0, 700])
def test_what_has_no_room_on_the_disk_is_unknown_until_it_has(tmp_path: Path, room: int) -> None:
    """From the first round on, or from a later one; nothing that was read meanwhile is missing after it."""
    with holding(counted(2)) as server:
        with feed(server, tmp_path) as kept:
            if room:
                assert {"vllm-00": OK, "vllm-01": OK} == shown(asyncio.run(kept.round(END_SECONDS - 1200.0)))
            with largest_file(room):
                for seconds in (600.0, 300.0):
                    full = shown(asyncio.run(kept.round(END_SECONDS - seconds)))
                    assert {"unknown"} == {worst for worst, _ in full.values()}
                    assert all("File too large" in str(reason) for _, reason in full.values())
            whole = asyncio.run(kept.round(END_SECONDS))
        with feed(server, tmp_path / "other") as other:
            expected = asyncio.run(other.round(END_SECONDS))
    assert {"vllm-00": OK, "vllm-01": OK} == shown(whole)
    assert {one.key: one.present for one in expected.verdicts} == {one.key: one.present for one in whole.verdicts}


def test_a_file_that_cannot_be_written_costs_its_own_replica_alone(tmp_path: Path) -> None:
    """A folder has its name."""
    with holding(counted(3)) as server, feed(server, tmp_path) as kept:
        asyncio.run(kept.round(END_SECONDS - 600.0))
        file = min(tmp_path.glob("*.replica"))
        file.unlink()
        file.mkdir()
        found = shown(asyncio.run(kept.round(END_SECONDS)))
    assert ["ok", "ok", "unknown"] == sorted(worst for worst, _ in found.values())
    assert 1 == sum("cannot keep its samples" in str(reason) for _, reason in found.values())


def test_an_internal_error_costs_its_own_replica_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown with the error, and judged by the next round."""
    broken = [True]

    def judge(timeline: Timeline, facts: Facts, limits: Limits) -> Diagnosis:
        if broken and timeline.samples and "vllm-01" in str(facts.url):
            raise ZeroDivisionError("division by zero")
        return diagnose(timeline, facts, limits)

    monkeypatch.setattr(replica_judging, "diagnose", judge)
    with holding(counted(2)) as server, feed(server, tmp_path) as kept:
        state = asyncio.run(kept.round(END_SECONDS - 300.0))
        [reason] = [gap.reason for one in state.verdicts for gap in one.present.gaps if "internal" in gap.reason]
        assert {"vllm-00": OK, "vllm-01": ("unknown", None)} == shown(state)
        broken.clear()
        assert {"vllm-00": OK, "vllm-01": OK} == shown(asyncio.run(kept.round(END_SECONDS)))
    assert "ZeroDivisionError: division by zero" in reason
