"""`kvdiag serve --prometheus` as a process, on a real Prometheus that holds a small fleet's last hours."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.commands import main
from tests.fixtures.hostile import eventually
from tests.integration.prometheus import crowded_fleet
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.crowded_fleet import FAULTY, HEALTHY_NEXT_TO_A_LEAK, REPLICAS
from tests.integration.prometheus.server import serving, write_history
from tests.integration.prometheus.test_history import VALIDATOR
from tests.integration.vllm.cli import started
from tests.unit.sim.client import Client

HEALTHY = 12


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus with the fleet's last hours, until now."""
    require_prometheus()
    storage = tmp_path_factory.mktemp("fleet") / "data"
    write_history(crowded_fleet.fleet(HEALTHY, float(int(time.time()))), storage)
    with serving(storage) as url:
        yield url


@dataclass(frozen=True, slots=True)
class Fleet:
    """A daemon under way."""

    process: subprocess.Popen[str]
    client: Client

    def document(self) -> dict[str, Any] | None:
        """The newest document, `None` while there is none."""
        status, text = self.client.get("/api/v1/fleet")
        found: dict[str, Any] | None = json.loads(text) if status == 200 else None
        return found

    def whole(self, replicas: int) -> Callable[[], bool]:
        """Whether so many replicas have a verdict."""
        return lambda: len((self.document() or {"replicas": ()})["replicas"]) == replicas

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """The series of a name, by the values of their labels in the order of their names."""
        families = text_string_to_metric_families(self.client.get("/metrics")[1])
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }


@contextmanager
def daemon(url: str, *more: str) -> Iterator[Fleet]:
    """A daemon on a free port, whose rounds follow one another."""
    options = ("--prometheus", url, "--listen", "127.0.0.1:0", "--tick-seconds", "0.5", *more)
    with started("serve", *options) as process:
        line = json.loads(process.stderr.readline()) if process.stderr is not None else {}
        yield Fleet(process, Client(line["address"]))


ALL = len(FAULTY) + HEALTHY_NEXT_TO_A_LEAK + HEALTHY


def name_of(replica: dict[str, Any]) -> str:
    """Namespace and pod of a replica in a document."""
    return "/".join(replica["subject"][name] for name in ("namespace", "pod"))


