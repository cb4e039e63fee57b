"""A simulated week of the fleet's daemon, with everything that happens to replicas, to Prometheus and to itself."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands.diagnose import judge
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.history.prometheus_feed import Survey, Window, survey
from kvdiag.model.codec import to_plain
from tests.builders.series import seeded
from tests.fixtures.hostile import refused_port
from tests.integration.prometheus import fleet_week
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.fleet_week import START_SECONDS, WINDOW_SECONDS
from tests.integration.prometheus.server import serving, write_history
from tests.integration.prometheus.test_fleet_rounds import access_to

EVERY_HOURS = 3
KILLS = 20
GROWN_BYTES = 16 * 2**20

Said = dict[str, Any]


class Rounds:
    """The program that judges the week, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        """Start it; `kept` is what its folder had."""
        command = [sys.executable, "-m", "tests.integration.prometheus.fleet_week", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.kept = self._answer()

    def _answer(self) -> Said:
        assert self.process.stdout is not None
        found: Said = json.loads(self.process.stdout.readline())
        return found

    def begin(self, moment: float, url: str) -> None:
        """Begin a round."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps([moment, url])}\n")
        self.process.stdin.flush()

    def round(self, moment: float, url: str) -> Said:
        """The state after a round."""
        self.begin(moment, url)
        return self._answer()

    def kill(self) -> None:
        """Kill it at once."""
        self.process.kill()
        self.process.communicate()


def diagnosed(url: str, moment: float) -> dict[str, object]:
    """What `kvdiag diagnose --prometheus` says of every replica at a moment."""
    access = access_to(url)
    window = Window(start_seconds=moment - WINDOW_SECONDS, end_seconds=moment)

    async def listed() -> Survey:
        async with access.source() as source:
            return await survey(source, "", window)

    judged, _, _ = judge(access, window, DEFAULT_LIMITS, asyncio.run(listed()).replicas)
    return {one.key: json.loads(json.dumps(to_plain(one.diagnosis))) for one in judged}


def worst(state: Said, pod: str) -> str | None:
    """A replica's verdict; `None` where it is not listed."""
    found = state["verdicts"].get(f"pod /week/{pod}")
    return None if found is None else str(found["worst"])


@pytest.mark.long
def test_a_week_of_rounds_gives_the_verdicts_of_diagnose(tmp_path: Path) -> None:
    """Replicas come, go, restart, fall silent and are upgraded; Prometheus restarts; the daemon is killed 20 times."""
    require_prometheus()
    write_history(fleet_week.week(), tmp_path / "data")
    moments = [START_SECONDS + 3600.0 * hour for hour in range(24, int(fleet_week.HOURS) + 1, EVERY_HOURS)]
    draw = seeded("kills")
    verdicts: set[tuple[str, str]] = set()
    rounds = Rounds(tmp_path / "state")
    last: Said = rounds.kept
    resident: list[int] = []
    for part in (moments[:16], moments[16:32], moments[32:]):
        # Another port and another process: what was read before is still the same server's.
        with serving(tmp_path / "data") as url:
            for moment in part:
                number = moments.index(moment)
                if number and number <= KILLS:
                    rounds.begin(moment, url)
                    time.sleep(draw.uniform(0.0, 1.5))
                    rounds.kill()
                    rounds = Rounds(tmp_path / "state")
                    # Nothing is forgotten beyond the round that was cut off.
                    assert last["as_of"].keys() <= rounds.kept["as_of"].keys() | gone(last, rounds.kept)
                    assert all(seconds >= last["as_of"].get(key, 0.0) for key, seconds in rounds.kept["as_of"].items())
                last = rounds.round(moment, url)
                resident.append(last["resident_bytes"])
                verdicts |= {(key, one["worst"]) for key, one in last["verdicts"].items()}
                assert last["problem"] is None
                assert diagnosed(url, moment) == last["verdicts"]
        with refused_port() as port:
            down = rounds.round(part[-1] + 300.0, f"http://127.0.0.1:{port}")
        assert "cannot connect" in str(down["problem"])
        assert "ok" not in {one["worst"] for one in down["verdicts"].values()}
    rounds.kill()
    # The rounds since the last kill.
    assert resident[-1] - resident[KILLS + 3] < GROWN_BYTES
    assert "fault" == worst(last, "keeps")
    assert worst(last, "goes") is None
    leaking = {"pod /week/grows", "pod /week/keeps"}
    assert leaking == {key for key, status in verdicts if status == "fault"}
    # The others are ok throughout.
    assert {"ok"} == {status for key, status in verdicts if key not in leaking}


def gone(before: Said, after: Said) -> set[str]:
    """Replicas whose last sample left the window in the round that was cut off."""
    return {
        key
        for key in before["as_of"].keys() - after["as_of"].keys()
        if before["verdicts"][key]["end_seconds"] <= before["as_of"][key] - WINDOW_SECONDS + 3600.0 * EVERY_HOURS
    }
