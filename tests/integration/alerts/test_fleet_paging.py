"""A version that leaks is one page, however many replicas it has: a fleet's daemon, Prometheus and Alertmanager."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.hostile import eventually
from tests.integration.alerts.paging import Pager, chain, job
from tests.integration.prometheus.crowded_fleet import until
from tests.integration.prometheus.histories import END_SECONDS, FACTS, exporter, on, server, watched
from tests.integration.prometheus.openmetrics import dcgm, line, vllm
from tests.integration.prometheus.server import serving, write_history
from tests.integration.prometheus.test_fleet_daemon import daemon

HOURS = 7.0
REPLICAS = 8
FAST, SLOW = 7000.0, 2000.0
"""MB in an hour: exhausts a GPU in under two hours, in a day."""

DAY_SECONDS = 86_400.0
EITHER = "leak.device_torch or leak.device_non_torch"


def replicas(model: str, version: str, rates: list[float]) -> Iterator[str]:
    """One for each rate of growth, started three days ago."""
    for number, rate in enumerate(rates):
        pod = f"{model}-{version.replace('.', '-')}-{number}"
        timeline = on(watched(hours=HOURS, leak_mb_per_hour=rate), f"GPU-{pod}")
        own = server("prod", pod, container="vllm")
        state = {"job": "kube-state-metrics", "instance": "10.9.9.9:8080", "namespace": "prod", "pod": pod}
        image = {**state, "container": "vllm", "image": f"vllm/vllm-openai:v{version}"}
        yield from vllm(timeline, replace(FACTS, model=model), own)
        yield from dcgm(timeline, exporter("prod", pod, node=f"node-{pod}"))
        for sample in timeline.samples:
            yield line("process_start_time_seconds", own, END_SECONDS - 3 * DAY_SECONDS, sample.at_seconds)
            yield line("kube_pod_container_info", image, 1, sample.at_seconds)


def fleet() -> Iterator[str]:
    """A new version that leaks, by the one before; a model's only version that leaks; and replicas that leak alone."""
    yield from replicas("llama", "0.12.0", [FAST] * REPLICAS)
    yield from replicas("llama", "0.11.0", [0.0] * REPLICAS + [FAST, SLOW])
    yield from replicas("qwen", "0.12.0", [FAST] * REPLICAS)


@pytest.mark.long
@pytest.mark.usefixtures("programs_are_here")
def test_a_version_that_leaks_is_one_page(tmp_path: Path) -> None:
    """A fault of the version, or a suspect whose replicas run out of memory; a replica that leaks alone is its own."""
    write_history(until(float(int(time.time())), fleet()), tmp_path / "history")
    with serving(tmp_path / "history") as history, daemon(history) as watching:
        assert eventually(watching.whole(3 * REPLICAS + 2))
        scraped = job("kvdiag-fleet", watching.client.host, pod="kvdiag-fleet-0", honor_labels=True)
        with chain(tmp_path, scraped) as beside:
            # The last one to fire waits for an hour: the ticket for the suspect, which its page inhibits.
            assert eventually(lambda: beside.inhibited("KvdiagFleetVersion", "warning"))
            pages = {
                ("KvdiagFleetVersion", "llama", "0.12.0", "kvdiag-fleet-0"),
                ("KvdiagFleetVersion", "qwen", "0.12.0", "kvdiag-fleet-0"),
                ("KvdiagFleetReplica", "llama", "0.11.0", f"llama-0-11-0-{REPLICAS}"),
            }
            assert eventually(lambda: notified(beside.pager, "page") >= pages)
            tickets = {("KvdiagFleetReplica", "llama", "0.11.0", f"llama-0-11-0-{REPLICAS + 1}")}
            assert eventually(lambda: notified(beside.pager, "ticket") >= tickets)
            assert (pages, tickets) == (notified(beside.pager, "page"), notified(beside.pager, "ticket"))
            assert {1} == {len(message) for message in beside.pager.messages("page")}
            # No agent separates the two verdicts, and no page says that it does.
            texts = [
                one["annotations"]["summary"]
                for path in beside.pager.told.values()
                for message in path
                for one in message["alerts"]
                if "version" in one["labels"]
            ]
            assert [] == [text for text in texts if EITHER not in text]


def notified(pager: Pager, path: str) -> set[tuple[str, ...]]:
    """Every alert of a fleet's verdicts that a webhook received, by its name, model, version and pod."""
    names = ("alertname", "model_name", "version", "pod")
    alerts = [labels for message in pager.messages(path) for labels in message if "version" in labels]
    return {tuple(labels[name] for name in names) for labels in alerts}
