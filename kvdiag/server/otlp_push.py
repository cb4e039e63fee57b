"""Pushes the daemon's metrics to an OpenTelemetry collector: the families of /metrics, and no second list of them.

Every `OTEL_METRIC_EXPORT_INTERVAL` (a minute) the families of that moment are encoded and sent by the SDK's exporter,
over HTTP, in requests of a bounded number of points; it retries until its timeout. The first push follows the first
round, the last one SIGTERM. That is done in another thread, one push at a time, so that a slow collector delays nothing
but the next push. A push that fails is counted, and logged once until one succeeds; its figures are not kept, because
the next push has newer ones. A gauge stays a gauge and a counter
becomes a cumulative sum, which starts again where it was reset (`Starts`); names and labels are those of /metrics. The
resource says which kvdiag it is, by the semantic conventions; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` add to
it and win.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import structlog
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

import kvdiag
from kvdiag.errors import KvdiagError

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import export as points
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError as problem:
    raise KvdiagError("--otlp-endpoint needs an optional dependency: pip install 'kvdiag[otlp]'") from problem

_log = structlog.get_logger()

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_MILLISECONDS = 60_000
MIN_INTERVAL_SECONDS = 0.1

LAST_PUSH_SECONDS = 5.0
"""For the push at SIGTERM, and one that is under way then; Kubernetes kills after 30 s."""

MAX_POINTS = 5_000
"""Of one request: about 1 MiB, far below what a collector takes."""

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

UNITS = {"bytes": "By", "seconds": "s", "ratio": "1", "tokens": "{token}", "blocks": "{block}"}
"""By the end of a metric's name, without `_total`, in UCUM's terms."""

RATES = {"second": "s", "hour": "h"}
"""By what follows `_per_` in it."""

GRPC_PORT = 4317

PROCESSES = "kvdiag_process_info"
"""The family that has the id of each process."""

AFTER_SECONDS = 0.001
"""From the last push that had a counter to its reset: two streams with one start would be one."""

MAX_ABSENT = 1_000
"""Counters that are remembered while no push has them."""


Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name, and labels in the order of their names."""


class Pushed(Protocol):
    """The pages whose metrics are pushed, and which count what fails."""

    push_failures_total: int | None

    @property
    def has_figures(self) -> bool:
        """Whether a first round is over: before that nothing is known."""

    async def families(self) -> list[Metric]:
        """The families of /metrics as of now."""


@dataclass(frozen=True, kw_only=True)
class OtlpEndpoint:
    """Where to push: the collector's full address without credentials, and the headers that have them."""

    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


