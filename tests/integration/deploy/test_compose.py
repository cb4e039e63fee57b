"""The compose file: services that find one another, images that are pinned, ports on loopback, files that exist."""

import re
from typing import Any

import pytest

import kvdiag
from kvdiag.commands.options.serve_options import LISTEN
from tests.fixtures.require import require
from tests.integration.deploy.manifests import DEPLOY, ROOT, documents, option

COMPOSE: Any = documents("compose/compose.yaml")[0]
SERVICES: Any = COMPOSE["services"]
PROMETHEUS: Any = documents("compose/prometheus.yaml")[0]
PORT = LISTEN.rpartition(":")[2]


def mounts(service: str) -> dict[str, str]:
    """What is mounted where, by its place in the container."""
    split = [volume.split(":") for volume in SERVICES[service].get("volumes", ())]
    return {parts[1]: parts[0] for parts in split}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_pinned(service: str) -> None:
    """By a version: never the newest of the day."""
    tag = SERVICES[service]["image"].partition(":")[2]
    assert re.fullmatch(r"v?\d+\.\d+(\.\d+)?", tag)
    if SERVICES[service]["image"].startswith("kvdiag:"):
        assert kvdiag.__version__ == tag


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_on_loopback(service: str) -> None:
    """Nothing is open to the network: there is no password on most of it."""
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[service].get("ports", ()))


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_exists(service: str) -> None:
    """A file that is missing would be mounted as an empty folder; a volume has to be declared."""
    for source in mounts(service).values():
        if source.startswith("."):
            path = (DEPLOY / "compose" / source).resolve()
            require(path.exists() or path.is_relative_to(DEPLOY), str(path.relative_to(ROOT)))
            assert path.exists()
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("service", SERVICES)
def test_what_it_depends_on_is_a_service(service: str) -> None:
    """Services that are waited for, or whose network is shared, exist."""
    told = SERVICES[service]
    shared = told.get("network_mode", "").partition("service:")[2]
    assert {*told.get("depends_on", ()), *([shared] if shared else [])} <= set(SERVICES)


def test_kvdiag_is_beside_the_server() -> None:
    """They share a network that neither owns; what is reached from outside is published by its owner."""
    vllm, sidecar, pod = SERVICES["vllm"], SERVICES["kvdiag"], SERVICES["pod"]
    assert "service:pod" == vllm["network_mode"] == sidecar["network_mode"]
    assert f"0.0.0.0:{PORT}" == option(sidecar["command"], "listen")
    assert f"http://127.0.0.1:{option(vllm['command'], 'port')}" == option(sidecar["command"], "url")
    assert {f"127.0.0.1:{port}:{port}" for port in (PORT, option(vllm["command"], "port"))} == set(pod["ports"])


def test_the_agent_is_shared() -> None:
    """What one container installs the server runs, and what the server publishes kvdiag reads."""
    env = SERVICES["vllm"]["environment"]
    assert mounts("kvdiag-agent")[SERVICES["kvdiag-agent"]["command"][-1]] == mounts("vllm")[env["PYTHONPATH"]]
    published = option(SERVICES["kvdiag"]["command"], "agent-dir")
    assert published == env["KVDIAG_AGENT_DIR"]
    assert mounts("kvdiag")[published] == mounts("vllm")[published]
    assert f"{published}:ro" in [volume.partition(":")[2] for volume in SERVICES["kvdiag"]["volumes"]]
    # The set-group-id bit hands the folder's group, which is kvdiag's, to the files in it.
    assert "mode=2770,uid=0,gid=65532" in COMPOSE["volumes"]["published"]["driver_opts"]["o"]


def test_what_is_recorded_stays() -> None:
    """It is on a volume, at a place that the image gives to its user."""
    folder = option(SERVICES["kvdiag"]["command"], "record-dir")
    assert "records" == mounts("kvdiag")[folder]
    assert re.search(rf"--owner=65532 .*{folder}\b", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))


def test_kvdiag_may_do_nothing() -> None:
    """As in a cluster: nothing to write, nothing to escalate to, NVML and no more of the GPU."""
    sidecar = SERVICES["kvdiag"]
    assert sidecar["read_only"]
    assert ["ALL"] == sidecar["cap_drop"]
    assert ["no-new-privileges:true"] == sidecar["security_opt"]
    [device] = sidecar["deploy"]["resources"]["reservations"]["devices"]
    assert ["utility"] == device["capabilities"]


def test_prometheus_finds_everything() -> None:
    """Its targets are services at ports that they have, its rule files are mounted where it looks."""
    targets = {
        target for job in PROMETHEUS["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    }
    assert {f"pod:{PORT}", "pod:8000", "localhost:9090"} == targets
    labels = [job["static_configs"][0].get("labels") for job in PROMETHEUS["scrape_configs"]]
    assert [{"namespace": "compose", "pod": "vllm"}] * 2 == labels[:2]
    assert ["/etc/prometheus/rules/*.yaml"] == PROMETHEUS["rule_files"]
    rules = [place for place in mounts("prometheus") if place.startswith("/etc/prometheus/rules/")]
    assert 2 == len([place for place in rules if place.endswith(".yaml")])
    [alertmanager] = PROMETHEUS["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert alertmanager.partition(":")[0] in SERVICES
    assert "127.0.0.1:9093:9093" in SERVICES["alertmanager"]["ports"]


def test_grafana_is_provisioned() -> None:
    """The data source is the Prometheus of the file, and dashboards are read from where they are mounted."""
    [source] = documents("compose/grafana/datasource.yaml")[0]["datasources"]
    [provider] = documents("compose/grafana/dashboards.yaml")[0]["providers"]
    assert "http://prometheus:9090" == source["url"]
    assert PROMETHEUS["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
    assert "../../dashboards" == mounts("grafana")[provider["options"]["path"]]
    assert {"datasources", "dashboards"} == {
        place.split("/")[-2] for place in mounts("grafana") if "/provisioning/" in place
    }
