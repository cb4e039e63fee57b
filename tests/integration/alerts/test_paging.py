"""A leak pages a person: from a server's blocks through kvdiag, Prometheus and Alertmanager to a webhook, all real."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually, free_port
from tests.integration.alerts.paging import FASTER, chain, job, shorter, shorter_rules
from tests.integration.alerts.rules import FILES, FOLDER, alerts
from tests.integration.prometheus.alertmanager import alerting
from tests.unit.commands.serve.test_serve import daemon
from tests.unit.sim.client import Client

LEAK = "KvdiagLeakKvBlocks"


@pytest.mark.usefixtures("programs_are_here")
def test_a_leak_pages_and_a_restart_resolves_it(tmp_path: Path) -> None:
    """The page has the labels, the numbers and the runbook; its warning is kept back; a healthy server ends it."""
    port = free_port()
    with ExitStack() as leaking, ExitStack() as stack:
        drill = leaking.enter_context(Drill(SCENARIOS["kv-leak"], port=port))
        watched = stack.enter_context(daemon(drill.url))
        assert eventually(watched.says("ok"))
        scraped = job("kvdiag", watched.client.host, pod="vllm-0"), job("vllm", drill.url, pod="vllm-0")
        beside = stack.enter_context(chain(tmp_path, *scraped))
        assert eventually(
            lambda: beside.value("count_over_time(engine:kvdiag_kv_held_at_idle:ratio[1m]) > 2") is not None
        )
        # A counter's rate begins with its second sample: vLLM's have been scraped before the first request.
        assert eventually(lambda: beside.value("count_over_time(vllm:prompt_tokens_total[1m]) > 1") is not None)
        assert beside.value(f'count(ALERTS{{alertname="{LEAK}"}})') is None

        # Requests leave blocks behind: on-call is paged, the warning of the same leak is inhibited.
        for _ in range(4):
            Client(drill.url).complete(64, 8)
        assert eventually(lambda: bool(beside.pager.alerts("page", "firing", LEAK)))
        page = beside.pager.alerts("page", "firing", LEAK)[0]
        expected = {"alertname": LEAK, "severity": "critical", "id": "leak.kv_blocks", "job": "kvdiag", "pod": "vllm-0"}
        assert expected.items() <= page["labels"].items()
        assert watched.client.host == page["labels"]["instance"]
        assert re.search(r"0\.\d+%.*\dm \d+s;", page["annotations"]["description"])
        model = beside.label("last_over_time(kvdiag_server_info[1m])", "model_name")
        assert page["annotations"]["summary"].startswith(f"llm/vllm-0 ({model}): leak.kv_blocks, 0.")
        with urlopen(page["annotations"]["runbook_url"]) as answer:
            assert answer.read().startswith(b"# leak.kv_blocks: ")
        assert f"http://{watched.client.host}/" == page["annotations"]["dashboard_url"]
        assert eventually(lambda: beside.inhibited(LEAK, "warning"))

        # vLLM's own metrics have passed through the recording rules.
        assert eventually(lambda: (beside.value("engine:prompt_tokens:rate5m") or 0.0) > 0.0)

        # A healthy server takes its place: the page is resolved, and there never was a ticket.
        leaking.close()
        stack.enter_context(Drill(SCENARIOS["healthy"], port=port))
        assert eventually(lambda: bool(beside.pager.alerts("page", "resolved", LEAK)))
        assert [] == beside.pager.alerts("ticket", "firing", LEAK)


@pytest.mark.usefixtures("programs_are_here")
def test_a_server_that_is_down_is_one_page(tmp_path: Path) -> None:
    """Of one server the alert about its sources is inhibited; another server's reaches the tickets."""
    labels = {"namespace": "llm", "job": "kvdiag", "pod": "vllm-0", "instance": "vllm-0:9743"}
    down = {**labels, "alertname": "KvdiagServerDown", "severity": "critical"}
    source = {**labels, "alertname": "KvdiagSourceDown", "severity": "warning", "source": "nvml"}
    other = {**source, "pod": "vllm-1", "instance": "vllm-1:9743"}
    assert_inhibited(tmp_path, [source], left=[down, other])


