"""The Helm chart: what a real helm makes of it is valid, hardened, and says what its sources say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import kvdiag
from kvdiag.alert_files import rules, with_links
from kvdiag.commands import cli, serve
from tests.integration.deploy.chart import helm, readme, rendered
from tests.integration.deploy.manifests import CHART, NODE_VIEW, ROOT, Manifest
from tests.integration.deploy.test_operators import SCHEMAS, problems
from tests.integration.deploy.test_pods import problem

VALUES = sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").iterdir())
KUBERNETES = ("1.29", "1.33", "1.37")
"""From the oldest that the chart takes to the newest that the validator knows."""


def kind(found: list[Manifest], name: str) -> Any:
    """The only object of a kind."""
    [one] = [one for one in found if one["kind"] == name]
    return one["data"] if name == "ConfigMap" else one["spec"]


@pytest.mark.parametrize("values", VALUES)
def test_helm_finds_no_fault(values: str) -> None:
    """Warnings are faults."""
    done = helm("lint", "--strict", "--quiet", CHART, f"--values={CHART}/ci/{values}-values.yaml")
    assert (0, "") == (done.returncode, done.stdout.strip())


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", VALUES)
def test_every_object_is_valid(values: str, version: str) -> None:
    """Kubernetes takes its own objects, the Prometheus operator those of its definitions."""
    for found in rendered(values, f"--kube-version={version}"):
        if (SCHEMAS / f"{found['kind'].lower()}.json").exists():
            assert [] == problems(found["kind"].lower(), found)
        else:
            assert problem(found, version) is None


@pytest.mark.parametrize(
    "value",
    [
        'image.tag="latest"',
        'image.digest="sha256:1"',
        'fullnameOverride="gpu-memory"',
        'links.runbookBase="wiki.example"',
        'monitors.node="Annotations"',
        "node.networkPolicy.from=[]",
        'fleet.prometheus="prometheus:9090"',
        'fleet.window="a day"',
        'monitors.fleet="Annotations"',
        "nodes.enabled=false",
    ],
)
def test_a_wrong_value_is_refused(value: str) -> None:
    """By its name: a typing error, and what would silence an alert or open the port."""
    done = helm("template", CHART, f"--set-json={value}")
    assert 1 == done.returncode
    assert value.partition("=")[0].partition(".")[0] in done.stderr


def test_nothing_is_installed_that_is_turned_off() -> None:
    """Each part has its switch."""
    assert [] == rendered("nothing")


def test_default_values_make_this_text(golden: Callable[[str, str], None]) -> None:
    """Without rules and boards, which have sources of their own; the tests of pods look at this DaemonSet."""
    off = [f"--set={part}.enabled=false" for part in ("alerts", "dashboards")]
    golden(f"deploy/{NODE_VIEW.name}", helm("template", "kvdiag", CHART, "--namespace=kvdiag", *off).stdout)


def test_the_notes_say_what_to_look_at(golden: Callable[[str, str], None]) -> None:
    """After the installation."""
    done = helm("install", "kvdiag", CHART, "--namespace=kvdiag", "--dry-run=client")
    golden("deploy/notes.txt", done.stdout[done.stdout.index("NOTES:") :])


def test_the_notes_of_a_fleet_alone_name_what_it_has() -> None:
    """Its own metric and policy, not those of the node view."""
    off = ("--set=node.enabled=false", "--set=monitors.sidecars=false", "--set=fleet.prometheus=http://prometheus:9090")
    notes = helm("install", "kvdiag", CHART, "--dry-run=client", *off).stdout.partition("NOTES:")[2]
    assert "kvdiag_fleet_replicas" in notes
    assert "fleet.networkPolicy.from" in notes
    assert "kvdiag_source_up" not in notes


@pytest.mark.parametrize("values", ["default", "service-monitor"])
def test_the_rules_are_those_that_kvdiag_prints(values: str) -> None:
    """With links as `kvdiag alerts` makes them."""
    links = yaml.safe_load((CHART / "ci" / f"{values}-values.yaml").read_text()).get("links", {})
    expected = with_links(rules(operator=True), links.get("runbookBase"), links.get("dashboardBase"))
    assert yaml.safe_load(expected)["spec"] == kind(rendered(values), "PrometheusRule")


@pytest.mark.parametrize("board", sorted((ROOT / "dashboards").glob("*.json")), ids=lambda path: str(path.name))
def test_a_board_is_the_generated_one(board: Any) -> None:
    """In a ConfigMap of its own, with the label that Grafana's sidecar looks for."""
    [found] = [one for one in rendered() if board.name in one.get("data", {})]
    assert "1" == found["metadata"]["labels"]["grafana_dashboard"]
    assert {board.name: board.read_text(encoding="utf-8").strip()} == found["data"]


