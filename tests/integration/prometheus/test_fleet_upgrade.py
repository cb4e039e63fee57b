"""An upgrade in the history of a real Prometheus: what no replica shows alone, and all show together."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders import series
from tests.integration.prometheus import openmetrics
from tests.integration.prometheus.conftest import Judged, require_prometheus
from tests.integration.prometheus.histories import END_SECONDS, FACTS, card, ending, exporter, on, server
from tests.integration.prometheus.openmetrics import line
from tests.integration.prometheus.server import serving, write_history
from tests.integration.prometheus.test_history import VALIDATOR

REPLICAS = 12
HOURS = 11.5
LEAK_MB_PER_HOUR = 12.0
"""Below the detection limit of one replica over half a day, at every time scale."""


def replica(version: str, number: int, leak_mb_per_hour: float) -> Iterator[str]:
    """One replica of a version, three days old, its load and noise its own."""
    pod = f"vllm-{version.replace('.', '-')}-{number}"
    seen = ending(
        series.timeline(
            "fast noise",
            number,
            hours=HOURS,
            tick_seconds=180.0,
            leak_mb_per_hour=leak_mb_per_hour,
            part=card,
        )
    )
    labels = server("upgrade", pod, container="vllm")
    state = {"job": "kube-state-metrics", "instance": "10.9.9.9:8080", "namespace": "upgrade", "pod": pod}
    image = {**state, "container": "vllm", "image": f"registry.example/vllm/vllm-openai:v{version}"}
    for sample in seen.samples:
        yield line("process_start_time_seconds", labels, END_SECONDS - 72 * 3600.0, sample.at_seconds)
        yield line("kube_pod_container_info", image, 1, sample.at_seconds)
    yield from openmetrics.vllm(seen, FACTS, labels)
    yield from openmetrics.dcgm(on(seen, f"GPU-{pod}"), exporter("upgrade", pod))


@pytest.fixture(scope="module")
def upgrade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus with twelve replicas of either version."""
    require_prometheus()
    storage = tmp_path_factory.mktemp("upgrade") / "data"
    versions = (("0.9.2", 0.0), ("0.10.0", LEAK_MB_PER_HOUR))
    write_history(
        (text for version, leak in versions for number in range(REPLICAS) for text in replica(version, number, leak)),
        storage,
    )
    with serving(storage) as url:
        yield url


def test_upgrade_that_leaks_is_called_though_no_replica_can_be(upgrade: str, diagnose: Callable[..., Judged]) -> None:
    """Twelve flat replicas of the older version, twelve of the newer that lose 12 MB/h each: a fault of the newer."""
    said = diagnose("--prometheus", upgrade, "--window", "12h", "--output", "json")
    document = json.loads(said.stdout)

    # No replica is called; they are never idle, so that of most it is not known what would be held then.
    VALIDATOR.validate(document)
    assert {"fault": 0, "suspect": 0, "unknown": 15, "ok": 9} == document["fleet"]["by_worst"]

    # All together are, in the newer version alone.
    assert (2, "fault", "fault") == (said.code, document["worst"], document["fleet"]["worst"])
    versions = [(one["version"], one["replicas"], one["compared"]) for one in document["fleet"]["versions"]]
    assert [("0.9.2", 12, 12), ("0.10.0", 12, 12)] == versions
    called = [one for one in document["fleet"]["findings"] if one["status"] in ("fault", "suspect")]
    assert [("leak.device_torch", "fault")] == [(one["id"], one["status"]) for one in called]
    shown = {one["name"]: one["value"] for one in called[0]["evidence"]}
    assert ("vllm 0.10.0", "vllm 0.9.2", 12) == (shown["version"], shown["compared_with"], shown["replicas"])
    assert pytest.approx(12e6, rel=0.15) == shown["growth_per_hour"]
    assert pytest.approx(12e6, rel=0.25) == shown["growth_beyond_older"]
    assert pytest.approx(72.0, abs=0.1) == shown["replica_age"]
    assert shown["false_discovery_rate"] < 0.01


def test_upgrade_as_text_names_the_version_first(upgrade: str, diagnose: Callable[..., Judged]) -> None:
    """What is wrong stands in the first line, and the versions below the replicas."""
    told = diagnose("--prometheus", upgrade, "--window", "12h").stdout
    assert ["FAULT", "leak.device_torch"] == [told.split()[0], told.splitlines()[0].split()[-1]]
    assert ["grows", "0.10.0"] in [line.split()[:2] for line in told.splitlines()]
    assert "0.9.2 to 0.10.0" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80


def test_report_of_a_history_has_every_replica_and_the_worst_in_full(
    upgrade: str, diagnose: Callable[..., Judged], tmp_path: Path
) -> None:
    """The page has the table, what all show together, and the plots of the first one, read again."""
    report = tmp_path / "report.html"
    said = diagnose("--prometheus", upgrade, "--window", "12h", "--report", str(report))
    page = report.read_text(encoding="utf-8")
    assert 2 == said.code
    assert f"{2 * REPLICAS} replicas: " in page
    assert "Comparison of replicas" in page
    assert all(f"upgrade/vllm-0-10-0-{number}<" in page for number in range(REPLICAS))
    assert "In full: upgrade/vllm-" in page
    assert "GPU 0 memory" in page
    assert '<path d="M' in page
