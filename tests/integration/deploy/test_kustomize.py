"""The Kustomize components: what they refer to is there, and kubectl makes of them what the tests of pods look at."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import kvdiag
from tests.fixtures.require import require
from tests.integration.deploy.chart import kubectl
from tests.integration.deploy.manifests import BUILT, COMPONENTS, DEPLOY, ROOT, Manifest, documents

KUSTOMIZATIONS = sorted(str(path.parent.relative_to(DEPLOY)) for path in DEPLOY.rglob("kustomization.yaml"))
KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images", "openapi"}
RENDERED = "rendered.yaml"
"""Made by helm, not in the repository."""

RULES = ROOT / "alerts" / "prometheusrule.yaml"


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_what_it_refers_to_is_there(folder: str) -> None:
    """Its fields are known ones, and files and folders that it names exist."""
    settings = documents(f"{folder}/kustomization.yaml")[0]
    assert set(settings) <= KNOWN
    kind = {"kustomize.config.k8s.io/v1alpha1": "Component", "kustomize.config.k8s.io/v1beta1": "Kustomization"}
    assert kind[settings["apiVersion"]] == settings["kind"]
    named = [
        *settings.get("resources", ()),
        *settings.get("components", ()),
        *(patch["path"] for patch in settings.get("patches", ())),
    ]
    missing = {name for name in named if not (DEPLOY / folder / name).exists()}
    assert missing <= {RENDERED}
    for name in settings.get("components", ()):
        assert "Component" == documents(f"{folder}/{name}/kustomization.yaml")[0]["kind"]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_a_patch_has_a_target_and_changes_pods_alone(folder: str) -> None:
    """Patches select workloads by label, under any name, and change only their pods."""
    for patch in documents(f"{folder}/kustomization.yaml")[0].get("patches", ()):
        group = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io"}.get(patch["target"]["kind"], "apps")
        assert group == patch["target"]["group"]
        assert "kvdiag=watch" == patch["target"]["labelSelector"]
        spec = documents(f"{folder}/{patch['path']}")[0]["spec"]
        assert {"template"} == set(spec) or {"leaderWorkerTemplate": {"leaderTemplate"}} == {
            name: set(part) for name, part in spec.items()
        }


@pytest.mark.parametrize("folder", ["charts/production-stack", "kustomize/example"])
def test_the_image_has_this_version(folder: str) -> None:
    """The image that is put in the place of the name has the version of this repository."""
    assert [("kvdiag", kvdiag.__version__)] == [
        (image["name"], image["newTag"]) for image in documents(f"{folder}/kustomization.yaml")[0]["images"]
    ]


@pytest.mark.parametrize("name", COMPONENTS)
def test_kubectl_builds_the_pod_that_the_tests_look_at(
    name: str, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """With what comes with it; a Deployment without the label stays as it is."""
    require(RULES.exists(), str(RULES.relative_to(ROOT)))
    other = _deployment("other", {}, "vllm")
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other), encoding="utf-8")
    components = [DEPLOY / "kustomize" / one for one in COMPONENTS[name]]
    _write(tmp_path, [DEPLOY / "kustomize" / "base", tmp_path / "other.yaml"], components)
    found = {(one["kind"], one["metadata"]["name"]): one for one in _build(tmp_path)}
    golden(f"deploy/{name}.yaml", yaml.safe_dump(found["Deployment", "vllm"], sort_keys=False))
    assert other == found["Deployment", "other"]
    assert documents("kustomize/sidecar/podmonitor.yaml")[0] == found["PodMonitor", "kvdiag"]
    assert documents(RULES)[0]["spec"] == found["PrometheusRule", "kvdiag"]["spec"]


def test_kubectl_builds_the_same_pod_in_a_statefulset_and_in_a_leader(tmp_path: Path) -> None:
    """One kustomization patches all three kinds alike; a group's other pods are unchanged."""
    deployment = documents("kustomize/base/deployment.yaml")[0]
    pod = deployment["spec"]["template"]
    group = {"size": 2, "leaderTemplate": pod, "workerTemplate": {"spec": pod["spec"]}}
    stateful = deployment | {"kind": "StatefulSet", "spec": deployment["spec"] | {"serviceName": "vllm"}}
    leading = deployment | {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "spec": {"replicas": 1, "leaderWorkerTemplate": group},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump_all([deployment, stateful, leading]), encoding="utf-8")
    components = [DEPLOY / "kustomize" / name for name in ("component", "leaderworkerset")]
    _write(tmp_path, [tmp_path / "own.yaml"], components)
    found = {manifest["kind"]: manifest["spec"] for manifest in _build(tmp_path)}
    built_group = found["LeaderWorkerSet"]["leaderWorkerTemplate"]
    expected = documents(BUILT / "component.yaml")[0]["spec"]["template"]
    templates = (found["Deployment"]["template"], found["StatefulSet"]["template"], built_group["leaderTemplate"])
    assert [expected] * 3 == list(templates)
    assert group["workerTemplate"] == built_group["workerTemplate"]


