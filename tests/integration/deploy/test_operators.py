"""Objects of operators and values of charts: fields that exist there, and labels and ports that meet."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from tests.fixtures.require import require
from tests.integration.deploy.manifests import ROOT, Manifest, built, documents

SCHEMAS = Path(__file__).with_name("schemas")


def schema(name: str) -> Any:
    """One of the committed schemas; each says what of, and of which version."""
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def problems(name: str, value: Any) -> list[str]:
    """What a schema has against a value."""
    return [
        f"{list(error.absolute_path)}: {error.message}" for error in Draft7Validator(schema(name)).iter_errors(value)
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in SCHEMAS.iterdir()))
def test_a_schema_is_one_and_names_its_source(name: str) -> None:
    """It is a valid schema, and tells where its names are from."""
    Draft7Validator.check_schema(schema(name))
    assert " v" in schema(name)["$comment"]


@pytest.mark.parametrize(
    ("name", "path", "place"),
    [
        ("podmonitor", "kustomize/sidecar/podmonitor.yaml", 0),
        ("podmonitor", "kubernetes/daemonset.yaml", 3),
        ("inferenceservice", "charts/kserve-inferenceservice.yaml", 0),
        ("llminferenceservice", "charts/kserve-llminferenceservice.yaml", 0),
        ("compose", "compose/compose.yaml", 0),
    ],
)
def test_an_object_has_known_fields(name: str, path: str, place: int) -> None:
    """Nothing in it is unknown to the version that its schema is of."""
    value = documents(path)[place]

    assert [] == problems(name, value)
    assert problems(name, {**value, "servces": {}})


def test_the_rules_have_known_fields() -> None:
    """So has the PrometheusRule that the component brings."""
    rules = ROOT / "alerts" / "prometheusrule.yaml"
    require(rules.exists(), str(rules.relative_to(ROOT)))

    [value] = documents(rules)
    assert [] == problems("prometheusrule", value)
    assert any(group["rules"] for group in value["spec"]["groups"])


def test_the_pod_monitor_finds_what_the_component_makes() -> None:
    """Its labels are those of the patched pods, and its port is the sidecar's."""
    template = built("component")["spec"]["template"]
    monitor = documents("kustomize/sidecar/podmonitor.yaml")[0]["spec"]

    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"] for one in template["spec"]["initContainers"] for port in one.get("ports", ())}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == ports


def test_the_daemonsets_monitor_finds_its_pods() -> None:
    """The same for the DaemonSet, in its own namespace, whose rule the pods keep."""
    namespace, daemons, _, monitor = documents("kubernetes/daemonset.yaml")

    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert labels == daemons["spec"]["selector"]["matchLabels"] == monitor["spec"]["selector"]["matchLabels"]
    assert {namespace["metadata"]["name"]} == {one["metadata"]["namespace"] for one in (daemons, monitor)}


def test_a_nodes_kvdiag_misses_no_server() -> None:
    """Its targets have the label by which the alert of a server that was never seen leaves them alone."""
    (endpoint,) = documents("kubernetes/daemonset.yaml")[3]["spec"]["podMetricsEndpoints"]

    given = {one["targetLabel"]: one.get("replacement") for one in endpoint["relabelings"]}
    assert "node" == given["kvdiag_scope"]
    assert 'kvdiag_scope!="node"' in (ROOT / "alerts/alerting-rules.yaml").read_text()


@pytest.mark.parametrize(
    "labels",
    [
        documents("charts/vllm-values.yaml")[0]["labels"],
        documents("charts/llm-d-values.yaml")[0]["modelArtifacts"]["labels"],
        documents("charts/kserve-inferenceservice.yaml")[0]["spec"]["predictor"]["labels"],
        documents("charts/kserve-llminferenceservice.yaml")[0]["spec"]["labels"],
    ],
    ids=["vllm", "llm-d", "kserve", "kserve llm"],
)
def test_a_charts_pods_are_found(labels: Manifest) -> None:
    """Every platform's pods carry the label that the PodMonitor and the NetworkPolicy look for."""
    for selector in (
        documents("kustomize/sidecar/podmonitor.yaml")[0]["spec"]["selector"],
        documents("kubernetes/networkpolicy.yaml")[0]["spec"]["podSelector"],
    ):
        assert selector["matchLabels"].items() <= labels.items()


CHARTS = {
    "charts/vllm-values.yaml": {"extraInit": {"initContainers"}, "labels": {"kvdiag"}},
    "charts/llm-d-values.yaml": {
        "decode": {"extraConfig", "initContainers", "containers", "volumes"},
        "modelArtifacts": {"labels"},
    },
    "charts/production-stack/values.yaml": {"servingEngineSpec": {"modelSpec"}},
}
"""The keys that each chart's templates read: chart-vllm 0.0.1, llm-d-modelservice v0.4.12, vllm-stack 0.1.12."""


@pytest.mark.parametrize("path", CHARTS)
def test_values_use_keys_of_the_chart(path: str) -> None:
    """A key that a chart does not read would be passed over in silence."""
    values = documents(path)[0]

    assert set(CHARTS[path]) == set(values)
    for key, known in CHARTS[path].items():
        assert set(values[key]) <= known
