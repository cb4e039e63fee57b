"""`serve --otlp-endpoint`: a receiver that decodes OTLP gets the metrics of the page; without one nothing is lost."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.errors import KvdiagError
from kvdiag.server import otlp_push
from kvdiag.server.endpoints import Pages
from kvdiag.server.otlp_push import (
    MAX_ABSENT,
    MAX_POINTS,
    OtlpEndpoint,
    OtlpPush,
    Starts,
    failure,
    interval_seconds,
    metrics_of,
    resource,
    unit_of,
)
from kvdiag.server.request import Request
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import Hostile, Peer, eventually, refused_port, reply
from tests.integration.vllm.cli import started
from tests.unit.commands.bad_input.refusals import refusal
from tests.unit.commands.serve.otlp_collector import Collector, Series, listening
from tests.unit.outputs.test_metrics import snapshot
from tests.unit.sim.client import Client

QUICK = {"OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


def page_series(text: str) -> Series:
    """The series of a page."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names(series: Series) -> set[str]:
    """The names of the metrics."""
    return {name for name, _ in series}


def pushed(pages: otlp_push.Pushed, url: str, collector: Collector, requests: int = 1) -> None:
    """Push until so many requests have come."""

    async def until() -> None:
        push = OtlpPush(pages, OtlpEndpoint(url=f"{url}/v1/metrics"), 9743)
        running = asyncio.create_task(push.run(asyncio.Event()))
        while len(collector.requests) < requests:
            await asyncio.wait((running,), timeout=0.01)
        running.cancel()
        push.close()

    asyncio.run(until())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pushes a second."""
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)


def test_what_is_pushed_is_what_the_page_has() -> None:
    """Every series of the page, with its labels and its value."""
    shown = snapshot()
    pages = Pages(newest=lambda: shown)
    with listening() as (url, collector):
        pushed(pages, url, collector)
    page = pages.answer(Request(method="GET", path="/metrics")).body.decode()
    assert page_series(page) == collector.series(collector.requests[0])
    assert {0} == {pages.push_failures_total}


def test_gauges_counters_and_units_are_opentelemetrys() -> None:
    """A counter is a cumulative sum that only rises, since the daemon's start; bytes and seconds have UCUM's units."""
    shown = snapshot()
    with listening() as (url, collector):
        pushed(Pages(newest=lambda: shown), url, collector)
    (scoped,) = collector.newest.scope_metrics
    metrics = {one.name: one for one in scoped.metrics}
    refused = metrics["kvdiag_connections_refused_total"].sum
    assert (2, True) == (refused.aggregation_temporality, refused.is_monotonic)  # CUMULATIVE
    assert 0 < refused.data_points[0].start_time_unix_nano <= refused.data_points[0].time_unix_nano
    assert "By" == metrics["kvdiag_gpu_memory_used_bytes"].unit
    assert metrics["kvdiag_gpu_memory_used_bytes"].HasField("gauge")
    assert "kvdiag" == scoped.scope.name


Counts = Mapping[str, tuple[float, str]]
"""The value of a counter by its process, and the id of that process."""


def starts_of(pushes: Iterable[Counts]) -> list[dict[str, float]]:
    """Since when each process' counter counts, by pushes at 160 s, 220 s and so on of a daemon that began at 100 s."""
    starts = Starts(100.0)
    began = []
    for number, counts in enumerate(pushes, start=1):
        made = CounterMetricFamily("kvdiag_torch_ooms", "Failed allocations.", labels=["process"])
        known = GaugeMetricFamily("kvdiag_process_info", "Process ids.", labels=["process", "pid"])
        for process, (value, pid) in counts.items():
            made.add_metric([process], value)
            known.add_metric([process, pid], 1.0)
        sent = {one.name: one for one in metrics_of([made, known], starts, 100.0 + 60.0 * number)}
        found = sent["kvdiag_torch_ooms_total"].data.data_points if counts else ()
        began.append({str((one.attributes or {})["process"]): one.start_time_unix_nano / 1e9 for one in found})
    return began


def test_a_counter_of_a_process_counts_since_it_was_first_observed() -> None:
    """What its value was then is from before, at a time that is not known: its first point has no duration."""
    assert [{"a": 160.0}, {"a": 160.0, "b": 220.0}] == starts_of(
        [{"a": (5.0, "7")}, {"a": (5.0, "7"), "b": (1.0, "8")}]
    )