def test_name_and_port_of_the_server_are_set_in_one_file(tmp_path: Path) -> None:
    """As the README says: the sidecar, and a changed copy of the file with both parameters."""
    text = (DEPLOY / "kustomize" / "component" / "server.yaml").read_text(encoding="utf-8")
    assert (1, 1) == (text.count("- name: vllm\n"), text.count(":8000"))
    own = text.replace("- name: vllm\n", "- name: server\n").replace(":8000", ":8080")
    (tmp_path / "server.yaml").write_text(own, encoding="utf-8")
    manifest = _deployment("mine", {"kvdiag": "watch"}, "server") | {"kind": "StatefulSet"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(manifest), encoding="utf-8")
    _write(tmp_path, [tmp_path / "own.yaml"], [DEPLOY / "kustomize" / "sidecar"])
    target = {"group": "apps", "kind": "StatefulSet", "labelSelector": "kvdiag=watch"}
    settings = yaml.safe_load((tmp_path / "kustomization.yaml").read_text(encoding="utf-8"))
    settings["patches"] = [{"path": "server.yaml", "target": target}]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    pod = next(each for each in _build(tmp_path) if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    assert ["server"] == [one["name"] for one in pod["containers"]]
    assert {"HF_HOME", "KVDIAG_AGENT_DIR", "PYTHONPATH"} == {one["name"] for one in pod["containers"][0]["env"]}
    watching = next(one for one in pod["initContainers"] if one["name"] == "kvdiag")
    assert [{"name": "KVDIAG_SERVE_URL", "value": "http://127.0.0.1:8080"}] == watching["env"]


def test_kubectl_builds_the_example() -> None:
    """What the README says to apply can be applied."""
    require(RULES.exists(), str(RULES.relative_to(ROOT)))
    images = {
        one["image"]
        for manifest in _build(DEPLOY / "kustomize" / "example")
        if manifest["kind"] == "Deployment"
        for one in manifest["spec"]["template"]["spec"]["initContainers"]
    }
    assert {f"registry.example.com/kvdiag:{kvdiag.__version__}"} == images


def test_a_rendered_production_stack_is_patched(tmp_path: Path) -> None:
    """An engine as the chart renders it (env there, no init containers) gets the sidecar; the router stays."""
    require(RULES.exists(), str(RULES.relative_to(ROOT)))
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    shutil.copytree(ROOT / "alerts", tmp_path / "alerts")
    folder = tmp_path / "deploy" / "charts" / "production-stack"
    values = documents("charts/production-stack/values.yaml")[0]
    spec = values["servingEngineSpec"]["modelSpec"][0]
    engine = _deployment(f"stack-{spec['name']}-deployment-vllm", spec["labels"], "vllm")
    router = _deployment("stack-deployment-router", {"environment": "router"}, "router-container")
    (folder / RENDERED).write_text(yaml.safe_dump_all([engine, router]), encoding="utf-8")

    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in _build(folder)
        if one["kind"] == "Deployment"
    }

    assert router["spec"]["template"]["spec"] == pods["stack-deployment-router"]
    watched = pods[engine["metadata"]["name"]]
    assert ["kvdiag-agent", "kvdiag"] == [one["name"] for one in watched["initContainers"]]
    assert {"KVDIAG_AGENT_DIR", "PYTHONPATH", "HF_HOME"} == {one["name"] for one in watched["containers"][0]["env"]}


def _deployment(name: str, labels: dict[str, str], container: str) -> Manifest:
    template = {
        "metadata": {"labels": {"model": "qwen"}},
        "spec": {"containers": [{"name": container, "image": "x:1", "env": [{"name": "HF_HOME", "value": "/data"}]}]},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": {"matchLabels": {"model": "qwen"}}, "template": template},
    }


def _write(folder: Path, resources: list[Path], components: list[Path]) -> None:
    settings = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(path, folder) for path in resources],
        "components": [os.path.relpath(path, folder) for path in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


def _build(folder: Path) -> list[Manifest]:
    done = kubectl("kustomize", folder)
    assert 0 == done.returncode, done.stderr
    return list(yaml.safe_load_all(done.stdout))
