"""Objects of operators and values of charts: fields that exist there, and labels and ports that meet."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from tests.integration.deploy.manifests import BUILT, ROOT, Manifest, documents, node_view

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
    """Each file is a valid JSON schema and names the version that it was taken from."""
    Draft7Validator.check_schema(schema(name))
    assert " v" in schema(name)["$comment"]


@pytest.mark.parametrize(
    ("name", "path", "place"),
    [
        ("podmonitor", "kustomize/sidecar/podmonitor.yaml", 0),
        ("inferenceservice", "charts/kserve-inferenceservice.yaml", 0),
        ("llminferenceservice", "charts/kserve-llminferenceservice.yaml", 0),
        ("compose", "compose/compose.yaml", 0),
        ("rayjob", "ray/rayjob.yaml", 0),
    ],
)
def test_an_object_has_known_fields(name: str, path: str, place: int) -> None:
    """Nothing in it is unknown to the version that its schema is of."""
    value = documents(path)[place]

    assert [] == problems(name, value)
    assert problems(name, {**value, "servces": {}})


def test_the_pod_monitor_finds_what_the_component_makes() -> None:
    """Its labels are those of the patched pods, and its port is the sidecar's."""
    template = documents(BUILT / "component.yaml")[0]["spec"]["template"]
    monitor = documents("kustomize/sidecar/podmonitor.yaml")[0]["spec"]

    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"] for one in template["spec"]["initContainers"] for port in one.get("ports", ())}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == ports


def test_the_daemonsets_monitor_finds_its_pods() -> None:
    """Its targets carry the label that exempts them from the alert on servers that were never observed."""
    daemons, monitor = node_view("DaemonSet")["spec"], node_view("PodMonitor")["spec"]
    labels = daemons["template"]["metadata"]["labels"]
    assert labels == daemons["selector"]["matchLabels"] == monitor["selector"]["matchLabels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
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