@pytest.mark.parametrize(
    ("counts", "since"),
    [
        pytest.param([(5.0, "7"), (1.0, "7"), (2.0, "7")], [160.0, 160.001, 160.001], id="falls"),
        pytest.param([(5.0, "7"), (9.0, "8"), (9.0, "8")], [160.0, 160.001, 160.001], id="another process"),
        pytest.param([(5.0, "7"), (6.0, "7"), (1.0, "7")], [160.0, 160.0, 220.001], id="falls later"),
        pytest.param([(5.0, "7"), None, (1.0, "7"), (2.0, "7")], [160.0, 160.001, 160.001], id="falls while absent"),
        pytest.param([(4.0, "7"), (5.0, "7"), None, (9.0, "8")], [160.0, 160.0, 220.001], id="replaced while absent"),
        pytest.param([(5.0, "7"), None, (6.0, "7")], [160.0, 160.0], id="absent alone"),
    ],
)
def test_a_counter_that_was_reset_counts_since_the_last_push_that_had_it(
    counts: list[tuple[float, str] | None], since: list[float]
) -> None:
    """No two of its streams overlap, and one that was absent continues if nothing shows a reset."""
    began = starts_of([{} if one is None else {"a": one} for one in counts])
    assert since == [one["a"] for one in began if one]


def test_counters_that_stay_away_are_forgotten() -> None:
    """The newest are remembered."""
    first = [{f"{number}": (1.0, "7")} for number in range(MAX_ABSENT + 10)]
    began = starts_of([*first, first[0], first[-2]])
    assert (began[0]["0"] < began[-2]["0"], True) == (True, began[-1] == began[len(first) - 2])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("kvdiag_growth_low_bytes_per_second", "By/s"),
        ("kvdiag_fleet_growth_bytes_per_hour", "By/h"),
        ("kvdiag_kv_bytes_per_token", "1"),
        ("kvdiag_time_to_exhaustion_seconds", "s"),
        ("kvdiag_ticks_total", "1"),
    ],
)
def test_a_rate_has_the_unit_of_a_rate(name: str, unit: str) -> None:
    """By its name."""
    assert unit == unit_of(name)


@pytest.mark.parametrize(("port", "hints"), [(4317, True), (4318, False)])
def test_a_push_to_the_port_of_grpc_fails_with_a_hint(port: int, hints: bool) -> None:
    """It is accepted, since a collector may listen there for HTTP."""
    assert hints == ("4318 for HTTP" in failure("connection refused", f"http://collector:{port}/v1/metrics"))


def test_the_resource_is_named_by_the_semantic_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and instance; in Kubernetes pod, namespace and node; OpenTelemetry's own variables win."""
    alone = resource({}, "node-7", 9743).attributes
    assert ("kvdiag", "node-7", "node-7:9743") == tuple(
        alone[name] for name in ("service.name", "host.name", "service.instance.id")
    )
    assert not [name for name in alone if name.startswith("k8s.")]
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAMESPACE": "prod", "NODE_NAME": "gpu-1"}
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=east,service.name=mine")
    within = resource(pod, "vllm-0", 9743).attributes
    expected = {"k8s.pod.name": "vllm-0", "k8s.namespace.name": "prod", "k8s.node.name": "gpu-1"}
    expected |= {"k8s.cluster.name": "east", "service.name": "mine"}
    assert expected.items() <= within.items()


class Many:
    """Pages of a large fleet."""

    push_failures_total: int | None = None
    has_figures = True

    async def families(self) -> list[Metric]:
        """One family with more series than a request has."""
        made = GaugeMetricFamily("kvdiag_replica_status", "One of many.", labels=["pod"])
        for number in range(MAX_POINTS + 1):
            made.add_metric([f"vllm-{number}"], 1.0)
        return [made]


def test_a_push_of_many_series_is_several_requests() -> None:
    """Each is bounded, and together they are complete."""
    with listening() as (url, collector):
        pushed(Many(), url, collector, requests=2)
    first, second = (collector.series(one) for one in collector.requests[:2])
    assert (MAX_POINTS, MAX_POINTS + 1) == (max(len(first), len(second)), len({*first, *second}))


class Logged(threading.Thread):
    """What a process logs, read as it comes."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Read from now on."""
        super().__init__(daemon=True)
        self._lines = lines
        self.text = ""
        self.start()

    def run(self) -> None:
        """Keep all of it."""
        for line in self._lines:
            self.text += line

    def count(self, **parts: str) -> int:
        """Lines with these parts."""
        lines = (json.loads(line) for line in self.text.splitlines(keepends=True) if line.endswith("\n"))
        return sum(parts.items() <= one.items() for one in lines)


def test_a_collector_that_is_away_is_a_log_line_and_a_counter() -> None:
    """The daemon serves; once there is a collector it gets the metrics, and the credentials, which are not shown."""
    with refused_port() as port:
        pass
    address = f"127.0.0.1:{port}"
    options = ["--listen", "127.0.0.1:0", "--tick-seconds", "0.1", "--otlp-endpoint", f"http://me:s3cret@{address}"]
    with Drill(SCENARIOS["healthy"]) as drill, started("serve", "--url", drill.url, *options) as process:
        assert process.stderr is not None
        serving = Client(json.loads(process.stderr.readline())["address"])
        logged = Logged(process.stderr)

        def failures() -> float:
            page = page_series(serving.get("/metrics")[1])
            return page["kvdiag_otlp_push_failures_total", frozenset()]

        assert eventually(lambda: failures() >= 2.0)
        assert 200 == serving.get("/-/ready")[0]
        assert 1 == logged.count(event="otlp", level="warning", endpoint=f"http://{address}/v1/metrics")
        with listening(port) as (_, collector):
            assert eventually(lambda: logged.count(event="otlp", state="pushing again") == 1)
            assert eventually(lambda: names(page_series(serving.get("/metrics")[1])) == names(collector.series()))
            assert "kvdiag" == collector.resource()["service.name"]
            assert b"authorization: basic bwu6cznjcmv0" in collector.heads[-1].lower()
        process.terminate()
        assert 0 == process.wait(30)
        logged.join(10)
        assert "s3cret" not in logged.text