class _Reason(logging.Handler):
    """Keeps the newest message of the SDK, which says why a push failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.text = record.getMessage()


class OtlpPush:
    """One collector, to which `run` pushes until it is cancelled."""

    def __init__(self, pages: Pushed, endpoint: OtlpEndpoint, port: int) -> None:
        """Connect to nothing yet. `port` is the daemon's own, which distinguishes the daemons of one host.

        Raises:
            KvdiagError: the interval in the environment is no number.
        """
        self._pages = pages
        pages.push_failures_total = 0
        self._every_seconds = interval_seconds(os.environ)
        self._exporter = OTLPMetricExporter(
            endpoint=endpoint.url, headers=dict(endpoint.headers), max_export_batch_size=MAX_POINTS
        )
        self._endpoint = endpoint.url
        self._resource = resource(os.environ, socket.gethostname(), port)
        self._starts = Starts(time.time())
        self._failed = False
        # The SDK logs each attempt; here one line says when pushes begin to fail.
        self._reason = _Reason()
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(self._reason)
        sdk.propagate = False

    async def run(self, over: asyncio.Event) -> None:
        """Push at each interval after the first round, and once more when it is `over`."""
        while not self._pages.has_figures:
            if await _set_within(over, MIN_INTERVAL_SECONDS):
                return
        is_last = False
        while not is_last:
            is_last, began = over.is_set(), time.monotonic()
            self._reason.text = ""
            try:
                families = await self._pages.families()
                succeeded = await asyncio.to_thread(self._push, families)
            except Exception as error:  # noqa: BLE001 - no error of a push ends the daemon
                succeeded, self._reason.text = False, f"{type(error).__name__}: {error}"
            self._note(succeeded=succeeded)
            if not is_last:
                await _set_within(over, max(self._every_seconds - (time.monotonic() - began), MIN_INTERVAL_SECONDS))

    async def finish(self, pushing: asyncio.Task[None]) -> None:
        """Wait for the last push of `run`, for a bounded time: a collector that does not answer must not delay exit."""
        await asyncio.wait((pushing,), timeout=LAST_PUSH_SECONDS)
        pushing.cancel()
        self.close()

    def close(self) -> None:
        """Give up a push that is being retried."""
        self._exporter.shutdown()

    def _push(self, families: Iterable[Metric]) -> bool:
        scope = InstrumentationScope("kvdiag", kvdiag.__version__)
        made = metrics_of(families, self._starts, time.time())
        scoped = points.ScopeMetrics(scope=scope, metrics=made, schema_url="")
        whole = points.ResourceMetrics(resource=self._resource, scope_metrics=[scoped], schema_url="")
        sent = self._exporter.export(points.MetricsData(resource_metrics=[whole]))
        return sent is points.MetricExportResult.SUCCESS

    def _note(self, *, succeeded: bool) -> None:
        if not succeeded:
            self._pages.push_failures_total = (self._pages.push_failures_total or 0) + 1
        if succeeded == self._failed:
            self._failed = not succeeded
            if succeeded:
                _log.info("otlp", endpoint=self._endpoint, state="pushing again")
            else:
                reason = failure(self._reason.text or "refused", self._endpoint)
                _log.warning("otlp", endpoint=self._endpoint, reason=reason)


async def _set_within(over: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set, after so many seconds at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
    return over.is_set()


def failure(reason: str, endpoint: str) -> str:
    """Why pushes fail, with what may be wrong with the address."""
    of_grpc = urlsplit(endpoint).port == GRPC_PORT
    hint = f"; port {GRPC_PORT} is usually for gRPC, and 4318 for HTTP, which kvdiag uses"
    return reason + (hint if of_grpc else "")


class _Counted(NamedTuple):
    """A counter at the last push that had it."""

    start_seconds: float
    value: float
    at_seconds: float
    pid: str | None


class Starts:
    """Since when each counter counts, as OpenTelemetry's data model has it.

    kvdiag's own count since the daemon's start. Those of the server's processes are passed on. When these began is not
    known: they count since they were first observed, which says that their value then is from before. Where one has
    fallen, or its process is another one, it was reset at some time after the last push that had it, and counts since
    then. It may be absent in between, while the server restarts.
    """

    def __init__(self, began_seconds: float) -> None:
        """Know of no counter yet."""
        self._began_seconds = began_seconds
        self._known: dict[Series, _Counted] = {}

    def of(self, counters: Mapping[Series, float], now_seconds: float, pids: Mapping[str, str]) -> dict[Series, float]:
        """The start of each counter of one push; `pids` has the process id of each value of the label `process`."""
        for series, value in counters.items():
            process = dict(series[1]).get("process")
            pid = None if process is None else pids.get(process)
            start_seconds = self._began_seconds if process is None else now_seconds
            # The newest is moved to the end.
            if (last := self._known.pop(series, None)) is not None:
                replaced = None not in (pid, last.pid) and pid != last.pid
                reset = value < last.value or replaced
                start_seconds = last.at_seconds + AFTER_SECONDS if reset else last.start_seconds
                pid = pid or last.pid
            self._known[series] = _Counted(start_seconds, value, now_seconds, pid)
        for series in list(self._known)[: max(len(self._known) - len(counters) - MAX_ABSENT, 0)]:
            del self._known[series]
        return {series: self._known[series].start_seconds for series in counters}


def metrics_of(families: Iterable[Metric], starts: Starts, now_seconds: float) -> list[points.Metric]:
    """The families in OpenTelemetry's terms; one without series is left out."""
    families = list(families)
    counters = (sample for family in families if family.type == "counter" for sample in family.samples)
    processes = (sample.labels for family in families if family.name == PROCESSES for sample in family.samples)
    pids = {labels["process"]: labels["pid"] for labels in processes}
    began = starts.of({_series(sample): sample.value for sample in counters}, now_seconds, pids)
    made = []
    for family in families:
        samples = [
            points.NumberDataPoint(
                attributes=sample.labels,
                start_time_unix_nano=round(began.get(_series(sample), 0.0) * 1e9),
                time_unix_nano=round(now_seconds * 1e9),
                value=sample.value,
            )
            for sample in family.samples
        ]
        if not samples:
            continue
        data: points.Gauge | points.Sum = points.Gauge(data_points=samples)
        if family.type == "counter":
            data = points.Sum(
                data_points=samples,
                aggregation_temporality=points.AggregationTemporality.CUMULATIVE,
                is_monotonic=True,
            )
        name = family.samples[0].name
        made.append(points.Metric(name=name, description=family.documentation, unit=unit_of(name), data=data))
    return made


def _series(sample: Sample) -> Series:
    return sample.name, tuple(sorted(sample.labels.items()))


def unit_of(name: str) -> str:
    """The unit of a metric by its name, as in `growth_bytes_per_second`."""
    whole, _, rate = name.removesuffix("_total").partition("_per_")
    unit = UNITS.get(whole.rpartition("_")[2], "1")
    return f"{unit}/{RATES[rate]}" if rate in RATES else "1" if rate else unit


def resource(environment: Mapping[str, str], host: str, port: int) -> Resource:
    """What pushes, by the semantic conventions; what OpenTelemetry's variables say wins."""
    known = {
        "service.name": "kvdiag",
        "service.version": kvdiag.__version__,
        "service.instance.id": f"{host}:{port}",
        "host.name": host,
    }
    if "KUBERNETES_SERVICE_HOST" in environment:
        # A pod is named as its host is, except in the host's network.
        known["k8s.pod.name"] = environment.get("POD_NAME", host)
        namespace = environment.get("POD_NAMESPACE") or _namespace()
        known |= {"k8s.namespace.name": namespace} if namespace else {}
        known |= {"k8s.node.name": environment["NODE_NAME"]} if environment.get("NODE_NAME") else {}
    return Resource(known).merge(OTELResourceDetector().detect())


def _namespace() -> str | None:
    try:
        return NAMESPACE_FILE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def interval_seconds(environment: Mapping[str, str]) -> float:
    """The time between two pushes, as the SDK's own variable has it.

    Raises:
        KvdiagError: it is no number of milliseconds.
    """
    given = environment.get(INTERVAL, "").strip() or str(INTERVAL_MILLISECONDS)
    if not given.isascii() or not given.isdecimal() or not 0 < int(given) < 10**9:
        raise KvdiagError(f"{INTERVAL}={given[:40]!r} is not a number of milliseconds: give one such as 60000")
    return max(int(given) / 1000.0, MIN_INTERVAL_SECONDS)
