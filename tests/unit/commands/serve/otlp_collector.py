"""A receiver of OTLP over HTTP that decodes what it gets."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.fixtures.hostile import Hostile, Peer, reply

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Collector:
    """Keeps each request, decoded, and the head it came with."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.requests: list[ExportMetricsServiceRequest] = []
        self.heads: list[bytes] = []

    def __call__(self, peer: Peer) -> None:
        """Decode, keep, and accept."""
        packed = b"content-encoding: gzip" in peer.request_head.lower()
        self.heads.append(peer.request_head)
        body = gzip.decompress(peer.request_body) if packed else peer.request_body
        self.requests.append(ExportMetricsServiceRequest.FromString(body))
        reply(b"", content_type="application/x-protobuf")(peer)

    @property
    def newest(self) -> Any:
        """The newest request's only resource."""
        (found,) = self.requests[-1].resource_metrics
        return found

    def series(self, request: ExportMetricsServiceRequest | None = None) -> Series:
        """The points of a request, as series."""
        (scoped,) = (self.requests[-1] if request is None else request).resource_metrics[0].scope_metrics
        return {
            (metric.name, frozenset((one.key, one.value.string_value) for one in point.attributes)): point.as_double
            for metric in scoped.metrics
            for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points
        }

    def resource(self) -> dict[str, str]:
        """What the newest request says it is of."""
        return {one.key: one.value.string_value for one in self.newest.resource.attributes}


@contextmanager
def listening(port: int = 0) -> Iterator[tuple[str, Collector]]:
    """A collector, and its address."""
    collector = Collector()
    with Hostile({"/v1/metrics": collector}, port=port) as server:
        yield server.url, collector