@pytest.mark.usefixtures("programs_are_here")
def test_a_version_and_a_servers_own_page_inhibit_those_of_replicas(tmp_path: Path) -> None:
    """Those of the same verdict on the same version or pod; none of another engine, cluster or fleet's kvdiag."""
    version = {"engine": "vllm", "model_name": "llama", "version": "0.12.0"}
    leak = {**version, "id": "leak.device_torch", "severity": "critical"}
    fleet = {**leak, "alertname": "KvdiagFleetVersion", "namespace": "monitoring", "pod": "fleet-0"}
    replica = {**leak, "alertname": "KvdiagFleetReplica", "namespace": "llm", "pod": "vllm-0"}
    alone = {**replica, "version": "0.11.0", "pod": "vllm-1"}
    own = {"alertname": "KvdiagLeakDeviceTorch", "severity": "critical", "namespace": "llm", "id": "leak.device_torch"}
    inhibited = [
        {**fleet, "severity": "warning", "status": "suspect"},
        replica,
        {**replica, "severity": "warning"},
        {**alone, "severity": "warning"},
        {**alone, "pod": "vllm-2"},
    ]
    left = [
        fleet,
        {**fleet, "severity": "warning", "model_name": "qwen"},
        alone,
        {**own, "pod": "vllm-2"},
        {**alone, "pod": "vllm-2", "id": "leak.host"},
        {**replica, "instance": "fleet-1:9743"},
        {**replica, "engine": "sglang"},
        {**alone, "pod": "vllm-2", "cluster": "west"},
        {**alone, "pod": "vllm-2", "cluster": "west", "severity": "warning", "id": "leak.host"},
    ]
    assert_inhibited(tmp_path, inhibited, left=left)


def assert_inhibited(folder: Path, inhibited: list[dict[str, str]], *, left: list[dict[str, str]]) -> None:
    """The example for Alertmanager inhibits these of all alerts that fire."""
    with alerting(folder, (FOLDER / "alertmanager.example.yaml").read_text(encoding="utf-8")) as url:
        body = json.dumps([{"labels": one} for one in (*inhibited, *left)]).encode()
        urlopen(Request(f"{url}/api/v2/alerts", body, {"Content-Type": "application/json"})).close()

        def states() -> dict[str, list[dict[str, str]]]:
            found: dict[str, list[dict[str, str]]] = {"suppressed": [], "active": []}
            with urlopen(f"{url}/api/v2/alerts") as answer:
                for one in json.load(answer):
                    found["suppressed" if one["status"]["inhibitedBy"] else "active"].append(one["labels"])
            return {state: sorted(alerts, key=str) for state, alerts in found.items()}

        expected = {
            "suppressed": sorted(map(ordered, inhibited), key=str),
            "active": sorted(map(ordered, left), key=str),
        }
        assert eventually(lambda: states() == expected), states()


def ordered(labels: dict[str, str]) -> dict[str, str]:
    """In the order in which Alertmanager has them."""
    return dict(sorted(labels.items()))


def test_only_durations_are_shorter() -> None:
    """What is tried here is what is shipped: put back as long as they were, the durations make the same text."""
    waits = [rule[name] for rule in alerts() for name in ("for", "keep_firing_for") if name in rule]
    changed = [
        (before, after)
        for file in FILES
        for before, after in zip(
            file.read_text().splitlines(), shorter_rules(file.read_text()).splitlines(), strict=True
        )
        if before != after
    ]
    assert len(waits) == len(changed)
    assert all(before.split(":")[0].strip() in ("for", "keep_firing_for") for before, _ in changed)
    assert f"{round(600_000 / FASTER)}ms" == shorter("10m")