def test_a_service_monitor_finds_the_pods() -> None:
    """Through a Service with the port that it asks for."""
    found = rendered("service-monitor")
    pods, monitor, service = (kind(found, name) for name in ("DaemonSet", "ServiceMonitor", "Service"))
    assert pods["selector"]["matchLabels"] == monitor["selector"]["matchLabels"] == service["selector"]
    assert [one["port"] for one in monitor["endpoints"]] == [one["name"] for one in service["ports"]]


def test_the_fleets_pod_is_hardened_as_the_nodes_are() -> None:
    """The restricted profile, no token, a read-only root, and the image pinned by its digest."""
    node = kind(rendered(), "DaemonSet")["template"]["spec"]
    fleet = kind(rendered("fleet"), "Deployment")["template"]["spec"]
    [container], [other] = fleet["containers"], node["containers"]
    for part in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert node[part] == fleet[part]
    assert other["securityContext"] == container["securityContext"]
    assert container["image"].endswith(f"@sha256:{'5' * 64}")
    assert {"requests", "limits"} == set(container["resources"])


@pytest.mark.parametrize("values", ["fleet", "fleet-without-volume"])
def test_kvdiag_takes_the_fleets_arguments(values: str) -> None:
    """As they stand in the pod: its state goes to the volume, and secrets are read from the mounted files."""
    spec = kind(rendered(values), "Deployment")["template"]["spec"]
    [container] = spec["containers"]
    above = click.Context(cli, **cli.context_settings)
    with serve.command.make_context("serve", container["args"][1:], parent=above) as parsed:
        options = parsed.params
    mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
    assert options["record_dir"].parent in mounts
    assert options["token_file"] is None or options["token_file"].parent in mounts
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}


def test_the_fleets_state_is_on_its_claim() -> None:
    """And one pod at a time uses it."""
    found = rendered("fleet")
    deployment = kind(found, "Deployment")
    [claim] = [one for one in found if one["kind"] == "PersistentVolumeClaim"]
    volumes = {one["name"]: one for one in deployment["template"]["spec"]["volumes"]}
    assert claim["metadata"]["name"] == volumes["kvdiag-fleet"]["persistentVolumeClaim"]["claimName"]
    assert (1, "Recreate") == (deployment["replicas"], deployment["strategy"]["type"])
    assert 1 == kind(found, "PodDisruptionBudget")["maxUnavailable"]
    [volume] = kind(rendered("fleet-without-volume"), "Deployment")["template"]["spec"]["volumes"]
    assert {"name", "emptyDir"} == set(volume)


@pytest.mark.parametrize(("values", "monitor"), [("fleet", "PodMonitor"), ("fleet-without-volume", "ServiceMonitor")])
def test_the_fleets_monitor_finds_it_and_keeps_its_labels(values: str, monitor: str) -> None:
    """By labels of the pod or of the Service; `namespace` and `pod` stay the replicas'."""
    found = rendered(values)
    one = kind(found, monitor)
    [service] = [each for each in found if each["kind"] == "Service"]
    labels = service["metadata"]["labels"] if monitor == "ServiceMonitor" else None
    labels = labels or kind(found, "Deployment")["template"]["metadata"]["labels"]
    [endpoint] = one.get("endpoints") or one["podMetricsEndpoints"]
    assert one["selector"]["matchLabels"].items() <= labels.items()
    assert endpoint["honorLabels"]


def test_values_reach_the_pod() -> None:
    """A digest pins the image, and no value takes the hardening away."""
    default, other = (kind(rendered(one), "DaemonSet")["template"]["spec"] for one in ("default", "other-nodes"))
    for part in ("securityContext", "automountServiceAccountToken"):
        assert default[part] == other[part]
    [container] = other["containers"]
    assert f"registry.example.com/kvdiag:{kvdiag.__version__}@sha256:{'5' * 64}" == container["image"]
    assert default["containers"][0]["securityContext"] == container["securityContext"]
    assert "--record-max-size=512MiB" in container["args"]
    assert "runtimeClassName" not in other


def test_the_readme_has_every_value() -> None:
    """It is the template with the table of values.yaml: `python -m tests.integration.deploy.chart` writes it."""
    assert readme() == (CHART / "README.md").read_text(encoding="utf-8")


def test_the_chart_has_this_version() -> None:
    """Chart and application are released together."""
    found = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert {kvdiag.__version__} == {found["version"], found["appVersion"]}