def test_the_six_faulty_replicas_are_on_top(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The document is that of `kvdiag diagnose` at the same moment; page, metrics and plots say the same."""
    with daemon(fleet) as serving:
        assert eventually(serving.whole(ALL))
        document = serving.document() or {}
        replicas, end = document["replicas"], document["source"]["end"]
        VALIDATOR.validate(document)
        assert set(FAULTY) == set(map(name_of, replicas[: len(FAULTY)]))
        for one in replicas[: len(FAULTY)]:
            assert FAULTY[name_of(one)] in {
                each["id"] for each in one["findings"] if each["status"] in ("fault", "suspect")
            }
        assert {"ok", "unknown"} >= {one["worst"] for one in replicas[len(FAULTY) :]}

        # The page lists all, filters by link, and each replica has a page with plots.
        status, page = serving.client.get("/")
        assert 200 == status
        assert max(page.index(f"/replica/{name}") for name in FAULTY) < page.index("/replica/crowd/vllm-")
        assert "/replica/crowd/" not in serving.client.get("/?status=fault")[1]
        assert "/replica/crowd/" in serving.client.get("/?node=node-1&sort=name")[1]
        status, page = serving.client.get("/replica/kv-leak/vllm-0")
        assert (200, True, True) == (status, "leak.kv_blocks" in page, '<path d="M' in page)
        assert 404 == serving.client.get("/replica/kv-leak/vllm-9")[0]

        # The metrics name the replica, its version and its verdicts.
        found = serving.series("kvdiag_replica_finding")
        assert 1.0 == found["", "vllm", "leak.kv_blocks", "tiny", "kv-leak", "vllm-0", "fault", ""]
        states = serving.series("kvdiag_replica_status")
        assert 4 * ALL == len(states)
        assert 1.0 == states["", "vllm", "tiny", "crowd", "vllm-0", "ok", ""]
        assert {(): 0.0} == serving.series("kvdiag_fleet_unread_replicas")
        assert 200 == serving.client.get("/-/ready")[0]

        main(["diagnose", "--prometheus", fleet, "--end", str(end), "--output", "json"])
        expected = {name_of(one): one for one in json.loads(capsys.readouterr().out)["replicas"]}
        assert expected == {name_of(one): one for one in replicas}


def test_a_killed_daemon_goes_on_where_it_was(fleet: str, tmp_path: Path) -> None:
    """After kill -9 the verdicts are there at once, and the next round reads only what is new."""
    with daemon(fleet, "--record-dir", str(tmp_path)) as serving:
        assert eventually(serving.whole(ALL))
        before = serving.document() or {}
        serving.process.send_signal(signal.SIGKILL)
        serving.process.wait()
    with daemon(fleet, "--record-dir", str(tmp_path), "--timeout", "1") as serving:
        document = serving.document() or {}
        assert set(map(name_of, before["replicas"])) == set(map(name_of, document["replicas"]))
        assert before["worst"] == document["worst"]
        assert eventually(lambda: bool(serving.series("kvdiag_fleet_round_samples")))
        assert serving.series("kvdiag_fleet_round_samples")[()] < 5_000
        assert eventually(lambda: (serving.document() or {})["source"]["end"] > before["source"]["end"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_end_within_the_first_round_leaves_nothing(
    fleet: str, tmp_path: Path, workers: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the folder of its state nor workers, and it reports no mistake: every restart of a pod can do this."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ("--prometheus", fleet, "--listen", "127.0.0.1:0", "--workers", workers)
    with started("serve", *options) as process:
        assert eventually(lambda: len(list(tmp_path.glob("*/*.replica"))) > 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60.0)
    assert (process.returncode, list(tmp_path.iterdir())) == (0, [])
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [line["event"] for line in lines] == ["listening", "ended"]


def test_a_round_that_cannot_begin_leaves_nothing_ok(fleet: str, tmp_path: Path) -> None:
    """A file with a token that is removed: the page says so, the round counts as failed, and no replica is ok."""
    token = tmp_path / "token"
    token.write_text("s3cret")
    with daemon(fleet, "--token-file", str(token)) as serving:
        assert eventually(serving.whole(ALL))
        token.unlink()
        assert eventually(lambda: serving.series("kvdiag_fleet_rounds_failed_total").get((), 0.0) >= 1.0)
        states = serving.series("kvdiag_replica_status")
        assert not [labels for labels, value in states.items() if value and "ok" in labels]
        assert str(token) in serving.client.get("/")[1]


START_SECONDS = 300.0
"""For a new user to see the fleet, from the README on."""


@pytest.mark.long
def test_the_readmes_command_shows_the_six_of_two_hundred(tmp_path: Path) -> None:
    """Within five minutes the page of 200 replicas has the six faulty ones on top, and the metrics name them."""
    require_prometheus()
    healthy = REPLICAS - len(FAULTY) - HEALTHY_NEXT_TO_A_LEAK
    write_history(crowded_fleet.in_prod(crowded_fleet.fleet(healthy, float(int(time.time())))), tmp_path / "data")
    with serving(tmp_path / "data") as url:
        _, *arguments = crowded_fleet.command(url)
        began = time.monotonic()
        with started(*arguments, "--listen", "127.0.0.1:0") as process:
            line = json.loads(process.stderr.readline()) if process.stderr is not None else {}
            serving_fleet = Fleet(process, Client(line["address"]))
            assert eventually(lambda: serving_fleet.client.get("/-/ready")[0] == 200, every_seconds=1.0)
            seconds = time.monotonic() - began
            page = serving_fleet.client.get("/")[1]
            names = re.findall(r'href="/replica/prod/([^"]+)"', page)
            found = serving_fleet.series("kvdiag_replica_finding")
    faulty = {name.replace("/", "-"): verdict for name, verdict in FAULTY.items()}
    assert REPLICAS == len(names)
    assert set(faulty) == set(names[: len(faulty)])
    assert set(faulty.items()) <= {(pod, verdict) for _, _, verdict, _, _, pod, _, _ in found}
    assert seconds < START_SECONDS
