"""Which GPUs of a Prometheus' history are a server's own for certain, and not by its host alone."""

from __future__ import annotations

import pytest

from kvdiag.feeds.history.series_join import gpus_assigned, join
from kvdiag.sources.prometheus_answers import Labels

POD = {"namespace": "ml", "pod": "llm-0"}


def series(name: str, **labels: str) -> Labels:
    """One series' labels, as the client orders them."""
    return tuple(sorted({"__name__": name, **labels}.items()))


ENGINE = series("vllm:num_requests_running", instance="10.0.0.5:8000", node="n1", **POD)
BY_POD = series(
    "DCGM_FI_DEV_FB_USED",
    instance="10.0.0.9:9400",
    UUID="GPU-a",
    gpu="0",
    exported_namespace="ml",
    exported_pod="llm-0",
)
BY_HOST = series("DCGM_FI_DEV_FB_USED", instance="10.0.0.5:9400", UUID="GPU-b", gpu="1")


@pytest.mark.parametrize(
    ("gpus", "certain"),
    [((BY_POD,), True), ((BY_HOST,), False), ((), False)],
    ids=["named by its exporter", "on the same host", "none"],
)
def test_gpus_are_the_servers_own_where_its_pod_is_named(gpus: tuple[Labels, ...], certain: bool) -> None:
    """An exporter that names the pod says whose the GPU is; the same host may have idle GPUs beside it."""
    replicas, _ = join([ENGINE, *gpus], gpus)
    (server,) = [one for one in replicas if one.key.startswith("pod ")]
    assert certain is gpus_assigned(server)