@contextlib.contextmanager
def serving(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A daemon that pushes once in a day, from its first line of log on."""
    with started("serve", "--listen", "127.0.0.1:0", "--tick-seconds", "0.1", *options) as process:
        assert process.stderr is not None
        process.stderr.readline()
        yield process


def ended(process: subprocess.Popen[str]) -> bool:
    """Whether it ends as it has to, and soon."""
    process.terminate()
    return process.wait(30) == 0


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push a day, which may take an hour."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "86400000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")


@pytest.mark.usefixtures("rarely")
def test_a_daemon_pushes_after_its_first_sample_and_at_its_end() -> None:
    """Both have what the server reports."""
    with (
        Drill(SCENARIOS["healthy"]) as drill,
        listening() as (url, collector),
        serving("--url", drill.url, "--otlp-endpoint", url) as process,
    ):
        assert eventually(lambda: len(collector.requests) == 1)
        assert ended(process)
    assert 2 == len(collector.requests)
    assert [True, True] == ["kvdiag_source_up" in names(collector.series(one)) for one in collector.requests]


ONE = [{"__name__": "vllm:num_requests_running", "namespace": "prod", "pod": "vllm-0", "instance": "10.0.0.1:8000"}]
LISTED = {
    path: reply(json.dumps({"status": "success", "data": data}).encode())
    for path, data in {
        "/api/v1/series": ONE,
        "/api/v1/query": {"resultType": "matrix", "result": []},
        "/api/v1/status/buildinfo": {},
    }.items()
}


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize(("answers", "failed"), [(LISTED, 0.0), (reply(b"{}"), 1.0)])
def test_a_fleets_daemon_pushes_after_its_first_round_and_at_its_end(answers: Any, failed: float) -> None:
    """Also after one that failed, which the figures say."""
    with (
        Hostile(answers) as prometheus,
        listening() as (url, collector),
        serving("--prometheus", prometheus.url, "--otlp-endpoint", url) as process,
    ):
        assert eventually(lambda: len(collector.requests) == 1)
        assert ended(process)
    first, last = (collector.series(one) for one in collector.requests)
    total = ("kvdiag_fleet_rounds_failed_total", frozenset[tuple[str, str]]())
    assert failed == first[total] <= last[total]
    assert (failed == 0) == ("kvdiag_fleet_round_timestamp_seconds" in names(first))


def never(peer: Peer) -> None:
    """Take the request, and answer nothing until the other side hangs up."""
    peer.connection.recv(1)


@pytest.mark.usefixtures("rarely")
def test_a_collector_that_does_not_answer_delays_no_exit() -> None:
    """Neither the first push, which is under way, nor the last one is waited for long."""
    with (
        Drill(SCENARIOS["healthy"]) as drill,
        Hostile({"/v1/metrics": never}) as collector,
        serving("--url", drill.url, "--otlp-endpoint", collector.url) as process,
    ):
        assert eventually(lambda: len(collector.requests) == 1)
        assert ended(process)


ADDRESSES = [
    "grpc://collector:4317",
    "http://",
    "http://me:s3cret@host:port",
    "http://collector:4318?key=s3cret",
    "http://collector:4318/v1/metrics?key=s3cret",
]


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """In one line, without what may be a secret."""
    message = refusal("serve", "--listen", "127.0.0.1:0", "--otlp-endpoint", url)
    assert "http://collector:4318" in message
    assert "s3cret" not in message


def test_an_interval_that_is_no_number_is_refused() -> None:
    """OpenTelemetry's own variable, in milliseconds."""
    with pytest.raises(KvdiagError, match="OTEL_METRIC_EXPORT_INTERVAL='1m'"):
        interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": "1m"})
    assert (60.0, 0.1) == (interval_seconds({}), interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": "1"}))


def test_without_opentelemetry_the_error_names_the_extra() -> None:
    """Where the import fails."""
    code = "import sys; sys.modules['opentelemetry'] = None; from kvdiag.commands import main; sys.exit(main())"
    options: Mapping[str, str] = {"--listen": "127.0.0.1:0", "--otlp-endpoint": "http://127.0.0.1:4318"}
    words = [word for pair in options.items() for word in pair]
    done = subprocess.run([sys.executable, "-c", code, "serve", *words], capture_output=True, text=True, check=False)
    assert 3 == done.returncode
    assert "pip install 'kvdiag[otlp]'" in done.stderr
