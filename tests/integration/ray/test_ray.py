"""`--ray` on a real Ray cluster of two nodes: the verdicts of one process, also where a node is killed half-way."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.hostile import eventually, refused_port
from tests.fixtures.require import require
from tests.integration.prometheus import crowded_fleet
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.crowded_fleet import FAULTY, HEALTHY_NEXT_TO_A_LEAK
from tests.integration.prometheus.server import serving, write_history
from tests.integration.ray.ray_env import Cluster, RayEnvError, ray_environment, ray_python, two_nodes
from tests.unit.sim.client import Client

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]

HEALTHY = 700
ALL = HEALTHY + len(FAULTY) + HEALTHY_NEXT_TO_A_LEAK
WAIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A Prometheus with a fleet's history until a moment."""

    url: str
    end_seconds: float

    def diagnosing(self, *more: str) -> subprocess.Popen[str]:
        """`kvdiag diagnose` with Ray's Python, its document on stdout."""
        return running("diagnose", "--prometheus", self.url, "--end", str(self.end_seconds), "--output", "json", *more)


def running(*arguments: str) -> subprocess.Popen[str]:
    """A kvdiag where Ray is installed."""
    command = [str(ray_python()), "-m", "kvdiag", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ray_environment(), **pipes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with a processor each."""
    try:
        ray_python()
    except RayEnvError as error:
        require(ok=False, what=f"Ray ({error})")
    with two_nodes(tmp_path_factory.mktemp("ray") / "log") as made:
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet, until now."""
    require_prometheus()
    storage, now = tmp_path_factory.mktemp("fleet") / "data", int(time.time())
    write_history(crowded_fleet.fleet(HEALTHY, float(now)), storage)
    with serving(storage) as url:
        yield Fleet(url, now)


@pytest.fixture(scope="module")
def expected(fleet: Fleet, cluster: Cluster) -> str:
    """The document of one process."""
    with fleet.diagnosing("--workers", "1") as one:
        document, _ = one.communicate(timeout=WAIT_SECONDS)
    assert 2 == one.returncode
    assert ALL == len(json.loads(document)["replicas"])
    return document


def test_a_cluster_gives_the_document_of_one_process(fleet: Fleet, cluster: Cluster, expected: str) -> None:
    """Byte by byte, and nothing of Ray's own is printed."""
    with fleet.diagnosing("--ray", cluster.address) as several:
        document, progress = several.communicate(timeout=WAIT_SECONDS)
    assert (2, expected) == (several.returncode, document)
    assert {line.partition(" ")[2] for line in progress.splitlines()} <= {f"of {ALL} replicas"}


def test_a_node_killed_half_way_loses_nothing(fleet: Fleet, cluster: Cluster, expected: str) -> None:
    """Its work is done again by the other node: the same document."""
    with fleet.diagnosing("--ray", cluster.address) as several:
        assert several.stderr is not None
        begun = several.stderr.readline()
        cluster.do("kill")
        half_way = several.poll() is None
        document, _ = several.communicate(timeout=WAIT_SECONDS)
    cluster.do("add")
    assert begun.endswith(f"of {ALL} replicas\n")
    assert half_way
    assert (2, expected) == (several.returncode, document)


def test_work_that_fails_says_how(cluster: Cluster) -> None:
    """An error has its message, a bug its traceback; a result that cannot be read and killed processes are errors."""
    code = f"from tests.integration.ray.hard_work import main; main('{cluster.address}')"
    command = [str(ray_python()), "-c", code]
    done = subprocess.run(command, env=ray_environment(), capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    ends = json.loads(done.stdout)
    assert ["KvdiagError", "7 cannot be used"] == ends["refused"]
    assert "ZeroDivisionError" == ends["broken"][0]
    assert "hard_work.py" in ends["broken"][-1]
    assert ["ValueError", "not in this process"] == ends["Unreadable"]
    assert "KvdiagError" == ends["killed"][0]
    assert "ray status" in ends["killed"][1]


def test_a_cluster_of_another_python_is_refused(fleet: Fleet, cluster: Cluster) -> None:
    """Both versions are named."""
    own = subprocess.run([str(ray_python()), "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
    cluster.do("version 3.9.1")
    try:
        with fleet.diagnosing("--ray", cluster.address) as refused:
            document, error = refused.communicate(timeout=WAIT_SECONDS)
    finally:
        cluster.do(f"version {own}")
    assert (3, "") == (refused.returncode, document)
    assert "Python 3.9.1" in error
    assert f"Python {own}" in error


def test_an_address_without_ray_is_refused(fleet: Fleet, cluster: Cluster) -> None:
    """At once: Ray itself would try forever."""
    with refused_port() as port, fleet.diagnosing("--ray", f"127.0.0.1:{port}") as refused:
        document, error = refused.communicate(timeout=WAIT_SECONDS)
    assert (3, "") == (refused.returncode, document)
    assert f"cannot connect to Ray at 127.0.0.1:{port}" in error


@contextmanager
def daemon(fleet: Fleet, address: str, log: Path) -> Iterator[Client]:
    """A fleet's daemon with a Ray cluster; its log is complete when it has ended."""
    options = ("--prometheus", fleet.url, "--listen", "127.0.0.1:0", "--every", "1h", "--ray", address)
    with running("serve", *options) as process:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        try:
            yield Client(line["address"])
        finally:
            process.send_signal(signal.SIGTERM)
            log.write_text(process.stderr.read())
            assert 0 == process.wait()


@pytest.mark.parametrize("there", [True, False], ids=["cluster", "no cluster"])
def test_a_daemon_judges_on_the_cluster_or_without(fleet: Fleet, cluster: Cluster, tmp_path: Path, there: bool) -> None:
    """The first round has the verdicts of one process; a cluster that is down is logged, and costs no verdict."""
    with contextlib.ExitStack() as stack:
        address = cluster.address if there else f"127.0.0.1:{stack.enter_context(refused_port())}"
        client = stack.enter_context(daemon(fleet, address, tmp_path / "log"))

        def whole() -> bool:
            status, text = client.get("/api/v1/fleet")
            return status == 200 and ALL == len(json.loads(text)["replicas"])

        assert eventually(whole)
        found = json.loads(client.get("/api/v1/fleet")[1])
    with Fleet(fleet.url, found["source"]["end"]).diagnosing("--workers", "1") as one:
        document, _ = one.communicate(timeout=WAIT_SECONDS)
    assert by_key(json.loads(document)) == by_key(found)
    assert there == ("cannot connect to Ray" not in (tmp_path / "log").read_text())


def by_key(document: dict[str, Any]) -> dict[str, Any]:
    """The verdict and the findings of each replica."""
    return {str(one["subject"]): (one["worst"], one["findings"]) for one in document["replicas"]}
