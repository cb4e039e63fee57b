"""A Prometheus with two hours of four replicas: two engines on a host, one in a pod, none scraped, and silent now."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvdiag.outputs.metrics.diagnosis_metrics import STATUSES
from kvdiag.outputs.metrics.fleet_metrics import fleet_contract
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually
from tests.integration.dashboards.boards import Prometheus
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.openmetrics import line
from tests.integration.prometheus.server import serving, write_history
from tests.unit.commands.serve.test_serve import daemon
from tests.unit.outputs.test_metrics import GOLDEN, page
from tests.unit.server.shell import STARTING

END_SECONDS = 1_770_000_000.0
HISTORY_SECONDS = 2 * 3600
STEP_SECONDS = 60
SCRAPES = Path(__file__).parents[2] / "fixtures" / "scrapes"

Labels = Mapping[str, str]

HOST = {"job": "kvdiag", "instance": "10.0.0.1:9743"}
POD = {"job": "kvdiag", "instance": "10.0.0.2:9743", "namespace": "llm", "pod": "vllm-0"}
ALONE = {"job": "kvdiag", "instance": "10.0.0.3:9743"}
SILENT = {"job": "kvdiag", "instance": "10.0.0.4:9743"}
HOST_VLLM = {"job": "vllm", "instance": "10.0.0.1:8000"}
POD_VLLM = {"job": "vllm", "instance": "10.0.0.2:8000", "namespace": "llm", "pod": "vllm-0"}
HOST_SGLANG = {"job": "sglang", "instance": "10.0.0.1:30000"}
FLEET = {"job": "kvdiag-fleet", "instance": "10.0.0.5:9743"}
SILENT_VLLM = {"job": "vllm", "instance": "10.0.0.4:8000"}


def told(text: str) -> list[Sample]:
    """The series of a page."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def healthy_page() -> str:
    """The metrics of a daemon for a simulated server, once it has reached a verdict."""
    with Drill(SCENARIOS["healthy"]) as drill, daemon(drill.url) as serving:
        assert eventually(serving.says("ok"))
        return serving.client.get("/metrics")[1]


def history(page: list[Sample], target: Labels, until_seconds: float = END_SECONDS) -> Iterator[str]:
    """A page, scraped again and again: counters rise, moments are a little ago, everything else stands still."""
    steps = HISTORY_SECONDS // STEP_SECONDS
    for step in range(steps + 1):
        at_seconds = END_SECONDS - HISTORY_SECONDS + step * STEP_SECONDS
        if at_seconds > until_seconds:
            return
        for one in page:
            value = one.value
            if one.name.endswith(("_total", "_bucket", "_sum", "_count")):
                value *= 1 + step / steps
            elif one.name.endswith("_timestamp_seconds"):
                value = at_seconds - 5
            elif one.name == "process_start_time_seconds":
                value = END_SECONDS - (1800 if step > steps - 30 else 100_000)
            escaped = {name: text.replace("\\", "\\\\").replace('"', '\\"') for name, text in one.labels.items()}
            yield line(one.name, {**target, **escaped}, value, at_seconds)


def fleet_page() -> list[Sample]:
    """One series of each metric that the daemon of a fleet has, of a replica that it calls faulty."""
    labels = {"namespace": "prod", "pod": "vllm-7", "model_name": "llama", "version": "0.32.0", "cluster": "eu"}
    labels |= {"engine": "vllm", "id": "leak.host", "or_id": "benign.warmup", "component": "host_anonymous"}
    return [
        Sample(
            f"kvdiag_{name}" + "_total" * (one["type"] == "counter"),
            {label: status if label == "status" else labels[label] for label in one["labels"]},
            1.0,
        )
        for name, one in fleet_contract().items()
        for status in (STATUSES if name == "fleet_replicas" else ("fault",))
    ]


def alerts() -> Iterator[str]:
    """Two alerts that fire, as Prometheus itself writes them."""
    firing = [
        Sample("ALERTS", {"alertname": name, "alertstate": "firing", "severity": severity}, 1.0)
        for name, severity in (("KvdiagKvLeak", "critical"), ("KvdiagMemoryPressure", "warning"))
    ]
    yield from history(firing, POD)


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    require_prometheus()
    storage = tmp_path_factory.mktemp("boards") / "data"
    vllm = told((SCRAPES / "vllm-0.32.0-cpu-load.prom").read_text())
    sick = told(GOLDEN.read_text())
    pages = (
        history(told(healthy_page()), HOST),
        history(vllm, HOST_VLLM),
        history(sick, POD),
        history(vllm, POD_VLLM),
        history(told((SCRAPES / "sglang-0.5.8-rendered.prom").read_text()), HOST_SGLANG),
        history(told(page(STARTING)), ALONE),
        history(sick, SILENT, until_seconds=END_SECONDS - 1800),
        history([one for one in vllm if one.name == "vllm:num_requests_running"], SILENT_VLLM),
        history(fleet_page(), FLEET),
        alerts(),
    )
    write_history((each for lines in pages for each in lines), storage)
    with serving(storage) as url:
        yield url


@pytest.fixture
def ask(prometheus: str) -> Prometheus:
    """It, asked as of the end, or over the last hour."""
    return Prometheus(url=prometheus, end_seconds=END_SECONDS, range_seconds=3600, step_seconds=STEP_SECONDS)
